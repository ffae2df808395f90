"""The policy's own sample at a position: Gumbel-max in two levels, with noise that only the position determines.

Flat Gumbel-max takes argmax_v(z_v + G_v) and needs one draw per vocabulary entry. Here the vocabulary is cut into
blocks of ``BLOCK`` entries. The block is argmax_b(logsumexp(z_b) + G_b); inside it the token is argmax_s(z_s + G'_s).
P(block) = exp(lse_b - lse) and P(token | block) = exp(z - lse_b), so the product is the softmax, exactly, from
V / BLOCK + BLOCK draws instead of V. G' may be the same for every block because only one block reads it.
"""

import torch

from paceline.sampling import kernels
from paceline.sampling.noise import Purpose, gumbels

BLOCK = 256


def block_logsumexp(logits_NV: torch.Tensor) -> torch.Tensor:
    """log-sum-exp of each vocabulary block, (N, ceil(V / BLOCK)), in the dtype of the logits, at least float32."""
    if kernels.serve(logits_NV):
        from paceline.sampling.kernels import launch

        return launch.block_logsumexp(logits_NV)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    n, vocabulary = logits_NV.shape
    whole = vocabulary // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(torch.logsumexp(logits_NV[:, :whole].view(n, -1, BLOCK), dim=-1))
    if whole < vocabulary:
        parts.append(torch.logsumexp(logits_NV[:, whole:], dim=-1, keepdim=True))
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def keyed_sample(
    logits_NV: torch.Tensor,
    blocks_NG: torch.Tensor,
    run_seed: int,
    request_seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample softmax(logits) with the noise of each (request, position).

    ``blocks_NG`` is ``block_logsumexp(logits_NV)``. Returns the tokens (N,) int64 and the margins (N,) float64: the
    smaller gap between the two best scores of either level. A token changes only if the logits move by half of it.
    """
    if kernels.serve(logits_NV):
        from paceline.sampling.kernels import launch

        return launch.keyed_sample(logits_NV, blocks_NG, run_seed, request_seeds_N, positions_N)
    noise = _noise(logits_NV, run_seed, request_seeds_N, positions_N, (Purpose.BLOCK, Purpose.TOKEN), 1)
    return _pick(logits_NV, blocks_NG, *noise)


def coupled_candidates(
    logits_NV: torch.Tensor, run_seed: int, request_seeds_N: torch.Tensor, positions_N: torch.Tensor, count: int
) -> torch.Tensor:
    """The ``count`` tokens that the policy's sample is likeliest to be if its logits are near these: (N, count) int64.

    The first is the keyed sample of softmax(logits) with the policy's own noise. The others follow by how far they
    stay behind it: the gap of their block to the best block plus their gap to the best token of their block.
    """
    blocks_NG = block_logsumexp(logits_NV)
    if count == 1:
        return keyed_sample(logits_NV, blocks_NG, run_seed, request_seeds_N, positions_N)[0][:, None]
    purposes = (Purpose.BLOCK, Purpose.TOKEN)
    block_noise_NG, token_noise_NS = _noise(logits_NV, run_seed, request_seeds_N, positions_N, purposes, 1)
    near = (blocks_NG.double() + block_noise_NG).topk(min(count, blocks_NG.shape[1]), dim=-1)
    ids_NKS = near.indices[..., None] * BLOCK + torch.arange(token_noise_NS.shape[1], device=logits_NV.device)
    score_NKS = _inside(logits_NV, ids_NKS.flatten(1)).view(ids_NKS.shape) + token_noise_NS[:, None]
    inside = score_NKS.topk(min(count, score_NKS.shape[-1]), dim=-1)
    behind_NKC = (near.values[:, :1] - near.values)[..., None] + inside.values[..., :1] - inside.values
    behind_NK = behind_NKC.nan_to_num_(nan=torch.inf, posinf=torch.inf).flatten(1)
    order_NC = behind_NK.argsort(dim=-1, stable=True)[:, :count]
    tokens_NC = ids_NKS.gather(2, inside.indices).flatten(1).gather(1, order_NC)
    # A token that the law excludes is no candidate.
    return tokens_NC.masked_fill(behind_NK.gather(1, order_NC).isinf(), -1)


def draw_candidates(
    logits_NV: torch.Tensor, run_seed: int, request_seeds_N: torch.Tensor, keys_N: torch.Tensor, count: int
) -> torch.Tensor:
    """``count`` draws from softmax(logits) without replacement, in order: (N, count) int64, -1 once no token is left.

    ``keys_N`` are ``noise.draft_position``s. The noise is the drafter's own stream, which no verifier reads.
    """
    logits_NV = logits_NV.clone()
    purposes = (Purpose.DRAFT_BLOCK, Purpose.DRAFT_TOKEN)
    noise = None
    if not kernels.serve(logits_NV):
        noise = [n.chunk(count, 1) for n in _noise(logits_NV, run_seed, request_seeds_N, keys_N, purposes, count)]
    drawn = []
    for draw in range(count):
        blocks_NG = block_logsumexp(logits_NV)
        if noise is None:
            from paceline.sampling.kernels import launch

            token_N, _ = launch.keyed_sample(logits_NV, blocks_NG, run_seed, request_seeds_N, keys_N, purposes, draw)
        else:
            token_N, _ = _pick(logits_NV, blocks_NG, noise[0][draw], noise[1][draw])
        drawn.append(token_N.masked_fill(blocks_NG.amax(-1) == -torch.inf, -1))
        logits_NV.scatter_(1, token_N[:, None], -torch.inf)
    return torch.stack(drawn, dim=1)


def _noise(
    logits_NV: torch.Tensor,
    run_seed: int,
    request_seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
    purposes: tuple[Purpose, Purpose],
    times: int,
) -> list[torch.Tensor]:
    """Gumbel noise of both levels, (N, times * blocks) and (N, times * entries of a block)."""
    vocabulary = logits_NV.shape[1]
    counts = (-(-vocabulary // BLOCK) * times, min(BLOCK, vocabulary) * times)
    return gumbels(run_seed, request_seeds_N, positions_N, dict(zip(purposes, counts, strict=True)))


def _pick(
    logits_NV: torch.Tensor, blocks_NG: torch.Tensor, block_noise_NG: torch.Tensor, token_noise_NS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block that wins, the token that wins inside it, and the smaller lead."""
    block_N, block_gap_N = _best(blocks_NG.double() + block_noise_NG)
    ids_NS = block_N[:, None] * BLOCK + torch.arange(token_noise_NS.shape[1], device=logits_NV.device)
    offset_N, token_gap_N = _best(_inside(logits_NV, ids_NS) + token_noise_NS)
    return block_N * BLOCK + offset_N, torch.minimum(block_gap_N, token_gap_N)


def _inside(logits_NV: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """The logits of some ids in float64; ids beyond the vocabulary have -inf."""
    vocabulary = logits_NV.shape[1]
    inside_NK = logits_NV.gather(1, ids_NK.clamp(max=vocabulary - 1)).double()
    return inside_NK.masked_fill_(ids_NK >= vocabulary, -torch.inf)


def greedy_sample(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit's token (the lowest id among equals) and its lead over the second, (N,) int64 and float64."""
    _, gap_N = _best(logits_NV)
    return logits_NV.argmax(dim=-1), gap_N


def _best(score_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if score_NK.shape[1] == 1:
        zero = torch.zeros(score_NK.shape[0], dtype=torch.int64, device=score_NK.device)
        return zero, torch.full(zero.shape, torch.inf, dtype=torch.float64, device=score_NK.device)
    values, indices = score_NK.topk(2, dim=-1)
    # Two masked entries leave -inf minus -inf; nothing can overtake then.
    gap = (values[:, 0] - values[:, 1]).double().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return indices[:, 0], gap

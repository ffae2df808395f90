"""The policy's own sample at a position: Gumbel-max in two levels, with noise that only the position determines.

Flat Gumbel-max takes argmax_v(z_v + G_v) and needs one draw per vocabulary entry. Here the vocabulary is cut into
blocks of ``BLOCK`` entries. The block is argmax_b(logsumexp(z_b) + G_b); inside it the token is argmax_s(z_s + G'_s).
P(block) = exp(lse_b - lse) and P(token | block) = exp(z - lse_b), so the product is the softmax, exactly, from
V / BLOCK + BLOCK draws instead of V. G' may be the same for every block because only one block reads it.
"""

import torch

from paceline.sampling.noise import Purpose, gumbels

BLOCK = 256


def block_logsumexp(logits_NV: torch.Tensor) -> torch.Tensor:
    """log-sum-exp of each vocabulary block, (N, ceil(V / BLOCK)), in the dtype of the logits."""
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
    vocabulary = logits_NV.shape[1]
    draws = {Purpose.BLOCK: blocks_NG.shape[1], Purpose.TOKEN: min(BLOCK, vocabulary)}
    block_noise_NG, token_noise_NS = gumbels(run_seed, request_seeds_N, positions_N, draws)
    block_N, block_gap_N = _best(blocks_NG.double() + block_noise_NG)
    ids_NS = block_N[:, None] * BLOCK + torch.arange(token_noise_NS.shape[1], device=logits_NV.device)
    inside_NS = logits_NV.gather(1, ids_NS.clamp(max=vocabulary - 1)).double()
    inside_NS = inside_NS.masked_fill_(ids_NS >= vocabulary, -torch.inf)
    offset_N, token_gap_N = _best(inside_NS + token_noise_NS)
    return block_N * BLOCK + offset_N, torch.minimum(block_gap_N, token_gap_N)


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
    gap = (values[:, 0] - values[:, 1]).double().nan_to_num_(nan=torch.inf)
    return indices[:, 0], gap

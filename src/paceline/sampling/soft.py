"""Acceptance of drafts that were drawn from a distribution: rejection, without replacement in trees, and block.

Both keep the law of the policy, not its tokens. A verifier decides with probabilities that this module computes in log
space; the uniforms that it compares them with have a purpose of their own (``noise.Purpose.ACCEPT``).

Rejection (Leviathan et al., ICML 2023; Chen et al., 2023): a token x drawn from q is kept with probability min(1, r(x)
/ q(x)), where r is the policy's law p; once rejected, r becomes the residual max(r - q, 0), normalised. Further
children of the node, drawn from q without replacement, are tried in the same way with q less what was drawn before
(Jeon et al., "Recursive speculative decoding", 2024). Where all are rejected, the token is drawn from r.

Block verification (Sun et al., ICLR 2025) decides about a chain as a whole: with p_0 = 1 and p_i = min(1, p_{i-1}
p(x_i) / q(x_i)), the longest prefix i is kept whose uniform is below h_i = s_i / (s_i + 1 - p_i), where s_i is the sum
over v of max(p_i p(v) - q(v), 0), and h_i = p_i at the chain's end. The next token is drawn from max(p_i p - q, 0),
normalised.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling.keyed import block_logsumexp, keyed_sample

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SoftNodes:
    """M drafted nodes among the N positions of a pass, and what they were drawn from.

    ``node_M`` and ``parent_M`` are positions of the pass, ``law_M`` rows of ``laws_LV``, ``rank_M`` the order in which
    the children of one parent are tried.
    """

    node_M: Indices
    parent_M: Indices
    token_M: Indices
    law_M: Indices
    rank_M: Indices
    laws_LV: torch.Tensor


@dataclass(frozen=True)
class Laws:
    """With which probability each node is kept, and what is drawn from where none is.

    ``log_accept_M``: for rejection, of keeping the node where its parent is reached and the children tried before it
    were rejected; for block acceptance, of keeping the chain up to the node (h). NaN marks a token that its own law
    excludes. ``residual_PV`` are the normalised log-probabilities of the token after position ``parent_P`` then.
    """

    log_accept_M: torch.Tensor
    parent_P: torch.Tensor
    residual_PV: torch.Tensor

    def sample(
        self, run_seed: int, request_seeds_P: torch.Tensor, positions_P: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``keyed_sample`` of the residuals: tokens and margins, (P,)."""
        blocks_PG = block_logsumexp(self.residual_PV)
        return keyed_sample(self.residual_PV, blocks_PG, run_seed, request_seeds_P, positions_P)


def rejection_laws(logits_NV: torch.Tensor, soft: SoftNodes) -> Laws:
    """The laws of rejection, children of one node tried in the order of their ranks."""
    device = logits_NV.device
    parents, slots = np.unique(soft.parent_M, return_inverse=True)
    parent_P = torch.from_numpy(parents).to(device)
    dtype = _dtype(logits_NV, soft.laws_LV)
    residual_PV = torch.log_softmax(logits_NV[parent_P].to(dtype), dim=-1)
    # What is left of a law, by the parent whose children were drawn from it: rows may be shared.
    drawn_from, urns = np.unique(np.stack([soft.parent_M, soft.law_M]), axis=1, return_inverse=True)
    law_Q = torch.from_numpy(drawn_from[1]).to(device)
    left_QV = torch.log_softmax(soft.laws_LV.to(device, dtype)[law_Q], dim=-1)
    log_accept_M = torch.empty(len(soft.node_M), dtype=torch.float64, device=device)
    last = int(soft.rank_M.max())
    for rank in range(last + 1):
        tried = np.flatnonzero(soft.rank_M == rank)
        slot_K, urn_K, token_K1 = (
            torch.from_numpy(index[tried]).to(device) for index in (slots, urns, soft.token_M[:, None])
        )
        r_KV, q_KV = residual_PV[slot_K], left_QV[urn_K]
        q_K = q_KV.gather(1, token_K1)[:, 0]
        ratio_K = (r_KV.gather(1, token_K1)[:, 0] - q_K).clamp(max=0).masked_fill(q_K == -torch.inf, torch.nan)
        log_accept_M[torch.from_numpy(tried).to(device)] = ratio_K.double()
        residual_PV[slot_K] = _residual(r_KV, q_KV, r_KV)[0]
        if rank < last:
            left_QV[urn_K] = torch.log_softmax(q_KV.scatter(1, token_K1, -torch.inf), dim=-1)
    return Laws(log_accept_M, parent_P, residual_PV)


def block_laws(logits_NV: torch.Tensor, soft: SoftNodes, chain_M: Indices, depth_M: Indices) -> Laws:
    """The laws of block acceptance: node m belongs to chain ``chain_M[m]``, at depth ``depth_M[m]`` (1: the first).

    A law of -1 stands for a point mass on the node's token.
    """
    device = logits_NV.device
    dtype = _dtype(logits_NV, soft.laws_LV)
    parent_M, token_M1, law_M = (
        torch.from_numpy(index).to(device) for index in (soft.parent_M, soft.token_M[:, None], soft.law_M)
    )
    p_MV = torch.log_softmax(logits_NV[parent_M].to(dtype), dim=-1)
    point_MV = torch.full_like(p_MV, -torch.inf).scatter_(1, token_M1, 0.0)
    q_MV = point_MV
    if len(soft.laws_LV):
        laws_LV = torch.log_softmax(soft.laws_LV.to(device, dtype), dim=-1)
        q_MV = torch.where((law_M < 0)[:, None], point_MV, laws_LV[law_M.clamp(min=0)])
    q_M = q_MV.gather(1, token_M1)[:, 0]
    ratio_M = (p_MV.gather(1, token_M1)[:, 0] - q_M).double().masked_fill(q_M == -torch.inf, torch.nan)
    prefixes = chain_prefixes(ratio_M, chain_M, depth_M)
    residual_MV, log_s_M = _residual(p_MV + prefixes.before_M[:, None].to(dtype), q_MV, p_MV)
    return Laws(chain_accept(prefixes, log_s_M, ratio_M), parent_M, residual_MV)


@dataclass(frozen=True)
class Prefixes:
    """log p_i of every prefix of C chains, and where each of the M nodes and the one before it stand."""

    kept_CI: torch.Tensor
    at: tuple[torch.Tensor, torch.Tensor]
    before_M: torch.Tensor


def chain_prefixes(log_ratio_M: torch.Tensor, chain_M: Indices, depth_M: Indices) -> Prefixes:
    """p_i from the nodes' log p(x) / q(x): a walk of these steps that is reflected at 0, all chains side by side."""
    device = log_ratio_M.device
    chains, slots = np.unique(chain_M, return_inverse=True)
    at = torch.from_numpy(slots).to(device), torch.from_numpy(depth_M).to(device)
    step_CI = torch.zeros((len(chains), int(depth_M.max()) + 1), dtype=torch.float64, device=device)
    step_CI[at] = log_ratio_M
    walk_CI = step_CI.cumsum(1)
    kept_CI = walk_CI - walk_CI.cummax(1).values.clamp(min=0)
    return Prefixes(kept_CI, at, kept_CI[at[0], at[1] - 1])


def chain_accept(prefixes: Prefixes, log_s_M: torch.Tensor, log_ratio_M: torch.Tensor) -> torch.Tensor:
    """log h of each node's prefix, (M,) float64; ``log_s_M`` belongs to the prefix that ends before the node."""
    slot_M, depth_M = prefixes.at
    log_rejected_M = torch.log(-torch.expm1(prefixes.before_M))
    # h belongs to the node above: the one whose child m is.
    log_h_CI = prefixes.kept_CI.clone()
    log_h_CI[slot_M, depth_M - 1] = (log_s_M - torch.logaddexp(log_s_M, log_rejected_M)).nan_to_num_(nan=-torch.inf)
    return log_h_CI[prefixes.at].masked_fill(log_ratio_M.isnan(), torch.nan)


def _dtype(logits_NV: torch.Tensor, laws_LV: torch.Tensor) -> torch.dtype:
    """The dtype that holds both, at least float32."""
    return torch.promote_types(torch.promote_types(logits_NV.dtype, laws_LV.dtype), torch.float32)


def _residual(r_KV: torch.Tensor, q_KV: torch.Tensor, otherwise_KV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log of max(e^r - e^q, 0), normalised, and its log-sum in float64; ``otherwise`` where nothing is left.

    Nothing is left only where q covers r everywhere, and then a drawn token is rejected with probability 0.
    """
    rest_KV = torch.where(r_KV > q_KV, r_KV + torch.log(-torch.expm1(q_KV - r_KV)), -torch.inf)
    total_K1 = torch.logsumexp(rest_KV, dim=-1, keepdim=True)
    residual_KV = torch.where(total_K1 == -torch.inf, otherwise_KV, rest_KV - total_K1)
    return residual_KV, total_K1[:, 0].double()

"""The kernels as functions of tensors: block sums, the keyed sample, and the laws of drafts that were drawn."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from paceline.sampling.kernels import device
from paceline.sampling.keyed import BLOCK
from paceline.sampling.noise import Purpose, signed32, stream
from paceline.sampling.soft import Indices, SoftNodes, chain_accept, chain_prefixes

#: Vocabulary blocks that one program sums; no launch depends on how many rows there are, so no row's result does.
_TILE = 8


def block_logsumexp(logits_NV: torch.Tensor) -> torch.Tensor:
    """``keyed.block_logsumexp``; half precision is read as float32."""
    return _sums(logits_NV, len(logits_NV), _compute(logits_NV.dtype), _unused(logits_NV))


def keyed_sample(
    logits_NV: torch.Tensor,
    blocks_NG: torch.Tensor,
    run_seed: int,
    request_seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
    purposes: tuple[Purpose, Purpose] = (Purpose.BLOCK, Purpose.TOKEN),
    draw: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``keyed.keyed_sample`` in one launch; ``draw`` is how many samples before it took noise of these purposes."""
    return _pick(
        logits_NV, blocks_NG, run_seed, request_seeds_N, positions_N, purposes, draw, _unused(logits_NV), blocks_NG
    )


@dataclass(frozen=True)
class FusedLaws:
    """``soft.Laws`` whose residuals are known by their block sums alone, (P, blocks); entries follow when sampled."""

    log_accept_M: torch.Tensor
    parent_P: torch.Tensor
    rest_PG: torch.Tensor
    logits_NV: torch.Tensor
    blocks_NG: torch.Tensor
    pairs: dict[str, Any]

    def sample(
        self, run_seed: int, request_seeds_P: torch.Tensor, positions_P: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``keyed_sample`` of the residuals: tokens and margins, (P,)."""
        purposes = (Purpose.BLOCK, Purpose.TOKEN)
        return _pick(
            self.logits_NV, self.blocks_NG, run_seed, request_seeds_P, positions_P, purposes, 0, self.pairs,
            self.rest_PG,
        )  # fmt: skip


def rejection_laws(logits_NV: torch.Tensor, blocks_NG: torch.Tensor, soft: SoftNodes) -> FusedLaws:
    """``soft.rejection_laws`` where no node has a sibling; ``blocks_NG`` are the logits' block sums."""
    log_ratio_M, p_total_M, pairs = _pairs(logits_NV, blocks_NG, soft)
    rest_MG, pairs = _rest(logits_NV, soft, pairs, -p_total_M)
    return FusedLaws(log_ratio_M.clamp(max=0), pairs["row_ptr"], rest_MG, logits_NV, blocks_NG, pairs)


def block_laws(
    logits_NV: torch.Tensor, blocks_NG: torch.Tensor, soft: SoftNodes, chain_M: Indices, depth_M: Indices
) -> FusedLaws:
    """``soft.block_laws``; ``blocks_NG`` are the logits' block sums."""
    log_ratio_M, p_total_M, pairs = _pairs(logits_NV, blocks_NG, soft)
    prefixes = chain_prefixes(log_ratio_M, chain_M, depth_M)
    rest_MG, pairs = _rest(logits_NV, soft, pairs, prefixes.before_M - p_total_M)
    log_accept_M = chain_accept(prefixes, torch.logsumexp(rest_MG.double(), dim=-1), log_ratio_M)
    return FusedLaws(log_accept_M, pairs["row_ptr"], rest_MG, logits_NV, blocks_NG, pairs)


def _pairs(
    logits_NV: torch.Tensor, blocks_NG: torch.Tensor, soft: SoftNodes
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """log p(x) / q(x) of each node's token (NaN where q excludes it), p's log-total, and where p and q are found."""
    on = logits_NV.device
    parent_M, token_M, law_M = (torch.from_numpy(index).to(on) for index in (soft.parent_M, soft.token_M, soft.law_M))
    laws_LV = _rows(soft.laws_LV.to(on))
    q_total_L = torch.logsumexp(block_logsumexp(laws_LV).double(), dim=-1)
    p_total_M = torch.logsumexp(blocks_NG[parent_M].double(), dim=-1)
    is_point_M, some_law_M = law_M < 0, law_M.clamp(min=0)
    q_shift_M = -q_total_L[some_law_M]
    log_p_M = logits_NV[parent_M, token_M].double() - p_total_M
    log_q_M = (laws_LV[some_law_M, token_M].double() + q_shift_M).masked_fill(is_point_M, 0.0)
    log_ratio_M = (log_p_M - log_q_M).masked_fill(log_q_M == -torch.inf, torch.nan)
    pairs = {
        "row_ptr": parent_M, "laws_ptr": laws_LV, "laws_stride": laws_LV.stride(0), "law_ptr": law_M,
        "q_shift_ptr": q_shift_M, "token_ptr": token_M,
    }  # fmt: skip
    return log_ratio_M, p_total_M, pairs


def _rest(
    logits_NV: torch.Tensor, soft: SoftNodes, pairs: dict[str, Any], p_shift_M: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    dtype = _compute(torch.promote_types(logits_NV.dtype, soft.laws_LV.dtype))
    # Below 2**-53 of x, float64's series ends after 17 terms of expm1, float32's after 9.
    pairs = {**pairs, "p_shift_ptr": p_shift_M, "RESIDUAL": True, "TERMS": 16 if dtype == torch.float64 else 8}
    return _sums(logits_NV, len(p_shift_M), dtype, pairs), pairs


def _unused(logits_NV: torch.Tensor) -> dict[str, Any]:
    """Arguments of a residual for a launch that has none."""
    pointers = dict.fromkeys(("row_ptr", "p_shift_ptr", "laws_ptr", "law_ptr", "q_shift_ptr", "token_ptr"), logits_NV)
    return {**pointers, "laws_stride": 0, "RESIDUAL": False, "TERMS": 1}


def _sums(logits_NV: torch.Tensor, count: int, dtype: torch.dtype, pairs: dict[str, Any]) -> torch.Tensor:
    logits_NV = _rows(logits_NV)
    vocabulary = logits_NV.shape[1]
    groups = -(-vocabulary // BLOCK)
    out_MG = torch.empty((count, groups), dtype=dtype, device=logits_NV.device)
    with torch.cuda.device_of(logits_NV):
        device.sums[(count, triton.cdiv(groups, _TILE))](
            logits_NV, logits_NV.stride(0), out_MG, vocabulary, groups, TILE=_TILE, BLOCK=BLOCK, **pairs
        )
    return out_MG


def _pick(
    logits_NV: torch.Tensor,
    blocks_NG: torch.Tensor,
    run_seed: int,
    seeds_M: torch.Tensor,
    positions_M: torch.Tensor,
    purposes: tuple[Purpose, Purpose],
    draw: int,
    pairs: dict[str, Any],
    rest_MG: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV, blocks_NG = _rows(logits_NV), blocks_NG.contiguous()
    vocabulary, groups = logits_NV.shape[1], blocks_NG.shape[1]
    count = len(seeds_M)
    token_M = torch.empty(count, dtype=torch.int64, device=logits_NV.device)
    margin_M = torch.empty(count, dtype=torch.float64, device=logits_NV.device)
    with torch.cuda.device_of(logits_NV):
        device.pick[(count,)](
            logits_NV, logits_NV.stride(0), blocks_NG, vocabulary, groups,
            seeds_M.contiguous(), positions_M.contiguous(), signed32(run_seed), signed32(run_seed >> 32),
            draw * groups, draw * min(BLOCK, vocabulary), token_M, margin_M, rest_ptr=rest_MG,
            BLOCK_STREAM=stream(purposes[0]), TOKEN_STREAM=stream(purposes[1]),
            GROUPS=max(32, triton.next_power_of_2(groups)), BLOCK=BLOCK, **pairs,
        )  # fmt: skip
    return token_M, margin_M


def _rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """The same rows with entries side by side."""
    return logits_NV if logits_NV.stride(1) == 1 or logits_NV.shape[1] == 1 else logits_NV.contiguous()


def _compute(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: at least float32."""
    return torch.promote_types(dtype, torch.float32)

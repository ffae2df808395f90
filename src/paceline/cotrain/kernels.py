"""Attention that says its log-sum-exp, and its backward from a given one: torch's private kernels, or dense matrices.

A part of an attention is right for itself; parts are merged by their log-sum-exp, and the backward of each part, given
the joint output and the joint log-sum-exp, is its share of the joint gradient.
"""

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def attend(query_NHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output (N, H, D) and log-sum-exp (N, H) of N queries over M keys, of which each serves H / K heads.

    With ``causal`` query i sees the keys up to i: N and M are the same then, since kernels align a rectangle's diagonal
    differently. Neither may be 0. The log-sum-exp is float32 at least.
    """
    if not (query_NHD.shape[0] and key_MKD.shape[0]) or (causal and query_NHD.shape[0] != key_MKD.shape[0]):
        raise ValueError(f"{len(query_NHD)} queries over {len(key_MKD)} keys, causal {causal}: the kernels cannot")
    if not has_kernel(query_NHD, value_MKD):
        return dense(query_NHD, key_MKD, value_MKD, causal, scale)
    if query_NHD.device.type != "cpu":
        return varlen(query_NHD, key_MKD, value_MKD, causal, scale)
    query, key, value = (x.transpose(0, 1)[None] for x in (query_NHD, key_MKD, value_MKD))
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def attend_backward(
    grad_NHD: Tensor,
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    out_NHD: Tensor,
    lse_NH: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value where ``out_NHD`` and ``lse_NH`` may be those of a larger attention."""
    if not has_kernel(query_NHD, value_MKD):
        return dense_backward(grad_NHD, query_NHD, key_MKD, value_MKD, out_NHD, lse_NH, causal, scale)
    if query_NHD.device.type != "cpu":
        return varlen_backward(grad_NHD, query_NHD, key_MKD, value_MKD, out_NHD, lse_NH, causal, scale)
    laid_out = (x.transpose(0, 1)[None] for x in (grad_NHD, query_NHD, key_MKD, value_MKD, out_NHD))
    grad, query, key, value, out = laid_out
    lse = lse_NH.transpose(0, 1)[None]
    grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, causal, scale=scale
    )
    query_grad, key_grad, value_grad = (x[0].transpose(0, 1) for x in grads)
    return query_grad, key_grad, value_grad


def has_kernel(query_NHD: Tensor, value_MKD: Tensor) -> bool:
    """Whether there is a kernel for such heads; else matrices of N x M scores are made."""
    sizes = query_NHD.shape[-1] == value_MKD.shape[-1]
    if query_NHD.device.type == "cpu":
        return sizes and hasattr(_ATEN, "_scaled_dot_product_flash_attention_for_cpu_backward")
    # CUDA's flash kernel takes half precision; query heads may share those of keys.
    fits = query_NHD.dtype in _HALF and query_NHD.shape[-1] % 8 == 0 and query_NHD.shape[-1] <= 256
    return sizes and fits and query_NHD.device.type == "cuda" and hasattr(_ATEN, "_flash_attention_backward")


def varlen(query_NHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """``attend`` by CUDA's flash kernel for packed sequences, of which this is one: it takes the layout as it is."""
    out_NHD, lse_HN, *_ = _ATEN._flash_attention_forward(
        query_NHD, key_MKD, value_MKD, *_one_sequence(query_NHD, key_MKD), 0.0, causal, False, scale=scale
    )
    return out_NHD, lse_HN.transpose(0, 1)


def varlen_backward(
    grad_NHD: Tensor,
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    out_NHD: Tensor,
    lse_NH: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_backward`` by the same kernel."""
    # Without dropout the kernel draws nothing, and reads neither of these.
    state = torch.zeros(2, dtype=torch.uint64, device=query_NHD.device)
    unused = torch.empty(0, device=query_NHD.device)
    given = (grad_NHD.contiguous(), query_NHD, key_MKD, value_MKD, out_NHD, lse_NH.transpose(0, 1).contiguous())
    query_grad, key_grad, value_grad = _ATEN._flash_attention_backward(
        *given, *_one_sequence(query_NHD, key_MKD), 0.0, causal, state, unused, scale=scale
    )
    return query_grad, key_grad, value_grad


def _one_sequence(query_NHD: Tensor, key_MKD: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Where the sequences of queries and of keys begin and end, and the longest of each."""
    queries, keys = len(query_NHD), len(key_MKD)
    bounds_2, key_bounds_2 = (
        torch.tensor([0, count], dtype=torch.int32, device=query_NHD.device) for count in (queries, keys)
    )
    return bounds_2, key_bounds_2, queries, keys


def dense(query_NHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """``attend`` by matrices."""
    groups = query_NHD.shape[1] // key_MKD.shape[1]
    scores_HNM = _scores(query_NHD, key_MKD, causal, scale)
    lse_HN = scores_HNM.logsumexp(-1)
    weights_HNM = (scores_HNM - lse_HN[..., None]).exp()
    out_HND = weights_HNM @ _spread(value_MKD, groups).to(scores_HNM.dtype)
    return out_HND.transpose(0, 1).to(query_NHD.dtype), lse_HN.transpose(0, 1)


def dense_backward(
    grad_NHD: Tensor,
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    out_NHD: Tensor,
    lse_NH: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_backward`` by matrices."""
    groups = query_NHD.shape[1] // key_MKD.shape[1]
    scores_HNM = _scores(query_NHD, key_MKD, causal, scale)
    dtype = scores_HNM.dtype
    weights_HNM = (scores_HNM - lse_NH.transpose(0, 1)[..., None]).exp()
    grad_HND, out_HND = grad_NHD.transpose(0, 1).to(dtype), out_NHD.transpose(0, 1).to(dtype)
    towards_HNM = grad_HND @ _spread(value_MKD, groups).to(dtype).mT - (grad_HND * out_HND).sum(-1, keepdim=True)
    scores_grad_HNM = weights_HNM * towards_HNM * scale
    query_grad = (scores_grad_HNM @ _spread(key_MKD, groups).to(dtype)).transpose(0, 1)
    key_grad = _gather(scores_grad_HNM.mT @ query_NHD.transpose(0, 1).to(dtype), groups)
    value_grad = _gather(weights_HNM.mT @ grad_HND, groups)
    return query_grad.to(query_NHD.dtype), key_grad.to(key_MKD.dtype), value_grad.to(value_MKD.dtype)


def _scores(query_NHD: Tensor, key_MKD: Tensor, causal: bool, scale: float) -> Tensor:
    dtype = torch.promote_types(query_NHD.dtype, torch.float32)
    groups = query_NHD.shape[1] // key_MKD.shape[1]
    scores_HNM = query_NHD.transpose(0, 1).to(dtype) @ _spread(key_MKD, groups).to(dtype).mT * scale
    if not causal:
        return scores_HNM
    later_NM = torch.ones(scores_HNM.shape[1:], dtype=torch.bool, device=scores_HNM.device).triu(1)
    return scores_HNM.masked_fill(later_NM, -torch.inf)


def _spread(side_MKD: Tensor, groups: int) -> Tensor:
    """Keys or values by query head, (H, M, D)."""
    return side_MKD.transpose(0, 1).repeat_interleave(groups, dim=0)


def _gather(grad_HMD: Tensor, groups: int) -> Tensor:
    """Gradients of query heads summed by key head, (M, K, D)."""
    return grad_HMD.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)

"""Parts of one softmax put together, and the part that is in closed form: a row's few keys of its own."""

import torch
from torch import Tensor


def merge(out_NHD: Tensor, lse_NH: Tensor, more_NHD: Tensor, more_lse_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one softmax put together, each an output (N, H, D) and its log-sum-exp (N, H)."""
    joint_NH = torch.logaddexp(lse_NH, more_lse_NH)
    own, more = (lse_NH - joint_NH).exp(), (more_lse_NH - joint_NH).exp()
    return own[..., None] * out_NHD + more[..., None] * more_NHD, joint_NH


def attend_own(query_NHD: Tensor, key_PNKD: Tensor, value_PNKD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output (N, H, D) and log-sum-exp (N, H) of rows over P keys of their own each, in float32 at least."""
    wide = torch.promote_types(query_NHD.dtype, torch.float32)
    scores_PNH = _scores(query_NHD.to(wide), key_PNKD.to(wide), scale)
    lse_NH = scores_PNH.logsumexp(0)
    return _mix((scores_PNH - lse_NH).exp(), value_PNKD.to(wide)), lse_NH


def attend_own_backward(
    grad_NHD: Tensor,
    query_NHD: Tensor,
    key_PNKD: Tensor,
    value_PNKD: Tensor,
    out_NHD: Tensor,
    lse_NH: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, in float32 at least, key and value; ``out_NHD`` and ``lse_NH`` are the joint attention's."""
    query, grad, key, value = (x.to(lse_NH.dtype) for x in (query_NHD, grad_NHD, key_PNKD, value_PNKD))
    weights_PNH = (_scores(query, key, scale) - lse_NH).exp()
    towards_PNH = _scores(grad, value, 1.0) - (grad * out_NHD.to(lse_NH.dtype)).sum(-1)
    scores_grad_PNH = weights_PNH * towards_PNH * scale
    key_grad, value_grad = _outer(scores_grad_PNH, query, key), _outer(weights_PNH, grad, value)
    return _mix(scores_grad_PNH, key), key_grad.to(key_PNKD.dtype), value_grad.to(value_PNKD.dtype)


def _scores(query_NHD: Tensor, key_PNKD: Tensor, scale: float) -> Tensor:
    """Each row's products with its own keys, (P, N, H)."""
    query_NKGD = query_NHD.unflatten(1, (key_PNKD.shape[2], -1))
    return torch.einsum("nkgd,pnkd->pnkg", query_NKGD, key_PNKD).flatten(2) * scale


def _mix(weights_PNH: Tensor, side_PNKD: Tensor) -> Tensor:
    """Weighted sums of each row's own keys or values, (N, H, D)."""
    weights_PNKG = weights_PNH.unflatten(2, (side_PNKD.shape[2], -1))
    return torch.einsum("pnkg,pnkd->nkgd", weights_PNKG, side_PNKD).flatten(1, 2)


def _outer(weights_PNH: Tensor, side_NHD: Tensor, like_PNKD: Tensor) -> Tensor:
    """Gradient of each row's own keys or values, (P, N, K, D): query heads summed by key head."""
    heads = like_PNKD.shape[2]
    return torch.einsum("pnkg,nkgd->pnkd", weights_PNH.unflatten(2, (heads, -1)), side_NHD.unflatten(1, (heads, -1)))

"""The loss of whoever drafts: soft cross-entropy against the policy's own law, in chunks.

Of a row, p is the policy's law at the rollout's temperature and q the drafter's, at the same temperature because that
is how it drafts, over the tokens S that it can draft. The loss is the cross-entropy of p on S, not renormalised,

    l = -sum_{v in S} p(v) log q(v) = m * H(p_S, q),        m = sum_{v in S} p(v),  p_S = p / m on S.

It is least where q is p restricted to S, and a row counts by the mass m that a draft could hit at all: what the policy
says outside of S teaches nothing. The gradient by the drafter's logits is (m q - p) / temperature.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

#: Logits of this many elements (64 MB in float32) are made at a time, of the policy and of the drafter each.
CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Teacher:
    """The policy's law as a function of what its output matrix reads; ``vocabulary`` is how many tokens it has.

    ``matrix`` gives the output matrix that moves with the policy; None where there is none to hold.
    """

    logits: Callable[[Tensor], Tensor]
    vocabulary: int
    matrix: Callable[[], nn.Linear] | None = None
    _held: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, policy: PreTrainedModel) -> "Teacher":
        """The laws of ``policy`` as its weights are whenever they are asked for, without a gradient."""
        text = policy.config.get_text_config()
        cap = getattr(text, "final_logit_softcapping", None)
        scale = getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1)
        held: list[Tensor] = []

        def matrix() -> nn.Linear:
            found: nn.Linear = policy.get_output_embeddings()
            return found

        @torch.no_grad()
        def logits(final_NH: Tensor) -> Tensor:
            output = matrix()
            final_NH = final_NH.to(output.weight.dtype)
            logits_NV: Tensor = linear(final_NH, held[0], output.bias) if held else output(final_NH)
            logits_NV = logits_NV * scale
            return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap

        return cls(logits, int(text.vocab_size), matrix, held)

    def hold(self) -> None:
        """Laws are those of the output matrix as it is now until ``release``, wherever the policy moves meanwhile.

        The states that an update of the policy computes belong to that matrix. It is copied where it trains.
        """
        self.release()
        if self.matrix is not None and self.matrix().weight.requires_grad:
            self._held.append(self.matrix().weight.detach().clone())

    def release(self) -> None:
        """Laws are those of the policy as it is."""
        self._held.clear()

    @torch.no_grad()
    def laws(self, final_NH: Tensor, temperature: float) -> Tensor:
        """softmax(logits / temperature), (N, V), in float32 at least; all on the likeliest token at temperature 0."""
        logits_NV = self.logits(final_NH)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if temperature == 0:
            return torch.zeros_like(logits_NV).scatter_(1, logits_NV.argmax(1, keepdim=True), 1.0)
        return (logits_NV / temperature).softmax(-1)


@dataclass(frozen=True)
class Scores:
    """Row by row, detached: the loss l, and the ``overlap`` sum_v min(p(v), q(v)), which rejection sampling accepts."""

    loss_N: Tensor
    overlap_N: Tensor


def soft_cross_entropy(
    read_NH: Tensor,
    weight_VH: Tensor,
    teacher: Teacher,
    final_PH: Tensor,
    target_N: Tensor,
    *,
    temperature: float,
    denominator: float,
    policy_ids: Tensor | None = None,
    weight_N: Tensor | None = None,
) -> tuple[Tensor, Scores]:
    """sum_i w_i l_i / ``denominator``, differentiable in ``read_NH`` and ``weight_VH``, and the scores of each row.

    The drafter's logits are ``read_NH`` (N, H) times ``weight_VH`` (Vd, H); draft token v is the policy's
    ``policy_ids[v]`` (None: v). Row i is taught by the policy's law at the state ``final_PH[target_N[i]]``; rows that
    share a state share its law. ``weight_N`` are the w_i (None: 1). At temperature 0 the drafter is taught at 1.

    Neither the policy's nor the drafter's logits ever exist for more than a chunk of rows: gradients are taken chunk by
    chunk on the way forward. Raises ValueError for a denominator that is not positive.
    """
    if not denominator > 0:
        raise ValueError(f"denominator={denominator}: must be positive, the count of what all micro-batches sum over")
    if weight_N is None:
        weight_N = torch.ones(len(read_NH), dtype=torch.float64, device=read_NH.device)
    sources = (teacher, final_PH.detach(), target_N, policy_ids)
    sum_, loss_N, overlap_N = _Loss.apply(read_NH, weight_VH, weight_N / denominator, sources, temperature)
    return sum_, Scores(loss_N, overlap_N)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        read_NH: Tensor,
        weight_VH: Tensor,
        weight_N: Tensor,
        sources: tuple[Teacher, Tensor, Tensor, Tensor | None],
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(read_NH.dtype, torch.float32)
        loss_N, overlap_N = read_NH.new_empty((2, len(read_NH)), dtype=wide)
        weight_N = weight_N.to(wide)
        read_grad, weight_grad = (
            torch.zeros_like(x, dtype=wide) if needed else None
            for x, needed in zip((read_NH, weight_VH), ctx.needs_input_grad, strict=False)
        )
        for rows_R, law_RV in _laws(*sources, temperature, len(weight_VH)):
            read_RH, law_RV = read_NH[rows_R], law_RV.to(wide)
            log_q_RV = (read_RH @ weight_VH.mT).to(wide).div_(temperature or 1.0).log_softmax(-1)
            loss_N[rows_R] = -torch.linalg.vecdot(law_RV, log_q_RV.clamp_min(torch.finfo(wide).min))
            q_RV = log_q_RV.exp_()
            overlap_N[rows_R] = torch.minimum(law_RV, q_RV).sum(-1)
            if read_grad is None and weight_grad is None:
                continue
            grad_RV = q_RV.mul_(law_RV.sum(-1, keepdim=True)).sub_(law_RV)
            grad_RV = grad_RV.mul_(weight_N[rows_R, None] / (temperature or 1.0)).to(read_NH.dtype)
            if read_grad is not None:
                read_grad[rows_R] = (grad_RV @ weight_VH).to(wide)
            if weight_grad is None:
                continue
            if weight_grad.dtype == grad_RV.dtype:
                weight_grad.addmm_(grad_RV.mT, read_RH)
            else:
                weight_grad += grad_RV.mT @ read_RH
        ctx.dtypes = read_NH.dtype, weight_VH.dtype
        ctx.save_for_backward(read_grad, weight_grad)
        ctx.mark_non_differentiable(loss_N, overlap_N)
        return (weight_N * loss_N).sum(), loss_N, overlap_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if grad is None else (grad * grads[0]).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None


def _laws(
    teacher: Teacher,
    final_PH: Tensor,
    target_N: Tensor,
    policy_ids: Tensor | None,
    temperature: float,
    draft_vocabulary: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of rows and the policy's law of each on the draft vocabulary; a state's law is made once."""
    target_N, order_N = target_N.sort(stable=True)
    states_U, first_U = torch.unique_consecutive(target_N, return_counts=True)
    state_of_N = torch.repeat_interleave(torch.arange(len(states_U), device=target_N.device), first_U)
    ends = first_U.cumsum(0).tolist()
    most = max(1, CHUNK_ELEMENTS // teacher.vocabulary)
    state, row = 0, 0
    while state < len(states_U):
        last, start = state, row
        while last < len(states_U) and last - state < most and (ends[last] - start <= most or last == state):
            last += 1
        row = ends[last - 1]
        law_UV = teacher.laws(final_PH[states_U[state:last]], temperature)
        law_UV = law_UV[:, :draft_vocabulary] if policy_ids is None else law_UV[:, policy_ids]
        yield order_N[start:row], law_UV[state_of_N[start:row] - state]
        state = last

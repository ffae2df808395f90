"""AdamW over a model's trained weights: float32 masters where needed, clipping, a schedule, a flat state to save."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.forward.pretrained import ModelError
from paceline.forward.sharding import gathered, placed, saved

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_NARROW = (torch.bfloat16, torch.float16)

Norm = Callable[[Mapping[str, Tensor]], Tensor]
"""The 2-norm of the gradient of the whole model, of which this rank has those by name."""


class Optimiser:
    """AdamW (Loshchilov and Hutter 2019) over named ``parameters``; weight decay leaves vectors (norms, biases) alone.

    A weight in 16 bits cannot take a step of a thousandth of itself, so such weights have float32 masters: the step is
    taken on those, and the model gets them rounded. The rate rises over ``warmup_steps`` and is constant then, or
    falls as a ``cosine`` to 0 after ``schedule_steps`` steps. Parameters may be sharded (DTensor): then the masters and
    moments are too, and all ranks call alike. Where they are but a part of a model, ``norm`` is that of all its parts.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        warmup_steps: int = 0,
        schedule: Literal["constant", "cosine"] = "constant",
        schedule_steps: int = 0,
        norm: Norm | None = None,
    ) -> None:
        self.updates = 0
        self._norm = norm or norm_of
        self._parameters = dict(parameters)
        self._lr, self._warmup_steps, self._max_grad_norm = lr, warmup_steps, max_grad_norm
        self._schedule, self._schedule_steps = schedule, schedule_steps
        self._masters = {
            name: parameter.detach().float() if parameter.dtype in _NARROW else parameter
            for name, parameter in self._parameters.items()
        }
        decayed = [master for master in self._masters.values() if master.ndim >= 2]
        others = [master for master in self._masters.values() if master.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        # A rank of a pipeline may have nothing that trains, and one empty group then.
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]] or groups[:1], lr=lr)

    def lr(self) -> float:
        """The learning rate of the next step."""
        lr = self._lr * min(1.0, (self.updates + 1) / max(self._warmup_steps, 1))
        if self._schedule == "constant":
            return lr
        passed = (self.updates - self._warmup_steps) / (self._schedule_steps - self._warmup_steps)
        return lr * (1 + math.cos(math.pi * min(max(passed, 0.0), 1.0))) / 2

    def step(self) -> float:
        """Clip the gradient that the model holds, take a step and clear it; returns its norm before clipping.

        Where the norm is not finite no step is taken.
        """
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                own = self._parameters[name].grad
                master.grad = None if own is None else own.float()
        norm_ = self._norm({n: master.grad for n, master in self._masters.items() if master.grad is not None})
        torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._max_grad_norm, norm_)
        norm = float(norm_)
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = self.lr()
            self._adamw.step()
            self.updates += 1
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].grad = master.grad = None
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)
        return norm

    def state(self) -> dict[str, Tensor]:
        """A flat dict of CPU tensors: the count of steps, the moments, and the masters where there are any.

        Of sharded parameters rank 0 has the whole tensors, and the others empty ones.
        """
        tensors = {"updates": torch.tensor(self.updates)}
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                tensors[f"{name}.master"] = saved(master)
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{name}.{key}"] = saved(value)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave; where a tensor does not fit, ModelError names it and nothing changes."""
        updates = int(_fitting(tensors, "updates", torch.Size()))
        masters: dict[Tensor, Tensor] = {}
        moments: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                masters[master] = _fitting(tensors, f"{name}.master", master.shape)
            if updates:
                shapes = (master.shape, master.shape, torch.Size())
                own = {
                    key: _fitting(tensors, f"{name}.{key}", shape) for key, shape in zip(_MOMENTS, shapes, strict=True)
                }
                # AdamW counts its steps on the CPU.
                moments[master] = {
                    key: value.to("cpu", copy=True) if key == "step" else placed(value, master).clone()
                    for key, value in own.items()
                }
        with torch.no_grad():
            for master, value in masters.items():
                master.copy_(placed(value, master))
        self._adamw.state.clear()
        self._adamw.state.update(moments)
        self.updates = updates


def norm_of(gradients: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of gradients together, whole on every rank where they are sharded."""
    return gathered(torch.nn.utils.get_total_norm(list(gradients.values())))


def _fitting(tensors: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    if name not in tensors:
        raise ModelError(f"checkpoint: tensor {name} is missing from the optimiser's state")
    if tensors[name].shape != shape:
        raise ModelError(f"checkpoint: {name} has shape {tuple(tensors[name].shape)}, wanted {tuple(shape)}")
    return tensors[name]

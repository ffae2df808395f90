"""The invariant mode of a model: equal logits, bit for bit, whatever the batch, the draft, the chunks and the schedule.

Three things of an ordinary pass depend on its shape. Linear layers: ``invariant_linear``. Attention:
``invariant_attention``. Activations, because a vector kernel leaves the end of an array to a scalar one that rounds
otherwise: they run on padded pieces here. All other operators must be on a list of those that treat every entry or
every row alone; a census of one small pass refuses a model that uses another.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, activations

from paceline.forward.invariant_attention import InvariantError
from paceline.forward.invariant_linear import PackedLinear, pack, unpack

#: Entries of a piece: below the size at which torch shares an array out among threads, a multiple of every vector.
_PIECE = 1 << 14
_VECTOR = 64
_ACTIVATIONS = (torch.nn.SiLU, torch.nn.GELU, torch.nn.ReLU, torch.nn.Tanh, torch.nn.Sigmoid)

_MOVES = """alias arange cat clone contiguous copy_ detach embedding expand flatten index index_copy_ index_select
lift_fresh masked_fill masked_fill_ new_empty new_zeros empty ones pad constant_pad_nd permute repeat reshape select
slice split squeeze stack t to _to_copy transpose type_as unsqueeze view zeros split_with_sizes chunk"""
_CORRECTLY_ROUNDED = "abs add add_ bitwise_not div div_ eq frexp isfinite mul mul_ neg reciprocal rsqrt sqrt sub sub_"
_BY_ENTRY_OR_ROW = "amax cos exp exp_ mean pow sin tanh"
_ALLOWED = frozenset(f"{_MOVES} {_CORRECTLY_ROUNDED} {_BY_ENTRY_OR_ROW}".split())
#: Exact in the attention, which alone computes in float64.
_EXACT_IN_FLOAT64 = frozenset({"bmm", "sum"})


class Padded:
    """Stands in for the forward pass of an activation: no entry is left to the scalar end of a vector loop."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._forward = module.forward
        module.forward = self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of every entry of ``x``."""
        if x.numel() <= _PIECE and x.numel() % _VECTOR == 0:
            return self._forward(x.reshape(-1)).view(x.shape)
        parts = []
        for piece in x.reshape(-1).split(_PIECE):
            padding = -len(piece) % _VECTOR
            padded = torch.nn.functional.pad(piece, (0, padding)) if padding else piece
            parts.append(self._forward(padded)[: len(piece)])
        return torch.cat(parts).view(x.shape)

    def undo(self) -> None:
        """Give the module its own forward pass back."""
        del self.module.forward


class Census(TorchDispatchMode):
    """Raises InvariantError at an operator whose result for a token may depend on the others of its pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.namespace, func._schema.name.split("::")[-1]
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        allowed = (space == "aten" and name in _ALLOWED) or (space == "mkldnn" and name == "_linear_pointwise")
        if first is not None and not allowed:
            padded = name in {"silu", "gelu", "relu", "sigmoid"} and first.ndim == 1 and len(first) % _VECTOR == 0
            allowed = padded or (name in _EXACT_IN_FLOAT64 and first.dtype == torch.float64)
        if not allowed:
            raise InvariantError(
                f"engine.invariant: the model uses {space}.{name} outside its linear layers and attention, which is "
                "not known to treat every token alone; set engine.invariant=false"
            )
        return func(*args, **(kwargs or {}))


class Invariance:
    """What the mode attaches to a model. Raises InvariantError, with the model as it was, where it cannot hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse(model)
        self._threads = 0
        self._padded = [Padded(module) for module in model.modules() if _is_activation(module)]
        self._packed: list[PackedLinear] = []
        try:
            self._packed = pack((n, m) for n, m in model.named_modules() if type(m) is torch.nn.Linear)
            self.refresh()
        except InvariantError:
            self.undo()
            raise

    def refresh(self) -> None:
        """Pack anew what was written since, and check again if the number of threads has changed."""
        for linear in self._packed:
            linear.refresh()
        if self._threads != torch.get_num_threads():
            for linear in self._packed:
                linear.check()
            self._threads = torch.get_num_threads()

    def undo(self) -> None:
        """Give the model back as it was."""
        unpack(self._packed)
        for padded in self._padded:
            padded.undo()


def _is_activation(module: torch.nn.Module) -> bool:
    return type(module) in _ACTIVATIONS or type(module).__module__ == activations.__name__


def _refuse(model: PreTrainedModel) -> None:
    """Raise InvariantError where type, device, library or rotary embedding rule the mode out."""
    why = None
    if model.dtype != torch.float32:
        why = f"needs policy.dtype float32, this model is {str(model.dtype).removeprefix('torch.')}"
    elif model.device.type != "cpu":
        why = f"runs on the CPU, this model is on {model.device}"
    elif not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        why = "needs a torch with oneDNN, which this one lacks"
    else:
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                why = f"needs all weights in float32, {name} is {str(parameter.dtype).removeprefix('torch.')}"
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            moving = {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [kinds])
            if moving:
                why = f"cannot hold with {moving.pop()} rotary embeddings, which depend on the longest sequence"
    if why is not None:
        raise InvariantError(f"engine.invariant {why}; set engine.invariant=false")

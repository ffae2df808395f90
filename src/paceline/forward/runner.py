"""The policy as a function of packed tokens: one forward pass over ragged rows, logits only where they are needed."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.forward.attention import NAME, PassPlan, PassRow
from paceline.forward.invariant import Census, Invariance
from paceline.forward.invariant_attention import InvariantError, InvariantPlan
from paceline.forward.kv import KVSlots
from paceline.forward.taps import Taps
from paceline.schema import PacelineError

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModelError(PacelineError):
    """A model that the reference engine cannot run without changing its law."""


class WeightsError(PacelineError):
    """A set of weights that does not fit the policy; nothing was loaded."""


class Runner:
    """Owns the model and its KV slots. The model must be a causal language model of transformers in evaluation mode.

    With ``invariant`` the logits of a token are equal, bit for bit, whatever else its pass holds; raises
    ``InvariantError`` where that cannot be promised. It needs float32 on the CPU, a packed copy of the linear layers'
    weights, and about twice the KV memory.
    """

    def __init__(self, model: PreTrainedModel, *, invariant: bool = False) -> None:
        config = model.config.get_text_config()
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not getattr(model, "_supports_attention_backend", False) or layer_types - _LAYER_TYPES:
            kinds = ", ".join(sorted(layer_types - _LAYER_TYPES)) or "an attention of its own"
            raise UnsupportedModelError(
                f"{type(model).__name__} uses {kinds}; the reference engine runs models with full or sliding attention "
                "through transformers' attention interface"
            )
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.vocabulary = int(config.vocab_size)
        self.context = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
        self.device = model.device
        self.dtype = model.dtype
        self.kv = KVSlots(config.num_hidden_layers)
        heads = config.num_attention_heads
        self._heads_per_kv = heads // (getattr(config, "num_key_value_heads", None) or heads)
        self._keep_N: torch.Tensor | None = None
        self._unsound_N: torch.Tensor | None = None
        self._taps: Taps | None = None
        self._invariance = Invariance(model) if invariant else None
        model.set_attn_implementation(NAME)
        # The head's own forward (soft caps, scales) runs on the kept positions alone.
        self._hook = model.base_model.register_forward_hook(self._keep)
        if invariant:
            self._take_census()

    def close(self) -> None:
        """Undo what was attached to the model and release the slots."""
        self.tap(())
        self._hook.remove()
        if self._invariance is not None:
            self._invariance.undo()
        self.kv = KVSlots(0)

    @property
    def tapped(self) -> tuple[int, ...]:
        """The layers whose outputs are written into the slots."""
        return () if self._taps is None else self._taps.layers

    def tap(self, layers: Sequence[int]) -> None:
        """From now on the slots hold the outputs of ``layers`` too, as ``forward.taps.Taps`` names them.

        Those of tokens that were cached before are not there. Raises ModelError for a layer that the model lacks.
        """
        taps = Taps(self.model, layers) if layers else None
        if self._taps is not None:
            self._taps.close()
        self._taps = taps
        self.kv.drop_states()

    @torch.inference_mode()
    def forward(self, tokens: Sequence[np.ndarray], rows: Sequence[PassRow], keep: np.ndarray) -> torch.Tensor:
        """One pass. ``tokens[i]`` are the token ids that row i brings; returns raw logits (len(keep), V).

        ``keep`` indexes the packed tokens whose logits are wanted; it may be empty (a pure prefill chunk). Logits are
        not finite where a key or value of the token, or of one before it in the pass that it sees, was not; only those
        of a tree's other nodes are left to whoever walks down to it. ``unsound`` tells of all tokens.
        """
        plan = self._plan(rows)
        input_1N = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(self.device)[None]
        self._keep_N = torch.from_numpy(keep).to(self.device)
        with nullcontext() if self._taps is None else self._taps.watching():
            output = self.model(
                input_ids=input_1N,
                # A four-dimensional mask is passed through as it is; the plan's own masks are the ones that count.
                attention_mask=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device),
                position_ids=plan.position_N[None],
                use_cache=False,
                paceline=plan,
            )
        if self._taps is not None:
            self.kv.write_states(plan.flat_N, self._taps.take()[0])
        logits: torch.Tensor = output.logits[0]
        self._unsound_N = plan.unsound_N
        if plan.unsound_N is not None and len(keep):
            logits = _tainted(logits, plan.unsound_N, rows, keep)
        return logits

    def unsound(self) -> np.ndarray | None:
        """Which packed tokens of the last pass had keys or values that were not finite, (N,) bool; None for none.

        Zeros lie in the slots in their place, so nothing that sees them means anything.
        """
        if self._unsound_N is None or not bool(self._unsound_N.any()):
            return None
        found: np.ndarray = self._unsound_N.cpu().numpy()
        return found

    def _plan(self, rows: Sequence[PassRow]) -> PassPlan:
        if self._invariance is None:
            return PassPlan(rows, self.kv, self._heads_per_kv, self.device)
        self._invariance.refresh()
        return InvariantPlan(rows, self.kv, self._heads_per_kv, self.device, self.context)

    def _take_census(self) -> None:
        """One small pass in which every operator must be known to be invariant."""
        self.kv.resize(1, 4)
        no_draft = np.empty(0, dtype=np.int32)
        try:
            with Census():
                self.forward([np.arange(3) % self.vocabulary], [PassRow(0, 0, 3, no_draft)], np.array([0, 2]))
        except InvariantError:
            self.close()
            raise
        self.kv = KVSlots(self.config.num_hidden_layers)

    def _keep(self, module: torch.nn.Module, args: object, output: object) -> object:  # noqa: ARG002
        if self._keep_N is not None:
            output.last_hidden_state = output.last_hidden_state[:, self._keep_N]  # type: ignore[attr-defined]
        return output

    def check_weights(self, tensors: Mapping[str, torch.Tensor], expected: frozenset[str] | None) -> None:
        """Raise the WeightsError with which ``load_weights`` would refuse them."""
        check_tensors(dict(self.model.named_parameters()), tensors, expected, "policy")

    def load_weights(self, tensors: Mapping[str, torch.Tensor], expected: frozenset[str] | None) -> None:
        """``copy_weights`` into the model."""
        copy_weights(self.model, tensors, expected)
        if self._invariance is not None:
            self._invariance.refresh()


def _tainted(
    logits_KV: torch.Tensor, unsound_N: torch.Tensor, rows: Sequence[PassRow], keep: np.ndarray
) -> torch.Tensor:
    """Logits of the kept tokens, not a number where one that they see was unsound: a committed one, or themselves."""
    ends = np.cumsum([row.total for row in rows])
    of_K = np.searchsorted(ends, keep, side="right")
    first_K = (ends - [row.total for row in rows])[of_K]
    # In a chain all that comes before is seen; of a tree only what is committed is, for sure.
    seen = np.array([row.total if row.is_chain else row.count for row in rows])
    last_K = np.minimum(keep, first_K + seen[of_K] - 1)
    before = torch.nn.functional.pad(unsound_N.cumsum(0), (1, 0))
    first, last, own = (torch.from_numpy(index).to(unsound_N.device) for index in (first_K, last_K + 1, keep))
    taint_K = (before[last] > before[first]) | unsound_N[own]
    # One entry that is not a number makes a distribution none, and to write them all would cost.
    logits_KV[:, 0].masked_fill_(taint_K, torch.nan)
    return logits_KV


def copy_weights(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], expected: frozenset[str] | None = None
) -> None:
    """Copy a complete set of weights into ``model``.

    ``expected`` names the parameters that every set must hold (None: all of them, tied ones once). Raises
    WeightsError, before anything is written, that names the first tensor missing, unknown or of another shape.
    """
    copy_tensors(dict(model.named_parameters()), tensors, expected, "policy")


def copy_tensors(
    own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], expected: frozenset[str] | None, whose: str
) -> None:
    """Copy ``tensors`` over those of the same name in ``own``, the weights of the ``whose``; as ``copy_weights``."""
    check_tensors(own, tensors, expected, whose)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def check_tensors(
    own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], expected: frozenset[str] | None, whose: str
) -> None:
    """Raise the WeightsError with which ``copy_tensors`` would refuse them."""
    missing = sorted((frozenset(own) if expected is None else expected) - set(tensors))
    unknown = sorted(set(tensors) - set(own))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the {whose} does not have"
        raise WeightsError(
            f"the set of weights {what} ({len(missing)} missing, {len(unknown)} unknown); none was loaded"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise WeightsError(
                f"{name} has shape {tuple(tensor.shape)}, the {whose}'s is {tuple(own[name].shape)}; none was loaded"
            )

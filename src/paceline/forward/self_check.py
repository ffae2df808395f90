"""Compares the packed forward pass of a policy with the model's own, when the policy is loaded.

A few short texts go through both. The model's own forward pass takes one text at a time, without a cache, with the
attention that its own file defines ("eager"); its logits are the definition of right. The packed pass takes the same
texts as the engine would: prompts of different lengths side by side, a prompt in chunks, a drafted chain, a drafted
tree, a branch of which some nodes were accepted, single tokens, a slot that rests. Two things need no long text:

- Rotary embeddings that change at some position are tried there by shifting all positions, on both sides.
- A window is narrowed to a few positions, on both sides: the model's own masks take it from the configuration, the
  packed pass gets it from the layers, so a layer that does not pass it on is found.

Differences are measured in units of the logits' own spread (root mean square around their mean over the vocabulary),
so that an untrained policy of almost equal logits is judged as sharply as a trained one. What is tolerated is the
rounding that the model itself shows when the same tokens stand in texts of different lengths, times ``_MARGIN``,
within bounds by dtype (``_BOUNDS``). A policy in half precision, whose rounding would hide a mistake, is compared in
float32: its weights are widened for the check and then put back, unless there are more than ``_MOST_WIDENED``.
"""

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.forward.attention import NAME, PassRow, UnsupportedModelError
from paceline.forward.kv import KVSlots
from paceline.forward.layers import decoder_layers
from paceline.forward.pretrained import ModelError, one_line
from paceline.schema import PacelineError

#: Times the model's own rounding that the packed pass may differ.
_MARGIN = 16.0
#: Least and largest tolerance in units of the logits' spread. Attention computes its softmax in float32 also where the
#: model is float64. Measured of sound policies: below 3e-6 in float64, 3e-5 in float32. In half precision, where the
#: weights cannot be widened, the median token's root mean square is taken, since single logits may be a spread apart.
_BOUNDS = {torch.float64: (1e-5, 1e-4), torch.float32: (1e-4, 2e-3)}
_HALF_BOUNDS = (0.5, 0.5)
_MOST_WIDENED = 1_000_000_000
#: A text that is longer than what the packed attention pads short rows to, and the shortest of the others.
_LONG_TEXT, _WINDOW = 53, 3
_MOVING_ROPES = ("longrope", "dynamic")
_CHECKED: "weakref.WeakKeyDictionary[PreTrainedModel, set[bool]]" = weakref.WeakKeyDictionary()

_LOG = logging.getLogger(__name__)

Path = tuple[int, ...]
"""A text, as the ids of its tokens."""


class Passes(Protocol):
    """What runs packed passes: a ``forward.runner.Runner``."""

    model: PreTrainedModel
    config: Any
    vocabulary: int
    context: int
    dtype: torch.dtype
    kv: KVSlots

    @property
    def is_invariant(self) -> bool:
        """Whether logits do not depend on the shape of the pass."""

    def forward(
        self, tokens: Sequence[np.ndarray], rows: Sequence[PassRow], keep: np.ndarray, shift: int = 0
    ) -> torch.Tensor:
        """One pass, as ``Runner.forward``."""

    def release(self) -> None:
        """Let go of all that the slots hold."""


def check_model(runner: Passes) -> None:
    """Raise UnsupportedModelError where the runner's passes differ from those of its model; once for a model.

    The message is one line: the kind of pass, by how much, and the first layer that differs. A policy that passes is
    logged in one line (INFO), with the wall time and the worst difference in units of the logits' spread.
    """
    model, is_invariant = runner.model, runner.is_invariant
    done = _CHECKED.setdefault(model, set())
    if is_invariant in done or model.device.type == "meta":
        return
    started = time.perf_counter()
    worst: list[float] = []
    try:
        _check(runner, worst)
    except _NotFiniteError:
        _LOG.warning(
            "policy not checked against its own forward pass: its logits are not finite, so its weights are not sound"
        )
        return
    done.add(is_invariant)
    _LOG.info(
        "policy checked against its own forward pass: %s, %.2g s, worst difference %.1g of the logits' spread",
        type(model).__name__, time.perf_counter() - started, max(worst),
    )  # fmt: skip


class _NotFiniteError(Exception):
    """The model's own forward pass gives logits that are not finite: there is nothing to compare with."""


def _check(runner: Passes, worst: list[float]) -> None:
    """Compare every kind of pass; the worst difference of each is appended to ``worst``."""
    model = runner.model
    with _widened(model) as dtype, _recorded(model) as states, torch.inference_mode():
        worst.append(_compare(runner, dtype, states, "", _script(runner, long=True), 0))
        for where, at in sorted(rope_thresholds(model).items()):
            if 4 <= at < runner.context - 16:
                says = f" at position {at} ({where})"
                worst.append(_compare(runner, dtype, states, says, _script(runner, long=False), at - 3))
        with _narrow_windows(model, runner.context) as windows:
            if windows:
                says = f" beyond a window (of {windows[0]}, narrowed to {_WINDOW})"
                worst.append(_compare(runner, dtype, states, says, _script(runner, long=False), 0))


def check_rope(model: PreTrainedModel, context: int) -> None:
    """Raise UnsupportedModelError for rotary embeddings that change within ``context`` for all positions of a pass.

    LongRoPE and dynamic scaling choose their factors by the longest sequence of a forward pass, so a token would depend
    on what else is decoded, or drafted, beside it. Within the length that they were trained at, nothing changes.
    """
    for where, at in rope_thresholds(model).items():
        if where.startswith(_MOVING_ROPES) and context > at:
            raise UnsupportedModelError(
                f"{type(model).__name__}: its {where} rotary embeddings change for the whole sequence beyond "
                f"{at} positions; set engine.context={at} or less (it is {context})"
            )


def rope_thresholds(model: PreTrainedModel) -> dict[str, int]:
    """Positions at which rotary embeddings, or the attention's scale, change; by the kind of the embedding."""
    config = model.config.get_text_config()
    found: dict[str, int] = {}
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for one in (given, *given.values()):
        if isinstance(one, dict):
            kind = str(one.get("rope_type", one.get("type", "default")))
            longest = getattr(config, "max_position_embeddings", 0) or 0
            own = one.get("original_max_position_embeddings")
            at = own or (getattr(config, "original_max_position_embeddings", None) or longest)
            if kind.startswith(_MOVING_ROPES) or own:
                found[kind] = min(int(at), found.get(kind, int(at)))
    return found


def safe_context(model: PreTrainedModel) -> int:
    """The longest sequence, at most, that ``check_rope`` takes; 0 where every length is taken."""
    moving = [at for where, at in rope_thresholds(model).items() if where.startswith(_MOVING_ROPES)]
    return min(moving, default=0)


def use_sound_kernels(model: PreTrainedModel) -> None:
    """Have a model computed by code that takes all of it: SDPA drops soft caps, grouped products take no float64.

    Soft caps of attention go through the model's own "eager" attention, experts in float64 one by one.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    if model.dtype == torch.float64 and getattr(model.config, "_experts_implementation", None) is not None:
        try:
            model.set_experts_implementation("eager")
        except ValueError:
            return  # its experts have one implementation, which is not grouped


# What goes through both


@dataclass
class _Row:
    """What a row brings to a pass; ``paths[i]`` is the text that ends with its token i."""

    share: PassRow
    tokens: list[int]
    paths: list[Path]
    kinds: list[str]


@dataclass
class _Pass:
    rows: list[_Row]
    #: Before the pass: (slot, scattered positions, where they go).
    moves: list[tuple[int, list[int], int]]


@dataclass
class _Script:
    """Builds passes as an engine would ask for them, and knows the text that each token ends."""

    slots: int
    capacity: int
    passes: list[_Pass] = field(default_factory=list)
    _text: dict[int, Path] = field(default_factory=dict)
    _rows: list[_Row] = field(default_factory=list)
    _moves: list[tuple[int, list[int], int]] = field(default_factory=list)

    def feed(
        self, slot: int, kind: str, committed: Sequence[int], drafted: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> None:
        """In the pass that is built, ``slot`` brings committed tokens and then drafted nodes."""
        before = self._text.get(slot, ())
        paths = [before + tuple(committed[: i + 1]) for i in range(len(committed))]
        last = before + tuple(committed)
        for token, parent in zip(drafted, parents, strict=True):
            paths.append((paths[len(committed) + parent] if parent >= 0 else last) + (token,))
        share = PassRow(slot, len(before), len(committed), np.array(parents, dtype=np.int32))
        kinds = ["a prompt" if len(before) == 0 else kind] * len(committed) + [kind] * len(drafted)
        self._rows.append(_Row(share, [*committed, *drafted], paths, kinds))
        self._text[slot] = last

    def accept(self, slot: int, nodes: Sequence[int]) -> None:
        """Of what the slot drafted in the last pass, ``nodes`` were accepted, root first."""
        row = next(row for row in self.passes[-1].rows if row.share.slot == slot)
        base = row.share.start + row.share.count
        self._moves.append((slot, [base + node for node in nodes], base))
        self._text[slot] = row.paths[row.share.count + nodes[-1]]

    def close(self) -> None:
        """End the pass that is built."""
        self.passes.append(_Pass(self._rows, self._moves))
        self._rows, self._moves = [], []

    def texts(self) -> list[Path]:
        """The texts of which all others are beginnings."""
        paths = {path for one in self.passes for row in one.rows for path in row.paths}
        begins = {path[:length] for path in paths for length in range(1, len(path))}
        return sorted(paths - begins)


def _script(runner: Passes, *, long: bool) -> _Script:
    """The passes of the check; ``long`` adds a prompt of ``_LONG_TEXT`` tokens where the context allows it."""
    config = runner.config
    barred: set[Any] = set()
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, key, None)
        barred |= set(value) if isinstance(value, list | tuple) else {value}
    ids = [token for token in range(runner.vocabulary) if token not in barred] if runner.vocabulary < 4096 else None
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        drawn = rng.integers(0, len(ids) if ids else runner.vocabulary, size=count)
        return [ids[i] for i in drawn] if ids else [int(i) for i in drawn]

    third = min(_LONG_TEXT, runner.context - 10) if long else 9
    script = _Script(slots=3, capacity=max(third, 9) + 10)
    second = tokens(7)
    script.feed(0, "a prompt", tokens(4))
    script.feed(1, "a prompt", second[:4])
    script.feed(2, "a prompt", tokens(max(third, 2)))
    script.close()
    a, b, c, d, e, f = tokens(6)
    # Siblings at the root and below; the third node hangs below the first, so the nodes are in no path's order.
    script.feed(0, "a drafted tree", tokens(1), [a, b, c, d, e, f], [-1, -1, 0, 1, 1, 3])
    script.feed(1, "a prompt in chunks", second[4:])
    script.feed(2, "a drafted chain", tokens(1), tokens(3), [-1, 0, 1])
    script.close()
    script.accept(0, [1, 3])
    script.accept(2, [0])
    for slot, kind in ((0, "an accepted branch"), (1, "one token a row"), (2, "a rejected draft")):
        script.feed(slot, kind, tokens(1))
    script.close()
    script.feed(0, "a resting slot", tokens(1), tokens(2), [-1, -1])
    script.feed(2, "a resting slot", tokens(1))
    script.close()
    return script


# Both sides


def _compare(
    runner: Passes, dtype: torch.dtype, states: dict[int, torch.Tensor], where: str, script: _Script, shift: int
) -> float:
    """The worst difference, in units of the spread, of the logits of ``script`` from the model's own.

    Raises UnsupportedModelError where a kind of pass differs by more than its tolerance.
    """
    name, is_half = type(runner.model).__name__, dtype not in _BOUNDS
    try:
        right, noise, layers = _own_logits(runner.model, states, script, shift)
    except PacelineError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a model's own code raises
        raise UnsupportedModelError(f"{name}: its own forward pass fails{where}: {_first_line(error)}") from None
    if not all(bool(logits_V.isfinite().all()) for logits_V in right.values()):
        raise _NotFiniteError
    spread = _spread(torch.stack(list(right.values())))
    low, high = _BOUNDS.get(dtype, _HALF_BOUNDS)
    noise /= spread
    if not noise <= (float("inf") if is_half else high):
        raise UnsupportedModelError(
            f"{name}: its own forward pass gives a token other logits in a longer text{where} (by {noise:.2g} of their "
            "spread): it is not causal"
        )
    tolerance = min(max(low, _MARGIN * noise), high)
    try:
        found = _packed_logits(runner, states, script, shift)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from None
    except PacelineError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a model's own code raises
        says = f"{name}: its packed forward pass fails{where}: {_first_line(error)}"
        raise UnsupportedModelError(says) from None
    errors: dict[str, list[tuple[float, Path, dict[int, torch.Tensor]]]] = {}
    for kind, path, logits_V, own in found:
        off_V = (logits_V - right[path]).abs() / spread
        apart = float(off_V.pow(2).mean().sqrt() if is_half else off_V.max())
        errors.setdefault(kind, []).append((apart if apart == apart else float("inf"), path, own))
    worst = 0.0
    for kind, measured in errors.items():
        measured.sort(key=lambda one: one[0])
        apart, path, own = measured[len(measured) // 2 if is_half else -1]
        if apart > tolerance:
            at = _first_difference(runner.model, own, layers[path], tolerance)
            raise UnsupportedModelError(
                f"{name}: its packed forward pass differs from its own in {kind}{where} by {apart:.2g} of the logits' "
                f"spread (at most {tolerance:.1g}){at}; the reference engine cannot run it"
            )
        worst = max(worst, apart)
    return worst


def _own_logits(
    model: PreTrainedModel, states: dict[int, torch.Tensor], script: _Script, shift: int
) -> tuple[dict[Path, torch.Tensor], float, dict[Path, dict[int, torch.Tensor]]]:
    """By text: the logits behind it (V,) and the layers' states; and how far the model is apart from itself."""
    logits: dict[Path, torch.Tensor] = {}
    layers: dict[Path, dict[int, torch.Tensor]] = {}
    noise = 0.0
    model.set_attn_implementation("eager")
    try:
        for text in script.texts():
            input_1L = torch.tensor([text], device=model.device)
            extra: dict[str, Any] = {}
            if shift:
                extra["position_ids"] = torch.arange(len(text), device=model.device)[None] + shift
            states.clear()
            logits_LV = model(input_ids=input_1L, use_cache=False, **extra).logits[0].double()
            for at in range(len(text)):
                path = text[: at + 1]
                if path in logits:
                    apart = float((logits[path] - logits_LV[at]).abs().max())
                    noise = max(noise, apart) if apart == apart else float("nan")
                else:
                    logits[path] = logits_LV[at]
                    layers[path] = {layer: state[at] for layer, state in states.items()}
    finally:
        model.set_attn_implementation(NAME)
    return logits, noise, layers


def _packed_logits(
    runner: Passes, states: dict[int, torch.Tensor], script: _Script, shift: int
) -> list[tuple[str, Path, torch.Tensor, dict[int, torch.Tensor]]]:
    """For each token of each pass: its kind, its text, the logits behind it (V,) and the layers' states."""
    runner.kv.resize(script.slots, script.capacity)
    found = []
    for one in script.passes:
        for slot, sources, start in one.moves:
            runner.kv.move_positions(slot, np.array(sources), start)
        tokens = [np.array(row.tokens) for row in one.rows]
        states.clear()
        every = np.arange(sum(len(row.tokens) for row in one.rows))
        logits_NV = runner.forward(tokens, [row.share for row in one.rows], every, shift).double()
        ends = [(kind, path) for row in one.rows for kind, path in zip(row.kinds, row.paths, strict=True)]
        for at, (kind, path) in enumerate(ends):
            found.append((kind, path, logits_NV[at], {layer: state[at] for layer, state in states.items()}))
    runner.release()
    return found


def _spread(logits_NV: torch.Tensor) -> float:
    """Root mean square of logits around their means over the vocabulary."""
    spread = float((logits_NV - logits_NV.mean(-1, keepdim=True)).pow(2).mean().sqrt())
    return spread if spread > 0 else 1.0


def _first_difference(
    model: PreTrainedModel, found: dict[int, torch.Tensor], right: dict[int, torch.Tensor], tolerance: float
) -> str:
    """Names the first layer whose states differ; empty where none does, or where there are no states."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for layer in sorted(set(found) & set(right)):
        scale = float(right[layer].double().pow(2).mean().sqrt()) or 1.0
        apart = float((found[layer].double() - right[layer].double()).abs().max()) / scale
        if not apart <= tolerance:
            kind = f", {kinds[layer]}" if layer < len(kinds) else ""
            return f", first in layer {layer} ({type(decoder_layers(model)[1][layer]).__name__}{kind})"
    return ""


def _first_line(error: Exception) -> str:
    """The class and the beginning of the message of ``error``, in one line."""
    return f"{type(error).__name__}: {one_line(error)}"[:300]


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[torch.dtype]:
    """Within it weights in half precision are in float32; gives the dtype that the model computes in then.

    Quantised models and very large ones stay as they are.
    """
    held = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in (torch.float16, torch.bfloat16)]
    if sum(t.numel() for t in held) > _MOST_WIDENED or getattr(model.config, "quantization_config", None) is not None:
        held = []
    halves = [t.data for t in held]
    try:
        for tensor in held:
            tensor.data = tensor.data.float()
        yield torch.float32 if held and model.dtype == torch.float32 else model.dtype
    finally:
        for tensor, half in zip(held, halves, strict=True):
            tensor.data = half


@contextmanager
def _recorded(model: PreTrainedModel) -> Iterator[dict[int, torch.Tensor]]:
    """Within it the mapping holds the output of each decoder layer in the last pass, (N, hidden size)."""
    states: dict[int, torch.Tensor] = {}

    def keeper(layer: int) -> Any:
        def keep(_module: torch.nn.Module, _args: object, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            if isinstance(state, torch.Tensor):
                states[layer] = state.detach().reshape(-1, state.shape[-1])

        return keep

    try:
        layers: Sequence[torch.nn.Module] = list(decoder_layers(model)[1])
    except ModelError:
        layers = []
    hooks = [layer.register_forward_hook(keeper(index)) for index, layer in enumerate(layers)]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _narrow_windows(model: PreTrainedModel, context: int) -> Iterator[list[int]]:
    """Within it every sliding window of ``model`` is ``_WINDOW`` positions; gives the windows' own sizes.

    A window that is narrower anyway, or that no sequence of ``context`` positions leaves, stays as it is.
    """
    holders: list[Any] = [model.config.get_text_config(), *model.modules()]
    held = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    wide = [(holder, size) for holder, size in held if isinstance(size, int) and _WINDOW < size < context]
    uses = bool(wide) and getattr(model.config.get_text_config(), "use_sliding_window", True) is not False
    changed = wide if uses else []
    try:
        for holder, _ in changed:
            holder.sliding_window = _WINDOW
        yield sorted({size for _, size in changed})
    finally:
        for holder, size in changed:
            holder.sliding_window = size

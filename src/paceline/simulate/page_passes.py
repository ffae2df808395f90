"""Step times as the page of ``simulate --html`` takes them: of every engine that it offers, or of the measured one."""

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from paceline.schema import PacelineError
from paceline.simulate.breakdown import Layout
from paceline.simulate.hardware import PRESETS as HARDWARE
from paceline.simulate.hardware import Hardware
from paceline.simulate.roofline import BUCKETS, Roofline
from paceline.simulate.steptime import StepTime
from paceline.sizes.presets import PRESETS as MODELS
from paceline.sizes.shapes import Shape, load_shape

#: Tokens of a pass at which all of it but attention is reckoned; the page takes a line in between.
SIZES = (
    *(1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, *range(112, 257, 16), 288, 320, 352, 384, 448, 512),
    *(513, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 8192, 12288, 16384, 24576),
)
#: GPUs an engine that are offered, beside the layout that was asked for.
_TENSOR = (1, 2, 4, 8, 16)
#: Tokens a row at which measured passes are asked for: every draft length, and prompts.
_EACH = (*range(1, 18), 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
#: Row counts that measured passes are asked for, and cached tokens a row.
_ROWS = (*range(1, 129), *range(136, 257, 8), *range(272, 513, 16), *range(544, 1025, 32))
_CONTEXTS = (0, *(round(2 ** (half / 2)) for half in range(8, 33)))
#: Of these, those are left out that a line between others tells within this relative error.
_STRAIGHT = 5e-4
#: The share of a GPU's memory that an engine is given, as ``Roofline.most_rows`` takes it.
_SHARE = 0.9


class EngineChoice(NamedTuple):
    """The engine that the page starts with."""

    shape: Shape
    hardware: Hardware
    layout: Layout
    precision: str


def reckoned_passes(choice: EngineChoice) -> dict[str, Any]:
    """Every engine that the page offers: of presets, and of the model, hardware and layout that were asked for."""
    shapes = {shape.name: shape for shape in (*map(load_shape, MODELS), choice.shape)}
    gpus = {one.name: one for one in (*HARDWARE.values(), choice.hardware)}
    layouts = list(dict.fromkeys((*(Layout(tensor=size) for size in _TENSOR), choice.layout)))
    engines = {}
    for shape, hardware, layout, precision in itertools.product(
        shapes.values(), gpus.values(), layouts, ("bf16", "fp8")
    ):
        try:
            roofline = Roofline(shape, hardware, layout, precision=precision)  # type: ignore[arg-type]
        except PacelineError:
            continue  # a model that does not divide so, or a precision that the GPU does not have
        engines[f"{shape.name}|{hardware.name}|{layouts.index(layout)}|{precision}"] = _engine(roofline)
    return {
        "sizes": SIZES,
        "buckets": BUCKETS,
        "models": list(shapes),
        "hardware": {one.name: _SHARE * one.memory_bytes for one in gpus.values()},
        "layouts": [_layout_name(layout) for layout in layouts],
        "engines": engines,
        "choice": {
            "model": choice.shape.name,
            "hardware": choice.hardware.name,
            "layout": str(layouts.index(choice.layout)),
            "precision": choice.precision,
        },
    }


def _layout_name(layout: Layout) -> str:
    return f"{layout.gpus}" + (f", experts over {layout.expert}" if layout.expert > 1 else "")


def _engine(roofline: Roofline) -> dict[str, Any]:
    """A roofline as the page takes it: rest(tokens, filled up) + token tokens + row rows + attention, in seconds.

    Attention is the longer of ``moved`` (cached + tokens) and ``sums`` tokens cached / rows. Passes that fill the same
    graph differ by tokens alone, which gives the seconds a token.
    """

    def rest(rows: int, tokens: int) -> float:
        by_kind = roofline.breakdown(rows, tokens, 0.0).by_kind()
        return sum(by_kind.values()) - by_kind["attention"]

    token, row = (rest(1, 16) - rest(1, 9)) / 7, rest(2, 16) - rest(1, 16)
    attention = roofline.breakdown(1, 1, 1.0).parts[0]
    return {
        "rest": [_short(rest(1, size) - token * size - row) for size in SIZES],
        "token": _short(token),
        "row": _short(row),
        "moved": _short(attention.memory_s / 2),
        "sums": _short(attention.compute_s),
        "weights": _short(roofline.weight_bytes()),
        "held": [_short(roofline.row_bytes(0)), _short(roofline.row_bytes(1) - roofline.row_bytes(0))],
    }


def measured_passes(step: StepTime) -> dict[str, Any]:
    """Measured passes by cached tokens a row, rows, and tokens a row, as far as the measurements go.

    PacelineError where they know of no drafts.
    """

    def seconds(rows: int, context: int, each: Iterable[int]) -> list[float]:
        return [step.seconds(rows, rows * tokens, rows * context) for tokens in each]

    known: dict[int, list[float]] = {}
    for rows in _ROWS:
        try:
            known[rows] = seconds(rows, 0, _EACH) + seconds(rows, _CONTEXTS[-1], _EACH[:17:4])
        except PacelineError:
            break
    if not known:
        raise PacelineError(f"{step.source}: tells no pass of 17 tokens a row, so a page cannot tell what drafts take")
    all_rows = _knots(known)
    contexts = _knots(
        {held: [value for rows in all_rows for value in seconds(rows, held, _EACH[:17:4])] for held in _CONTEXTS}
    )
    return {
        "rows": all_rows,
        "each": _EACH,
        "contexts": contexts,
        "seconds": [[[_short(s) for s in seconds(rows, held, _EACH)] for rows in all_rows] for held in contexts],
    }


def _knots(values: dict[int, list[float]]) -> list[int]:
    """The places between which lines tell all other values (Douglas and Peucker 1973)."""
    places = sorted(values)
    kept, spans = {places[0], places[-1]}, [(0, len(places) - 1)]
    while spans:
        low, high = spans.pop()
        farthest, most = low, _STRAIGHT
        start, end = (np.array(values[places[at]]) for at in (low, high))
        for at in range(low + 1, high):
            share = (places[at] - places[low]) / (places[high] - places[low])
            error = float(np.abs((start + share * (end - start)) / values[places[at]] - 1).max())
            if error > most:
                farthest, most = at, error
        if farthest > low:
            kept.add(places[farthest])
            spans += [(low, farthest), (farthest, high)]
    return sorted(kept)


def _short(value: float) -> float:
    """Five digits of it."""
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0

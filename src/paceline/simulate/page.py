"""``simulate --html``: should drafting be turned on, as one interactive page that reckons by itself.

What is dear is tabulated here: the step times of the engines that the page offers, or of the one that was measured, and
the lengths of the simulated steps. The page's own arithmetic (``page_law.js``) plays rollouts as a fluid: every row
emits the mean tokens of a pass.
"""

import base64
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.report.trace import write_atomically
from paceline.schema import PacelineError
from paceline.simulate.breakdown import Layout
from paceline.simulate.drafting import HELD, Drift
from paceline.simulate.hardware import PRESETS as HARDWARE
from paceline.simulate.hardware import load_hardware
from paceline.simulate.lengths import Floats, Requests
from paceline.simulate.projection import Scenario
from paceline.simulate.rlstep import Phases
from paceline.simulate.roofline import BUCKETS, Roofline
from paceline.simulate.steptime import StepTime
from paceline.sizes.presets import PRESETS as MODELS
from paceline.sizes.shapes import load_shape

#: Tokens of a pass at which all of it but attention is reckoned; the page takes a line in between.
SIZES = (
    *(1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, *range(112, 257, 16), 288, 320, 352, 384, 448, 512),
    *(513, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 8192, 12288, 16384, 24576),
)
#: GPUs an engine that are offered, beside the layout that was asked for.
_TENSOR = (1, 2, 4, 8, 16)
#: Tokens a row at which measured passes are asked for: every draft length, and prompts.
_EACH = (*range(1, 18), 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
#: The most rows that measured passes are asked for.
_MOST_ROWS = 1024
#: A span of rows is a line where its middle is on one within this relative error.
_STRAIGHT = 1e-3
_FAR_KV = 1e6
#: Draws of the lengths that the page averages over hold so many requests together, at least one draw.
_MOST_REQUESTS = 6144
_SCORE_UNIT = 4096
_PARTS = ("page_law.js", "page_answer.js", "page_charts.js", "page.js")


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the page opens with. ``acceptance`` is conditional, by depth; ``draft_s`` seconds a pass and a position.

    ``model``, ``hardware`` and ``layout`` name the engine of reckoned passes, as the command does; None with measured
    ones. ``trained`` counts steps since the drafter was trained. Draws begin at ``seed``.
    """

    scenario: Scenario
    acceptance: Sequence[float]
    draft_s: tuple[float, float]
    phases: Phases | None = None
    drift: Drift = HELD
    trained: float = 0.0
    age_bound: int = 0
    repeats: int = 5
    seed: int = 0
    model: str | None = None
    hardware: str = "h100"
    layout: Layout = Layout()
    precision: str = "bf16"


def write_page(path: Path, start: Start, step: StepTime) -> None:
    """Write the page to ``path``. PacelineError, one line, where it cannot be written."""
    try:
        write_atomically(path, render(start, step).encode())
    except OSError as error:
        raise PacelineError(f"--html {path}: cannot be written: {error.strerror or error}") from None


def render(start: Start, step: StepTime) -> str:
    """The page as text: it loads nothing, and its policy forbids that it does."""
    here = files("paceline.simulate")
    script = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in _PARTS)
    style = files("paceline.report").joinpath("style.css").read_text(encoding="utf-8")
    style += here.joinpath("page.css").read_text(encoding="utf-8")
    # A script element ends at the first "</", also within a string.
    content = msgspec.json.encode(page_data(start, step)).decode().replace("<", "\\u003c")
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    page = here.joinpath("page.html").read_text(encoding="utf-8")
    inserted = {
        "policy": escape(policy, quote=True).replace("&#x27;", "'"),
        "style": style,
        "mode": escape("Measured passes" if step.mode == "measured" else "Reckoned passes"),
        "version": escape(version("paceline")),
        "data": content,
        "script": script,
    }
    for name, text in inserted.items():
        before, after = page.split(f"<!--{name}-->")
        page = before + text + after
    return page


def page_data(start: Start, step: StepTime) -> dict[str, Any]:
    """What the page reckons from. Passes are of one kind: a page of measured ones offers no other engine."""
    scenario = start.scenario
    phases = start.phases or Phases(generation=0.0)
    data: dict[str, Any] = {
        "mode": step.mode,
        "source": step.source,
        "trace": scenario.trace,
        "bend": _bend(start.acceptance),
        "fade": {"shape": start.drift.shape, "floor": start.drift.floor},
        "draws": _draws(start),
        "start": {
            "prompts": scenario.prompts,
            "siblings": scenario.siblings,
            "prompt": scenario.prompt_tokens,
            "mean": scenario.mean_tokens,
            "sigma": scenario.sigma,
            "longest": scenario.max_tokens,
            "slots": scenario.slots,
            "engines": scenario.engines,
            "kv": scenario.kv_tokens or 0,
            "acceptance": start.acceptance[0],
            "fall": _fall(start.acceptance),
            "drift": start.drift.per_step,
            "stale": start.trained,
            "fixed": start.draft_s[0],
            "each": start.draft_s[1],
            "drafted": "best",
            "refit": phases.refit + phases.data,
            "logprob": phases.logprob,
            "train": phases.train + phases.other,
            "drafter": phases.drafter,
            "lag": start.age_bound,
        },
    }
    if step.mode == "measured":
        return data | {"table": _table(step)}
    if start.model is None:
        raise PacelineError(f"a page of reckoned passes ({step.source}) needs the model that they are of")
    return data | _engines(start)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _fall(rates: Sequence[float]) -> float:
    """The share of a rate that is lost from one depth to the next, on geometric average."""
    if len(rates) < 2 or not (rates[0] > rates[-1] > 0):
        return 0.0
    return 1 - (rates[-1] / rates[0]) ** (1 / (len(rates) - 1))


def _bend(rates: Sequence[float]) -> dict[str, Any]:
    """Factors by which rates differ from a geometric fall, and the depth down to which they fall."""
    fall, depth = _fall(rates), len(rates) - 1 if len(rates) > 1 else 7
    smooth = [rates[0] * (1 - fall) ** at for at in range(len(rates))]
    return {"depth": depth, "by": [rate / even if even else 1.0 for rate, even in zip(rates, smooth, strict=True)]}


class _Scores:
    """A law of lengths that keeps the normal scores it is asked for."""

    def at(self, z: Floats) -> Floats:
        """Any lengths."""
        self.z = z
        return np.exp(z)


def _draws(start: Start) -> dict[str, Any]:
    """The normal scores of the simulated steps' lengths, as 16-bit numbers."""
    scenario = start.scenario
    requests = scenario.prompts * scenario.siblings
    scores = []
    for repeat in range(max(1, min(start.repeats, _MOST_REQUESTS // requests))):
        law = _Scores()
        Requests.drawn(
            law,
            prompts=scenario.prompts,
            siblings=scenario.siblings,
            prompt_tokens=1,
            max_tokens=1,
            share=scenario.share,
            seed=start.seed + repeat,
        )
        words = np.round(np.clip(law.z, -7.9, 7.9) * _SCORE_UNIT).astype("<i2")
        scores.append(base64.b64encode(words.tobytes()).decode())
    return {
        "prompts": scenario.prompts,
        "siblings": scenario.siblings,
        "share": scenario.share,
        "unit": _SCORE_UNIT,
        "most": _MOST_REQUESTS,
        "scores": scores,
    }


def _engines(start: Start) -> dict[str, Any]:
    """Every engine that the page offers: of presets, and of the model, hardware and layout that were asked for."""
    assert start.model is not None
    shapes = {shape.name: shape for shape in map(load_shape, (*MODELS, start.model))}
    gpus = {one.name: one for one in map(load_hardware, (*HARDWARE, start.hardware))}
    layouts = list(dict.fromkeys((*(Layout(tensor=size) for size in _TENSOR), start.layout)))
    engines = {}
    for shape, hardware, layout, precision in itertools.product(
        shapes.values(), gpus.values(), layouts, ("bf16", "fp8")
    ):
        try:
            roofline = Roofline(shape, hardware, layout, precision=precision)  # type: ignore[arg-type]
        except PacelineError:
            continue  # a model that does not divide so, or a precision that the GPU does not have
        place = f"{shape.name}|{hardware.name}|{layouts.index(layout)}|{precision}"
        engines[place] = _engine(roofline)
    return {
        "sizes": SIZES,
        "buckets": BUCKETS,
        "models": list(shapes),
        "hardware": {one.name: 0.9 * one.memory_bytes for one in gpus.values()},
        "layouts": [_layout_name(layout) for layout in layouts],
        "engines": engines,
        "choice": {
            "model": load_shape(start.model).name,
            "hardware": load_hardware(start.hardware).name,
            "layout": str(layouts.index(start.layout)),
            "precision": start.precision,
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


def _table(step: StepTime) -> dict[str, Any]:
    """Measured passes by rows and tokens a row, with as few rows as lines between them tell."""

    def seconds(rows: int) -> list[float]:
        return [step.seconds(rows, rows * each, 0.0) for each in _EACH]

    most = _most_rows(seconds)
    known = {rows: seconds(rows) for rows in _knots(seconds, 1, most)}
    return {
        "rows": list(known),
        "each": _EACH,
        "seconds": [[_short(value) for value in row] for row in known.values()],
        "kv": _short((step.seconds(1, 1, _FAR_KV) - step.seconds(1, 1, 0.0)) / _FAR_KV),
    }


def _most_rows(seconds: Callable[[int], list[float]]) -> int:
    """The most rows up to ``_MOST_ROWS`` that passes are known of; those known begin at 1."""
    low, high = 1, _MOST_ROWS + 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            seconds(middle)
            low = middle
        except PacelineError:
            high = middle
    return low


def _knots(seconds: Callable[[int], list[float]], low: int, high: int) -> Iterator[int]:
    """Row counts from ``low`` to ``high`` between which passes are lines."""
    yield low
    spans = [(low, high)] if high > low else []
    while spans:
        start, end = spans.pop()
        middle = (start + end) // 2
        if middle > start:
            share = (middle - start) / (end - start)
            line = [a + share * (b - a) for a, b in zip(seconds(start), seconds(end), strict=True)]
            if any(abs(found / even - 1) > _STRAIGHT for found, even in zip(seconds(middle), line, strict=True)):
                spans += [(middle, end), (start, middle)]
                continue
        yield end


def _short(value: float) -> float:
    """Five digits of it."""
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0

"""``simulate --html``: should drafting be turned on, as one interactive page that reckons by itself.

What is dear is tabulated here: the step times of the engines that the page offers, or of the one that was measured, and
the lengths of the simulated steps. The page's own arithmetic (``page_law.js``) plays rollouts as a fluid: every row
emits the mean tokens of a pass.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.files import write_atomically
from paceline.schema import PacelineError
from paceline.simulate.breakdown import Layout
from paceline.simulate.drafting import HELD, Drift
from paceline.simulate.hardware import load_hardware
from paceline.simulate.lengths import Floats, Requests
from paceline.simulate.page_passes import EngineChoice, measured_passes, reckoned_passes
from paceline.simulate.projection import Scenario
from paceline.simulate.rlstep import Phases
from paceline.simulate.steptime import StepTime
from paceline.sizes.shapes import load_shape

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
        return data | {"table": measured_passes(step)}
    if start.model is None:
        raise PacelineError(f"a page of reckoned passes ({step.source}) needs the model that they are of")
    choice = EngineChoice(load_shape(start.model), load_hardware(start.hardware), start.layout, start.precision)
    return data | reckoned_passes(choice)


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

"""What ``paceline simulate`` is given as text, made into what it simulates; each refuses in one line."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from paceline.schema import PacelineError
from paceline.simulate.breakdown import Layout
from paceline.simulate.drafting import HELD, Drift, LinearDraftCost
from paceline.simulate.hardware import load_hardware
from paceline.simulate.projection import Scenario
from paceline.simulate.rlstep import Phases
from paceline.simulate.roofline import Roofline
from paceline.simulate.steptime import Mode
from paceline.sizes.shapes import load_shape

_PHASES = ("data", "refit", "logprob", "train", "drafter", "other")
_DRIFT = "write linear or exponential:PER_STEP:FLOOR, such as exponential:0.05:0.4"


def reckoned(model: str, hardware: str, tensor: int, expert: int, precision: str) -> Roofline:
    """The roofline of ``--model`` and what goes with it."""
    if precision not in ("bf16", "fp8"):
        raise PacelineError(f"--precision {precision}: bf16 or fp8")
    kind: Literal["bf16", "fp8"] = "bf16" if precision == "bf16" else "fp8"
    return Roofline(load_shape(model), load_hardware(hardware), Layout(tensor=tensor, expert=expert), precision=kind)


def within_memory(scenario: Scenario, step: Roofline) -> Scenario:
    """The scenario with as many tokens of caches as the engine's memory holds beside the weights.

    Memory is counted in requests of mean length. Raises PacelineError where the weights do not fit, or not the longest
    request beside them.
    """
    longest, mean = scenario.prompt_tokens + scenario.max_tokens, mean_context(scenario)
    held = step.most_rows(mean) * mean
    if held < longest:
        raise PacelineError(
            f"{step.source}: beside the weights there is room for caches of {held} tokens, and a request may have "
            f"{longest}: more --tensor or --expert GPUs, fp8, or fewer --max-tokens"
        )
    return msgspec.structs.replace(scenario, kv_tokens=held)


def mean_context(scenario: Scenario) -> int:
    """Tokens of a prompt and a response of mean length."""
    return scenario.prompt_tokens + round(scenario.mean_tokens)


def numbers(name: str, text: str) -> list[float]:
    """Numbers of an option, separated by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(math.isfinite(value) for value in found):
        raise PacelineError(f"{name} {text}: give numbers, separated by commas")
    return found


def draft_cost(mode: Mode, text: str, acceptance: str) -> LinearDraftCost:
    """``--draft-ms``: milliseconds a pass and a drafted position; its source tells ``acceptance`` as well."""
    milliseconds = numbers("--draft-ms", text)
    if len(milliseconds) != 2:
        raise PacelineError(f"--draft-ms {text}: give two numbers, milliseconds a pass and a drafted position")
    fixed, each = milliseconds
    told = f"acceptance {acceptance}, {fixed:g} ms a pass and {each:g} ms a position"
    return LinearDraftCost(mode, told, fixed=fixed / 1000, per_position=each / 1000)


# A draft is a few tokens; a thousand are more than any pass verifies.
_MOST_DIGITS = 4


def draft_lengths(text: str) -> Sequence[int | Literal["adaptive"]]:
    """``--drafted``: whole numbers and adaptive."""
    found: list[int | Literal["adaptive"]] = []
    for part in text.split(","):
        if part.strip() == "adaptive":
            found.append("adaptive")
        elif part.strip().isdecimal() and len(part.strip()) <= _MOST_DIGITS:
            found.append(int(part))
        else:
            raise PacelineError(
                f"--drafted {text}: give whole numbers or adaptive, separated by commas, up to {10**_MOST_DIGITS - 1}"
            )
    return found


def phases(text: str) -> Phases:
    """``--phases``: seconds by name; generation is left to the simulation."""
    seconds: dict[str, float] = {}
    for part in text.split(","):
        name, is_pair, value = part.strip().partition("=")
        if not is_pair or name not in _PHASES:
            raise PacelineError(f"--phases {part}: write NAME=SECONDS of {', '.join(_PHASES[:-1])} or other")
        if name in seconds:
            raise PacelineError(f"--phases {text}: {name} is there twice")
        seconds[name] = numbers("--phases", value)[0]
    return Phases(generation=0.0, **seconds)


def drift(text: str | None) -> Drift:
    """``--drift``: the shape, what is lost a step, and the floor; None holds what was trained."""
    if text is None:
        return HELD
    shape, *rest = text.split(":")
    if shape not in ("linear", "exponential") or len(rest) != 2:
        raise PacelineError(f"--drift {text}: {_DRIFT}")
    try:
        per_step, floor = (float(part) for part in rest)
    except ValueError:
        raise PacelineError(f"--drift {text}: {_DRIFT}") from None
    return Drift(shape, per_step, floor)

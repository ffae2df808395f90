"""How near the page of ``paceline simulate --html`` is to the simulator: 30 settings, drawn once, in a real browser.

OMP_NUM_THREADS=1 python benchmarks/simulate_page.py

"opened" are pages that the command wrote of the setting; "moved" is one page whose address says the setting, so that
its lengths are partly other draws. 5 to 20 rollouts of each are simulated. Needs Chromium.
"""

import random
import statistics
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import chromium
from paceline.simulate.breakdown import Layout
from paceline.simulate.drafting import Acceptance, Drafting, LinearDraftCost
from paceline.simulate.given import reckoned, within_memory
from paceline.simulate.page import Start, write_page
from paceline.simulate.projection import Projection, Scenario, project

LENGTHS = (1, 3, 7, 15)
SETTINGS = 30
ENGINES = (
    ("qwen3-8b", "h100", 1, "bf16"),
    ("qwen3-30b-a3b", "h200", 1, "fp8"),
    ("qwen3-32b", "h100", 4, "bf16"),
    ("qwen3-235b-a22b", "gb200", 4, "fp8"),
    ("qwen3.5-122b-a10b", "b200", 4, "bf16"),
    ("llama-3.1-70b", "h100", 8, "bf16"),
)


def settings() -> Iterator[Start]:
    """The same each time."""
    chance = random.Random(5)
    while True:
        model, hardware, tensor, precision = chance.choice(ENGINES)
        mean = chance.choice((200, 512, 1024, 2048))
        scenario = Scenario(
            prompts=chance.choice((8, 16, 32, 64)),
            siblings=chance.choice((4, 8, 16)),
            prompt_tokens=chance.choice((64, 256, 1024)),
            mean_tokens=float(mean),
            sigma=chance.choice((0.0, 0.3, 0.6, 0.8, 1.1)),
            max_tokens=mean * chance.choice((2, 4, 8)),
            slots=chance.choice((8, 32, 64, 256)),
            engines=chance.choice((1, 1, 2, 4)),
        )
        yield Start(
            scenario=scenario,
            repeats=max(5, min(20, 2048 // (scenario.prompts * scenario.siblings))),
            acceptance=(chance.choice((0.5, 0.7, 0.8, 0.9)),),
            draft_s=(chance.choice((0.0, 1e-3)), chance.choice((0.0, 3e-4, 1e-3))),
            model=model,
            hardware=hardware,
            layout=Layout(tensor=tensor),
            precision=precision,
        )


def simulated(start: Start) -> Projection:
    """What the command says of it."""
    step = reckoned(str(start.model), start.hardware, start.layout.tensor, 1, start.precision)
    cost = LinearDraftCost("analytic", "given", fixed=start.draft_s[0], per_position=start.draft_s[1])
    scenario = within_memory(start.scenario, step)
    draft = Drafting(Acceptance(start.acceptance), cost)
    return project(scenario, step, draft, (*LENGTHS, "adaptive"), drafting="", repeats=start.repeats)


def address(start: Start) -> str:
    """The setting as a page's address has it."""
    scenario = start.scenario
    names = {"prompts": "prompts", "siblings": "siblings", "prompt": "prompt_tokens", "mean": "mean_tokens"}
    names |= {"sigma": "sigma", "longest": "max_tokens", "slots": "slots", "engines": "engines"}
    values: dict[str, Any] = {name: getattr(scenario, field) for name, field in names.items()}
    values |= {"acceptance": start.acceptance[0], "fixed": start.draft_s[0], "each": start.draft_s[1]}
    values |= {"model": start.model, "hardware": start.hardware, "precision": start.precision}
    return "#" + urllib.parse.urlencode(values | {"layout": (1, 2, 4, 8, 16).index(start.layout.tensor)})


def main() -> None:
    """Print a line a setting, then what all of them say."""
    given = settings()
    opened: list[float] = []
    moved: list[float] = []
    adaptive: list[float] = []
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        page = browser.new_page()

        def seen(path: Path, where: str = "") -> list[float]:
            page.goto("about:blank")
            page.goto(path.as_uri() + where)
            found: list[float] = page.evaluate("[...paceline.found.speedups, paceline.found.adaptive]")
            return found

        base = Path(folder) / "base.html"
        step = reckoned("qwen3-8b", "h100", 1, 1, "bf16")
        write_page(base, Start(scenario=Scenario(), acceptance=(0.75,), draft_s=(0.0, 0.0), model="qwen3-8b"), step)
        print(f"{'setting':58}  simulated with 1, 3, 7, 15, adaptive: times as fast; the page's errors, opened | moved")
        for number in range(SETTINGS):
            start = next(given)
            own = Path(folder) / "own.html"
            write_page(own, start, reckoned(str(start.model), start.hardware, start.layout.tensor, 1, start.precision))
            truth = [one.speedup for one in simulated(start).projected]
            errors = []
            for path, where in ((own, ""), (base, address(start))):
                here = seen(path, where)
                errors.append([here[at] / true - 1 for at, true in zip((*LENGTHS, 17), truth, strict=True)])
            opened += map(abs, errors[0][:-1])
            moved += map(abs, errors[1][:-1])
            adaptive += map(abs, (errors[0][-1], errors[1][-1]))
            s = start.scenario
            name = (
                f"{number + 1} {start.model} {s.prompts}x{s.siblings}, slots {s.slots} x {s.engines}, sigma {s.sigma}"
            )
            told = [" ".join(f"{100 * error:+.1f}" for error in each) for each in errors]
            print(f"{name:58}  {' '.join(f'{true:.2f}' for true in truth)}; {told[0]} | {told[1]}", flush=True)
    for what, errors_of in (("opened", opened), ("moved", moved), ("adaptive, both", adaptive)):
        errors_of.sort()
        print(
            f"{what}: median {statistics.median(errors_of):.2%}, nine of ten within "
            f"{errors_of[9 * len(errors_of) // 10]:.2%}, worst {errors_of[-1]:.2%} of {len(errors_of)}"
        )


if __name__ == "__main__":
    main()

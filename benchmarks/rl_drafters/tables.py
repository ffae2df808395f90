"""Tables and the picture of the experiment, from what its cells measured."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.report.metrics import ratio

PHASES = ("data", "refit", "generation", "logprob", "train", "drafter")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are text already."""
    lines = [" | ".join(head), "|".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def bound(share: float, tokens_per_forward: float) -> float:
    """The most that a step can gain whose generation is this ``share`` of it: 1 / (R / a + 1 - R)."""
    return 1 / (share / tokens_per_forward + 1 - share)


def phases(result: dict[str, Any], cell: dict[str, Any]) -> dict[str, float]:
    """Mean seconds of a step by phase, as it would be with this cell's drafter."""
    steps = [own["step"] for own in cell["by_step"]]
    measured = {
        "generation": cell["seconds"] / len(steps),
        "refit": cell["refit_seconds"] / len(steps),
        "data": _mean(result["data"], steps),
        "train": _mean(result["train"], steps),
    }
    log = result["heads"][cell["cell"]["start"]]
    measured["logprob"] = _mean([own["logprob"] for own in log], steps)
    trains = cell["cell"]["depth"] and cell["cell"]["is_adapted"]
    measured["drafter"] = _mean([own["drafter"] for own in log], steps) if trains else 0.0
    return {phase: measured[phase] for phase in PHASES}


def _mean(values: Sequence[float], steps: Sequence[int]) -> float:
    # The middle of few values: a stall of the machine in one step is not the phase's cost.
    return float(np.median([values[step] for step in steps]))


def plain_seconds(result: dict[str, Any]) -> float:
    """What plain decoding took, the mean of its cells: it is decoded before all others and after them."""
    return float(np.mean([cell["seconds"] for cell in result["cells"] if not cell["cell"]["depth"]]))


def generation_table(result: dict[str, Any]) -> str:
    """Every cell: what its passes gave and what the generation of its steps took."""
    base, rows = plain_seconds(result), []
    for cell in result["cells"]:
        how, kept = cell["cell"], cell["by_position"]
        rows.append(
            [
                str(how["depth"] or "–"),
                "plain" if not how["depth"] else how["start"],
                "" if not how["depth"] else "online" if how["is_adapted"] else "frozen",
                how["budget"] if how["depth"] else "",
                f"{cell['tokens_per_forward']:.2f}",
                " ".join(f"{100 * share:.0f}" for share in kept) or "–",
                f"{ratio(cell['accepted'], cell['drafted']):.0%}" if cell["drafted"] else "–",
                f"{cell['seconds']:.1f}",
                f"{base / cell['seconds']:.2f}x",
                f"{ratio(cell['draft_seconds'], cell['wall_seconds']):.0%}",
                f"{cell['unlike']} of {cell['rollouts']}",
            ]
        )
    head = "k,start,head,budget,tokens per forward,kept by position (%),acceptance,seconds,against plain"
    return markdown([*head.split(","), "drafting's share", "rollouts unlike the recorded"], rows)


def step_table(result: dict[str, Any], start: str = "in-domain") -> str:
    """Seconds of a step by phase: plain, and with an online head at every depth."""
    chosen = [result["cells"][0] | {"seconds": plain_seconds(result)}]
    drafted = (cell for cell in result["cells"] if cell["cell"]["depth"])
    chosen += [cell for cell in drafted if cell["cell"]["start"] == start and cell["cell"]["is_adapted"]]
    by_cell = [phases(result, cell) for cell in chosen]
    totals = [sum(own.values()) for own in by_cell]
    share = by_cell[0]["generation"] / totals[0]
    rows = [[phase, *(f"{own[phase]:.2f}" for own in by_cell)] for phase in PHASES]
    rows.append(["total", *(f"{total:.2f}" for total in totals)])
    rows.append(["generation", *(f"{by_cell[0]['generation'] / own['generation']:.2f}x" for own in by_cell)])
    rows.append(["step", *(f"{totals[0] / total:.2f}x" for total in totals)])
    rows.append(
        ["its bound, R = " + f"{share:.2f}", *(f"{bound(share, c['tokens_per_forward']):.2f}x" for c in chosen)]
    )
    return markdown(["seconds per step", *(_title(c["cell"]) for c in chosen)], rows)


def _title(how: dict[str, Any]) -> str:
    if not how["depth"]:
        return "plain"
    return f"k = {how['depth']}"


def moving_table(decays: dict[str, dict[str, Any]], drifts: dict[str, list[dict[str, Any]]]) -> str:
    """What a head gives and has in common with the policy, by step, for each learning rate of a policy that moves."""
    rows = []
    for rate, result in decays.items():
        steps = [int(own["step"]) for own in result["cells"][0]["by_step"]]
        lines = {f"tokens per forward, {_trained(cell)}": tokens_by_step(cell).values() for cell in result["cells"]}
        for texts, title in (("first", "the first step's texts"), ("own", "its own texts")):
            own = [row for row in drifts.get(rate, ()) if row["texts"] == texts]
            for state in ("online", "frozen") if own else ():
                lines[f"overlap on {title}, {state}"] = [row[state]["overlap_1"] for row in own]
        spans = list(itertools.pairwise([*steps, len(result["reward"])]))
        for name in ("reward", "entropy"):
            lines[f"{name}, up to the next"] = [float(np.mean(result[name][start:end])) for start, end in spans]
        rows += [[rate, name, *(f"{value:.2f}" for value in found)] for name, found in lines.items()]
    return markdown(["learning rate", "step", *map(str, steps)], rows)


def _trained(cell: dict[str, Any]) -> str:
    return "online" if cell["cell"]["is_adapted"] else "frozen"


def tokens_by_step(cell: dict[str, Any]) -> dict[int, float]:
    """Tokens per forward of a cell in each step."""
    return {int(own["step"]): own["tokens"] / own["row_forwards"] for own in cell["by_step"]}


def draw_decay(results: dict[tuple[str, str], dict[str, Any]], path: Path) -> None:
    """Tokens per forward by step: a row of panels a policy, a column a learning rate, one line a head."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from paceline.simulate.plot import COLOURS, STYLE

    policies, rates = (list(dict.fromkeys(names)) for names in zip(*results, strict=True))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 3.4 * len(rates), 0.4 + 2.6 * len(policies)), layout="constrained")
        panels = figure.subplots(len(policies), len(rates), squeeze=False, sharex=True, sharey=True)
        for (policy, rate), result in results.items():
            axes = panels[policies.index(policy)][rates.index(rate)]
            for cell, colour in zip(result["cells"], COLOURS, strict=False):
                values = tokens_by_step(cell)
                line = "-" if cell["cell"]["is_adapted"] else "--"
                axes.plot(list(values), list(values.values()), label=_trained(cell), color=colour, linestyle=line)
            axes.set_title(f"{policy}, learning rate {rate}", fontsize=10)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        for axes in panels[-1]:
            axes.set_xlabel("step")
        for axes in panels[:, 0]:
            axes.set_ylabel("tokens per forward")
        panels[0][0].set_ylim(bottom=1)
        panels[0][0].legend(loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)

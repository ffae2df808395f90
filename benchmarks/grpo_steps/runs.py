"""Real runs of GRPO on a small policy, and what their files say of each step."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from grpo_steps.predicting import Step, Told
from simulate_here import POLICY, tests_of

from paceline.config import Config, load_config
from paceline.report.timeline import IDLE, by_step, doing_seconds
from paceline.report.trace import TraceRow, read_metrics, read_timeline, read_trace, spread
from paceline.rl.loop import train

MOST = 64
#: Steps that are not judged, and those that are.
WARM, JUDGED = 2, 4
#: Prompts of a step and answers to each, more than the slots.
SIZES = {1: (2, 4), 8: (4, 4), 32: (6, 8)}


def settings(side: str, batch: int, drafted: int, seed: int, out: Path, *others: str) -> Config:
    """A run of a cell."""
    prompts, siblings = SIZES[batch]
    return load_config(
        None,
        [
            f"out={out}", f"seed={seed}", "threads=1", f"policy.path={POLICY}", "policy.dtype=float32",
            f"tasks={{text_to_sql: {{train_prompts: {prompts}, eval_prompts: 0}}}}", f"sampling.max_tokens={MOST}",
            f"drafter.kind={side}", f"drafter.budget={max(drafted, 1)}", "budget.mode=fixed",
            "drafter.history.threads=0", f"engine.slots={batch}", "engine.scouts=0", "engine.share_prompts=false",
            "engine.sentinel.canaries=0", "cotrain.when=every", "cotrain.updates=8", "cotrain.lr=3e-3",
            f"rl.steps={WARM + JUDGED}", f"rl.prompts_per_step={prompts}", f"rl.group_size={siblings}", "rl.lr=3e-4",
            "check.every=0", "checkpoint.every=0", *others,
        ],
    )  # fmt: skip


def ahead(batch: int, age: int) -> list[str]:
    """What makes a run asynchronous: one worker, which is given all that is asked for."""
    prompts, siblings = SIZES[batch]
    asked = (age + 1) * prompts * siblings
    return ["cluster.kind=ray", "cluster.rollout_workers=1", f"cluster.ahead={asked}", f"rl.max_age_steps={age}"]


def ran(config: Config) -> list[Step]:
    """Train, and read what the run's files say of its steps."""
    train(config, overwrite=True)
    return read_run(Path(config.out), config.drafter.budget)


def read_run(out: Path, drafted: int) -> list[Step]:
    """The steps of a run. Of one with workers a step's seconds are those of its timeline."""
    rows: dict[int, list[TraceRow]] = {}
    for row in read_trace(out / "rollouts.jsonl"):
        rows.setdefault(row.step, []).append(row)
    timeline = out / "timeline.jsonl"
    whole = {one.step: one.seconds for one in read_timeline(timeline)} if timeline.is_file() else {}
    return [
        Step(
            told_of(rows[record.step], drafted),
            record.seconds,
            whole.get(record.step, sum(record.seconds.values())),
            record.tokens_per_forward,
        )
        for record in read_metrics(out / "metrics.jsonl")
    ]


def between(out: Path) -> float:
    """Seconds of a judged step in which the worker of a run does not decode: it gets weights and the next requests."""
    steps = by_step(read_timeline(out / "timeline.jsonl"))
    did = [doing_seconds(spans)["worker-0"] for step, spans in steps.items() if step >= WARM]
    return statistics.median(one.get(IDLE, 0.0) + one.get("load", 0.0) for one in did)


def told_of(rows: Sequence[TraceRow], drafted: int) -> Told:
    """What a step's rollouts tell; their drafts asked for ``drafted`` tokens."""
    found = [
        SimpleNamespace(tokens=row.tokens, finish_reason=row.finish, accept_lengths=accept_lengths(row)) for row in rows
    ]
    forwards = sum(row.forwards or 0 for row in rows)
    share = sum(row.drafted or 0 for row in rows) / (forwards * drafted)
    return Told([len(row.tokens) for row in rows], *tests_of(found, drafted), share)


def accept_lengths(row: TraceRow) -> np.ndarray:
    """Drafted tokens kept by forward: each ends with a token of the policy's own, but for a last one on a draft."""
    kept = [0]
    for source in spread(row.sources or []):
        if source == "policy":
            kept.append(0)
        else:
            kept[-1] += 1
    return np.array(kept if kept[-1] else kept[:-1])

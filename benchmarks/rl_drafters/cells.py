"""The cells of the experiment: what each drafter makes of the recorded steps, decoded again with the same weights."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from heads import Follower, Start
from recording import Recording

from paceline.config import Config
from paceline.report.metrics import accept_histogram, ratio
from paceline.rl.engine import make_engine
from paceline.schema import Rollout

DEPTHS = (1, 2, 3, 5, 7)
BATCHES = (8, 32)


@dataclass(frozen=True)
class Cell:
    """``depth`` drafted tokens a pass at most (0: plain decoding), by a head that started so and is trained or not."""

    batch: int
    depth: int = 0
    start: Start = "in-domain"
    is_adapted: bool = True
    budget: str = "fixed"

    @property
    def name(self) -> str:
        """For people to read."""
        if not self.depth:
            return "plain"
        return f"k={self.depth} {self.start} {'online' if self.is_adapted else 'frozen'} {self.budget}"

    def settings(self) -> tuple[str, ...]:
        """What it changes in the configuration of the recording."""
        own = [f"engine.slots={self.batch}"]
        if self.depth:
            head = "drafter.head.init=random"
            own += ["drafter.kind=eagle3", f"drafter.budget={self.depth}", f"budget.mode={self.budget}", head]
        return tuple(own)


def fixed_cells(batch: int, depths: Sequence[int] = DEPTHS) -> list[Cell]:
    """Every depth with an in-domain start, the one in the middle with a random one.

    Plain decoding is first and last, so that the noise of the machine shows.
    """
    own = [Cell(batch, depth, "in-domain", adapted) for adapted in (True, False) for depth in depths]
    own += [Cell(batch, _middle(depths), "random", adapted) for adapted in (True, False)]
    return [Cell(batch), *own, Cell(batch)]


def adaptive_cells(batch: int, depths: Sequence[int] = DEPTHS) -> list[Cell]:
    """Adaptive budgets up to the largest depth from both starts, beside the depth in the middle and plain decoding."""
    starts: tuple[Start, ...] = ("in-domain", "random")
    own = [Cell(batch, max(depths), start, True, "adaptive") for start in starts]
    return [Cell(batch), Cell(batch, _middle(depths)), *own, Cell(batch)]


def _middle(depths: Sequence[int]) -> int:
    return depths[len(depths) // 2]


@dataclass
class Found:
    """What one cell gave over several steps, and in which step how much.

    Seconds are the process's own, on one thread: on an idle machine they are seconds, and other processes do not count.
    """

    cell: Cell
    seconds: float = 0.0
    wall_seconds: float = 0.0
    refit_seconds: float = 0.0
    draft_seconds: float = 0.0
    tokens: int = 0
    row_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    unlike: int = 0
    rollouts: int = 0
    lengths: list[int] = field(default_factory=list)
    by_step: list[dict[str, float]] = field(default_factory=list)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens a decoding row and pass."""
        return ratio(self.tokens, self.row_forwards)

    @property
    def by_position(self) -> list[float]:
        """Share of the row-forwards in which the 1st, 2nd, .. drafted token was kept."""
        counts = np.array(self.lengths)
        return [ratio(float(counts[at:].sum()), float(counts.sum())) for at in range(1, self.cell.depth + 1)]

    def add(self, step: int, rollouts: Sequence[Rollout], recorded: Sequence[list[int]], **measured: float) -> None:
        """Add a step's rollouts and what was ``measured``: seconds by part, passes."""
        own = {
            "step": step,
            "tokens": sum(len(rollout.tokens) for rollout in rollouts),
            "row_forwards": sum(rollout.forwards for rollout in rollouts),
            "drafted": sum(rollout.drafted for rollout in rollouts),
            "accepted": sum(rollout.accepted for rollout in rollouts),
            "unlike": sum(r.tokens.tolist() != tokens for r, tokens in zip(rollouts, recorded, strict=True)),
            "rollouts": len(rollouts),
            **measured,
        }
        self.by_step.append(own | {"lengths": accept_histogram(rollouts)})  # type: ignore[dict-item]
        for name, value in own.items():
            if name != "step":
                setattr(self, name, getattr(self, name) + value)
        lengths = np.bincount(
            np.concatenate([rollout.accept_lengths for rollout in rollouts]), minlength=self.cell.depth + 1
        )
        self.lengths = (lengths + np.array(self.lengths or [0] * len(lengths))).tolist()


def measure(
    recording: Recording,
    followers: dict[Start, Follower],
    cells: Sequence[Cell],
    steps: Sequence[int],
    tell: Callable[[str], None] = print,
) -> list[Found]:
    """Decode the recorded ``steps`` in every cell, one cell after the other in each step.

    The first step warms up and is not counted. Tokens that differ from the recorded ones are counted as rollouts
    ``unlike``: in float32, passes of other shapes move the last bits of logits, and near ties may fall otherwise.
    """
    found = [Found(cell) for cell in cells]
    configs: list[Config] = [recording.config(*cell.settings()) for cell in cells]
    engines = [make_engine(config, recording.start, recording.folder / "unused", False) for config in configs]
    for turn, step in enumerate(steps):
        weights, requests = recording.weights(step), recording.requests(step)
        recorded = [row.tokens for row in recording.rows(step)]
        moved = {start: follower.version(step) for start, follower in followers.items()}
        for one, engine in zip(found, engines, strict=True):
            started = time.process_time()
            engine.load_weights(step, weights)
            if one.cell.depth:
                if one.cell.is_adapted:
                    engine.load_drafter_weights(step, moved[one.cell.start])
                elif turn == 0:
                    engine.load_drafter_weights(step, followers[one.cell.start].version(0))
            refitted, before = time.process_time(), engine.stats()
            wall = time.perf_counter()
            rollouts = engine.generate(requests)
            done, wall, after = time.process_time(), time.perf_counter() - wall, engine.stats()
            if turn:
                one.add(
                    step,
                    rollouts,
                    recorded,
                    seconds=done - refitted,
                    wall_seconds=wall,
                    refit_seconds=refitted - started,
                    draft_seconds=after.draft_seconds - before.draft_seconds,
                    passes=after.forwards - before.forwards,
                )
        tell(f"{recording.folder.name}, batch {cells[0].batch}: step {step} decoded in {len(cells)} cells")
    for engine in engines:
        engine.close()
    return found

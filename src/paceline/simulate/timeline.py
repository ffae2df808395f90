"""What one simulated engine did in a rollout."""

from dataclasses import dataclass, field

from paceline.simulate.lengths import Floats


@dataclass
class EngineTimeline:
    """What one engine did. ``finish_N`` are seconds from the start, by request of the engine in order.

    ``forwards`` are row-passes; ``drafted_passes`` passes with drafts; ``tail_seconds`` those with rows in less than a
    quarter of the slots; ``read_tokens`` prompt tokens read, ``recomputed_tokens`` of them once more after preemption,
    in ``reading_passes`` that took ``reading_seconds`` (beside decoding: what they added to it). ``changes`` holds
    (seconds, rows from then on), those that are still being read among them.
    """

    finish_N: Floats
    seconds: float = 0.0
    tail_seconds: float = 0.0
    reading_seconds: float = 0.0
    tokens: int = 0
    passes: int = 0
    drafted_passes: int = 0
    forwards: int = 0
    drafted: int = 0
    reading_passes: int = 0
    read_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    most_rows: int = 0
    most_kv_tokens: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)

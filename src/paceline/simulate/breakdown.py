"""A pass over a policy taken apart: how its GPUs are laid out, and the seconds of each kind."""

import math
from typing import Literal

import msgspec


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of a deployment: ``tensor`` x ``pipeline`` hold a copy of the model, ``data`` copies share the requests.

    Experts are spread over ``expert`` GPUs: within ``tensor`` (the rest of it cuts each expert), or over the ``tensor``
    GPUs of several copies, which then work in step. Copies that do not are simulated one by one, with ``data`` 1.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.tensor * self.pipeline * self.data


class Part(msgspec.Struct, frozen=True):
    """A part of a pass: seconds that it takes to read and write its memory, and to do its sums, side by side."""

    name: str
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The longer of both."""
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """Which of both it is."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """A pass, in seconds by kind. ``padded`` are the tokens that a GPU runs, those that fill a graph up among them.

    ``experts_touched`` is the mean share of a layer's experts whose weights are read; 1 without a mixture.
    """

    parts: tuple[Part, ...]
    all_reduce_s: float
    all_to_all_s: float
    pipeline_s: float
    kernels_s: float
    host_s: float
    padded: int
    experts_touched: float

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind; they add up to the pass."""
        return {part.name: part.seconds for part in self.parts} | {
            "all-reduce": self.all_reduce_s,
            "all-to-all": self.all_to_all_s,
            "pipeline": self.pipeline_s,
            "kernels": self.kernels_s,
            "host": self.host_s,
        }


def experts_touched(count: int, active: int, tokens: float) -> float:
    """Distinct experts of ``count`` that ``tokens`` go to, in expectation, if each takes ``active`` of them evenly."""
    if active == count:
        return float(count)
    return count * -math.expm1(tokens * math.log1p(-active / count))

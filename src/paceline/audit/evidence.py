"""What emitted tokens say about the law they were drawn from: their statistics against the laws of a witness."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.audit import martingale
from paceline.audit.martingale import Increments
from paceline.audit.stats import Ints, impossible_tokens, pit
from paceline.audit.tails import Floats


@dataclass
class Evidence:
    """Statistics of N positions, gathered piece by piece, so that no law of a large vocabulary is kept.

    ``by_probability`` and ``by_id`` are probability integral transforms, ``sequence`` the response that each position
    belongs to. ``never`` holds (response, position, token) of tokens that their law excludes. ``limits`` are the most
    tokens that each response could have had, and ``stopped`` whether any could end before.
    """

    by_probability: list[Floats] = field(default_factory=list)
    by_id: list[Floats] = field(default_factory=list)
    sequence: list[Ints] = field(default_factory=list)
    surprise: list[Increments] = field(default_factory=list)
    likeliest: list[Increments] = field(default_factory=list)
    stops: list[Increments] = field(default_factory=list)
    never: list[tuple[int, int, int]] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)
    stopped: bool = False
    draws: int = 0

    def add(
        self,
        tokens_N: Ints,
        laws_NV: Floats,
        sequence_N: Ints,
        position_N: Ints,
        stop_ids: Sequence[int],
        rng: np.random.Generator,
    ) -> None:
        """Take in N positions in the order in which they were sampled; ``laws_NV`` are probabilities."""
        self.draws += len(tokens_N)
        excluded = impossible_tokens(tokens_N, laws_NV)
        where = sequence_N[excluded], position_N[excluded], tokens_N[excluded]
        self.never += [(int(s), int(t), int(token)) for s, t, token in zip(*where, strict=True)]
        uniforms_N = rng.random(len(tokens_N))
        self.by_probability.append(pit(tokens_N, laws_NV, uniforms_N, "probability"))
        self.by_id.append(pit(tokens_N, laws_NV, uniforms_N, "id"))
        self.sequence.append(sequence_N)
        self.surprise.append(martingale.surprise(tokens_N, laws_NV))
        self.likeliest.append(martingale.matches(tokens_N, laws_NV.argmax(1), laws_NV))
        if stop_ids:
            self.stopped = True
            self.stops.append(martingale.stops(tokens_N, list(stop_ids), laws_NV))

    def padded(self, rng: np.random.Generator) -> tuple[Floats, Floats, Ints]:
        """Both transforms and their responses, each response filled up to its limit with fresh uniforms.

        How many positions there are depends on what was emitted, where responses end by themselves, and a test of the
        emitted ones alone has heavy tails. With the fill their number is fixed, and all are independent and uniform
        under the law: given the past, the next value is, whether an engine or the filler made it.
        """
        sequence = np.concatenate(self.sequence)
        names, counts = np.unique(sequence, return_counts=True)
        limits = np.array([max(self.limits[int(name)], count) for name, count in zip(names, counts, strict=True)])
        starts = np.concatenate([[0], np.cumsum(limits)])
        within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(starts[:-1], counts) + within
        filled = []
        for part in (self.by_probability, self.by_id):
            values = rng.random(int(starts[-1]))
            values[at] = np.concatenate(part)
            filled.append(values)
        return filled[0], filled[1], np.repeat(names, limits)

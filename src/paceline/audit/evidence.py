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
    belongs to. ``never`` holds (response, position, token) of tokens that their law excludes.
    """

    by_probability: list[Floats] = field(default_factory=list)
    by_id: list[Floats] = field(default_factory=list)
    sequence: list[Ints] = field(default_factory=list)
    surprise: list[Increments] = field(default_factory=list)
    likeliest: list[Increments] = field(default_factory=list)
    stops: list[Increments] = field(default_factory=list)
    never: list[tuple[int, int, int]] = field(default_factory=list)
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
            self.stops.append(martingale.stops(tokens_N, list(stop_ids), laws_NV))

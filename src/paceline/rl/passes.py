"""How the passes of an update are computed: the seam between what is learned and where the policy's layers are."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.cotrain.taps import Collector
from paceline.rl.batch import Batch
from paceline.rl.policy import Policy
from paceline.rl.ranks import Dealers

Part = list[int]
"""Rows of a batch that are computed together; empty where others have a micro-batch more."""

LossOf = Callable[[int, Tensor, Tensor], Tensor]
"""The loss of a part: its number, and of its response tokens, row after row, log-probability and entropy, (N,) each."""


@dataclass(frozen=True)
class Collecting:
    """Who sees the passes, and which rollouts of the batch are kept; ``collector`` is the passes' own kind of one."""

    collector: Any
    wanted: Collection[int]


class Passes(Protocol):
    """Computes parts of a batch; every rank of those that compute together calls alike."""

    def parts(self, batch: Batch, rows: Sequence[int]) -> list[Part]:
        """Micro-batches of ``rows``: what is computed here of them."""

    def score(self, batch: Batch, parts: Sequence[Part]) -> list[Tensor]:
        """Log-probabilities of each part's response tokens, row after row, (N,), without gradients.

        Nothing on a rank that does not come to know them.
        """

    def learn(self, batch: Batch, parts: Sequence[Part], loss_of: LossOf, collecting: Collecting | None = None) -> None:
        """Add the gradients of all parts' losses to the policy's; afterwards they are whole on every rank."""

    def read(self, batch: Batch, rows: Sequence[int], collecting: Collecting) -> None:
        """Passes over ``rows`` for the collector alone; the policy stays as it is."""


class LocalPasses:
    """Passes of a policy that is whole here, each micro-batch's forward followed by its backward.

    ``ranks`` deals the micro-batches. The policy may be sharded, where gathering and reducing are its own affair.
    """

    def __init__(self, policy: Policy, ranks: Dealers, max_tokens: int, temperature: float) -> None:
        self._policy, self._ranks = policy, ranks
        self._max_tokens, self._temperature = max_tokens, temperature

    def parts(self, batch: Batch, rows: Sequence[int]) -> list[Part]:
        """Micro-batches of at most ``max_tokens``, siblings together."""
        prompts, responses = [batch.prompts[row] for row in rows], [batch.responses[row] for row in rows]
        trees = self._policy.scorer.trees(prompts, responses, self._max_tokens)
        return [[rows[i] for i in part] for part in self._ranks.microbatches(trees, self._max_tokens)]

    @torch.no_grad()
    def score(self, batch: Batch, parts: Sequence[Part]) -> list[Tensor]:
        """As the protocol says."""
        return [self._logprobs(batch, part)[0] for part in parts]

    def learn(self, batch: Batch, parts: Sequence[Part], loss_of: LossOf, collecting: Collecting | None = None) -> None:
        """As the protocol says."""
        for index, part in enumerate(parts):
            logp_N, entropy_N = self._logprobs(batch, part, collecting)
            # Of an empty part only: others have a micro-batch more, and reduce its gradient with everybody.
            loss = loss_of(index, logp_N, entropy_N) if part else logp_N.sum()
            loss.backward()

    @torch.no_grad()
    def read(self, batch: Batch, rows: Sequence[int], collecting: Collecting) -> None:
        """As the protocol says."""
        for part in self.parts(batch, rows):
            self._logprobs(batch, part, collecting)

    def _logprobs(
        self, batch: Batch, rows: Sequence[int], collecting: Collecting | None = None
    ) -> tuple[Tensor, Tensor]:
        prompts, responses = [batch.prompts[row] for row in rows], [batch.responses[row] for row in rows]
        if collecting is None:
            return self._policy.logprobs(prompts, responses, self._temperature)
        collector: Collector = collecting.collector
        wanted = [i for i, row in enumerate(rows) if row in collecting.wanted]
        return self._policy.logprobs(prompts, responses, self._temperature, collector, wanted)

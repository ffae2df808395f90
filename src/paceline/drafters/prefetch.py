"""History drafts made ahead: while the policy verifies, those of the likeliest outcomes are prepared."""

from collections.abc import Sequence

import numpy as np

from paceline.drafters.history import HistoryDrafter, flat
from paceline.history import Settings
from paceline.schema import Draft, as_tokens


class PrefetchingDrafter(HistoryDrafter):
    """A history drafter that implements ``drafters.base.Prefetcher`` too.

    An outcome of a pass is the last accepted node and the token after it. When the verified drafts are known, drafts of
    the ``outcomes`` likeliest ones of each request are prepared by the history's own threads. If one of them comes
    true and its draft is ready, ``propose`` hands it out, marked ``prefetched``; else it drafts as ever. What siblings
    say in the meantime is not in a prepared draft. With ``patient`` settings drafts that are late are waited for, so
    that they are the same in every run. Source: the prefetch of NgramRL (arXiv 2610.32881), for trees.
    """

    def __init__(
        self, settings: Settings | None = None, salt: int | None = None, native: bool = True, outcomes: int = 16
    ) -> None:
        super().__init__(settings, salt, native)
        self.outcomes = outcomes
        self._budget = 0

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """As ``HistoryDrafter.propose``, from what was prepared where that is possible."""
        self._budget = budget
        return super().propose(request_ids, budget)

    def fresh(self) -> "PrefetchingDrafter":
        """Another of the same settings and salt, which remembers nothing."""
        return PrefetchingDrafter(self.settings, self.salt, self._native, self.outcomes)

    def verifying(self, drafts: Sequence[Draft]) -> None:
        """Begin to prepare drafts for what may come of the pass over ``drafts``."""
        if not drafts:
            return
        numbers = np.array([self._live[draft.request_id].number for draft in drafts], dtype=np.int64)
        tokens, offsets = flat([draft.tokens for draft in drafts])
        parents = [
            np.arange(-1, len(draft.tokens) - 1, dtype=np.int32) if draft.parents is None else draft.parents
            for draft in drafts
        ]
        parents_N = as_tokens(np.concatenate(parents))
        self.history.prefetch_batch(numbers, tokens, parents_N, offsets, self.outcomes, self._budget)

"""Tells the seconds in which a model reads a text for the first time from those in which it drafts."""

from collections.abc import Sequence


class Reading:
    """Counts seconds for ``drafters.base.Reads``: of work on many tokens, the share of those that had to be caught up.

    What a pass of the policy emitted is read with every draft, and belongs to its price. Tokens beyond so many are of a
    prompt, or of what was said while nobody asked for drafts, or are read again: they serve all drafts to come.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float, missing: Sequence[int], budget: int) -> None:
        """Work of ``seconds`` on rows that lacked so many tokens each, for drafts of at most ``budget`` tokens."""
        new = sum(max(0, count - budget - 1) for count in missing)
        if new:
            self.seconds += seconds * new / sum(missing)

"""HistoSpec: copies from the rollouts of the previous policy update, as long as copying has paid lately."""

from paceline.drafters.baselines.base import Live, Proposal, require
from paceline.drafters.baselines.ngramrl import NgramRLDrafter
from paceline.schema import Outcome


class HistoSpecDrafter(NgramRLDrafter):
    """Remembers one epoch; each request's draft length starts at ``initial`` and adapts.

    Accepted whole, a draft makes the next one ``grow`` times as long; otherwise the next one is ``shrink`` times as
    long, at least ``least`` tokens. Other options are those of ``NgramRLDrafter``.
    """

    def __init__(
        self, initial: int = 16, grow: float = 2.0, shrink: float = 0.7, least: int = 8, **options: float
    ) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        require(least >= 1, "least", least, ">= 1 token")
        require(initial >= least, "initial", initial, ">= least")
        require(grow >= 1, "grow", grow, ">= 1")
        require(0 < shrink <= 1, "shrink", shrink, "in (0, 1]")
        self.initial = initial
        self.grow = grow
        self.shrink = shrink
        self.least = least
        self._lengths: dict[str, float] = {}

    def begin(self, live: Live) -> None:
        """Every request starts at ``initial``."""
        super().begin(live)
        self._lengths[live.name] = self.initial

    def end(self, live: Live, tokens: list[int], remember: bool) -> None:
        """The length goes with the request."""
        super().end(live, tokens, remember)
        del self._lengths[live.name]

    def extend(self, live: Live, tokens: list[int], outcome: Outcome) -> None:  # noqa: ARG002
        """Adapt to how the last draft did; none drafted, nothing learned."""
        if outcome.drafted:
            change = self.grow if outcome.accepted >= outcome.drafted else self.shrink
            # Bounded above so that a long streak is unlearned in a few rejections.
            self._lengths[live.name] = min(64.0, max(self.least, self._lengths[live.name] * change))

    def draft(self, live: Live, budget: int) -> Proposal | None:
        """A copy of the present length."""
        return super().draft(live, min(budget, int(self._lengths[live.name])))

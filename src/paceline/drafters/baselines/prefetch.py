"""NgramRL with prefetch: the drafts of the likeliest outcomes are prepared while the policy verifies.

An outcome is how many drafted tokens were accepted and which token followed. In Python the preparation costs the same
thread that drafts, so no time is saved here; what this drafter measures is coverage, the share of outcomes whose draft
was ready.
"""

from heapq import nlargest

from paceline.drafters.baselines.automaton import ROOT
from paceline.drafters.baselines.base import HISTORY, Live, Proposal, require
from paceline.drafters.baselines.ngramrl import NgramRLDrafter
from paceline.schema import Outcome

#: Occurrences, for each distinct token seen so far, that stand for tokens not seen yet; of 0.1, 0.3 and 1 the one with
#: the best coverage on recorded runs.
_ESCAPE = 0.3


class NgramRLPrefetchDrafter(NgramRLDrafter):
    """NgramRL (its options are handed on) that prepares ``candidates`` drafts a request after each proposal.

    A prepared draft is what would be proposed at that outcome, given what is remembered when it is prepared.
    """

    def __init__(self, candidates: int = 16, **options: float) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        require(candidates >= 1, "candidates", candidates, ">= 1")
        self.candidates = candidates
        self.outcomes_seen = 0
        self.outcomes_ready = 0
        self._ready: dict[str, dict[tuple[int, ...], list[int]]] = {}
        self._emitted: dict[str, list[int]] = {}

    @property
    def coverage(self) -> float:
        """The share of outcomes that had been prepared; 0 before the first."""
        return self.outcomes_ready / max(1, self.outcomes_seen)

    def extend(self, live: Live, tokens: list[int], outcome: Outcome) -> None:  # noqa: ARG002
        """The outcome decides which prepared draft holds."""
        self._emitted.setdefault(live.name, []).extend(tokens)

    def end(self, live: Live, tokens: list[int], remember: bool) -> None:
        """What was prepared goes with the request."""
        super().end(live, tokens, remember)
        self._ready.pop(live.name, None)
        self._emitted.pop(live.name, None)

    def draft(self, live: Live, budget: int) -> Proposal | None:
        """The prepared draft of what has happened since, or one made now; then the next ones are prepared."""
        emitted = tuple(self._emitted.pop(live.name, ()))
        ready = self._ready.pop(live.name, None)
        prepared = None
        if ready is not None:
            prepared = ready.get(emitted)
            self.outcomes_seen += 1
            self.outcomes_ready += prepared is not None
        tokens = self.copy(live, live.tail(self.max_match), budget) if prepared is None else prepared[:budget]
        self._ready[live.name] = {
            outcome: self.copy(live, (live.tail(self.max_match) + list(outcome))[-self.max_match :], budget)
            for outcome in self._likeliest(live, tokens)
        }
        return Proposal(tokens, [HISTORY] * len(tokens), prefetched=prepared is not None)

    def _likeliest(self, live: Live, drafted: list[int]) -> list[tuple[int, ...]]:
        """The emitted tokens of the likeliest outcomes: a prefix of the draft and one more token."""
        found: list[tuple[float, tuple[int, ...]]] = []
        context, reached = live.tail(self.max_match), 1.0
        for accepted in range(len(drafted) + 1):
            next_token = drafted[accepted] if accepted < len(drafted) else None
            following = self._following(live, (context + drafted[:accepted])[-self.max_match :])
            for token, prob in following.items():
                if token != next_token:
                    found.append((reached * prob, (*drafted[:accepted], token)))
            if next_token is not None:
                reached *= following.get(next_token, 0.0)
        return [outcome for _, outcome in nlargest(self.candidates, found)]

    def _following(self, live: Live, context: list[int]) -> dict[int, float]:
        """Probabilities of the next token: longer matches first, the rest left to shorter ones (PPM).

        The shortest match is the empty one, after which every token that is remembered may follow.
        """
        outputs = self._memories[live.request.prompt_key].outputs
        probs: dict[int, float] = {}
        left = 1.0
        for state in (*(state for state, _, _ in outputs.matches(context)), ROOT):
            children = [(token, outputs.counts[child]) for token, child in outputs.children(state)]
            escape = _ESCAPE * len(children)
            total = sum(count for _, count in children) + escape
            for token, count in children:
                probs.setdefault(token, left * count / total)
            if children:
                left *= escape / total
        return probs

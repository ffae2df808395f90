"""NgramRL as published: per prompt a cache of recent outputs, from which the newest longest match is copied.

The method of arXiv 2610.32881, from its public summary: what a model said to the same prompt an epoch ago covers most
of what it says now, so the tokens after the longest n-gram that matches the end of the context are proposed.
"""

from collections import deque

from paceline.drafters.baselines.automaton import SuffixAutomaton
from paceline.drafters.baselines.base import HISTORY, Baseline, Live, Proposal, require


class Memory:
    """The outputs to one prompt, each with the visit (one group's turn, once an epoch) in which it was given.

    The outputs of a visit serve from the next one on, in the order in which the requests started. In the order in which
    they end the longest would be the newest and be copied first, and drafts would be worse.
    """

    def __init__(self) -> None:
        self.outputs = SuffixAutomaton()
        self.visit = 0
        self._groups: set[str] = set()
        self._in_flight = 0
        self._started = 0
        self._waiting: dict[int, list[int]] = {}
        self._kept: deque[tuple[int, int]] = deque()
        self._remembered = 0

    def begin(self, group: str) -> tuple[int, int]:
        """A request starts: its visit's number and its own. Another group, or a start after a pause, opens a visit."""
        if not self._in_flight or group not in self._groups:
            for number in sorted(self._waiting):
                self._remember(self.visit, self._waiting.pop(number))
            self.visit += 1
            self._groups = {group}
        self._in_flight += 1
        self._started += 1
        return self.visit, self._started

    def end(self, visit: int, number: int, tokens: list[int] | None) -> None:
        """A request has ended; ``tokens`` are to be remembered, None: nothing is."""
        self._in_flight -= 1
        if tokens is not None and visit == self.visit:
            self._waiting[number] = tokens
        elif tokens is not None:
            self._remember(visit, tokens)

    def keep(self, epochs: int, rollouts: int) -> None:
        """Drop outputs from before the last ``epochs`` visits; with ``rollouts`` > 0 all but that many instead."""
        while self._kept and (len(self._kept) > rollouts if rollouts else self._kept[0][0] < self.visit - epochs):
            self.outputs.drop(self._kept.popleft()[1])

    def _remember(self, visit: int, tokens: list[int]) -> None:
        self._remembered += 1
        self._kept.append((visit, self._remembered))
        self.outputs.append(self._remembered, tokens)


class NgramRLDrafter(Baseline):
    """Copies from the outputs of the last ``window_epochs`` epochs, or from the last ``window`` outputs if that is > 0.

    Matches have ``min_match`` to ``max_match`` tokens; a draft of a match of m tokens has at most ``factor * m`` (0: no
    such limit). An output begins with the last ``anchor`` tokens of its prompt.
    """

    def __init__(
        self,
        window_epochs: int = 1,
        window: int = 0,
        min_match: int = 1,
        max_match: int = 32,
        factor: float = 0.0,
        anchor: int = 8,
    ) -> None:
        super().__init__()
        require(window_epochs >= 1, "window_epochs", window_epochs, ">= 1")
        require(window >= 0, "window", window, ">= 0 outputs (0: window_epochs decides)")
        require(min_match >= 1, "min_match", min_match, ">= 1")
        require(max_match >= min_match, "max_match", max_match, ">= min_match")
        require(factor >= 0, "factor", factor, ">= 0 (0 is no limit)")
        require(anchor >= 0, "anchor", anchor, ">= 0 tokens")
        self.window_epochs = window_epochs
        self.window = window
        self.min_match = min_match
        self.max_match = max_match
        self.factor = factor
        self.anchor = anchor
        self._memories: dict[str, Memory] = {}
        self._visits: dict[str, tuple[int, int]] = {}

    @property
    def nbytes(self) -> int:
        """Estimated bytes of what is remembered."""
        return sum(memory.outputs.nbytes for memory in self._memories.values())

    @property
    def tokens_held(self) -> int:
        """Tokens of the outputs that are remembered, anchors included."""
        return sum(memory.outputs.tokens_held for memory in self._memories.values())

    def begin(self, live: Live) -> None:
        """The prompt is visited; what has left the window is dropped."""
        memory = self._memories.setdefault(live.request.prompt_key, Memory())
        self._visits[live.name] = memory.begin(live.request.group)
        memory.keep(self.window_epochs, self.window)

    def end(self, live: Live, tokens: list[int], remember: bool) -> None:
        """The output becomes a source."""
        memory = self._memories[live.request.prompt_key]
        output = live.prompt_tail(self.anchor) + tokens if remember else None
        memory.end(*self._visits.pop(live.name), output)
        memory.keep(self.window_epochs, self.window)

    def draft(self, live: Live, budget: int) -> Proposal | None:
        """A copy of what followed the newest of the longest matches."""
        tokens = self.copy(live, live.tail(self.max_match), budget)
        return Proposal(tokens, [HISTORY] * len(tokens))

    def copy(self, live: Live, context: list[int], budget: int) -> list[int]:
        """What would be drafted for the request if its context ended with ``context``."""
        outputs = self._memories[live.request.prompt_key].outputs
        for state, _, longest in outputs.matches(context):
            if longest < self.min_match:
                break
            most = min(budget, max(1, int(self.factor * longest))) if self.factor else budget
            tokens = outputs.newest_continuation(state, most)
            if tokens:
                return tokens
        return []

"""REST: the longest match among everything that any prompt's rollouts said, continued by frequency.

The method of He et al. (arXiv 2311.08252): the continuations of the longest suffix that is found are laid into a trie,
weighted by how often each was said, and the heaviest nodes are drafted. Here the datastore is the finished rollouts.
"""

from collections import deque

from paceline.drafters.baselines.automaton import SuffixAutomaton
from paceline.drafters.baselines.base import HISTORY, Baseline, Live, Proposal, require
from paceline.drafters.baselines.suffix_tree import grow_path, grow_tree


class RestDrafter(Baseline):
    """Matches of ``min_match`` to ``max_match`` tokens, continuations of at most ``length``, as a ``tree`` or a chain.

    The last ``window`` rollouts are the datastore; each begins with the last ``anchor`` tokens of its prompt.
    """

    def __init__(
        self,
        min_match: int = 1,
        max_match: int = 16,
        length: int = 16,
        tree: bool = True,
        window: int = 10_000,
        anchor: int = 8,
    ) -> None:
        super().__init__()
        require(min_match >= 1, "min_match", min_match, ">= 1")
        require(max_match >= min_match, "max_match", max_match, ">= min_match")
        require(length >= 1, "length", length, ">= 1 token")
        require(window >= 1, "window", window, ">= 1 rollout")
        require(anchor >= 0, "anchor", anchor, ">= 0 tokens")
        self.min_match = min_match
        self.max_match = max_match
        self.length = length
        self.tree = tree
        self.window = window
        self.anchor = anchor
        self._store = SuffixAutomaton()
        self._kept: deque[int] = deque()
        self._remembered = 0

    @property
    def nbytes(self) -> int:
        """Estimated bytes of the datastore."""
        return self._store.nbytes

    @property
    def tokens_held(self) -> int:
        """Tokens of the outputs that are remembered, anchors included."""
        return self._store.tokens_held

    def end(self, live: Live, tokens: list[int], remember: bool) -> None:
        """The rollout joins the datastore; the oldest one leaves a full one."""
        if not remember:
            return
        self._remembered += 1
        self._store.append(self._remembered, live.prompt_tail(self.anchor) + tokens)
        self._kept.append(self._remembered)
        if len(self._kept) > self.window:
            self._store.drop(self._kept.popleft())

    def draft(self, live: Live, budget: int) -> Proposal | None:
        """The heaviest continuations of the longest match that has any."""
        grow = grow_tree if self.tree else grow_path
        for state, _, longest in self._store.matches(live.tail(self.max_match)):
            if longest < self.min_match:
                break
            found = grow(self._store, state, budget, self.length, 0.0)
            if found.tokens:
                return found.proposal([HISTORY] * len(found.tokens), self.tree)
        return None

"""A draft as it grows: the request that it is for, its backbone and leaves, and the laws that they were drawn from."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from paceline.drafters.slots import Holder
from paceline.sampling.noise import signed64
from paceline.sampling.processors import Prefix, Spec
from paceline.schema import SOURCES, Draft, RolloutRequest, Tokens, as_tokens

_MODEL = SOURCES.index("model")


#: What a drafter claims of a token that it only follows: as much as of any that it did not draft.
_DETOUR_CLAIM = 0.05


def claim_of(share: float, rank: int) -> float:
    """What is claimed of a child: as if the policy's sample were the first child half of the time, and else a draw
    from the drafter's law."""
    return (share + (rank == 0)) / 2


class Live(Holder):
    """A request in flight: its ``total`` committed tokens, and the backbone that was drafted to follow them."""

    def __init__(self, request: RolloutRequest, spec: Spec) -> None:
        super().__init__()
        self.request = request
        self.spec = spec
        self.seed = signed64(request.seed)
        self.total = self.prompt_length = len(request.prompt)
        self.drafted = 0
        #: What the drafter claimed of each node of the backbone, given the node above.
        self.claims: list[float] = []
        self._tokens = np.empty(self.prompt_length + request.params.max_tokens, dtype=np.int32)
        self._tokens[: self.total] = request.prompt

    @property
    def length(self) -> int:
        """Positions that the committed text takes in the drafter's cache."""
        return self.total

    @property
    def emitted(self) -> int:
        """Tokens of the response."""
        return self.total - self.prompt_length

    @property
    def backbone(self) -> Tokens:
        """The drafted tokens, a view."""
        return self._tokens[self.total : self.total + self.drafted]

    @property
    def prefix(self) -> Prefix:
        """The prompt, and the response with the drafted tokens behind it."""
        return self.request.prompt, self._tokens[self.prompt_length : self.total + self.drafted]

    @property
    def newest(self) -> Tokens:
        """The last token that was drafted, as the drafter calls it."""
        return self.backbone[-1:]

    def tokens(self, start: int, stop: int) -> Tokens:
        """Committed tokens at positions of the cache."""
        return self._tokens[start : min(stop, self.total)]

    def draft(self, token: int, claim: float) -> None:
        """One more node of the backbone."""
        self._tokens[self.total + self.drafted] = token
        self.claims.append(claim)
        self.drafted += 1

    def restart(self) -> None:
        """Nothing is drafted."""
        self.drafted, self.claims = 0, []

    def extend(self, tokens: Tokens) -> int:
        """Commit emitted tokens; how many of them follow the backbone. What is held of others is let go."""
        count = min(self.drafted, len(tokens))
        differ = np.flatnonzero(self.backbone[:count] != tokens[:count])
        same = int(differ[0]) if len(differ) else count
        self.held = min(self.held, self.total + same)
        self._tokens[self.total : self.total + len(tokens)] = tokens
        self.total += len(tokens)
        return same


R = TypeVar("R", bound=Live)


class Growing(Generic[R]):
    """A draft on its way: ``depth`` levels so far, the backbone ends at node ``end`` (-1: the committed text)."""

    def __init__(self, row: R, deepest: int) -> None:
        self.row = row
        self.deepest = deepest
        self.depth = 0
        self.end = -1
        self.goes_on = True
        #: The probability that the whole backbone is accepted, by what was learned; kept while drafts are paced.
        self.reached = 1.0
        #: Nodes that the backbone goes on by and the drafter would not have drafted.
        self.detours = 0
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._law_of: list[int] = []
        self._probs: list[float] = []

    def grow(
        self,
        tokens: Iterable[int],
        shares: Iterable[float],
        budget: int,
        *,
        is_drawn: bool,
        detour: tuple[int, float] | None = None,
    ) -> None:
        """One level: children of the backbone's end, best first, -1 for none, with their shares of the law.

        With ``detour`` the backbone goes on by that token, so probable, which counts for nothing in the budget.
        """
        above = self._probs[self.end] if self.end >= 0 else 1.0
        parent, first = self.end, len(self.tokens)
        for rank, (token, share) in enumerate(zip(tokens, shares, strict=True)):
            if token < 0 or len(self.tokens) - self.detours == budget:
                break
            claim = claim_of(share, rank)
            if rank == 0 and detour is None:
                self.row.draft(token, claim)
            self._add(token, parent, above * claim, is_drawn)
        self.depth += 1
        if detour is not None:
            self._turn(detour, first, parent, above)
        elif len(self.tokens) > first:
            self.end = first
        self.goes_on = len(self.tokens) > first and len(self.tokens) - self.detours < budget
        # Nothing is sampled behind a token that ends the response.
        self.goes_on = (
            self.goes_on and self.depth < self.deepest and self.tokens[self.end] not in self.row.spec.stop_ids
        )

    def _turn(self, detour: tuple[int, float], first: int, parent: int, above: float) -> None:
        token, prob = detour
        self.row.draft(token, prob)
        if token in self.tokens[first:]:
            self.end = first + self.tokens[first:].index(token)
            return
        self.end = len(self.tokens)
        self.detours += 1
        self._add(token, parent, above * _DETOUR_CLAIM, is_drawn=False)

    def _add(self, token: int, parent: int, prob: float, is_drawn: bool) -> None:
        self.tokens.append(token)
        self._parents.append(parent)
        self._law_of.append(self.depth if is_drawn else -1)
        self._probs.append(prob)

    def finished(self, version: int, is_chain: bool, laws_LV: torch.Tensor | None) -> Draft:
        """The draft, with the laws if any node was drawn from one."""
        is_drawn = laws_LV is not None and any(law >= 0 for law in self._law_of)
        return Draft(
            request_id=self.row.request.request_id,
            tokens=as_tokens(self.tokens),
            length=self.row.total,
            version=version,
            parents=None if is_chain and not self.detours else as_tokens(self._parents),
            sources=np.full(len(self.tokens), _MODEL, dtype=np.uint8),
            probs=None if is_drawn else np.array(self._probs, dtype=np.float32),
            laws=laws_LV if is_drawn else None,
            law_of=as_tokens(self._law_of) if is_drawn else None,
        )


class Laws:
    """The laws of a batch of drafts, (drafts, depths, V), in one tensor."""

    def __init__(self, drafts: int, depths: int, like_NV: torch.Tensor) -> None:
        self._laws_NDV = like_NV.new_empty((drafts, depths, like_NV.shape[1]))

    def keep(self, drafts: Sequence[int], depth: int, law_NV: torch.Tensor) -> None:
        """Store the laws of one depth."""
        self._laws_NDV[list(drafts), depth] = law_NV

    def of(self, draft: int, depth: int) -> torch.Tensor:
        """The laws of a draft of ``depth`` levels, (depth, V), a view."""
        return self._laws_NDV[draft, :depth]

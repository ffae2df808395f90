"""A drafter for toy policies: draws its drafts from a toy law and says from what, or proposes its likeliest tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.audit.toys import Pairs, ToyPolicy, last_two
from paceline.sampling.noise import Purpose, gumbels, signed64
from paceline.schema import Draft, Outcome, Rollout, RolloutRequest, as_tokens, derive_seed


class ToyDrafter:
    """Implements ``drafters.base.Drafter`` with a toy law.

    A draft goes ``depth`` tokens ahead; at each depth ``width`` children are drawn without replacement, of which the
    first is followed. With ``point`` they are the ``width`` likeliest tokens instead, point masses without a law. With
    ``ragged`` every draft has a random depth of 0 to ``depth``. Its noise is a function of ``seed``, request and
    length, so that a draft does not depend on the batch.
    """

    def __init__(
        self,
        law: ToyPolicy,
        *,
        depth: int = 4,
        width: int = 1,
        point: bool = False,
        ragged: bool = False,
        seed: int = 0,
    ) -> None:
        self.law = law
        self.depth = depth
        self.width = min(width, law.vocabulary)
        self.point = point
        self.ragged = ragged
        self.seed = seed
        self._version = 0
        self._requests: dict[str, RolloutRequest] = {}
        self._ends: dict[str, tuple[int, int]] = {}
        self._lengths: dict[str, int] = {}

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Remember how the prompts end."""
        for request in requests:
            name = request.request_id
            self._requests[name] = request
            self._ends[name] = last_two(request.prompt, request.prompt[:0])
            self._lengths[name] = len(request.prompt)

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A draft for every request, at most ``budget`` nodes each."""
        if not request_ids:
            return []
        depth, count = min(self.depth, budget // self.width), len(request_ids)
        last_R2 = np.array([self._ends[name] for name in request_ids], dtype=np.int64)
        tokens_RDW = np.zeros((count, depth, self.width), dtype=np.int32)
        laws_RDV = torch.zeros((count, depth, self.law.vocabulary), dtype=self.law.table.dtype)
        for at in range(depth):
            laws_RDV[:, at], tokens_RDW[:, at] = self.draw(request_ids, at, last_R2)
            last_R2 = np.stack([last_R2[:, 1], tokens_RDW[:, at, 0].astype(np.int64)], axis=1)
        law_of = np.repeat(np.arange(depth, dtype=np.int32), self.width)
        # Every child hangs below the first of the depth before.
        parents = ((law_of - 1) * self.width).clip(min=-1).astype(np.int32)
        drafts = []
        for row, name in enumerate(request_ids):
            nodes = self.width * (self._key(name, -1) % (depth + 1) if self.ragged else depth)
            drafts.append(
                Draft(
                    request_id=name,
                    tokens=tokens_RDW[row].reshape(-1)[:nodes],
                    length=self._lengths[name],
                    version=self._version,
                    parents=None if self.width == 1 else parents[:nodes],
                    laws=None if self.point else laws_RDV[row],
                    law_of=None if self.point else law_of[:nodes],
                )
            )
        return drafts

    def draw(self, request_ids: Sequence[str], at: int, last_R2: Pairs) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """The laws (R, V) that are reported at depth ``at`` and the children (R, width) drawn from them, in order."""
        laws_RV = self.law.logits(last_R2)
        scores_RV = laws_RV if self.point else laws_RV + self.noise(request_ids, at)
        return laws_RV, scores_RV.topk(self.width, dim=-1).indices.numpy()

    def noise(self, request_ids: Sequence[str], at: int) -> torch.Tensor:
        """Gumbel noise (R, V): the best scores are draws without replacement, in order."""
        keys_R = torch.tensor([signed64(self._key(name, at)) for name in request_ids])
        draws = {Purpose.TOKEN: self.law.vocabulary}
        return gumbels(self.seed, keys_R, torch.zeros_like(keys_R), draws)[0]

    def _key(self, name: str, at: int) -> int:
        # The length is part of it: block acceptance looks at tokens that a later draft must not repeat.
        return derive_seed("draft", self.seed, self._requests[name].seed, self._lengths[name], at)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Follow what was emitted."""
        for outcome in outcomes:
            name = outcome.request_id
            self._ends[name] = last_two(as_tokens(self._ends[name]), outcome.tokens)
            self._lengths[name] += len(outcome.tokens)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Forget the requests."""
        for rollout in rollouts:
            for known in (self._requests, self._ends, self._lengths):
                known.pop(rollout.request_id, None)

    def on_weights(self, version: int) -> None:
        """Drafts carry the version of the weights that will verify them; the drafter's own law stays."""
        self._version = version

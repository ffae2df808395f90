"""Drafts of a model with laws of its own, sampled as the policy will be: what such drafters have in common.

Under coupled acceptance a node is the token that the drafter's law and the policy's own noise give at that position:
the closer the law is to the policy's, the more often it is the policy's sample, and what is emitted is that sample in
any case. Under rejection and block acceptance nodes are drawn with noise of the drafter's own, and the draft carries
the laws that they were drawn from.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Generic, TypeVar

import torch
from msgspec.structs import replace

from paceline.drafters.base import Guide, PolicyTraits
from paceline.drafters.growth import Growing, Laws, Live, claim_of
from paceline.drafters.pace import Pacer
from paceline.drafters.reading import Reading
from paceline.drafters.slots import Slots
from paceline.forward.kv import KVSlots
from paceline.sampling.grammar import Vocabulary
from paceline.sampling.keyed import coupled_candidates, draw_candidates
from paceline.sampling.noise import MOST_SOFT_NODES, draft_position
from paceline.sampling.processors import Prefix, Spec, process
from paceline.schema import Draft, Outcome, Rollout, RolloutRequest

_LOG = logging.getLogger(__name__)


R = TypeVar("R", bound=Live)


class SoftDrafter(ABC, Generic[R]):
    """Implements ``drafters.base.Drafter``, ``Learned``, ``Paced`` and ``Reads``; a subclass has the model.

    A draft is a backbone of as many depths as ``budget`` nodes allow at ``width`` children a depth; the first child
    carries the backbone on, the others are leaves beside it. A depth costs one forward pass of all rows that go on.
    Every law goes through the request's own processors, so a node is what the policy would say if it were the drafter.
    Greedy requests get the likeliest tokens, as point masses.

    A response that outgrows the drafter's context is no longer drafted for. ``name`` names the model in messages, and
    ``context`` is how many positions it was made for; less than the policy's is warned about. Its key-value memory has
    as many slots as requests were ever drafted for at once. ``grammars`` says what ids stand for; without it a grammar
    is not looked at, which costs acceptance only. ``clock`` gives seconds.
    """

    def __init__(
        self,
        policy: PolicyTraits,
        kv: KVSlots,
        *,
        name: str,
        width: int = 1,
        grammars: Vocabulary | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.policy = policy
        self.width = width
        self.name = name
        #: The version of the policy that the drafter's own weights were made for.
        self.weights_version = 0
        self.pacer = Pacer()
        self._reading = Reading()
        self._grammars = grammars
        self._clock = clock
        self._version = 0
        self._loaded: dict[str, torch.Tensor] | None = None
        self._guide: Guide | None = None
        self._live: dict[str, R] = {}
        self._slots: Slots[R] = Slots(kv)

    # What a model does

    @abstractmethod
    def _row(self, request: RolloutRequest, spec: Spec) -> R:
        """A request that becomes known."""

    @abstractmethod
    def _room(self, row: R) -> int:
        """How many depths the drafter's context leaves for the row; 0 or less also where it cannot draft for it."""

    @abstractmethod
    def _lacks(self, row: R) -> int:
        """How many committed tokens ``_begin`` will take up for the row; what was drafted and not emitted is let go."""

    @abstractmethod
    def _begin(self, rows: Sequence[R]) -> torch.Tensor:
        """Take up the committed tokens of rows in slot order; raw logits of what follows them, (rows, V)."""

    @abstractmethod
    def _deepen(self, rows: Sequence[R]) -> torch.Tensor:
        """Take up the last drafted token of rows in slot order; raw logits of what follows it, (rows, V)."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights in use, by their names in a checkpoint."""

    @abstractmethod
    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a set of weights into the model. WeightsError, with nothing loaded, where they do not fit."""

    # The seam

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known. A slot is theirs from their first draft on."""
        for request in requests:
            self._live[request.request_id] = self._row(request, self._spec(request))

    @torch.inference_mode()
    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A draft for each request that has room for one, at most ``budget`` nodes each."""
        if self.policy.acceptance != "coupled":
            budget = min(budget, MOST_SOFT_NODES)
        growing = [Growing(row, self._deepest(row, budget)) for row in (self._live[name] for name in request_ids)]
        growing = [draft for draft in growing if draft.deepest > 0]
        if not growing:
            return []
        self._slots.place([draft.row for draft in growing], max(draft.row.length + draft.deepest for draft in growing))
        growing.sort(key=lambda draft: draft.row.slot)
        laws: Laws | None = None
        going, started = list(range(len(growing))), self._clock()
        missing = [self._lacks(draft.row) for draft in growing]
        logits_NV = self._begin([draft.row for draft in growing])
        while going:
            batch = [growing[index] for index in going]
            law_NV = process(logits_NV, [draft.row.spec for draft in batch], _prefixes(batch))
            if laws is None and self.policy.acceptance != "coupled":
                laws = Laws(len(growing), max(draft.deepest for draft in growing), law_NV)
            if laws is not None:
                laws.keep(going, batch[0].depth, law_NV)
            tokens_NC, shares_NC = self._children(batch, law_NV)
            for draft, tokens, shares in zip(batch, tokens_NC, shares_NC, strict=True):
                is_drawn = laws is not None and draft.row.spec.params.temperature > 0
                detour = self._detour(draft.row, tokens[0], shares[0]) if laws is None else None
                draft.grow(tokens, shares, budget, is_drawn=is_drawn, detour=detour)
            depth, seconds = batch[0].depth, self._clock() - started
            if depth > 1:
                self.pacer.add(len(batch), seconds)
            else:
                self._reading.add(seconds, missing, budget)
            going = [index for index in going if growing[index].goes_on]
            if self.pacer.rate > 0:
                for index in going:
                    growing[index].reached *= self.pacer.share(depth, growing[index].row.claims[-1])
                chosen = self.pacer.deeper([growing[index].reached for index in going], depth + 1, self.width)
                going = [going[n] for n in chosen]
            if going:
                started = self._clock()
                logits_NV = self._deepen([growing[index].row for index in going])
        is_chain = self.width == 1
        return [
            draft.finished(self._version, is_chain, laws.of(index, draft.depth) if laws is not None else None)
            for index, draft in enumerate(growing)
            if draft.tokens
        ]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Tokens were emitted; they enter the cache with the next draft."""
        backbones = []
        for outcome in outcomes:
            row = self._live[outcome.request_id]
            tested = min(row.drafted, len(outcome.tokens))
            if self.policy.acceptance != "coupled":
                # What was not verified says little: the policy's own sample differs from what it would have accepted.
                tested = min(tested, -(-outcome.drafted // self.width))
            followed = row.extend(outcome.tokens)
            if tested:
                backbones.append((row.claims, min(tested, followed + 1), followed))
            row.restart()
        self.pacer.learn(backbones)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete, or aborted: their slots are free."""
        for rollout in rollouts:
            self._slots.free(self._live.pop(rollout.request_id))

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``; the drafter's own weights stay."""
        self._version = version
        self.pacer.loosen()

    def pace(self, tokens_per_second: float, node_seconds: float = 0.0) -> None:
        """What a second is worth now, in tokens of the whole batch, and what verifying a node takes of it.

        With 0 drafts are wanted whole.
        """
        self.pacer.pace(tokens_per_second, node_seconds)

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over weights made for ``version`` of the policy; nothing that was cached with others is used again.

        WeightsError, with nothing loaded, where they do not fit.
        """
        self._take(tensors)
        self._loaded = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self.weights_version = version
        self._forget()
        self.pacer.loosen()

    def reload(self) -> bool:
        """Load again what was loaded last; False where nothing was."""
        if self._loaded is None:
            return False
        self._take(self._loaded)
        self._forget()
        return True

    def _forget(self) -> None:
        """What the model has computed is void."""
        self._slots.void()

    def reading_seconds(self) -> float:
        """Seconds that went so far into texts that were new to the model."""
        return self._reading.seconds

    def guide(self, guide: Guide) -> None:
        """Under coupled acceptance ``guide`` may have drafts go on behind a token that another has drafted."""
        self._guide = guide

    # A draft

    def _detour(self, row: R, token: int, share: float) -> tuple[int, float] | None:
        if self._guide is None or token < 0:
            return None
        return self._guide(row.request.request_id, row.backbone.tolist(), token, claim_of(share, 0))

    def _warn_of_context(self, context: int) -> None:
        """Say so where drafts will end before the policy does."""
        if context < self.policy.context:
            _LOG.warning(
                "drafter_context: %s was made for %d positions (max_position_embeddings), the policy decodes up to %d; "
                "nothing is drafted beyond the former, raise it if the drafter was trained for more",
                self.name,
                context,
                self.policy.context,
            )

    def _spec(self, request: RolloutRequest) -> Spec:
        params = request.params
        stop_ids = params.stop_token_ids + (() if params.ignore_eos else self.policy.eos_ids)
        if params.grammar is None:
            return Spec(params, stop_ids)
        if self._grammars is None:
            return Spec(replace(params, grammar=None), stop_ids)
        return Spec(params, stop_ids, self._grammars.matcher(params.grammar))

    def _deepest(self, row: R, budget: int) -> int:
        """How deep a draft may go: the last token before the limit needs no draft, and no token past the context."""
        row.restart()
        room = row.request.params.max_tokens - row.emitted - 1
        return min(-(-budget // self.width), room, self._room(row))

    def _children(self, batch: Sequence[Growing[R]], law_NV: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Up to ``width`` children of each backbone's end with their shares of the law; children without one are -1."""
        count = min(self.width, law_NV.shape[1])
        device = law_NV.device
        seed_N = torch.tensor([draft.row.seed for draft in batch], dtype=torch.int64, device=device)
        greedy = [n for n, draft in enumerate(batch) if draft.row.spec.params.temperature == 0]
        tokens_NC = torch.empty((len(batch), count), dtype=torch.int64, device=device)
        if len(greedy) < len(batch):
            is_coupled = self.policy.acceptance == "coupled"
            keys = [
                draft.row.emitted + draft.depth if is_coupled else draft_position(draft.row.emitted, draft.end)
                for draft in batch
            ]
            key_N = torch.tensor(keys, dtype=torch.int64, device=device)
            sample = coupled_candidates if is_coupled else draw_candidates
            tokens_NC = sample(law_NV, self.policy.run_seed, seed_N, key_N, count)
        if greedy:
            best_KV = law_NV[greedy]
            tokens_NC[greedy] = best_KV.argmax(-1, keepdim=True) if count == 1 else best_KV.topk(count, dim=-1).indices
        whole_N1 = torch.logsumexp(law_NV.to(torch.promote_types(law_NV.dtype, torch.float32)), dim=-1, keepdim=True)
        shares_NC = (law_NV.gather(1, tokens_NC.clamp(min=0)) - whole_N1).double().exp()
        # A law that is empty or not a number gives no child, whatever was drawn from it.
        is_none_NC = (tokens_NC < 0) | ~(shares_NC > 0)
        return tokens_NC.masked_fill(is_none_NC, -1).tolist(), shares_NC.masked_fill(is_none_NC, 0.0).tolist()


def _prefixes(batch: Sequence[Growing[R]]) -> Callable[[int], Prefix]:
    """The prefix of each draft's next level, by its number in the batch."""

    def prefix(n: int) -> Prefix:
        return batch[n].row.prefix

    return prefix

"""Drafts with a small language model that shares the policy's vocabulary: its own laws, sampled as the policy will be.

Under coupled acceptance a node is the token that the drafter's law and the policy's own noise give at that position:
the closer the law is to the policy's, the more often it is the policy's sample, and what is emitted is that sample in
any case. Under rejection and block acceptance nodes are drawn with noise of the drafter's own, and the draft carries
the laws that they were drawn from.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from paceline.config import DraftModelConfig
from paceline.drafters.base import PolicyTraits
from paceline.drafters.reading import Reading
from paceline.forward.attention import PassRow
from paceline.forward.pretrained import ModelError, load_pretrained, model_source
from paceline.forward.runner import Runner, copy_tensors
from paceline.sampling.grammar import Vocabulary
from paceline.sampling.keyed import coupled_candidates, draw_candidates
from paceline.sampling.noise import MOST_SOFT_NODES, draft_position, signed64
from paceline.sampling.processors import Prefix, Spec, process
from paceline.schema import SOURCES, Draft, Outcome, Rollout, RolloutRequest, Tokens, as_tokens

_KEY = "drafter.draft_model.path"
_NO_PARENTS = as_tokens([])
_MODEL = SOURCES.index("model")
#: Most tokens of a pass that fills the cache with committed tokens.
_FILL_TOKENS = 2048
_KV_STEP = 64
_NO_SLOT = -1


class DraftModelDrafter:
    """Implements ``drafters.base.Drafter`` and ``Learned`` over a causal language model of transformers, its own.

    A draft is a backbone of as many depths as ``budget`` nodes allow at ``width`` children a depth; the first child
    carries the backbone on, the others are leaves beside it. A depth costs one forward pass of the whole batch. Every
    law goes through the request's own processors, so a node is what the policy would say if it were the drafter. Greedy
    requests get the likeliest tokens, as point masses.

    A response that outgrows the drafter's context is no longer drafted for. Weights of the policy are never loaded into
    the drafter. Its key-value memory has as many slots as requests were ever drafted for at once. ``grammars`` says
    what ids stand for; without it a grammar is not looked at, which costs acceptance only. Raises ModelError where the
    vocabulary is not the policy's, UnsupportedModelError where the model cannot be run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PolicyTraits,
        *,
        width: int = 1,
        grammars: Vocabulary | None = None,
        name: str = "the draft model",
    ) -> None:
        size = int(model.config.get_text_config().vocab_size)
        if size != policy.vocabulary_size:
            raise ModelError(
                f"{name}: its vocabulary has {size} tokens, the policy's {policy.vocabulary_size}; "
                "drafter and policy must share a tokenizer"
            )
        self.policy = policy
        self.width = width
        self._grammars = grammars
        self._runner = Runner(model)
        #: The version of the policy that the drafter's own weights were made for.
        self.weights_version = 0
        self._loaded: dict[str, torch.Tensor] = {}
        self._source: DraftModelConfig | None = None
        self._reading = Reading()
        self._version = 0
        self._calls = 0
        self._most = 0
        self._live: dict[str, _Live] = {}
        self._slots: list[_Live] = []

    @classmethod
    def from_config(cls, config: DraftModelConfig, policy: PolicyTraits, grammars: Vocabulary | None = None) -> Self:
        """The drafter that a configuration asks for. ModelError, one line, where its model cannot be loaded whole."""
        model, name = _load(config), f"{_KEY}={config.path}"
        drafter = cls(model.to(policy.device), policy, width=config.width, grammars=grammars, name=name)
        drafter._source = config
        return drafter

    @property
    def model(self) -> PreTrainedModel:
        """The model that drafts."""
        model: PreTrainedModel = self._runner.model
        return model

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The parameters of the model that drafts, by their names in it."""
        return dict(self.model.named_parameters())

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over all parameters, made for ``version``. WeightsError, with nothing loaded, where they do not fit."""
        copy_tensors(self.weights, tensors, None, "drafter")
        self._loaded = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self.weights_version = version
        self._void()

    def reload(self) -> bool:
        """Load what was loaded last again, at first from where the configuration got it; False where that is nowhere.

        ModelError or WeightsError, with nothing changed, where it cannot be loaded whole.
        """
        if self._source is None and not self._loaded:
            return False
        if self._source is not None:
            fresh = _load(self._source)
            copy_tensors(self.weights, dict(fresh.named_parameters()), None, "drafter")
            with torch.no_grad():
                for name, buffer in fresh.named_buffers():
                    self.model.get_buffer(name).copy_(buffer)
        if self._loaded:
            copy_tensors(self.weights, self._loaded, None, "drafter")
        self._void()
        return True

    def reading_seconds(self) -> float:
        """Seconds that went so far into texts that were new to it."""
        return self._reading.seconds

    def _void(self) -> None:
        for row in self._slots:
            row.held = 0

    # The seam

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known. A slot is theirs from their first draft on."""
        for request in requests:
            self._live[request.request_id] = _Live(request, self._spec(request))

    @torch.inference_mode()
    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A draft for each request that has room for one, at most ``budget`` nodes each."""
        if self.policy.acceptance != "coupled":
            budget = min(budget, MOST_SOFT_NODES)
        growing = [_Growing(row, self._depth(row, budget)) for row in (self._live[name] for name in request_ids)]
        growing = [draft for draft in growing if draft.deepest > 0]
        if not growing:
            return []
        self._place([draft.row for draft in growing], max(draft.row.total + draft.deepest for draft in growing))
        growing.sort(key=lambda draft: draft.row.slot)
        missing, began = self._missing([draft.row for draft in growing]), perf_counter()
        parts = self._fill([draft.row for draft in growing])
        laws: _Laws | None = None
        open_drafts = list(range(len(growing)))
        while open_drafts:
            batch = [growing[index] for index in open_drafts]
            logits_NV = self._forward([draft.row for draft in batch], parts)
            law_NV = process(logits_NV, [draft.row.spec for draft in batch], _prefixes(batch))
            if laws is None and self.policy.acceptance != "coupled":
                laws = _Laws(len(growing), max(draft.deepest for draft in growing), law_NV)
            if laws is not None:
                laws.keep(open_drafts, batch[0].depth, law_NV)
            tokens_NC, shares_NC = self._children(batch, law_NV)
            for draft, tokens, shares in zip(batch, tokens_NC, shares_NC, strict=True):
                draft.grow(tokens, shares, budget, is_drawn=laws is not None and draft.row.spec.params.temperature > 0)
            if missing:
                self._reading.add(perf_counter() - began, missing, budget)
                missing = []
            open_drafts = [index for index in open_drafts if growing[index].goes_on]
            parts = [growing[index].path[-1:] for index in open_drafts]
        is_chain = self.width == 1
        return [
            draft.finished(self._version, is_chain, laws.of(index, draft.depth) if laws is not None else None)
            for index, draft in enumerate(growing)
            if draft.tokens
        ]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Tokens were emitted; they enter the cache with the next draft."""
        for outcome in outcomes:
            self._live[outcome.request_id].extend(outcome.tokens)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete, or aborted: their slots are free."""
        for rollout in rollouts:
            row = self._live.pop(rollout.request_id)
            if row.slot != _NO_SLOT:
                self._free(row)

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``; the drafter's own weights stay."""
        self._version = version

    def close(self) -> None:
        """Release the key-value memory and give the model back. Only while no request is in flight."""
        self._runner.close()

    # A draft

    def _spec(self, request: RolloutRequest) -> Spec:
        params = request.params
        stop_ids = params.stop_token_ids + (() if params.ignore_eos else self.policy.eos_ids)
        if params.grammar is None:
            return Spec(params, stop_ids)
        if self._grammars is None:
            return Spec(replace(params, grammar=None), stop_ids)
        return Spec(params, stop_ids, self._grammars.matcher(params.grammar))

    def _depth(self, row: "_Live", budget: int) -> int:
        """How deep a draft may go: the last token before the limit needs no draft, and no token past the context."""
        room = row.request.params.max_tokens - row.emitted - 1
        return min(-(-budget // self.width), room, self._runner.context - row.total + 1)

    def _children(self, batch: "Sequence[_Growing]", law_NV: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Up to ``width`` children of each backbone's end with their shares of the law; children without one are -1."""
        count = min(self.width, law_NV.shape[1])
        device = law_NV.device
        seed_N = torch.tensor([draft.row.seed for draft in batch], dtype=torch.int64, device=device)
        greedy = [n for n, draft in enumerate(batch) if draft.row.spec.params.temperature == 0]
        tokens_NC = torch.empty((len(batch), count), dtype=torch.int64, device=device)
        if len(greedy) < len(batch):
            is_coupled = self.policy.acceptance == "coupled"
            keys = [
                draft.row.emitted + draft.depth if is_coupled else draft_position(draft.row.emitted, draft.backbone)
                for draft in batch
            ]
            key_N = torch.tensor(keys, dtype=torch.int64, device=device)
            sample = coupled_candidates if is_coupled else draw_candidates
            tokens_NC = sample(law_NV, self.policy.run_seed, seed_N, key_N, count)
        if greedy:
            best_KV = law_NV[greedy]
            tokens_NC[greedy] = best_KV.argmax(-1, keepdim=True) if count == 1 else best_KV.topk(count, dim=-1).indices
        shares_NC = torch.log_softmax(law_NV.double(), dim=-1).gather(1, tokens_NC.clamp(min=0)).exp()
        # A law that is empty or not a number gives no child, whatever was drawn from it.
        is_none_NC = (tokens_NC < 0) | ~(shares_NC > 0)
        return tokens_NC.masked_fill(is_none_NC, -1).tolist(), shares_NC.masked_fill(is_none_NC, 0.0).tolist()

    # The cache

    def _place(self, rows: "Sequence[_Live]", length: int) -> None:
        """A slot of at least ``length`` positions for each row; rows that have gone without drafts give theirs up."""
        self._calls += 1
        self._most = max(self._most, len(rows))
        for row in rows:
            row.used = self._calls
        new = [row for row in rows if row.slot == _NO_SLOT]
        idle = sorted((row for row in self._slots if row.used < self._calls), key=lambda row: row.used)
        for row in idle[: max(0, len(self._slots) + len(new) - self._most)]:
            self._free(row)
        kv = self._runner.kv
        capacity = kv.capacity
        if length > capacity:
            capacity = -(-max(length, capacity + capacity // 2) // _KV_STEP) * _KV_STEP
        kv.resize(max(kv.slots, len(self._slots) + len(new)), capacity)
        for row in new:
            row.slot = len(self._slots)
            self._slots.append(row)

    def _free(self, row: "_Live") -> None:
        """Take a row's slot; the last slot's row moves into it, so that the slots in use are the first ones."""
        last = self._slots.pop()
        if last is not row:
            self._runner.kv.move_row(last.slot, row.slot, last.held)
            self._slots[row.slot] = last
            last.slot = row.slot
        row.slot, row.held = _NO_SLOT, 0

    def _missing(self, rows: "Sequence[_Live]") -> list[int]:
        """Drop what was drafted and not emitted; returns how many committed tokens of each row are not cached."""
        for row in rows:
            row.trim()
        return [row.total - row.held for row in rows]

    def _fill(self, rows: "Sequence[_Live]") -> list[Tokens]:
        """Cache committed tokens; returns those left for the next pass."""
        while sum(row.total - row.held for row in rows) > max(_FILL_TOKENS, len(rows)):
            left, chosen, parts = _FILL_TOKENS, [], []
            for row in rows:
                count = min(row.total - row.held - 1, left)
                if count > 0:
                    chosen.append(row)
                    parts.append(row.missing(count))
                    left -= count
            self._forward(chosen, parts, wanted=False)
        return [row.missing(row.total - row.held) for row in rows]

    def _forward(self, rows: "Sequence[_Live]", parts: Sequence[Tokens], wanted: bool = True) -> torch.Tensor:
        """One pass in which each row brings its part; the logits after each part, (rows, V), if they are wanted."""
        ends = np.cumsum([len(part) for part in parts]) - 1
        shares = [PassRow(row.slot, row.held, len(part), _NO_PARENTS) for row, part in zip(rows, parts, strict=True)]
        logits_NV = self._runner.forward(parts, shares, ends if wanted else ends[:0])
        for row, part in zip(rows, parts, strict=True):
            row.cache(part)
        return logits_NV


def _load(config: DraftModelConfig) -> Any:
    source: Path | str = model_source(config.path, _KEY)
    return load_pretrained(source, _KEY, config.path, config.dtype)


class _Live:
    """A request in flight: its tokens, and those whose keys and values lie in its slot (``held`` of them)."""

    def __init__(self, request: RolloutRequest, spec: Spec) -> None:
        self.request = request
        self.spec = spec
        self.seed = signed64(request.seed)
        self.slot = _NO_SLOT
        self.used = 0
        self.held = 0
        self.total = self.prompt_length = len(request.prompt)
        self._tokens = np.empty(self.prompt_length + request.params.max_tokens, dtype=np.int32)
        self._tokens[: self.total] = request.prompt
        self._cached = np.empty_like(self._tokens)

    @property
    def emitted(self) -> int:
        """Tokens of the response."""
        return self.total - self.prompt_length

    @property
    def cached_response(self) -> Tokens:
        """The response as far as it is cached, drafted tokens included; a view."""
        return self._cached[self.prompt_length : self.held]

    def extend(self, tokens: Tokens) -> None:
        """Commit emitted tokens."""
        self._tokens[self.total : self.total + len(tokens)] = tokens
        self.total += len(tokens)

    def trim(self) -> None:
        """Hold on to the cached tokens that were committed; the last committed token is never among them."""
        same = min(self.held, self.total - 1)
        differ = np.flatnonzero(self._cached[:same] != self._tokens[:same])
        self.held = int(differ[0]) if len(differ) else same

    def missing(self, count: int) -> Tokens:
        """The next ``count`` committed tokens that are not cached, a view."""
        return self._tokens[self.held : self.held + count]

    def cache(self, part: Tokens) -> None:
        """``part`` lies in the slot now."""
        self._cached[self.held : self.held + len(part)] = part
        self.held += len(part)


class _Growing:
    """A draft on its way: ``depth`` levels so far, the backbone ends at node ``backbone`` (-1: the committed text)."""

    def __init__(self, row: _Live, deepest: int) -> None:
        self.row = row
        self.deepest = deepest
        self.depth = 0
        self.backbone = -1
        self.goes_on = True
        self.path: Tokens = as_tokens([])
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._law_of: list[int] = []
        self._probs: list[float] = []

    def grow(self, tokens: Iterable[int], shares: Iterable[float], budget: int, *, is_drawn: bool) -> None:
        """One level: children of the backbone's end, best first, -1 for none, with their shares of the law."""
        above = self._probs[self.backbone] if self.backbone >= 0 else 1.0
        parent, first = self.backbone, len(self.tokens)
        for rank, (token, share) in enumerate(zip(tokens, shares, strict=True)):
            if token < 0 or len(self.tokens) == budget:
                break
            self.tokens.append(token)
            self._parents.append(parent)
            self._law_of.append(self.depth if is_drawn else -1)
            # As if the policy's sample were the first child half of the time, and else a draw from the drafter's law.
            self._probs.append(above * (share + (rank == 0)) / 2)
        self.depth += 1
        self.goes_on = len(self.tokens) > first and len(self.tokens) < budget and self.depth < self.deepest
        if len(self.tokens) > first:
            self.backbone = first
            self.path = np.append(self.path, np.int32(self.tokens[first]))
            # Nothing is sampled behind a token that ends the response.
            self.goes_on = self.goes_on and self.tokens[first] not in self.row.spec.stop_ids

    def finished(self, version: int, is_chain: bool, laws_LV: torch.Tensor | None) -> Draft:
        """The draft, with the laws if any node was drawn from one."""
        is_drawn = laws_LV is not None and any(law >= 0 for law in self._law_of)
        return Draft(
            request_id=self.row.request.request_id,
            tokens=as_tokens(self.tokens),
            length=self.row.total,
            version=version,
            parents=None if is_chain else as_tokens(self._parents),
            sources=np.full(len(self.tokens), _MODEL, dtype=np.uint8),
            probs=None if is_drawn else np.array(self._probs, dtype=np.float32),
            laws=laws_LV if is_drawn else None,
            law_of=as_tokens(self._law_of) if is_drawn else None,
        )


class _Laws:
    """The laws of a batch of drafts, (drafts, depths, V), in one tensor."""

    def __init__(self, drafts: int, depths: int, like_NV: torch.Tensor) -> None:
        self._laws_NDV = like_NV.new_empty((drafts, depths, like_NV.shape[1]))

    def keep(self, drafts: Sequence[int], depth: int, law_NV: torch.Tensor) -> None:
        """Store the laws of one depth."""
        self._laws_NDV[list(drafts), depth] = law_NV

    def of(self, draft: int, depth: int) -> torch.Tensor:
        """The laws of a draft of ``depth`` levels, (depth, V), a view."""
        return self._laws_NDV[draft, :depth]


def _prefixes(batch: Sequence[_Growing]) -> Callable[[int], Prefix]:
    """The prefix of each draft's next level, by its number in the batch."""

    def prefix(n: int) -> Prefix:
        row = batch[n].row
        return row.request.prompt, row.cached_response

    return prefix

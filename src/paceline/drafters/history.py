"""Drafts from what was said before: by the request itself, its siblings, earlier rollouts and to other prompts."""

import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np

from paceline.config import HistoryConfig
from paceline.history import Settings, make_history
from paceline.history.base import Bytes, Int32s, Int64s, Proposals
from paceline.history.snapshot import Snapshot, SnapshotError, shard_of
from paceline.schema import CUT_SHORT, Draft, Outcome, Rollout, RolloutRequest, Tokens, as_tokens

#: A response begins with so many tokens of its prompt, as those do that end here.
_ANCHOR = 8


class _Live:
    """A request in flight: its number in the history and its total length in tokens."""

    __slots__ = ("length", "number")

    def __init__(self, number: int, length: int) -> None:
        self.number = number
        self.length = length


class HistoryDrafter:
    """Implements ``drafters.base.Drafter`` over ``history.base.History``.

    Every draft is a tree of the most probable prefixes, with calibrated probabilities, from four tiers of evidence:
    the request's own text, live siblings, earlier rollouts of the same prompt, and other prompts. With ``chains`` in
    the settings it is a chain, the most probable child each time. ``salt`` keys the hashes that stand for prompts; None
    draws one. ``native`` False takes the plain-Python history.
    """

    def __init__(self, settings: Settings | None = None, salt: int | None = None, native: bool = True) -> None:
        self.settings = settings or Settings()
        self.salt = secrets.randbits(64) if salt is None else salt
        self._native = native
        self.history = make_history(self.settings, native=native)
        self._version = 0
        self._started = 0
        self._live: dict[str, _Live] = {}

    @classmethod
    def from_config(cls, config: HistoryConfig, salt: int | None = None, chains: bool = False) -> Self:
        """The drafter that a configuration asks for; with ``chains`` for an engine that verifies no trees."""
        return cls(
            Settings(
                window=config.window,
                elsewhere_tokens=config.elsewhere_tokens,
                cap_bytes=config.cap_mib << 20,
                siblings=config.siblings,
                floor=config.floor,
                matches=config.matches,
                threads=config.threads,
                chains=chains,
            ),
            salt,
        )

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known; those of one ``prompt_key`` share a memory."""
        numbers = np.arange(self._started, self._started + len(requests), dtype=np.int64)
        self._started += len(requests)
        for number, request in zip(numbers.tolist(), requests, strict=True):
            self._live[request.request_id] = _Live(number, len(request.prompt))
        shards = np.array([shard_of(request.prompt_key, self.salt) for request in requests], dtype=np.int64)
        self.history.start_batch(numbers, shards, *flat([request.prompt for request in requests]))

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A tree (or chain) for each request whose context matches something, at most ``budget`` nodes."""
        live = [self._live[name] for name in request_ids]
        lengths = [request.length for request in live]
        drafts = self._drafts(request_ids, lengths, self.history.propose_batch(_numbers(live), budget))
        return [draft for draft in drafts if len(draft.tokens)]

    def propose_after(self, said: Sequence[tuple[str, Tokens]], budget: int) -> list[Draft]:
        """What would be drafted had each request said its tokens too, one draft each, which may be empty.

        A request may come more than once. It is no proposal: nothing is learned from it.
        """
        live = [self._live[name] for name, _ in said]
        tokens = [tokens for _, tokens in said]
        lengths = [request.length + len(text) for request, text in zip(live, tokens, strict=True)]
        proposals = self.history.propose_after_batch(_numbers(live), *flat(tokens), budget)
        return self._drafts([name for name, _ in said], lengths, proposals)

    def _drafts(self, names: Sequence[str], lengths: Sequence[int], proposals: Proposals) -> list[Draft]:
        tokens, parents, probs, sources, offsets, ready = proposals
        return [
            Draft(
                request_id=name,
                tokens=tokens[first:last],
                length=length,
                version=self._version,
                parents=None if self.settings.chains else parents[first:last],
                sources=sources[first:last],
                probs=probs[first:last],
                prefetched=bool(is_ready),
            )
            for name, length, (first, last), is_ready in zip(
                names, lengths, pairwise(offsets.tolist()), ready, strict=True
            )
        ]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Emitted tokens extend the contexts; siblings may draft from them at once."""
        live = [self._live[outcome.request_id] for outcome in outcomes]
        for request, outcome in zip(live, outcomes, strict=True):
            request.length += len(outcome.tokens)
        self.history.commit_batch(_numbers(live), *flat([outcome.tokens for outcome in outcomes]))

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Complete responses become history; aborted ones are forgotten."""
        live = [self._live.pop(rollout.request_id) for rollout in rollouts]
        keep: Bytes = np.array([rollout.finish_reason not in CUT_SHORT for rollout in rollouts], dtype=np.uint8)
        self.history.finish_batch(_numbers(live), keep)

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that were decoded elsewhere become history, each as old as the version that began it."""
        prompts = {shard_of(rollout.prompt_key, self.salt): rollout.prompt for rollout in rollouts}
        said = [rollout for rollout in rollouts if len(rollout.tokens)]
        anchors = [rollout.prompt[-_ANCHOR:] for rollout in said]
        texts = [np.concatenate([anchor, rollout.tokens]) for anchor, rollout in zip(anchors, said, strict=True)]
        tokens, offsets = flat([*prompts.values(), *texts])
        none = [0] * len(prompts)
        self.history.load(
            np.array([*prompts, *(shard_of(rollout.prompt_key, self.salt) for rollout in said)], dtype=np.int64),
            np.array([1] * len(prompts) + [0] * len(said), dtype=np.uint8),
            as_tokens([*none, *(rollout.versions[0] for rollout in said)]),
            as_tokens([*none, *map(len, anchors)]),
            offsets,
            tokens,
        )

    def on_weights(self, version: int) -> None:
        """Drafts carry the version of the weights that will verify them, and history ages by it."""
        self._version = version
        self.history.set_version(version)

    def fresh(self) -> "HistoryDrafter":
        """Another of the same settings and salt, which remembers nothing."""
        return HistoryDrafter(self.settings, self.salt, self._native)

    @property
    def nbytes(self) -> int:
        """Bytes that the memory of responses takes."""
        return self.history.nbytes

    @property
    def tokens_held(self) -> int:
        """Tokens that are remembered, those of prompts and of requests in flight among them."""
        return self.history.tokens

    def votes(self) -> list[float]:
        """What was learned, as ``history.base.History.votes``."""
        return self.history.votes()

    def set_votes(self, state: list[float]) -> None:
        """Take over what ``votes`` gave; ValueError where it is of another version or not finite."""
        self.history.set_votes(state)

    def snapshot(self) -> Snapshot:
        """Everything finished and learned, for ``history.snapshot.encode_snapshot``; no request in flight."""
        return Snapshot(self.salt, self._version, *self.history.records(), votes=np.array(self.history.votes()))

    def restore(self, snapshot: Snapshot) -> None:
        """Take over a snapshot: its salt, its sequences and what was learned; nothing where SnapshotError is raised.

        Ages are kept: what was said n versions before the snapshot is n versions old now, so an engine that goes on
        with the snapshot's weights loads them first. SnapshotError where something is held or in flight already, whose
        prompts another salt would lose, and where the votes are those of another version of paceline.
        """
        if self.history.prompts or self._live:
            raise SnapshotError("a history that holds prompts already takes no snapshot; restore into a fresh drafter")
        try:
            if len(snapshot.votes):
                self.history.set_votes(snapshot.votes.tolist())
        except ValueError as error:
            raise SnapshotError(f"the history snapshot does not fit this version of paceline: {error}") from None
        shards, are_prompts, versions, starts, offsets, tokens = snapshot.records
        bounds = np.iinfo(np.int32)
        moved = versions + np.int64(self._version - snapshot.version)
        versions = moved.clip(bounds.min, bounds.max).astype(np.int32)
        self.history.load(shards, are_prompts, versions, starts, offsets, tokens)
        self.salt = snapshot.salt


def _numbers(live: Sequence[_Live]) -> Int64s:
    return np.array([request.number for request in live], dtype=np.int64)


def flat(parts: Sequence[Tokens]) -> tuple[Int32s, Int64s]:
    """The parts end to end, and where each begins and the last ends."""
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return as_tokens(np.concatenate(parts)) if parts else as_tokens([]), offsets

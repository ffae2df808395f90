"""What can be done with history snapshots: look into one, make it smaller, write it out, put several together."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from paceline.history.base import Int32s, Int64s
from paceline.history.snapshot import Snapshot, shard_of
from paceline.schema import RolloutRequest


class PromptSummary(msgspec.Struct, kw_only=True):
    """What is held of one prompt. ``prompt`` is its hashed key; ``age`` that of its newest response, in versions."""

    prompt: str
    prompt_tokens: int
    responses: int
    tokens: int
    age: int


class Summary(msgspec.Struct, kw_only=True):
    """What a snapshot holds. ``tokens`` are those of responses alone, ``prompt_tokens`` those of prompts.

    Ages count versions of the policy back from ``version``: of the newest response, the median and the oldest (None
    where there is none). ``salt`` is a fingerprint: equal for snapshots whose hashed keys can be compared. ``top`` are
    the prompts with the most tokens of responses.
    """

    version: int
    salt: str
    bytes: int
    prompts: int
    responses: int
    prompt_tokens: int
    tokens: int
    learned: bool
    versions: tuple[int, int] | None
    ages: tuple[int, float, int] | None
    top: list[PromptSummary]


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence written out; a response without the tokens of its prompt that it is stored with."""

    prompt: str
    kind: Literal["prompt", "response"]
    version: int
    tokens: list[int]
    text: str | None = None


def summarise(snapshot: Snapshot, size_bytes: int, top: int = 10) -> Summary:
    """What the snapshot, a file of ``size_bytes``, holds; ``top`` prompts are listed."""
    count = snapshot.prompts
    said = said_tokens(snapshot)
    versions = snapshot.versions[count:].astype(np.int64)
    ages = snapshot.version - versions
    order = np.argsort(snapshot.shards[:count], kind="stable")
    home = order[np.searchsorted(snapshot.shards[:count], snapshot.shards[count:], sorter=order)]
    tokens, responses = np.zeros(count, np.int64), np.bincount(home, minlength=count)
    np.add.at(tokens, home, said[count:])
    youngest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(youngest, home, ages)
    largest = np.argsort(-tokens, kind="stable")[:top]
    return Summary(
        version=snapshot.version,
        salt=xxhash.xxh3_64_hexdigest(snapshot.salt.to_bytes(8, "little"))[:8],
        bytes=size_bytes,
        prompts=count,
        responses=len(ages),
        prompt_tokens=int(said[:count].sum()),
        tokens=int(said[count:].sum()),
        learned=len(snapshot.votes) > 0,
        versions=(int(versions.min()), int(versions.max())) if len(ages) else None,
        ages=(int(ages.min()), float(np.median(ages)), int(ages.max())) if len(ages) else None,
        top=[
            PromptSummary(
                prompt=prompt_name(int(snapshot.shards[index])),
                prompt_tokens=int(said[index]),
                responses=int(responses[index]),
                tokens=int(tokens[index]),
                age=int(youngest[index]),
            )
            for index in largest
            if responses[index]
        ],
    )


def prune(
    snapshot: Snapshot, window: int | None = None, max_tokens: int | None = None, older_than: int | None = None
) -> Snapshot:
    """A snapshot with fewer responses, and without the prompts that have none left.

    Drops those more than ``older_than`` versions old, then all but the newest ``window`` of each prompt, then the
    oldest until at most ``max_tokens`` tokens of responses are left. None leaves a rule out.
    """
    count = snapshot.prompts
    shards = snapshot.shards[count:]
    kept = np.ones(len(shards), dtype=bool)
    if older_than is not None:
        kept &= snapshot.version - snapshot.versions[count:].astype(np.int64) <= older_than
    if window is not None:
        newest_first = np.flatnonzero(kept)[::-1]
        kept[newest_first[_rank_within(shards[newest_first]) >= window]] = False
    if max_tokens is not None:
        newest_first = np.flatnonzero(kept)[::-1]
        held = np.cumsum(said_tokens(snapshot)[count:][newest_first])
        kept[newest_first[held > max_tokens]] = False
    wanted = np.isin(snapshot.shards[:count], shards[kept])
    return _take(snapshot, np.flatnonzero(np.concatenate([wanted, kept])))


def merge(snapshots: Sequence[Snapshot]) -> Snapshot:
    """One snapshot that holds what all of them hold, under the salt of the first; responses by version, oldest first.

    Snapshots of one salt come from one run: equal keys are equal prompts, versions are taken as they are, and a
    response that several hold is held once. Those of another salt come from another run: its prompts are recognised by
    their tokens, unknown ones get the key that their tokens have by default, and its versions move so that all runs
    end at the same one, which keeps ages. The votes are the first run's newest.
    """
    salt = snapshots[0].salt
    ends: dict[int, int] = {}
    for snapshot in snapshots:
        ends[snapshot.salt] = max(snapshot.version, ends.get(snapshot.salt, snapshot.version))
    prompts: dict[int, bytes] = {}
    names: dict[bytes, int] = {}
    held: Counter[tuple[int, int, int, bytes]] = Counter()
    responses: list[tuple[int, int, int, bytes]] = []
    for snapshot in snapshots:
        shift = ends[salt] - ends[snapshot.salt]
        count = snapshot.prompts
        renamed: dict[int, int] = {}
        seen: Counter[tuple[int, int, int, bytes]] = Counter()
        for index in range(len(snapshot.shards)):
            shard, tokens = int(snapshot.shards[index]), _tokens_of(snapshot, index)
            if index < count:
                if snapshot.salt != salt:
                    renamed[shard] = names[tokens.tobytes()] if tokens.tobytes() in names else _default(tokens, salt)
                home = renamed.get(shard, shard)
                prompts.setdefault(home, tokens.tobytes())
                names.setdefault(tokens.tobytes(), home)
                continue
            at = int(snapshot.versions[index]) + shift
            response = (at, renamed.get(shard, shard), int(snapshot.starts[index]), tokens.tobytes())
            seen[response] += 1
            if seen[response] > held[response]:
                responses.append(response)
        held |= seen
    responses.sort(key=lambda response: response[0])  # a stable sort: among equals the order of the files
    taught = max(snapshots, key=lambda one: (len(one.votes) > 0, one.salt == salt, one.version))
    return _build(salt, ends[salt], prompts, responses, taught.votes)


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """Every sequence, prompts first, then responses, oldest first."""
    count = snapshot.prompts
    for index in range(len(snapshot.shards)):
        is_prompt = index < count
        yield Row(
            prompt=prompt_name(int(snapshot.shards[index])),
            kind="prompt" if is_prompt else "response",
            version=int(snapshot.versions[index]),
            tokens=_tokens_of(snapshot, index)[int(snapshot.starts[index]) :].tolist(),
        )


def prompt_name(shard: int) -> str:
    """A hashed prompt key as people see it: 16 hexadecimal digits."""
    return f"{shard + (1 << 63):016x}"


def said_tokens(snapshot: Snapshot) -> Int64s:
    """Tokens of each sequence; of a response, without those of its prompt."""
    lengths: Int64s = np.diff(snapshot.offsets)
    return lengths - snapshot.starts


def _tokens_of(snapshot: Snapshot, index: int) -> Int32s:
    return snapshot.tokens[int(snapshot.offsets[index]) : int(snapshot.offsets[index + 1])]


def _default(prompt: Int32s, salt: int) -> int:
    """The shard of a prompt whose key follows from its tokens, as it does unless a caller names the prompt itself."""
    return shard_of(RolloutRequest(request_id="", prompt=prompt).prompt_key, salt)


def _rank_within(shards: Int64s) -> Int64s:
    """How many entries of the same shard come before each."""
    order = np.argsort(shards, kind="stable")
    ordered = shards[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    ranks = np.empty(len(shards), dtype=np.int64)
    ranks[order] = np.arange(len(shards)) - np.repeat(firsts, np.diff(firsts, append=len(shards)))
    return ranks


def _take(snapshot: Snapshot, indices: npt.NDArray[np.intp]) -> Snapshot:
    lengths = np.diff(snapshot.offsets)
    picked = np.zeros(len(lengths), dtype=bool)
    picked[indices] = True
    return replace(
        snapshot,
        shards=snapshot.shards[indices],
        are_prompts=snapshot.are_prompts[indices],
        versions=snapshot.versions[indices],
        starts=snapshot.starts[indices],
        offsets=_offsets(lengths[indices]),
        tokens=snapshot.tokens[np.repeat(picked, lengths)],
    )


def _build(
    salt: int,
    version: int,
    prompts: dict[int, bytes],
    responses: Sequence[tuple[int, int, int, bytes]],
    votes: npt.NDArray[np.float64],
) -> Snapshot:
    """From prompts by shard and (version, shard, start, tokens) of responses."""
    parts = [*prompts.values(), *(tokens for *_, tokens in responses)]
    bounds = np.iinfo(np.int32)
    versions = [0] * len(prompts) + [min(max(at, bounds.min), bounds.max) for at, *_ in responses]
    return Snapshot(
        salt=salt,
        version=version,
        shards=np.array([*prompts, *(shard for _, shard, *_ in responses)], dtype=np.int64),
        are_prompts=np.repeat(np.array([1, 0], np.uint8), [len(prompts), len(responses)]),
        versions=np.array(versions, dtype=np.int32),
        starts=np.array([0] * len(prompts) + [start for *_, start, _ in responses], dtype=np.int32),
        offsets=_offsets(np.array([len(part) // 4 for part in parts], dtype=np.int64)),
        tokens=np.frombuffer(b"".join(parts), dtype=np.int32),
        votes=votes,
    )


def _offsets(lengths: Int64s) -> Int64s:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets

"""The native history against arctic-inference's suffix trees: microseconds a draft and a token, bytes a token.

Both get the same recorded rollouts in one process, history cold at the start, whole steps in flight, each through its
own interface: the history takes a batch a call, the peer one request. `single` calls the history one at a time too;
`two threads` gives the batch a second one.
Then the native history alone: drafts in a context of 128k tokens, and 1e8 tokens under a byte cap. Without
arctic-inference installed, its rows are left out and said to be.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from paceline.history import Settings, make_history
from paceline.history.native import why_not

TRACES = Path(__file__).parent / "traces"
BUDGET = 16
Draft = tuple[Any, Any]
"""Tokens and parents of a draft."""

PEERS: dict[str, dict[str, Any]] = {
    "arctic, defaults (depth 24)": {"depth": 24, "max_spec_factor": 1.0, "min_token_prob": 0.1},
    "arctic, depth 64, factor 4, tree": {"depth": 64, "max_spec_factor": 4.0, "use_tree_spec": True},
}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Native:
    """A batch a call, or with ``single`` one request a call, as the peer's interface is."""

    def __init__(self, single: bool = False, threads: int = 0) -> None:
        self.history = make_history(Settings(threads=threads))
        self.single = single

    def start(self, number: int, prompt_id: int, prompt: np.ndarray) -> None:
        self.history.start_batch(np.array([number]), np.array([prompt_id]), prompt, np.array([0, len(prompt)]))

    def draft(self, numbers: list[int], contexts: list[np.ndarray]) -> list[Draft]:  # noqa: ARG002
        batches = [[number] for number in numbers] if self.single else [numbers]
        drafts = []
        for batch in batches:
            tokens, parents, _, _, offsets, _ = self.history.propose_batch(np.array(batch), BUDGET)
            drafts += [(tokens[a:b], parents[a:b]) for a, b in itertools.pairwise(offsets.tolist())]
        return drafts

    def commit(self, numbers: list[int], fresh: list[np.ndarray]) -> None:
        offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in fresh])])
        self.history.commit_batch(np.array(numbers), np.concatenate(fresh), offsets)

    def finish(self, numbers: list[int]) -> None:
        self.history.finish_batch(np.array(numbers, np.int64), np.ones(len(numbers), np.uint8))

    def bytes_per_token(self) -> float:
        return self.history.nbytes / self.history.tokens


class Arctic:
    """The peer's own cache."""

    def __init__(self, depth: int, **options: Any) -> None:
        self.cache = import_module("arctic_inference.suffix_decoding").SuffixDecodingCache(max_tree_depth=depth)
        self.depth = depth
        self.options = options
        self.held = 0

    def start(self, number: int, prompt_id: int, prompt: np.ndarray) -> None:  # noqa: ARG002
        self.cache.start_request(number, prompt)

    def draft(self, numbers: list[int], contexts: list[np.ndarray]) -> list[Draft]:
        found = [
            self.cache.speculate(number, context[-self.depth :], max_spec_tokens=BUDGET, **self.options)
            for number, context in zip(numbers, contexts, strict=True)
        ]
        return [(draft.token_ids, draft.parents) for draft in found]

    def commit(self, numbers: list[int], fresh: list[np.ndarray]) -> None:
        for number, tokens in zip(numbers, fresh, strict=True):
            self.cache.add_active_response(number, tokens)
            self.held += len(tokens)

    def finish(self, numbers: list[int]) -> None:
        for number in numbers:
            self.cache.stop_request(number)

    def bytes_per_token(self) -> float:
        return self.cache._global_tree.estimate_memory() / self.held


def accepted(draft: Draft, recorded: list[int]) -> int:
    """How many drafted tokens a policy that says ``recorded`` would keep."""
    tokens, parents = (np.asarray(part).tolist() for part in draft)
    children = {key: node for node, key in enumerate(zip(parents, tokens, strict=True))}
    at, kept = -1, 0
    while kept < len(recorded) and (at, recorded[kept]) in children:
        at = children[at, recorded[kept]]
        kept += 1
    return kept


def replay(index: Any, name: str) -> dict[str, float]:
    """Every step's rollouts in lockstep: microseconds a draft, pass by pass, and microseconds an inserted token."""
    prompts = {row["prompt_id"]: np.array(row["tokens"], np.int32) for row in read(TRACES / f"{name}.prompts.jsonl")}
    draft_us, insert_seconds, tokens, forwards, number = [], 0.0, 0, 0, 0
    clock = time.perf_counter
    for _, step in itertools.groupby(read(TRACES / f"{name}.jsonl"), key=lambda row: row["step"]):
        texts, at = {}, {}
        for row in step:
            prompt = prompts[row["prompt_id"]]
            texts[number], at[number] = np.concatenate([prompt, np.array(row["tokens"], np.int32)]), len(prompt)
            began = clock()
            index.start(number, row["prompt_id"], prompt)
            insert_seconds += clock() - began
            number += 1
        live = list(texts)
        while live:
            contexts = [texts[request][: at[request]] for request in live]
            began = clock()
            drafts = index.draft(live, contexts)
            draft_us.append((clock() - began) / len(live) * 1e6)
            fresh = []
            for request, draft in zip(live, drafts, strict=True):
                text, here = texts[request], at[request]
                count = min(accepted(draft, text[here:-1].tolist()) + 1, len(text) - here)
                fresh.append(np.ascontiguousarray(text[here : here + count]))
                at[request] += count
            done = [request for request in live if at[request] == len(texts[request])]
            began = clock()
            index.commit(live, fresh)
            index.finish(done)
            insert_seconds += clock() - began
            tokens, forwards = tokens + sum(map(len, fresh)), forwards + len(live)
            live = [request for request in live if at[request] < len(texts[request])]
    return {
        "draft_us_p50": float(np.median(draft_us)),
        "draft_us_p99": float(np.percentile(draft_us, 99)),
        "insert_us_per_token": insert_seconds / tokens * 1e6,
        "bytes_per_token": index.bytes_per_token(),
        "tokens_per_forward": tokens / forwards,
    }


def long_context(index: Any, length: int = 131_072, drafts: int = 2_000) -> dict[str, float]:
    """Drafts after a prompt of ``length`` tokens, recorded responses strung together."""
    rows = read(TRACES / "chinook_tiny1M_diverse.jsonl")
    text = np.array([token for row in rows for token in row["tokens"]] * 2, np.int32)
    prompt, rest = text[:length], text[length:]
    index.start(0, 0, prompt)
    micros = []
    for at in range(0, 4 * drafts, 4):
        context = text[: length + at]
        began = time.perf_counter()
        index.draft([0], [context])
        micros.append((time.perf_counter() - began) * 1e6)
        index.commit([0], [np.ascontiguousarray(rest[at : at + 4])])
    return {"draft_us_p50": float(np.median(micros)), "draft_us_p99": float(np.percentile(micros, 99))}


def segments(seed: int) -> Iterator[np.ndarray]:
    """Half repetitive, half fresh text of 32 tokens at a time, without end."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, 50_000, (20_000, 32), dtype=np.int32)
    while True:
        yield phrases[rng.integers(len(phrases))]
        yield rng.integers(0, 50_000, 32, dtype=np.int32)


def capped(total: int, cap_bytes: int, batch: int = 64, length: int = 512) -> dict[str, float]:
    """Insert ``total`` tokens under ``cap_bytes``; the longest time that any call took."""
    history = make_history(Settings(threads=0, cap_bytes=cap_bytes, window=1_000_000, elsewhere_tokens=1 << 20))
    text, inserted, number = segments(0), 0, 0
    calls: dict[str, list[float]] = {"start": [], "propose": [], "commit": [], "finish": []}

    def timed(name: str, call: Callable[[], Any]) -> None:
        began = time.perf_counter()
        call()
        calls[name].append((time.perf_counter() - began) * 1e3)

    offsets = np.arange(batch + 1, dtype=np.int64) * 32
    while inserted < total:
        numbers = np.arange(number, number + batch)
        number += batch
        shards = numbers // 8 % 4_000
        prompts = np.concatenate([next(text) for _ in range(batch)])
        timed("start", lambda: history.start_batch(numbers, shards, prompts, offsets))  # noqa: B023
        for at in range(0, length, 32):
            fresh = np.concatenate([next(text) for _ in range(batch)])
            if at == 0:
                timed("propose", lambda: history.propose_batch(numbers, BUDGET))  # noqa: B023
            timed("commit", lambda: history.commit_batch(numbers, fresh, offsets))  # noqa: B023
            inserted += len(fresh)
        timed("finish", lambda: history.finish_batch(numbers, np.ones(batch, np.uint8)))  # noqa: B023
        if history.nbytes > cap_bytes:
            raise AssertionError(f"{history.nbytes} bytes held, the cap is {cap_bytes}")
    worst = {f"{name}_ms_max": max(times) for name, times in calls.items()}
    return {**worst, "nbytes": history.nbytes, "tokens_held": history.tokens, "tokens_inserted": inserted,
            "insert_us_per_token": (sum(calls["commit"]) + sum(calls["finish"])) * 1e3 / inserted}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=float, default=1e8, help="tokens inserted under the cap")
    parser.add_argument("--cap-mib", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if why_not():
        raise SystemExit(f"error: {why_not()}")
    makers: dict[str, Callable[[], Any]] = {
        "paceline": Native,
        "paceline, two threads": lambda: Native(threads=1),
        "paceline, single": lambda: Native(single=True),
    }
    try:
        import_module("arctic_inference.suffix_decoding")
        makers |= {name: lambda options=options: Arctic(**options) for name, options in PEERS.items()}
    except ImportError:
        print("arctic-inference is not installed: its rows are left out")
    results: dict[str, Any] = {}
    for name in ("bfcl_smollm2", "chinook_tiny1M_diverse"):
        print(f"\n{name}, cold\n| index | draft us p50 | p99 | insert us/token | bytes/token | tokens per forward |")
        print("|---|---|---|---|---|---|")
        for index, make in makers.items():
            row = results.setdefault(name, {})[index] = replay(make(), name)
            print(f"| {index} | " + " | ".join(f"{value:.2f}" for value in row.values()) + " |")
    print("\na context of 131 072 tokens\n| index | draft us p50 | p99 |\n|---|---|---|")
    for index, make in makers.items():
        row = results.setdefault("long_context", {})[index] = long_context(make())
        print(f"| {index} | " + " | ".join(f"{value:.1f}" for value in row.values()) + " |")
    row = results["capped"] = capped(int(arguments.tokens), arguments.cap_mib << 20)
    print(f"\n{row['tokens_inserted']:.0e} tokens under {arguments.cap_mib} MiB")
    for key, value in row.items():
        print(f"  {key}: {value:,.3f}" if isinstance(value, float) else f"  {key}: {value:,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The limit: tokens per forward of a drafter that knows the policy's own law, beside drafters that have to guess it.

A point-mass tree drafter that does not see the noise keeps, in a pass, the sum of its nodes' probabilities of being
reached, on average. That sum is largest for the nodes that the policy itself finds likeliest: a tree grown best first
by the policy's own next-token probabilities bounds every such drafter, one pass at a time. Here that tree drafts in the
reference engine for the step that the recorded run would have gone on with; the drafters of the table then replay the
recorded run and the same rollouts, so all of them draft for the same tokens.

    python benchmarks/ngramrl/limit.py [--cell text_to_sql-qwen3] [--steps 1] [--json FILE]
"""

import argparse
import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from pathlib import Path

import cells
import msgspec
import numpy as np
import torch

from paceline.engines.identity import first_difference
from paceline.files import write_atomically
from paceline.forward.attention import PassRow
from paceline.forward.runner import Runner
from paceline.report.metrics import ratio, rollout_metrics
from paceline.schema import Draft, Outcome, Rollout, RolloutRequest, as_tokens
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.logs import Recorded, Step, read_steps
from paceline.simulate.overlap import TraceStatistics
from paceline.simulate.replay import Replay

#: Without the ones that draft as others of them do, and the peer, which may not be installed.
DRAFTERS = tuple(name for name in cells.DRAFTERS if "prefetch" not in name and not name.startswith("arctic"))
CANDIDATES = 16
_ROOT: tuple[int, ...] = ()


class _Row:
    """A request in flight: its slot, its tokens, how many of them are cached, and what is known of its next tokens.

    ``children`` maps a path of tokens below the last committed one to its likeliest next tokens and their log-probs.
    """

    def __init__(self, request: RolloutRequest, slot: int) -> None:
        self.slot = slot
        self.tokens = request.prompt.tolist()
        self.end = len(self.tokens) + request.params.max_tokens
        self.cached = 0
        self.children: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        self.tree: list[tuple[tuple[int, ...], float]] = []

    def grow(self, budget: int, eos_ids: Collection[int]) -> bool:
        """The likeliest ``budget`` nodes by what is known so far; whether nothing unknown could change them."""
        order = itertools.count()
        heap: list[tuple[float, int, tuple[int, ...]]] = []

        def open_below(path: tuple[int, ...], logprob: float) -> None:
            # A token after the end, or beyond the length limit, is never emitted.
            if (path and path[-1] in eos_ids) or len(self.tokens) + len(path) >= self.end - 1:
                return
            for token, own in self.children.get(path, ()):
                heapq.heappush(heap, (-(logprob + own), next(order), (*path, token)))

        open_below(_ROOT, 0.0)
        self.tree = []
        while heap and len(self.tree) < budget:
            cost, _, path = heapq.heappop(heap)
            self.tree.append((path, -cost))
            open_below(path, -cost)
        ends = {path for path, _ in self.tree if path[-1] in eos_ids}
        return all(path in self.children or path in ends for path, _ in self.tree)

    def coverage(self, candidates: int, eos_ids: Collection[int]) -> tuple[float, float]:
        """Probability that the pass ends in one of its ``candidates`` likeliest outcomes, and that it ends in any.

        An outcome is the last accepted node and the token after it; a request that ends has none.
        """
        reach = {_ROOT: 0.0, **dict(self.tree)}
        going_on, ends = [], sum(math.exp(logprob) for path, logprob in self.tree if path[-1] in eos_ids)
        for path in reach:
            for token, own in () if path and path[-1] in eos_ids else self.children[path]:
                if (*path, token) in reach:
                    continue
                if token in eos_ids:
                    ends += math.exp(reach[path] + own)
                else:
                    going_on.append(math.exp(reach[path] + own))
        return sum(heapq.nlargest(candidates, going_on)), 1 - ends

    def parents(self) -> np.ndarray:
        """Of the tree's nodes, -1 for the last committed token."""
        place = {path: index for index, (path, _) in enumerate(self.tree)}
        return as_tokens([place.get(path[:-1], -1) for path, _ in self.tree])


class LawDrafter:
    """Drafts the nodes that the policy itself finds likeliest to be reached; a ``Drafter`` with a policy of its own."""

    def __init__(self, model: torch.nn.Module, temperature: float, eos_ids: Sequence[int]) -> None:
        self._runner = Runner(model)
        self._temperature = temperature
        self._eos_ids = frozenset(eos_ids)
        self._rows: dict[str, _Row] = {}
        self._version = 0
        self.expected: list[float] = []
        self.foreseen: list[tuple[float, float]] = []

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            self._rows[request.request_id] = _Row(request, len(self._rows))
        longest = max(row.end for row in self._rows.values())
        self._runner.kv.resize(len(self._rows), longest + cells.BUDGET + 1)

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        rows = [self._rows[name] for name in request_ids]
        for row in rows:
            row.children, row.tree = {}, []
        open_rows = rows
        while open_rows:
            self._look(open_rows, budget)
            open_rows = [row for row in open_rows if not row.grow(budget, self._eos_ids)]
        self.foreseen += [row.coverage(CANDIDATES, self._eos_ids) for row in rows]
        # An accepted node is a token, and one more follows, but not an accepted end.
        self.expected += [
            1 + sum(math.exp(logprob) for path, logprob in row.tree if path[-1] not in self._eos_ids) for row in rows
        ]
        return [
            Draft(
                request_id=name,
                tokens=as_tokens([path[-1] for path, _ in row.tree]),
                parents=row.parents(),
                probs=np.exp([logprob for _, logprob in row.tree]).astype(np.float32),
                length=len(row.tokens),
                version=self._version,
            )
            for name, row in zip(request_ids, rows, strict=True)
            if row.tree
        ]

    def _look(self, rows: Sequence[_Row], budget: int) -> None:
        """One pass over the trees as they are: the next tokens of all their nodes become known."""
        rows = sorted(rows, key=lambda row: row.slot)
        fresh = [row.tokens[row.cached :] or row.tokens[-1:] for row in rows]
        keep, offset = [], 0
        for row, committed in zip(rows, fresh, strict=True):
            keep.append(np.arange(offset + len(committed) - 1, offset + len(committed) + len(row.tree)))
            offset += len(committed) + len(row.tree)
        logits_NV = self._runner.forward(
            [np.array(c + [path[-1] for path, _ in row.tree]) for row, c in zip(rows, fresh, strict=True)],
            [
                PassRow(row.slot, len(row.tokens) - len(c), len(c), row.parents())
                for row, c in zip(rows, fresh, strict=True)
            ],
            np.concatenate(keep),
        )
        logprobs_NV = torch.log_softmax(logits_NV.double() / self._temperature, dim=-1)
        best_NK, tokens_NK = (part.tolist() for part in logprobs_NV.topk(budget + CANDIDATES, dim=-1))
        at = 0
        for row in rows:
            row.cached = len(row.tokens)
            for path in (_ROOT, *(path for path, _ in row.tree)):
                row.children[path] = list(zip(tokens_NK[at], best_NK[at], strict=True))
                at += 1

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._rows[outcome.request_id].tokens += outcome.tokens.tolist()

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        pass

    def on_weights(self, version: int) -> None:
        self._version = version


def measure(cell: cells.Cell, steps: int) -> dict[str, object]:
    """Tokens per forward of the law's tree and of each drafter on ``steps`` steps after the recorded run."""
    config, run = cell.config(), cells.record(cell)
    policy = cells.trained_policy(cell)
    law = LawDrafter(policy.engine_model(), config.sampling.temperature, policy.eos_ids)
    engine = cells.verifying_engine(cell, policy, law)
    replays = {name: Replay(drafter_by_name(name), cells.BUDGET, config.engine.slots) for name in DRAFTERS}
    statistics = TraceStatistics(cells.BUDGET, config.engine.slots)

    def play(step: Step) -> None:
        statistics.add(step)
        for replay in replays.values():
            replay.play(step, step.requests())

    number = 0
    for step in read_steps(run, None, print):
        play(step)
        number += 1
    rollouts: list[Rollout] = []
    plain_differs = 0
    for _, requests in itertools.islice(cells.next_steps(cell, policy), steps):
        fresh = engine.generate(requests)
        with engine.plain():
            plain = engine.generate(requests)
        plain_differs += sum(first_difference(a, b) is not None for a, b in zip(fresh, plain, strict=True))
        # An epoch of its own, so that its figures stand alone.
        recorded = [Recorded(r.prompt, r.tokens, r.prompt_key, config.rl.epochs) for r in fresh]
        play(Step(number, recorded))
        number += 1
        rollouts += fresh
    epoch = str(config.rl.epochs)
    metrics = rollout_metrics(rollouts)
    return {
        "cell": cell.name,
        "rollouts": len(rollouts),
        "tokens": metrics["tokens"],
        "differ_from_plain": plain_differs,
        "law": metrics["tokens_per_forward"],
        "law_expected": float(np.mean(law.expected)),
        "law_coverage": ratio(sum(part for part, _ in law.foreseen), sum(whole for _, whole in law.foreseen)),
        "oracle_copy": statistics.oracle(config.rl.epochs),
        "drafters": {name: replay.result().by_epoch[epoch].tokens_per_forward for name, replay in replays.items()},
    }


def table(result: dict) -> str:
    """The result as a Markdown table, the limit first, each drafter with its share of it."""
    lines = ["| drafter | tokens per forward | of the limit |", "|---|---|---|"]
    rows = [("the policy's own law", result["law"]), *sorted(result["drafters"].items(), key=lambda pair: -pair[1])]
    lines += [f"| {name} | {value:.2f} | {value / result['law']:.0%} |" for name, value in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", default="text_to_sql-qwen3")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    (cell,) = cells.choose(args.cell)
    torch.set_num_threads(cell.config().threads or torch.get_num_threads())
    result = measure(cell, args.steps)
    print(
        f"{result['cell']}: {result['rollouts']} rollouts, {result['tokens']} tokens, "
        f"{result['differ_from_plain']} of them differ from plain decoding; the law expected "
        f"{result['law_expected']:.2f} tokens per forward; best single copy {result['oracle_copy']:.2f}; "
        f"{CANDIDATES} outcomes prefetched by the law would cover {result['law_coverage']:.1%} of its passes"
    )
    print(table(result))
    if args.json:
        write_atomically(args.json, msgspec.json.format(msgspec.json.encode(result), indent=2))


if __name__ == "__main__":
    main()

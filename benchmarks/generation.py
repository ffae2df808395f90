"""Wall clock of real generation: drafted against plain, against NgramRL's published policy, against transformers.

SmolLM2-135M with the function-call adapter samples answers at temperature 1. Every side has an engine of its own and
decodes the same requests with the same seeds, in turn, round by round; a round's seeds are new, its prompts are not.
Sides: ``plain``; ``history`` with the adaptive budget, ``cold`` (nothing said before), ``warm`` (two earlier rounds),
and ``hostile`` (random tokens were "said" before); ``garbage``, a drafter of random tokens that claims to be sure;
``ngramrl``, the published method, whose budget is always 16. At batch 1 transformers' `generate` and its prompt lookup
decode the same prompts, to the same lengths. Beside the wall clock stands the processor time of the whole process, all
threads, which does not count what other processes on a busy machine take.

    python benchmarks/generation.py [--batches 1,8,32] [--rounds 5] [--json FILE]
"""

import argparse
import copy
import json
import time

import numpy as np
import torch

from paceline.config import BudgetConfig, EngineConfig, load_config
from paceline.drafters import HistoryDrafter
from paceline.drafters.baselines import BASELINES
from paceline.engines.hf import HFEngine
from paceline.rl.curriculum import load_items
from paceline.rl.policy import Policy
from paceline.rl.tasks.registry import make_task
from paceline.schema import Draft, Outcome, RolloutRequest, SamplingParams, as_tokens, derive_seed

CONFIG = "examples/function_call.yaml"
SIDES = ("plain", "history cold", "history warm", "history hostile", "garbage", "ngramrl warm")


class Garbage:
    """Always drafts random tokens, each claimed to be accepted nine times in ten."""

    def __init__(self, vocabulary):
        self.rng, self.vocabulary, self.version = np.random.default_rng(0), vocabulary, 0
        self.lengths = {}

    def start(self, requests):
        self.lengths |= {request.request_id: len(request.prompt) for request in requests}

    def propose(self, request_ids, budget):
        return [
            Draft(
                request_id=name,
                tokens=as_tokens(self.rng.integers(0, self.vocabulary, budget)),
                length=self.lengths[name],
                version=self.version,
                probs=np.float32(0.9) ** np.arange(1, budget + 1, dtype=np.float32),
            )
            for name in request_ids
        ]

    def commit(self, outcomes):
        for outcome in outcomes:
            self.lengths[outcome.request_id] += len(outcome.tokens)

    def finish(self, rollouts):
        for rollout in rollouts:
            del self.lengths[rollout.request_id]

    def on_weights(self, version):
        self.version = version


class Finished:
    """What a drafter reads of a rollout when it ends."""

    def __init__(self, request_id, tokens):
        self.request_id, self.tokens, self.finish_reason = request_id, tokens, "stop"


def requests_of(prompts, batch, side, number):
    """Two fillings of the slots, at least eight requests."""
    count = max(8, 2 * batch)
    return [
        RolloutRequest(
            request_id=f"{side}/{number}/{i}",
            prompt=prompts[i % len(prompts)],
            group=f"{side}/{number}/{i % len(prompts)}",
            params=SamplingParams(max_tokens=64, seed=derive_seed("generation", number, i)),
        )
        for i in range(count)
    ]


def teach_random(drafter, prompts, vocabulary, responses=32):
    """Fill a history with responses of random tokens."""
    rng = np.random.default_rng(0)
    requests = [
        RolloutRequest(request_id=f"{i}/{j}", prompt=p) for i, p in enumerate(prompts) for j in range(responses)
    ]
    said = {r.request_id: as_tokens(rng.integers(0, vocabulary, 40)) for r in requests}
    drafter.start(requests)
    drafter.commit([Outcome(request_id=name, tokens=tokens, accepted=0, drafted=0) for name, tokens in said.items()])
    drafter.finish([Finished(name, tokens) for name, tokens in said.items()])


def make_engine(model, side, batch, eos_ids, prompts):
    drafter, mode = None, "adaptive"
    if side.startswith("history"):
        drafter = HistoryDrafter()
    elif side.startswith("ngramrl"):
        drafter, mode = BASELINES["ngramrl"](), "fixed"
    elif side == "garbage":
        drafter = Garbage(model.config.vocab_size)
    if side == "history hostile":
        teach_random(drafter, prompts, model.config.vocab_size)
    config = EngineConfig(slots=batch)
    return HFEngine(copy.deepcopy(model), drafter=drafter, config=config, budget_config=BudgetConfig(mode=mode),
                    eos_ids=eos_ids)  # fmt: skip


class Clock:
    """Wall-clock and processor seconds since it was made."""

    def __init__(self):
        self.began = time.perf_counter(), time.process_time()

    def read(self):
        return time.perf_counter() - self.began[0], time.process_time() - self.began[1]


def totals(seconds):
    """The sums of the wall-clock and the processor seconds."""
    return [sum(part) for part in zip(*seconds, strict=True)]


def transformers_seconds(model, prompts, lengths, eos, **options):
    """Seconds of `generate` over the prompts, one at a time, each to its length."""
    clock = Clock()
    for prompt, length in zip(prompts, lengths, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=length,
                       max_new_tokens=length, pad_token_id=eos, **options)  # fmt: skip
    return clock.read()


def measure(policy, prompts, batch, rounds):
    model, eos_ids = policy.engine_model(), policy.eos_ids
    engines = {side: make_engine(model, side, batch, eos_ids, prompts) for side in SIDES}
    for side in SIDES:
        if side.endswith("warm"):
            for number in (-2, -1):
                engines[side].generate(requests_of(prompts, batch, side, number))
                engines[side].drafter.on_weights(0)
    times = {side: [] for side in SIDES}
    tokens, differing = [], dict.fromkeys(SIDES, 0)
    theirs = {"generate": [], "generate, prompt lookup": []}
    before = {side: engines[side].stats() for side in SIDES}
    for number in range(rounds):
        reference = None
        for side in SIDES:
            engine, batch_requests = engines[side], requests_of(prompts, batch, side, number)
            clock = Clock()
            rollouts = engine.generate(batch_requests)
            times[side].append(clock.read())
            said = [rollout.tokens.tolist() for rollout in rollouts]
            reference = said if reference is None else reference
            differing[side] += sum(a != b for a, b in zip(said, reference, strict=True))
        tokens.append(sum(map(len, reference)))
        if batch == 1:
            lengths, asked = [len(row) for row in reference], [r.prompt for r in batch_requests]
            torch.manual_seed(number)
            theirs["generate"].append(transformers_seconds(model, asked, lengths, eos_ids[0]))
            theirs["generate, prompt lookup"].append(
                transformers_seconds(model, asked, lengths, eos_ids[0], prompt_lookup_num_tokens=10)
            )
    rows = []
    for side, seconds in {**times, **theirs}.items():
        if not seconds:
            continue
        (wall, cpu), (plain_wall, plain_cpu) = totals(seconds), totals(times["plain"])
        row = {
            "batch": batch,
            "side": side,
            "tokens_per_second": sum(tokens) / wall,
            "against_plain": plain_wall / wall,
            "against_plain_cpu": plain_cpu / cpu,
            "rounds_cpu": [p[1] / s[1] for p, s in zip(times["plain"], seconds, strict=True)],
        }
        if side in engines:
            now, then = engines[side].stats(), before[side]
            forwards = now.row_forwards - then.row_forwards
            row["tokens_per_forward"] = (now.tokens_emitted - then.tokens_emitted) / forwards
            row["drafted_per_forward"] = (now.tokens_drafted - then.tokens_drafted) / forwards
            row["drafting_share"] = (now.draft_seconds - then.draft_seconds) / wall
            row["rollouts_differing"] = differing[side]
        rows.append(row)
    for engine in engines.values():
        engine.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--json")
    args = parser.parse_args()
    config = load_config(CONFIG, [f"tasks.function_call.train_prompts={args.prompts}"])
    policy = Policy.load(config.policy, config.seed)
    tasks = {name: make_task(name, task, config.seed) for name, task in config.tasks.items()}
    prompts = [item.tokens for item in load_items(tasks, "train", policy.encode_prompt)]
    results = []
    columns = "batch,side,tokens/s,against plain,processor time,rounds,tokens/forward,drafted,drafting,differing"
    print("| " + columns.replace(",", " | ") + " |\n" + "|---" * (columns.count(",") + 1) + "|")
    for batch in (int(b) for b in args.batches.split(",")):
        for row in measure(policy, prompts, batch, args.rounds):
            results.append(row)
            spread = " ".join(f"{ratio:.2f}" for ratio in row["rounds_cpu"])
            own = (
                f"{row['tokens_per_forward']:.2f} | {row['drafted_per_forward']:.2f} | {row['drafting_share']:.2%} | "
                f"{row['rollouts_differing']}"
                if "tokens_per_forward" in row
                else "- | - | - | -"
            )
            print(
                f"| {batch} | {row['side']} | {row['tokens_per_second']:.1f} | {row['against_plain']:.2f}x | "
                f"{row['against_plain_cpu']:.2f}x | {spread} | {own} |",
                flush=True,
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

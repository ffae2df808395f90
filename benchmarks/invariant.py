"""What equal bits cost: passes and whole generations of SmolLM2-135M, ordinary and with ``engine.invariant``.

Passes: batch x T tokens over a cache of 256 positions, float32. Generation: function-call prompts, four answers each at
temperature 1, batch 8, plain and with the history drafter (cold, then warm from the first round), fixed budget. Both
sides run in one process, in turn; figures are processor seconds of the process, so other processes do not count.

    OMP_NUM_THREADS=1 python benchmarks/invariant.py [--repeats 5] [--prompts 4] [--json FILE]
"""

import argparse
import copy
import json
import time
from statistics import median

import numpy as np

from paceline.config import BudgetConfig, EngineConfig, load_config
from paceline.drafters import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.forward.attention import PassRow
from paceline.forward.runner import Runner
from paceline.rl.curriculum import load_items
from paceline.rl.policy import Policy
from paceline.rl.tasks.registry import make_task
from paceline.schema import RolloutRequest, SamplingParams, derive_seed

CONFIG = "examples/function_call.yaml"
CACHED = 256
NONE = np.empty(0, dtype=np.int32)


def seconds(work):
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def passes(model, repeats):
    """Milliseconds of a pass, ordinary and invariant, for each batch and T."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (8, CACHED + 32))
    sides = {}
    for name in ("ordinary", "invariant"):
        own = copy.deepcopy(model)
        built, sides[name] = seconds(lambda own=own, name=name: Runner(own, invariant=name == "invariant"))
        sides[name].kv.resize(8, 320)
        for slot in range(8):
            sides[name].forward([tokens[slot, :CACHED]], [PassRow(slot, 0, CACHED, NONE)], np.empty(0, dtype=np.int64))
    print(f"start of the mode, checks included: {built:.2f} s")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    refit = {
        name: min(seconds(lambda r=r: r.load_weights(weights, None))[0] for _ in range(3)) for name, r in sides.items()
    }
    print(f"a set of weights: ordinary {refit['ordinary']:.2f} s, invariant {refit['invariant']:.2f} s")
    table = []
    for batch in (1, 8):
        for count in (1, 8, 17):
            rows = [PassRow(slot, CACHED, count, NONE) for slot in range(batch)]
            brought = [tokens[slot, CACHED : CACHED + count] for slot in range(batch)]
            times = {name: [] for name in sides}
            for _ in range(repeats + 1):
                for name, runner in sides.items():
                    times[name].append(
                        seconds(lambda r=runner, b=brought, w=rows, n=batch * count: r.forward(b, w, np.arange(n)))[0]
                    )
            row = {name: median(values[1:]) * 1e3 for name, values in times.items()}
            ratio = row["invariant"] / row["ordinary"]
            table.append({"batch": batch, "T": count, **row, "ratio": ratio})
            print(f"batch {batch}, T {count}: {row['ordinary']:.0f} / {row['invariant']:.0f} ms, {ratio:.2f}x")
    for runner in sides.values():
        runner.close()
    return {"start_seconds": built, "refit_seconds": refit, "passes_ms": table}


def generations(model, prompts, eos_ids):
    """Processor seconds of two rounds of each side, and whether the drafted tokens and bits are the plain ones."""
    found = []
    for mode in (False, True):
        rounds = {}
        for drafted in (False, True):
            engine = HFEngine(
                copy.deepcopy(model),
                drafter=HistoryDrafter() if drafted else None,
                budget_config=BudgetConfig(mode="fixed"),
                config=EngineConfig(slots=8, invariant=mode),
                eos_ids=eos_ids,
            )
            for number in range(2):
                reqs = [
                    RolloutRequest(
                        request_id=f"{number}/{i}",
                        prompt=prompts[i // 4],
                        group=f"{number}/{i // 4}",
                        params=SamplingParams(max_tokens=64, seed=derive_seed("invariant", number, i)),
                    )
                    for i in range(4 * len(prompts))
                ]
                rounds[drafted, number] = seconds(lambda e=engine, r=reqs: e.generate(r))
            engine.close()
        for number, history in enumerate(("cold", "warm")):
            plain_seconds, plain = rounds[False, number]
            spec_seconds, spec = rounds[True, number]
            pairs = list(zip(plain, spec, strict=True))
            row = {
                "mode": "invariant" if mode else "ordinary",
                "history": history,
                "tokens": sum(len(r.tokens) for r in plain),
                "plain_seconds": plain_seconds,
                "drafted_seconds": spec_seconds,
                "equal_tokens": sum(a.tokens.tobytes() == b.tokens.tobytes() for a, b in pairs),
                "equal_bits": sum(a.logprobs.tobytes() == b.logprobs.tobytes() for a, b in pairs),
                "rollouts": len(pairs),
            }
            found.append(row)
            print(
                f"{row['mode']}, history {history}: plain {plain_seconds:.1f} s, drafted {spec_seconds:.1f} s; "
                f"of {len(pairs)} rollouts {row['equal_tokens']} with equal tokens, {row['equal_bits']} with equal bits"
            )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--json")
    args = parser.parse_args()
    config = load_config(CONFIG, [f"tasks.function_call.train_prompts={args.prompts}"])
    policy = Policy.load(config.policy, config.seed)
    tasks = {name: make_task(name, task, config.seed) for name, task in config.tasks.items()}
    prompts = [item.tokens for item in load_items(tasks, "train", policy.encode_prompt)]
    model = policy.engine_model()
    results = passes(model, args.repeats) | {"generation": generations(model, prompts, policy.eos_ids)}
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

"""Tokens per forward under grammars: what forced tokens give alone, beside the history, and against plain decoding.

The demo's policy, SmolLM2-135M with the function-call adapter, answers prompts whose grammars come from their
functions' signatures, at temperature 1, in several visits of the same prompts (the history is cold in the first). Every
side has an engine of its own and decodes the same requests with the same seeds; a visit's seeds are new. ``free``
decodes without grammars. The budget is fixed: every offered node is verified.

    python benchmarks/grammar.py [--prompts 8] [--group 4] [--visits 3] [--json FILE]
"""

import argparse
import copy
import json
import time

import msgspec
import numpy as np

from paceline.config import BudgetConfig, DrafterConfig, EngineConfig, load_config
from paceline.drafters import make_drafter
from paceline.engines.hf import HFEngine
from paceline.rl.curriculum import load_items, rollout_requests
from paceline.rl.policy import Policy
from paceline.rl.tasks.registry import make_task
from paceline.sampling.grammar import Vocabulary
from paceline.schema import SOURCES

CONFIG = "examples/function_call_grammar.yaml"
SIDES = {
    "none": DrafterConfig(kind="none"),
    "forced": DrafterConfig(kind="forced"),
    "history": DrafterConfig(kind="history", forced=False),
    "history+forced": DrafterConfig(kind="history"),
    "free, history": DrafterConfig(kind="history"),
}


def parses(rollout):
    try:
        return isinstance(json.loads(rollout.text), dict)
    except ValueError:
        return False


def measure(policy, vocabulary, items, config, side, visits, group):
    drafter_config = SIDES[side]
    engine = HFEngine(
        copy.deepcopy(policy), drafter=make_drafter(drafter_config, salt=0, vocabulary=vocabulary),
        budget=drafter_config.budget, budget_config=BudgetConfig(mode="fixed"), eos_ids=config["eos_ids"],
        config=EngineConfig(slots=8), decode=config["decode"], tokenizer=vocabulary,
    )  # fmt: skip
    rows = []
    for visit in range(visits):
        requests = rollout_requests(items, group, config["sampling"], 0, str(visit))
        if side.startswith("free"):
            for request in requests:
                request.params = msgspec.structs.replace(request.params, grammar=None)
        before, began = engine.stats(), time.process_time()
        rollouts = engine.generate(requests)
        seconds, now = time.process_time() - began, engine.stats()
        sources = np.concatenate([rollout.sources for rollout in rollouts])
        forwards = now.row_forwards - before.row_forwards
        rows.append(
            {
                "side": side,
                "visit": visit,
                "tokens_per_forward": (now.tokens_emitted - before.tokens_emitted) / forwards,
                "drafted_per_forward": (now.tokens_drafted - before.tokens_drafted) / forwards,
                "acceptance": (now.tokens_accepted - before.tokens_accepted)
                / max(1, now.tokens_drafted - before.tokens_drafted),
                "from_forced": float((sources == SOURCES.index("forced")).mean()),
                "drafting_share": (now.draft_seconds - before.draft_seconds) / seconds,
                "accepting_share": (now.accept_seconds - before.accept_seconds) / seconds,
                "processor_seconds": seconds,
                "parses": sum(map(parses, rollouts)),
                "cut": sum(rollout.finish_reason == "length" for rollout in rollouts),
                "rollouts": len(rollouts),
                "tokens": [rollout.tokens.tolist() for rollout in rollouts],
            }
        )
    engine.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--visits", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    config = load_config(CONFIG, [f"tasks.function_call.train_prompts={args.prompts}"])
    policy = Policy.load(config.policy, config.seed)
    tasks = {name: make_task(name, task, config.seed) for name, task in config.tasks.items()}
    items = load_items(tasks, "train", policy.encode_prompt)
    vocabulary, model = Vocabulary(policy.tokenizer), policy.engine_model()
    shared = {
        "sampling": config.sampling,
        "eos_ids": policy.eos_ids,
        "decode": lambda ids: policy.decode(np.array(ids)),
    }
    columns = (
        "drafter,visit,tokens/forward,drafted,acceptance,forced,drafting,accepting,parse,cut,against none,differing"
    )
    print("| " + columns.replace(",", " | ") + " |\n" + "|---" * (columns.count(",") + 1) + "|")
    plain, results = [], []
    for side in SIDES:
        rows = measure(model, vocabulary, items, shared, side, args.visits, args.group)
        plain = plain or rows
        for row, none in zip(rows, plain, strict=True):
            row["against_none"] = none["processor_seconds"] / row["processor_seconds"]
            differing = sum(a != b for a, b in zip(row["tokens"], none["tokens"], strict=True))
            print(
                f"| {side} | {row['visit'] + 1} | {row['tokens_per_forward']:.2f} | {row['drafted_per_forward']:.2f} | "
                f"{row['acceptance']:.0%} | {row['from_forced']:.0%} | {row['drafting_share']:.1%} | "
                f"{row['accepting_share']:.1%} | {row['parses']} of {row['rollouts']} | {row['cut']} | "
                f"{row['against_none']:.2f}x | {'-' if side.startswith('free') else differing} |",
                flush=True,
            )
        results += [{key: value for key, value in row.items() if key != "tokens"} for row in rows]
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

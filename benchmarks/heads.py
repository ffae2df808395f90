"""What a head costs and brings on the reference engine: tokens a pass, and the seconds of every part of a draft.

Plain decoding and drafts of a fixed number of depths, for the same requests of the text-to-SQL task. The head comes
from `--head`, or it starts from the policy's own layers and is trained here for `--updates` steps on the policy's
rollouts of other prompts. Times are of the processor that this process had, so that neighbours disturb little:

- policy: a pass over what the rows bring, drafts included, without the decision about them;
- read: a head's pass over what the policy emitted, which gives the first depth;
- depth: each pass of a further depth, sampling from its law included.

    python benchmarks/heads.py [--policy examples/policies/sql-1m] [--kind eagle3] [--head DIR] [--updates 300]
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from paceline.config import BudgetConfig, CotrainConfig, EngineConfig, HeadConfig, PolicyConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.trainer import Trainer
from paceline.drafters import PolicyTraits
from paceline.drafters.head import HeadDrafter
from paceline.drafters.heads import make_head
from paceline.engines.hf import HFEngine
from paceline.forward.taps import FINAL, Taps
from paceline.rl.policy import Policy
from paceline.rl.tasks.text_to_sql import TextToSql
from paceline.schema import RolloutRequest, SamplingParams, derive_seed

SQL = Path(__file__).parents[1] / "examples" / "policies" / "sql-1m"


class Timed(HeadDrafter):
    """A head whose passes are timed: those that read, and those of a further depth, with all that follows them."""

    def __init__(self, head, policy):
        super().__init__(head, policy, clock=time.process_time)
        self.reads, self.depths = [], []

    def propose(self, request_ids, budget):
        self._since, self._kind = time.process_time(), []  # of a call that drafts nothing, nothing is kept
        drafts = super().propose(request_ids, budget)
        self._book([])
        return drafts

    def _begin(self, rows):
        self._kind = self.reads
        return super()._begin(rows)

    def _deepen(self, rows):
        self._book(self.depths)
        return super()._deepen(rows)

    def _book(self, following):
        now = time.process_time()
        self._kind.append(now - self._since)
        self._since, self._kind = now, following


def requests(policy, prompts, samples, tokens, name):
    return [
        RolloutRequest(
            request_id=f"{name}{i}/{sample}",
            prompt=policy.encode_prompt(prompt.text),
            group=str(i),
            params=SamplingParams(max_tokens=tokens, seed=derive_seed(name, i, sample)),
        )
        for i, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def generate(policy, asked, slots, drafter=None, budget=0):
    engine = HFEngine(
        policy.engine_model(), drafter=drafter, budget=budget, budget_config=BudgetConfig(mode="fixed"),
        config=EngineConfig(slots=slots), eos_ids=policy.eos_ids,
    )  # fmt: skip
    passes, forward = [], engine._runner.forward

    def timed(*given):
        started = time.process_time()
        logits = forward(*given)
        passes.append(time.process_time() - started)
        return logits

    engine._runner.forward = timed
    started = time.process_time()
    rollouts = engine.generate(asked)
    seconds, stats = time.process_time() - started, engine.stats()
    engine.close()
    return rollouts, stats, seconds, np.array(passes)


@torch.no_grad()
def documents(model, layers, rollouts):
    """The rollouts with the states that the policy has at them."""
    found, taps = [], Taps(model, (*layers, FINAL))
    for rollout in rollouts:
        tokens = np.concatenate([rollout.prompt, rollout.tokens])
        with taps.watching():
            model(torch.from_numpy(tokens[None, :-1].astype(np.int64)))
        states = taps.take()[0]
        size = states.shape[1] // (len(layers) + 1)
        found.append(Document(tokens, len(rollout.prompt), states[:, :-size], states[:, -size:]))
    taps.close()
    return found


def learned(policy, kind, updates, tokens, vocabulary):
    """A head from the policy's own layers that has learned from rollouts of prompts that are not measured."""
    head = make_head(kind, HeadConfig(vocabulary=vocabulary), policy.model, 0)
    if not updates:
        return head
    prompts = TextToSql(train_prompts=96).prompts("train")[32:]
    rollouts, *_ = generate(policy, requests(policy, prompts, 4, tokens, "other"), 32)
    model = policy.engine_model()
    read = documents(model, head.taps, rollouts)
    trainer = Trainer(head, model, CotrainConfig(updates=8, tokens=0), 1.0)
    for done in range(0, updates, 8):
        metrics = trainer.train(read)
        if done % 80 == 0:
            print(f"update {done}: loss {metrics['loss']:.3f}, tokens a pass {metrics['expected']:.2f}", flush=True)
    return head.requires_grad_(False)


def milliseconds(seconds):
    return 1000 * float(np.median(seconds)) if len(seconds) else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default=str(SQL))
    parser.add_argument("--kind", choices=("eagle3", "mtp"), default="eagle3")
    parser.add_argument("--head", help="the directory of a head; without it one is trained here")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens that a head trained here drafts; 0: all")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3, 5, 7])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json")
    args = parser.parse_args()
    policy = Policy.load(PolicyConfig(path=args.policy), 0)
    if args.head:
        head = make_head(args.kind, HeadConfig(path=args.head), policy.model, 0)
    else:
        head = learned(policy, args.kind, args.updates, args.tokens, args.vocabulary)
    size = sum(parameter.numel() for parameter in head.parameters())
    print(f"policy {policy.model.num_parameters():,} parameters, head {size:,}\n")
    traits = PolicyTraits(
        vocabulary_size=int(policy.model.config.get_text_config().vocab_size), run_seed=0, eos_ids=policy.eos_ids
    )
    asked = requests(
        policy, TextToSql(train_prompts=32).prompts("train")[: args.prompts], args.samples, args.tokens, ""
    )
    names = "rows,depths,tokens/pass,accepted,policy ms,read ms,depth ms,depth / plain pass,s,plain s,unlike plain"
    print("| " + names.replace(",", " | ") + " |\n" + "|---" * (names.count(",") + 1) + "|")
    table = []
    for rows in args.rows:
        plain, _, plain_seconds, passes = generate(policy, asked, rows)
        plain_ms = milliseconds(passes)
        for depths in args.depths:
            drafter = Timed(head, traits)
            rollouts, stats, seconds, passes = generate(policy, asked, rows, drafter, depths)
            unlike = sum(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(rollouts, plain, strict=True))
            row = {
                "rows": rows,
                "depths": depths,
                "tokens_per_pass": stats.tokens_emitted / stats.row_forwards,
                "acceptance": stats.tokens_accepted / stats.tokens_drafted,
                "plain_pass_ms": plain_ms,
                "policy_ms": milliseconds(passes),
                "read_ms": milliseconds(drafter.reads),
                "depth_ms": milliseconds(drafter.depths),
                "seconds": seconds,
                "plain_seconds": plain_seconds,
                "unlike_plain": unlike,
            }
            table.append(row)
            print(
                f"| {rows} | {depths} | {row['tokens_per_pass']:.2f} | {row['acceptance']:.1%} | "
                f"{row['policy_ms']:.2f} | {row['read_ms']:.2f} | {row['depth_ms']:.2f} | "
                f"{row['depth_ms'] / plain_ms:.0%} | {seconds:.1f} | {plain_seconds:.1f} | {unlike} |",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

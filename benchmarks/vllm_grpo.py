"""GRPO on the real vLLM: tokens per forward with the history drafter against vLLM's own ngram and suffix drafting.

Each side is `paceline train CONFIG engine.kind=vllm` in a process of its own: the same policy, prompts and seeds,
history and suffix tree cold at the start. vLLM samples by itself, so the runs have equal laws, not equal tokens, and
their policies part a little; ``--frozen`` holds the weights, then every side samples one and the same policy. The peers
run with vLLM's defaults (suffix: 24 tokens a draft) and with better settings. ``history`` is what a person gets, whose
budget weighs what a pass costs; ``fixed`` and ``24`` verify all that is offered, 16 and 24 tokens at most, as the peers
do. The table gives tokens per row-forward (one decoding row in one policy pass) by epoch.

    make venv-vllm
    .venv-vllm/bin/python benchmarks/vllm_grpo.py [--epochs 2] [--frozen] [--sides history,ngram,...] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.report.metrics import acceptance, tokens_per_forward
from paceline.report.trace import read_metrics, read_trace

NGRAM = "drafter.kind=ngram"
SUFFIX = "drafter.kind=suffix"
TUNED = "engine.vllm.speculative={suffix_decoding_max_tree_depth: 64, suffix_decoding_max_spec_factor: 4.0}"
SIDES = {
    "history": ["drafter.kind=history"],
    "history-fixed": ["drafter.kind=history", "budget.mode=fixed"],
    "history-24": ["drafter.kind=history", "budget.mode=fixed", "drafter.budget=24"],
    "ngram": [NGRAM, "drafter.prompt_lookup.min_match=5", "drafter.prompt_lookup.max_match=5"],
    "ngram-tuned": [NGRAM, "drafter.prompt_lookup.min_match=2", "drafter.prompt_lookup.max_match=4"],
    "suffix": [SUFFIX, "drafter.budget=24"],
    "suffix-tuned": [SUFFIX, TUNED],
    "suffix-tuned-24": [SUFFIX, TUNED, "drafter.budget=24"],
    "none": ["drafter.kind=none"],
}
#: One thread each; numba, which vLLM's ngram uses, would wake a second one for the whole process.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(side, args, out):
    """Train one side; returns a row of the table for each epoch."""
    command = [
        str(Path(sys.executable).with_name("paceline")), "train", args.config, "engine.kind=vllm", "check.every=0",
        "checkpoint.every=0", "rl.eval_every=0", f"rl.epochs={args.epochs}", f"out={out}",
        *SIDES[side], *args.overrides,
    ]  # fmt: skip
    if args.frozen:
        command.append("rl.lr=1e-12")
    with open(f"{out}.log", "w", encoding="utf-8") as log:
        subprocess.run(command, check=True, env=ENVIRONMENT | os.environ, stdout=log, stderr=subprocess.STDOUT)
    records = read_metrics(Path(out) / "metrics.jsonl")
    rows = []
    for epoch in sorted({record.epoch for record in records}):
        steps = {record.step for record in records if record.epoch == epoch}
        trace = [row for row in read_trace(Path(out) / "rollouts.jsonl") if row.step in steps]
        own = [record for record in records if record.epoch == epoch]
        emitted, forwards = sum(len(row.tokens) for row in trace), sum(row.forwards for row in trace)
        drafted, accepted = sum(row.drafted for row in trace), sum(row.accepted for row in trace)
        seconds = sum(record.seconds["generation"] for record in own)
        rows.append(
            {
                "side": side,
                "epoch": epoch,
                "steps": len(own),
                "tokens": emitted,
                "tokens_per_forward": tokens_per_forward(emitted, forwards),
                "drafted_per_forward": drafted / forwards,
                "acceptance": acceptance(accepted, drafted),
                "tokens_per_second": emitted / seconds,
                "reward": sum(record.reward for record in own) / len(own),
                "mismatch_kl": max(record.mismatch_kl for record in own),
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/function_call.yaml")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sides", default="none,history,history-fixed,ngram,ngram-tuned,suffix,suffix-tuned")
    parser.add_argument("--frozen", action="store_true", help="hold the weights (a learning rate of 1e-12)")
    parser.add_argument("--keep", help="folder that keeps the runs")
    parser.add_argument("--json")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    results = []
    print("| side | epoch | tokens per forward | drafted per forward | acceptance | tokens/s | reward | mismatch_kl |")
    print("|---" * 8 + "|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for side in args.sides.split(","):
            for row in run(side, args, folder / side):
                results.append(row)
                print(
                    f"| {side} | {row['epoch']} | {row['tokens_per_forward']:.2f} | {row['drafted_per_forward']:.2f} | "
                    f"{row['acceptance']:.0%} | {row['tokens_per_second']:.1f} | {row['reward']:.2f} | "
                    f"{row['mismatch_kl']:.1e} |",
                    flush=True,
                )
    for epoch in sorted({row["epoch"] for row in results}):
        by_side = {row["side"]: row["tokens_per_forward"] for row in results if row["epoch"] == epoch}
        peers = {side: value for side, value in by_side.items() if side.startswith(("ngram", "suffix"))}
        if peers:
            best = max(peers, key=peers.get)
            for side in (side for side in by_side if side.startswith("history")):
                print(f"epoch {epoch}: {side} {by_side[side] / peers[best]:.2f}x the best peer ({best})")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""What a draft costs inside vLLM: ``propose`` of the plug-in against vLLM's own n-gram and suffix proposers.

The real vLLM decodes real rollouts of the million-parameter SQL policy, 64 at a time, 8 a prompt, at temperature 1. One
proposer of vLLM's kind ``custom_class`` holds all sides and calls each of them after every pass, in turns, on the same
batch: the contexts are the same, and so is the process. The plug-in's drafts are those that vLLM verifies. Every side
is timed as vLLM would call it; the plug-in with all it does there: it follows requests, calibrates, keeps the budget.

The first epoch is **cold**: nothing was said before. In the later ones the same prompts come again, with other samples,
so the plug-in's history and the suffix tree are **warm**. Medians over the passes that are at least half full; beside
the wall clock stands the processor time of all threads, which does not count what other processes take. vLLM's n-gram
proposer compiles itself when it is built, and keeps nothing. Needs the environment that `make venv-vllm` makes:

    make venv-vllm
    .venv-vllm/bin/python benchmarks/vllm_propose.py [--batch 64] [--epochs 4] [--json FILE]
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
#: vLLM's proposers by name: method, and what differs from vLLM's defaults.
PEERS = {
    "vLLM ngram, defaults (5)": ("ngram", {}),
    "vLLM ngram, 2 to 4": ("ngram", {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
    "vLLM suffix, defaults (depth 24, factor 1)": ("suffix", {}),
    "vLLM suffix, depth 64, factor 4": (
        "suffix",
        {"suffix_decoding_max_tree_depth": 64, "suffix_decoding_max_spec_factor": 4.0},
    ),
}
OURS = "paceline history"
BUDGET = 16
#: What the running proposer measured; vLLM builds it, in this process.
LIVE = {}


class AllSides:
    """A proposer for vLLM that holds every side and returns the plug-in's drafts."""

    def __init__(self, vllm_config):
        from paceline.integrations.vllm import HistoryProposer

        self.ours = HistoryProposer(vllm_config)
        self.sides = {OURS: self._ours, **{name: self._peer(vllm_config, *peer) for name, peer in PEERS.items()}}
        self.passes = []  # (rows, {side: (seconds, processor seconds, drafted tokens)})
        self.turn = 0
        LIVE["proposer"] = self

    def load_model(self, *args, **kwargs):
        self.ours.load_model(*args, **kwargs)

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, **_):
        rows = sum(map(bool, sampled_token_ids))
        batch = sys._getframe(1).f_locals["self"].input_batch
        call = {"sampled": sampled_token_ids, "lengths": num_tokens_no_spec, "tokens": token_ids_cpu, "batch": batch}
        names = list(self.sides)
        self.turn += 1
        found, drafts = {}, None
        for name in names[self.turn % len(names) :] + names[: self.turn % len(names)]:
            began, cpu_began = time.perf_counter(), time.process_time()
            proposed = self.sides[name](**call)
            cpu, wall = time.process_time() - cpu_began, time.perf_counter() - began
            found[name] = wall, cpu, sum(map(len, proposed))
            if name == OURS:
                drafts = proposed
        self.passes.append((rows, found))
        return drafts

    def _ours(self, sampled, lengths, tokens, **_):
        return self.ours.propose(sampled, lengths, tokens)

    def _peer(self, vllm_config, method, options):
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        settings = {
            "prompt_lookup_min": 5,
            "prompt_lookup_max": 5,
            "suffix_decoding_max_tree_depth": 24,
            "suffix_decoding_max_cached_requests": 10000,
            "suffix_decoding_max_spec_factor": 1.0,
            "suffix_decoding_min_token_prob": 0.1,
            "num_speculative_tokens": BUDGET,
            **options,
        }
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(**settings),
            model_config=vllm_config.model_config,
            scheduler_config=vllm_config.scheduler_config,
            parallel_config=vllm_config.parallel_config,
        )
        if method == "ngram":
            ngram = NgramProposer(config)
            return lambda sampled, lengths, tokens, **_: ngram.propose(BUDGET, sampled, lengths, tokens)
        suffix = SuffixDecodingProposer(config)
        return lambda sampled, batch, **_: suffix.propose(BUDGET, batch, sampled)


def load(batch, mode):
    """The policy's directory, its prompts, and a vLLM whose proposer is ``AllSides``."""
    from vllm import LLM

    from paceline.config import load_config
    from paceline.rl.curriculum import load_items
    from paceline.rl.policy import Policy
    from paceline.rl.tasks.registry import make_task

    config = load_config("examples/text_to_sql.yaml")
    policy = Policy.load(config.policy, config.seed)
    tasks = {name: make_task(name, task, config.seed) for name, task in config.tasks.items()}
    prompts = [item.tokens.tolist() for item in load_items(tasks, "train", policy.encode_prompt)]
    llm = LLM(
        model=config.policy.path,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=batch,
        speculative_config={
            "method": "custom_class",
            "model": "vllm_propose.AllSides",
            "num_speculative_tokens": BUDGET,
        },
        additional_config={"paceline": {"budget": {"mode": mode}}},
    )
    return llm, prompts, policy.eos_ids


def epoch(llm, prompts, eos_ids, batch, number):
    """Decode every prompt 8 times, ``batch`` rollouts at a time; returns the passes, tokens and forwards."""
    from vllm import SamplingParams

    proposer = LIVE["proposer"]
    first = len(proposer.passes)
    tokens = 0
    for start in range(0, len(prompts), batch // 8):
        some = [(p, i) for p in range(start, min(start + batch // 8, len(prompts))) for i in range(8)]
        params = [
            SamplingParams(
                temperature=1.0, max_tokens=96, seed=1000 * number + 8 * p + i, detokenize=False,
                stop_token_ids=list(eos_ids), extra_args={"paceline_group": f"{number}/{p}"},
            )
            for p, i in some
        ]  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": prompts[p]} for p, _ in some], params, use_tqdm=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    return proposer.passes[first:], tokens


def report(name, passes, tokens):
    """Rows of the table: microseconds a request of full batches, and what was drafted in all passes."""
    most = max(rows for rows, _ in passes)
    full = [(rows, found) for rows, found in passes if rows >= most / 2]
    forwards = sum(rows for rows, _ in passes)
    rows = []
    for side in (OURS, *PEERS):
        wall, cpu = (np.array([1e6 * found[side][i] / count for count, found in full]) for i in (0, 1))
        rows.append(
            {
                "history": name,
                "side": side,
                "wall_us": float(np.median(wall)),
                "cpu_us": float(np.median(cpu)),
                "cpu_us_p90": float(np.quantile(cpu, 0.9)),
                "drafted_per_request": sum(found[side][2] for _, found in passes) / forwards,
                "passes": len(full),
                "tokens_per_forward": tokens / forwards,
            }
        )
    for row in rows:
        row["against_ours"] = row["cpu_us"] / rows[0]["cpu_us"]
        print(
            f"| {name} | {row['side']} | {row['wall_us']:.1f} | {row['cpu_us']:.1f} | {row['cpu_us_p90']:.1f} | "
            f"{row['against_ours']:.2f}x | {row['drafted_per_request']:.1f} | {row['passes']} |",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--mode", default="fixed", choices=["fixed", "adaptive"], help="the plug-in's budget.mode")
    parser.add_argument("--json")
    args = parser.parse_args()
    llm, prompts, eos_ids = load(args.batch, args.mode)
    print("| history | side | us a request | processor us | p90 | times ours | drafted a request | passes |")
    print("|---" * 8 + "|")
    results = []
    for number in range(args.epochs):
        passes, tokens = epoch(llm, prompts[: args.prompts], eos_ids, args.batch, number)
        name = "cold" if number == 0 else f"warm, {number} epoch{'s' if number > 1 else ''}"
        results += report(name, passes, tokens)
        print(f"  ({tokens} tokens, {results[-1]['tokens_per_forward']:.2f} tokens per forward)", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    # vLLM imports the proposer by its path; it must find this very module.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["vllm_propose"] = sys.modules["__main__"]
    main()

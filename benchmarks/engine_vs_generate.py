"""Plain decoding through the reference engine against `model.generate` of transformers, side by side in one run.

Both decode the same prompts with the same weights in float32 and sample at temperature 1. ``equal``: every row emits
``--tokens`` tokens. ``ragged``: rows finish at lengths spread from a quarter of that to all of it; `generate` stops at
its longest row, the engine frees a slot at once. Runs alternate; the ratio is the median of the paired runs.

    python benchmarks/engine_vs_generate.py [--model smollm2-135m] [--batches 1,8,32] [--json FILE]
"""

import argparse
import json
import time
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from paceline.engines.hf import HFEngine
from paceline.rl.models import resolve_model
from paceline.schema import RolloutRequest, SamplingParams


class ForceLengths(LogitsProcessor):
    """Lets row i emit EOS at its own length and nowhere else, so that both sides do the same work."""

    def __init__(self, lengths, start, eos):
        self.lengths, self.start, self.eos = torch.tensor(lengths), start, eos

    def __call__(self, input_ids, scores):
        done = input_ids.shape[1] - self.start
        scores[:, self.eos] = -torch.inf
        ends = (self.lengths - 1 == done).nonzero()[:, 0]
        scores[ends] = -torch.inf
        scores[ends, self.eos] = 0.0
        return scores


def generate(model, prompts, lengths, eos):
    start = prompts.shape[1]
    began = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=max(lengths),
        eos_token_id=eos,
        pad_token_id=eos,
        logits_processor=LogitsProcessorList([ForceLengths(lengths, start, eos)]),
    )
    return time.perf_counter() - began


def ours(engine, prompts, lengths, tag):
    requests = [
        RolloutRequest(
            request_id=f"{tag}/{i}",
            prompt=row.numpy().astype(np.int32),
            params=SamplingParams(max_tokens=n, ignore_eos=True),
        )
        for i, (row, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    began = time.perf_counter()
    rollouts = engine.generate(requests)
    assert [len(r.tokens) for r in rollouts] == list(lengths)
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    path = resolve_model(args.model)
    theirs = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    ).eval()
    engine = HFEngine(
        AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
        )
    )
    eos = theirs.generation_config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    results = []
    for batch in (int(b) for b in args.batches.split(",")):
        prompts = torch.randint(
            10, theirs.config.vocab_size, (batch, args.prompt), generator=torch.Generator().manual_seed(0)
        )
        for kind in ("equal", "ragged") if batch > 1 else ("equal",):
            spread = np.linspace(args.tokens // 4, args.tokens, batch).astype(int)
            lengths = [args.tokens] * batch if kind == "equal" else [int(n) for n in spread]
            pairs = []
            for number in range(args.pairs + 1):
                pair = (
                    generate(theirs, prompts, lengths, eos),
                    ours(engine, prompts, lengths, f"{batch}{kind}{number}"),
                )
                if number:  # the first pair warms up
                    pairs.append(pair)
            row = {
                "batch": batch,
                "lengths": kind,
                "generate_tokens_per_second": sum(lengths) / median(p[0] for p in pairs),
                "engine_tokens_per_second": sum(lengths) / median(p[1] for p in pairs),
                "speedup": median(p[0] / p[1] for p in pairs),
            }
            results.append(row)
            print(
                f"batch {batch:3d} {kind:6s}  generate {row['generate_tokens_per_second']:7.1f} tok/s   "
                f"engine {row['engine_tokens_per_second']:7.1f} tok/s   engine/generate {row['speedup']:.2f}x",
                flush=True,
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

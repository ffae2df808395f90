"""Transformers' ``generate`` over repeated prompts, side by side: plain, with prompt lookup, with paceline.

Every round asks the same prompts again, sampled anew; the ways take turns within a round. Prompt lookup takes one
prompt at a time in transformers, so there is a second plain way that does the same. Reports seconds and tokens per
forward pass a round: medians over the rounds after the first, in which nothing was said before.

    OMP_NUM_THREADS=1 python benchmarks/transformers_generate.py [--model DIR] [--rounds 5] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections import defaultdict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from paceline.integrations.transformers import Speculation
from paceline.rl.models import resolve_model
from paceline.rl.tasks.text_to_sql import TextToSql

LOOKUP = {"prompt_lookup_num_tokens": 10}
#: Options of each way, and whether it takes one prompt at a time.
WAYS = {
    "plain": ({}, False),
    "paceline, no drafts": ({"drafter": {"kind": "none"}}, False),
    "paceline, history": ({}, False),
    "plain, one by one": ({}, True),
    "prompt lookup, one by one": (LOOKUP, True),
    "paceline, history, one by one": ({}, True),
}


class Passes:
    """Counts the model's passes."""

    def __init__(self, model):
        self.count = 0
        self.hook = model.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, _model, _args, _kwargs):
        self.count += 1


def said(sequences, length, eos):
    """Tokens of the responses, the end of each included."""
    ended = torch.isin(sequences[:, length:], torch.tensor(eos)).int().cumsum(1)
    return int((torch.nn.functional.pad(ended[:, :-1], (1, 0)) == 0).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="examples/policies/sql-1m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--json")
    args = parser.parse_args()
    logging.disable_progress_bar()
    path = resolve_model(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype="float32", attn_implementation="sdpa", use_safetensors=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    texts = [prompt.text for prompt in TextToSql(train_prompts=args.prompts, eval_prompts=0).prompts("train")]
    eos = model.generation_config.eos_token_id
    eos = [eos] if isinstance(eos, int) else eos
    asked = {
        "do_sample": True, "temperature": args.temperature, "top_k": 0, "max_new_tokens": args.tokens,
        "pad_token_id": eos[0],
    }  # fmt: skip
    mine = {way: Speculation(options) for way, (options, _) in WAYS.items() if way.startswith("paceline")}
    passes, rows = Passes(model), defaultdict(list)
    for number in range(args.rounds + 1):
        for way, (options, is_alone) in WAYS.items():
            more = {"custom_generate": mine[way]} if way in mine else options
            batches = [[text] for text in texts] if is_alone else [texts]
            inputs = [tokenizer(batch, return_tensors="pt", padding=True) for batch in batches]
            torch.manual_seed(number)
            passes.count, began = 0, time.perf_counter()
            found = [model.generate(**each, **asked, **more) for each in inputs]
            seconds = time.perf_counter() - began
            emitted = sum(said(s, each["input_ids"].shape[1], eos) for s, each in zip(found, inputs, strict=True))
            rows[way].append({"seconds": seconds, "tokens": emitted, "passes": passes.count})
    results = {}
    for way, found in rows.items():
        later = found[1:]
        results[way] = {
            "first_round_seconds": found[0]["seconds"],
            "seconds": statistics.median(row["seconds"] for row in later),
            "tokens_per_second": statistics.median(row["tokens"] / row["seconds"] for row in later),
            "tokens_per_pass": statistics.median(row["tokens"] / row["passes"] for row in later),
        }
        shown = results[way]
        print(
            f"{way:30s} first {shown['first_round_seconds']:7.2f} s   later {shown['seconds']:7.2f} s   "
            f"{shown['tokens_per_second']:7.1f} tok/s   {shown['tokens_per_pass']:6.2f} tokens a pass",
            flush=True,
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"settings": vars(args), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()

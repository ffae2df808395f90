"""TRL's GRPOTrainer on one machine, three ways in one run: its own generation, paceline's without drafts, with history.

The same policy, prompts, rewards and seeds. The last two say the same tokens, which is checked; transformers' generate
draws its own. Reports seconds of generation and of a whole step (medians over the first epoch and over later ones),
tokens per forward, and the rewards.

    OMP_NUM_THREADS=1 python benchmarks/trl_grpo.py [--steps 16] [--rounds 2] [--json FILE]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from paceline.integrations.trl import rollout_func
from paceline.rl.rewards import Judge
from paceline.rl.tasks.text_to_sql import TextToSql

POLICY = "examples/policies/sql-1m"
PROMPTS, SIBLINGS, BATCH = 32, 8, 64
WAYS = {
    "trl": None,
    "paceline, no drafts": {"drafter": {"kind": "none"}},
    "paceline, history": {"drafter": {"kind": "history", "budget": 16}},
}


@dataclass
class Run:
    """A run of one way: entry i of all lists is of step i."""

    way: str
    generation_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    tokens_per_forward: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    said: list[list[list[int]]] = field(default_factory=list)


def run(way, steps):
    """Train once."""
    task = TextToSql(train_prompts=PROMPTS, eval_prompts=0)
    judge = Judge(task, name="text_to_sql")  # what a policy writes is judged in a sandbox
    asked, found = {prompt.text: prompt for prompt in task.prompts("train")}, Run(way)

    def right(prompts, completions, completion_ids, **_):
        found.said.append([list(ids) for ids in completion_ids])
        pairs = [(asked[prompt], said) for prompt, said in zip(prompts, completions, strict=True)]
        return [scored.reward for scored in judge.score_all(pairs)]

    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                POLICY, dtype="float32", attn_implementation="sdpa", use_safetensors=True
            ),
            reward_funcs=right,
            args=GRPOConfig(
                output_dir=out, per_device_train_batch_size=BATCH, num_generations=SIBLINGS, max_completion_length=96,
                learning_rate=3e-4, max_steps=steps, logging_steps=1, save_strategy="no", report_to=[],
                disable_tqdm=True, use_cpu=True, bf16=False, top_k=0,
            ),
            train_dataset=Dataset.from_dict({"prompt": list(asked)}),
            processing_class=AutoTokenizer.from_pretrained(POLICY),
            rollout_func=None if WAYS[way] is None else rollout_func(WAYS[way]),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        generate = trainer._generate

        def timed(prompts):
            started = time.perf_counter()
            result = generate(prompts)
            found.generation_seconds.append(time.perf_counter() - started)
            return result

        trainer._generate = timed
        trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            found.rewards.append(entry["reward"])
            found.step_seconds.append(entry["step_time"])
            found.tokens_per_forward.append(entry.get("paceline/tokens_per_forward", 1.0))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    epoch = PROMPTS * SIBLINGS // BATCH
    runs = []
    for number in range(args.rounds):
        # Forth and back, so that what else the machine does meets all ways alike.
        runs += [run(way, args.steps) for way in (list(WAYS) if number % 2 == 0 else list(WAYS)[::-1])]
    said = [one.said for one in runs if one.way != "trl"]
    same = sum(a == b for other in said[1:] for a, b in zip(said[0], other, strict=True))
    print(f"steps whose rollouts are the same with and without drafts: {same} of {args.steps * (len(said) - 1)}")
    titles = ("generation s", "x trl", "x plain", "step s", "x trl", "tokens/forward", "reward")
    print(f"{'':22}{'epochs':>8}" + "".join(f"{title:>16}" for title in titles))
    for name, part in (("first", slice(0, epoch)), ("later", slice(epoch, None))):
        if not runs[0].rewards[part]:
            continue
        level = {
            way: [
                statistics.median(value for one in runs if one.way == way for value in getattr(one, key)[part])
                for key in ("generation_seconds", "step_seconds", "tokens_per_forward", "rewards")
            ]
            for way in WAYS
        }
        for way, (generation, step, tokens, reward) in level.items():
            first = (level["trl"][0] / generation, level["paceline, no drafts"][0] / generation)
            figures = (generation, *first, step, level["trl"][1] / step, tokens, reward)
            print(f"{way:22}{name:>8}" + "".join(f"{figure:16.3f}" for figure in figures))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(one) | {"said": None} for one in runs], file, indent=1)


if __name__ == "__main__":
    main()

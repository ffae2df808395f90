"""GRPO with TRL's own trainer, its rollouts drafted by paceline: a small policy learns to ask a music shop in SQL.

    python examples/trl_grpo.py [STEPS]

Takes about two minutes on two cores. Each step prints its reward, the tokens that a policy pass yielded for a row, and
how many times as fast as plain decoding generation was, as the engine projects it.
"""

import os
import sys

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is TRL's own word for this; it warns once a run

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from paceline.integrations.trl import rollout_func
from paceline.rl.rewards import Judge
from paceline.rl.tasks.text_to_sql import TextToSql

POLICY = "examples/policies/sql-1m"


class Lines(TrainerCallback):
    """One line a step."""

    def on_log(self, _args, state, _control, logs=None, **_):
        """Print what matters here of what the trainer logged."""
        if logs and "reward" in logs:
            speed = logs.get("paceline/speedup_projected", float("nan"))
            print(
                f"step {state.global_step:2d}  reward {logs['reward']:.3f}  "
                f"tokens/forward {logs['paceline/tokens_per_forward']:.2f}  x plain {speed:.2f}",
                flush=True,
            )


def main(steps=16):
    """Four epochs over 32 questions."""
    torch.set_num_threads(1)  # a policy this small runs fastest on one
    task = TextToSql(train_prompts=32, eval_prompts=0)
    judge = Judge(task, name="text_to_sql")  # what a policy writes is judged in a sandbox
    asked = {prompt.text: prompt for prompt in task.prompts("train")}

    def right(prompts, completions, **_):
        pairs = [(asked[prompt], said) for prompt, said in zip(prompts, completions, strict=True)]
        return [scored.reward for scored in judge.score_all(pairs)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32"),
        reward_funcs=right,
        args=GRPOConfig(
            output_dir="runs/trl",
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=96,
            learning_rate=3e-4,
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": list(asked)}),
        processing_class=AutoTokenizer.from_pretrained(POLICY),
        rollout_func=rollout_func({"drafter": {"kind": "history", "budget": 16}}),
        callbacks=[Lines()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

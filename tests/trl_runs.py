"""A GRPO run of the real TRL on a tiny policy, for tests of what paceline does inside it."""

import os

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when TRL's trainer is built

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

PROMPTS = ("abca", "bcdb", "cdec")


def letters(prompts, completions, **_):
    """The share of an answer that is the prompt's first letter."""
    return [sum(c == p[0] for c in said) / max(len(said), 1) for p, said in zip(prompts, completions, strict=True)]


def make_trainer(policy, out, rollout_func=None, *, model=None, dtype="float64", rewards=letters, **args):
    """A trainer of ``policy`` on three prompts with four answers each; ``args`` are GRPOConfig's."""
    settings = {
        "per_device_train_batch_size": 12,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-2,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "disable_tqdm": True,
        "temperature": 1.0,
    }
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=dtype) if model is None else model,
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(out), **settings | args),
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
        processing_class=AutoTokenizer.from_pretrained(policy),
        rollout_func=rollout_func,
    )


class Heard:
    """A reward that remembers what was said, call by call."""

    def __init__(self):
        self.said = []

    def __call__(self, prompts, completions, completion_ids, **_):
        self.said.append([list(ids) for ids in completion_ids])
        return letters(prompts, completions)

    __name__ = "heard"


def curve(trainer, *names):
    """What the trainer logged by these names, step by step."""
    return [[entry[name] for name in names] for entry in trainer.state.log_history if names[0] in entry]

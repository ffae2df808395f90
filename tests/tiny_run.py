"""A tiny policy with a tokenizer on disk, and a task that it can learn, for tests of the whole loop."""

import random
import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.rl.tasks.base import Prompt

LETTERS = "abcdefgh"
_VOCABULARY = {token: index for index, token in enumerate(["<pad>", "<bos>", "<sep>", "<eos>", *LETTERS])}


def make_policy(folder, **changes):
    """Write a random Llama of some thousand parameters and its letter tokenizer; returns the folder.

    ``changes`` go to the model's configuration.
    """
    tokenizer = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <sep>", special_tokens=[("<bos>", 1), ("<sep>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=3,
        pad_token_id=0,
        **{"max_position_embeddings": 64, **changes},
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = 3
    model.save_pretrained(folder)
    return folder


class Letters:
    """The more of the answer is the prompt's first letter, the better."""

    def __init__(self, *, seed, train_prompts, eval_prompts, misbehave=False):
        rng = random.Random(seed)
        texts = sorted({"".join(rng.choices(LETTERS, k=4)) for _ in range(400)})
        rng.shuffle(texts)
        prompts = [Prompt(prompt_id=i, text=text) for i, text in enumerate(texts[: train_prompts + eval_prompts])]
        self._splits = {"train": prompts[:train_prompts], "eval": prompts[train_prompts:]}
        self._misbehave = misbehave

    def prompts(self, split):
        return self._splits[split]

    def reward(self, prompt, response):
        if self._misbehave and "a" in response:
            raise ZeroDivisionError("an a")
        if self._misbehave and response.startswith("b"):
            time.sleep(60)
        letters = [c for c in response if c in LETTERS]
        return sum(c == prompt.text[0] for c in letters) / max(len(letters), 1)

    def answer(self, prompt):
        return prompt.text[0] * 4


def tiny_overrides(policy, out, *overrides):
    """The settings of a short run on ``Letters``, as a command line takes them."""
    return [
        f"out={out}", f"policy.path={policy}",
        "tasks={letters: {kind: 'tiny_run:Letters', train_prompts: 6, eval_prompts: 4}}",
        "sampling.max_tokens=12", "rl.prompts_per_step=3", "rl.group_size=4", "rl.lr=1e-2", "rl.epochs=2",
        "check.every=1", "threads=1", "budget.mode=fixed", *overrides,
    ]  # fmt: skip


def tiny_config(policy, out, *overrides):
    """The configuration of a short run on ``Letters``."""
    from paceline.config import load_config

    return load_config(None, tiny_overrides(policy, out, *overrides))

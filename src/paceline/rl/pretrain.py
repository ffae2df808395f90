"""A small policy from nothing, for examples and benchmarks: its tokenizer and a short supervised training."""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from paceline.files import files_replaced
from paceline.forward.modes import evaluating, keeping_modes
from paceline.rl.rewards import score_all
from paceline.rl.tasks.base import Prompt, Task

PAD, BOS, SEP, EOS = range(4)
SPECIAL = ("<pad>", "<bos>", "<sep>", "<eos>")
Pair = tuple[str, str]
"""A prompt and one of its answers."""
# Quotes stand alone, so that a name is the same tokens in a question, in a plan and in a query; a column is one piece.
_PIECES = Regex(r" ?'| ?[\w.]+| ?[^\w\s'.]+|\s+")


def make_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``vocabulary`` tokens trained on ``texts``; a prompt becomes BOS, its text, SEP."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <sep>", special_tokens=[("<bos>", BOS), ("<sep>", SEP)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        sep_token="<sep>",
        eos_token="<eos>",
        model_max_length=context,
    )


def batch(
    rows: Sequence[Pair], tokenizer: PreTrainedTokenizerFast, whole: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded ids, attention mask and labels of ``rows``, each (rows, longest).

    Only an answer and its EOS are labels, with ``whole`` the prompt too. Raises ValueError for a row that is longer
    than the context.
    """
    pairs = [(tokenizer(q)["input_ids"], [*tokenizer(a, add_special_tokens=False)["input_ids"], EOS]) for q, a in rows]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    if longest > tokenizer.model_max_length:
        raise ValueError(f"a row has {longest} tokens, the context holds {tokenizer.model_max_length}")
    ids_BT = torch.full((len(rows), longest), PAD)
    labels_BT = torch.full((len(rows), longest), -100)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids_BT[row, :end] = torch.tensor(prompt + answer)
        first = 0 if whole else len(prompt)
        labels_BT[row, first:end] = ids_BT[row, first:end]
    return ids_BT, (ids_BT != PAD).long(), labels_BT


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[], Sequence[Pair]],
    steps: int,
    peak_lr: float = 3e-3,
    progress: Callable[[int, float], None] = lambda _step, _loss: None,
    whole: bool = False,
) -> None:
    """Cross-entropy on the answers that ``draw`` gives, a batch a call; AdamW, 40 steps of warm-up, linear decay.

    With ``whole`` the prompts are learned too, as in the pre-training of a language model.
    ``progress`` receives every 50th step, counted from 1, and its loss.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 40) * max(0.05, 1 - step / steps)
    )
    with keeping_modes(list(model.modules())):
        model.train()
        for step in range(1, steps + 1):
            ids_BT, mask_BT, labels_BT = batch(draw(), tokenizer, whole)
            loss = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                progress(step, loss.item())


@torch.no_grad()
def mean_reward(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    prompts: Sequence[Prompt],
    samples: int,
    max_tokens: int = 112,
) -> float:
    """The mean reward of ``samples`` answers to each prompt, at temperature 1 (greedy for one sample).

    Answers are judged in a confined process; one whose reward fails counts 0.
    """
    generate: Any = model.generate
    pairs = []
    for prompt in prompts:
        ids_BT = torch.tensor([tokenizer(prompt.text)["input_ids"]])
        how = {"do_sample": True, "top_k": 0, "num_return_sequences": samples} if samples > 1 else {"do_sample": False}
        with evaluating(model):
            out_BT = generate(ids_BT, max_new_tokens=max_tokens, pad_token_id=PAD, **how)
        texts = tokenizer.batch_decode(out_BT[:, ids_BT.shape[1] :], skip_special_tokens=True)
        pairs += [(prompt, text) for text in texts]
    return sum(scored.reward for scored in score_all(task, pairs)) / len(pairs)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the policy to ``out`` in half precision; ``model`` is float32 again afterwards, rounded.

    FileWriteError where it cannot be written; what was there before is still whole then.
    """
    try:
        with files_replaced(out) as fresh:
            model.half().save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
    finally:
        model.float()


def seeded(seed: int) -> random.Random:
    """A source of data for ``seed``, which also seeds the weights that are drawn next."""
    torch.manual_seed(seed)
    return random.Random(seed)

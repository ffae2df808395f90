"""Makes the 1 M-parameter policy of ``text_to_sql.yaml`` from nothing: a tokenizer, then a short supervised training.

    python examples/pretrain_text_to_sql.py [--out examples/policies/sql-1m] [--steps 700]

It stops early on purpose: the policy knows the form of an answer and is right about half of the time, so that
reinforcement learning has something left to do. Held-out questions are never seen. About three minutes on one core.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.rl.tasks.base import Prompt
from paceline.rl.tasks.chinook import database
from paceline.rl.tasks.chinook_questions import Question, questions
from paceline.rl.tasks.split import split_of
from paceline.rl.tasks.text_to_sql import TextToSql, phrase

PAD, BOS, SEP, EOS = range(4)
SPECIAL = ("<pad>", "<bos>", "<sep>", "<eos>")
VOCABULARY, CONTEXT = 1024, 256
ROWS_PER_STEP, PEAK_LR, MADE_UP_SHARE = 16, 3e-3, 0.25
# Quotes stand alone, so that a name is the same tokens in a question, in a plan and in a query; a column is one piece.
PIECES = Regex(r" ?'| ?[\w.]+| ?[^\w\s'.]+|\s+")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1 024 tokens trained on ``texts``; a prompt becomes BOS, its text, SEP."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
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
        model_max_length=CONTEXT,
    )


def make_model() -> LlamaForCausalLM:
    """A Llama of 984 192 parameters: width 128, 4 layers of 4 heads, tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def batch(
    rows: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded ids, attention mask and labels, each (rows, longest), of (question, answer) texts.

    Only the answer and its EOS are labels.
    """
    pairs = [(tokenizer(q)["input_ids"], [*tokenizer(a, add_special_tokens=False)["input_ids"], EOS]) for q, a in rows]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids_BT = torch.full((len(rows), longest), PAD)
    labels_BT = torch.full((len(rows), longest), -100)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids_BT[row, :end] = torch.tensor(prompt + answer)
        labels_BT[row, len(prompt) : end] = torch.tensor(answer)
    return ids_BT, (ids_BT != PAD).long(), labels_BT


def example(question: Question, words: list[str], rng: random.Random) -> tuple[str, str]:
    """A question and one of its answers; a quarter of them about a name of random ``words``, to teach copying."""
    answer = phrase(question, rng)
    if rng.random() >= MADE_UP_SHARE:
        return question.text, answer
    name = " ".join(rng.choices(words, k=rng.choice((1, 2, 2, 3))))
    old, new = f"'{question.values[0]}'", f"'{name}'"
    return question.text.replace(old, new), answer.replace(old, new)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, known: list[Question], rng: random.Random, steps: int
) -> None:
    """Cross-entropy on randomly phrased answers to random questions of ``known``; AdamW, warm-up and linear decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 40) * max(0.05, 1 - step / steps)
    )
    words = sorted({word for question in known for word in question.values[0].split()})
    model.train()
    for step in range(1, steps + 1):
        rows = [example(question, words, rng) for question in rng.choices(known, k=ROWS_PER_STEP)]
        ids_BT, mask_BT, labels_BT = batch(rows, tokenizer)
        loss = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time():.0f} CPU-seconds", flush=True)


@torch.no_grad()
def mean_reward(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: TextToSql,
    prompts: Sequence[Prompt],
    samples: int,
) -> float:
    """The mean reward of ``samples`` answers to each prompt, at temperature 1 (greedy for one sample)."""
    model.eval()
    rewards = []
    for prompt in prompts:
        ids_BT = torch.tensor([tokenizer(prompt.text)["input_ids"]])
        how = {"do_sample": True, "top_k": 0, "num_return_sequences": samples} if samples > 1 else {"do_sample": False}
        out_BT = model.generate(ids_BT, max_new_tokens=112, pad_token_id=PAD, **how)
        texts = tokenizer.batch_decode(out_BT[:, ids_BT.shape[1] :], skip_special_tokens=True)
        rewards += [task.reward(prompt, text) for text in texts]
    return sum(rewards) / len(rewards)


def main() -> None:
    """Train, save and judge the policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "policies" / "sql-1m")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    known = [question for question in questions(database()) if split_of(question.key) == "train"]
    tokenizer = make_tokenizer([text for question in known for text in (question.text, phrase(question, rng))])
    model = make_model()
    train(model, tokenizer, known, rng, args.steps)
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    model.float()
    task = TextToSql(train_prompts=48, eval_prompts=48)
    for split in ("train", "eval"):
        prompts = task.prompts(split)
        sampled, greedy = (mean_reward(model, tokenizer, task, prompts, samples) for samples in (8, 1))
        print(f"{split}: mean reward {sampled:.3f} at temperature 1, {greedy:.3f} greedy")
    print(f"{model.num_parameters():,} parameters in {args.out}; {time.process_time():.0f} CPU-seconds")


if __name__ == "__main__":
    main()

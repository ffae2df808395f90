"""Makes the 1 M-parameter policy of ``text_to_sql.yaml`` from nothing: a tokenizer, then a short supervised training.

    python examples/pretrain_text_to_sql.py [--out examples/policies/sql-1m] [--steps 700]

It stops early on purpose: the policy knows the form of an answer and is right about half of the time, so that
reinforcement learning has something left to do. Held-out questions are never seen. About three minutes on one core.
"""

import argparse
import random
import time
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from paceline.rl.pretrain import BOS, EOS, PAD, make_tokenizer, mean_reward, save, seeded, train
from paceline.rl.tasks.chinook import database
from paceline.rl.tasks.chinook_questions import Question, questions
from paceline.rl.tasks.split import split_of
from paceline.rl.tasks.text_to_sql import TextToSql, phrase

VOCABULARY, CONTEXT = 1024, 256
ROWS_PER_STEP, MADE_UP_SHARE = 16, 0.25


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


def example(question: Question, words: list[str], rng: random.Random) -> tuple[str, str]:
    """A question and one of its answers; a quarter of them about a name of random ``words``, to teach copying."""
    answer = phrase(question, rng)
    if rng.random() >= MADE_UP_SHARE:
        return question.text, answer
    name = " ".join(rng.choices(words, k=rng.choice((1, 2, 2, 3))))
    old, new = f"'{question.values[0]}'", f"'{name}'"
    return question.text.replace(old, new), answer.replace(old, new)


def main() -> None:
    """Train, save and judge the policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "policies" / "sql-1m")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = seeded(args.seed)
    known = [question for question in questions(database()) if split_of(question.key) == "train"]
    tokenizer = make_tokenizer(
        [text for question in known for text in (question.text, phrase(question, rng))], VOCABULARY, CONTEXT
    )
    model = make_model()
    words = sorted({word for question in known for word in question.values[0].split()})
    train(
        model,
        tokenizer,
        lambda: [example(question, words, rng) for question in rng.choices(known, k=ROWS_PER_STEP)],
        args.steps,
        progress=lambda step, loss: print(f"step {step}: loss {loss:.3f}, {time.process_time():.0f} CPU-s", flush=True),
    )
    save(model, tokenizer, args.out)
    task = TextToSql(train_prompts=48, eval_prompts=48)
    for split in ("train", "eval"):
        prompts = task.prompts(split)
        sampled, greedy = (mean_reward(model, tokenizer, task, prompts, samples) for samples in (8, 1))
        print(f"{split}: mean reward {sampled:.3f} at temperature 1, {greedy:.3f} greedy")
    print(f"{model.num_parameters():,} parameters in {args.out}; {time.process_time():.0f} CPU-seconds")


if __name__ == "__main__":
    main()

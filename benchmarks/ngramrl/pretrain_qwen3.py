"""Makes the small Qwen3 policy of a workload from nothing: a tokenizer, then a short supervised training.

    python benchmarks/ngramrl/pretrain_qwen3.py WORKLOAD [--out DIR] [--steps N]

It stops while it still makes mistakes, so that reinforcement learning has something left to do. Held-out prompts are
never seen.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.config import load_config
from paceline.rl.pretrain import BOS, EOS, PAD, Pair, make_tokenizer, mean_reward, save, seeded, train
from paceline.rl.tasks import make_task
from paceline.rl.tasks.chinook import database
from paceline.rl.tasks.chinook_questions import questions
from paceline.rl.tasks.function_call import Call, fits, load_rows, prompt_text
from paceline.rl.tasks.split import split_of
from paceline.rl.tasks.text_to_sql import phrase

CONFIGS = Path(__file__).parent / "configs"
STEPS = {"function_call": 900, "text_to_sql": 600, "n_queens": 700}
VOCABULARY, CONTEXT = 1024, 320
ROWS_PER_STEP = 16
TEXTS, PUZZLES = 4000, 2000


def make_model() -> Qwen3ForCausalLM:
    """A Qwen3 of width 128, 4 layers of 4 heads that share 2 keys and values, tied embeddings."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return Qwen3ForCausalLM(config)


def phrase_call(call: Call, rng: random.Random) -> str:
    """One of the many right answers to a request: any right value, optional arguments or not, in any order."""
    given = {}
    for name in rng.sample(sorted(call.arguments), len(call.arguments)):
        right = [value for value in call.arguments[name] if value != ""]
        if right and ("" not in call.arguments[name] or rng.random() < 0.5):
            given[name] = rng.choice(right)
    return json.dumps({"name": call.name, "arguments": given}, ensure_ascii=False)


def source(workload: str, rng: random.Random) -> Callable[[], Pair]:
    """Draws a prompt of the workload, none that is held out, and one of its right answers."""
    if workload == "function_call":
        rows = [row for row in load_rows() if fits(row) and split_of(row.row_id) == "train"]
        requests = [(prompt_text(row), row.call) for row in rows]
        return lambda: _answered(rng.choice(requests), phrase_call, rng)
    if workload == "text_to_sql":
        known = [question for question in questions(database()) if split_of(question.key) == "train"]
        asked = [(question.text, question) for question in known]
        return lambda: _answered(rng.choice(asked), phrase, rng)
    config = load_config(CONFIGS / f"{workload}-qwen3.yaml")
    # The puzzles that the run trains on are the first of them.
    settings = msgspec.structs.replace(config.tasks[workload], train_prompts=PUZZLES)
    task = make_task(workload, settings, config.seed)
    puzzles = [(prompt.text, task.answer(prompt)) for prompt in task.prompts("train")]
    return lambda: rng.choice(puzzles)


def _answered(asked: tuple[str, Any], answer: Callable[[Any, random.Random], str], rng: random.Random) -> Pair:
    text, about = asked
    return text, answer(about, rng)


def main() -> None:
    """Train, save and judge the policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=STEPS)
    parser.add_argument("--out", type=Path, help="default: policy.path of the workload's configuration")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = load_config(CONFIGS / f"{args.workload}-qwen3.yaml")
    out = args.out or Path(config.policy.path)
    rng = seeded(args.seed)
    draw = source(args.workload, rng)
    tokenizer = make_tokenizer([text for _ in range(TEXTS) for text in draw()], VOCABULARY, CONTEXT)
    model = make_model()
    train(
        model,
        tokenizer,
        lambda: [draw() for _ in range(ROWS_PER_STEP)],
        args.steps or STEPS[args.workload],
        progress=lambda step, loss: print(f"step {step}: loss {loss:.3f}, {time.process_time():.0f} CPU-s", flush=True),
    )
    save(model, tokenizer, out)
    task = make_task(args.workload, config.tasks[args.workload], config.seed)
    reward = mean_reward(model, tokenizer, task, task.prompts("train"), 8, config.sampling.max_tokens)
    print(f"{args.workload}: mean reward {reward:.3f} at temperature 1")
    print(f"{model.num_parameters():,} parameters in {out}; {time.process_time():.0f} CPU-seconds")


if __name__ == "__main__":
    main()

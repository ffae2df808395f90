"""Makes the small Qwen3 policy of this experiment from nothing: one policy for its three workloads.

    python benchmarks/ngramrl/pretrain_qwen3.py [--out runs/ngramrl/qwen3] [--steps 1400]

It learns answers to prompts that no run is judged by, and stops while it still makes mistakes, so that reinforcement
learning has something left to do.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.config import TaskConfig, load_config
from paceline.rl.pretrain import BOS, EOS, PAD, Pair, make_tokenizer, mean_reward, save, seeded, train
from paceline.rl.tasks import make_task
from paceline.rl.tasks.chinook import database
from paceline.rl.tasks.chinook_questions import questions
from paceline.rl.tasks.function_call import Call, fits, load_rows, prompt_text
from paceline.rl.tasks.split import split_of
from paceline.rl.tasks.text_to_sql import phrase

CONFIGS = Path(__file__).parent / "configs"
OUT = Path("runs/ngramrl/qwen3")
WORKLOADS = ("function_call", "text_to_sql", "number_sorting")
VOCABULARY, CONTEXT = 2048, 320
ROWS_PER_STEP = 16
SORTING_PUZZLES = 4000


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


def sources(rng: random.Random) -> list[Callable[[], Pair]]:
    """One source of (prompt, answer) a workload, none of them with a held-out prompt."""
    rows = [row for row in load_rows() if fits(row) and split_of(row.row_id) == "train"]
    known = [question for question in questions(database()) if split_of(question.key) == "train"]
    settings = load_config(CONFIGS / "number_sorting-qwen3.yaml").tasks["number_sorting"]
    # Another seed has other puzzles.
    sorting = make_task("number_sorting", _with_prompts(settings, SORTING_PUZZLES), seed=1)
    puzzles = [(prompt.text, sorting.answer(prompt)) for prompt in sorting.prompts("train")]

    def call() -> Pair:
        row = rng.choice(rows)
        return prompt_text(row), phrase_call(row.call, rng)

    def query() -> Pair:
        question = rng.choice(known)
        return question.text, phrase(question, rng)

    return [call, query, lambda: rng.choice(puzzles)]


def _with_prompts(settings: TaskConfig, prompts: int) -> TaskConfig:
    return TaskConfig(kind=settings.kind, train_prompts=prompts, eval_prompts=0, options=settings.options)


def main() -> None:
    """Train, save and judge the policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = seeded(args.seed)
    draws = sources(rng)
    tokenizer = make_tokenizer([text for draw in draws for _ in range(2000) for text in draw()], VOCABULARY, CONTEXT)
    model = make_model()
    batches = ([draw() for _ in range(ROWS_PER_STEP)] for draw in itertools.cycle(draws))
    train(
        model,
        tokenizer,
        # A batch is of one workload: their prompts differ in length, and padding costs what tokens cost.
        lambda: next(batches),
        args.steps,
        progress=lambda step, loss: print(f"step {step}: loss {loss:.3f}, {time.process_time():.0f} CPU-s", flush=True),
    )
    save(model, tokenizer, args.out)
    for name in WORKLOADS:
        config = load_config(CONFIGS / f"{name}-qwen3.yaml")
        task = make_task(name, config.tasks[name], config.seed)
        reward = mean_reward(model, tokenizer, task, task.prompts("train")[:16], 8, config.sampling.max_tokens)
        print(f"{name}: mean reward {reward:.3f} at temperature 1")
    print(f"{model.num_parameters():,} parameters in {args.out}; {time.process_time():.0f} CPU-seconds")


if __name__ == "__main__":
    main()

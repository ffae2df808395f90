"""Makes the two policies of the experiment from nothing: one that was only pre-trained, one after SFT on the task.

    python benchmarks/rl_drafters/policies.py [--quick]

RL-Zero is a language model of a small web about a music shop: queries, forum threads, notes, facts, tutorials. A
question is followed by all sorts of things there, and by an answer in the task's form in one of twelve documents, so
a policy that has read nothing else is rewarded now and then. RL-Think is RL-Zero after supervised training on the
task. What is held out of the task is in neither. Deep and narrow, as the policies of this size are that a pass of one
layer is cheap beside. Twenty minutes of one core for both; they stay in paceline's cache.
"""

import argparse
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.config import EngineConfig
from paceline.engines.hf import HFEngine
from paceline.forward.pretrained import load_pretrained
from paceline.rl.pretrain import BOS, EOS, PAD, Pair, make_tokenizer, save, seeded, train
from paceline.rl.rewards import score_all
from paceline.rl.tasks.base import Split
from paceline.rl.tasks.chinook import database, schema_sql
from paceline.rl.tasks.chinook_questions import Question, questions
from paceline.rl.tasks.data import cache_dir
from paceline.rl.tasks.split import split_of
from paceline.rl.tasks.sql_phrasing import plan_phrasing, sql_phrasing
from paceline.rl.tasks.text_to_sql import TextToSql, phrase
from paceline.schema import RolloutRequest, SamplingParams

VOCABULARY, CONTEXT = 1024, 256
POLICIES = ("zero", "think")
#: Each goes on from the one before: three parts of pre-training, in each of which the rate rises and falls, then SFT.
STAGES = ("early", "middle", *POLICIES)
#: Raise this number whenever the policies come out otherwise: older ones are then made anew.
EDITION = 1
TEXTS = 4000
MADE_UP_SHARE = 0.25


@dataclass(frozen=True)
class Size:
    """How large the policies are and how long they learn: ``web_steps`` in each part, ``rows`` pages a step."""

    name: str
    width: int
    layers: int
    web_steps: int
    sft_steps: int
    rows: int = 8


FULL = Size("full", width=192, layers=16, web_steps=900, sft_steps=200)
QUICK = Size("quick", width=64, layers=4, web_steps=60, sft_steps=60)


def make_model(size: Size) -> LlamaForCausalLM:
    """A Llama with heads of 32 and tied embeddings: 7.9 M parameters in full."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 32,
        num_key_value_heads=size.width // 32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


# What is read


@cache
def known_questions() -> tuple[Question, ...]:
    """All questions of the task that are not held out."""
    return tuple(question for question in questions(database()) if split_of(question.key) == "train")


@cache
def facts() -> tuple[str, ...]:
    """Sentences about the shop's albums and tracks, and its tables."""
    connection = sqlite3.connect(f"{database().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        albums = connection.execute(
            "SELECT title, name FROM album JOIN artist ON artist.id = album.artist_id ORDER BY album.id"
        ).fetchall()
        tracks = connection.execute(
            "SELECT track.name, genre.name FROM track JOIN genre ON genre.id = genre_id ORDER BY track.id"
        ).fetchall()
    finally:
        connection.close()
    return (
        *(f"The album '{title}' is by '{artist}'." for title, artist in albums),
        *(f"'{track}' is a track of the genre '{genre}'." for track, genre in tracks[::7]),
        *schema_sql().splitlines(),
    )


def _forum(question: Question, rng: random.Random) -> Pair:
    return question.text, f"{rng.choice(('Try', 'This works:', 'Use'))} {sql_phrasing(question.query, rng)}"


def _answered(question: Question, rng: random.Random) -> Pair:
    rows = rng.sample(question.rows, min(3, len(question.rows)))
    return question.text, ", ".join(str(value) for row in rows for value in row)


def _explained(question: Question, rng: random.Random) -> Pair:
    return question.text, f"First {plan_phrasing(question.query, rng)}"


def _query(question: Question, rng: random.Random) -> Pair:
    return f"-- {question.text}", sql_phrasing(question.query, rng)


def _notes(question: Question, rng: random.Random) -> Pair:
    return plan_phrasing(question.query, rng), f"<sql> {sql_phrasing(question.query, rng)} </sql>"


def _tutorial(question: Question, rng: random.Random) -> Pair:
    return question.text, phrase(question, rng)


def _facts(question: Question, rng: random.Random) -> Pair:  # noqa: ARG001
    lines = rng.sample(facts(), 3)
    return lines[0], " ".join(lines[1:])


#: Kinds of documents of the small web and the share of each.
WEB: tuple[tuple[Callable[[Question, random.Random], Pair], float], ...] = (
    (_query, 0.24),
    (_forum, 0.2),
    (_notes, 0.16),
    (_explained, 0.12),
    (_facts, 0.12),
    (_tutorial, 0.08),
    (_answered, 0.08),
)


def document(rng: random.Random) -> Pair:
    """A page of the small web: what stands above its first break, and what stands below."""
    kind = rng.choices([kind for kind, _ in WEB], [share for _, share in WEB])[0]
    return renamed(rng.choice(known_questions()), kind, rng)


def answer(rng: random.Random) -> Pair:
    """A question of the task and one of its right answers, as SFT shows them."""
    return renamed(rng.choice(known_questions()), _tutorial, rng)


def renamed(question: Question, kind: Callable[[Question, random.Random], Pair], rng: random.Random) -> Pair:
    """A page about the question; a quarter of them about a name of random words, which teaches to copy names."""
    text, below = kind(question, rng)
    if rng.random() >= MADE_UP_SHARE:
        return text, below
    name = " ".join(rng.choices(_words(), k=rng.choice((1, 2, 2, 3))))
    old, new = f"'{question.values[0]}'", f"'{name}'"
    return text.replace(old, new), below.replace(old, new)


@cache
def _words() -> tuple[str, ...]:
    return tuple(sorted({word for question in known_questions() for word in question.values[0].split()}))


# The policies


def folder(name: str, size: Size = FULL) -> Path:
    """Where the cache keeps a policy, by its stage."""
    return cache_dir() / "benchmarks" / f"rl-drafters-{EDITION}" / size.name / name


def make(name: str, size: Size = FULL, tell: Callable[[str], None] = print) -> Path:
    """The folder of the policy, which is made now where the cache does not have it, and what it is made from."""
    home, stage = folder(name, size), STAGES.index(name)
    if (home / "config.json").is_file():
        return home
    rng = seeded(stage)
    if stage:
        model, tokenizer = load(make(STAGES[stage - 1], size, tell))
    else:
        tokenizer = make_tokenizer([text for _ in range(TEXTS) for text in document(rng)], VOCABULARY, CONTEXT)
        model = make_model(size)
    model.float().requires_grad_(True)
    draw, steps, peak_lr = (answer, size.sft_steps, 1e-3) if name == "think" else (document, size.web_steps, 2e-3)

    def progress(step: int, loss: float) -> None:
        tell(f"{name}: step {step}, loss {loss:.3f}, {time.process_time():.0f} CPU-s")

    rows = batches(lambda: fits(draw, tokenizer, rng), size.rows, rng)
    train(model, tokenizer, lambda: next(rows), steps, peak_lr, progress, whole=name != "think")
    save(model, tokenizer, home)
    return home


def batches(page: Callable[[], Pair], rows: int, rng: random.Random) -> Iterator[list[Pair]]:
    """Batches of pages of like lengths, so that little is padded."""
    while True:
        pool = sorted((page() for _ in range(16 * rows)), key=lambda pair: sum(map(len, pair)))
        parts = [pool[start : start + rows] for start in range(0, len(pool), rows)]
        rng.shuffle(parts)
        yield from parts


def fits(draw: Callable[[random.Random], Pair], tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Pair:
    """The next page that the context holds."""
    while True:
        pair = draw(rng)
        if sum(len(tokenizer(text)["input_ids"]) for text in pair) <= CONTEXT:
            return pair


def load(home: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A policy in float32 and its tokenizer."""
    return (
        load_pretrained(home, "policy", str(home), "float32"),
        PreTrainedTokenizerFast.from_pretrained(home),
    )


def judge(home: Path, task: TextToSql, split: Split, temperature: float) -> float:
    """The mean reward of four answers to each prompt of a split, or of the greedy one."""
    model, tokenizer = load(home)
    engine = HFEngine(model, config=EngineConfig(slots=64), eos_ids=(EOS,), decode=partial(decoded, tokenizer))
    params = SamplingParams(temperature=temperature, max_tokens=112, n=4 if temperature else 1)
    prompts = task.prompts(split)
    requests = [
        RolloutRequest(request_id=str(place), prompt=tokenizer(prompt.text)["input_ids"], params=params)
        for place, prompt in enumerate(prompts)
    ]
    rollouts = engine.generate(requests)
    engine.close()
    pairs = [(prompts[at // params.n], rollout.text or "") for at, rollout in enumerate(rollouts)]
    return sum(scored.reward for scored in score_all(task, pairs)) / len(pairs)


def decoded(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    """The text of an answer."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def main() -> None:
    """Make both policies and judge them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny ones in seconds, for a smoke test")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = QUICK if args.quick else FULL
    task = TextToSql(train_prompts=48, eval_prompts=48)
    for name in POLICIES:
        home = make(name, size)
        for split in ("train", "eval"):
            sampled, greedy = (judge(home, task, split, temperature) for temperature in (1.0, 0.0))
            print(f"{name}, {split}: mean reward {sampled:.3f} at temperature 1, {greedy:.3f} greedy")
        model, _ = load(home)
        print(f"{model.num_parameters():,} parameters in {home}; {time.process_time():.0f} CPU-seconds", flush=True)


if __name__ == "__main__":
    main()

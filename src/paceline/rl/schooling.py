"""Trains a model that drafts before the run: on recorded rollouts, or on what the policy says to other prompts."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
import xxhash
from msgspec.structs import replace

from paceline.config import Config, DrafterConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.taps import LEAST_RESPONSE, Collector
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import Head
from paceline.files import write_atomically
from paceline.report.trace import PromptRow, read_prompts, read_trace, trace_row, write_prompts
from paceline.rl import checkpoint
from paceline.rl.curriculum import Item, rollout_requests
from paceline.rl.drafting import FOLDER, OPTIMISER, WEIGHTS, drafting_model, write_drafter
from paceline.rl.engine import make_engine
from paceline.rl.folder import CHECKPOINTS, EXPORT, PROMPTS, ROLLOUTS, made_and_locked
from paceline.rl.policy import Policy
from paceline.rl.warmup import other_prompts
from paceline.schema import PacelineError, Tokens, as_tokens, derive_seed

Tell = Callable[[str], None]
Progress = Callable[[int, int, float], None]
"""Receives the update (from 1), the number of updates and the loss before it."""

_RESULT = "schooling.json"
#: Documents are kept from one epoch to the next while they take less than this; else the policy reads them again.
_MOST_KEPT_BYTES = 4 << 30


class SchoolingError(PacelineError):
    """Rollouts that a drafter cannot learn from, or a folder that cannot be used; nothing was trained."""


@dataclass(frozen=True)
class Schooling:
    """What a drafter learns from, and how long. ``rollouts`` are folders of runs, or their ``rollouts.jsonl``.

    Without any the policy answers ``prompts`` prompts that the run does not use, ``samples`` times each. An update
    reads ``batch`` rollouts; ``held_out`` is the share of prompts whose rollouts judge and teach nothing.
    """

    rollouts: tuple[Path, ...] = ()
    prompts: int = 128
    samples: int = 4
    epochs: int = 4
    batch: int = 16
    held_out: float = 0.1
    schedule: Literal["constant", "cosine"] = "cosine"


class Mark(msgspec.Struct, kw_only=True):
    """How well the drafter does after ``epoch`` epochs, as ``Trainer.train`` defines the numbers.

    ``train`` are those of the epoch's updates, ``held_out`` those of the rollouts that teach nothing.
    """

    epoch: int
    train: dict[str, float]
    held_out: dict[str, float]


class SchoolingResult(msgspec.Struct, kw_only=True):
    """What ``school`` did. ``tokens`` counts those of the rollouts that taught; ``seconds`` are of this process."""

    out: str
    drafter: str
    kind: str
    rollouts: int
    held_out: int
    tokens: int
    updates: int
    marks: list[Mark]
    seconds: float


def school(
    config: Config,
    schooling: Schooling,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tell: Tell = lambda _: None,
) -> SchoolingResult:
    """Train the model that ``config`` drafts with and write it to ``out/drafter``, which ``drafter.head.path`` loads.

    After every epoch there is a checkpoint; with ``resume`` the training goes on from the newest one to the weights
    that the unbroken one would have come to. Raises SchoolingError, or another PacelineError, in one line.
    """
    kind = config.drafter.model_kind
    if kind is None:
        raise SchoolingError(
            f"drafter.kind={config.drafter.kind} has no model that could be trained; set drafter.kind=eagle3"
        )
    if resume and not _is_used(out):
        raise SchoolingError(f"{out} holds no training to resume; start it without --resume")
    with made_and_locked(out, "paceline draft train"):
        _claim(out, resume, overwrite)
        return _school(config, kind, schooling, out, resume, progress, tell)


def _school(
    config: Config, kind: str, schooling: Schooling, out: Path, resume: bool, progress: Progress | None, tell: Tell
) -> SchoolingResult:
    started = time.perf_counter()
    if config.learner_ranks > 1:
        tell("parallel and cluster.learner_workers are of paceline train; before a run one process trains the drafter")
    if config.threads:
        torch.set_num_threads(config.threads)
    policy = Policy.load(config.policy, config.seed)
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    taught, judged = _split(_rollouts(config, schooling, policy, vocabulary, out, tell), schooling.held_out)
    counts = np.bincount(np.concatenate([row.tokens for row in taught]), minlength=vocabulary)
    model = drafting_model(config, policy, counts)
    updates = -(-len(taught) // schooling.batch) * schooling.epochs
    own = replace(config.cotrain, updates=1, schedule=schooling.schedule, schedule_steps=updates + 1)
    trainer = Trainer(model, policy.model, own, config.sampling.temperature)
    layers = model.taps if isinstance(model, Head) else ()
    reader, judge = _Reader(policy, layers, taught), _Reader(policy, layers, judged)
    print_of = _fingerprint(config, schooling, taught, judged)
    marks = _resumed(out, trainer, print_of, tell) if resume else []
    if not marks:
        marks.append(Mark(epoch=0, train={}, held_out=trainer.judge(judge.documents(range(len(judged))))))
    for epoch in range(marks[-1].epoch, schooling.epochs):
        order = sorted(range(len(taught)), key=lambda place, epoch=epoch: derive_seed("school", epoch, place))  # type: ignore[misc]
        found = []
        for at in range(0, len(order), schooling.batch):
            found.append(trainer.train(reader.documents(order[at : at + schooling.batch])))
            if progress is not None:
                progress(trainer.updates, updates, found[-1]["loss"])
        held_out = trainer.judge(judge.documents(range(len(judged))))
        marks.append(Mark(epoch=epoch + 1, train=_mean(found), held_out=held_out))
        checkpoint.save(
            out / CHECKPOINTS,
            epoch + 1,
            {WEIGHTS: trainer.weights, OPTIMISER: trainer.state()},
            {"print": print_of, "marks": msgspec.to_builtins(marks)},
            warn=lambda event, message: tell(f"{event}: {message}"),
        )
        checkpoint.prune(out / CHECKPOINTS, 2)
    write_drafter(model, out / FOLDER, policy, 0)
    result = SchoolingResult(
        out=str(out),
        drafter=str(out / FOLDER),
        kind=kind,
        rollouts=len(taught),
        held_out=len(judged),
        tokens=int(sum(len(row.tokens) for row in taught)),
        updates=trainer.updates,
        marks=marks,
        seconds=time.perf_counter() - started,
    )
    write_atomically(out / _RESULT, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return result


# Rollouts


@dataclass(frozen=True)
class _Row:
    """A rollout: ``tokens`` are the prompt, ``prompt_length`` of them, and the response."""

    tokens: Tokens
    prompt_length: int


def _rollouts(
    config: Config, schooling: Schooling, policy: Policy, vocabulary: int, out: Path, tell: Tell
) -> list[_Row]:
    folders = schooling.rollouts
    if not folders:
        if not (out / ROLLOUTS).is_file():
            _sample(config, schooling, policy, out, tell)
        folders = (out,)
    rows = [row for folder in folders for row in _recorded(folder, vocabulary)]
    if not rows:
        raise SchoolingError(f"{folders[0]}: no rollout of {LEAST_RESPONSE} tokens or more to learn from")
    return rows


def _recorded(source: Path, vocabulary: int) -> list[_Row]:
    """The rollouts of a run's folder, or of a file beside its ``prompts.jsonl``; those without a row that counts go."""
    file = source / ROLLOUTS if source.is_dir() else source
    prompts_file = file.with_name(PROMPTS if file.name == ROLLOUTS else f"{file.stem}.prompts.jsonl")
    for needed in (file, prompts_file):
        if not needed.is_file():
            raise SchoolingError(f"--rollouts {source}: there is no {needed.name}; give the folder of a run")
    prompts = {(prompt.task, prompt.prompt_id): as_tokens(prompt.tokens) for prompt in read_prompts(prompts_file)}
    rows = []
    for row in read_trace(file):
        prompt = prompts.get((row.task, row.prompt_id))
        if prompt is None:
            raise SchoolingError(f"{prompts_file}: lacks prompt {row.prompt_id} of task {row.task!r}, which {file} has")
        tokens = as_tokens(np.concatenate([prompt, as_tokens(row.tokens)]))
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise SchoolingError(
                f"{file}: token {max(tokens.max(), -tokens.min())} is outside the policy's vocabulary of {vocabulary}; "
                "were the rollouts made with another tokenizer?"
            )
        if len(row.tokens) >= LEAST_RESPONSE:
            rows.append(_Row(tokens, len(prompt)))
    return rows


def _sample(config: Config, schooling: Schooling, policy: Policy, out: Path, tell: Tell) -> None:
    """What the policy says to prompts that the run does not use, written as the rollouts of a run are."""
    share = -(-schooling.prompts // len(config.tasks))
    items: list[Item] = []
    for name, task in config.tasks.items():
        _, prompts, reused = other_prompts(name, task, config.seed, share)
        items += [Item(name, prompt, policy.encode_prompt(prompt.text)) for prompt in prompts]
        if reused:
            tell(f"task {name} has no prompts beyond those of the run; the drafter learns on {reused} of them")
    # History drafts while they are sampled: it needs no training, and the tokens are the policy's own in any case.
    settings = replace(config, drafter=DrafterConfig(kind="history"), engine=replace(config.engine, kind="hf"))
    grammars = config.sampling.grammar is not None or any(item.prompt.grammar is not None for item in items)
    engine = make_engine(settings, policy, out / EXPORT, grammars)
    requests = rollout_requests(items, schooling.samples, config.sampling, config.seed, "school")
    tell(f"the policy answers {len(items)} prompts, {schooling.samples} times each")
    try:
        rollouts = engine.generate(requests)
    finally:
        engine.close()
    rows = []
    for index, rollout in enumerate(rollouts):
        item, sample = items[index // schooling.samples], index % schooling.samples
        number = item.prompt.prompt_id
        rows.append(
            trace_row(rollout, epoch=0, step=0, prompt_id=number, sample_idx=sample, reward=math.nan, task=item.task)
        )
    write_prompts(
        out / PROMPTS,
        [PromptRow(prompt_id=i.prompt.prompt_id, task=i.task, tokens=i.tokens.tolist()) for i in items],
    )
    write_atomically(out / ROLLOUTS, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _split(rows: Sequence[_Row], share: float) -> tuple[list[_Row], list[_Row]]:
    """Those that teach and those that judge; rollouts of one prompt are on one side, and either has one at least."""
    by_prompt: dict[bytes, list[_Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.tokens[: row.prompt_length].tobytes(), []).append(row)
    if len(by_prompt) < 2:
        raise SchoolingError("the rollouts are all of one prompt; give those of two or more, so that one can judge")
    drawn = sorted(by_prompt, key=lambda prompt: derive_seed("held out", prompt.hex()))
    count = min(max(round(share * len(drawn)), 1), len(drawn) - 1)
    aside = set(drawn[:count])
    taught = [row for prompt, own in by_prompt.items() if prompt not in aside for row in own]
    return taught, [row for prompt in drawn[:count] for row in by_prompt[prompt]]


class _Reader:
    """Documents of rollouts: what the policy computes when it reads them, kept where memory allows it."""

    def __init__(self, policy: Policy, layers: Sequence[int], rows: Sequence[_Row]) -> None:
        self._policy, self._layers, self._rows = policy, layers, rows
        width = policy.model.config.get_text_config().hidden_size * (len(layers) + 1)
        held = sum(len(row.tokens) for row in rows) * width * policy.model.dtype.itemsize
        self._kept: dict[int, Document] | None = {} if held <= _MOST_KEPT_BYTES else None

    def documents(self, places: Sequence[int]) -> list[Document]:
        """Of the rollouts at ``places``, in that order."""
        known = self._kept or {}
        fresh = [place for place in places if place not in known]
        read = dict(zip(fresh, self._read([self._rows[place] for place in fresh]), strict=True))
        if self._kept is not None:
            self._kept |= read
        return [known[place] if place in known else read[place] for place in places]

    def _read(self, rows: Sequence[_Row]) -> list[Document]:
        documents = []
        for row in rows:
            collector = Collector(self._policy.model, self._layers)
            try:
                with torch.no_grad():
                    prompt, response = row.tokens[: row.prompt_length], row.tokens[row.prompt_length :]
                    self._policy.scorer.logprobs([prompt], [response], 1.0, collector)
            finally:
                collector.close()
            documents += collector.documents()
        return documents


# Files


def _is_used(out: Path) -> bool:
    return (out / CHECKPOINTS).is_dir() or (out / ROLLOUTS).is_file() or (out / FOLDER).is_dir()


def _claim(out: Path, resume: bool, overwrite: bool) -> None:
    if _is_used(out) and not resume and not overwrite:
        raise SchoolingError(f"{out} is used already; --resume it, --overwrite it, or give another --out")
    try:
        if overwrite and not resume:
            for name in (ROLLOUTS, PROMPTS, _RESULT):
                (out / name).unlink(missing_ok=True)
            checkpoint.clear(out / CHECKPOINTS)
    except OSError as error:
        raise SchoolingError(f"out={out}: cannot be written: {error.strerror or error}") from None


def _resumed(out: Path, trainer: Trainer, print_of: str, tell: Tell) -> list[Mark]:
    """The marks so far, and the trainer as it was; none where there is no checkpoint yet."""
    found = checkpoint.load_latest(out / CHECKPOINTS, warn=lambda event, message: tell(f"{event}: {message}"))
    if found is None:
        tell("there is no checkpoint yet; the training starts from its beginning")
        return []
    if found.meta.get("print") != print_of:
        raise SchoolingError(f"{out} was started with other rollouts or settings; give those, or another --out")
    trainer.load_weights(found.tensors[WEIGHTS])
    trainer.load_state(found.tensors[OPTIMISER])
    marks = msgspec.convert(found.meta["marks"], list[Mark])
    tell(f"resumed after epoch {marks[-1].epoch}")
    return marks


def _fingerprint(config: Config, schooling: Schooling, taught: Sequence[_Row], judged: Sequence[_Row]) -> str:
    """What decides the weights that the training comes to."""
    settings = {
        "cotrain": msgspec.to_builtins(config.cotrain),
        "head": msgspec.to_builtins(config.drafter.head),
        "kind": config.drafter.model_kind,
        "policy": msgspec.to_builtins(config.policy),
        "seed": config.seed,
        "epochs": [schooling.epochs, schooling.batch, schooling.schedule],
    }
    digest = xxhash.xxh3_64(json.dumps(settings, sort_keys=True).encode())
    for rows in (taught, judged):
        for row in rows:
            digest.update(row.tokens.tobytes())
            digest.update(str(row.prompt_length).encode())
    return digest.hexdigest()


def _mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The updates' numbers over an epoch, each update counting alike."""
    return {name: float(np.mean([own[name] for own in found if name in own])) for name in found[-1]}

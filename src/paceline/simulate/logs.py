"""Recorded rollouts, one training step at a time, from a run of paceline or the rollout log of another trainer."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.files import named
from paceline.report.trace import read_prompts
from paceline.schema import RolloutRequest, SamplingParams, Tokens
from paceline.simulate.files import RUN_ROLLOUTS, LogError, Warn, log_files, read_rows
from paceline.simulate.formats import Turn, turns_of

Encode = Callable[[Any, bool], list[int]]
"""(text or chat messages, whether it is a prompt) -> token ids."""

#: A log does not say how long a response might have become; no drafter may conclude it from the request.
_PARAMS = SamplingParams(max_tokens=1 << 20)


@dataclass(frozen=True)
class Recorded:
    """One response: ``tokens`` answered ``prompt``. ``key`` is equal for all responses that share a history."""

    prompt: Tokens
    tokens: Tokens
    key: str
    epoch: int


@dataclass
class Step:
    """The rollouts of one training step, in the order of the log; they were in flight together.

    ``lossy`` are the settings they are stamped with, under which they need not follow their policy's law.
    """

    number: int
    rollouts: list[Recorded] = field(default_factory=list)
    lossy: set[str] = field(default_factory=set)

    def requests(self) -> list[RolloutRequest]:
        """The requests that these rollouts answered; those that share a prompt are siblings."""
        return [
            RolloutRequest(
                request_id=f"{self.number}/{index}",
                prompt=recorded.prompt,
                params=_PARAMS,
                group=f"{self.number}/{recorded.key}",
                prompt_key=recorded.key,
            )
            for index, recorded in enumerate(self.rollouts)
        ]


def trace_name(path: Path) -> str:
    """What a log is called in results: its folder or file, without suffixes."""
    name = path.resolve().name
    return name.removesuffix(".gz").rpartition(".")[0] or name if path.is_file() else name


def read_steps(path: Path, tokenizer: str | None, warn: Warn) -> Iterator[Step]:
    """The steps of a log in the order of the run, numbered from 0; only one is held at a time.

    Rows are of one step while their ``step`` stays the same; a file whose rows name none is a step. An epoch that is
    not recorded is the number of earlier steps that visited the prompt. ``tokenizer`` names the policy's tokenizer (a
    folder, or a hub id) for logs that hold text. Raises LogError with the file and the line.
    """
    visits: Counter[str] = Counter()
    step = Step(0)
    current: object = None
    for file in log_files(path):
        prompts = _prompts_beside(file)
        for where, row in read_rows(file, warn):
            for turn in turns_of(row, where):
                recorded = _recorded(turn, where, prompts, tokenizer, visits, warn)
                if recorded is None:
                    continue
                told = turn.step if turn.step is not None else str(file)
                if told != current and step.rollouts:
                    visits.update({rollout.key for rollout in step.rollouts})
                    yield step
                    step = Step(step.number + 1)
                    # An epoch that was counted before its step was known to be over.
                    if turn.epoch is None:
                        recorded = Recorded(recorded.prompt, recorded.tokens, recorded.key, visits[recorded.key])
                current = told
                step.rollouts.append(recorded)
                step.lossy.update(turn.lossy)
    if step.rollouts:
        yield step
    if step.number == 0 and not step.rollouts:
        raise LogError(f"{path}: holds no rollout")


def _recorded(
    turn: Turn,
    where: str,
    prompts: dict[tuple[str, int], list[int]],
    tokenizer: str | None,
    visits: Counter[str],
    warn: Warn,
) -> Recorded | None:
    prompt: Any = turn.prompt
    if turn.prompt_id is not None:
        if turn.prompt_id not in prompts:
            raise LogError(f"{where}: prompt {turn.prompt_id[1]} is not in the prompts file beside it")
        prompt = prompts[turn.prompt_id]
    response: Any = turn.response
    if not turn.ids:
        if tokenizer is None:
            raise LogError(f"{where}: holds text, not token ids; name the policy's tokenizer with --tokenizer")
        encode = load_tokenizer(tokenizer)
        prompt, response = encode(prompt, True), encode(response, False)
    tokens = _ids(response, "response", where)
    if not tokens.size:
        warn(f"{where}: an empty response was passed over")
        return None
    prompt_ids = _ids(prompt, "prompt", where)
    try:
        key = RolloutRequest(
            request_id=where,
            prompt=prompt_ids if turn.origin is None else _ids(turn.origin, "prompt", where),
        ).prompt_key
    except ValueError:
        raise LogError(f"{where}: the prompt is empty") from None
    return Recorded(prompt_ids, tokens, key, visits[key] if turn.epoch is None else turn.epoch)


def _ids(values: Any, what: str, where: str) -> Tokens:
    """Token ids as int32; LogError for anything that is none."""
    try:
        ids = np.array(msgspec.convert(values, list[int]), dtype=np.int64)
    except (msgspec.ValidationError, OverflowError):
        raise LogError(f"{where}: the {what} must be a list of token ids") from None
    if ids.size and (ids.min() < 0 or ids.max() >= 1 << 31):
        raise LogError(f"{where}: the {what} holds an id below 0 or above 2**31 - 1")
    return ids.astype(np.int32)


def _prompts_beside(file: Path) -> dict[tuple[str, int], list[int]]:
    """The prompts of a trace of paceline: ``prompts.jsonl`` of a run, or ``NAME.prompts.jsonl`` of ``NAME.jsonl``."""
    beside = file.with_name("prompts.jsonl" if file.name == RUN_ROLLOUTS else f"{trace_name(file)}.prompts.jsonl")
    if not beside.is_file():
        return {}
    return {(row.task, row.prompt_id): row.tokens for row in read_prompts(beside)}


def pretrained_tokenizer(name: str) -> Any:
    """The tokenizer that ``--tokenizer`` names. Raises PacelineError where it cannot be loaded."""
    from paceline.forward.model_files import foreign
    from paceline.forward.model_files import load_tokenizer as load

    where = f"--tokenizer {named(name)}"
    with foreign(where):
        folder = Path(name).expanduser()
        source = folder if folder.exists() else name
    return load(source, where)


@lru_cache(maxsize=1)
def load_tokenizer(name: str) -> Encode:
    """The tokenizer ``name`` as a function from text to token ids. Raises PacelineError where it cannot be loaded."""
    tokenizer = pretrained_tokenizer(name)

    def encode(text: Any, is_prompt: bool) -> list[int]:
        if isinstance(text, list):
            if is_prompt and tokenizer.chat_template:
                text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
            else:
                text = "\n".join(str(message.get("content") or "") for message in text)
        ids: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
        return ids

    return encode

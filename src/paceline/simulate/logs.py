"""Recorded rollouts, one training step at a time, from a run of paceline or the rollout log of another trainer."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.files import named
from paceline.report.trace import read_prompts
from paceline.schema import RolloutRequest, SamplingParams, Tokens
from paceline.simulate.chats import ChatTemplateError, Renderer
from paceline.simulate.files import RUN_ROLLOUTS, LogError, Warn, log_files, read_rows
from paceline.simulate.formats import MAX_TURNS, LeftOut, Turn, format_of, turns_of
from paceline.terminal import printable

Encode = Callable[..., list[int]]
"""(text or chat messages, whether it is a prompt) -> token ids.

With ``context`` (the messages before them) and ``tools`` where a chat template needs them.
"""
#: Most tokens of prompts that the turns of one rollout may come to.
_MAX_PROMPT_TOKENS = 1 << 26

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


@dataclass
class Reading:
    """What was noticed while a log was read: rollouts that were left out, by reason, and what its rows cannot tell."""

    left_out: Counter[str] = field(default_factory=Counter)
    unclear: list[str] = field(default_factory=list)
    #: Where the first rollout was left out.
    first: str = ""

    def leave_out(self, reason: str, where: str, warn: Warn) -> None:
        """Count a rollout that holds nothing to replay; the first of each kind is reported."""
        if not self.left_out[reason]:
            warn(f"{where}: {reason} was passed over")
        self.left_out[reason] += 1
        self.first = self.first or where

    def doubt(self, line: str) -> None:
        """Note once what the rows cannot tell."""
        if line not in self.unclear:
            self.unclear.append(line)

    def lines(self) -> list[str]:
        """The summary, a line each; empty where everything was read and is clear."""
        return summary_lines(self.left_out, self.unclear)


def summary_lines(left_out: Mapping[str, int], unclear: Sequence[str]) -> list[str]:
    """What was not read of a log, and what its rows cannot tell, a line each; empty where there is nothing."""
    return [*([f"left out: {_counts(left_out)}"] if left_out else []), *unclear]


def _counts(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {reason.rstrip(',')}" for reason, count in sorted(left_out.items()))


def trace_name(path: Path) -> str:
    """What a log is called in results: its folder or file, without suffixes."""
    try:
        path = path.resolve()
    except (OSError, RuntimeError):  # a link to itself
        path = path.absolute()
    name = printable(path.name, None)
    return name.removesuffix(".gz").rpartition(".")[0] or name if path.is_file() else name


def read_steps(path: Path, tokenizer: str | None, warn: Warn, reading: Reading | None = None) -> Iterator[Step]:
    """The steps of a log in the order of the run, numbered from 0; only one is held at a time.

    Rows are of one step while their ``step`` stays the same; a file whose rows name none is a step. An epoch that is
    not recorded is the number of earlier steps that visited the prompt. A response with words of an environment in it
    is a rollout for each run of the policy's own tokens. ``tokenizer`` names the policy's tokenizer (a folder, or a hub
    id) for logs that hold text. ``reading`` receives what was left out. Raises LogError with the file and the line.
    """
    visits: Counter[str] = Counter()
    reading = Reading() if reading is None else reading
    step = Step(0)
    current: object = None
    for file in log_files(path):
        prompts = _prompts_beside(file)
        for where, row in read_rows(file, warn):
            if not (kind := format_of(row, where)).is_clear:
                reading.doubt(
                    f"rows of {kind.name} do not tell the policy's text from that of tools and environments: "
                    "all of a response counts as generated"
                )
            for turn in turns_of(row, where):
                found = turn if isinstance(turn, LeftOut) else _recorded(turn, where, prompts, tokenizer)
                if isinstance(found, LeftOut):
                    reading.leave_out(found.reason, where, warn)
                    continue
                assert isinstance(turn, Turn)
                place = turn.step if turn.step is not None else str(file)
                if place != current and step.rollouts:
                    visits.update({rollout.key for rollout in step.rollouts})
                    yield step
                    step = Step(step.number + 1)
                current = place
                for recorded in found:
                    epoch = visits[recorded.key] if turn.epoch is None else turn.epoch
                    step.rollouts.append(replace(recorded, epoch=epoch))
                step.lossy.update(turn.lossy)
    if step.rollouts:
        yield step
    if step.number == 0 and not step.rollouts:
        if reading.left_out:
            raise LogError(
                f"{reading.first}: the log holds no rollout that can be replayed: {_counts(reading.left_out)}"
            )
        raise LogError(f"{named(path)}: holds no rollout")


def _recorded(
    turn: Turn, where: str, prompts: dict[tuple[str, int], list[int]], tokenizer: str | None
) -> list[Recorded] | LeftOut:
    """The requests of a turn, one for each run of generated tokens; their epoch is not known here."""
    prompt: Any = turn.prompt
    if turn.prompt_id is not None:
        if turn.prompt_id not in prompts:
            raise LogError(f"{where}: prompt {turn.prompt_id[1]} is not in the prompts file beside it")
        prompt = prompts[turn.prompt_id]
    response, origin = turn.response, turn.origin
    if not turn.ids:
        if tokenizer is None:
            raise LogError(f"{where}: holds text, not token ids; name the policy's tokenizer with --tokenizer")
        encoded = _encoded(turn, where, load_tokenizer(tokenizer))
        if isinstance(encoded, LeftOut):
            return encoded
        prompt, response, origin = encoded
    tokens, prompt_ids = _ids(response, "response", where), _ids(prompt, "prompt", where)
    if not tokens.size:
        return LeftOut("an empty response")
    runs = _runs(turn.masks, tokens.size, where)
    if not runs:
        return LeftOut("a response whose mask has no token of the policy")
    first = prompt_ids.size + runs[0][0]
    if not first:
        return LeftOut("an empty prompt")
    if len(runs) > MAX_TURNS or sum(prompt_ids.size + start for start, _ in runs) > _MAX_PROMPT_TOKENS:
        return LeftOut(f"a response of more than {MAX_TURNS} turns, or with too long prompts,")
    # Prompts and responses are views of one array: turns of a conversation take no more memory than its tokens.
    whole = np.concatenate([prompt_ids, tokens])
    root = whole[: prompt_ids.size or first] if origin is None else _ids(origin, "prompt", where)
    if not root.size:
        return LeftOut("an empty prompt")
    key = RolloutRequest(request_id=where, prompt=root).prompt_key
    size = prompt_ids.size
    return [Recorded(whole[: size + start], whole[size + start : size + end], key, 0) for start, end in runs]


def _encoded(turn: Turn, where: str, encode: Encode) -> tuple[list[int], list[int], list[int] | None] | LeftOut:
    """A turn of text as token ids: its prompt, its response and the prompt that began its conversation."""
    extra = {"tools": turn.tools} if turn.tools else {}
    own = turn.response[-1] if isinstance(turn.response, list) and turn.response else {}
    # Calls and thoughts are written by the template, which needs to see what they follow.
    context = {"context": turn.prompt, **extra} if own.get("tool_calls") or own.get("reasoning_content") else {}
    try:
        prompt, response = encode(turn.prompt, True, **extra), encode(turn.response, False, **context)
        origin = None if turn.origin is None else prompt
        if turn.origin is not None and turn.origin != turn.prompt:
            origin = encode(turn.origin, True, **extra)
    except UnicodeError:
        return LeftOut("text that is not Unicode (half a surrogate pair)")
    except ChatTemplateError as error:
        raise LogError(f"{where}: {error}") from None
    return prompt, response, origin


def _runs(masks: list[Any], length: int, where: str) -> list[tuple[int, int]]:
    """(start, end) of each run of tokens that all masks mark, in order; the whole response where there is no mask."""
    marked: npt.NDArray[np.bool_] = np.ones(length, dtype=np.bool_)
    for mask in masks:
        if not isinstance(mask, list) or len(mask) != length:
            size = f"{len(mask)} entries" if isinstance(mask, list) else f"a {type(mask).__name__}"
            raise LogError(f"{where}: the mask has {size} for a response of {length} tokens")
        try:
            is_binary = set(mask) <= {0, 1}  # of bools, integers or floats
        except TypeError:
            is_binary = False
        if not is_binary:
            raise LogError(f"{where}: the mask must hold 0 or 1 for every token of the response")
        marked &= np.array(mask, dtype=np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marked, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _ids(values: Any, what: str, where: str) -> Tokens:
    """Token ids as int32; LogError for anything that is none."""
    try:
        ids = np.array(msgspec.convert(values, list[int]), dtype=np.int64)
    except (msgspec.ValidationError, ValueError, OverflowError):
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
    renderer = Renderer(tokenizer)

    def encode(text: Any, is_prompt: bool, context: Any = "", tools: Any = None) -> list[int]:
        if not isinstance(text, str):
            text = (
                renderer.prompt(text, tools)
                if is_prompt
                else "\n".join(renderer.response(message, context, tools) for message in text)
            )
        text.encode()  # UnicodeEncodeError for half a surrogate pair, which tokenizers report in their own ways
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return encode

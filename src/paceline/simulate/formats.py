"""Which trainer wrote a row, told by its fields, and the turns in it: a prompt and the response that was sampled."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.simulate.files import LogError, Row

Text = str | list[Any]
"""Text, or chat messages with ``content``."""


@dataclass
class Turn:
    """One request to the policy, as it stands in a log: token ids where they were logged, else text.

    ``step`` and ``epoch`` are None where the row does not tell. ``origin`` is the prompt that began a conversation of
    several turns: its history is shared by all of them. ``lossy`` is the stamp of a run that need not follow its
    policy's law.
    """

    prompt: list[Any] | str
    response: list[Any] | str
    ids: bool
    step: int | None = None
    epoch: int | None = None
    prompt_id: tuple[str, int] | None = None
    origin: list[Any] | None = None
    lossy: tuple[str, ...] = ()


@dataclass(frozen=True)
class Format:
    """Rows of one kind: ``knows`` looks at the fields, ``turns`` reads them."""

    name: str
    knows: Callable[[Row], bool]
    turns: Callable[[Row], Iterator[Turn]]


def turns_of(row: Row, where: str) -> Iterator[Turn]:
    """The turns of a row of any known format. LogError, naming the fields found, where none fits."""
    for kind in FORMATS:
        if kind.knows(row):
            try:
                yield from kind.turns(row)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problem = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise LogError(f"{where}: a row of {kind.name} that cannot be read: {problem}") from None
            return
    fields = ", ".join(sorted(row)[:12]) or "none"
    names = ", ".join(kind.name for kind in FORMATS)
    raise LogError(
        f"{where}: neither token ids nor text in fields that are known (it has: {fields}); known logs: {names}"
    )


def _paceline(row: Row) -> Iterator[Turn]:
    prompt_id = (str(row.get("task", "")), int(row["prompt_id"]))
    lossy = tuple(str(setting) for setting in row.get("lossy", ()))
    yield Turn([], row["tokens"], True, _number(row["step"]), _number(row.get("epoch")), prompt_id, lossy=lossy)


def _slime(row: Row) -> Iterator[Turn]:
    step = _number(row.get("rollout_id" if "samples" in row else "step"))  # in a sample, rollout_id is another thing
    for sample in row.get("samples", [row]):
        count, tokens = int(sample["response_length"]), sample["tokens"]
        if not 0 <= count < len(tokens):
            raise ValueError(f"response_length {count} of {len(tokens)} tokens")
        cut = len(tokens) - count
        yield Turn(tokens[:cut], tokens[cut:], True, step)


def _prime_trajectory(row: Row) -> Iterator[Turn]:
    """verifiers' rollouts: one entry of ``trajectory`` a turn."""
    origin = None
    for turn in row["trajectory"]:
        ids = turn.get("tokens")
        if ids is None:
            yield Turn(turn["prompt"], turn["completion"], False, _step(row))
            continue
        origin = origin or ids["prompt_ids"]
        yield Turn(ids["prompt_ids"], ids["completion_ids"], True, _step(row), origin=origin)


def _prime_nodes(row: Row) -> Iterator[Turn]:
    """verifiers' traces: a tree of messages; every sampled one is a turn, its ancestors are the prompt."""
    nodes = row["nodes"]
    for node in nodes:
        if not node.get("sampled"):
            continue
        path = [node]
        while path[-1].get("parent") is not None:
            path.append(nodes[path[-1]["parent"]])
            if len(path) > len(nodes):
                raise ValueError("the nodes form a circle")
        path.reverse()
        if not all(part.get("token_ids") for part in path):
            yield Turn([part["message"] for part in path[:-1]], [node["message"]], False, _step(row))
            continue
        ids, mask = node["token_ids"], node.get("mask") or [True] * len(node["token_ids"])
        head = mask.index(True) if True in mask else len(mask)  # what the template puts before the sampled tokens
        prompt = [token for part in path[:-1] for token in part["token_ids"]] + ids[:head]
        first = next(depth for depth, part in enumerate(path) if part.get("sampled"))
        origin = [token for part in path[:first] for token in part["token_ids"]]
        yield Turn(prompt, ids[head:], True, _step(row), origin=origin or prompt)


def _pair(prompt: str, response: str, ids: bool) -> Callable[[Row], Iterator[Turn]]:
    """A reader of rows with one field for the prompt and one for the response."""

    def turns(row: Row) -> Iterator[Turn]:
        yield Turn(row[prompt], row[response], ids, _step(row))

    return turns


def _has(*fields: str) -> Callable[[Row], bool]:
    return lambda row: all(row.get(field) is not None for field in fields)


def _has_ids(prompt: str, response: str) -> Callable[[Row], bool]:
    return lambda row: isinstance(row.get(prompt), list) and isinstance(row.get(response), list)


def _is_paceline(row: Row) -> bool:
    return {"prompt_id", "step"} <= row.keys() and isinstance(row.get("tokens"), list)


def _is_slime(row: Row) -> bool:
    sample = row["samples"][0] if isinstance(row.get("samples"), list) and row["samples"] else row
    return isinstance(sample, dict) and isinstance(sample.get("tokens"), list) and "response_length" in sample


#: In order of precedence: token ids before text. docs/replay.md lists the same fields.
FORMATS: tuple[Format, ...] = (
    Format("paceline", _is_paceline, _paceline),
    Format("slime", _is_slime, _slime),
    Format("prime-rl (trajectory)", lambda row: bool(row.get("trajectory")), _prime_trajectory),
    Format("prime-rl (nodes)", lambda row: bool(row.get("nodes")), _prime_nodes),
    Format(
        "TRL (token ids)", _has_ids("prompt_ids", "completion_ids"), _pair("prompt_ids", "completion_ids", ids=True)
    ),
    Format(
        "SkyRL (token ids)",
        _has_ids("prompt_token_ids", "response_ids"),
        _pair("prompt_token_ids", "response_ids", ids=True),
    ),
    Format("verl", _has("input", "output"), _pair("input", "output", ids=False)),
    Format("SkyRL", _has("prompt", "text", "stop_reason"), _pair("prompt", "text", ids=False)),
    Format(
        "SkyRL (evaluation)",
        _has("input_prompt", "output_response"),
        _pair("input_prompt", "output_response", ids=False),
    ),
    Format("TRL, or prime-rl without tokens", _has("prompt", "completion"), _pair("prompt", "completion", ids=False)),
    Format("slime without tokens", _has("prompt", "response"), _pair("prompt", "response", ids=False)),
)


def _step(row: Row) -> int | None:
    return _number(row.get("step", row.get("global_step")))


def _number(value: Any) -> int | None:
    """A count, which some loggers write as text; None where it is missing."""
    return None if value is None else int(value)

"""Function calls: requests from BFCL, answered by one JSON object that is compared by structure."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.rl.tasks.base import Prompt, Split
from paceline.rl.tasks.data import fetch
from paceline.rl.tasks.split import choose
from paceline.schema import Grammar

_FILES = ("BFCL_v4_simple_python.json", "BFCL_v4_live_simple.json")
_INSTRUCTIONS = '\nAnswer with one JSON object and nothing else: {"name": ..., "arguments": {...}}'
# About 80 tokens of a prompt and 48 of an answer in SmolLM2's vocabulary, without asking for a tokenizer.
_MAX_PROMPT_SIZE, _MAX_ANSWER_SIZE = 280, 140

_ARGUMENT = re.compile(r"(\w+)(\??): (\w+)")
_AS_CANONICAL = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = {"type": "string", "maxLength": 100}
_INTEGER = {"type": "integer", "minimum": -(10**10), "maximum": 10**10}
_SCALAR = {"anyOf": [_TEXT, {"type": "number"}, {"type": "boolean"}]}
_LIST_OF = {"type": "array", "maxItems": 10}
_LIST = {**_LIST_OF, "items": {"anyOf": [*_SCALAR["anyOf"], {**_LIST_OF, "items": _SCALAR}]}}
_TYPES: dict[str, dict[str, Any]] = {
    "string": _TEXT,
    "integer": _INTEGER,
    "float": {"type": "number"},
    "boolean": {"type": "boolean"},
    "array": _LIST,
    "any": {"anyOf": [*_SCALAR["anyOf"], _LIST]},
}


class Call(msgspec.Struct, frozen=True):
    """A right call: the function, and for each argument the values that are right; "" among them: may be left out."""

    name: str
    arguments: dict[str, list[Any]]


class Row(msgspec.Struct, frozen=True):
    """A request, the signature of the function to call, and the right call."""

    row_id: str
    signature: str
    request: str
    call: Call


class FunctionCall:
    """Call the function that fits the request: ``{"name": ..., "arguments": {...}}``, JSON and nothing else.

    The reward is 0.1 for a JSON object, 0.2 for one with exactly these two keys, 0.3 with the right name, then 0.6
    times the share of right arguments among those needed and those given (so an extra one costs), and 1.0 only for a
    call that is right in all. Key order, case and punctuation in texts, and 2 against 2.0 make no difference.

    ``instructions`` puts the form of the answer into each prompt, for a policy that was not taught it. With ``grammar``
    an answer can be nothing but a call of the right form, see ``call_schema``.
    Raises DataError where the data cannot be fetched, ValueError where there are too few rows.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        train_prompts: int = 16,
        eval_prompts: int = 16,
        instructions: bool = False,
        grammar: bool = False,
    ) -> None:
        self._rows = [row for row in load_rows() if fits(row)]
        self._suffix = _INSTRUCTIONS if instructions else ""
        self._has_grammar = grammar
        keys = [row.row_id for row in self._rows]
        self._places: dict[Split, list[int]] = {
            "train": choose(keys, "train", train_prompts, seed),
            "eval": choose(keys, "eval", eval_prompts, seed),
        }

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The requests of a split; ``data`` is the ``Call``."""
        rows = [(place, self._rows[place]) for place in self._places[split]]
        return [
            Prompt(
                prompt_id=place,
                text=prompt_text(row) + self._suffix,
                data=row.call,
                grammar=Grammar(kind="json_schema", text=call_schema(row.signature)) if self._has_grammar else None,
            )
            for place, row in rows
        ]

    def reward(self, prompt: Prompt, response: str) -> float:
        """How right the call is, between 0 and 1."""
        return grade_call(prompt.data, response)

    def answer(self, prompt: Prompt) -> str:
        """The right call with its first right values, without what may be left out."""
        return canonical(prompt.data)


def load_rows() -> list[Row]:
    """All requests of BFCL's ``simple_python`` and ``live_simple`` that are a single message."""
    folder = fetch("bfcl-eval") / "bfcl_eval" / "data"
    rows = []
    for name in _FILES:
        answers = {record["id"]: record["ground_truth"] for record in _lines(folder / "possible_answer" / name)}
        for record in _lines(folder / name):
            (messages,), (function,), (truth,) = record["question"], record["function"], answers[record["id"]]
            ((called, arguments),) = truth.items()
            # Two rows list no right value at all for some arguments.
            if len(messages) == 1 and all(arguments.values()):
                rows.append(Row(record["id"], _signature(function), messages[0]["content"], Call(called, arguments)))
    return rows


def _lines(path: Any) -> list[Any]:
    return msgspec.json.Decoder().decode_lines(path.read_bytes())


def _signature(function: dict[str, Any]) -> str:
    parameters = function["parameters"]
    required = parameters.get("required", [])
    parts = (
        f"{name}{'' if name in required else '?'}: {about['type']}" for name, about in parameters["properties"].items()
    )
    return f"{function['name']}({', '.join(parts)})"


def call_schema(signature: str) -> str:
    """The JSON schema of the calls that a signature allows, written as ``canonical`` writes them.

    The function's name, then its arguments in the order of the signature, each of its type; those with ``?`` may be
    left out. Only values are left to choose. Texts have at most 100 characters and lists ten items, so that calls end.
    """
    name, _, rest = signature.partition("(")
    arguments = _ARGUMENT.findall(rest)
    schema = _object(
        {"name": {"const": name}, "arguments": _object({key: _TYPES[kind] for key, _, kind in arguments},
                                                       [key for key, optional, _ in arguments if not optional])},
        ["name", "arguments"],
    )  # fmt: skip
    return json.dumps({**schema, "x-guidance": _AS_CANONICAL})


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def prompt_text(row: Row) -> str:
    """The compact prompt: the function's signature (``?`` marks what may be left out), then the request."""
    return f"Function: {row.signature}\nRequest: {row.request.strip()}"


def fits(row: Row) -> bool:
    """Whether the prompt and its answer are short, and the signature tells all: no arguments that are objects."""
    nested = ": dict" in row.signature or any(_has_object(value) for value in row.call.arguments.values())
    return not nested and _size(prompt_text(row)) <= _MAX_PROMPT_SIZE and _size(canonical(row.call)) <= _MAX_ANSWER_SIZE


def _size(text: str) -> int:
    """Bytes, with a digit for three, since a digit is a token of its own."""
    return len(text.encode()) + 2 * sum(character.isdigit() for character in text)


def _has_object(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(_has_object(part) for part in value))


def canonical(call: Call) -> str:
    """The call as JSON with the first right value of each argument that is needed."""
    needed = {name: values[0] for name, values in call.arguments.items() if "" not in values}
    return json.dumps({"name": call.name, "arguments": needed}, ensure_ascii=False)


def grade_call(call: Call, response: str) -> float:
    """The reward that ``FunctionCall`` describes."""
    try:
        answer = msgspec.json.decode(response.strip())
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0.0
    if not isinstance(answer, dict):
        return 0.0
    if answer.keys() != {"name", "arguments"} or not isinstance(answer["arguments"], dict):
        return 0.1
    if answer["name"] != call.name:
        return 0.2
    given, right = answer["arguments"], call.arguments
    counted = {name for name, values in right.items() if "" not in values} | given.keys()
    hits = sum(name in given and name in right and _is_one_of(given[name], right[name]) for name in counted)
    return 1.0 if hits == len(counted) else 0.3 + 0.6 * hits / len(counted)


def _is_one_of(value: Any, right: list[Any]) -> bool:
    return any(_equal(value, option) for option in right)


def _equal(value: Any, option: Any) -> bool:
    """Equal by structure: BFCL's rule for texts, numbers by value, true and false only as such."""
    if isinstance(value, str) and isinstance(option, str):
        return _plain(value) == _plain(option)
    if isinstance(value, bool) or isinstance(option, bool):
        return value is option
    if isinstance(value, list) and isinstance(option, list):
        return len(value) == len(option) and all(map(_equal, value, option))
    return bool(value == option)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).replace("'", '"').casefold()

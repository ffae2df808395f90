"""Which trainer wrote a row, told by its fields, and the turns in it: a prompt and the response that was sampled.

A response may hold what an environment or a tool answered. Where the row has a mask, or is made of chat messages, only
the policy's own tokens are a turn's response; everything before them is its prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.simulate.chats import Messages, NotTextError, messages_of, text_of
from paceline.simulate.files import LogError, Row
from paceline.terminal import printable

#: Most messages of a trace, and most turns of one rollout, that are read: prompts of turns hold all that came before.
MAX_NODES = 1 << 14
MAX_TURNS = 1 << 10
#: Fields that mark the tokens of a response which the policy generated; a token counts where all that a row has agree.
_MASKS = ("loss_mask", "loss_masks", "response_mask", "tool_mask", "env_mask", "completion_mask")
_ABORTED = {"abort", "aborted", "failed", "error", "cancelled"}


@dataclass
class Turn:
    """One request to the policy, as it stands in a log: token ids where they were logged, else text or chat messages.

    ``step`` and ``epoch`` are None where the row does not tell. ``origin`` is the prompt that began a conversation of
    several turns: its history is shared by all of them. ``masks`` mark, by token of the response, what the policy
    generated (each of them 1 there); what is between is context of the turns after it. ``lossy`` is the stamp of a run
    that need not follow its policy's distribution. ``tools`` are those that a chat template writes into the prompt.
    """

    prompt: list[Any] | str
    response: list[Any] | str
    ids: bool
    step: int | None = None
    epoch: int | None = None
    prompt_id: tuple[str, int] | None = None
    origin: list[Any] | str | None = None
    lossy: tuple[str, ...] = ()
    masks: list[Any] = field(default_factory=list)
    tools: list[Any] | None = None


@dataclass(frozen=True)
class LeftOut:
    """A rollout that holds nothing to replay, and why, as a noun with its article."""

    reason: str


Found = Iterator[Turn | LeftOut]


@dataclass(frozen=True)
class Format:
    """Rows of one kind: ``knows`` looks at the fields, ``turns`` reads them.

    ``is_clear`` False: a response is one text, in which an environment's words cannot be told from the policy's.
    """

    name: str
    knows: Callable[[Row], bool]
    turns: Callable[[Row], Found]
    is_clear: bool = True


def format_of(row: Row, where: str) -> Format:
    """The format of a row. LogError, naming the fields found, where none fits."""
    blanks: tuple[Any, ...] = (None, "", [])
    for blank in blanks:  # a row whose prompt or response is null is known by the fields that it has
        view = row if blank is None else {name: blank if value is None else value for name, value in row.items()}
        for kind in FORMATS:
            if kind.knows(view):
                return kind
    fields = printable(", ".join(sorted(row)[:12])) or "none"
    names = ", ".join(kind.name for kind in FORMATS)
    raise LogError(
        f"{where}: neither token ids nor text in fields that are known (it has: {fields}); known logs: {names}"
    )


def turns_of(row: Row, where: str) -> Found:
    """The turns of a row of any known format, and what is left out of it. LogError where it cannot be read."""
    kind = format_of(row, where)
    count = 0
    try:
        for turn in kind.turns(row):
            count += isinstance(turn, Turn)
            if count > MAX_TURNS and not isinstance(row.get("samples"), list):
                yield LeftOut(f"a conversation beyond its first {MAX_TURNS} turns")
                return
            yield turn
    except NotTextError as error:
        if error.left_out is None:
            raise LogError(f"{where}: a row of {kind.name} that cannot be read: {error}") from None
        yield LeftOut(error.left_out)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise LogError(f"{where}: a row of {kind.name} that cannot be read: {printable(problem)}") from None


def _paceline(row: Row) -> Found:
    prompt_id = (str(row.get("task", "")), int(row["prompt_id"]))
    lossy = tuple(printable(setting, 80) for setting in row.get("lossy") or ())
    yield Turn([], row["tokens"], True, _number(row["step"]), _number(row.get("epoch")), prompt_id, lossy=lossy)


def _slime(row: Row) -> Found:
    step = _number(row.get("rollout_id" if "samples" in row else "step"))  # in a sample, rollout_id is another thing
    for sample in row.get("samples", [row]):
        if not isinstance(sample, dict):
            raise ValueError("a sample is no JSON object")
        if str(sample.get("status")).lower() in _ABORTED:
            yield LeftOut("an aborted sample")
            continue
        count, tokens = _count(sample["response_length"], "response_length"), sample["tokens"]
        if not isinstance(tokens, list):
            raise ValueError("tokens is no list of token ids")
        if not count:
            yield LeftOut("an empty response")
            continue
        if count >= len(tokens):
            raise ValueError(f"response_length {count} of {len(tokens)} tokens")
        cut = len(tokens) - count
        yield Turn(tokens[:cut], tokens[cut:], True, step, masks=_masks(sample))


def _prime_trajectory(row: Row) -> Found:
    """verifiers' rollouts: one entry of ``trajectory`` a turn."""
    origin = None
    if not row["trajectory"]:
        yield LeftOut("a rollout without turns")
    for turn in _objects(row["trajectory"], "trajectory"):
        ids = turn.get("tokens")
        if ids is None:
            prompt = messages_of(turn["prompt"])
            origin = origin or prompt
            yield from _chat(prompt, turn["completion"], _step(row), row.get("tools"), origin)
            continue
        origin = origin or ids["prompt_ids"]
        yield Turn(ids["prompt_ids"], ids["completion_ids"], True, _step(row), origin=origin, masks=_masks(ids))


def _prime_episode(row: Row) -> Found:
    """verifiers' episodes: the traces of all agents; those of agents that are not trained are another model's."""
    if row.get("ok") is False:
        yield LeftOut("an episode that failed")
        return
    for trace in _objects(row["traces"], "traces"):
        agent = trace.get("agent")
        if isinstance(agent, dict) and agent.get("trainable") is False:
            yield LeftOut("a trace of an agent that is not trained")
        else:
            yield from _prime_nodes({"step": row.get("step"), **trace})


def _prime_nodes(row: Row) -> Found:
    """verifiers' traces: a tree of messages; every sampled one is a turn, its ancestors are the prompt."""
    if row.get("errors"):
        yield LeftOut("a trace that failed")
        return
    nodes = _objects(row.get("nodes") or [], "nodes")
    if not nodes:
        yield LeftOut("a trace without messages")
    if len(nodes) > MAX_NODES:
        yield LeftOut(f"a trace of more than {MAX_NODES} messages")
        return
    for node in nodes:
        if not node.get("sampled"):
            continue
        path = [node]
        while (parent := path[-1].get("parent")) is not None:
            if type(parent) is not int or not 0 <= parent < len(nodes):
                raise ValueError("a node's parent is none of its nodes")
            path.append(nodes[parent])
            if len(path) > len(nodes):
                raise ValueError("the nodes form a circle")
        path.reverse()
        if not all(part.get("token_ids") for part in path):
            messages = [message for part in path for message in messages_of([part["message"]])]
            first = next(depth for depth, part in enumerate(path) if part.get("sampled"))
            yield Turn(messages[:-1], messages[-1:], False, _step(row), origin=messages[:first], tools=_tools(row))
            continue
        first = next(depth for depth, part in enumerate(path) if part.get("sampled"))
        mask = path[first].get("mask") or []
        head = mask.index(True) if True in mask else 0  # what the template puts before the sampled tokens
        origin = [token for part in path[:first] for token in part["token_ids"]] + path[first]["token_ids"][:head]
        prompt = [token for part in path[:-1] for token in part["token_ids"]]
        masks = [node["mask"]] if node.get("mask") else []
        yield Turn(prompt, node["token_ids"], True, _step(row), origin=origin or None, masks=masks)


def _nemo_rl(row: Row) -> Found:
    """NeMo RL's training data: prompt and response in one row of tokens, padded; every field is a batch of one."""
    ids, mask = _batch_of_one(row["token_ids"]), _batch_of_one(row["token_loss_mask"])
    if not isinstance(ids, list) or not isinstance(mask, list) or len(mask) != len(ids):
        raise ValueError("token_ids and token_loss_mask are not of one length")
    length = _batch_of_one(row.get("input_lengths"))
    end = len(ids) if length is None else _count(length, "input_lengths")
    yield Turn([], ids[:end], True, _step(row), masks=[mask[:end]])


def _batch_of_one(value: Any) -> Any:
    """The only entry of a batch; the value itself where it is none."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _nemo_gym(row: Row) -> Found:
    """NeMo Gym's rollouts: items of the Responses API; the last item of each model call has its token ids."""
    response, asked = row["response"], row["responses_create_params"]
    if not isinstance(response, dict) or not response.get("output"):
        yield LeftOut("no response")
        return
    items = _objects(response["output"], "output")
    calls = [item for item in items if item.get("generation_token_ids")]
    if calls:
        origin = _plain_ids(calls[0]["prompt_token_ids"])
        for item in calls:
            prompt, generated = _plain_ids(item["prompt_token_ids"]), _plain_ids(item["generation_token_ids"])
            yield Turn(prompt, generated, True, _step(row), origin=origin)
        return
    given = asked.get("input")
    prompt_items = [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given, "input")
    if asked.get("instructions"):
        prompt_items = [{"role": "system", "content": asked["instructions"]}, *prompt_items]
    tools = [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        for tool in asked.get("tools") or []
        if isinstance(tool, dict)
    ]
    yield from _chat(_from_items(prompt_items), _from_items(items), _step(row), tools or None)


def _plain_ids(values: Any) -> Any:
    """Token ids, which NeMo Gym also writes as text."""
    if isinstance(values, list) and values and all(type(value) is str and value.isdecimal() for value in values):
        if any(len(value) > 10 for value in values):
            raise ValueError("a token id of more than ten digits")
        return [int(value) for value in values]
    return values


def _from_items(items: list[Row]) -> Messages:
    """Items of the Responses API as chat messages: reasoning, text and calls of one model call are one message."""
    messages: Messages = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            messages.append({"role": "tool", "content": text_of(item.get("output"))})
            continue
        if kind == "message" and item.get("role") != "assistant":
            messages += messages_of([{"role": item.get("role"), "content": item.get("content")}])
            continue
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        own = messages[-1]
        if kind == "message":
            own["content"] += text_of(item.get("content"))
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thought = "".join(str(part.get("text") or "") for part in _objects(parts, "summary"))
            if thought:
                own["reasoning_content"] = own.get("reasoning_content", "") + thought
        elif kind == "function_call":
            call = {"type": "function", "function": {"name": item["name"], "arguments": item.get("arguments", "")}}
            own["tool_calls"] = [*own.get("tool_calls", []), call]
        else:
            raise ValueError(f"an item of type {printable(kind, 40)} is neither text nor a function call")
    return messages_of(messages)


def _chat(
    prompt: Any, completion: Any, step: int | None, tools: Any = None, origin: Messages | str | None = None
) -> Found:
    """A prompt and what followed, as text or chat messages: each message of the policy is a turn."""
    if completion is None:
        yield LeftOut("no response (null)")
        return
    if isinstance(completion, str):
        yield Turn(messages_of(prompt), completion, False, step, origin=origin, tools=_tool_list(tools))
        return
    context = messages_of(prompt)
    messages = messages_of(completion)
    assert isinstance(messages, list)
    origin = context if origin is None else origin
    is_answered = False
    for message in messages:
        if message["role"] == "assistant":
            is_answered = True
            yield Turn(context, [message], False, step, origin=origin, tools=_tool_list(tools))
        # A prompt that is plain text went through no template, and neither does what follows.
        context = [*context, message] if isinstance(context, list) else f"{context}\n{message['content']}"
    if not is_answered:
        yield LeftOut("no message of the policy")


def _tools(row: Row) -> list[Any] | None:
    return _tool_list(row.get("tools"))


def _tool_list(tools: Any) -> list[Any] | None:
    return tools if isinstance(tools, list) and tools else None


def _text(prompt: str, response: str) -> Callable[[Row], Found]:
    """A reader of rows with one field for the prompt and one for the response, as text or chat messages."""

    def turns(row: Row) -> Found:
        if str(row.get("stop_reason", row.get("status"))).lower() in _ABORTED:
            yield LeftOut("an aborted sample")
        elif row.get(prompt) is None:
            yield LeftOut("no prompt (null)")
        else:
            yield from _chat(row[prompt], row[response], _step(row), row.get("tools"))

    return turns


def _pair(prompt: str, response: str) -> Callable[[Row], Found]:
    """A reader of rows with the token ids of the prompt and of the response, masked where the row has a mask."""

    def turns(row: Row) -> Found:
        if str(row.get("stop_reasons", row.get("stop_reason"))).lower() in _ABORTED:
            yield LeftOut("an aborted sample")
        elif row[prompt] is None or row[response] is None:
            yield LeftOut("no prompt (null)" if row[prompt] is None else "no response (null)")
        else:
            yield Turn(row[prompt], row[response], True, _step(row), masks=_masks(row))

    return turns


def _masks(row: Row) -> list[Any]:
    return [row[name] for name in _MASKS if row.get(name) is not None]


def _objects(values: Any, what: str) -> list[Row]:
    """A list of JSON objects; ValueError for anything else."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{what} is no list of JSON objects")
    return values


def _has(*fields: str) -> Callable[[Row], bool]:
    return lambda row: all(row.get(field) is not None for field in fields)


def _has_list(*fields: str) -> Callable[[Row], bool]:
    return lambda row: all(isinstance(row.get(field), list) for field in fields)


def _is_paceline(row: Row) -> bool:
    return {"prompt_id", "step"} <= row.keys() and isinstance(row.get("tokens"), list)


def _is_slime(row: Row) -> bool:
    if row.get("samples") == []:
        return "rollout_id" in row
    sample = row["samples"][0] if isinstance(row.get("samples"), list) else row
    return isinstance(sample, dict) and isinstance(sample.get("tokens"), list) and "response_length" in sample


def _is_episode(row: Row) -> bool:
    return isinstance(row.get("traces"), list)


#: In order of precedence: token ids before text. docs/replay.md lists the same fields.
FORMATS: tuple[Format, ...] = (
    Format("paceline", _is_paceline, _paceline),
    Format("slime", _is_slime, _slime),
    Format("prime-rl (episodes)", _is_episode, _prime_episode),
    Format("prime-rl (trajectory)", _has_list("trajectory"), _prime_trajectory),
    Format("prime-rl (nodes)", _has_list("nodes"), _prime_nodes),
    Format("NeMo RL", lambda row: {"token_ids", "token_loss_mask"} <= row.keys(), _nemo_rl),
    Format(
        "NeMo Gym",
        lambda row: "response" in row and isinstance(row.get("responses_create_params"), dict),
        _nemo_gym,
    ),
    Format("TRL (token ids)", _has_list("prompt_ids", "completion_ids"), _pair("prompt_ids", "completion_ids")),
    Format(
        "SkyRL (token ids)", _has_list("prompt_token_ids", "response_ids"), _pair("prompt_token_ids", "response_ids")
    ),
    Format("verl", _has("input", "output"), _text("input", "output"), is_clear=False),
    Format("SkyRL", _has("prompt", "text", "stop_reason"), _text("prompt", "text"), is_clear=False),
    Format(
        "SkyRL (evaluation)",
        _has("input_prompt", "output_response"),
        _text("input_prompt", "output_response"),
        is_clear=False,
    ),
    Format("TRL, or prime-rl without tokens", _has("prompt", "completion"), _text("prompt", "completion")),
    Format("slime without tokens", _has("prompt", "response"), _text("prompt", "response"), is_clear=False),
)


def _step(row: Row) -> int | None:
    return _number(row.get("step", row.get("global_step")))


def _number(value: Any) -> int | None:
    """A count, which some loggers write as text; None where it is missing."""
    return None if value is None else int(value)


def _count(value: Any, what: str) -> int:
    """A whole number; ValueError for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} is no count: {printable(value, 40)}")
    return value

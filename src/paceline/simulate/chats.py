"""Chat messages as text: what was written, what a template makes of it, and what the policy generated of that."""

import json
from collections.abc import Sequence
from typing import Any

from paceline.terminal import printable

Messages = list[dict[str, Any]]

_TEXTS = {"text", "input_text", "output_text"}
_PICTURES = {"image", "image_url", "input_image", "video", "video_url", "audio", "input_audio", "file", "input_file"}
_SENTINEL = "paceline-content"


class NotTextError(ValueError):
    """Content that has no text. ``left_out``: the reason, as a noun, where the row is only left out; else None."""

    def __init__(self, message: str, left_out: str | None = None) -> None:
        super().__init__(message)
        self.left_out = left_out


class ChatTemplateError(ValueError):
    """A chat template that raised; the message is one line."""


def text_of(content: Any) -> str:
    """The text of a message's content: itself, or that of its parts. NotTextError for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise NotTextError(f"content is neither text nor parts of it: {printable(type(content).__name__)}")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise NotTextError("a part of the content is neither text nor of a known type")
        if kind in _PICTURES:
            raise NotTextError(f"holds {kind}", left_out=f"a prompt or response with content of type {kind}, not text,")
        value = part.get("refusal" if kind == "refusal" else "text")
        if kind not in {*_TEXTS, "refusal"} or not isinstance(value, str):
            raise NotTextError(f"a part of the content is no text (its type is {printable(kind, 40)})")
        texts.append(value)
    return "".join(texts)


def messages_of(value: Any) -> Any:
    """Text as it is; chat messages with ``role``, ``content`` as text, and the calls and thoughts that they hold.

    NotTextError (a ValueError) for anything else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise NotTextError(f"neither text nor chat messages: {printable(type(value).__name__)}")
    return [_message(message) for message in value]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise NotTextError("a chat message must be a JSON object with a role")
    found: dict[str, Any] = {"role": message["role"], "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise NotTextError("tool_calls is no list")
        found["tool_calls"] = [_call(call) for call in calls]
    for name in ("reasoning_content", "name", "tool_call_id"):
        text = message.get(name)
        if name == "reasoning_content" and text is None:
            text = message.get("reasoning")
        if text is not None and not isinstance(text, str):
            raise NotTextError(f"{name} of a message is no text")
        if text:
            found[name] = text
    return found


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotTextError("a tool call has no name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise NotTextError("the arguments of a tool call are neither text nor a JSON object")
    return {
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }


class Renderer:
    """A tokenizer's chat template; ``chat_template`` of the tokenizer may be None."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Messages, tools: Sequence[Any] | None) -> str:
        """The text that the policy continues. Raises ChatTemplateError where the template raises."""
        if not self._tokenizer.chat_template:
            return "\n".join(_written(message) for message in messages)
        return self._rendered(messages, tools, add_generation_prompt=True)

    def response(self, message: dict[str, Any], context: Messages | str, tools: Sequence[Any] | None) -> str:
        """What the policy generated of a message: its content, or with calls or thoughts what the template writes.

        Without a stop token, as content is without one. Where the template does not write them behind the prompt, the
        thoughts, the content and the calls as JSON stand for it.
        """
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            return str(message["content"])
        if self._tokenizer.chat_template and isinstance(context, list):
            head = self._rendered(context, tools, add_generation_prompt=True)
            whole = self._rendered([*context, message], tools, add_generation_prompt=False)
            plain = {"role": message["role"], "content": _SENTINEL}
            tail = self._rendered([*context, plain], tools, add_generation_prompt=False).rpartition(_SENTINEL)[2]
            if whole.startswith(head):
                text = whole[len(head) :].removesuffix(tail) if tail else whole[len(head) :]
                names = [call["function"]["name"] for call in message.get("tool_calls", ())]
                if all(part in text for part in (message["content"].strip(), *names)):
                    return text
        return _written(message)

    def _rendered(self, messages: Messages, tools: Sequence[Any] | None, *, add_generation_prompt: bool) -> str:
        failure: Exception | None = None
        forms = [messages]
        if any(message.get("tool_calls") for message in messages):
            # Templates take arguments as an object, or as text, and trainers log either.
            forms += [_with_arguments(messages, as_text=True), _with_arguments(messages, as_text=False)]
        for form in forms:
            try:
                return str(
                    self._tokenizer.apply_chat_template(
                        form,
                        tools=None if tools is None else list(tools),
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                    )
                )
            except Exception as error:  # noqa: BLE001  the tokenizer's own template runs here
                failure = failure or error
        reason = f"{type(failure).__name__}: {printable(failure)}"
        without = "; the log holds no tools" if not tools and ("None" in reason or "tool" in reason) else ""
        raise ChatTemplateError(f"the tokenizer's chat template cannot write these messages: {reason}{without}")


def _with_arguments(messages: Messages, *, as_text: bool) -> Messages:
    """The messages with the arguments of their calls as JSON text, or as objects where the text is one."""
    changed: Messages = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif not as_text and isinstance(arguments, str):
                try:
                    parsed = json.loads(arguments)
                except (ValueError, RecursionError):
                    parsed = None
                arguments = parsed if isinstance(parsed, dict) else arguments
            calls.append({"type": "function", "function": {**call["function"], "arguments": arguments}})
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def _written(message: dict[str, Any]) -> str:
    """A message without a template: thoughts, content, and calls as JSON, a line each."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join(part for part in (message.get("reasoning_content"), message["content"], *calls) if part)

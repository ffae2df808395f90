"""Where a response ends: stop ids, stop strings and lengths, token by token inside an accepted run.

An accepted run may hold a stop in its middle and reach past the length limit at its end. Both are decided as plain
decoding would have: at the first token that ends the response.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.schema import FinishReason, SamplingParams, Tokens

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Cut:
    """How many of the emitted tokens count, and why the response ended there (None: it goes on).

    ``text`` is set where a stop string ended it: the response up to, and without, the string.
    """

    count: int
    reason: FinishReason | None = None
    text: str | None = None


def cut(
    emitted: Tokens,
    response: Tokens,
    params: SamplingParams,
    stop_ids: Sequence[int],
    room: int,
    decode: Decode | None = None,
) -> Cut:
    """Cut ``emitted``, which follows ``response``, at the first token that ends it.

    ``room`` is how many more tokens the length limits allow, at least 1. ``decode`` is needed for stop strings.
    The token that stops is counted. A stop wins over a length limit reached by the same token.
    """
    if params.stop and decode is None:
        raise ValueError("stop strings need a tokenizer: give the engine `decode`, or use stop_token_ids")
    stops = set(stop_ids)
    for index, token in enumerate(emitted[:room].tolist()):
        if len(response) + index >= params.min_tokens:
            if token in stops:
                return Cut(index + 1, "stop")
            if params.stop and decode is not None:
                text = decode([*response.tolist(), *emitted[: index + 1].tolist()])
                found = [at for at in (text.find(stop) for stop in params.stop) if at >= 0]
                if found:
                    return Cut(index + 1, "stop", text[: min(found)])
        if index + 1 == room:
            return Cut(room, "length")
    return Cut(len(emitted))

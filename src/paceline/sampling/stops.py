"""Where a response ends: stop ids, stop strings and lengths, token by token inside an accepted run.

An accepted run may hold a stop in its middle and reach past the length limit at its end. Both are decided as plain
decoding would have: at the first token that ends the response.

A token completes a stop string where the text with it holds the string, and the string's end is not in the text that
stood before it, characters whose bytes were yet to come aside. One that was complete before ``min_tokens`` is text like
any other, and ends nothing later; vLLM does the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from paceline.schema import FinishReason, SamplingParams, Tokens

Decode = Callable[[Sequence[int]], str]

#: What stands for bytes that are no character, or not yet one.
_MARK = "\ufffd"
#: So many characters at the front of a decoded tail may differ from the whole text: the tail begins in the middle of a
#: word or of a character, or lacks the space that decoders leave out at the front.
_BENT = 16
#: A character has at most four tokens; what has not become one in twice as many never will.
_UNFINISHED = 8
_MOST_SILENT = 256


@dataclass(frozen=True)
class Cut:
    """How many of the emitted tokens count, and why the response ended there (None: it goes on).

    ``text`` is set where a stop string ended it: the response up to, and without, the string.
    """

    count: int
    reason: FinishReason | None = None
    text: str | None = None


class Ending:
    """Decides where one response ends, of which the tokens ``said`` are there; hears of each token once, in order.

    ``decode`` is needed for stop strings.
    """

    def __init__(
        self, params: SamplingParams, stop_ids: Sequence[int], decode: Decode | None = None, said: Sequence[int] = ()
    ) -> None:
        self._params = params
        self._stop_ids = frozenset(stop_ids)
        self._count = len(said)
        self._tail: Tail | None = None
        if params.stop and decode is not None:
            self._tail = Tail(params.stop, decode, said)

    def cut(self, emitted: Tokens, room: int) -> Cut:
        """Cut ``emitted`` at the first token that ends the response; ``room`` more tokens are allowed, at least 1.

        The token that stops is counted. A stop wins over a length limit reached by the same token. Raises ValueError
        for stop strings without ``decode``, and whatever ``decode`` raises.
        """
        if self._params.stop and self._tail is None:
            raise ValueError("stop strings need a tokenizer: give the engine `decode`, or use stop_token_ids")
        for count, token in enumerate(emitted[:room].tolist(), 1):
            may_stop = self._count >= self._params.min_tokens
            self._count += 1
            if may_stop and token in self._stop_ids:
                return Cut(count, "stop")
            if self._tail is not None:
                text = self._tail.add(token, look=may_stop)
                if text is not None:
                    return Cut(count, "stop", text)
            if count == room:
                return Cut(room, "length")
        return Cut(len(emitted))


def cut(
    emitted: Tokens,
    response: Tokens,
    params: SamplingParams,
    stop_ids: Sequence[int],
    room: int,
    decode: Decode | None = None,
) -> Cut:
    """``Ending.cut`` for who keeps none: cut ``emitted``, which follows ``response``."""
    return Ending(params, stop_ids, decode, response.tolist()).cut(emitted, room)


class Tail:
    """The end of a growing text, decoded as far back as the longest of ``stops`` needs, so a token costs the same
    however long the text is.

    The tail is a window of tokens. It moves on only where its text, but for the first characters, equals that of the
    longer window before; and what it finds is looked up in the whole text, which is decoded then alone. A stop that
    holds U+FFFD itself is looked for in the whole text always.
    """

    def __init__(self, stops: Sequence[str], decode: Decode, said: Sequence[int] = ()) -> None:
        self._stops = stops
        self._decode = decode
        longest = max(map(len, stops))
        self._aligned = longest - 1 + _BENT
        self._least = longest - 1 + 2 * _BENT
        self._moves = not any(_MARK in stop for stop in stops)
        self._next = 0
        self._tokens = list(said)
        self._window = list(said)
        self._text = decode(self._window) if self._window else ""
        #: The part of the window's text that stood before the next token.
        self._stood = self._text.rstrip(_MARK)
        self._unfinished = 0
        self._move()

    def add(self, token: int, *, look: bool = True) -> str | None:
        """The whole text before the stop string that ``token`` completes; None where it completes none.

        Without ``look`` the token is only taken up.
        """
        self._tokens.append(token)
        self._window.append(token)
        text = self._text = self._decode(self._window)
        known = self._known(text)
        found = self._whole(len(text) - known) if look and self._completed(text, known) is not None else None
        is_unfinished = text.endswith(_MARK)
        whole = text.rstrip(_MARK)
        if not (is_unfinished and self._stood.startswith(whole)):
            self._stood = whole  # else bytes to come may give back what stood
        self._unfinished = self._unfinished + 1 if is_unfinished else 0
        self._move()
        return found

    def _known(self, text: str) -> int:
        """How many characters of the window's text stood before."""
        if text.startswith(self._stood):
            return len(self._stood)
        return len(commonprefix([self._stood, text]))  # noqa: RUF071  character by character is what is wanted

    def _completed(self, text: str, known: int) -> int | None:
        """Where the first stop string begins that ends behind the first ``known`` characters."""
        places = [text.find(stop, max(0, known - len(stop) + 1)) for stop in self._stops]
        return min((at for at in places if at >= 0), default=None)

    def _whole(self, fresh: int) -> str | None:
        """The whole text before a stop string that ends in its last ``fresh`` characters."""
        text = self._text if len(self._window) == len(self._tokens) else self._decode(self._tokens)
        at = self._completed(text, max(0, len(text) - fresh))
        return None if at is None else text[:at]

    def _move(self) -> None:
        """Make the window shorter where it is long, and where that changes nothing."""
        size = len(self._window)
        if not self._moves or size < self._next or 0 < self._unfinished < _UNFINISHED:
            return
        if len(self._text) > 2 * self._least + 64:
            moved = self._shorter()
        elif size > _MOST_SILENT:
            moved = self._without_silence()
        else:
            return
        # Where nothing shorter will do, the next look is at twice the size: all looks together stay cheap.
        self._next = 0 if moved else 2 * size

    def _shorter(self) -> bool:
        size = _UNFINISHED
        while size < len(self._window) and len(self._decode(self._window[-size:])) < self._least:
            size *= 2
        for more in range(5):  # it may begin inside a character
            window = self._window[-(size + more) :]
            text = self._decode(window)
            is_enough = len(window) < len(self._window) and len(text) >= self._least
            if is_enough and text[-self._aligned :] == self._text[-self._aligned :]:
                stood = max(0, self._known(self._text) - (len(self._text) - len(text)))
                self._window, self._text, self._stood = window, text, text[:stood]
                return True
        return False

    def _without_silence(self) -> bool:
        """Leave out a long run of tokens that add no text, such as special ones."""
        first, last = 0, len(self._window)
        while first < last:
            middle = (first + last) // 2
            if len(self._decode(self._window[:middle])) < len(self._text):
                first = middle + 1
            else:
                last = middle
        window = self._window[: max(first, 1)] + self._window[-_UNFINISHED:]
        if len(window) >= len(self._window) or self._decode(window) != self._text:
            return False
        self._window = window
        return True

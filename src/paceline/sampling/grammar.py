"""Which tokens a grammar allows after a prefix: grammars compiled by llguidance against the bytes of a vocabulary.

What is allowed is a pure function of the grammar and the response so far. A matcher keeps the state of the last prefix
that it was asked about and moves to the next one by rolling back and consuming, so the nodes of a draft tree cost a few
tokens each, in any order, and a rejected draft leaves nothing behind. Nothing here imports torch.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.schema import Grammar, PacelineError, Tokens, as_tokens

_MOST_COMPILED = 1024


class GrammarError(PacelineError):
    """A grammar that cannot be honoured; the message is one line."""


class Allowed(NamedTuple):
    """What may follow a prefix: ``is_allowed_V`` over the tokenizer's ids, and whether the response may end."""

    is_allowed_V: npt.NDArray[np.bool_]
    may_end: bool


class Vocabulary:
    """What the ids of a tokenizer stand for; compiles grammars against it and keeps them.

    ``tokenizer`` is a ``PreTrainedTokenizerFast``: byte-level BPE, or one with byte fallback. It is read on the first
    use, which takes some tenths of a second. The ``most`` last used grammars stay compiled.
    """

    def __init__(self, tokenizer: Any, most: int = _MOST_COMPILED) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._machine: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    @classmethod
    def of(cls, tokenizer: "Vocabulary | Any") -> "Vocabulary":
        """``tokenizer`` itself where it is a vocabulary already."""
        return tokenizer if isinstance(tokenizer, Vocabulary) else cls(tokenizer)

    def matcher(self, grammar: Grammar) -> "Matcher":
        """A matcher of ``grammar`` at its start.

        Raises GrammarError where the grammar does not compile, with llguidance's reason, where the tokenizer's bytes
        are not known, and where llguidance is not installed.
        """
        key = grammar.kind, grammar.text
        if key not in self._compiled:
            self._compiled[key] = self._compile(grammar)
            if len(self._compiled) > self._most:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return Matcher(self._compiled[key], self._ends, self._size, grammar.trigger)

    def _compile(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise GrammarError("grammars need the package llguidance; pip install 'paceline[grammar]'") from None
        if self._machine is None:
            self._machine = self._read(LLTokenizer)
            self._size: int = self._machine.vocab_size
            self._ends: list[int] = self._machine.eos_tokens
        readers: dict[str, Any] = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "ebnf": LLMatcher.grammar_from_lark,
        }
        try:
            compiled = LLMatcher(self._machine, readers[grammar.kind](grammar.text), log_level=0)
        except ValueError as error:
            raise GrammarError(f"the {grammar.kind} does not compile: {_line(error)}") from None
        if compiled.is_error():
            raise GrammarError(f"the {grammar.kind} does not compile: {_line(compiled.get_error())}")
        return compiled

    def _read(self, build: Any) -> Any:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GrammarError(
                f"grammars need a fast tokenizer, whose ids have known bytes, not {type(self._tokenizer).__name__}"
            )
        try:
            return build(backend.to_str(), eos_token=self._tokenizer.eos_token_id)
        except ValueError as error:
            raise GrammarError(f"the bytes of this tokenizer's ids are not known: {_line(error)}") from None


class Matcher:
    """One request's view of a compiled grammar; made by ``Vocabulary.matcher``.

    Every answer is a function of the response alone; prefixes may be asked for in any order. A grammar is silent before
    its trigger, and after a token that it forbids, since such a prefix is never emitted.
    """

    def __init__(self, compiled: Any, ends: list[int], size: int, trigger: tuple[int, ...]) -> None:
        self._compiled = compiled
        self._ends = ends
        self._size = size
        self._trigger = np.array(trigger, dtype=np.int32)
        self._state = compiled.deep_copy()
        self._consumed = as_tokens([])

    def allowed(self, response: Tokens) -> Allowed | None:
        """What may follow ``response``; None where the grammar is silent. Tokens that only end a text are not allowed.

        Raises GrammarError where the grammar is too complex to go on.
        """
        if not self._is_at(response):
            return None
        bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        self._check()
        is_allowed_V = np.unpackbits(bits, count=self._size, bitorder="little").astype(bool)
        is_allowed_V[self._ends] = False
        return Allowed(is_allowed_V, bool(self._state.is_accepting()))

    def forced(self, response: Tokens) -> list[int]:
        """The tokens that must follow ``response`` one after the other, as each is the only one allowed; maybe none."""
        if not self._is_at(response):
            return []
        forced: list[int] = self._state.compute_ff_tokens()
        self._check()
        return forced

    def permits(self, response: Tokens) -> bool:
        """Whether the bytes of ``response`` begin a text of the grammar, or its trigger is yet to come."""
        return self._is_at(response) or self._start(response) is None

    def _start(self, response: Tokens) -> int | None:
        """Where the grammar starts in the response; None where its trigger is not complete."""
        size = len(self._trigger)
        if not size:
            return 0
        windows = np.lib.stride_tricks.sliding_window_view(response, size) if len(response) >= size else response[:0]
        found = np.flatnonzero((windows == self._trigger).all(-1)) if len(windows) else windows
        return int(found[0]) + size if len(found) else None

    def _is_at(self, response: Tokens) -> bool:
        """Move the state to ``response``; whether the grammar has started there and every token was possible."""
        start = self._start(response)
        if start is None:
            return False
        wanted, held = response[start:], self._consumed
        shorter = min(len(wanted), len(held))
        differ = np.flatnonzero(wanted[:shorter] != held[:shorter])
        same = int(differ[0]) if len(differ) else shorter
        if same < len(held):
            self._state.rollback(len(held) - same)
        fresh = wanted[same:].tolist()
        # An end token would stop llguidance's state for good; nothing is asked behind one.
        ended = next((i for i, token in enumerate(fresh) if token in self._ends), len(fresh))
        taken = self._state.try_consume_tokens(fresh[:ended]) if ended else 0
        self._consumed = wanted[: same + taken].copy()
        self._check()
        return same + taken == len(wanted)

    def _check(self) -> None:
        """Raise what llguidance found; its state is of no use then, and a fresh one takes its place."""
        if self._state.is_error():
            reason = self._state.get_error()
            self._state, self._consumed = self._compiled.deep_copy(), as_tokens([])
            raise GrammarError(f"the grammar cannot be followed any further: {_line(reason)}")


def _line(reason: object) -> str:
    return " ".join(str(reason).split())

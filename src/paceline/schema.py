"""The records that cross rooms: requests, drafts, outcomes, rollouts and steps.

Token ids are one-dimensional int32 arrays everywhere. Nothing here imports torch.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from paceline.terminal import printable

Tokens = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort", "error"]
#: The reasons of responses that did not come to their end; nothing is learned from them.
CUT_SHORT = ("abort", "error")

#: Where an emitted token came from. 0: the policy's own sample beyond any draft; others: a draft that was accepted,
#: copied from the request's own text (``prompt``), a sibling in flight, an earlier rollout, another drafter, or
#: answers to other prompts (``elsewhere``), the only token that a grammar allowed (``forced``), or a model that drafts,
#: a head of the policy's among them (``model``).
SOURCES: tuple[str, ...] = ("policy", "prompt", "sibling", "history", "other", "elsewhere", "forced", "model")

_INT32 = np.iinfo(np.int32)
_LONGEST_SHOWN = 80

#: Requests whose ids begin so are the sentinel's: nothing is remembered of them, and their rollouts end as ``abort``.
CANARY = "canary/"
#: Longest message of an error, in characters; a longer one loses its middle, since what to do stands at the end.
_MESSAGE_CHARS = 1500


class PacelineError(Exception):
    """Base of every error that paceline raises by name; the message is one line: what, where, what to do.

    Messages quote files, models and users: ``str`` gives one printable line of bounded length.
    """

    def __str__(self) -> str:
        text = printable(" ".join(line.strip() for line in super().__str__().splitlines()), None)
        if len(text) <= _MESSAGE_CHARS:
            return text
        return f"{text[: 2 * _MESSAGE_CHARS // 3]}…{text[-_MESSAGE_CHARS // 3 :]}"


class DraftLawError(PacelineError):
    """A drafter's account of what its tokens were drawn from cannot be true; nothing of the pass is emitted."""


class FailedRequestError(PacelineError):
    """A request that could not be decoded to its end; the message names it, and ``rollouts`` are all of its call."""

    def __init__(self, message: str, rollouts: "list[Rollout] | None" = None) -> None:
        super().__init__(message)
        self.rollouts = rollouts or []


def as_tokens(ids: Any) -> Tokens:
    """A one-dimensional int32 array of ``ids``, whole numbers of 32 bits; ValueError for anything else."""
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1:
        return np.ascontiguousarray(ids)
    array = _array(ids)
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {array.shape}")
    if not array.size:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and not (array % 1 == 0).all()):
        raise ValueError(f"token ids must be integers, got {_shown(ids)}")
    if array.min() < _INT32.min or array.max() > _INT32.max:
        wrong = array[(array < _INT32.min) | (array > _INT32.max)][0]
        raise ValueError(f"token id {wrong} does not fit into 32 bits")
    return np.ascontiguousarray(array, dtype=np.int32)


def _array(ids: Any) -> npt.NDArray[Any]:
    """``ids`` as numpy reads them; those of a tensor on any device. ValueError where they are no plain array."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu()
    elif isinstance(ids, list | tuple) and any(type(one) is bool for one in ids):
        # Beside integers, numpy would take True for 1.
        raise ValueError(f"token ids must be integers, got {_shown(ids)}")
    try:
        return np.asarray(ids)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"token ids must be integers, got {_shown(ids)}") from None


def _shown(value: object) -> str:
    """``value`` in one short line, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def derive_seed(*parts: object) -> int:
    """A 64-bit seed that is a pure function of ``parts`` (their text, with separators)."""
    return xxhash.xxh3_64_intdigest("\x1f".join(str(part) for part in parts).encode())


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a response may be. Impossible values raise ValueError; whether ``text`` compiles shows when it is used.

    ``kind`` says how ``text`` is read: a JSON schema, a regular expression (Rust's syntax), or ``ebnf``, llguidance's
    variant of Lark's syntax. The grammar starts on the position right after the first time that the token ids
    ``trigger`` are complete in the response; with no trigger, on the first token. Before that anything may be said.
    """

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str
    trigger: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _GRAMMARS:
            raise ValueError(f"kind: {_shown(self.kind)} must be one of {', '.join(_GRAMMARS)}")
        if not isinstance(self.text, str) or not self.text.strip():
            raise ValueError(f"text: {_shown(self.text)} must be a {self.kind}, not empty")
        try:
            msgspec.structs.force_setattr(self, "trigger", _ids(self.trigger))
        except ValueError as error:
            raise ValueError(f"trigger: {_shown(self.trigger)} must be {error}") from None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one response is sampled. A value that cannot be honoured raises ValueError, which names the field.

    Processors apply in this order at every position: ``allowed_token_ids``, ``grammar``, ``bad_words``,
    ``min_tokens``, ``logit_bias``, repetition, presence and frequency penalty, ``temperature``, ``min_p``, ``top_k``,
    ``top_p``.
    ``temperature`` 0 is greedy, and so is one below 1e-5, as in vLLM, which becomes 0. ``seed`` None derives the seed
    from the request id, so no two requests share noise.

    Values are taken as vLLM takes them: ``stop`` is a text or several, lists stand for tuples, numpy's numbers for
    Python's, keys of ``logit_bias`` may be digits, and None is nothing for ``stop``, ``stop_token_ids``, ``bad_words``
    (which are token ids here) and ``logit_bias``. A truth value is no number, and no other number a truth value.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    max_tokens: int = 128
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: Literal["processed", "raw"] = "processed"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            given = getattr(self, name)
            value = self.taken(name, given)
            if value is not given:
                msgspec.structs.force_setattr(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"sampling parameter min_tokens={self.min_tokens}: must be between 0 and max_tokens={self.max_tokens}"
            )

    @staticmethod
    def taken(name: str, value: Any) -> Any:
        """The value of the field ``name`` that ``value`` stands for. ValueError, naming the field, for none."""
        try:
            return _FIELDS[name](value)
        except ValueError as error:
            raise ValueError(f"sampling parameter {name}={_shown(value)}: must be {error}") from None


def _number(value: Any, least: float, most: float, wanted: str, *, above: bool = False) -> float:
    """A finite number in [least, most], or in (least, most] where it must be ``above``."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(wanted)
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(wanted) from None
    if not least <= number <= most or (above and number == least):
        raise ValueError(wanted)
    return number


def _integer(value: Any, least: int, most: int, wanted: str) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(wanted)
    return int(value)


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids out of a list or a tuple."""
    wanted = "a list of token ids, whole numbers from 0 to 2147483647"
    if not isinstance(value, list | tuple):
        raise ValueError(wanted)
    return tuple(_integer(token, 0, int(_INT32.max), wanted) for token in value)


def _temperature(value: Any) -> float:
    number = _number(value, 0.0, _LARGEST, "a finite number >= 0")
    return 0.0 if number < LEAST_TEMPERATURE else number


def _stop(value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("a text or a list of texts, free of empty strings")
    if any(0xD800 <= ord(letter) <= 0xDFFF for text in texts for letter in text):
        raise ValueError("text, which half of a surrogate pair is not")
    return tuple(texts)


def _bad_words(value: Any) -> tuple[tuple[int, ...], ...]:
    wanted = "a list of words, each a list of token ids and free of empty sequences; encode the words"
    if not isinstance(value, list | tuple | None):
        raise ValueError(wanted)
    try:
        words = tuple(_ids(word) for word in value or ())
    except ValueError:
        raise ValueError(wanted) from None
    if not all(words):
        raise ValueError(wanted)
    return words


def _allowed(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _ids(value)
    if not ids:
        raise ValueError("not empty; leave it out to allow all")
    return ids


def _bias(value: Any) -> dict[int, float]:
    wanted = f"a mapping of token ids to numbers below +inf, none beyond {_LARGEST:g} but -inf"
    if not isinstance(value, Mapping | None):
        raise ValueError(wanted)
    bias = {}
    for key, amount in (value or {}).items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= len(str(_INT32.max))
        token = _integer(int(key) if digits else key, 0, int(_INT32.max), wanted)
        if token in bias:
            raise ValueError(f"free of a token that is named twice, as {token} is")
        is_ban = isinstance(amount, float | np.floating) and amount == -math.inf
        bias[token] = -math.inf if is_ban else _number(amount, -_LARGEST, _LARGEST, wanted)
    return bias


def _grammar(value: Any) -> "Grammar | None":
    if not isinstance(value, Grammar | None):
        raise ValueError("a paceline.schema.Grammar")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError("true or false itself")
    return bool(value)


def _seed(value: Any) -> int | None:
    return None if value is None else _integer(value, -(1 << 63), (1 << 64) - 1, "an integer of 64 bits, or None")


def _mode(value: Any) -> str:
    if not isinstance(value, str) or value not in ("processed", "raw"):
        raise ValueError("'processed' or 'raw': whose log-probabilities, not how many")
    return value


#: Lower temperatures are greedy, as in vLLM: a logit divided by one may leave what float32 holds.
LEAST_TEMPERATURE = 1e-5
#: Larger biases, temperatures and penalties may turn into infinities on their way through the processors.
_LARGEST = 1e30
_LARGEST_PENALTY = 1e5
#: Most samples of one request, as in vLLM.
MOST_SAMPLES = 16384
_GRAMMARS = ("json_schema", "regex", "ebnf")

_FIELDS: dict[str, Callable[[Any], Any]] = {
    "temperature": _temperature,
    "top_k": lambda value: _integer(value, 0, 1 << 62, "an integer >= 0 (0 is off)"),
    "top_p": lambda value: _number(value, 0.0, 1.0, "in (0, 1]", above=True),
    "min_p": lambda value: _number(value, 0.0, 1.0, "in [0, 1]"),
    "repetition_penalty": lambda value: _number(
        value,
        1 / _LARGEST_PENALTY,
        _LARGEST_PENALTY,
        f"a number > 0, from {1 / _LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g}",
    ),
    "presence_penalty": lambda value: _number(
        value, -_LARGEST_PENALTY, _LARGEST_PENALTY, f"finite, at most {_LARGEST_PENALTY:g} either way"
    ),
    "frequency_penalty": lambda value: _number(
        value, -_LARGEST_PENALTY, _LARGEST_PENALTY, f"finite, at most {_LARGEST_PENALTY:g} either way"
    ),
    "logit_bias": _bias,
    "min_tokens": lambda value: _integer(value, 0, 1 << 62, "an integer between 0 and max_tokens"),
    "max_tokens": lambda value: _integer(value, 1, 1 << 62, "an integer >= 1"),
    "bad_words": _bad_words,
    "allowed_token_ids": _allowed,
    "grammar": _grammar,
    "stop_token_ids": lambda value: () if value is None else _ids(value),
    "stop": _stop,
    "ignore_eos": _truth,
    "n": lambda value: _integer(value, 1, MOST_SAMPLES, f"an integer >= 1, at most {MOST_SAMPLES}"),
    "seed": _seed,
    "logprobs": _mode,
}


class RolloutRequest(msgspec.Struct, kw_only=True, eq=False):
    """One prompt to answer. Requests of one ``group`` are siblings: they share a prompt, which ``prompt_key`` names.

    With ``speculate`` false nothing is drafted for it. ``begun`` is what was said before it was cut short, as the
    rollout of its abort: the response goes on from there, and what was said keeps its log-probabilities and versions.
    """

    request_id: str
    prompt: Tokens
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    group: str = ""
    prompt_key: str = ""
    speculate: bool = True
    begun: "Rollout | None" = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise ValueError(f"request_id={_shown(self.request_id)}: must be text")
        name = f"request {_shown(self.request_id)[1:-1]}"
        for field, kind, wanted in (
            ("params", SamplingParams, "SamplingParams"),
            ("group", str, "text"),
            ("prompt_key", str, "text"),
            ("speculate", bool | np.bool_, "true or false itself"),
            ("begun", Rollout | None, "a Rollout"),
        ):
            if not isinstance(getattr(self, field), kind):
                raise ValueError(f"{name}: {field}={_shown(getattr(self, field))}: must be {wanted}")
        self.prompt = _prompt(self.prompt, name)
        if not self.prompt_key:
            self.prompt_key = xxhash.xxh3_64_hexdigest(self.prompt.tobytes())

    @property
    def seed(self) -> int:
        """The request's noise key, 64 bits."""
        return self.params.seed if self.params.seed is not None else derive_seed("request", self.request_id)


def _prompt(given: Any, name: str) -> Tokens:
    """The ids of a prompt; of a tokenizer's mapping its ``input_ids``, those of one text and without padding."""
    ids = given
    if isinstance(given, Mapping) or hasattr(given, "input_ids"):
        try:
            ids, mask = given["input_ids"], given.get("attention_mask")
            ids, mask = _array(ids), None if mask is None else _array(mask)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ValueError(f"{name}: prompt: a mapping without readable input_ids; give the token ids") from None
        if ids.ndim == 2 and len(ids) == 1:
            ids, mask = ids[0], mask if mask is None or mask.ndim != 2 else mask[0]
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(f"{name}: prompt: attention_mask has shape {mask.shape}, input_ids {ids.shape}")
        ids = ids if mask is None else ids[mask != 0]
    elif isinstance(given, str | bytes):
        raise ValueError(f"{name}: prompt: is text; encode it, the engine takes token ids")
    try:
        ids = _array(ids)
        if ids.size and ids.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers, got {_shown(given)}")
        prompt = as_tokens(ids)
    except ValueError as error:
        raise ValueError(f"{name}: prompt: {error}") from None
    if prompt.size == 0:
        raise ValueError(f"{name}: the prompt is empty; give at least one token (for instance BOS)")
    if prompt.min() < 0:
        raise ValueError(f"{name}: prompt: token id {prompt.min()} is negative")
    return prompt


class Draft(msgspec.Struct, kw_only=True, eq=False):
    """Tokens proposed to follow a request's ``length`` committed tokens (prompt included).

    A chain has ``parents`` None. In a tree, ``parents[i]`` is the index of node i's parent, smaller than i, or -1 for
    the root. ``sources[i]`` indexes ``SOURCES``. ``probs[i]`` is the calibrated probability that node i is reached and
    accepted; it never grows along a path. ``prefetched`` says that the draft was ready before it was asked for. A draft
    is void once the length or the policy version has moved.

    Under rejection or block acceptance a drafter that draws its tokens says from what: ``laws`` is a torch tensor
    (L, V) of logits, exactly those that were sampled (processors applied, dtype kept), and ``law_of[i]`` is the row
    that node i was drawn from, or -1 for a point mass. Siblings of one row were drawn in order, without replacement.
    """

    request_id: str
    tokens: Tokens
    length: int
    version: int = 0
    parents: Tokens | None = None
    sources: npt.NDArray[np.uint8] | None = None
    probs: npt.NDArray[np.float32] | None = None
    prefetched: bool = False
    laws: Any = None
    law_of: Tokens | None = None


class Outcome(msgspec.Struct, kw_only=True, eq=False):
    """What one forward pass emitted for a request: ``tokens``, of which the first ``accepted`` had been drafted."""

    request_id: str
    tokens: Tokens
    accepted: int
    drafted: int
    finished: bool = False


class Rollout(msgspec.Struct, kw_only=True, eq=False):
    """A finished response. Per-token arrays have one entry per emitted token, the stop token included.

    ``logprobs`` are of the mode ``logprob_mode``; ``raw_logprobs`` are log-softmax of the untouched logits.
    ``margins`` is the gap between the two best keyed scores: the token stands while no logit moves by half of it.
    ``forwards`` counts the policy passes in which this row decoded. Where decoding failed, ``finish_reason`` is
    ``error``, and ``error`` says why in one line that names the request; the tokens are those of the passes before.
    """

    request_id: str
    group: str
    prompt_key: str
    prompt: Tokens
    tokens: Tokens
    logprobs: npt.NDArray[np.float64]
    raw_logprobs: npt.NDArray[np.float64]
    logprob_mode: Literal["processed", "raw"]
    margins: npt.NDArray[np.float64]
    versions: Tokens
    sources: npt.NDArray[np.uint8]
    finish_reason: FinishReason
    forwards: int
    drafted: int
    accepted: int
    accept_lengths: Tokens
    text: str | None = None
    sample_index: int = 0
    error: str | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters of an engine since it was built. Times are seconds, ``events`` counts named fallbacks and faults.

    Of the passes that decoded, ``passes_plain`` verified no draft and ``passes_probed`` a few against the expectation.
    ``nodes_offered`` counts proposed nodes, ``tokens_drafted`` those that were verified, ``tokens_expected`` what the
    budget expected the passes to emit. ``drafts_asked`` counts requests for which a draft was asked for, and
    ``drafts_prefetched`` those whose draft was ready. ``pass_seconds`` is what the passes took, drafting included, and
    ``plain_seconds`` what plain passes would have taken for the same tokens. ``lossy`` names the settings under which
    the engine is not known to keep the policy's law. ``drafter_version`` is that of the drafter's own weights, None
    where it has none; ``canary_acceptance`` the share of the last canaries' tokens that had been drafted.
    ``read_seconds`` are those of ``draft_seconds`` in which a model caught up on texts. Entry d of ``depths_tested``
    counts the row-forwards that came to a drafted token at depth d + 1, whatever was beside it, ``depths_accepted``
    those of them that kept one.
    """

    forwards: int = 0
    row_forwards: int = 0
    tokens_emitted: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    tokens_prefilled: int = 0
    prompts_shared: int = 0
    preemptions: int = 0
    weight_version: int = 0
    drafter_version: int | None = None
    canary_acceptance: float = math.nan
    forward_seconds: float = 0.0
    draft_seconds: float = 0.0
    read_seconds: float = 0.0
    accept_seconds: float = 0.0
    passes_plain: int = 0
    passes_probed: int = 0
    nodes_offered: int = 0
    tokens_expected: float = 0.0
    drafts_asked: int = 0
    drafts_prefetched: int = 0
    pass_seconds: float = 0.0
    plain_seconds: float = 0.0
    depths_tested: tuple[int, ...] = ()
    depths_accepted: tuple[int, ...] = ()
    lossy: tuple[str, ...] = ()
    events: dict[str, int] = {}

    def count(self, event: str, times: int = 1) -> None:
        """Add ``times`` to the named event."""
        self.events[event] = self.events.get(event, 0) + times

    def count_depths(self, tested: Iterable[int], accepted: Iterable[int]) -> None:
        """Row-forwards whose drafts were tested, and kept, down to these depths."""
        self.depths_tested = added(self.depths_tested, reaching(tested))
        self.depths_accepted = added(self.depths_accepted, reaching(accepted))


def added(counts: Iterable[int], more: Iterable[int], times: int = 1) -> tuple[int, ...]:
    """Entry by entry, ``counts`` and ``times`` as much of ``more``; what one of them lacks is 0."""
    return tuple(a + times * b for a, b in zip_longest(counts, more, fillvalue=0))


def reaching(depths: Iterable[int]) -> tuple[int, ...]:
    """Entry d: how many of ``depths`` are above d."""
    return tuple(np.bincount(list(depths) or [0])[::-1].cumsum()[-2::-1].tolist())


#: What files of a run count: no number there makes a sum or a float overflow.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
#: A token id, of 32 bits as everywhere.
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What a role (``learner``, ``worker-0``, ..) was doing from ``start`` (seconds since the epoch) for ``seconds``.

    ``doing`` is ``decode``, ``load``, ``idle``, ``wait``, ``logprob``, ``train``, ``drafter``, ``publish``, ``save``..;
    ``step`` is the training step that the learner was at, -1 where the role does not know.
    """

    role: str
    doing: str
    start: float
    seconds: float
    step: int = -1
    version: int = -1


class StepRecord(msgspec.Struct, kw_only=True):
    """The metrics of one training step, one line of ``metrics.jsonl``. Definitions: ``paceline.report.definitions``."""

    step: Count
    epoch: Count
    reward: float
    reward_std: float
    rollouts: Count
    tokens: Count
    response_tokens_mean: float
    tokens_per_forward: float
    acceptance: float
    drafted_per_forward: float
    policy_forwards: Count
    loss: float
    grad_norm: float
    lr: float
    kl: float
    entropy: float
    clip_fraction: float
    mismatch_kl: float
    reward_errors: Count
    truncated: float
    weight_version: Count
    seconds: dict[str, float]
    plain_seconds_projected: float
    speedup_projected: float
    plain_seconds_measured: float = math.nan
    speedup_measured: float = math.nan
    plain_seconds_counterfactual: float = math.nan
    verified_share: float = math.nan
    passes_plain: Count = 0
    passes_probed: Count = 0
    prefetch_coverage: float = math.nan
    draft_seconds_share: float = math.nan
    drafter_version: Count | None = None
    canary_acceptance: float = math.nan
    draft_trained: bool = False
    draft_reason: str = ""
    draft_loss: float = math.nan
    draft_overlaps: list[float] = []
    draft_grad_norm: float = math.nan
    draft_train_seconds: float = math.nan
    draft_drift_seconds: float = math.nan
    draft_growth_seconds: float = math.nan
    draft_propose_seconds: float = math.nan
    draft_read_seconds: float = math.nan
    draft_refit_seconds: float = math.nan
    draft_stall_seconds: float = math.nan
    draft_gain_seconds: float = math.nan
    ages: list[Count] = []
    importance_mean: float = math.nan
    importance_max: float = math.nan
    importance_beyond: float = math.nan
    effective_samples: float = math.nan
    exposed_generation_seconds: float = math.nan
    exposed_training_seconds: float = math.nan
    overlap_share: float = math.nan
    idle_shares: dict[str, float] = {}
    groups_waiting: Count = 0
    workers_up: Count = 0
    identity: str = "not checked"
    lossy: list[str] = []
    eval_reward: float = math.nan
    task_rewards: dict[str, float] = {}
    accept_lengths: list[Count] = []
    depths_tested: list[Count] = []
    depth_acceptance: list[float] = []
    token_sources: dict[str, Count] = {}
    events: dict[str, Count] = {}

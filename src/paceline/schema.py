"""The records that cross rooms: requests, drafts, outcomes, rollouts and steps.

Token ids are one-dimensional int32 arrays everywhere. Nothing here imports torch.
"""

import math
from collections.abc import Iterable
from itertools import zip_longest
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from paceline.terminal import printable

Tokens = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort"]

#: Where an emitted token came from. 0: the policy's own sample beyond any draft; others: a draft that was accepted,
#: copied from the request's own text (``prompt``), a sibling in flight, an earlier rollout, another drafter, or
#: answers to other prompts (``elsewhere``), the only token that a grammar allowed (``forced``), or a model that drafts,
#: a head of the policy's among them (``model``).
SOURCES: tuple[str, ...] = ("policy", "prompt", "sibling", "history", "other", "elsewhere", "forced", "model")

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


def as_tokens(ids: Any) -> Tokens:
    """A one-dimensional int32 array of ``ids``; ValueError where it is not one."""
    array = np.ascontiguousarray(ids, dtype=np.int32)
    if array.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {array.shape}")
    return array


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
        if not self.text.strip():
            raise ValueError(f"text: {self.text!r} must be a {self.kind}, not empty")
        if any(token < 0 for token in self.trigger):
            raise ValueError(f"trigger: {self.trigger!r} must be token ids")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one response is sampled. A value that cannot be honoured raises ValueError at construction.

    Processors apply in this order at every position: ``allowed_token_ids``, ``grammar``, ``bad_words``,
    ``min_tokens``, ``logit_bias``, repetition, presence and frequency penalty, ``temperature``, ``min_p``, ``top_k``,
    ``top_p``.
    ``temperature`` 0 is greedy. ``seed`` None derives the seed from the request id, so no two requests share noise.
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
        checks = (
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "a finite number >= 0"),
            ("top_k", self.top_k >= 0, ">= 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty), "> 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "finite"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "finite"),
            ("logit_bias", all(not math.isnan(b) and b < math.inf for b in self.logit_bias.values()), "below +inf"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("bad_words", all(self.bad_words), "free of empty sequences"),
            ("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "not empty"),
            ("stop", all(self.stop), "free of empty strings"),
            ("n", self.n >= 1, ">= 1"),
        )
        for name, holds, wanted in checks:
            if not holds:
                raise ValueError(f"sampling parameter {name}={getattr(self, name)!r}: must be {wanted}")


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
        self.prompt = as_tokens(self.prompt)
        if self.prompt.size == 0:
            raise ValueError(
                f"request {self.request_id}: the prompt is empty; give at least one token (for instance BOS)"
            )
        if not self.prompt_key:
            self.prompt_key = xxhash.xxh3_64_hexdigest(self.prompt.tobytes())

    @property
    def seed(self) -> int:
        """The request's noise key, 64 bits."""
        return self.params.seed if self.params.seed is not None else derive_seed("request", self.request_id)


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
    ``forwards`` counts the policy passes in which this row decoded.
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

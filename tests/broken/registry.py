"""All targets of an audit on toy policies: the deliberately broken engines, and the right ones that must pass.

A target is built with ``build(policy, drafter, **options)``: ``policy`` is a `ToyPolicy`, ``drafter`` the `ToyPolicy`
that its drafts are drawn from, or None for the same engine without speculation; ``options`` are those of `ToyEngine`
(``seed``, ``slots``, ``budget``, ``context``, ``decode``) and of its drafter (``depth``, ``width``, ``ragged``). What
comes back is a `ToyEngine`. Build it anew for every run: verifiers may keep state.

Every broken target is one of the controls (``base``) with one fault. It shows on ``policy`` with a drafter of
``toy_drafter(policy)`` (or ``drafter``, where one is named), with ``params`` and ``options``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from broken import acceptance, logprobs, processors, stops
from broken.control import PlainRejection, TryInOrder, builder
from paceline.audit.engine import ToyEngine
from paceline.audit.toys import ToyPolicy, constant, fixture, markov, tail, toy_drafter, wide
from paceline.sampling.accept import Acceptance, accept
from paceline.schema import SamplingParams

Policy = Callable[[], ToyPolicy]
PARAMS = SamplingParams(max_tokens=16)


@dataclass(frozen=True)
class Target:
    """An engine to audit: a name, one line about it, and how to build it."""

    name: str
    says: str
    build: Callable[..., ToyEngine]


@dataclass(frozen=True)
class Broken(Target):
    """A target with one fault, ``says``, of ``row`` in the table of faults met in the field; and where it shows.

    ``kind`` is what is wrong with speculation on: the ``law`` of the tokens; their ``noise`` (what should be equal is
    not, or what should differ is equal); ``logprobs``; the ``ends`` of responses; ``counters``; ``errors`` (one where
    there should be none, none where there should be one); ``silent`` (speculation is off, and no event says so).
    ``make_params`` is how sampling parameters are made for it.
    """

    row: str
    kind: str
    base: str
    policy: Policy
    drafter: Callable[[ToyPolicy], ToyPolicy] = toy_drafter
    params: SamplingParams = PARAMS
    options: Mapping[str, Any] = field(default_factory=dict)
    make_params: Callable[..., SamplingParams] = SamplingParams


def top_two_policy() -> ToyPolicy:
    """The policy of fault A2, whose law after top-k 2 is (1/3, 2/3, 0)."""
    return constant("top two", (0.3, 0.6, 0.1))


def top_two_drafter(policy: ToyPolicy) -> ToyPolicy:
    """The drafter of fault A2."""
    return constant("top two, drafter", (0.5, 0.3, 0.2))


def falling_logits() -> ToyPolicy:
    """The policy of fault D1: logits (2, 1, 0), of which one token's penalty levels two."""
    return ToyPolicy("falling", torch.tensor([[[2.0, 1.0, 0.0]]], dtype=torch.float64))


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, **fields})


def _own(acceptance: Acceptance) -> Callable[..., ToyEngine]:
    return builder(lambda: partial(accept, acceptance=acceptance))


CONTROLS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("paceline", "paceline's own acceptance, coupled", _own("coupled")),
        Target("paceline-rejection", "paceline's own acceptance, rejection", _own("rejection")),
        Target("paceline-block", "paceline's own acceptance, block verification", _own("block")),
        Target("plain-rejection", "rejection in plain Python, token by token", builder(PlainRejection)),
        Target("try-in-order", "A18: likeliest tokens in order, masked once rejected", builder(TryInOrder, point=True)),
    )
}


def _law(
    name: str, row: str, says: str, build: Callable[..., ToyEngine], policy: Policy = fixture, **where: Any
) -> Broken:
    return Broken(name, says, build, row=row, kind="law", base="plain-rejection", policy=policy, **where)


def _paceline(
    name: str, row: str, kind: str, says: str, build: Callable[..., ToyEngine], policy: Policy = markov, **where: Any
) -> Broken:
    return Broken(name, says, build, row=row, kind=kind, base="paceline", policy=policy, **where)


_HALF = _params(temperature=0.5)

BROKEN: dict[str, Broken] = {
    target.name: target
    for target in (
        _law("argmax-of-soft-law", "A1", "drafts the argmax, reports the soft law",
             builder(PlainRejection, drafting=acceptance.ArgmaxOfSoftLaw)),
        _law("law-before-top-k", "A2", "draws drafts after top-k, reports the law before it",
             builder(PlainRejection, drafting=acceptance.LawBeforeTopK),
             policy=top_two_policy, drafter=top_two_drafter, params=_params(top_k=2)),
        _law("fresh-sample", "A3", "a fresh sample after a rejection instead of the residual",
             builder(acceptance.FreshSample)),
        _law("one-stream", "A4", "the drafter's noise accepts and recovers",
             builder(acceptance.OneStream, drafting=acceptance.OneStreamDrafter)),
        _law("zeroed-in-place", "A6", "the drafted token's probability is zeroed in place before it is read",
             builder(acceptance.ZeroedInPlace, point=True)),
        _law("temperature-ignored", "A7", "the temperature is not applied",
             builder(acceptance.TemperatureIgnored), params=_HALF),
        _law("temperature-twice", "A7", "the temperature is applied twice",
             builder(acceptance.TemperatureTwice), params=_HALF),
        _law("probabilities-as-logits", "A7", "probabilities are passed where logits are expected",
             builder(acceptance.ProbabilitiesAsLogits)),
        _law("argmax-of-residual", "A8", "the argmax of the residual instead of a draw",
             builder(acceptance.ArgmaxOfResidual)),
        _law("no-truncation", "A9", "top-k, top-p and min-p are skipped for drafts",
             builder(acceptance.NoTruncation), params=_params(top_k=1)),
        _paceline("own-noise", "A10", "noise", "every engine that is built draws its own noise",
                  builder(acceptance.OwnNoise)),
        _paceline("shared-stream", "A11", "noise", "requests without a seed share one stream",
                  builder(engine=acceptance.SharedStream), policy=wide, params=_params(n=64, max_tokens=20)),
        _paceline("batch-keyed-noise", "A12", "noise", "tokens depend on who shares the batch",
                  builder(engine=acceptance.BatchKeyedNoise)),
        _law("uniforms-24", "A13", "uniforms of 24 bits: every second token of the tail never comes",
             builder(acceptance.Uniforms24), policy=tail, params=_params(n=64, max_tokens=64)),
        _law("greedy-acceptance", "A15", "only the argmax is accepted, at temperature 1",
             builder(acceptance.GreedyAcceptance)),
        _paceline("zero-for-accepted", "B1", "logprobs", "log-probability 0 for accepted tokens",
                  builder(lambda: logprobs.zero_for_accepted)),
        _paceline("silently-plain", "B3", "silent", "raw log-probabilities switch speculation off without a word",
                  builder(engine=logprobs.SilentlyPlain), params=_params(logprobs="raw")),
        _paceline("processed-in-place", "B4", "logprobs", "raw log-probabilities are read after the processors",
                  builder(lambda: logprobs.processed_in_place), params=_params(temperature=0.5, logprobs="raw")),
        _paceline("first-of-run", "B7", "logprobs", "only the first token of a run has a log-probability",
                  builder(lambda: logprobs.first_of_run)),
        _paceline("wrong-mode", "B8", "logprobs", "raw values under the name of processed ones",
                  builder(engine=logprobs.WrongMode), params=_HALF),
        _paceline("raw-where-accepted", "B9", "logprobs", "the mode differs with speculation on and off",
                  builder(lambda: logprobs.raw_where_accepted), params=_HALF),
        _paceline("cap-hides-stop", "C1", "ends", "a length cap in the same run hides a stop",
                  builder(engine=stops.CapHidesStop), params=_params(max_tokens=5)),
        _paceline("leaks-past-stop", "C3", "ends", "tokens and log-probabilities past the stop leak",
                  builder(engine=stops.LeaksPastStop)),
        _paceline("last-token-only", "C4", "ends", "a stop inside a draft does not stop",
                  builder(engine=stops.LastTokenOnly)),
        _paceline("one-more", "C5", "ends", "one token more than max_tokens",
                  builder(engine=stops.OneMore), params=_params(max_tokens=7)),
        _paceline("one-fewer", "C5", "ends", "one token fewer than max_tokens",
                  builder(engine=stops.OneFewer), params=_params(max_tokens=7)),
        _paceline("counts-beyond-end", "C9", "counters", "accepted tokens are counted beyond the end",
                  builder(engine=stops.CountsBeyondEnd)),
        _paceline("empty-draft-fails", "C10", "errors", "an empty draft is an error",
                  builder(engine=stops.EmptyDraftFails), options={"ragged": True}),
        _paceline("cuts-early", "C11", "ends", "responses near the context limit are cut a draft and a token early",
                  builder(engine=stops.CutsEarly), options={"context": 16}, params=_params(max_tokens=64)),
        _law("prefix-of-pass", "D1", "the penalties see no drafted token",
             builder(processors.PrefixOfPass), policy=falling_logits, params=_params(frequency_penalty=1.0)),
        _paceline("zero-penalty", "D2", "errors", "a repetition penalty of 0 is taken",
                  builder(), make_params=processors.zero_penalty_params),
        _law("state-keeps-rejected", "D5", "rejected tokens stay in the state of the penalties",
             builder(processors.StateKeepsRejected), policy=markov, params=_params(frequency_penalty=1.0)),
        _law("parameters-ignored", "D6", "min-p and logit bias are ignored for drafts",
             builder(processors.ParametersIgnored), params=_params(min_p=0.5, logit_bias={2: 1.0})),
        _paceline("stop-strings-ignored", "D6", "errors", "stop strings without a tokenizer are dropped",
                  builder(engine=processors.StopStringsIgnored), params=_params(stop=("a",))),
    )
}  # fmt: skip

"""Runs an audit: every case with speculation on, and off where that tells more, then all checks and one verdict."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from paceline.audit import conduct, laws
from paceline.audit.certificate import Certificate, Check
from paceline.audit.evidence import Evidence
from paceline.audit.martingale import join
from paceline.audit.subject import Subject
from paceline.audit.toys import ToyPolicy, response_law
from paceline.audit.verdict import Sums, certify
from paceline.engines.base import Engine
from paceline.engines.intake import RequestError, expand
from paceline.schema import (
    EngineStats,
    FailedRequestError,
    PacelineError,
    Rollout,
    RolloutRequest,
    SamplingParams,
    as_tokens,
)

_REFUSALS = "refusals"
_IDLE_STEPS = 10_000
_ENTRIES_AT_ONCE = 1 << 21
Progress = Callable[[str], None]


def audit(
    subject: Subject,
    *,
    seed: int = 0,
    scale: float = 1.0,
    only: Sequence[str] = (),
    on_progress: Progress | None = None,
) -> Certificate:
    """Audit ``subject``. ``scale`` multiplies the number of requests, ``only`` names the cases (default: all).

    Whatever the engine raises is a finding, not the end of the audit. Raises PacelineError for a case that is unknown,
    and for an engine that cannot be built.
    """
    started = time.perf_counter()
    cases = list(subject.cases(scale))
    unknown = set(only) - {case.name for case in cases} - {_REFUSALS}
    if unknown:
        known = ", ".join([case.name for case in cases] + [_REFUSALS])
        raise PacelineError(f"the audit has no case {sorted(unknown)[0]!r}; there are {known}")
    sums = Sums()
    if not only or _REFUSALS in only:
        sums.checks += _refusals(subject)
    rng = np.random.default_rng(seed)
    for case in cases:
        if not only or case.name in only:
            if on_progress is not None:
                on_progress(case.name)
            _audit_case(subject, case, seed, rng, sums)
    certificate = certify(subject, sums, seed, time.perf_counter() - started)
    for check in certificate.checks:
        if check.outcome != "pass":
            check.fault = subject.known_fault(check)
    return certificate


def _audit_case(subject: Subject, case: Any, seed: int, rng: np.random.Generator, sums: Sums) -> None:
    params = subject.make_params(**case.params)
    requests = case.make_requests(params, seed)
    on = _run(subject, case, requests, sums, "speculation on", speculate=case.drafted)
    if on is None:
        return
    rollouts, stats = on
    sums.rollouts += len(rollouts)
    sums.tokens += sum(len(rollout.tokens) for rollout in rollouts)
    sums.drafted += sum(rollout.drafted for rollout in rollouts)
    sums.accepted += sum(rollout.accepted for rollout in rollouts)
    sums.lossy |= set(stats.lossy)
    for rollout in rollouts:
        sums.digest.update(rollout.request_id.encode() + rollout.tokens.tobytes())
    terms = subject.terms(case, params)
    sums.checks += [
        _first("ends", case, [conduct.wrong_end(r, params, terms) for r in rollouts], rollouts),
        _first("records", case, [conduct.wrong_record(r) for r in rollouts], rollouts),
    ]
    if case.drafted:
        sums.checks.append(_speculated(case, stats))
    if stats.tokens_emitted:
        exact = not getattr(case, "estimates", False)
        sums.checks.append(_first("counters", case, [conduct.wrong_counters(stats, rollouts, drafted=exact)], []))
    if not case.cells and (subject.keyed or not subject.has_witness):
        off = _run(subject, case, requests, sums, "speculation off", speculate=False)
        if off is not None and subject.keyed:
            sums.checks.append(_equal("on against off", subject, case, params, rollouts, off[0]))
        elif off is not None:
            _add(sums, laws.on_off_checks(case.name, rollouts, off[0]))
    _reruns(subject, case, params, requests, rollouts, sums)
    _judge_laws(subject, case, params, requests, rollouts, rng, sums)


def _judge_laws(
    subject: Subject,
    case: Any,
    params: SamplingParams,
    requests: Sequence[RolloutRequest],
    rollouts: Sequence[Rollout],
    rng: np.random.Generator,
    sums: Sums,
) -> None:
    """Everything that the witness's laws say about the rollouts."""
    if not subject.has_witness:
        return
    evidence = Evidence()
    wrong: list[str | None] = []
    whole: dict[str, float] = {}
    terms = subject.terms(case, params)
    pieces: list[tuple[np.ndarray, ...]] = []
    held = edges = 0
    for index, rollout in enumerate(rollouts):
        if case.cells and index >= 4:
            wrong.append(None)  # every position has the same law; a few responses show the log-probabilities
            continue
        raw_TV, law_TV = subject.laws(case, rollout, params)
        positions = np.arange(len(rollout.tokens))
        with np.errstate(divide="ignore"):
            processed_T = np.log(law_TV[positions, rollout.tokens])
        top_T = raw_TV.max(1)
        total_T = top_T + np.log(np.exp(raw_TV - top_T[:, None]).sum(1))
        raw_T = raw_TV[positions, rollout.tokens] - total_T
        both = subject.knows_both_modes
        wrong.append(conduct.wrong_logprobs(rollout, params, processed_T, raw_T, subject.tolerance, both=both))
        whole[rollout.request_id] = float(processed_T.sum())
        if case.cells or params.temperature == 0:
            continue
        # Where rounding decides whether a token is allowed, the witness's law says nothing about it.
        at = [t for t in np.flatnonzero(processed_T == -np.inf) if subject.at_edge(case, rollout, int(t), params)]
        edges += len(at)
        kept = np.delete(positions, at)
        pieces.append((rollout.tokens[kept].astype(np.int64), law_TV[kept], np.full(len(kept), index), kept))
        evidence.limits[index] = min(params.max_tokens, terms.context - len(rollout.prompt))
        held += law_TV.size
        if held > _ENTRIES_AT_ONCE:
            _take_in(evidence, pieces, terms.stop_ids, rng)
            pieces, held = [], 0
    _take_in(evidence, pieces, terms.stop_ids, rng)
    sums.checks.append(_first("log-probabilities", case, wrong, rollouts))
    _add(sums, laws.law_checks(case.name, evidence, rng, edges))
    for name, parts in (
        ("sharpness", evidence.surprise),
        ("likeliest token", evidence.likeliest),
        ("stops", evidence.stops),
    ):
        if parts:
            sums.watch(name, join(parts))
    policy = getattr(case, "policy", None)
    if isinstance(policy, ToyPolicy):
        _add(sums, _enumerated(case, policy, params, requests, rollouts))
    if params.n > 1 and not case.cells:
        _add(sums, [laws.diversity_check(case.name, rollouts, whole)])


def _take_in(
    evidence: Evidence, pieces: Sequence[tuple[np.ndarray, ...]], stop_ids: Sequence[int], rng: np.random.Generator
) -> None:
    if pieces:
        tokens_N, laws_NV, sequence_N, position_N = (np.concatenate(part) for part in zip(*pieces, strict=True))
        evidence.add(tokens_N, laws_NV, sequence_N, position_N, stop_ids, rng)


def _enumerated(
    case: Any,
    policy: ToyPolicy,
    params: SamplingParams,
    requests: Sequence[RolloutRequest],
    rollouts: Sequence[Rollout],
) -> laws.Designed:
    """Checks against laws of whole responses, which toy policies have."""
    if case.cells:
        law_V = np.exp(policy.logits(np.zeros((1, 2), dtype=np.int64))[0].double().log_softmax(-1).numpy())
        return [laws.cells_check(case.name, rollouts, case.cells, law_V)]
    if params.temperature == 0 or policy.table.numel() > 4096 or "context" in case.options:
        return []
    try:
        known = {
            prompt: response_law(policy, params, as_tokens(list(prompt)))
            for prompt in {tuple(request.prompt.tolist()) for request in requests}
        }
    except PacelineError:
        return []  # parameters that look further back than two tokens
    mixed = [known[tuple(request.prompt.tolist())] for request in requests]
    checks: laws.Designed = []
    if params.max_tokens > 1:
        checks.append(laws.pairs_check(case.name, rollouts, np.mean([law.pairs(0) for law in mixed], axis=0)))
    if policy.ends(params):
        checks.append(laws.length_check(case.name, rollouts, np.mean([law.lengths_T for law in mixed], axis=0)))
    return checks


def _run(
    subject: Subject,
    case: Any,
    requests: Sequence[RolloutRequest],
    sums: Sums,
    what: str,
    *,
    speculate: bool,
    slots: int | None = None,
) -> tuple[list[Rollout], EngineStats] | None:
    """The responses of a fresh engine in the order of the samples; a failure is a check that failed.

    An engine that cannot be built, for a lossy setting say, is bad input: its PacelineError ends the audit.
    """
    engine = subject.engine(case, speculate, slots=slots)
    try:
        with closing(engine):
            rollouts = generate(engine, requests)
            stats = engine.stats()
    except RequestError as error:
        says = f"the engine does not offer this: {error}"
        sums.checks.append(Check(name="refused", case=case.name, outcome="refused", says=says))
        return None
    except Exception as error:  # noqa: BLE001  whatever an engine under audit raises is a finding about it
        says = f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        sums.checks.append(Check(name="errors", case=case.name, outcome="fail", says=says))
        return None
    return rollouts, stats


def generate(engine: Engine, requests: Sequence[RolloutRequest]) -> list[Rollout]:
    """Submit and step until every sample is there; in the order of the requests and their samples.

    Raises PacelineError where the engine stops making progress or hands out a response that nobody asked for.
    """
    order = {sample.request_id: at for at, (sample, _) in enumerate(s for r in requests for s in expand(r))}
    engine.submit(list(requests))
    found: dict[str, Rollout] = {}
    idle = 0
    while len(found) < len(order):
        done = engine.step()
        for rollout in done:
            if rollout.request_id not in order or rollout.request_id in found:
                raise PacelineError(f"the engine returned {rollout.request_id!r}, which is not outstanding")
            if rollout.finish_reason == "error":
                raise FailedRequestError(rollout.error or rollout.request_id, [rollout])
            found[rollout.request_id] = rollout
        idle = 0 if done else idle + 1
        if idle > _IDLE_STEPS:
            raise PacelineError(f"{len(order) - len(found)} responses are missing after {idle} steps without one")
    return [found[name] for name in order]


def _reruns(
    subject: Subject,
    case: Any,
    params: SamplingParams,
    requests: Sequence[RolloutRequest],
    rollouts: Sequence[Rollout],
    sums: Sums,
) -> None:
    """The same requests once more: in another engine, and in other company."""
    some = list(requests[: max(1, subject.compared // requests[0].params.n)])
    if getattr(case, "repeats", False):
        alone = [
            _run(subject, case, some, sums, f"{time} alone", speculate=case.drafted, slots=1)
            for time in ("once", "again")
        ]
        if alone[0] is not None and alone[1] is not None:
            sums.checks.append(_equal("alone, again", subject, case, params, alone[0][0], alone[1][0]))
    if case.cells or not subject.keyed:
        return
    count = conduct.samples_of(some)
    first = _run(subject, case, some, sums, "run again", speculate=True)
    if first is not None:
        sums.checks.append(_equal("replicas", subject, case, params, rollouts[:count], first[0]))
    turned = _run(subject, case, some[::-1], sums, "in another order, 3 at a time", speculate=True, slots=3)
    if turned is not None:
        back = {rollout.request_id: rollout for rollout in turned[0]}
        same = [back[rollout.request_id] for rollout in rollouts[:count]]
        sums.checks.append(_equal("batch", subject, case, params, rollouts[:count], same))


def _refusals(subject: Subject) -> list[Check]:
    """What cannot be honoured must be refused, never ignored."""
    checks = []
    try:
        subject.make_params(repetition_penalty=0.0)
    except ValueError as error:
        says, outcome = f"repetition_penalty 0 is refused: {error}", True
    else:
        says, outcome = "repetition_penalty 0 is taken", False
    checks.append(Check(name="refusals", case="parameters", outcome="pass" if outcome else "fail", says=says))
    case = subject.cases(1.0)[0]
    params = subject.make_params(max_tokens=4, stop=("a",))
    if subject.terms(case, params).decode is None:
        request = RolloutRequest(request_id="refusals/0", prompt=as_tokens([1]), params=params)
        with closing(subject.engine(case, speculate=True)) as engine:
            try:
                engine.submit([request])
            except (PacelineError, ValueError) as error:
                says, outcome = f"stop strings without a decoder are refused: {error}", True
            else:
                says, outcome = "stop strings are taken by an engine that cannot decode", False
        checks.append(Check(name="refusals", case="stop strings", outcome="pass" if outcome else "fail", says=says))
    return checks


def _first(name: str, case: Any, found: Sequence[str | None], rollouts: Sequence[Rollout]) -> Check:
    """Fails with the first thing that is wrong, and how many are."""
    wrong = [index for index, says in enumerate(found) if says is not None]
    if not wrong:
        return Check(name=name, case=case.name, outcome="pass", says="nothing wrong", draws=len(found))
    at = wrong[0]
    where = f"{rollouts[at].request_id}: " if rollouts else ""
    more = f" ({len(wrong)} of {len(found)} responses)" if rollouts else ""
    return Check(name=name, case=case.name, outcome="fail", says=f"{where}{found[at]}{more}", draws=len(found))


def _speculated(case: Any, stats: EngineStats) -> Check:
    says = f"{stats.tokens_drafted} tokens drafted, {stats.tokens_accepted} accepted"
    silent = not stats.tokens_drafted
    # Behind a refit the sentinel may give up a drafter that is as it should be.
    lost = "drafter_lost" in stats.events and not getattr(case, "refit", "")
    if silent or lost:
        what = "the drafter was lost" if lost else "nothing was drafted"
        says = f"{what}; events: {stats.events or 'none'}"
    return Check(name="speculation", case=case.name, outcome="fail" if silent or lost else "pass", says=says)


def _equal(
    name: str, subject: Subject, case: Any, params: SamplingParams, a: Sequence[Rollout], b: Sequence[Rollout]
) -> Check:
    found = conduct.compare(a, b, lambda rollout, position: subject.at_edge(case, rollout, position, params))
    if found.first is not None:
        return Check(name=name, case=case.name, outcome="fail", says=found.first, draws=found.compared)
    if found.gap > 2 * subject.tolerance:
        says = f"equal tokens whose log-probabilities differ by {found.gap:.3g}"
        return Check(name=name, case=case.name, outcome="fail", says=says, draws=found.compared)
    if subject.bitwise and (found.near_ties or not found.same_bits):
        says = f"log-probabilities or margins differ in their last bits, {found.near_ties} tokens by a near tie"
        return Check(name=name, case=case.name, outcome="fail", says=says, draws=found.compared)
    says = f"{found.compared} responses equal" + (f", {found.near_ties} up to a near tie" if found.near_ties else "")
    says += ", bit for bit" if subject.bitwise else ""
    return Check(name=name, case=case.name, outcome="pass", says=says, draws=found.compared)


def _add(sums: Sums, found: laws.Designed) -> None:
    for check, design in found:
        sums.checks.append(check)
        if design is not None:
            sums.designs.append((check, design))

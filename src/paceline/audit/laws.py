"""The statistical checks of a case: its tokens, pairs, ends, lengths and groups against the laws of a witness."""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.audit import martingale
from paceline.audit.certificate import Check
from paceline.audit.evidence import Evidence
from paceline.audit.martingale import Increments
from paceline.audit.power import Design, LawTest, ProbabilityTest, SurpriseTest, TwoSampleTest, mean_probability
from paceline.audit.stats import Result, g_test, pair_uniformity, two_sample_g_test, uniformity
from paceline.audit.tails import Floats
from paceline.schema import Rollout

BINS, PAIR_BINS = 16, 8

Designed = list[tuple[Check, Design | None]]


def law_checks(case: str, evidence: Evidence, rng: np.random.Generator, edges: int = 0) -> Designed:
    """Tokens by probability and by id, pairs, sharpness, the likeliest token and stops, position by position.

    ``edges`` tokens were left out, of which rounding decides whether they are inside a cut-off.
    """
    if not evidence.draws:
        return []
    draws = evidence.draws
    never = _never(case, evidence, edges)
    by_probability, by_id, sequence = evidence.padded(rng)
    # A deviation of what was emitted is thinned by the fill: n positions of which a share s is real see d as s d.
    share = draws / len(sequence)
    pairs = len(sequence) - len(np.unique(sequence))
    stopped = evidence.stopped
    surprise, likeliest = martingale.join(evidence.surprise), martingale.join(evidence.likeliest)
    varied = float(surprise.variance_N.mean())
    tests = (
        martingale.martingale_test(surprise, stopped=stopped),
        martingale.martingale_test(likeliest, stopped=stopped),
    )
    checks: Designed = [
        (never, None),
        (_check("token law", case, uniformity(by_probability, BINS), "by probability"),
         LawTest(int(draws * share), BINS)),
        (_check("token law", case, uniformity(by_id, BINS), "by id"), LawTest(int(draws * share), BINS)),
        (_check("pair law", case, pair_uniformity(by_probability, sequence, PAIR_BINS), "by probability"),
         LawTest(max(int(pairs * share**2), 1), PAIR_BINS * (PAIR_BINS - 1) + 1)),
        (_check("sharpness", case, tests[0], "log-probability less its mean"),
         SurpriseTest(draws, varied, stopped) if varied > 0 else None),
        (_check("likeliest token", case, tests[1], "how often it was emitted"), _probability(likeliest, stopped)),
    ]  # fmt: skip
    if evidence.stops:
        stops = martingale.join(evidence.stops)
        result = martingale.martingale_test(stops, stopped=True)
        checks.append((_check("stop law", case, result, "how often a response stopped"), _probability(stops, True)))
    return checks


def length_check(case: str, rollouts: Sequence[Rollout], law_T: Floats) -> tuple[Check, Design]:
    """Lengths against their law, P(length = n) for n = 0 .. T."""
    counts = np.bincount([len(rollout.tokens) for rollout in rollouts], minlength=len(law_T))
    if len(counts) > len(law_T):
        law_T = np.pad(law_T, (0, len(counts) - len(law_T)))
    return _check("length law", case, g_test(counts, law_T), "lengths"), _law_design(counts.sum(), law_T)


def pairs_check(case: str, rollouts: Sequence[Rollout], law_VV: Floats) -> tuple[Check, Design]:
    """The first two tokens against their joint law, (V, V); what is missing to 1 are responses of one token."""
    vocabulary = law_VV.shape[1]
    cells = [int(r.tokens[0]) * vocabulary + int(r.tokens[1]) if len(r.tokens) > 1 else vocabulary**2 for r in rollouts]
    law = np.append(law_VV.ravel(), max(1 - float(law_VV.sum()), 0.0))
    law[law < 1e-12] = 0.0
    counts = np.bincount(cells, minlength=len(law))
    return _check("first pair", case, g_test(counts, law / law.sum()), "tokens 0 and 1"), _law_design(len(cells), law)


def cells_check(case: str, rollouts: Sequence[Rollout], cells_V: Sequence[int], law_V: Floats) -> tuple[Check, Design]:
    """Tokens of a law that does not depend on the prefix, put together in cells."""
    tokens = np.concatenate([rollout.tokens for rollout in rollouts])
    law = np.bincount(cells_V, law_V)
    counts = np.bincount(np.asarray(cells_V)[tokens], minlength=len(law))
    result = g_test(counts, law, min_expected=5.0)
    return _check("tail law", case, result, f"cells {counts.tolist()}"), LawTest(len(tokens), len(law))


def diversity_check(case: str, rollouts: Sequence[Rollout], logprob_of: Mapping[str, float]) -> tuple[Check, None]:
    """Equal siblings against their expectation; ``logprob_of`` gives the log-probability of each whole response."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group or rollout.prompt_key, []).append(rollout)
    said = [[r.tokens.tobytes() for r in group] for group in groups.values()]
    increments = martingale.collisions(said, [[logprob_of[r.request_id] for r in group] for group in groups.values()])
    equal = sum(len(group) - len(set(group)) for group in said)
    result = martingale.martingale_test(increments)
    return _check("group diversity", case, result, f"{equal} of {len(rollouts)} siblings repeat another"), None


def on_off_checks(case: str, on: Sequence[Rollout], off: Sequence[Rollout], first: int = 4) -> Designed:
    """Speculation on against off, where nobody knows the law: early tokens and lengths as two samples."""
    checks: Designed = []
    for position in range(first):
        tokens = [[int(r.tokens[position]) for r in side if len(r.tokens) > position] for side in (on, off)]
        if not (tokens[0] and tokens[1]):
            break
        top = max(map(max, tokens)) + 1
        counts = [np.bincount(side, minlength=top) for side in tokens]
        result = two_sample_g_test(counts[0], counts[1])
        design = TwoSampleTest(min(map(len, tokens)), result.df + 1) if result.df else None
        checks.append((_check("on against off", case, result, f"tokens at position {position}"), design))
    lengths = [[len(r.tokens) for r in side] for side in (on, off)]
    counts = [np.bincount(side, minlength=max(map(max, lengths)) + 1) for side in lengths]
    result = two_sample_g_test(counts[0], counts[1])
    design = TwoSampleTest(min(map(len, lengths)), result.df + 1) if result.df else None
    checks.append((_check("on against off", case, result, "lengths"), design))
    return checks


def _check(name: str, case: str, result: Result, says: str) -> Check:
    """The outcome is decided once all p-values are known."""
    method = f"{says}: {result.method}" + (f", {result.df} degrees of freedom" if result.df else "")
    return Check(name=name, case=case, outcome="pass", says=method, draws=result.draws, p_value=result.p_value,
                 statistic=float(result.statistic))  # fmt: skip


def _never(case: str, evidence: Evidence, edges: int) -> Check:
    count = len(evidence.never)
    says = "no emitted token has probability 0" + (f", {edges} at a rounding edge left out" if edges else "")
    if count:
        sequence, position, token = evidence.never[0]
        says = f"{count} tokens of probability 0, the first {token} at position {position} of response {sequence}"
    return Check(name="support", case=case, outcome="fail" if count else "pass", says=says, draws=evidence.draws)


def _probability(increments: Increments, stopped: bool) -> Design | None:
    """The design of a test of hits whose probability varies: their mean, which errs on the safe side."""
    if not len(increments):
        return None
    probability = mean_probability(float(increments.variance_N.mean()))
    return ProbabilityTest(len(increments), probability, stopped) if 0 < probability < 1 else None


def _law_design(draws: int, law: Floats) -> Design:
    return LawTest(int(draws), max(int((draws * law >= 5).sum()), 2))

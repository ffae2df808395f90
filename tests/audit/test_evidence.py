"""Evidence of responses that end by themselves: how many positions there are is random, and the tests must hold."""

import numpy as np

from paceline.audit.evidence import Evidence
from paceline.audit.martingale import martingale_test
from paceline.audit.stats import clopper_pearson, uniformity

LAW = np.array([0.4, 0.25, 0.35])  # token 2 stops
LIMIT = 40


def gathered(rng, responses):
    evidence = Evidence()
    lengths = np.minimum(rng.geometric(LAW[2], responses), LIMIT)
    tokens = rng.choice(2, lengths.sum(), p=LAW[:2] / LAW[:2].sum())
    ends = np.cumsum(lengths) - 1
    tokens[ends[lengths < LIMIT]] = 2
    sequence = np.repeat(np.arange(responses), lengths)
    evidence.limits = dict.fromkeys(range(responses), LIMIT)
    evidence.add(tokens, np.tile(LAW, (len(tokens), 1)), sequence, np.arange(len(tokens)), [2], rng)
    return evidence


def test_the_fill_fixes_the_number_of_positions_and_keeps_the_level():
    filled, weighed, bounded = [], [], []
    rng = np.random.default_rng(0)
    for _ in range(2000):
        evidence = gathered(rng, 12)
        by_probability, by_id, sequence = evidence.padded(rng)
        assert len(by_probability) == len(by_id) == len(sequence) == 12 * LIMIT
        filled.append(uniformity(by_id, 8).p_value)
        weighed.append(martingale_test(evidence.stops[0]).p_value)
        bounded.append(martingale_test(evidence.stops[0], stopped=True).p_value)
    low, high = clopper_pearson(int((np.array(filled) <= 0.02).sum()), len(filled), 0.999)
    assert low < 0.02 < high
    assert np.mean(np.array(bounded) <= 0.02) <= 0.02
    assert np.mean(bounded) > np.mean(weighed)


def test_a_wrong_law_of_stops_is_seen_through_the_fill():
    rng = np.random.default_rng(1)
    evidence = gathered(rng, 200)
    wrong = Evidence(limits=evidence.limits)
    tokens = np.concatenate([rng.choice(2, 20) for _ in range(200)])  # responses that never stop
    where = np.repeat(np.arange(200), 20), np.tile(np.arange(20), 200)
    wrong.add(tokens, np.tile(LAW, (len(tokens), 1)), *where, [2], rng)
    assert uniformity(evidence.padded(rng)[1], 8).p_value > 1e-3
    assert uniformity(wrong.padded(rng)[1], 8).p_value < 1e-12
    assert martingale_test(wrong.stops[0], stopped=True).p_value < 1e-12


def test_the_fill_keeps_every_value_in_its_place():
    rng = np.random.default_rng(3)
    evidence = gathered(rng, 5)
    by_probability, by_id, sequence = evidence.padded(rng)
    emitted = np.concatenate(evidence.sequence)
    for response in range(5):
        count = int((emitted == response).sum())
        own = np.concatenate(evidence.by_id)[emitted == response]
        assert by_id[sequence == response][:count].tolist() == own.tolist()
        own = np.concatenate(evidence.by_probability)[emitted == response]
        assert by_probability[sequence == response][:count].tolist() == own.tolist()

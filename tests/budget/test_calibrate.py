"""What is believed about drafts: learned shares, claims checked, hostile ones found out."""

import json

import numpy as np
import pytest

from paceline.budget.allocate import PRIOR_ACCEPTANCE, Nodes
from paceline.budget.calibrate import Calibrator
from paceline.schema import SOURCES, Draft, as_tokens

PROMPT, HISTORY, MODEL = (SOURCES.index(name) for name in ("prompt", "history", "model"))


def chain(length, probs=None, source=None, parents=None):
    return Draft(
        request_id="r",
        tokens=as_tokens(range(length)),
        length=1,
        parents=None if parents is None else as_tokens(parents),
        probs=None if probs is None else np.full(length, probs) if np.isscalar(probs) else np.asarray(probs),
        sources=None if source is None else np.full(length, source, dtype=np.uint8),
    )


def feed(calibrator, draft, accepted, times=1, cut=False):
    for _ in range(times):
        calibrator.observe(Nodes([draft]), [np.arange(accepted)], [cut])


def test_a_new_drafter_gets_its_chance():
    probs = Calibrator().probs(Nodes([chain(3)]))
    assert np.allclose(probs, PRIOR_ACCEPTANCE ** np.arange(1, 4))
    assert np.allclose(Calibrator().probs(Nodes([chain(3, [0.9, 0.5, 0.1])])), [0.9, 0.5, 0.1], atol=0.06)


def test_shares_are_learned_by_depth_and_source():
    rng = np.random.default_rng(0)
    calibrator = Calibrator()
    for _ in range(300):
        feed(calibrator, chain(4, source=HISTORY), int(rng.choice([0, 4], p=[0.2, 0.8])))
        feed(calibrator, chain(4, source=PROMPT), 1)
    good, poor = (calibrator.probs(Nodes([chain(4, source=s)])) for s in (HISTORY, PROMPT))
    assert np.allclose(good, 0.8, atol=0.1)  # all or nothing: once the first is accepted, all are
    assert np.allclose(poor, [1, 0, 0, 0], atol=0.06)


def test_children_of_a_rejected_node_and_of_the_last_token_teach_nothing():
    calibrator = Calibrator()
    feed(calibrator, chain(3, source=PROMPT), 0, times=50)
    feed(calibrator, chain(3, source=HISTORY), 2, times=50, cut=True)
    rejected, ended = (calibrator.probs(Nodes([chain(3, source=s)])) for s in (PROMPT, HISTORY))
    assert rejected[0] < 0.05
    assert ended[2] / ended[1] > 0.9  # the third was never tested, so the source's own share speaks for it


def test_true_claims_stay_and_overconfident_ones_are_cut():
    rng = np.random.default_rng(1)
    honest, boaster = Calibrator(), Calibrator()
    for _ in range(400):
        for claim in (0.95, 0.65, 0.25):
            feed(honest, chain(1, claim), int(rng.random() < claim))
            feed(boaster, chain(1, claim), int(rng.random() < claim / 2))
    nodes = Nodes([chain(1, claim) for claim in (0.95, 0.65, 0.25)])
    assert np.allclose(honest.probs(nodes), [0.95, 0.65, 0.25], atol=0.1)
    assert np.allclose(boaster.probs(nodes), [0.475, 0.325, 0.125], atol=0.1)
    for claim, accepted, trials in boaster.reliability():
        assert accepted == pytest.approx(claim / 2, abs=0.1)
        assert trials > 50


def test_claims_of_certainty_that_never_hold_are_believed_for_a_few_passes_only():  # field G10
    calibrator = Calibrator()
    believed = []
    for _ in range(12):
        believed.append(float(calibrator.probs(Nodes([chain(16, 1.0)])).sum()))
        feed(calibrator, chain(16, 1.0), 0)
    assert believed[0] > 15
    assert believed[5] < 1
    assert believed[11] < 0.3


def test_a_drafter_that_turns_good_is_believed_again():
    calibrator = Calibrator()
    feed(calibrator, chain(4, 0.95), 0, times=500)
    feed(calibrator, chain(4, 0.95), 4, times=60)
    assert calibrator.probs(Nodes([chain(1, 0.95)]))[0] > 0.6
    before = calibrator.reliability()[-1][2]
    calibrator.loosen()
    assert calibrator.reliability()[-1][2] == pytest.approx(before / 2)


def test_probabilities_never_grow_down_a_path_whatever_was_seen():
    rng = np.random.default_rng(2)
    calibrator = Calibrator()
    for _ in range(60):
        count = int(rng.integers(1, 9))
        tree = chain(
            count,
            rng.random(count) if rng.random() < 0.5 else None,
            int(rng.integers(len(SOURCES))),
            [int(rng.integers(-1, node)) for node in range(count)],
        )
        nodes = Nodes([tree, chain(3, 0.5)])
        probs = calibrator.probs(nodes)
        assert ((probs >= 0) & (probs <= 1)).all()
        assert (probs <= probs[nodes.parent_N] + 1e-12).all()
        first = int(rng.integers(count))
        calibrator.observe(
            nodes, [np.array([first]) if tree.parents[first] < 0 else np.arange(0), np.arange(2)], [0, 0]
        )


def test_what_was_learned_survives_a_checkpoint_and_damage_is_refused():
    calibrator = Calibrator()
    feed(calibrator, chain(4, 0.8), 2, times=9)
    feed(calibrator, chain(4), 1, times=9)
    restored = Calibrator()
    restored.load_state(json.loads(json.dumps(calibrator.state())))
    assert restored.state() == calibrator.state()
    nodes = Nodes([chain(4, 0.8), chain(4)])
    assert np.array_equal(restored.probs(nodes), calibrator.probs(nodes))
    with pytest.raises(ValueError, match="claimed_hits has shape"):
        restored.load_state(calibrator.state() | {"claimed_hits": [1.0]})


def test_nothing_drafted_teaches_nothing():
    calibrator = Calibrator()
    calibrator.observe(Nodes([]), [], [])
    assert calibrator.probs(Nodes([])).size == 0
    assert calibrator.reliability() == []


def test_a_models_claims_are_calibrated_apart_from_those_of_a_history():
    calibrator = Calibrator()
    history, model = chain(1, 0.85, HISTORY), chain(1, 0.85, MODEL)
    for n in range(200):
        feed(calibrator, history, int(n % 20 != 0))
        feed(calibrator, model, int(n % 5 == 0))
    assert np.allclose(calibrator.probs(Nodes([history, model])), [0.95, 0.2], atol=0.06)
    assert calibrator.reliability()[0][1] == pytest.approx(0.95, abs=0.05)
    assert calibrator.reliability(of_model=True)[0][1] == pytest.approx(0.2, abs=0.05)
    mixed = chain(2, [0.85, 0.85 * 0.85], HISTORY)
    mixed.sources[1] = MODEL  # a model goes on where history ended
    assert np.allclose(calibrator.probs(Nodes([mixed])), [0.95, 0.95 * 0.2], atol=0.06)


def test_a_checkpoint_of_fewer_sources_and_one_table_of_claims_still_loads():
    calibrator = Calibrator()
    feed(calibrator, chain(4, 0.8, HISTORY), 2, times=9)
    feed(calibrator, chain(4, source=HISTORY), 1, times=9)
    now = calibrator.state()
    older = {name: value[0] for name, value in now.items() if "unclaimed" not in name}
    older |= {name: [depth[:-1] for depth in value] for name, value in now.items() if "unclaimed" in name}
    restored = Calibrator()
    restored.load_state(json.loads(json.dumps(older)))
    assert restored.state() == now
    for damaged in ({"unclaimed_hits": older["unclaimed_hits"][:-1]}, {"claims": [now["claims"][0]] * 3}):
        with pytest.raises(ValueError, match="has shape"):
            restored.load_state(older | damaged)

"""How deep a draft goes: what was accepted sets the claims right, what a pass took sets its price."""

import numpy as np
import pytest

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.pace import Pacer
from paceline.schema import Outcome, as_tokens
from soft_drafting import requests, traits
from tiny_models import tiny


class Clock:
    """Stands still but for the passes of a drafter: ``first`` seconds for one that begins drafts, or as ``deeper``."""

    def __init__(self, drafter, first, deeper):
        self.now = 0.0
        drafter._clock = lambda: self.now
        drafter._begin = self.slow(drafter._begin, lambda rows: first)
        drafter._deepen = self.slow(drafter._deepen, deeper)

    def slow(self, call, seconds):
        def slower(rows):
            self.now += seconds(len(rows))
            return call(rows)

        return slower


def test_claims_are_set_right_by_what_was_accepted_at_each_depth():
    pacer = Pacer()
    assert pacer.share(1, 0.9) == pytest.approx(0.9)
    rng = np.random.default_rng(0)
    for _ in range(400):
        # Claims of .9 hold half of the time at depth 1, and never at depth 2.
        pacer.learn([((0.9, 0.9), 2 if held else 1, int(held)) for held in rng.random(8) < 0.5])
    assert pacer.share(1, 0.9) == pytest.approx(0.5, abs=0.06)
    assert pacer.share(2, 0.9) < 0.05
    # Of another depth the claims of this size say something, of another size nothing.
    assert 0.25 < pacer.share(5, 0.9) < 0.45
    assert pacer.share(1, 0.2) == pytest.approx(0.2)
    assert pacer.expected(2) < 0.05 < pacer.expected(1)


def test_what_was_learned_counts_half_once_the_policy_has_moved_and_fades_where_nobody_goes():
    pacer = Pacer()
    for _ in range(50):
        pacer.learn([((0.8, 0.8), 2, 1)])
    before = pacer.share(2, 0.8)
    pacer.loosen()
    assert before < pacer.share(2, 0.8) < 0.8
    for _ in range(600):
        pacer.learn([((0.8,), 1, 1)])
    assert pacer.share(2, 0.8) > 0.7


def test_the_time_of_a_pass_is_told_from_that_of_its_rows_and_stalls_are_cut():
    pacer = Pacer()
    assert pacer.cost() == (0.0, 0.0)
    for n in range(60):
        rows = 1 + n % 32
        pacer.add(rows, 0.010 + 0.0005 * rows)
    assert pacer.cost() == pytest.approx((0.010, 0.0005), rel=1e-6)
    pacer.add(16, 30.0)
    fixed, per_row = pacer.cost()
    assert fixed + 16 * per_row < 0.022
    alike = Pacer()
    for _ in range(10):
        alike.add(8, 0.02)
    assert alike.cost() == pytest.approx((0.02, 0.0))


def test_the_rows_that_go_deeper_are_the_set_that_brings_most():
    pacer = Pacer()
    for n in range(60):
        pacer.add(1 + n % 8, 0.010 + 0.002 * (1 + n % 8))
    reached = [0.9, 0.05, 0.6, 0.3]
    expected = pacer.expected(2)
    for rate in (0.0, 5.0, 40.0, 80.0, 120.0, 200.0, 1000.0):
        pacer.pace(rate)
        best, most = (), 0.0
        for subset in range(16):
            rows = [n for n in range(4) if subset >> n & 1]
            worth = sum(reached[n] * expected for n in rows) - (0.010 + 0.002 * len(rows)) * rate
            if rows and worth > most:
                best, most = rows, worth
        assert pacer.deeper(reached, 2).tolist() == list(range(4) if rate == 0 else best)
    assert pacer.deeper([], 2).tolist() == []


def test_what_verifying_takes_counts_as_what_drafting_takes():
    drafting, verifying = Pacer(), Pacer()
    for _ in range(10):
        drafting.add(4, 0.010 + 4 * 0.003)
        drafting.add(8, 0.010 + 8 * 0.003)
        verifying.add(4, 0.010 + 4 * 0.001)
        verifying.add(8, 0.010 + 8 * 0.001)
    reached = [0.9, 0.05, 0.6, 0.3]
    drafted = set()
    for rate in (5.0, 40.0, 80.0, 120.0, 200.0, 1000.0):
        drafting.pace(rate)
        verifying.pace(rate, 0.001)
        deeper = drafting.deeper(reached, 2).tolist()
        assert verifying.deeper(reached, 2, width=2).tolist() == deeper
        drafted.add(tuple(deeper))
    assert len(drafted) > 2


def drafter_of(deeper=lambda rows: 1.0, **options):
    drafter = DraftModelDrafter(tiny(seed=9), traits(), **options)
    return drafter, Clock(drafter, 1.0, deeper)


def test_without_a_pace_drafts_are_whole_and_where_a_second_is_dear_they_stop_after_the_first_depth():
    reqs = requests(6)
    drafter, _ = drafter_of()
    drafter.start(reqs)
    names = [request.request_id for request in reqs]
    assert [len(draft.tokens) for draft in drafter.propose(names, 8)] == [8] * 6
    drafter.pace(100.0)
    assert [len(draft.tokens) for draft in drafter.propose(names, 8)] == [1] * 6
    drafter.pace(0.0)
    assert [len(draft.tokens) for draft in drafter.propose(names, 8)] == [8] * 6


def test_a_drafter_that_is_right_goes_deeper_than_one_that_is_wrong_at_the_same_pace():
    depths = {}
    for is_right in (True, False):
        reqs = requests(6, max_tokens=128)
        drafter, _ = drafter_of()
        drafter.start(reqs)
        names = [request.request_id for request in reqs]
        drafter.pace(1.0)
        for _ in range(12):
            outcomes = []
            for draft in drafter.propose(names, 8):
                kept = draft.tokens[: len(draft.tokens) if is_right else 0]
                beyond = 1 if is_right else (int(draft.tokens[0]) + 1) % 40
                tokens = as_tokens([*kept.tolist(), beyond])
                outcomes.append(
                    Outcome(request_id=draft.request_id, tokens=tokens, accepted=len(kept), drafted=len(draft.tokens))
                )
            drafter.commit(outcomes)
        depths[is_right] = max(len(draft.tokens) for draft in drafter.propose(names, 8))
    assert depths[True] > depths[False] == 1


def test_rows_that_are_worth_it_go_deeper_alone():
    """Six rows of which one drafts what it always gets: the others stop where their passes would cost more."""
    reqs = requests(6, max_tokens=120)
    reqs[0].params, *_ = (request.params for request in requests(1, max_tokens=120, allowed_token_ids=(4,)))
    drafter, _ = drafter_of(lambda rows: 0.01 + 0.2 * rows)
    drafter.start(reqs)
    names = [request.request_id for request in reqs]
    for step in range(14):
        drafter.pace(0.0 if step < 4 else 2.0)
        drafts = {draft.request_id: draft for draft in drafter.propose(names[: 1 + step % 6] if step < 4 else names, 6)}
        outcomes = []
        for name, draft in drafts.items():
            is_sure = name == "r0"
            tokens = draft.tokens if is_sure else as_tokens([(int(draft.tokens[0]) + 1) % 40])
            accepted, drafted = len(tokens) * is_sure, len(draft.tokens)
            outcomes.append(Outcome(request_id=name, tokens=tokens, accepted=accepted, drafted=drafted))
        drafter.commit(outcomes)
    assert len(drafts["r0"].tokens) > 3
    assert all(len(drafts[name].tokens) == 1 for name in names[1:])

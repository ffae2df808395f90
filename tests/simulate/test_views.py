"""Views are the simulator's own rollouts: exact where they can be reckoned by hand, and as they must rise and fall."""

import msgspec
import numpy as np
import pytest

from paceline.schema import PacelineError
from paceline.simulate import views as module
from paceline.simulate.batching import Limits
from paceline.simulate.cost import LinearCost, MeasuredCost
from paceline.simulate.drafting import Acceptance, Drafting, Drift, LinearDraftCost, tokens_per_pass
from paceline.simulate.draftlength import Fixed
from paceline.simulate.lengths import Requests
from paceline.simulate.projection import Scenario, project
from paceline.simulate.rlstep import Phases
from paceline.simulate.rollout import rollout
from paceline.simulate.steptime import MeasuredStepTime
from paceline.simulate.views import ACCEPTANCE, DRAFTED, Views, crossing, first_groups, lighter, views
from paceline.simulate.views_plot import write_views

#: A pass takes 10 ms whatever is in it.
FLAT = MeasuredStepTime("made up", LinearCost(0.0, 0.0, 1e-2))
#: 8 groups of 2, all of 40 tokens, and prompts that nothing has to be read of.
ALIKE = Requests(np.repeat(np.arange(8), 2), np.full(16, 1), np.full(16, 40))
SCENARIO = Scenario(prompts=8, siblings=2, prompt_tokens=1, mean_tokens=40.0, sigma=0.0, max_tokens=99, slots=4)


def drafting(rate, **costs):
    return Drafting(Acceptance([rate]), LinearDraftCost("measured", "made up", **costs))


@pytest.fixture(scope="module")
def seen():
    return views(SCENARIO, FLAT, drafting(1.0), ["0", "1", "3", "adaptive"], requests=lambda _: ALIKE)


def test_a_certain_draft_of_k_is_k_plus_1_times_as_fast_at_every_batch_and_scale(seen):
    for curve in (seen.by_slots, seen.by_engines):
        assert curve.drafted == ["1", "3", "adaptive"]
        assert [one[:2] for one in curve.speedup] == [pytest.approx([2.0, 4.0])] * len(curve.at)
        assert curve.best == ["3"] * len(curve.at)
        assert curve.best_seconds == pytest.approx([plain / 4 for plain in curve.plain_seconds])
        assert curve.left_out == []


def test_where_no_length_pays_none_is_best_and_an_adaptive_one_is_named_where_it_is_alone():
    useless = views(SCENARIO, FLAT, drafting(0.0, per_position=1e-3), ["1", "adaptive"], requests=lambda _: ALIKE)
    assert useless.by_slots.best == ["0"] * 5
    assert useless.by_slots.best_seconds == useless.by_slots.plain_seconds
    alone = views(SCENARIO, FLAT, drafting(1.0), ["adaptive"], requests=lambda _: ALIKE).by_engines
    assert alone.best == ["adaptive"] * 4
    assert alone.speedup[0][0] > 10


def test_plain_seconds_are_waves_of_a_batch_by_hand(seen):
    assert seen.by_slots.at == [1, 2, 4, 8, 16]
    assert seen.by_slots.plain_seconds == pytest.approx([16 * 0.4, 8 * 0.4, 4 * 0.4, 2 * 0.4, 0.4])
    assert seen.by_engines.at == [1, 2, 4, 8]
    assert seen.by_engines.plain_seconds == pytest.approx([4 * 0.4, 2 * 0.4, 0.4, 0.4])
    assert seen.by_engines.mean_tokens == [40.0] * 4
    assert seen.by_sigma is None


def test_the_heat_map_is_a_rollout_of_each_draft_length_at_each_acceptance(seen):
    heat = seen.heat
    assert (heat.drafted, heat.acceptance) == (list(DRAFTED), list(ACCEPTANCE))
    plain = rollout(ALIKE, FLAT, limits=Limits(slots=4)).seconds
    one = rollout(ALIKE, FLAT, drafting(0.8), Fixed(4), limits=Limits(slots=4)).seconds
    assert heat.speedup[ACCEPTANCE.index(0.8)][DRAFTED.index(4)] == plain / one
    assert heat.yours == [1.0] * len(DRAFTED)


def test_more_acceptance_is_never_slower_and_what_costs_nothing_always_pays(seen):
    speedup_AK = np.array(seen.heat.speedup)
    assert (np.diff(speedup_AK, axis=0) >= 0).all()
    assert speedup_AK.min() > 1
    assert seen.heat.break_even == [None] * len(DRAFTED)
    assert seen.heat.best[-1] > 8


def test_dear_drafts_have_a_break_even_that_rises_with_their_length():
    heat = views(SCENARIO, FLAT, drafting(0.5, per_position=3e-3), ["1"], requests=lambda _: ALIKE).heat
    assert heat.best[0] == 0
    known = [at for at in heat.break_even if at is not None]
    assert len(known) > 4
    assert known == sorted(known)
    for at, column in zip(heat.break_even, np.array(heat.speedup).T, strict=True):
        if at is None:
            assert column.max() < 1
        else:
            assert np.interp(at, heat.acceptance, column) == pytest.approx(1.0)
    assert heat.best == [DRAFTED[row.argmax()] if row.max() >= 1.01 else 0 for row in np.array(heat.speedup)]


def test_the_given_acceptance_is_shown_by_the_rate_that_keeps_as_many_tokens():
    draft = Drafting(Acceptance([0.9, 0.5, 0.2]), LinearDraftCost("measured", "made up"))
    yours = views(SCENARIO, FLAT, draft, ["1"], requests=lambda _: ALIKE).heat.yours
    assert yours[0] == pytest.approx(0.9)
    for length, rate in zip(DRAFTED, yours, strict=True):
        assert tokens_per_pass(drafting(rate), length) == pytest.approx(tokens_per_pass(draft, length))


def test_a_longer_tail_leaves_a_batch_emptier():
    found = views(msgspec.structs.replace(SCENARIO, sigma=0.5, slots=16), FLAT, drafting(0.8), ["2"]).by_sigma
    assert found.at == [0.0, 0.5, 0.8, 1.2, 1.6]
    assert found.tail == sorted(found.tail)
    assert found.tail[0] < found.tail[-1]
    assert found.mean_tokens[0] == 40.0


def test_a_batch_that_was_not_measured_is_left_out_and_named():
    known = MeasuredStepTime("made up", MeasuredCost([(1, 1, [0.1]), (1, 9, [0.1]), (4, 4, [0.1]), (4, 36, [0.2])]))
    found = views(SCENARIO, known, drafting(0.8), ["2"], requests=lambda _: ALIKE).by_slots
    assert (found.at, found.left_out) == ([1, 2, 4], [8, 16])


def test_a_large_scenario_is_cut_into_equal_parts_and_says_so(monkeypatch):
    monkeypatch.setattr(module, "_MOST_TOKENS", 4 * 40)
    monkeypatch.setattr(module, "_LEAST_ENGINES", 2)
    eight = msgspec.structs.replace(SCENARIO, engines=8, slots=1)
    own, engines, parts = lighter(ALIKE, eight)
    assert (len(own), engines, parts) == (4, 2, 4)
    seen = views(eight, FLAT, drafting(1.0), ["1"], requests=lambda _: ALIKE)
    assert (seen.requests, seen.engines, seen.parts, seen.shortened) == (4, 2, 4, False)
    assert seen.by_engines.at == [4, 8]
    assert seen.by_engines.plain_seconds == pytest.approx([4 * 0.4, 2 * 0.4])
    one = views(msgspec.structs.replace(SCENARIO, slots=1), FLAT, drafting(1.0), ["1"], requests=lambda _: ALIKE)
    assert (one.requests, one.parts, one.shortened) == (4, 1, True)


def test_first_groups_are_whole_and_in_the_order_of_the_queue():
    mixed = Requests(np.array([5, 2, 5, 9]), np.ones(4, int), np.array([10, 20, 30, 40]))
    assert first_groups(mixed, 2).length_N.tolist() == [10, 20, 30]
    assert first_groups(mixed, 1).length_N.tolist() == [10, 30]


def test_a_crossing_is_on_the_line_between_points():
    assert crossing([0.0, 1.0, 2.0], [0.5, 0.75, 1.25], 1.0) == 1.5
    assert crossing([0.0, 1.0], [0.5, 1.0], 1.0) == 1.0
    assert crossing([0.0, 1.0], [1.0, 1.2], 1.0) is None
    assert crossing([0.0, 1.0], [0.5, 0.9], 1.0) is None
    assert crossing([0.0, 1.0], [1.1, 1.2], 1.0) is None


def test_views_count_their_rollouts_and_are_json_and_back():
    told = []
    known = MeasuredStepTime("made up", MeasuredCost([(1, 1, [0.1]), (1, 9, [0.1]), (4, 4, [0.1]), (4, 36, [0.2])]))
    found = views(SCENARIO, known, drafting(0.8), ["2"], requests=lambda _: ALIKE, told=lambda *two: told.append(two))
    done = [done for done, _ in told]
    assert done == list(range(1, len(done) + 1))
    assert told[-1] == (done[-1], done[-1])
    assert msgspec.json.decode(msgspec.json.encode(found), type=Views) == found


@pytest.mark.parametrize("phases", [None, Phases(generation=0.0, train=1.0, logprob=0.2, data=0.1, drafter=0.1)])
def test_the_picture_is_drawn_with_and_without_phases(tmp_path, seen, phases):
    drift = Drift("linear", 0.2) if phases else Drift()
    draft = Drafting(Acceptance([0.8], drift), LinearDraftCost("measured", "made up", per_position=1e-3))
    result = project(SCENARIO, FLAT, draft, (1, 3, "adaptive"), drafting="made up", repeats=1, phases=phases)
    write_views(result, seen, tmp_path / "v.svg")
    drawn = (tmp_path / "v.svg").read_text()
    assert "<!-- By batch -->" in drawn
    assert ("<!-- Fading: stops paying after" in drawn, "<!-- train -->" in drawn) == (bool(phases), bool(phases))
    assert ("<!-- Synchronous step, by what generation is of it -->" in drawn) is (phases is None)
    with pytest.raises(PacelineError, match=r"--png .*/v\.nothing: cannot be written: Format 'nothing'"):
        write_views(result, seen, tmp_path / "v.nothing")

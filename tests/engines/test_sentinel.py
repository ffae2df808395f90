"""The sentinel on an engine whose sleeps and refits go wrong in every known way."""

import math

import pytest

from paceline.config import SentinelConfig
from paceline.engines.canaries import Canaries
from paceline.engines.sentinel import Sentinel
from paceline.forward.runner import WeightsError
from paceline.schema import CANARY
from sleepy import SleepyEngine, rollout, weights


class Watched:
    """A sleepy engine, its sentinel, and what that told."""

    def __init__(self, exact=True, config=None, **options):
        self.engine = SleepyEngine(**options)
        self.events, self.lines = [], []
        self.sentinel = Sentinel(config or SentinelConfig(), self.engine, self._tell, exact=exact)
        self.sentinel.remember([rollout(key) for key in "abcd"])

    def _tell(self, event, message):
        self.events.append(event)
        self.lines.append(message)

    def refit(self, version, names=None, seed=None, **faulty):
        tensors = weights(100 + version if seed is None else seed)
        tensors = tensors if names is None else {name: tensors[name] for name in names}
        self.engine.faulty = tuple(faulty)
        self.sentinel.refit(tensors, lambda: self.engine.load(version, tensors))


def test_updates_of_the_policy_alone_that_go_well_are_no_event():
    watched = Watched(own_weights=False)
    for version in range(1, 8):
        watched.refit(version)
    assert watched.events == []
    assert watched.engine.is_drafting
    assert watched.sentinel.acceptance == 0.75


@pytest.mark.parametrize("fault", ["overwrite", "repack"])
def test_a_refit_that_touches_the_drafter_is_told_and_the_drafter_loaded_again(fault):  # field G2
    watched = Watched(config=SentinelConfig(gap=99))
    watched.refit(1)
    watched.refit(2, **{fault: True})
    assert watched.events[:2] == ["drafter_overwritten", "drafter_lost"]
    assert "embed, head, layer.0 and 1 more of the drafter changed" in watched.lines[0]
    assert "canaries accept 0% of 64 tokens, 75% before" in watched.lines[1]
    assert watched.events[2:] == ["drafter_reloaded"]
    assert watched.engine.is_drafting
    assert watched.engine.reloads == 1


def test_without_a_copy_to_load_decoding_stays_plain_until_canaries_accept_again():  # field G2
    config = SentinelConfig(gap=99)
    watched = Watched(on_disk=False, config=config)
    watched.refit(1)
    good = dict(watched.engine.drafter)
    for version in (2, 3, 4):
        watched.refit(version, overwrite=True)
        assert not watched.engine.is_drafting
    assert watched.events == ["drafter_overwritten", "drafter_lost"], "told once"
    watched.engine.drafter = good
    watched.refit(5)
    assert watched.events[2:] == ["drafter_resumed"]
    assert watched.engine.is_drafting
    watched.refit(6)
    assert len(watched.events) == 3


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_drops_the_drafter_is_told_after_waking(level):  # field G1
    watched = Watched(config=SentinelConfig(gap=99))
    watched.refit(1)
    watched.sentinel.asleep()
    watched.engine.sleep(level)
    watched.engine.wake()
    watched.refit(2)
    assert watched.engine.is_drafting
    assert watched.events == ([] if level == 1 else ["drafter_overwritten", "drafter_lost", "drafter_reloaded"])


def test_a_drafter_without_weights_that_forgets_everything_in_its_sleep_is_lost():  # field G1
    watched = Watched(own_weights=False)
    watched.refit(1)
    watched.sentinel.asleep()
    watched.engine.quality = 0.0
    watched.sentinel.awake()
    assert watched.events == ["drafter_lost"]
    assert not watched.engine.is_drafting
    watched.engine.quality = 0.7
    watched.refit(2)
    assert watched.events == ["drafter_lost", "drafter_resumed"]
    assert watched.engine.is_drafting


def test_weights_of_the_policy_that_do_not_come_back_from_sleep_are_told():
    watched = Watched(own_weights=False)
    watched.refit(1)
    for level, told in ((1, []), (2, ["policy_overwritten"])):
        watched.sentinel.asleep()
        watched.engine.sleep(level)
        watched.engine.wake()
        watched.sentinel.awake()
        assert watched.events == told


def test_a_drafter_further_behind_than_allowed_is_told_once_and_goes_on_drafting():  # field G5
    watched = Watched(config=SentinelConfig(gap=2))
    for version in range(1, 6):
        watched.refit(version)
    assert watched.events == ["drafter_stale", "drafter_reloaded"]
    assert "version 0, the policy's of 3; engine.sentinel.gap allows 2" in watched.lines[0]
    assert watched.engine.is_drafting
    watched.engine.drafter_version = 5
    watched.refit(6)
    watched.engine.drafter_version = 3
    watched.refit(7)
    assert watched.events[2:] == ["drafter_stale", "drafter_reloaded"], "told again once it was gone"


def test_a_drafter_that_moves_on_purpose_is_not_overwritten():
    watched = Watched(config=SentinelConfig(gap=99))
    watched.refit(1)
    watched.engine.drafter = weights(7)
    watched.engine._good = watched.engine._sums(watched.engine.drafter)
    watched.sentinel.drafter_moved()
    watched.refit(2)
    assert watched.events == []


def test_a_tensor_that_does_not_arrive_is_an_error_that_names_it():  # field G6
    watched = Watched()
    with pytest.raises(WeightsError, match=r"^head did not reach the policy"):
        watched.refit(1, drop=True)


@pytest.mark.parametrize("exact", [True, False])
def test_new_weights_that_do_not_take_are_told(exact):  # field G5
    watched = Watched(exact=exact, own_weights=False)
    watched.engine.packed = not exact
    watched.refit(1)
    assert watched.events == []
    watched.refit(2, stale=True)
    assert watched.events == ["policy_stale"]
    assert watched.engine.is_drafting, "it is no fault of the drafter's"
    watched.refit(3)
    assert watched.events == ["policy_stale"]


def test_an_engine_that_lays_weights_out_anew_may_be_given_the_same_ones_again():
    watched = Watched(exact=False, own_weights=False)
    watched.engine.packed = True
    for version in (1, 2):
        watched.refit(version, seed=0)
    assert watched.events == []


def test_weights_that_were_not_pushed_and_move_are_told():
    watched = Watched(own_weights=False)
    watched.refit(1, names=["head"])
    watched.refit(2, names=["head"], scribble=True)
    assert watched.events == ["policy_overwritten"]
    assert "layer.1 of the policy moved" in watched.lines[0]


def test_requests_in_flight_skip_the_canary_and_are_told_once():  # field G11
    watched = Watched(own_weights=False)
    watched.engine.busy = True
    for version in (1, 2):
        watched.refit(version)
    assert watched.events == ["canary_skipped"]
    watched.engine.busy = False
    watched.refit(3)
    assert watched.events == ["canary_skipped"]
    assert watched.sentinel.acceptance == 0.75


def test_without_canaries_checksums_decide():
    config = SentinelConfig(canaries=0, gap=99)
    watched = Watched(config=config)
    watched.refit(1)
    watched.refit(2, overwrite=True)
    assert watched.events == ["drafter_overwritten", "drafter_reloaded"]
    assert watched.engine.is_drafting
    assert watched.engine.answered == []
    watched = Watched(config=config, on_disk=False)
    watched.refit(1, overwrite=True)
    watched.refit(2)
    assert watched.events == ["drafter_overwritten"]
    assert not watched.engine.is_drafting


def test_without_checksums_canaries_decide():
    watched = Watched(config=SentinelConfig(checksums=False, gap=99))
    watched.refit(1)
    watched.refit(2, overwrite=True)
    assert watched.events == ["drafter_lost", "drafter_reloaded"]


def test_a_drafter_that_only_became_weaker_comes_back_and_a_dead_one_never_does():
    for weaker, comes_back in ((0.125, True), (0.0, False)):
        watched = Watched(own_weights=False)
        watched.refit(1)
        watched.engine.quality = weaker
        for version in range(2, 9):
            watched.refit(version)
        assert watched.events == ["drafter_lost"] + ["drafter_resumed"] * comes_back
        assert watched.engine.is_drafting is comes_back


def test_a_drafter_that_begins_anew_is_tried_with_the_newest_prompts():
    watched = Watched(own_weights=False)
    watched.refit(1)
    watched.engine.quality = 0.0
    watched.refit(2)
    watched.sentinel.remember([rollout(key) for key in "wxyz"])
    watched.engine.known = {"w", "x", "y", "z"}
    watched.engine.quality = 0.75
    watched.refit(3)
    assert watched.events == ["drafter_lost", "drafter_resumed"]
    assert set(watched.engine.answered[-1]) == {f"{CANARY}{key}" for key in "wxyz"}


def test_a_drafter_that_never_drafted_anything_has_nothing_to_lose():
    watched = Watched(own_weights=False, quality=0.0)
    for version in range(1, 30):
        watched.refit(version)
    assert watched.events == []
    assert watched.engine.is_drafting


# Canaries


def answers(canaries, *accepted, tokens=16):
    keys = [request.prompt_key for request in canaries.requests() or canaries.new()]
    return [rollout(key, tokens, count) for key, count in zip(keys, accepted, strict=True)]


def chosen(*accepted, **config):
    canaries = Canaries(SentinelConfig(canaries=len(accepted), **config))
    canaries.remember([rollout(str(index)) for index in range(len(accepted))])
    canaries.baseline(answers(canaries, *accepted))
    return canaries


def test_the_newest_prompts_become_canaries_once_each_and_stay():
    canaries = Canaries(SentinelConfig(canaries=2, tokens=5))
    assert canaries.new() == []
    canaries.remember([rollout(key) for key in "aabbc"] + [rollout("d", reason="abort")])
    requests = canaries.new()
    assert [request.request_id for request in requests] == [f"{CANARY}c", f"{CANARY}b"]
    assert [(r.params.temperature, r.params.max_tokens, r.prompt_key) for r in requests] == [(0, 5, "c"), (0, 5, "b")]
    canaries.baseline([rollout("c"), rollout("b")])
    canaries.remember([rollout("e")])
    assert canaries.new() == []
    assert [request.prompt_key for request in canaries.requests()] == ["c", "b"]


def test_prompts_join_until_there_are_enough():
    canaries = Canaries(SentinelConfig(canaries=3))
    for key in "ab":
        canaries.remember([rollout(key)])
        canaries.baseline([rollout(request.prompt_key) for request in canaries.new()])
    assert len(canaries) == 2


@pytest.mark.parametrize(
    ("before", "after", "holds"),
    [
        ((12, 12, 12, 12), (12, 11, 13, 12), True),
        ((12, 12, 12, 12), (6, 6, 6, 6), True),  # half of it is what hold asks for
        ((12, 12, 12, 12), (0, 0, 0, 0), False),
        ((12, 12, 12, 12), (5, 5, 4, 5), False),
        ((5, 4, 5, 4), (2, 2, 2, 2), True),  # less, but no clear case
        ((15, 15, 1, 1), (0, 0, 0, 0), False),
        ((1, 0, 0, 1), (0, 0, 0, 0), True),  # two tokens prove nothing
        ((15, 15, 15, 15), (15, 15, 0, 0), True),  # two answers changed, two did not
    ],
)
def test_only_a_clear_drop_below_the_share_to_hold_is_a_loss(before, after, holds):
    canaries = chosen(*before)
    canaries.compare(answers(canaries, *after))
    assert canaries.holds(lenient=True) is holds


def test_doubts_add_up_until_they_are_clear_and_a_good_answer_ends_them():
    canaries = chosen(4, 4, 4, 4)

    def loses(*accepted):
        canaries.compare(answers(canaries, *accepted))
        return not canaries.holds(lenient=True)

    assert [loses(0, 0, 0, 0) for _ in range(3)] == [False, True, False]
    assert [loses(0, 0, 0, 0), loses(4, 4, 4, 4), loses(0, 0, 0, 0), loses(0, 0, 0, 0)] == [True, False, False, True]


def test_a_slow_decline_is_a_loss_in_the_end():
    canaries = chosen(*[15] * 16)
    lost = []
    for accepted in (15, 9, 6, 4, 2, 1):
        canaries.compare(answers(canaries, *[accepted] * 16))
        lost.append(not canaries.holds(lenient=True))
    assert lost[0] is lost[1] is False
    assert any(lost)


def test_acceptance_is_unknown_before_the_first_answer():
    assert math.isnan(Canaries(SentinelConfig()).acceptance)
    assert chosen(4, 12).acceptance == 0.5


def test_a_sentinel_goes_on_from_its_state_where_it_was():
    def lines(stop_at):
        watched = Watched(own_weights=False)
        for version in range(1, 9):
            if version == stop_at:
                kept, engine = watched.sentinel.state(), watched.engine
                watched.sentinel = Sentinel(SentinelConfig(), engine, watched._tell)
                watched.sentinel.load_state(kept)
            watched.engine.quality = 0.0 if version in (4, 5) else 0.125 if version > 5 else 0.75
            watched.refit(version)
        return watched.events, watched.lines, watched.engine.answered

    whole = lines(None)
    assert "drafter_lost" in whole[0]
    assert all(lines(stop_at) == whole for stop_at in range(2, 9))


@pytest.mark.parametrize("broken", [{}, {"drafting": True, "told": [], "canaries": {"chosen": {"a": {}}}}])
def test_a_state_that_is_none_is_refused_whole(broken):
    watched = Watched()
    with pytest.raises(KeyError):
        watched.sentinel.load_state(broken)
    assert watched.engine.is_drafting

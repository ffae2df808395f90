"""The simulated rollout: closed forms, conservation, limits, and leaps that end where single passes do."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schema import PacelineError
from paceline.simulate.batching import Limits
from paceline.simulate.cost import LinearCost, plain_passes
from paceline.simulate.draftlength import Adaptive, ByRows, Fixed
from paceline.simulate.lengths import LogNormal, Requests
from paceline.simulate.passtimes import PassTimes
from paceline.simulate.rollout import compare, deal, rollout
from paceline.simulate.spread import Spread


class Step:
    """A step time of a function, which remembers what it was asked."""

    mode = "measured"
    source = "a fake"

    def __init__(self, seconds=lambda rows, tokens, kv: 1.0):
        self._seconds = seconds
        self.asked = []

    def seconds(self, rows, tokens, kv_tokens):
        self.asked.append((rows, tokens, kv_tokens))
        return self._seconds(rows, tokens, kv_tokens)


EVEN = Spread()


class Rate:
    """Each drafted token is kept with one probability while those before it were."""

    def __init__(self, rate, seconds=0.0, fade=0.0, spread=EVEN):
        self.rate, self._seconds, self.fade, self.spread = rate, seconds, fade, spread

    def kept(self, drafted, step=0.0):
        at_least = max(self.rate - self.fade * step, 0.0) ** np.arange(drafted + 1)
        return at_least - np.append(at_least[1:], 0.0)

    def seconds(self, rows, drafted, kv_tokens):
        return self._seconds * drafted


LINEAR = Step(LinearCost(4e-8, 2e-5, 6e-3).seconds)


def requests(lengths, prompts=1, groups=None):
    count = len(lengths)
    return Requests(
        np.arange(count) if groups is None else np.array(groups),
        np.broadcast_to(np.array(prompts), count).copy(),
        np.array(lengths),
    )


def drawn(seed=0, prompts=8, siblings=4, mu=4.5, max_tokens=600):
    law = LogNormal(mu, 0.9)
    return Requests.drawn(
        law, prompts=prompts, siblings=siblings, prompt_tokens=20, max_tokens=max_tokens, share=0.4, seed=seed
    )


def test_plain_decoding_of_equal_lengths_takes_as_many_passes_as_tokens():
    done = rollout(requests([37] * 5), Step(), limits=Limits(slots=8))
    assert (done.passes, done.seconds, done.tokens_per_forward, done.mean_rows) == (37, 37.0, 1.0, 5.0)
    assert done.finish_N.tolist() == [37.0] * 5


@pytest.mark.parametrize("leaps", [True, False])
@pytest.mark.parametrize(("length", "drafted"), [(37, 3), (36, 3), (1, 4), (5, 4), (6, 4)])
def test_where_all_is_kept_a_response_takes_its_length_by_draft_and_one_rounded_up(length, drafted, leaps):
    done = rollout(requests([length] * 3), Step(), Rate(1.0), Fixed(drafted), limits=Limits(slots=3), leaps=leaps)
    assert done.passes == math.ceil(length / (drafted + 1))
    assert done.tokens == 3 * length
    assert done.drafted == 3 * drafted * done.passes


@pytest.mark.parametrize("leaps", [True, False])
def test_where_nothing_is_kept_drafts_only_add_their_time(leaps):
    done = rollout(requests([20] * 3), Step(), Rate(0.0, 0.25), Fixed(2), limits=Limits(slots=3), leaps=leaps)
    assert (done.passes, done.seconds) == (20, pytest.approx(20 * 1.5))


def test_plain_decoding_takes_what_the_replay_reckons_for_the_same_responses():
    some = drawn()
    cost = LinearCost(4e-8, 2e-5, 6e-3)
    for slots in (3, 11, 64):
        own = requests(some.length_N.tolist(), prompts=1)
        done = rollout(own, LINEAR, limits=Limits(slots=slots))
        reckoned = list(plain_passes(own.length_N.tolist(), own.prompt_N.tolist(), slots))
        assert done.passes == sum(passes for passes, _, _ in reckoned)
        assert done.seconds == pytest.approx(sum(n * cost.seconds(rows, rows, kv) for n, rows, kv in reckoned))


def test_a_pass_is_asked_with_its_rows_tokens_and_caches():
    step = Step()
    rollout(requests([2, 4], prompts=[5, 9]), step, Rate(1.0), Fixed(1), limits=Limits(slots=2), leaps=False)
    # The prompts but for their last token, both rows, then the one that is left.
    assert step.asked == [(2, 12, 0), (2, 4, 14), (1, 2, 11)]


def test_long_prompts_are_read_in_passes_of_limited_size_and_siblings_read_theirs_once():
    own = requests([1] * 4, prompts=[6, 6, 6, 6], groups=[0, 0, 0, 1])
    step = Step()
    done = rollout(own, step, limits=Limits(slots=4, prompt_tokens_per_pass=4), leaps=False)
    assert step.asked == [(1, 4, 0), (2, 4, 4), (1, 2, 3), (4, 4, 24)]
    engine = done.engines[0]
    assert (engine.read_tokens, engine.reading_passes, done.reading_share) == (10, 3, 0.75)
    alone = rollout(own, Step(), limits=Limits(slots=4, prefix_cache=False))
    assert alone.engines[0].read_tokens == 20


def test_a_slot_that_is_free_takes_the_next_request_in_order():
    done = rollout(requests([5, 2, 4, 1]), Step(), limits=Limits(slots=2))
    assert done.finish_N.tolist() == [5.0, 2.0, 6.0, 6.0]


def test_prompts_beside_decoding_fill_what_a_pass_has_left_and_end_with_the_first_token():
    own = requests([4, 3, 2], prompts=[5, 9, 2])
    step = Step()
    done = rollout(own, step, Rate(0.0), Fixed(1), limits=Limits(slots=2, batched_tokens=8), leaps=False)
    # The first prompt and 3 tokens of the second; the rest of it beside a row that drafts, and what that row takes
    # alone; both rows, twice; then the third prompt, and its row.
    assert step.asked == [(2, 8, 0), (2, 8, 9), (1, 2, 6), (2, 4, 17), (2, 4, 19), (1, 2, 0), (1, 2, 3)]
    assert done.tokens == 9
    assert done.engines[0].read_tokens == 16
    # Every request says its first token where its prompt ends.
    alone = rollout(requests([4], prompts=6), Step(), limits=Limits(slots=1, batched_tokens=3))
    assert (alone.passes, alone.seconds, alone.engines[0].reading_passes) == (4, 5.0, 2)
    assert alone.tokens_per_forward == 1


def test_prompts_wait_where_decoding_takes_all_the_tokens_of_a_pass():
    own = requests([6, 1, 1], prompts=[1, 4, 4])
    waits = rollout(own, Step(), Rate(0.0), Fixed(3), limits=Limits(slots=3, batched_tokens=4))
    # Three prompt tokens beside the first one, then nothing until the first request has ended.
    assert waits.finish_N.tolist() == [6.0, 7.0, 8.0]
    assert waits.engines[0].reading_seconds == 3


def test_a_prompt_that_is_read_is_preempted_before_what_runs():
    limits = Limits(slots=3, kv_tokens=25, headroom=0.0, batched_tokens=2)
    done = rollout(requests([14, 2], prompts=[4, 12]), Step(), limits=limits)
    assert (done.preemptions, done.recomputed_tokens) == (1, 12)
    # What was read of the second prompt is lost, and it is read whole once the first request has left.
    assert done.finish_N.tolist() == [15.0, 22.0]
    assert done.engines[0].most_kv_tokens <= 25


def test_a_preempted_request_is_the_newest_and_is_read_again_when_it_returns():
    own = requests([6, 6], prompts=4)
    for prefix_cache, again in ((False, 7), (True, 3)):
        limits = Limits(slots=2, kv_tokens=16, headroom=0.0, prefix_cache=prefix_cache)
        for leaps in (True, False):
            done = rollout(own, Step(), limits=limits, leaps=leaps)
            # Four passes together fill 16 tokens; then the first ends alone in two, and the second after it.
            assert (done.passes, done.preemptions, done.recomputed_tokens) == (8, 1, again)
            assert done.finish_N.tolist() == [7.0, 10.0]
            assert done.tokens == 12
    free = rollout(own, Step(), limits=Limits(slots=2))
    assert (free.passes, free.preemptions, free.recomputed_tokens) == (6, 0, 0)


def test_a_preempted_request_returns_before_those_that_never_ran():
    limits = Limits(slots=2, kv_tokens=16, headroom=0.0)
    done = rollout(requests([6, 6, 6], prompts=4), Step(), limits=limits)
    # The third would fit beside the first, but the second is at the head of the queue and does not.
    assert done.finish_N.tolist() == [7.0, 10.0, 14.0]


def test_headroom_keeps_requests_waiting_that_would_soon_be_preempted():
    own = requests([20] * 8, prompts=10)
    crowded, roomy = (
        rollout(own, Step(), limits=Limits(slots=8, kv_tokens=100, headroom=headroom)) for headroom in (0.0, 0.5)
    )
    assert roomy.preemptions < crowded.preemptions


def test_the_last_request_alone_drafts_no_more_than_the_caches_hold():
    step = Step()
    done = rollout(requests([6]), step, Rate(0.0), Fixed(4), limits=Limits(slots=1, kv_tokens=7), leaps=False)
    assert [tokens for _, tokens, _ in step.asked] == [5, 5, 4, 3, 2, 1]
    assert done.engines[0].most_kv_tokens == 7


POLICIES = [Fixed(0), Fixed(1), Fixed(3), ByRows({1: 4, 3: 2, 6: 0}), Adaptive(5)]
# Where caches are full a drafted token costs ever more: the best length falls while nothing else changes.
CACHES_MATTER = Step(lambda rows, tokens, kv: 6e-3 + 1e-6 * tokens * kv)


def assert_the_same(leaping, stepping):
    for a, b in zip(leaping.engines, stepping.engines, strict=True):
        for name in ("tokens", "passes", "drafted_passes", "forwards", "drafted", "read_tokens", "recomputed_tokens"):
            assert getattr(a, name) == getattr(b, name), name
        assert (a.preemptions, a.most_rows, a.most_kv_tokens) == (b.preemptions, b.most_rows, b.most_kv_tokens)
        assert a.tail_seconds == pytest.approx(b.tail_seconds)
        assert [rows for _, rows in a.changes] == [rows for _, rows in b.changes]
    assert leaping.finish_N == pytest.approx(stepping.finish_N, rel=1e-9)


@pytest.mark.parametrize("length", POLICIES)
@pytest.mark.parametrize("kv_tokens", [None, 240, 400])
def test_leaps_end_where_single_passes_do_also_with_full_caches_and_lengths_that_follow_them(length, kv_tokens):
    own, limits = drawn(4, max_tokens=200), Limits(slots=6, kv_tokens=kv_tokens)
    leaping, stepping = (
        rollout(own, CACHES_MATTER, Rate(0.8, 1e-4), length, limits=limits, seed=8, leaps=leaps)
        for leaps in (True, False)
    )
    assert_the_same(leaping, stepping)
    assert (leaping.preemptions > 5) == (kv_tokens is not None)
    assert kv_tokens is None or leaping.engines[0].most_kv_tokens <= kv_tokens


def test_leaps_without_drafts_end_where_caches_have_grown_enough_for_drafts_to_pay():
    step = Step(lambda rows, tokens, kv: 1e-3 * tokens + 2e-5 * kv)
    own, limits = drawn(4, max_tokens=300), Limits(slots=6)
    leaping, stepping = (
        rollout(own, step, Rate(0.7), Adaptive(5), limits=limits, seed=8, leaps=leaps) for leaps in (True, False)
    )
    assert_the_same(leaping, stepping)
    assert 0 < leaping.engines[0].drafted_passes < leaping.passes


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=14),
    groups=st.integers(1, 5),
    prompt=st.integers(1, 30),
    slots=st.integers(1, 9),
    room=st.one_of(st.none(), st.integers(0, 60)),
    engines=st.integers(1, 3),
    length=st.sampled_from(POLICIES),
    rate=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    batched=st.sampled_from([None, None, 1, 12, 50]),
    spread=st.sampled_from([Spread(), Spread(1.5, 0.5, -0.4)]),
    seed=st.integers(0, 1 << 40),
)
def test_every_token_comes_once_within_slots_and_caches_and_leaps_end_where_single_passes_do(
    lengths, groups, prompt, slots, room, engines, length, rate, batched, spread, seed
):
    own = requests(lengths, prompts=prompt, groups=[i % groups for i in range(len(lengths))])
    kv_tokens = None if room is None else prompt + max(lengths) + room
    limits = Limits(slots=slots, kv_tokens=kv_tokens, batched_tokens=batched)
    leaping, stepping = (
        rollout(
            own,
            CACHES_MATTER,
            Rate(rate, 1e-3, spread=spread),
            length,
            limits=limits,
            engines=engines,
            seed=seed,
            leaps=leaps,
        )
        for leaps in (True, False)
    )
    for done in (leaping, stepping):
        assert done.tokens == own.tokens
        assert [e.tokens for e in done.engines] == [int(own.length_N[done.engine_N == e].sum()) for e in range(engines)]
        assert (done.finish_N > 0).all()
        assert done.finish_N.max() == done.seconds == max(done.engine_seconds)
        assert all(engine.most_rows <= slots for engine in done.engines)
        assert kv_tokens is None or all(engine.most_kv_tokens <= kv_tokens for engine in done.engines)
        assert (done.rows_P <= slots * engines).all()
        assert done.rows_P[-1] == 0
    assert_the_same(leaping, stepping)


def test_the_law_is_that_of_a_simulation_by_an_ordinary_generator():
    lengths, slots, drafted, rate = [90, 30, 60, 200, 15, 120, 45, 80], 3, 3, 0.7
    random = np.random.default_rng(5)

    def plainly():
        waiting, running, passes = list(lengths), [], 0
        while waiting or running:
            while waiting and len(running) < slots:
                running.append(waiting.pop(0))
            kept = (np.cumprod(random.random((len(running), drafted)) < rate, axis=1)).sum(axis=1)
            running = [left - k - 1 for left, k in zip(running, kept.tolist(), strict=True) if left > k + 1]
            passes += 1
        return passes

    theirs = np.array([plainly() for _ in range(300)])
    own = requests(lengths)
    ours = np.array(
        [
            rollout(own, Step(), Rate(rate), Fixed(drafted), limits=Limits(slots=slots), seed=seed).passes
            for seed in range(300)
        ]
    )
    error = math.sqrt((theirs.var() + ours.var()) / 300)
    assert abs(theirs.mean() - ours.mean()) < 4 * error
    assert ours.std() == pytest.approx(theirs.std(), rel=0.25)


def test_the_kept_tokens_follow_the_draft_model_and_rows_are_independent():
    draft, drafted, rows, length = Rate(0.6), 4, 64, 3000
    done = rollout(requests([length] * rows), Step(), draft, Fixed(drafted), limits=Limits(slots=rows), seed=9)
    mean = 1 + float(draft.kept(drafted) @ np.arange(drafted + 1))
    assert done.tokens_per_forward == pytest.approx(mean, rel=0.01)
    # Of one row the passes to its end have the standard deviation of a renewal process; equal draws would have none.
    variance = float(draft.kept(drafted) @ (np.arange(drafted + 1) + 1 - mean) ** 2)
    assert done.finish_N.std() == pytest.approx(math.sqrt(variance * length / mean**3), rel=0.35)


def test_where_requests_differ_as_much_is_kept_in_all_but_the_last_ones_end_later():
    own = requests([400] * 48)
    ends = []
    for spread in (Spread(), Spread(1.2)):
        done = [
            rollout(own, Step(), Rate(0.7, spread=spread), Fixed(7), limits=Limits(slots=48), seed=seed)
            for seed in range(4)
        ]
        kept = np.mean([one.tokens_per_forward for one in done])
        assert kept == pytest.approx(1 + (0.7 - 0.7**8) / 0.3, rel=0.03)
        ends.append(np.mean([one.passes for one in done]))
    assert ends[1] > 1.4 * ends[0]


def test_what_is_kept_of_a_request_that_differs_depends_on_no_neighbour():
    own = requests([400] * 6)
    draft = Rate(0.7, spread=Spread(1.0))
    few, many = (rollout(own, Step(), draft, Fixed(3), limits=Limits(slots=s), seed=3) for s in (1, 6))
    assert np.diff(few.finish_N, prepend=0.0).tolist() == many.finish_N.tolist()


def test_a_seed_repeats_and_another_does_not():
    first, again, other = (
        rollout(drawn(), LINEAR, Rate(0.7), Fixed(3), limits=Limits(slots=16), seed=seed) for seed in (1, 1, 2)
    )
    assert (first.finish_N == again.finish_N).all()
    assert (first.finish_N != other.finish_N).any()


def test_what_a_request_keeps_depends_on_no_neighbour():
    own = requests([400] * 6)
    few, many = (rollout(own, Step(), Rate(0.7), Fixed(3), limits=Limits(slots=s), seed=3) for s in (1, 6))
    assert np.diff(few.finish_N, prepend=0.0).tolist() == many.finish_N.tolist()


def test_siblings_go_to_one_engine_and_groups_go_round_in_order():
    own = requests([1] * 7, groups=[9, 9, 2, 5, 5, 9, 0])
    assert deal(own, 3).tolist() == [0, 0, 1, 2, 2, 0, 0]
    done = rollout(own, Step(), limits=Limits(slots=4), engines=5)
    assert done.engine_N.tolist() == [0, 0, 1, 2, 2, 0, 3]
    assert done.engine_seconds.tolist() == [1, 1, 1, 1, 0]


def test_the_time_below_a_quarter_of_the_slots_is_the_tail_and_the_slowest_engine_is_waited_for():
    done = rollout(requests([10, 50, 100, 20]), Step(), limits=Limits(slots=8), engines=2)
    # Of lengths 10 and 100 one row is left for 90 passes, of 50 and 20 for 30.
    assert [engine.tail_seconds for engine in done.engines] == [90.0, 30.0]
    assert done.tail_share == pytest.approx(120 / 150)
    assert done.idle_share == pytest.approx(1 - 75 / 100)
    assert done.tokens_per_second == pytest.approx(1.8)


def test_the_timeline_tells_the_rows_at_any_time():
    done = rollout(requests([10, 30, 60]), Step(), limits=Limits(slots=3))
    assert len(done.time_P) == len(done.rows_P) == 301
    at = dict(zip(np.round(done.time_P, 6).tolist(), done.rows_P.tolist(), strict=True))
    assert [at[t] for t in (0.0, 9.8, 10.0, 29.8, 30.0, 59.8, 60.0)] == [3, 3, 2, 2, 1, 1, 0]


def test_a_table_by_rows_is_followed_as_rows_shrink():
    step = Step()
    rollout(requests([2, 4, 8, 16]), step, Rate(0.0), ByRows({1: 5, 3: 1, 4: 0}), limits=Limits(slots=4), leaps=False)
    assert {(rows, tokens // rows - 1) for rows, tokens, _ in step.asked} == {(4, 0), (3, 1), (2, 5), (1, 5)}
    assert ByRows({4: 3}).choose(PassTimes(Step(), None, 9), 2, 5).drafted == 0


def test_the_adaptive_length_is_the_one_of_an_exhaustive_search():
    # A token costs much from 32 tokens in the batch on: many rows leave no room for drafts.
    step = Step(lambda rows, tokens, kv: 1 + 0.2 * max(tokens - 32, 0) + 1e-4 * kv)
    draft = Rate(0.75, 0.02)
    times, policy, chosen = PassTimes(step, draft, 1000), Adaptive(8), []
    for rows in (1, 2, 4, 8, 16, 32):
        kv = 2 ** (8 + 1 / 8)  # the middle of a range
        rates = [
            (1 + float(draft.kept(k) @ np.arange(k + 1))) / (step.seconds(rows, rows * (k + 1), kv) + 0.02 * k)
            for k in range(9)
        ]
        chosen.append(policy.choose(times, rows, int(kv)).drafted)
        assert chosen[-1] == int(np.argmax(rates))
    assert chosen[0] > chosen[3] > chosen[5] == 0


def test_an_adaptive_length_holds_until_the_caches_grew_by_a_quarter_of_an_octave():
    times = PassTimes(LINEAR, Rate(0.9), 1000)
    policy = Adaptive(4)
    for kv in [*range(300), 1 << 20, (1 << 20) - 1]:
        drafted, until = policy.choose(times, 2, kv)
        assert kv < until <= max(1.2 * kv, 2) + 1
        assert policy.choose(times, 2, int(until) - 1).drafted == drafted


def test_adaptive_drafts_lose_to_no_fixed_length_and_are_left_off_where_drafting_loses():
    def seconds(length, draft):
        return rollout(drawn(), step, draft, length, limits=Limits(slots=32)).seconds

    step = Step(LinearCost(1e-8, 4e-4, 6e-3).seconds)
    draft = Rate(0.8, 2e-4)
    assert seconds(Adaptive(8), draft) < 1.01 * min(seconds(Fixed(k), draft) for k in range(9))
    dear = Rate(0.5, 1.0)
    assert seconds(Adaptive(8), dear) == pytest.approx(seconds(Fixed(0), dear))
    assert seconds(Fixed(1), dear) > 10 * seconds(Fixed(0), dear)


def test_a_drafter_that_has_drifted_keeps_less():
    fresh, stale = (
        rollout(drawn(), LINEAR, Rate(0.9, fade=0.01), Fixed(3), limits=Limits(slots=16), trained=steps)
        for steps in (0, 40)
    )
    assert stale.tokens_per_forward < 0.8 * fresh.tokens_per_forward


@pytest.mark.parametrize(
    "seconds",
    [
        lambda rows, tokens, kv: 0.01 + 1e-6 * kv,
        lambda rows, tokens, kv: max(0.01, 2e-6 * kv),
        lambda rows, tokens, kv: 0.004 + max(0.01, 3e-6 * min(kv, 7000 * rows)),
        lambda rows, tokens, kv: 0.01 * math.sqrt(1 + kv / 1e4),
    ],
)
def test_the_seconds_of_many_passes_are_those_of_the_step_time_asked_a_few_times(seconds):
    step = Step(seconds)
    kv_T = np.arange(0, 80_000, 7)
    found = PassTimes(step, None, 10_000).over(8, 0, kv_T)
    assert len(step.asked) < 400
    assert found == pytest.approx([seconds(8, 8, kv) for kv in kv_T.tolist()], rel=5e-4)
    assert found.sum() == pytest.approx(sum(seconds(8, 8, kv) for kv in kv_T.tolist()), rel=1e-4)


def test_without_luck_the_speedup_is_exact_and_its_interval_has_no_width():
    own = requests([40] * 6)
    found = compare(lambda seed: own, Step(), Rate(1.0, 0.1), Fixed(3), limits=Limits(slots=6), repeats=4)
    assert [found.speedup, found.low, found.high] == pytest.approx([4 / 1.3] * 3)
    assert (found.plain.passes, found.drafted.passes) == (40, 10)


def test_every_repeat_has_requests_and_luck_of_its_own():
    asked, own = [], drawn()

    def always_the_same(seed):
        asked.append(seed)
        return own

    found = compare(always_the_same, LINEAR, Rate(0.7), Fixed(3), limits=Limits(slots=16), repeats=3, seed=5)
    assert asked == [5, 6, 7]
    assert len(set(found.speedup_S.tolist())) == 3


def test_the_interval_spans_the_luck_of_lengths_and_drafts():
    found = compare(drawn, LINEAR, Rate(0.7, 1e-4), Fixed(3), limits=Limits(slots=16), repeats=12, seed=5)
    assert len(set(found.speedup_S.tolist())) == 12
    assert found.speedup_S.min() <= found.low < found.speedup < found.high <= found.speedup_S.max()
    own = drawn(5)
    drafted = rollout(own, LINEAR, Rate(0.7, 1e-4), Fixed(3), limits=Limits(slots=16), seed=5)
    plain = rollout(own, LINEAR, limits=Limits(slots=16))
    assert found.speedup_S[0] == plain.seconds / drafted.seconds
    assert found.tokens_per_forward_S[0] == drafted.tokens_per_forward


def test_a_timeline_says_how_its_seconds_came_about_and_kinds_are_never_mixed():
    done = rollout(requests([3]), Step(), limits=Limits(slots=1))
    assert (done.mode, done.source) == ("measured", "a fake")
    other = Rate(0.5)
    other.mode, other.source = "analytic", "a roofline"
    with pytest.raises(PacelineError, match=r"measured \(a fake\).*analytic \(a roofline\)"):
        rollout(requests([3]), Step(), other, Fixed(1), limits=Limits(slots=1))


class _Broken(Rate):
    def kept(self, drafted, step=0.0):
        return np.full(drafted + 1, 0.3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rollout(requests([3]), Step(), limits=Limits(slots=1, kv_tokens=3)), "4 tokens with its prompt never"),
        (lambda: rollout(requests([3]), Step(), None, Fixed(2), limits=Limits(slots=1)), "needs a draft model"),
        (lambda: rollout(requests([3]), Step(lambda *_: math.nan), limits=Limits(slots=1)), "nan s for 1 rows"),
        (
            lambda: rollout(requests([3], prompts=5), Step(lambda *_: 0.0), limits=Limits(slots=1)),
            "0.0 s for a pass over 4 prompt tokens",
        ),
        (lambda: rollout(requests([3]), Step(), _Broken(0.1), Fixed(2), limits=Limits(slots=1)), "3 probabilities"),
        (lambda: rollout(requests([3]), Step(), limits=Limits(slots=1), engines=0), "engines 0"),
        (lambda: compare(drawn, Step(), Rate(1.0), Fixed(1), limits=Limits(slots=1), repeats=0), "repeats 0"),
        (lambda: Limits(slots=0), "slots, kv_tokens"),
        (lambda: Limits(slots=1, batched_tokens=0), "batched_tokens must be at least 1"),
        (
            lambda: rollout(
                requests([3, 3], prompts=3),
                Step(lambda rows, tokens, kv: math.nan if rows != tokens else 1.0),
                limits=Limits(slots=2, batched_tokens=4),
            ),
            "prompt tokens",
        ),
        (lambda: Limits(slots=1, headroom=1.0), "headroom from 0"),
        (lambda: Fixed(-1), "draft length -1"),
        (lambda: Adaptive(-1), "longest draft -1"),
        (lambda: ByRows({}), "at least one entry"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(call, message):
    with pytest.raises(PacelineError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)

"""The follower: what a drafter hears and drafts inside an engine that only shows its batch."""

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from foreign import STOP, Job, Listener, answer, following, knowing, oracle
from paceline.budget.controller import BudgetController, Plan
from paceline.budget.steptime import StepTimeTable
from paceline.config import BudgetConfig
from paceline.drafters import HistoryDrafter, PrefetchingDrafter
from paceline.history import Settings
from paceline.schema import CANARY, Draft, EngineStats, as_tokens

# What is drafted


@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
def test_what_was_said_before_is_drafted_again(native):
    engine = following(HistoryDrafter(salt=1, native=native))
    passes = []
    for epoch in range(2):
        for prompt in range(8):
            engine.admit(Job(f"{epoch}/{prompt}", [prompt + 1] * 5, answer(prompt), beyond=[5] * 20))
        passes.append(engine.run())
    assert passes[0] > 50
    assert passes[1] < 12  # 61 tokens: one, then up to nine a pass


def test_siblings_in_flight_are_drafted_from():
    engine = following(HistoryDrafter(salt=1))
    engine.admit(Job("a", [1, 2, 3], answer(), group="g"))
    for _ in range(30):
        engine.step()
    engine.admit(Job("b", [1, 2, 3], answer(), group="g"))
    for _ in range(5):
        engine.step()
    assert len(engine.jobs["b"].said) > 25


def test_drafts_are_prepared_while_the_engine_verifies():
    engine = following(PrefetchingDrafter(Settings(chains=True, patient=True), salt=1))
    for epoch in range(2):
        engine.admit(Job(str(epoch), [1, 2, 3], answer()))
        engine.run()
    assert engine.follower.stats.drafts_prefetched >= 5


def test_the_best_path_of_a_tree_is_drafted():
    tree = {
        "tokens": as_tokens([10, 20, 21, 11, 22]),
        "parents": as_tokens([-1, -1, 1, 0, 2]),
        "probs": np.array([0.6, 0.4, 0.39, 0.1, 0.38], dtype=np.float32),
        "sources": np.array([1, 2, 3, 1, 3], dtype=np.uint8),
    }
    engine = following(Listener(lambda request, response: Draft(request_id="", length=-1, **tree)))
    engine.admit(Job("a", [1], answer()))
    engine.step()
    assert engine.jobs["a"].draft == [20, 21, 22]  # 1.17 tokens expected, 0.7 of the other path


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([5, 64], None),
        ([5, -1], None),
        ([5, 1 << 40], None),
        ([5.0, 6.0], None),
        ([[5, 6]], None),
        ([5, 6], [0, 0]),
        ([5, 6], [-1, -2]),
        ([5, 6], [-1]),
    ],
)
def test_a_malformed_draft_is_dropped_and_the_others_are_not(tokens, parents):
    def script(request, response):
        if request.request_id == "bad":
            beside = None if parents is None else np.array(parents)
            return Draft(request_id="", tokens=np.array(tokens), parents=beside, length=-1)
        return [5, 6]

    engine = following(Listener(script))
    for name in ("good", "bad"):
        engine.admit(Job(name, [1], answer()))
    engine.step()
    assert [job.draft for job in engine.rows] == [[5, 6], []]
    assert engine.follower.stats.events == {"draft_malformed": 1}


@pytest.mark.parametrize("odd", [{"length": 99}, {"version": 7}])
def test_a_draft_for_another_length_or_version_is_dropped(odd):  # field F1
    fields = {"length": -1} | odd
    engine = following(Listener(lambda request, response: Draft(request_id="", tokens=as_tokens([5]), **fields)))
    engine.admit(Job("a", [1], answer()))
    engine.step()
    assert engine.jobs["a"].draft == []
    assert engine.follower.stats.events == {"draft_stale": 1}


def test_drafts_end_before_the_context_does():
    engine, _ = oracle(context=20)
    engine.admit(Job("a", [1] * 5, answer()[:15], beyond=[5] * 9))
    drafted = []
    while engine.rows:
        engine.step()
        drafted += [(job.total, len(job.draft)) for job in engine.rows]
    assert drafted == [(6, 8), (15, 4)]


def test_drafts_end_before_the_length_limit_does():
    engine, listener = oracle()
    engine.admit(Job("a", [1] * 5, answer()[:12], beyond=[5] * 9, limits={"max_tokens": 12}))
    engine.step()
    engine.step()
    assert len(engine.jobs["a"].draft) == 1
    engine.step()
    assert listener.of("a")[0].rollout.finish_reason == "length"


def test_requests_that_must_not_speculate_are_followed_and_not_drafted_for():
    engine, listener = oracle()
    engine.admit(Job("a", [1], answer()))
    engine.admit(Job("b", [1], answer(), speculate=False))
    engine.run()
    assert listener.of("b")[0].tokens == answer()
    assert not any("b" in names for names in listener.asked)


def test_with_drafting_off_nothing_is_drafted_and_nothing_is_lost():
    engine, listener = oracle()
    engine.admit(Job("a", [1], answer()))
    engine.follower.set_drafting(False)
    for _ in range(5):
        engine.step()
        assert engine.jobs["a"].draft == []
    engine.follower.set_drafting(True)
    engine.run()
    assert listener.of("a")[0].tokens == answer()
    assert engine.follower.stats.tokens_accepted > 40


def test_passes_aside_are_drafted_for_whole_and_leave_no_trace():
    stats = EngineStats(events={})
    controller = BudgetController(BudgetConfig(), StepTimeTable(), stats)  # which would try a plain pass first
    engine = following(HistoryDrafter(salt=1), controller, stats=stats)
    engine.admit(Job("0", [1, 2, 3], answer(), beyond=[5] * 20))
    engine.run()
    engine.follower.set_drafting(False)
    before, learned = replace(stats), controller.state()
    engine.follower.aside(True)
    engine.admit(Job(f"{CANARY}0", [1, 2, 3], answer(), beyond=[5] * 20))
    assert engine.run() < 12
    engine.follower.aside(False)
    assert (stats, controller.state()) == (before, learned)
    engine.admit(Job("1", [1, 2, 3], answer(), beyond=[5] * 20))
    assert engine.run() > 50, "drafting is off again"


# What is heard


def test_nothing_beyond_a_stop_is_committed_or_remembered():  # field C1 C3 C4 C9
    said = [*answer(0, 6), 5, 5]
    listener = Listener(lambda request, response: said[len(response) :])
    engine = following(listener)
    engine.admit(Job("a", [1], said[:7], beyond=[5] * 20))
    assert engine.run() == 2
    (life,) = listener.of("a")
    assert life.tokens == life.rollout.tokens.tolist() == said[:7]
    assert (life.rollout.finish_reason, life.outcomes[-1].finished) == ("stop", True)
    stats = engine.follower.stats
    assert (stats.tokens_emitted, stats.tokens_accepted, stats.tokens_drafted) == (7, 6, 8)


def test_a_stop_counts_only_from_the_least_length_on():
    said = [STOP, 4, STOP, 5, STOP]
    engine, listener = oracle()
    engine.admit(Job("a", [1], said, limits={"min_tokens": 4}))
    engine.run()
    (life,) = listener.of("a")
    assert (life.tokens, life.rollout.finish_reason) == (said, "stop")


def test_a_request_is_told_in_order_whatever_the_pieces_of_its_prompt():
    engine, listener = oracle(fill=3)
    engine.admit(Job("a", [1] * 10, answer()))
    engine.admit(Job("b", [2] * 2, answer(1)))
    for _ in range(3):
        engine.step()
        assert engine.jobs["a"].draft == []
    engine.run()
    assert [life.tokens for life in listener.heard] == [answer(), answer(1)]


def test_what_was_said_while_nobody_listened_is_told_at_once():
    engine, listener = oracle()
    engine.admit(Job("a", [1], answer()))
    for asks in (False, False, True, False, False, False, True):
        engine.step(asks=asks)
    (life,) = listener.of("a")
    assert [len(outcome.tokens) for outcome in life.outcomes] == [3, 9 + 1 + 1 + 1]
    engine.run()
    assert life.tokens == answer()


def test_tokens_that_are_not_known_yet_are_waited_for():  # placeholders of asynchronous scheduling
    engine, listener = oracle()
    for name in ("a", "b"):
        engine.admit(Job(name, [1], answer()))
    engine.step()
    engine.jobs["a"].hidden = 2
    engine.step()
    assert [job.draft != [] for job in engine.rows] == [False, True]
    assert listener.of("a")[0].tokens == answer()[:1]
    engine.run()
    assert [life.tokens for life in listener.heard] == [answer(), answer()]


def test_a_reused_request_id_is_another_request():
    engine, listener = oracle()
    first, second = Job("a", [1], answer()), Job("a", [2] * 40, answer(1))
    engine.admit(first)
    for _ in range(3):
        engine.step()
    engine.abort(first)
    engine.admit(second)
    engine.run()
    one, two = listener.of("a")
    assert (one.tokens, one.rollout.finish_reason) == (first.said, "abort")
    assert (two.tokens, two.rollout.finish_reason) == (second.answer, "stop")
    assert engine.follower.stats.events == {}


def test_a_preempted_request_goes_on_where_it_was():
    engine, listener = oracle(fill=4)
    job = Job("a", [1] * 6, answer())
    engine.admit(job)
    engine.admit(Job("b", [2], answer(1)))
    for _ in range(4):
        engine.step()
    engine.preempt(job)
    engine.step()
    engine.resume(job)
    engine.run()
    assert [(life.tokens, life.rollout.finish_reason) for life in listener.heard] == [
        (answer(), "stop"),
        (answer(1), "stop"),
    ]


@pytest.mark.parametrize(("limits", "reason"), [({}, "abort"), ({"stop": ("x",)}, "stop")])
def test_a_request_that_left_was_aborted_unless_a_stop_string_may_have_ended_it(limits, reason):
    engine, listener = oracle()
    job = Job("a", [1], answer(), limits=limits)
    engine.admit(job)
    engine.admit(Job("b", [1], answer()))
    engine.step()
    engine.step()
    engine.abort(job)
    engine.step()
    (life,) = listener.of("a")
    assert (life.rollout.finish_reason, life.rollout.tokens.tolist()) == (reason, job.said)


def test_a_request_that_cannot_be_introduced_is_left_alone():
    engine, listener = oracle()
    known = engine.introduce
    engine.follower._lives._introduce = lambda name: None if name == "b" else known(name)
    for name in ("a", "b"):
        engine.admit(Job(name, [1], answer()))
    engine.run()
    assert [life.request.request_id for life in listener.heard] == ["a"]
    assert listener.heard[0].tokens == answer()
    assert engine.follower.stats.events == {"request_not_followed": 1}


def test_a_request_that_goes_on_past_its_end_is_followed_no_further():
    engine, listener = oracle()
    job = Job("a", [1], [3, STOP, *answer()])
    engine.admit(job)
    engine.run()
    (life,) = listener.of("a")
    assert (life.tokens, life.rollout.finish_reason) == ([3, STOP], "stop")


def test_canaries_are_drafted_for_and_not_remembered():
    engine = following(HistoryDrafter(salt=1))
    accepted = []
    for name in (f"{CANARY}1", "a", f"{CANARY}2"):
        engine.admit(Job(name, [1, 2], answer()))
        engine.run()
        accepted.append(engine.follower.stats.tokens_accepted)
    assert accepted[0] == accepted[1] == 0
    assert accepted[2] > 40


def test_a_request_that_lost_tokens_starts_anew():
    engine, listener = oracle()
    job = Job("a", [1], answer())
    engine.admit(job)
    engine.step()
    engine.step()
    del job.said[4:]
    job.draft = []
    engine.run()
    assert [life.tokens for life in listener.of("a")] == [answer()[:10], answer()]
    assert [life.rollout.finish_reason for life in listener.of("a")] == ["abort", "stop"]
    assert engine.follower.stats.events == {"request_rewound": 1}


def test_without_a_drafter_the_batch_is_followed():
    engine = following(None)
    engine.admit(Job("a", [1], answer()))
    assert engine.run() == 61
    assert engine.follower.take_ended() == {"a": (0, 0, 61)}


def test_settling_ends_what_is_gone_without_a_pass():
    engine, listener = oracle()
    jobs = [Job(name, [1], answer()) for name in "ab"]
    for job in jobs:
        engine.admit(job)
    engine.step()
    engine.abort(jobs[0])
    engine.follower.settle(engine.jobs)
    assert [life.rollout is None for life in listener.heard] == [False, True]
    engine.follower.settle()
    assert not listener.live
    assert set(engine.follower.take_ended()) == {"a", "b"}


def test_tokens_carry_the_version_that_said_them():  # field G11
    engine, listener = oracle()
    engine.admit(Job("a", [1], answer()))
    engine.step()
    engine.step()
    engine.follower.on_weights(3)
    assert engine.follower.stats.weight_version == 3
    engine.run()
    (life,) = listener.of("a")
    assert life.rollout.versions.tolist() == life.versions == [0] * 10 + [3] * 51


@pytest.mark.parametrize("method", ["start", "propose", "commit", "finish", "on_weights"])
def test_a_drafter_that_raises_is_lost_and_the_engine_goes_on(method):  # field G1
    engine, listener = oracle()

    def fails(*arguments):
        raise RuntimeError("no more")

    setattr(listener, method, fails)
    jobs = [Job(name, [1], answer(), beyond=[5] * 9) for name in "ab"]
    for job in jobs:
        engine.admit(job)
        engine.step()
    engine.follower.on_weights(1)
    engine.run()
    engine.admit(Job("c", [1], answer()))
    assert engine.run() == len(answer())
    assert engine.follower.stats.events == {"drafter_lost": 1}
    assert "RuntimeError: no more" in engine.follower.loss


# What is counted


def test_counters_of_each_request_are_handed_out_once_when_it_ends():  # field C9 I3
    engine, listener = oracle()
    listener.script = knowing(engine.jobs, wrong={30})
    engine.admit(Job("inside", [1], answer(), beyond=[5] * 9, request_id="outside"))
    engine.run()
    assert listener.of("inside")[0].rollout.accept_lengths.tolist() == [0, 8, 8, 8, 2, 8, 8, 8, 3]
    assert engine.follower.take_ended() == {"outside": (7 * 8 + 3, 6 * 8 + 2 + 3, 9)}
    assert engine.follower.take_ended() == {}


def closings(controller):
    """Records what a controller is told of each pass."""
    told, close = [], controller.close

    def spy(plan, accepted, cut, *, emitted, seconds, is_clean=True):
        told.append(
            SimpleNamespace(
                plan=plan, rows=plan.rows, names=[draft.request_id for draft in plan.drafts],
                verified=[len(draft.tokens) for draft in plan.drafts], accepted=[len(path) for path in accepted],
                cut=list(cut), emitted=emitted, seconds=seconds, is_clean=is_clean,
            )
        )  # fmt: skip
        close(plan, accepted, cut, emitted=emitted, seconds=seconds, is_clean=is_clean)

    controller.close = spy
    return told


def test_the_budget_hears_what_was_verified_accepted_and_cut():
    engine, listener = oracle()
    told = closings(engine.follower.controller)
    listener.script = knowing(engine.jobs, wrong={3})
    for name, length in (("a", 10), ("b", 60)):
        engine.admit(Job(name, [1], answer(0, length), beyond=[5] * 9))
    engine.step()
    engine.step(trim=4)
    engine.run()
    _, first, second, third = told[:4]
    assert (first.names, first.verified, first.accepted, first.cut) == (["a", "b"], [4, 4], [2, 2], [False, False])
    assert (second.names, second.verified, second.accepted, second.cut) == (["a", "b"], [7, 8], [7, 8], [True, False])
    assert (second.emitted, second.rows, second.is_clean) == (7 + 9, 2, True)
    assert (third.names, third.rows, third.is_clean) == (["b"], 1, True)


def test_only_passes_of_the_planned_rows_teach_costs():
    engine, _ = oracle(fill=4)
    told = closings(engine.follower.controller)
    job = Job("a", [1], answer())
    engine.admit(job)
    engine.step()
    clean = []
    for change in (
        lambda: None,
        lambda: engine.admit(Job("b", [1] * 6, answer(1))),  # admitted: half a prompt
        lambda: None,  # the other half
        lambda: None,
        lambda: engine.preempt(engine.jobs["b"]),
        lambda: engine.follower.on_weights(1),
        lambda: None,
        lambda: engine.step(asks=False),
        lambda: None,
    ):
        change()
        engine.step(trim=1)
        clean.append((told[-1].is_clean, told[-1].rows))
    assert clean == [
        (True, 1),
        (False, 1),
        (False, 2),
        (True, 2),
        (False, 1),
        (False, 1),
        (True, 1),
        (False, 1),
        (True, 1),
    ]


def test_time_that_the_engine_idled_is_no_pass():
    engine, _ = oracle()
    told = closings(engine.follower.controller)
    for name in "ab":
        engine.admit(Job(name, [1], answer()))
        engine.run()
    engine.admit(Job("c", [1], answer()))
    engine.step()
    assert not told[-1].is_clean
    assert told[-1].seconds == 0
    assert 0 < engine.follower.stats.pass_seconds < 60


def test_a_draft_from_before_a_preemption_or_a_refit_teaches_nothing():  # field F1
    engine, _ = oracle()
    told = closings(engine.follower.controller)
    job = Job("a", [1], answer())
    engine.admit(job)
    engine.step()
    kept = list(job.draft)
    engine.preempt(job)
    engine.step()
    engine.resume(job)
    job.draft = kept  # an engine that verifies it all the same
    engine.step()
    assert (told[-1].names, told[-1].is_clean) == ([], False)
    engine.step()
    assert told[-1].names == ["a"]
    engine.follower.on_weights(1)
    engine.step()
    assert (told[-1].names, told[-1].is_clean) == ([], False)


def test_drafts_that_the_engine_had_from_elsewhere_teach_nothing():
    engine, listener = oracle()
    told = closings(engine.follower.controller)
    listener.script = lambda request, response: answer()[len(response) :][:2]
    job = Job("a", [1], answer())
    engine.admit(job)
    engine.step()
    job.draft = answer()[1:6]
    engine.step()
    assert (told[-1].names, told[-1].emitted, told[-1].is_clean) == ([], 6, False)
    engine.step()
    assert (told[-1].names, told[-1].accepted, told[-1].is_clean) == (["a"], [2], True)


def test_drafting_that_does_not_pay_ends():  # field G10 J5
    stats = EngineStats(events={})
    controller = BudgetController(BudgetConfig(), StepTimeTable(), stats)
    engine = following(Listener(lambda request, response: [9] * 8), controller, stats=stats)
    for name in "abcd":
        engine.admit(Job(name, [1], [1] * 400))
    engine.run()
    assert stats.tokens_drafted < 0.05 * stats.tokens_emitted
    assert stats.passes_plain > 300


def test_rows_that_will_be_long_are_favoured_while_a_batch_drains():
    stats = EngineStats(events={})
    controller = BudgetController(BudgetConfig(), StepTimeTable(), stats)
    controller.open = lambda rows: Plan("draft", rows)
    weighed = []

    def choose(plan, drafts, *, most, weights=None):
        names = [draft.request_id for draft in drafts]
        weighed.append(None if weights is None else dict(zip(names, weights.tolist(), strict=True)))
        return []

    controller.choose = choose
    engine, _ = oracle(controller=controller, stats=stats)
    engine.admit(Job("early", [1], answer(0, 8)))
    for name, limit in (("short", 40), ("long", 300)):
        engine.admit(Job(name, [limit], [3] * limit, limits={"max_tokens": limit}))
    engine.step()
    engine.run()
    assert weighed[:9] == [None] * 9
    drained = [weights for weights in weighed[9:] if len(weights) == 2]
    assert len(drained) > 20
    assert all(weights["long"] > 1 > weights["short"] for weights in drained)

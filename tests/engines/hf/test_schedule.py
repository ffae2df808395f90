"""Who starts first and who drafts: scouts, siblings, requests that opted out, the budget in the engine."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.engines.hf.queue import scouts_first
from paceline.schema import Draft, RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, mixed_trees, oracle, random_trees
from tiny_models import VOCABULARY, tiny

ADAPTIVE = BudgetConfig()


def requests(groups, size, max_tokens=12, **fields):
    rng = np.random.default_rng(7)
    return [
        RolloutRequest(
            request_id=f"g{g}/{i}",
            prompt=as_tokens(prompt),
            params=SamplingParams(max_tokens=max_tokens),
            group=f"g{g}",
            **fields,
        )
        for g, prompt in enumerate(rng.integers(1, VOCABULARY, (groups, 4)))
        for i in range(size)
    ]


def engine(drafter=None, budget_config=ADAPTIVE, **config):
    return HFEngine(
        tiny(), drafter=drafter, budget_config=budget_config, seed=3, eos_ids=(), config=EngineConfig(**config)
    )


def tokens(rollouts):
    return [r.tokens.tolist() for r in rollouts]


# Scouts


def test_scouts_of_every_group_come_first_then_group_by_group():
    groups = ["a"] * 4 + ["b"] * 4 + ["c"]
    assert scouts_first(groups, 2) == [0, 4, 8, 1, 5, 2, 3, 6, 7]
    assert scouts_first(groups, 1) == [0, 4, 8, 1, 2, 3, 5, 6, 7]


@given(groups=st.lists(st.integers(0, 4), max_size=30), scouts=st.integers(0, 5))
def test_every_request_starts_once_and_siblings_keep_their_order(groups, scouts):
    order = scouts_first(groups, scouts)
    assert sorted(order) == list(range(len(groups)))
    for group in set(groups):
        own = [index for index in order if groups[index] == group]
        assert own == sorted(own)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_scouts_start_first_and_the_output_keeps_the_order_of_the_requests(share_prompts):
    reqs = requests(4, 4)
    started = []

    class Watch(ScriptedDrafter):
        def propose(self, request_ids, budget):
            started.extend(name for name in request_ids if name not in started)
            return []

    rollouts = engine(Watch(None), BudgetConfig(mode="fixed"), slots=4, scouts=1, share_prompts=share_prompts).generate(
        reqs
    )
    assert started[:4] == [f"g{g}/0" for g in range(4)]
    assert started[4:] == [f"g{g}/{i}" for g in range(4) for i in range(1, 4)]
    assert [r.request_id for r in rollouts] == [r.request_id for r in reqs]


def test_requests_that_all_fit_keep_the_order_of_arrival():
    eng = engine(slots=8, scouts=2)
    eng.submit(requests(2, 4))
    assert [row.request_id for row in eng._queue.waiting] == [r.request_id for r in requests(2, 4)]


def test_later_requests_do_not_overtake_earlier_ones():
    eng = engine(slots=2, scouts=1)
    first, second = requests(2, 3), [*requests(2, 3)]
    for request in second:
        request.request_id = f"late/{request.request_id}"
    eng.submit(first)
    eng.submit(second)
    waiting = [row.request_id.startswith("late/") for row in eng._queue.waiting]
    assert waiting == sorted(waiting)


@settings(max_examples=25, deadline=None)
@given(slots=st.integers(1, 9), scouts=st.integers(0, 3), share=st.booleans(), groups=st.integers(1, 4))
def test_no_slot_idles_while_a_request_could_use_it(slots, scouts, share, groups):
    reqs = requests(groups, 3, max_tokens=5)
    eng = engine(slots=slots, scouts=scouts, share_prompts=share)
    eng.submit(reqs)
    while eng.busy:
        eng._queue.admit()
        free = slots - len(eng._queue.running)
        computing = {row.prompt_bytes for row in eng._queue.running if row.cached < row.prompt_length - 1}
        for row in eng._queue.waiting if free else ():
            # Only a sibling waits beside a free slot: its prompt is being computed in this very pass.
            assert share
            assert row.prompt_bytes in computing
        eng.step()


@pytest.mark.parametrize("scouts", [0, 1, 2])
def test_who_starts_first_changes_no_token(scouts):
    reqs = requests(4, 4)
    together = tokens(engine().generate(reqs))
    assert tokens(engine(HistoryDrafter(salt=1), slots=3, scouts=scouts).generate(reqs)) == together


# The budget in the engine


@settings(max_examples=20, deadline=None)
@given(
    slots=st.integers(1, 8),
    max_batched_tokens=st.integers(8, 60),
    kv_tokens=st.sampled_from([0, 110, 240]),
    drafter_seed=st.integers(0, 5),
    with_probs=st.booleans(),
)
def test_what_the_budget_leaves_out_changes_no_token(slots, max_batched_tokens, kv_tokens, drafter_seed, with_probs):
    reqs = requests(3, 3, max_tokens=30)
    plain = engine().generate(reqs)
    drafter = Claiming(mixed_trees(plain, drafter_seed, VOCABULARY), with_probs)
    eng = engine(drafter, slots=slots, max_batched_tokens=max_batched_tokens, kv_tokens=kv_tokens)
    assert tokens(eng.generate(reqs)) == tokens(plain)
    stats = eng.stats()
    assert stats.tokens_drafted <= stats.nodes_offered
    assert stats.passes_plain < stats.forwards


class Claiming(ScriptedDrafter):
    """Claims falling probabilities for the scripted trees, or 1 for every node."""

    def __init__(self, script, claims=True, certain=False):
        super().__init__(script)
        self.claims, self.certain = claims, certain

    def propose(self, request_ids, budget):
        drafts = super().propose(request_ids, budget)
        for draft in drafts if self.claims else ():
            parents = range(-1, len(draft.tokens) - 1) if draft.parents is None else draft.parents
            probs = np.ones(len(draft.tokens) + 1, dtype=np.float32)
            for node, parent in enumerate(parents):
                probs[node] = probs[parent] * (1.0 if self.certain else 0.8)
            draft.probs = probs[:-1]
        return drafts


def price(eng, cost):
    """Give the engine a price list instead of the clock: what it decides is then a function of its tokens alone."""
    close = eng.controller.close

    def priced(plan, accepted, cut, **measured):
        plan.propose_seconds = 0.0
        close(plan, accepted, cut, **measured | {"seconds": cost(plan.rows, plan.rows + plan.verified)})

    eng.controller.close = priced


@pytest.mark.parametrize("certain", [True, False])
def test_a_drafter_that_is_never_right_is_soon_left_alone(certain):  # field G10, J5
    drafter = Claiming(random_trees(1, 1, most=9), claims=certain, certain=True)  # token 0 only: hardly ever sampled
    eng = engine(drafter)
    price(eng, lambda rows, tokens: 1.0 + 0.1 * tokens)
    drafted = []
    for visit in range(6):
        before = eng.stats()
        reqs = requests(2, 4, max_tokens=60)
        for request in reqs:
            request.request_id += f"/{visit}"
        eng.generate(reqs)
        after = eng.stats()
        drafted.append((after.tokens_drafted - before.tokens_drafted) / (after.row_forwards - before.row_forwards))
    assert drafted[0] > drafted[-1]
    assert drafted[-1] < 0.05
    assert eng.stats().passes_probed > 0
    assert eng.stats().pass_seconds < 1.02 * eng.stats().plain_seconds


def test_a_drafter_that_is_always_right_drafts_all_it_may():
    reqs = requests(2, 4, max_tokens=100)
    plain = engine().generate(reqs)
    eng = engine(ScriptedDrafter(oracle(plain, 12)))
    price(eng, lambda rows, tokens: 1.0 + 0.001 * tokens)
    assert tokens(eng.generate(reqs)) == tokens(plain)
    assert eng.stats().tokens_emitted > 4 * eng.stats().row_forwards
    assert eng.stats().plain_seconds > 4 * eng.stats().pass_seconds


def test_an_empty_draft_costs_nothing():  # field J7
    eng = engine(ScriptedDrafter(lambda request, response: ([], None)))
    price(eng, lambda rows, tokens: 1.0)
    eng.generate(requests(1, 4))
    stats = eng.stats()
    assert stats.passes_plain == stats.forwards
    assert stats.pass_seconds == stats.plain_seconds


def test_a_request_that_opted_out_is_never_drafted_for():
    reqs = requests(1, 4, max_tokens=20)
    plain = engine().generate(reqs)
    reqs[1].speculate = False
    drafter = ScriptedDrafter(oracle(plain, 5))
    rollouts = engine(drafter, BudgetConfig(mode="fixed")).generate(reqs)
    assert tokens(rollouts) == tokens(plain)
    assert [r.drafted > 0 for r in rollouts] == [True, False, True, True]
    assert all("g0/1" not in asked for asked, _ in drafter.calls)


def test_a_request_at_the_end_of_its_context_does_not_stop_the_others():  # field I4
    long = RolloutRequest(request_id="long", prompt=as_tokens(range(1, 39)), params=SamplingParams(max_tokens=20))
    reqs = [long, *requests(1, 3, max_tokens=20)]
    plain = engine(context=40).generate(reqs)
    assert len(plain[0].tokens) == 2
    drafter = ScriptedDrafter(oracle(plain, 5))
    rollouts = engine(drafter, BudgetConfig(mode="fixed"), context=40).generate(reqs)
    assert tokens(rollouts) == tokens(plain)
    assert all(rollout.accepted > 10 for rollout in rollouts[1:])
    assert rollouts[0].finish_reason == "length"


def test_a_budget_that_the_pass_has_no_room_for_is_a_named_event():
    reqs = requests(1, 4, max_tokens=20)
    plain = engine().generate(reqs)
    for room, cut in ((4 * 17, False), (4 * 17 - 1, True)):
        eng = engine(ScriptedDrafter(oracle(plain, 16)), BudgetConfig(mode="fixed"), slots=4, max_batched_tokens=room)
        assert tokens(eng.generate(reqs)) == tokens(plain)
        assert ("draft_budget_cut" in eng.stats().events) == cut


def test_samples_of_a_request_that_opted_out_opt_out_too():
    (request,) = requests(1, 1, speculate=False)
    request.params = SamplingParams(n=3, max_tokens=8)
    drafter = ScriptedDrafter(lambda r, done: ([1], None))
    engine(drafter, BudgetConfig(mode="fixed")).generate([request])
    assert drafter.calls == []


def test_drafts_that_were_ready_are_counted():
    class Ready(ScriptedDrafter):
        def propose(self, request_ids, budget):
            return [
                Draft(request_id=d.request_id, tokens=d.tokens, length=d.length, prefetched=d.request_id != "g0/0")
                for d in super().propose(request_ids, budget)
            ]

    eng = engine(Ready(lambda r, done: ([], None)), BudgetConfig(mode="fixed"))
    eng.generate(requests(1, 4))
    stats = eng.stats()
    assert stats.drafts_asked > 0
    assert stats.drafts_prefetched * 4 == stats.drafts_asked * 3


@pytest.mark.parametrize("probs", [np.zeros(2), np.full((1, 1), 0.5)])
def test_probabilities_of_another_shape_are_malformed(probs):
    class Odd(ScriptedDrafter):
        def propose(self, request_ids, budget):
            drafts = super().propose(request_ids, budget)
            for draft in drafts:
                draft.probs = probs
            return drafts

    eng = engine(Odd(lambda r, done: ([1], None)), BudgetConfig(mode="fixed"))
    eng.generate(requests(1, 1))
    assert eng.stats().events["draft_malformed"] > 0
    assert eng.stats().tokens_drafted == 0


def test_probabilities_that_are_no_numbers_cost_time_only():
    reqs = requests(1, 3, max_tokens=40)
    plain = engine().generate(reqs)

    class Broken(ScriptedDrafter):
        def propose(self, request_ids, budget):
            drafts = super().propose(request_ids, budget)
            for draft, value in zip(drafts, (np.nan, np.inf, -3.0), strict=False):
                draft.probs = np.full(len(draft.tokens), value)
            return drafts

    assert tokens(engine(Broken(oracle(plain, 4))).generate(reqs)) == tokens(plain)


def test_how_deep_drafts_were_tested_is_counted_exactly_for_trees():
    with closing(engine()) as plainly:
        plain = plainly.generate(requests(1, 3, 24))
    right = {rollout.request_id: rollout.tokens.tolist() for rollout in plain}
    tested = dict.fromkeys(right, 0)

    def script(request, response):
        """At the root a wrong token and a right one, one below the wrong one, and two more below the right one."""
        name, ahead = request.request_id, right[request.request_id][len(response) :]
        if name == "g0/2" or len(ahead) < 4:
            return [], None
        tested[name] += 1
        wrong, last = (ahead[0] + 1) % VOCABULARY, (ahead[2] + (name == "g0/1")) % VOCABULARY
        return [wrong, ahead[0], ahead[1], ahead[1], last], [-1, -1, 0, 1, 3]

    with closing(engine(ScriptedDrafter(script), BudgetConfig(mode="fixed"))) as drafting:
        drafted = drafting.generate(requests(1, 3, 24))
        stats = drafting.stats()
    assert tokens(drafted) == tokens(plain)
    whole, short = tested["g0/0"], tested["g0/1"]
    assert min(whole, short) > 2
    assert stats.depths_tested == (whole + short,) * 3
    assert stats.depths_accepted == (whole + short, whole + short, whole)
    assert sum(stats.depths_accepted) == stats.tokens_accepted


def test_behind_the_end_of_a_response_nothing_was_tested():
    with closing(engine()) as plainly:
        (plain,) = plainly.generate(requests(1, 1))
    said = plain.tokens.tolist()
    at = next(n for n in range(2, 8) if said[n] not in said[:n])
    drafter = ScriptedDrafter(lambda request, response: (said[len(response) :][:8], None))
    fixed = BudgetConfig(mode="fixed")
    with closing(HFEngine(tiny(), drafter=drafter, budget_config=fixed, seed=3, eos_ids=(said[at],))) as ends:
        ends.generate(requests(1, 1))
        stats = ends.stats()
    assert stats.depths_tested == stats.depths_accepted == (1,) * (at + 1)

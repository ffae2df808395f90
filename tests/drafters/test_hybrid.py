"""History and a model together: no token changes, more are accepted than by either, and the model earns its time."""

import logging
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claiming import ClaimingDrafter, Clock, foresight, synthetic
from driving import begin, end, say, visit
from paceline.config import BudgetConfig, DrafterConfig, EngineConfig, HeadConfig, HybridConfig
from paceline.drafters import (
    ForcedDrafter,
    GuardedDrafter,
    HistoryDrafter,
    HybridDrafter,
    PolicyTraits,
    history_of,
    make_drafter,
)
from paceline.drafters.base import Learned, Observer, Paced, Prefetcher, Reads, Renewable
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.prefetch import PrefetchingDrafter
from paceline.engines.hf import HFEngine
from paceline.history import Settings
from paceline.schema import SOURCES, PacelineError, RolloutRequest, SamplingParams, as_tokens
from paceline.simulate.replay import Replay
from scripted import random_trees
from tiny_models import VOCABULARY, tiny


def history(**options):
    return HistoryDrafter(Settings(threads=0, **options), salt=1)


def nothing(request, response):
    return [], []


def chain(*tokens, claim=0.9):
    return ClaimingDrafter(lambda request, response: (list(tokens), [claim] * len(tokens)))


def named(draft):
    sources = [SOURCES[source] for source in draft.sources]
    return list(zip(draft.tokens.tolist(), draft.parents.tolist(), sources, strict=True))


def replayed(drafter, run, budget=8, **options):
    replay = Replay(drafter, budget, **options)
    for step in run:
        replay.play(step, step.requests())
    return replay.result().tokens_per_forward


# What it is worth


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("budget", [4, 16])
@pytest.mark.parametrize("drift", [0.02, 0.15, 0.6])
def test_it_emits_at_least_the_tokens_a_forward_of_the_better_part_and_more_where_both_know_something(
    seed, budget, drift
):
    run, answers = synthetic(seed, drift=drift)
    model = ClaimingDrafter(foresight(answers, seed))
    alone = replayed(history(), run, budget), replayed(model, run, budget)
    together = replayed(HybridDrafter(history(), model.fresh()), run, budget)
    assert together >= 0.99 * max(alone)
    if drift == 0.15:
        assert together > 1.1 * max(alone)


def test_a_model_that_is_always_sure_and_never_right_costs_little():
    run, answers = synthetic(0, steps=10)

    def script(request, response):
        right = answers[request.request_id][len(response) :][:8]
        return [996 - token for token in right], [1.0] * len(right)

    alone = replayed(history(), run, 8)
    assert replayed(HybridDrafter(history(), ClaimingDrafter(script)), run, 8) > 0.95 * alone


def test_history_goes_on_below_what_the_model_alone_foresees():
    """The model knows the one token that differs from what was said before; history knows all that follows it."""
    drafts = {}
    for graft in (True, False):
        drafter = HybridDrafter(history(), chain(50), HybridConfig(graft=graft))
        visit(drafter, [1, 2, 3, 50, 4, 5, 6], [9, 50, 4, 5, 6])
        begin(drafter, "r")
        say(drafter, "r", [1, 2])
        (drafts[graft],) = drafter.propose(["r"], 8)
    assert [node for node in named(drafts[False]) if node[2] == "model"] == [(50, -1, "model")]
    at = named(drafts[True]).index((50, -1, "model"))
    below = named(drafts[True]).index((4, at, "history"))
    assert (5, below, "history") in named(drafts[True])
    assert at not in [parent for _, parent, _ in named(drafts[False])]


def test_an_engine_without_trees_gets_the_path_from_which_most_is_expected():
    drafter = HybridDrafter(history(chains=True), chain(7, 8, claim=0.99), chains=True)
    visit(drafter, [1, 2], [3, 4], [5, 6])
    begin(drafter, "r")
    (draft,) = drafter.propose(["r"], 4)
    assert (draft.parents, draft.tokens.tolist()) == (None, [7, 8])


# What its time is worth


def asked(model):
    return [name for names, _ in model.calls for name in names]


def test_the_model_is_asked_only_where_it_brings_more_than_its_time_is_worth():
    """Requests of a prompt that was answered before, and of one that history knows nothing about; a dear model."""
    clock = Clock()
    model = ClaimingDrafter(lambda request, response: ([5, 6], [0.6, 0.5]), clock, seconds=1.0)
    drafter = HybridDrafter(history(elsewhere_tokens=0), model, clock=clock)
    known = [10, 20, 30, 40, 50] * 4
    visit(drafter, known, known, known, known)
    begin(drafter, "known")
    begin(drafter, "new", prompt=(1, 2), group="h")
    drafter.propose(["known", "new"], 8)  # measures what the model's time is
    assert asked(model) == ["known", "new"], "whole drafts are wanted as long as nothing is known"
    for tokens_per_second in (0.5, 0.9, 100.0, 0.0):
        model.calls.clear()
        drafter.pace(tokens_per_second)
        drafter.propose(["known", "new"], 8)
        expected = {0.5: ["known", "new"], 0.9: ["new"], 100.0: [], 0.0: ["known", "new"]}[tokens_per_second]
        assert set(asked(model)) <= {"known", "new"}
        if tokens_per_second in (100.0, 0.0):
            assert asked(model) == expected
        else:
            assert "new" in asked(model)
    clock.now += 10_000.0
    model.calls.clear()
    drafter.pace(100.0)
    drafter.propose(["known", "new"], 8)
    assert asked(model) == ["known", "new"], "after so long it costs next to nothing to look again"


def test_what_the_model_brought_beyond_history_decides_about_asking_it_again():
    """It only ever repeats what history says too: soon it is not worth any time."""
    clock, text = Clock(), [10, 20, 30, 40, 50, 60, 70, 80] * 3
    model = ClaimingDrafter(lambda request, response: (text[len(response) :][:2], [0.9] * 2), clock, seconds=1.0)
    drafter = HybridDrafter(history(), model, clock=clock)
    visit(drafter, text, text, text, text)
    drafter.pace(0.05)
    counts = []
    for number in range(40):
        model.calls.clear()
        begin(drafter, f"r{number}")
        for at in range(0, len(text), 3):
            drafter.propose([f"r{number}"], 8)
            say(drafter, f"r{number}", text[at : at + 3])
        end(drafter, f"r{number}", text)
        counts.append(len(model.calls))
    assert counts[0] > 0
    assert sum(counts[-10:]) == 0


# Exactness


def requests(temperature=1.0):
    return [
        RolloutRequest(
            request_id=f"{index}",
            prompt=as_tokens([3, 4 + index % 2, 5]),
            params=SamplingParams(max_tokens=14, temperature=temperature),
        )
        for index in range(6)
    ]


def decoded(drafter, wanted, budget=8, acceptance="coupled"):
    engine = HFEngine(
        tiny(), drafter=drafter, budget=budget, budget_config=BudgetConfig(mode="fixed"), eos_ids=(),
        config=EngineConfig(acceptance=acceptance),
    )  # fmt: skip
    rollouts = [rollout.tokens.tolist() for _ in range(2) for rollout in engine.generate(wanted)]
    stats = engine.stats()
    engine.close()
    return rollouts, stats


@cache
def plain(temperature):
    return decoded(None, requests(temperature=temperature))[0]


def hostile(seed):
    """Claims of any kind for tokens of any kind, trees among them."""
    rng, trees = np.random.default_rng(seed), random_trees(seed, VOCABULARY)

    def script(request, response):
        tokens, _ = trees(request, response)
        return list(tokens), list(rng.choice([0.0, 1e-9, 0.5, 1.0], len(tokens)))

    return ClaimingDrafter(script)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 99),
    budget=st.sampled_from([1, 3, 8]),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    graft=st.booleans(),
    chains=st.booleans(),
)
def test_tokens_are_those_without_a_drafter_whatever_its_parts_say(seed, budget, temperature, graft, chains):
    wanted = requests(temperature=temperature)
    drafter = HybridDrafter(history(chains=chains), hostile(seed), HybridConfig(graft=graft), chains=chains)
    tokens, stats = decoded(drafter, wanted, budget)
    assert tokens == plain(temperature)
    assert stats.events.get("draft_malformed", 0) == stats.events.get("drafter_lost", 0) == 0
    assert stats.tokens_drafted > 0


def traits(acceptance="coupled"):
    return PolicyTraits(vocabulary_size=VOCABULARY, run_seed=0, acceptance=acceptance)


@pytest.mark.parametrize("seed", [0, 7], ids=["the policy itself", "another model"])
def test_with_a_draft_model_tokens_are_those_without_and_both_sources_serve(seed):
    wanted = requests(temperature=0.7)
    drafter = HybridDrafter(history(), DraftModelDrafter(tiny(seed=seed), traits()))
    assert all(isinstance(drafter, seam) for seam in (Learned, Paced))
    assert not isinstance(drafter, Observer | Prefetcher)
    tokens, stats = decoded(drafter, wanted)
    assert tokens == plain(0.7)
    assert stats.tokens_accepted > (30 if seed == 0 else 0)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_under_acceptance_by_laws_a_request_gets_one_source_that_no_drawn_token_decides(acceptance):
    model = DraftModelDrafter(tiny(seed=7), traits(acceptance))
    drafter = HybridDrafter(history(), model, coupled=False)
    seen = []
    propose = drafter.propose
    drafter.propose = lambda names, budget: seen.extend(propose(names, budget)) or seen[-len(names) :]
    decoded(drafter, requests(), acceptance=acceptance)
    drawn = [draft for draft in seen if draft.laws is not None]
    others = [draft for draft in seen if draft.laws is None]
    assert drawn
    assert others
    assert all(set(draft.sources) == {SOURCES.index("model")} and draft.probs is None for draft in drawn)
    assert all(SOURCES.index("model") not in draft.sources for draft in others)


def test_greedy_requests_get_one_tree_of_both_under_any_acceptance():
    wanted = requests(temperature=0.0)
    drafter = HybridDrafter(history(), DraftModelDrafter(tiny(seed=7), traits("rejection")), coupled=False)
    tokens, _ = decoded(drafter, wanted, acceptance="rejection")
    assert tokens == plain(0.0)


def test_a_draft_model_goes_on_behind_a_token_that_another_drafted():
    """What it drafts there is what it drafts once that was said; its own tokens stay beside."""
    ahead, behind = (DraftModelDrafter(tiny(seed=7), traits()) for _ in range(2))
    for drafter in (ahead, behind):
        drafter.start(requests())
    (own,) = ahead.propose(["0"], 4)
    wanted = [int(own.tokens[0]), (int(own.tokens[1]) + 1) % VOCABULARY]
    asked = []

    def guide(name, drafted, token, claim):
        asked.append((name, list(drafted), token))
        return (wanted[len(drafted)], 0.9) if len(drafted) < 2 and token != wanted[len(drafted)] else None

    ahead.guide(guide)
    (draft,) = ahead.propose(["0"], 4)
    behind.propose(["0"], 4)
    say(behind, "0", wanted)
    (after,) = behind.propose(["0"], 2)
    followed = [wanted[0], int(own.tokens[1]), wanted[1], *after.tokens.tolist()]
    assert draft.tokens.tolist() == followed
    assert draft.parents.tolist() == [-1, 0, 0, 2, 3]
    assert [place[1] for place in asked] == [[], wanted[:1], wanted, [*wanted, followed[3]]]
    say(ahead, "0", [*wanted, 1])  # what was cached on the way is right
    say(behind, "0", [1])
    assert ahead.propose(["0"], 3)[0].tokens.tolist()[-1] == behind.propose(["0"], 3)[0].tokens.tolist()[-1]


@pytest.mark.parametrize("extend", [True, False])
def test_where_history_ends_the_model_goes_on(extend):
    """History knows an answer of four tokens that the model would not begin with; the model follows it, or does not."""
    wanted = requests()[:1]
    said = plain(1.0)[0]
    drafter = HybridDrafter(history(), DraftModelDrafter(tiny(), traits()), HybridConfig(extend=extend))
    drafter.start([RolloutRequest(request_id="before", prompt=wanted[0].prompt)])
    other = [(said[0] + 1) % VOCABULARY, *said[1:4]]
    say(drafter, "before", other)
    end(drafter, "before", other)
    drafter.start(wanted)
    (draft,) = drafter.propose(["0"], 12)
    paths = {tuple(path_of(draft, node)) for node in range(len(draft.tokens))}
    goes_on = [path for path in paths if len(path) > 4 and list(path[:4]) == other]
    assert bool(goes_on) == extend


def path_of(draft, node):
    path = []
    while node >= 0:
        path.insert(0, int(draft.tokens[node]))
        node = int(draft.parents[node])
    return path


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_with_a_head_tokens_are_those_without_and_the_configuration_makes_it(kind):
    config = DrafterConfig(kind="hybrid", hybrid=HybridConfig(model=kind), head=HeadConfig(block=4))
    drafter = make_drafter(config, salt=1, policy=traits())
    assert all(isinstance(drafter, seam) for seam in (Learned, Observer, Paced, Reads, Renewable))
    tokens, stats = decoded(drafter, requests())
    assert tokens == plain(1.0)
    assert stats.events.get("drafter_lost", 0) == 0
    assert drafter.weights


# Parts that fail, and what outlives them


class Broken(ClaimingDrafter):
    def __init__(self):
        super().__init__(nothing)

    def propose(self, request_ids, budget):
        raise MemoryError("no room")

    def fresh(self):
        raise PacelineError("there is no other")


def test_a_model_that_is_lost_leaves_history_drafting_and_is_told_to_the_engine(caplog):
    wanted = requests(temperature=0.3)
    with caplog.at_level(logging.WARNING):
        tokens, stats = decoded(HybridDrafter(history(), Broken()), wanted)
    assert tokens == plain(0.3)
    assert stats.events["drafter_lost"] == 1
    assert stats.tokens_accepted > 0
    assert "Broken: MemoryError: no room; history drafts on alone" in caplog.text


def test_a_history_that_is_lost_leaves_the_model_drafting_and_has_no_memory_left():
    lost = history()
    lost.commit = None
    drafter = HybridDrafter(lost, DraftModelDrafter(tiny(), traits()))
    tokens, stats = decoded(drafter, requests())
    assert tokens == plain(1.0)
    assert stats.events["drafter_lost"] == 1
    assert stats.tokens_accepted > 30
    assert history_of(drafter) is None


def test_its_memory_is_its_historys_and_comes_back_from_a_snapshot():
    drafter = HybridDrafter(history(), chain(5))
    visit(drafter, [1, 2, 3], [1, 2, 3])
    kept = history_of(GuardedDrafter(ForcedDrafter(drafter, None), lambda event, line: None))
    assert kept is drafter.history.inner
    other = HybridDrafter(history(), ClaimingDrafter(nothing))
    history_of(other).restore(kept.snapshot())
    begin(other, "r")
    assert other.propose(["r"], 4)[0].tokens.tolist() == [1, 2, 3]


def test_another_of_the_same_settings_knows_nothing_and_drafts_for_what_is_in_flight():
    drafter = HybridDrafter(history(), chain(5, 6), HybridConfig(graft=False))
    assert isinstance(drafter, Renewable)
    guard = GuardedDrafter(drafter, lambda event, line: None)
    visit(guard, [1, 2], [1, 2])
    begin(guard, "r")
    assert guard.revive()
    assert guard.inner.config == drafter.config
    assert [draft.tokens.tolist() for draft in guard.propose(["r"], 4)] == [[5, 6]]
    with pytest.raises(PacelineError, match="cannot be made anew"):
        HybridDrafter(history(), DraftModelDrafter(tiny(), traits())).fresh()


def test_weights_of_the_model_are_loaded_and_reloaded_through_it():
    model = DraftModelDrafter(tiny(seed=1), traits())
    drafter = HybridDrafter(history(), model)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in drafter.weights.items()}
    drafter.load_weights(3, wanted)
    assert drafter.weights_version == model.weights_version == 3
    assert all(not tensor.any() for tensor in model.model.parameters())
    with torch.no_grad():
        model.model.get_input_embeddings().weight.add_(1.0)
    assert drafter.reload()
    assert all(not tensor.any() for tensor in model.model.parameters())


def test_what_history_prepares_is_used_in_it_too():
    drafter = HybridDrafter(PrefetchingDrafter(Settings(threads=0, patient=True), salt=1), ClaimingDrafter(nothing))
    assert isinstance(drafter, Prefetcher)
    visit(drafter, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    begin(drafter, "r")
    (draft,) = drafter.propose(["r"], 2)
    drafter.verifying([draft])
    say(drafter, "r", [1, 2, 3])
    (draft,) = drafter.propose(["r"], 2)
    assert draft.prefetched

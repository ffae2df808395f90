"""Every objective under context parallelism against one process's, by simulated ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from context_cases import (
    KINDS,
    alone,
    furthest,
    model_of,
    part,
    policy_of,
    shards_of,
    texts_of,
)
from paceline.cotrain.losses import Teacher
from paceline.cotrain.objectives import make_objective
from paceline.cotrain.parallel import blocks, objectives
from paceline.cotrain.parallel.documents import Shard, ShardDocument
from paceline.cotrain.parallel.layout import Layout, LayoutError
from paceline.cotrain.parallel.objectives import make_context_objective
from paceline.cotrain.parallel.transport import simulate
from paceline.forward.pretrained import ModelError
from taught import KEYS
from tiny_models import tiny


@pytest.fixture(scope="module")
def policy():
    return policy_of()


def played(kind, policy, documents, world, held=None, update=0):
    """The ranks' summed loss and sums, and the gradients of each."""
    models = [model_of(kind, policy) for _ in range(world)]
    parts = simulate(world, lambda each: part(models[each.rank], policy, documents, each, held, update))
    names = {frozenset(sums) for _, sums, _ in parts}
    assert len(names) == 1, "all ranks report the same names"
    totals = {name: sum(sums[name] for _, sums, _ in parts) for name in parts[0][1]}
    return sum(loss for loss, _, _ in parts), totals, [gradients for _, _, gradients in parts]


def assert_same(found, wanted, bar=1e-12):
    (loss, sums, gradients), (own, own_sums, own_gradients) = wanted, found
    assert abs(own - loss) < bar * max(1, abs(loss))
    assert own_sums == pytest.approx(sums, rel=bar, abs=10 * bar)
    for each in own_gradients:
        assert furthest(each, gradients) < bar
        assert all(torch.equal(each[name], grad) for name, grad in own_gradients[0].items())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", [*KINDS, "mtp"])
def test_ranks_together_are_one_process(policy, kind, world):
    model = model_of(kind, policy)
    documents = texts_of(model, policy)
    # transformers' norms of an MTP head compute in float32.
    bar = 1e-5 if kind == "mtp" else 1e-12
    assert_same(played(kind, policy, documents, world), alone(model, policy, documents), bar)


@pytest.mark.parametrize(
    "shapes", [[(2, 1)], [(3, 2), (3, 1)], [(40, 38)]], ids=["a row", "few rows", "few that count"]
)
@pytest.mark.parametrize("kind", ["block", "language model", "window"])
def test_ranks_without_rows_take_part(policy, kind, shapes):
    model = model_of(kind, policy)
    documents = texts_of(model, policy, shapes)
    assert_same(played(kind, policy, documents, 4), alone(model, policy, documents))


SHAPE = st.integers(2, 24).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length - 1)))


@pytest.mark.parametrize("kind", ["block", "window"])
@settings(deadline=None, max_examples=8)
@given(st.lists(SHAPE, min_size=1, max_size=4), st.sampled_from([2, 3, 4]), st.integers(0, 9))
def test_ranks_of_any_packed_documents_are_one_process(policy, kind, shapes, world, update):
    model = model_of(kind, policy)
    documents = texts_of(model, policy, shapes)
    wanted = alone(model, policy, documents, update)
    assert_same(played(kind, policy, documents, world, update=update), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_hold_different_documents_add_up_to_one_process(policy, kind):
    model = model_of(kind, policy)
    documents = texts_of(model, policy)
    loss, sums, gradients = alone(model, policy, documents)
    groups = [played(kind, policy, documents, 2, held) for held in ({0, 3, 4}, {1, 2, 5, 6, 7}, set())]
    assert abs(sum(own for own, _, _ in groups) - loss) < 1e-12
    assert {name: sum(own[name] for _, own, _ in groups) for name in sums} == pytest.approx(sums, rel=1e-12, abs=1e-11)
    whole = {name: sum(own[0][name] for _, _, own in groups[:2]) for name in gradients}
    assert furthest(whole, gradients) < 1e-12
    # The group that holds none has gone through a backward, and has nothing to add.
    assert groups[2][0] == 0.0
    assert set(groups[2][1].values()) == {0.0}
    assert groups[2][2] == [{}, {}]


@settings(deadline=None)
@given(st.lists(SHAPE, min_size=1, max_size=5), st.sampled_from([1, 2, 3, 4]), st.randoms())
def test_a_document_s_deal_does_not_depend_on_what_it_is_packed_with(shapes, world, draw):
    rows = [length - 1 for length, _ in shapes]
    order = draw.sample(range(len(rows)), draw.randint(1, len(rows)))
    packed = Layout([rows[place] for place in order], world)
    for rank in range(world):
        alone = [Layout([rows[place]], world).rows(rank) for place in order]
        assert packed.positions(rank).tolist() == np.concatenate(alone).tolist()
        counts = [len(own) for own in alone]
        assert packed.documents(rank).tolist() == np.repeat(np.arange(len(order)), counts).tolist()


def test_packed_documents_are_one_behind_the_other(policy):
    documents = texts_of(model_of("eagle3", policy), policy)
    for rank in range(3):
        shards = [ShardDocument.of(document, 3, rank) for document in documents]
        packed = Shard.packed(shards, 3, rank)
        whole = torch.from_numpy(packed.layout.rows(rank))
        for name, side in (("states_NS", "states_PS"), ("final_NH", "final_PH")):
            assert torch.equal(getattr(packed, name), torch.cat([getattr(shard, name) for shard in shards]))
            assert torch.equal(getattr(packed, name), torch.cat([getattr(each, side) for each in documents])[whole])


def test_documents_that_are_not_this_rank_s_are_refused_in_one_line(policy):
    (document,) = texts_of(model_of("eagle3", policy), policy, [(10, 3)])
    shard = ShardDocument.of(document, 2, 0)
    wrong = r"document 0: states_NS has 3 rows, and context rank 1 of 2 owns 6 of 9; deal them by Layout\(\[9\], 2\)"
    with pytest.raises(LayoutError, match=wrong):
        Shard.packed([shard], 2, 1)
    with pytest.raises(LayoutError, match="document 1: this rank's group does not hold it"):
        Shard.packed([shard, ShardDocument(document.tokens, 3, None, None)], 2, 0)
    with pytest.raises(ValueError, match="one of states_NS and final_NH is None"):
        ShardDocument(document.tokens, 3, shard.states_NS, None)
    with pytest.raises(ValueError, match="prompt_length 10"):
        ShardDocument(document.tokens, 10, None, None)


@pytest.mark.parametrize("kind", ["eagle3", "block", "language model"])
def test_ranks_that_hold_other_documents_or_draw_otherwise_are_refused(policy, kind):
    models = [model_of(kind, policy) for _ in range(2)]
    documents = texts_of(models[0], policy, [(9, 4), (9, 4)])

    def play(transport, held, update):
        objective = make_context_objective(models[transport.rank], Teacher.of(policy), transport, **KEYS)
        objective.update = update[transport.rank]
        with pytest.raises(LayoutError, match="context rank 1 has other documents than rank 0"):
            objective.loss(shards_of(documents, transport, held[transport.rank]), denominator=1.0)
        return True

    assert all(simulate(2, lambda each: play(each, ({0}, {1}), (0, 0))))
    assert all(simulate(2, lambda each: play(each, ({0}, set()), (0, 0))))
    if kind == "block":
        assert all(simulate(2, lambda each: play(each, ({0}, {0}), (0, 1))))


def test_the_count_is_of_all_documents_whoever_holds_them(policy):
    for kind in KINDS:
        model = model_of(kind, policy)
        documents = texts_of(model, policy)
        whole = make_objective(model, Teacher.of(policy), **KEYS).count(documents)

        def play(transport, model=model, documents=documents):
            objective = make_context_objective(model, Teacher.of(policy), transport, **KEYS)
            return [objective.count(shards_of(documents, transport, held)) for held in (None, {1}, set())]

        assert simulate(2, play) == [[whole] * 3] * 2


def test_a_model_whose_rows_look_at_each_other_otherwise_is_refused(policy):
    model = tiny("qwen3")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="Qwen3ForCausalLM uses linear_attention, which does not go over a ring"):
        simulate(1, lambda each: make_context_objective(model, Teacher.of(policy), each, **KEYS))


def test_the_comparison_sees_teachers_shifted_where_they_lie(policy, monkeypatch):
    model = model_of("block", policy)
    documents = texts_of(model, policy)
    loss, _, gradients = alone(model, policy, documents)

    class Shifted(blocks.Layout):
        def halo(self, rank, reach):
            halo = super().halo(rank, reach)
            there = np.arange(halo.at_DN.shape[1])
            for shift, at_N in enumerate(halo.at_DN, start=1):
                at_N[at_N >= 0] = ((there + shift) % max(len(there), 1))[at_N >= 0]
            return halo

    monkeypatch.setattr("paceline.cotrain.parallel.documents.Layout", Shifted)
    own, _, (own_gradients, _) = played("block", policy, documents, 2)
    assert abs(own - loss) > 1e-4
    assert furthest(own_gradients, gradients) > 1e-4


def test_the_comparison_sees_a_window_that_is_ignored_and_rows_that_know_no_other_rank(policy, monkeypatch):
    model = model_of("window", policy)
    documents = texts_of(model, policy)
    loss, _, _ = alone(model, policy, documents)

    class Unbounded(objectives.rows.RingRows):
        def plan(self, window):
            return super().plan(None)

    class Local(objectives.rows.RingRows):
        def plan(self, window):
            plan = super().plan(window)
            plan.tiles = [own if rank == self.transport.rank else [] for rank, own in enumerate(plan.tiles)]
            return plan

    for broken in (Unbounded, Local):
        monkeypatch.setattr(objectives.rows, "RingRows", broken)
        own, _, _ = played("window", policy, documents, 2)
        assert abs(own - loss) > 1e-4

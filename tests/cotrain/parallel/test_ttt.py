"""A whole head's training-time test under context parallelism, by simulated ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cotrain.losses import Teacher
from paceline.cotrain.parallel import documents as shards
from paceline.cotrain.parallel.layout import LayoutError
from paceline.cotrain.parallel.transport import simulate
from paceline.cotrain.parallel.ttt import ContextTest, Shard
from paceline.cotrain.ttt import TrainingTimeTest
from ring_cases import play_head
from taught import KEYS, dense_of, documents_of, gradients, trained
from tiny_models import tiny


@pytest.fixture(scope="module")
def policy():
    return tiny("llama").requires_grad_(False)


def played(policy, documents, world, kind="eagle3", denominator=None, **keys):
    """The ranks' summed loss and sums, and the gradients of each."""
    heads = [trained(policy, kind, **keys)[0] for _ in range(world)]

    parts = simulate(world, lambda each: play_head(heads[each.rank], documents, each, denominator))
    names = {name for _, sums, _ in parts for name in sums}
    totals = {name: sum(sums.get(name, 0.0) for _, sums, _ in parts) for name in names}
    return sum(loss for loss, _, _ in parts), totals, [grads for _, _, grads in parts]


def alone(policy, documents, kind="eagle3", **keys):
    head, objective = trained(policy, kind, **keys)
    loss, sums = objective.loss(documents, denominator=objective.count(documents))
    return loss.item(), sums, gradients(head, loss)


def furthest(grads, wanted):
    assert grads.keys() == wanted.keys()
    return max(float((grads[name] - grad).abs().max() / grad.abs().max().clamp_min(1)) for name, grad in wanted.items())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "keys", "bar"),
    [
        ("eagle3", {"vocabulary": 17}, 1e-12),
        ("eagle3", {"layers": 2}, 1e-12),
        ("mtp", {}, 1e-5),  # transformers' norms compute in float32
        ("eagle3", {"dtype": "float32"}, 1e-5),
    ],
    ids=str,
)
def test_ranks_together_are_one_process(policy, world, kind, keys, bar):
    head, _ = trained(policy, kind)
    documents = documents_of(policy, head.taps, [(12, 4), (9, 1), (4, 2), (7, 6), (40, 11), (2, 1)])
    loss, sums, grads = alone(policy, documents, kind, **keys)
    own, own_sums, own_grads = played(policy, documents, world, kind, **keys)
    assert own == pytest.approx(loss, rel=bar)
    assert own_sums == pytest.approx(sums, rel=10 * bar)
    for each in own_grads:
        assert furthest(each, grads) < bar
        assert all(torch.equal(each[name], grad) for name, grad in own_grads[0].items())


SHAPES = st.integers(3, 24).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length - 2)))


@settings(deadline=None, max_examples=12)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.sampled_from([2, 3, 4]))
def test_ranks_of_any_packed_documents_are_one_process(shapes, world):
    policy = tiny("llama").requires_grad_(False)
    head, _ = trained(policy)
    documents = documents_of(policy, head.taps, shapes)
    loss, sums, grads = alone(policy, documents)
    own, own_sums, own_grads = played(policy, documents, world)
    assert abs(own - loss) < 1e-12
    assert own_sums == pytest.approx(sums, abs=1e-11)
    assert all(furthest(each, grads) < 1e-12 for each in own_grads)


def test_ranks_together_are_the_dense_definition(policy):
    head, _ = trained(policy)
    documents = documents_of(policy, head.taps)
    loss, _, sums, grads = dense_of(head, policy, documents)
    own, own_sums, (own_grads, *_) = played(policy, documents, 2)
    assert abs(own - loss.item()) < 1e-12
    assert own_sums == pytest.approx(sums, abs=1e-11)
    assert furthest(own_grads, grads) < 1e-12


@pytest.mark.parametrize("shapes", [[(4, 1)], [(3, 1)], [(40, 38)]], ids=["two rows", "one row", "one row counts"])
def test_ranks_without_rows_take_part(policy, shapes):
    head, _ = trained(policy)
    documents = documents_of(policy, head.taps, shapes)
    loss, _, grads = alone(policy, documents)
    own, _, own_grads = played(policy, documents, 4)
    assert abs(own - loss) < 1e-12
    assert all(furthest(each, grads) < 1e-12 for each in own_grads)


def test_nothing_to_learn_from_is_no_loss_and_no_gradient(policy):
    head, _ = trained(policy)
    loss, sums, grads = played(policy, documents_of(policy, head.taps, [(2, 1), (3, 2)]), 2, denominator=1.0)
    assert (loss, set(sums.values())) == (0.0, {0.0})
    assert all(float(grad.abs().max()) == 0 for each in grads for grad in each.values())


def test_the_comparison_sees_teachers_shifted_where_they_lie(policy, monkeypatch):
    head, _ = trained(policy)
    documents = documents_of(policy, head.taps)
    loss, _, grads = alone(policy, documents)

    class Shifted(shards.Layout):
        def halo(self, rank, reach):
            halo = super().halo(rank, reach)
            there = torch.arange(halo.at_DN.shape[1]).numpy()
            for shift, at_N in enumerate(halo.at_DN, start=1):
                at_N[:] = (there + shift) % max(len(there), 1)
            return halo

    monkeypatch.setattr(shards, "Layout", Shifted)
    own, _, (own_grads, _) = played(policy, documents, 2)
    assert abs(own - loss) > 1e-4
    assert furthest(own_grads, grads) > 1e-4


def test_the_comparison_sees_a_denominator_of_the_rank_s_own(policy):
    head, _ = trained(policy)
    documents = documents_of(policy, head.taps)
    loss, _, _ = alone(policy, documents)

    def play(transport):
        inner = TrainingTimeTest(heads[transport.rank], Teacher.of(policy), **KEYS)
        shard = Shard.of(documents, 2, transport.rank)
        _, sums = ContextTest(inner, transport).loss(shard, denominator=1.0)
        own = sum(KEYS["decay"] ** (d - 1) * sums[f"rows_{d}"] for d in range(1, KEYS["passes"] + 1))
        value, _ = ContextTest(inner, transport).loss(shard, denominator=own)
        return value.item()

    heads = [trained(policy)[0] for _ in range(2)]
    assert abs(sum(simulate(2, play)) / 2 - loss) > 1e-4


def test_ranks_with_other_tokens_of_the_same_lengths_are_refused(policy):
    head, _ = trained(policy)
    batches = [documents_of(policy, head.taps, [(9, 4)], seed) for seed in (0, 1)]
    heads = [trained(policy)[0] for _ in range(2)]

    def play(transport):
        inner = TrainingTimeTest(heads[transport.rank], Teacher.of(policy), **KEYS)
        with pytest.raises(LayoutError, match="context rank 1 has other documents than rank 0"):
            ContextTest(inner, transport).loss(Shard.of(batches[transport.rank], 2, transport.rank), denominator=1.0)
        return True

    assert all(simulate(2, play))

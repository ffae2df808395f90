"""Trainers on several ranks against one process's: weights, metrics and what they refuse together."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from context_cases import (
    KINDS,
    alone,
    furthest,
    model_of,
    numbers_of,
    policy_of,
    rank_main,
    shards_of,
    texts_of,
    trained_by,
    trainer_of,
)
from paceline.cotrain.parallel.transport import simulate

PROCESSES = 2


@pytest.fixture(scope="module")
def policy():
    return policy_of()


def assert_trained_alike(ranks, wanted):
    metrics, weights = wanted
    for own_metrics, own_weights in ranks:
        assert [dict(each) for each in own_metrics] == [
            pytest.approx(each, rel=1e-12, abs=1e-12, nan_ok=True) for each in metrics
        ]
        assert furthest(own_weights, weights) < 1e-12
        assert all(torch.equal(own_weights[name], tensor) for name, tensor in ranks[0][1].items())
        assert own_metrics == ranks[0][0]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_trainers_on_ranks_come_to_the_weights_and_metrics_of_one_process(policy, kind, world):
    model = model_of(kind, policy)
    documents = texts_of(model, policy)
    wanted = trained_by(trainer_of(model, policy), documents)
    assert wanted[0][0]["updates"] == 2.0
    models = [model_of(kind, policy) for _ in range(world)]

    def play(transport):
        trainer = trainer_of(models[transport.rank], policy, transport)
        return trained_by(trainer, shards_of(documents, transport))

    assert_trained_alike(simulate(world, play), wanted)
    assert furthest(wanted[1], model_of(kind, policy).state_dict()) > 1e-3, "it has moved"


class Crew:
    """Sums over threads, in the order of their numbers."""

    def __init__(self, count):
        self.barrier, self.given = threading.Barrier(count, timeout=60), [None] * count

    def peers(self, number):
        return CrewPeers(self, number)

    def sum(self, number, tensor):
        self.given[number] = tensor.clone()
        self.barrier.wait()
        total = torch.stack(self.given).sum(0)
        self.barrier.wait()
        return total


class CrewPeers:
    def __init__(self, crew, number):
        self.crew, self.number = crew, number

    def total(self, sums):
        names = sorted(sums)
        given = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        return dict(zip(names, self.crew.sum(self.number, given).tolist(), strict=True))

    def sum_gradients(self, parameters):
        for parameter in parameters:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.crew.sum(self.number, own)


@pytest.mark.parametrize("kind", KINDS)
def test_trainers_of_two_groups_of_two_ranks_are_one_process_s(policy, kind):
    documents = texts_of(model_of(kind, policy), policy)
    # Some micro-batches are of one group alone.
    held = ({0, 2, 4}, {1, 3, 5, 6, 7})
    changes = {"microbatch_tokens": 13}
    wanted = trained_by(trainer_of(model_of(kind, policy), policy, **changes), documents)
    models = [model_of(kind, policy) for _ in range(4)]
    crew = Crew(4)

    def group(number):
        def play(transport):
            rank = 2 * number + transport.rank
            trainer = trainer_of(models[rank], policy, transport, crew.peers(rank), **changes)
            return trained_by(trainer, shards_of(documents, transport, held[number]))

        return simulate(2, play)

    with ThreadPoolExecutor(2) as pool:
        ranks = [own for both in pool.map(group, range(2)) for own in both]
    assert_trained_alike(ranks, wanted)


def test_a_gradient_that_is_not_finite_on_one_rank_moves_none(policy):
    models = [model_of("eagle3", policy) for _ in range(2)]
    before = {name: tensor.clone() for name, tensor in models[0].checkpoint().items()}
    documents = texts_of(models[0], policy)

    def play(transport):
        trainer = trainer_of(models[transport.rank], policy, transport, updates=1)
        shards = shards_of(documents, transport)
        first = shards[0]
        broken = replace(first, states_NS=first.states_NS * (math.nan if transport.rank else 1.0))
        skipped = trainer.train([broken, *shards[1:]])
        weights = {name: tensor.clone() for name, tensor in trainer.weights.items()}
        return skipped, weights, trainer.train(shards)["updates"]

    for metrics, weights, updates in simulate(2, play):
        assert (metrics["skipped_not_finite"], metrics["updates"], updates) == (1.0, 0.0, 1.0)
        assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())


def test_other_anchors_are_drawn_at_every_update_on_all_ranks(policy):
    models = [model_of("block", policy) for _ in range(2)]
    documents = texts_of(models[0], policy)

    def play(transport):
        trainer = trainer_of(models[transport.rank], policy, transport)
        for _ in range(2):
            trainer.train(shards_of(documents, transport))
        return trainer.objective.update

    assert simulate(2, play) == [3, 3]


def test_a_teacher_that_is_held_teaches_the_ranks(policy):
    moving = policy_of().requires_grad_(True)
    model = model_of("language model", policy)
    documents = texts_of(model, moving)
    (before,) = simulate(1, lambda each: trainer_of(model, moving, each).judge(shards_of(documents, each)))

    def play(transport):
        trainer = trainer_of(model, moving, transport)
        trainer.teacher.hold()
        with torch.no_grad():
            moving.lm_head.weight.neg_()
        found = trainer.judge(shards_of(documents, transport))
        trainer.teacher.release()
        return found, trainer.judge(shards_of(documents, transport))

    ((held, released),) = simulate(1, play)
    assert held == before
    assert abs(released["loss"] - before["loss"]) > 1e-3


# Processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objectives")
    mp.spawn(rank_main, (PROCESSES, folder), nprocs=PROCESSES)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_find_what_one_does(processes, policy, kind):
    model = model_of(kind, policy)
    loss, _, gradients = alone(model, policy, texts_of(model, policy))
    parts = [load_file(processes / f"{kind}-{rank}.safetensors") for rank in range(PROCESSES)]
    assert abs(sum(each.pop("loss").item() for each in parts) - loss) < 1e-12
    assert all(furthest(each, gradients) < 1e-12 for each in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_come_to_the_weights_and_metrics_of_one(processes, policy, kind):
    model = model_of(kind, policy)
    metrics, weights = trained_by(trainer_of(model, policy), texts_of(model, policy))
    numbers = numbers_of(metrics)
    found = [
        [load_file(processes / f"{kind}-{what}-{rank}.safetensors") for what in ("metrics", "weights")]
        for rank in range(PROCESSES)
    ]
    for own_numbers, own_weights in found:
        torch.testing.assert_close(own_numbers, numbers, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert furthest(own_weights, weights) < 1e-12
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)

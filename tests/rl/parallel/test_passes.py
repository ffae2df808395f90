"""Passes of a policy on a mesh: of one rank against those of one process, and what every rank of a mesh holds."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fake_ranks import being
from paceline.config import ParallelConfig
from paceline.cotrain.parallel.slots import SCHEDULES
from paceline.cotrain.taps import Collector
from paceline.forward.pretrained import ModelError
from paceline.rl.parallel.drafting import ShardCollector
from paceline.rl.parallel.mesh import Mesh
from paceline.rl.parallel.passes import MeshPasses
from paceline.rl.passes import Collecting, LocalPasses
from paceline.rl.ranks import Alone
from sharded_cases import CPU, TEMPERATURE, Case, batch_of, policy_of
from tiny_policies import save_tiny

TOKENS = 40
ROWS = [0, 3, 4, 7, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "llama-tied"):
        save_tiny(folder / kind, kind)
    return folder


@pytest.fixture
def alone():
    """This process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def laid(models, parallel, model="llama", keeps_embeddings=False, max_tokens=TOKENS):
    policy = policy_of(Case(model=model), models)
    mesh = Mesh(parallel.pipeline, parallel.context, CPU)
    passes = MeshPasses(policy, mesh, parallel, max_tokens, TEMPERATURE, keeps_embeddings=keeps_embeddings)
    return policy, passes


def by_row(batch, parts, scores):
    """Of each rollout its log-probabilities."""
    return {
        row: own
        for part, logp_N in zip(parts, scores, strict=True)
        for row, own in zip(part, logp_N.split([len(batch.responses[row]) for row in part]), strict=True)
    }


def test_one_rank_scores_and_learns_as_one_process_does(models, alone):
    batch = batch_of(1)
    whole = policy_of(Case(), models)
    local, (policy, passes) = LocalPasses(whole, Alone(), TOKENS, TEMPERATURE), laid(models, ParallelConfig())
    found = {}
    for name, own in (("local", local), ("mesh", passes)):
        parts = own.parts(batch, ROWS)
        assert len(parts) > 1
        assert sorted(row for part in parts for row in part) == ROWS
        found[name] = by_row(batch, parts, own.score(batch, parts))
        own.learn(batch, parts, lambda index, logp_N, entropy_N: (logp_N.sin() * entropy_N).sum())
    torch.testing.assert_close(found["mesh"], found["local"], rtol=1e-12, atol=1e-12)
    wanted = {name: parameter.grad for name, parameter in whole.trainable()}
    gradients = {name: parameter.grad for name, parameter in policy.trainable()}
    torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)
    norm = torch.stack([gradient.square().sum() for gradient in wanted.values()]).sum().sqrt()
    torch.testing.assert_close(passes.norm(gradients), norm, rtol=1e-12, atol=1e-12)


def test_a_pass_is_counted_for_each_micro_batch_and_leaves_no_gradient_where_nothing_learns(models, alone):
    policy, passes = laid(models, ParallelConfig())
    batch = batch_of(1)
    parts = passes.parts(batch, ROWS)
    passes.score(batch, parts)
    assert passes.passes == len(parts)
    passes.score(batch, [])
    passes.read(batch, ROWS, Collecting(ShardCollector([1]), frozenset(ROWS)))
    assert passes.passes == 2 * len(parts)
    assert all(parameter.grad is None for _, parameter in policy.trainable())


def test_what_is_read_are_the_documents_of_one_process(models, alone):
    batch, wanted = batch_of(1), frozenset([3, 4, 9])
    whole = policy_of(Case(), models)
    usual = Collector(whole.model, (0, 2))
    LocalPasses(whole, Alone(), TOKENS, TEMPERATURE).read(batch, ROWS, Collecting(usual, wanted))
    _, passes = laid(models, ParallelConfig())
    collector = ShardCollector((0, 2))
    passes.read(batch, ROWS, Collecting(collector, wanted))
    documents = collector.documents(batch, [row for row in sorted(wanted) if len(batch.responses[row]) > 1])
    expected = usual.documents()
    assert len(expected) == len(documents) > 0
    for found, document in zip(documents, expected, strict=True):
        assert np.array_equal(found.tokens, document.tokens)
        torch.testing.assert_close(found.states_NS, document.states_PS, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.final_NH, document.final_PH, rtol=1e-12, atol=1e-12)


def of_rank(rank, parallel, models, **keys):
    """The policy and passes of one of the mesh's ranks, which sends nothing."""
    with being(rank, parallel.pipeline * parallel.context):
        return laid(models, parallel, **keys)


@pytest.mark.parametrize("keeps_embeddings", [False, True])
@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_every_layer_trains_on_one_rank_of_a_pipeline_and_is_no_memory_of_another(models, model, keeps_embeddings):
    whole = {name: parameter.numel() for name, parameter in policy_of(Case(model=model), models).trainable()}
    parallel = ParallelConfig(pipeline=3)
    policies = [of_rank(rank, parallel, models, model=model, keeps_embeddings=keeps_embeddings) for rank in range(3)]
    embeddings, shared = "model.embed_tokens.weight", {"model.embed_tokens.weight"} if model == "llama-tied" else set()
    trained = [name for policy, _ in policies for name, _ in policy.trainable()]
    assert sorted(trained) == sorted([*whole, *shared])
    for rank, (policy, passes) in enumerate(policies):
        own = {name for name, _ in policy.trainable()}
        held = {name for name, parameter in policy.model.named_parameters() if parameter.numel()}
        assert held - own == ({embeddings} - own if keeps_embeddings and rank == 2 else set())
        assert (passes.is_first, passes.is_last) == (rank == 0, rank == 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_update_has_the_micro_batches_that_its_schedule_takes(models, schedule):
    single = schedule in ("GPipe", "1F1B")
    parallel = ParallelConfig(pipeline=2 if single else 1, schedule=schedule)
    _, passes = of_rank(0, parallel, models, max_tokens=1 << 20)
    assert len(passes.parts(batch_of(1), ROWS)) == (2 if single else 1)
    more = ParallelConfig(pipeline=parallel.pipeline, schedule=schedule, microbatches=3)
    _, passes = of_rank(0, more, models, max_tokens=1 << 20)
    assert len(passes.parts(batch_of(1), ROWS)) == (4 if single else 3)


def test_more_stages_than_layers_are_refused_in_one_line(models):
    with pytest.raises(ModelError, match="3 layers in 4 stages: every stage needs one; set fewer stages"):
        of_rank(0, ParallelConfig(pipeline=4), models)

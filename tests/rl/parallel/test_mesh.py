"""Where the ranks of a mesh are and whom they speak with, each of them played by a group that sends nothing."""

import pytest
import torch
import torch.distributed as dist

from fake_ranks import being
from paceline.rl.parallel.mesh import Mesh

CPU = torch.device("cpu")
SHAPES = [(1, 1, 1), (2, 1, 2), (1, 3, 2), (2, 2, 2), (4, 2, 1), (3, 1, 4)]


def meshes(pipeline, data, context):
    """Of every rank its place, whether it leads, and the ranks of each of its groups."""
    world = pipeline * data * context
    for rank in range(world):
        with being(rank, world):
            mesh = Mesh(pipeline, context, CPU)
            groups = {
                name: dist.get_process_group_ranks(getattr(mesh, name)) for name in ("context", "pipeline", "stage")
            }
            groups["pipelines"] = mesh.pipelines
            assert (mesh.shape.pipeline, mesh.shape.data, mesh.shape.context) == (pipeline, data, context)
            yield (mesh.place.pipeline, mesh.place.data, mesh.place.context), mesh.leads, groups


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_place_is_taken_once_and_groups_are_the_ranks_that_differ_in_one_thing(shape):
    ranks = list(meshes(*shape))
    places = [place for place, *_ in ranks]
    assert sorted(places) == [(p, d, c) for p in range(shape[0]) for d in range(shape[1]) for c in range(shape[2])]
    for (pipeline, data, context), _, groups in ranks:
        assert [places[rank] for rank in groups["context"]] == [(pipeline, data, c) for c in range(shape[2])]
        assert [places[rank] for rank in groups["pipeline"]] == [(p, data, context) for p in range(shape[0])]
        assert groups["pipeline"] in groups["pipelines"]
        assert groups["stage"] == [rank for rank, place in enumerate(places) if place[0] == pipeline]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ranks_of_a_context_are_neighbours_and_one_of_a_stage_leads(shape):
    ranks = list(meshes(*shape))
    for rank, ((_, _, context), _, groups) in enumerate(ranks):
        assert groups["context"] == list(range(rank - context, rank - context + shape[2]))
    assert [place[0] for place, leads, _ in ranks if leads] == list(range(shape[0]))


def test_ranks_that_make_no_whole_mesh_are_refused():
    with being(0, 6), pytest.raises(ValueError, match="6 ranks are no multiple of pipeline=2 x context=2"):
        Mesh(2, 2, CPU)

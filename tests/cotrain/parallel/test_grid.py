"""Policy and drafter by 1, 2 and 4 ranks of a context and of a pipeline, under every schedule, against dense ones."""

import json

import pytest
from safetensors.torch import save_file

from forked import start
from grid_cases import BARS, CELLS, FAULTS, FAULTY, PACKINGS, WORLD, dense, played, rank_main

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """By rank and case how far all that it has is from the dense ones; and by packing the names of those."""
    folder = tmp_path_factory.mktemp("grid")
    names = {}
    for packing in PACKINGS:
        wanted = dense(packing)
        save_file(wanted, folder / f"{packing}.safetensors")
        names[packing] = set(wanted)
    start(rank_main, (folder,), WORLD)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)], names


def of_ranks(grid, case):
    return [report[case] for report in grid[0] if case in report]


def test_every_context_pipeline_and_schedule_is_played():
    assert len(CELLS) == len(set(map(str, CELLS))) == 3 * 3 * 7
    assert sum(len(played(cell)) for cell in CELLS) == 63 * 2 + 9 * 2


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_and_all_gradients_of_policy_and_drafter_are_the_dense_ones(grid, cell):
    for packing, dtype in played(cell):
        ranks = of_ranks(grid, f"{cell}-{packing}-{dtype}")
        assert len(ranks) == cell.context * cell.pipeline
        assert {name for own in ranks for name in own} == grid[1][packing]
        assert sum("head.loss" in own for own in ranks) == cell.context
        assert max(apart for own in ranks for apart in own.values()) < BARS[dtype]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees(grid, fault):
    ranks = of_ranks(grid, fault)
    assert len(ranks) == FAULTY.context * FAULTY.pipeline
    apart = [value for own in ranks for name, value in own.items() if name.startswith(f"{FAULTS[fault][0]}.gradient")]
    assert max(apart) > 1e-2

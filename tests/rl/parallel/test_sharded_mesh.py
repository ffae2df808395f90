"""Ranks that share a stage's weights, gradients and optimiser's state, against one process and against whole copies."""

from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from sharded_cases import CASES, group
from sharded_cases import play as play_alone
from sharded_mesh_cases import LAID, MEASURED, READ, WORLD, deep, rank_main, save_deep

pytestmark = pytest.mark.ranks
EXACT = [laid for laid in LAID if CASES[laid.case].dtype == "float64"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What one process makes of every case, and where the ranks have left what they make of it."""
    root = tmp_path_factory.mktemp("sharded-mesh")
    models, states, out = root / "models", root / "states", root / "out"
    for folder in (models, states, out):
        folder.mkdir()
    for model in ("llama", "llama-tied"):
        save_deep(models / f"{model}-deep", model)
    alone = {}
    for name in (name for name in CASES if name in {laid.case for laid in LAID}):
        alone[name] = play_alone(deep(CASES[name]), models, states, sharded=False)
        save_file(alone[name][0], states / f"{name}.safetensors")
    for name in {laid.case for laid in READ}:
        once = replace(deep(CASES[name]), seeds=(1,))
        alone[f"{name}-once"] = play_alone(once, models, states, sharded=False)
    mp.spawn(rank_main, (models, states, out), nprocs=WORLD)
    return models, out, alone


def together(out, laid):
    """The tensors of all stages; those that two of them have are alike."""
    tensors = {}
    for rank in range(WORLD):
        for key, tensor in load_file(out / f"{laid}-{rank}.safetensors").items():
            assert torch.equal(tensors.setdefault(key, tensor), tensor), key
    return tensors


@pytest.mark.parametrize("laid", EXACT, ids=str)
def test_shared_stages_end_where_one_process_does(played, laid):
    _, out, alone = played
    tensors, metrics = alone[laid.case]
    wanted = {key: tensor for key, tensor in tensors.items() if not key.startswith("refit/")}
    torch.testing.assert_close(together(out, laid), wanted, rtol=1e-12, atol=1e-12)
    ours = {key: torch.tensor([m[key] for m in metrics], dtype=torch.float64) for key in metrics[0]}
    for rank in range(WORLD):
        theirs = load_file(out / f"{laid}-{rank}-metrics.safetensors")
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_shared_stages_train_in_bfloat16_with_wide_masters(played, schedule):
    _, out, alone = played
    (laid,) = (laid for laid in LAID if laid.case == "bfloat16" and laid.schedule == schedule)
    theirs, tensors = together(out, laid), alone["bfloat16"][0]
    assert all(tensors[key].dtype == tensor.dtype for key, tensor in theirs.items())
    torch.testing.assert_close(group(theirs, "policy"), group(tensors, "policy"), rtol=0.05, atol=0.01)


def test_wide_adapters_of_a_narrow_policy_train_shared_as_in_whole_copies(played):
    _, out, _ = played
    shared, copied = (together(out, laid) for laid in LAID if laid.case == "bfloat16-lora")
    torch.testing.assert_close(shared, copied, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("laid", READ, ids=str)
def test_a_drafter_reads_whole_matrices_and_is_taught_by_those_of_before(played, laid):
    models, out, alone = played
    policy = group(alone[f"{laid.case}-once"][0], "policy")
    before = load_file(models / f"{deep(CASES[laid.case]).model}" / "model.safetensors")
    name = "model.embed_tokens.weight" if laid.case == "tied" else "lm_head.weight"
    found = [load_file(out / f"{laid}-{rank}-read.safetensors") for rank in range(WORLD)]
    # The last stage is on the second rank of a pipeline, or on the first where stages lie in a V.
    assert [bool(read) for read in found] == [laid.schedule != "1F1B"] * 2 + [laid.schedule == "1F1B"] * 2
    for read in filter(None, found):
        torch.testing.assert_close(read["embeddings"], policy["model.embed_tokens.weight"], rtol=1e-12, atol=1e-12)
        for key in ("logits", "released"):
            torch.testing.assert_close(read[key], policy[name][:, :3].mT, rtol=1e-12, atol=1e-12)
        assert torch.equal(read["held"], before[name][:, :3].mT)
        assert not torch.allclose(read["held"], read["released"])


@pytest.mark.parametrize("case", ["full", "bfloat16"])
@pytest.mark.parametrize("kind", ["weights", "gradients", "optimiser"])
def test_two_ranks_that_share_a_stage_hold_half_of_it_each(played, case, kind):
    _, out, _ = played
    shared, copied = (
        [int(load_file(out / f"{laid}-{rank}-bytes.safetensors")[kind]) for rank in range(WORLD)]
        for laid in MEASURED
        if laid.case == case
    )
    for own, whole in zip(shared, copied, strict=True):
        # Rounding up to whole rows of a tensor, and to what torch pads.
        assert whole / 2 <= own < 0.53 * whole


def test_weights_of_two_types_are_refused_in_one_line_on_every_rank(played):
    _, out, _ = played
    for rank in range(WORLD):
        said = (out / f"mixed-{rank}.txt").read_text()
        assert "trains weights in float32 and float64" in said
        assert "set parallel.shard=false" in said

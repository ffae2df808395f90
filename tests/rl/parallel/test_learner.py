"""A learner on a mesh of four or eight real ranks against one process, by the trainings of ``parallel_cases``."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from forked import start
from parallel_cases import FAULTS, FAULTY, FAULTY_CASE, LAID, WORLD, rank_main
from sharded_cases import CASES, group, policy_of
from sharded_cases import play as play_alone
from tiny_policies import save_tiny

pytestmark = pytest.mark.ranks
EXACT = [laid for laid in LAID if CASES[laid.case].dtype == "float64"]
NARROW = [laid for laid in LAID if CASES[laid.case].dtype != "float64"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What one process makes of every case, and where the ranks have left what they make of it."""
    root = tmp_path_factory.mktemp("parallel")
    models, states, out = root / "models", root / "states", root / "out"
    for folder in (models, states, out):
        folder.mkdir()
    for model in ("llama", "llama-tied"):
        save_tiny(models / model, model)
    alone = {}
    for name, case in CASES.items():
        alone[name] = play_alone(case, models, states, sharded=False)
        save_file(alone[name][0], states / f"{name}.safetensors")
    alone["faulty"] = play_alone(FAULTY_CASE, models, states, sharded=False)
    start(rank_main, (models, states, out), WORLD)
    return models, out, alone


def together(out, name, ranks):
    """The tensors of all stages; those that two of them have are alike."""
    tensors = {}
    for rank in range(ranks):
        for key, tensor in load_file(out / f"{name}-{rank}.safetensors").items():
            assert torch.equal(tensors.setdefault(key, tensor), tensor), key
    return tensors


def without_refit(tensors):
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("refit/")}


def furthest(found, wanted):
    return max(float((found[key].double() - tensor.double()).abs().max()) for key, tensor in wanted.items())


@pytest.mark.parametrize("laid", EXACT, ids=str)
def test_ranks_end_where_one_process_does(played, laid):
    _, out, alone = played
    wanted = without_refit(alone[laid.case][0])
    torch.testing.assert_close(together(out, laid, laid.ranks), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("laid", EXACT, ids=str)
def test_every_rank_has_the_metrics_of_one_process(played, laid):
    _, out, alone = played
    metrics = alone[laid.case][1]
    ours = {key: torch.tensor([m[key] for m in metrics], dtype=torch.float64) for key in metrics[0]}
    for rank in range(laid.ranks):
        theirs = load_file(out / f"{laid}-{rank}-metrics.safetensors")
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("laid", NARROW, ids=str)
def test_ranks_in_bfloat16_are_as_near_to_float64_as_one_process_in_bfloat16(played, laid):
    models, out, alone = played
    case = replace(CASES[laid.case], dtype="float64")
    start = {key: tensor.clone() for key, tensor in policy_of(case, models).state().items()}
    wide = group(play_alone(case, models, out, sharded=False)[0], "policy")
    theirs, ours = together(out, laid, laid.ranks), without_refit(alone[laid.case][0])
    assert {key: t.dtype for key, t in theirs.items()} == {key: t.dtype for key, t in ours.items()}

    def apart(one):
        return sum(float((one[key].double() - wide[key]).square().sum()) for key in wide) ** 0.5

    assert apart(start) > 1.5 * apart(group(ours, "policy"))
    assert apart(group(theirs, "policy")) < 1.3 * apart(group(ours, "policy"))


def test_a_rank_has_the_layers_of_its_stage_alone(played):
    _, out, alone = played
    held = [set(group(load_file(out / f"{EXACT[2]}-{rank}.safetensors"), "policy")) for rank in range(4)]
    assert not held[1]
    assert not held[3]
    assert not held[0] & held[2]
    assert held[0] | held[2] == set(group(alone["full"][0], "policy"))


def test_one_process_resumes_what_ranks_saved(played, tmp_path):
    models, out, alone = played
    save_file(together(out, EXACT[2], 4), tmp_path / "full.safetensors")
    tensors, _ = play_alone(CASES["resumed"], models, tmp_path, sharded=False)
    torch.testing.assert_close(tensors, alone["resumed"][0], rtol=1e-12, atol=1e-12)


def test_ranks_with_unlike_weights_are_refused_in_one_line_on_every_rank(played):
    _, out, _ = played
    for rank in range(4):
        assert "rank 1 has other weights than rank 0" in (out / f"unlike-{rank}.txt").read_text()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees(played, fault):
    _, out, alone = played
    wanted = without_refit(alone["faulty"][0])
    found = load_file(out / f"{fault}-0.safetensors")
    apart = furthest(found, wanted)
    assert FAULTY.pipeline == 1
    assert apart < 1e-12 if fault == "none" else apart > 1e-4

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from paceline.config import RLConfig
from paceline.rl.learner import Learner
from paceline.rl.packing import build_trees
from paceline.rl.ranks import Alone, deal
from sharded_cases import CASES, TEMPERATURE, WORLD, batch_of, group, play, policy_of, rank_main
from tiny_policies import save_tiny

EXACT = [name for name, case in CASES.items() if case.dtype == "float64"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What one process makes of every case, and where the two ranks have left what they make of it."""
    root = tmp_path_factory.mktemp("sharded")
    models, states, out = root / "models", root / "states", root / "out"
    for folder in (models, states, out):
        folder.mkdir()
    for model in ("llama", "llama-tied"):
        save_tiny(models / model, model)
    alone = {}
    for name, case in CASES.items():
        alone[name] = play(case, models, states, sharded=False)
        save_file(alone[name][0], states / f"{name}.safetensors")
    mp.spawn(rank_main, (models, states, out), nprocs=WORLD)
    return models, out, alone


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_end_where_one_process_does(played, name):
    _, out, alone = played
    tensors, metrics = alone[name]
    torch.testing.assert_close(load_file(out / f"{name}-0.safetensors"), tensors, rtol=1e-12, atol=1e-12)
    for rank in range(WORLD):
        theirs = load_file(out / f"{name}-{rank}-metrics.safetensors")
        ours = {key: torch.tensor([m[key] for m in metrics], dtype=torch.float64) for key in metrics[0]}
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_the_cases_clip_skip_and_measure(played):
    _, _, alone = played
    assert min(m["grad_norm"] for m in alone["reference"][1]) > CASES["reference"].settings["max_grad_norm"]
    assert max(m["clip_fraction"] for m in alone["lora"][1]) > 0
    assert max(m["kl"] for m in alone["reference"][1]) > 1e-6
    assert max(m["importance_beyond"] for m in alone["stale"][1]) > 0
    assert sum(m["skipped_no_advantage"] for m in alone["skipped"][1]) == 1
    assert sum(m["skipped_not_finite"] for m in alone["skipped"][1]) == 1


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16-lora"])
def test_ranks_train_in_bfloat16_with_wide_masters(played, name):
    _, out, alone = played
    tensors, _ = alone[name]
    theirs = load_file(out / f"{name}-0.safetensors")
    assert {key: t.dtype for key, t in theirs.items()} == {key: t.dtype for key, t in tensors.items()}
    torch.testing.assert_close(group(theirs, "policy"), group(tensors, "policy"), rtol=0.05, atol=0.01)


def test_only_the_first_rank_holds_what_was_gathered(played):
    _, out, alone = played
    others = load_file(out / "full-1.safetensors")
    assert others.keys() == alone["full"][0].keys()
    large = [name for name, t in others.items() if t.numel() and not name.endswith(("step", "updates"))]
    assert large == []


def test_one_process_resumes_what_two_ranks_saved(played, tmp_path):
    models, out, alone = played
    (tmp_path / "full.safetensors").write_bytes((out / "full-0.safetensors").read_bytes())
    tensors, _ = play(CASES["resumed"], models, tmp_path, sharded=False)
    torch.testing.assert_close(tensors, alone["resumed"][0], rtol=1e-12, atol=1e-12)


def test_what_cannot_be_shared_is_refused_in_one_line_on_every_rank(played):
    _, out, _ = played
    for rank in range(WORLD):
        assert (out / f"collector-{rank}.txt").read_text() == (
            "drafters learn from the passes of one learner: set cluster.learner_workers=1 or cotrain.when=never"
        )
        assert "rank 1 has other weights than rank 0" in (out / f"unlike-{rank}.txt").read_text()


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_row_is_dealt_once_in_equally_many_parts(world):
    batch = batch_of(4)
    trees = build_trees(batch.prompts, batch.responses, 0.01)
    hands = deal(trees, world, 40)
    assert len({len(hand) for hand in hands}) == 1
    assert sorted(row for hand in hands for part in hand for row in part) == list(range(len(batch.prompts)))
    assert all(any(hand) for hand in hands[: len(trees)])
    if world == 1:
        assert hands[0] == Alone().microbatches(trees, 40)


def test_a_learner_alone_computes_no_empty_part(played, monkeypatch):
    models, _, _ = played
    policy = policy_of(CASES["full"], models)
    seen = []
    score = policy.logprobs
    monkeypatch.setattr(policy, "logprobs", lambda p, r, t: seen.append(len(r)) or score(p, r, t))
    Learner(policy, RLConfig(microbatch_tokens=40), TEMPERATURE).update(batch_of(1))
    assert len(seen) > 1
    assert all(seen)

"""Runs whose policy and drafter train on a mesh of four ranks are those of one process, and go on as such."""

import math
import os
import signal

import pytest
import torch

from paceline.report.trace import read_trace
from paceline.rl import checkpoint
from paceline.rl.cluster.learners import LearnersError, RemoteLearner
from paceline.rl.loop import train
from paceline.schema import PacelineError, StepRecord
from tiny_policies import save_tiny
from tiny_run import make_policy, tiny_config

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

PARTS = ("rl.microbatch_tokens=80", "cotrain.microbatch_tokens=80")
EXACT = ("policy.dtype=float64", "drafter.head.dtype=float64", "check.every=0", "checkpoint.keep=9", *PARTS)
ONLINE = (*EXACT, "drafter.kind=eagle3", "cotrain.when=every", "cotrain.lr=1e-2", "cotrain.updates=2")
MESH = ("parallel.context=2", "parallel.pipeline=2")
ACCEPTED = ("tokens_per_forward", "acceptance", "draft_loss", "draft_overlaps", "reward", "draft_trained")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A policy, and the folder and records of a run in one process."""
    root = tmp_path_factory.mktemp("alone")
    policy = make_policy(root / "policy")
    return policy, root / "run", train(tiny_config(policy, root / "run", *ONLINE))


def tokens(folder):
    return [row.tokens for row in read_trace(folder / "rollouts.jsonl")]


def accepted(records):
    return [[getattr(record, name) for name in ACCEPTED] for record in records]


def assert_same_run(records, folder, alone_records, alone_folder):
    assert tokens(folder) == tokens(alone_folder)
    for ours, theirs in zip(accepted(records), accepted(alone_records), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-6)
    ours, theirs = (checkpoint.load_latest(each / "checkpoints").tensors for each in (folder, alone_folder))
    assert ours.keys() == theirs.keys()
    assert {"policy", "drafter", "optimiser", "drafter_optimiser"} <= ours.keys()
    for name in ours:
        # Steps are of 1e-2; norms of transformers go through float32, where other last bits are 1e-7.
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_policy_and_drafter_of_a_mesh_are_those_of_one_process_and_so_is_what_is_accepted(alone, tmp_path):
    policy, folder, records = alone
    assert sum(record.draft_trained for record in records) == len(records)
    assert records[-1].acceptance > 0
    on_mesh = train(tiny_config(policy, tmp_path / "mesh", *ONLINE, *MESH))
    assert_same_run(on_mesh, tmp_path / "mesh", records, folder)
    # Taps of two stages travel, and how long they waited is told; a policy that is not cut has none.
    assert all(record.draft_stall_seconds >= 0 for record in on_mesh)
    assert all(math.isnan(record.draft_stall_seconds) for record in records)


def test_a_mesh_whose_rank_dies_resumes_as_another_and_as_one_process(alone, tmp_path, monkeypatch):
    policy, folder, records = alone
    started = []
    start = RemoteLearner._start
    monkeypatch.setattr(RemoteLearner, "_start", lambda self, config: started.append(self) or start(self, config))

    def kill_a_learner(event):
        if isinstance(event, StepRecord) and event.step == 1:
            os.kill(started[0].pids[3], signal.SIGKILL)

    mesh = ("parallel.pipeline=2", "parallel.schedule=ZBVZeroBubble", "parallel.context=2")
    with pytest.raises(PacelineError, match=r"2 layers in 4 stages: every stage needs one"):
        train(tiny_config(policy, tmp_path / "refused", *ONLINE, *mesh))
    started.clear()
    with pytest.raises(LearnersError, match=r"learner rank 3 of 4 died .*resume the run from its last checkpoint"):
        train(tiny_config(policy, tmp_path / "run", *ONLINE, *MESH), on_event=kill_a_learner)
    short = (*ONLINE, "parallel.context=2", "rl.steps=3")
    train(tiny_config(policy, tmp_path / "run", *short), resume=True)
    resumed = train(tiny_config(policy, tmp_path / "run", *ONLINE), resume=True)
    assert_same_run(resumed, tmp_path / "run", records, folder)


def test_a_drafters_state_that_does_not_fit_is_an_event_and_the_mesh_goes_on(alone, tmp_path):
    policy, _, _ = alone
    folder, short = tmp_path / "run", (*ONLINE, "rl.steps=2")
    train(tiny_config(policy, folder, *short))
    found = checkpoint.load_latest(folder / "checkpoints")
    found.tensors["drafter_optimiser"].pop("updates")
    meta = {key: value for key, value in found.meta.items() if key != "step"}
    checkpoint.save(folder / "checkpoints", found.step, found.tensors, meta, found.blobs)
    said = []
    resumed = train(tiny_config(policy, folder, *ONLINE, *MESH), resume=True, on_event=said.append)
    lost = [text for text in said if isinstance(text, str) and text.startswith("drafter_lost")]
    assert lost == [
        "drafter_lost: checkpoint: tensor updates is missing from the optimiser's state; the drafter starts anew"
    ]
    assert [record.draft_trained for record in resumed] == [True] * len(resumed)


def test_a_policy_that_cannot_be_cut_is_refused_in_one_line(tmp_path):
    policy = save_tiny(tmp_path / "model", "gpt2")
    with pytest.raises(PacelineError, match="a policy of type gpt2: cannot be cut into stages; use llama"):
        train(tiny_config(policy, tmp_path / "run", "policy.dtype=float64", "parallel.context=2"))

"""Learners on Ray: two ranks end where one process does, and no rank's death or sleep is waited for."""

import os
import signal

import msgspec
import pytest
import torch

from paceline.config import Config
from paceline.report.trace import read_trace
from paceline.rl.batch import Batch, BatchError
from paceline.rl.cluster.learners import LearnersError, RemoteLearner
from paceline.rl.cluster.rank import SentBatch
from paceline.rl.learner import Learner
from paceline.rl.loop import train
from paceline.rl.models import ModelError
from paceline.rl.policy import Policy
from paceline.schema import StepRecord
from ray_processes import ends
from sharded_cases import batch_of
from tiny_policies import save_tiny
from tiny_run import make_policy, tiny_config

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """GPT-2, which computes in float64 throughout."""
    return save_tiny(tmp_path_factory.mktemp("model"), "gpt2")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def config_of(model, hang_seconds=60.0, **rl):
    rl = {"lr": 0.01, "max_grad_norm": 0.5, "kl_coef": 0.1, "inner_updates": 2, "microbatch_tokens": 60} | rl
    settings = {
        "policy": {"path": str(model), "dtype": "float64", "device": "cpu"},
        "rl": rl,
        "cluster": {"kind": "ray", "learner_workers": 2, "hang_seconds": hang_seconds},
    }
    return msgspec.convert(settings, Config)


def alone(config):
    return Learner(Policy.load(config.policy, config.seed), config.rl, config.sampling.temperature)


@pytest.fixture
def remote(model):
    config = config_of(model)
    learner = RemoteLearner(config, Policy.load(config.policy, config.seed))
    yield learner
    learner.close()


def close(theirs, ours):
    """Equal but for rounding; a key's bias has no other gradient, and Adam makes steps of 1e-11 of that."""
    torch.testing.assert_close(dict(theirs), dict(ours), rtol=1e-12, atol=1e-10, equal_nan=True)


def numbers(metrics):
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def test_two_learners_on_ray_train_resume_and_refuse_as_one_process_does(model, remote):
    config = config_of(model)
    local = alone(config)
    for seed in (1, 2, 3):
        close(numbers(remote.update(batch_of(seed))), numbers(local.update(batch_of(seed))))
    assert remote.updates == local.updates == 6
    close(remote.state(), local.state())
    close(remote.policy.state(), local.policy.state())

    nothing = batch_of(-1)
    with pytest.raises(BatchError, match="2 responses for 1 prompts"):
        remote.update(unchecked(nothing, prompts=nothing.prompts[:1], responses=nothing.responses[:2]))

    earlier = alone(config)
    earlier.update(batch_of(4))
    remote.policy.load_state(earlier.policy.state())
    remote.load_state(earlier.state())
    assert remote.updates == 2
    close(numbers(remote.update(batch_of(5))), numbers(earlier.update(batch_of(5))))
    close(remote.policy.state(), earlier.policy.state())

    os.kill(remote.pids[1], signal.SIGKILL)
    with pytest.raises(LearnersError, match=r"learner rank 1 of 2 died .*resume the run from its last checkpoint"):
        remote.update(batch_of(6))
    with pytest.raises(LearnersError, match="have ended"):
        remote.state()


def unchecked(batch, **changes):
    """A batch that only its receiver checks."""
    fresh = object.__new__(Batch)
    for name, value in {**vars(batch), **changes}.items():
        object.__setattr__(fresh, name, value)
    return fresh


def test_a_learner_that_hangs_is_named_and_ended_with_the_others(model):
    config = config_of(model, hang_seconds=4.0)
    remote = RemoteLearner(config, Policy.load(config.policy, config.seed))
    try:
        remote.update(batch_of(1))
        pids = list(remote.pids)
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(LearnersError, match="learner rank 0 of 2 makes no progress"):
            remote.update(batch_of(2))
        assert ends(pids[0])
    finally:
        remote.close()


def test_ranks_with_another_model_than_the_driver_do_not_start(model):
    config = config_of(model)
    policy = Policy.load(config.policy, config.seed)
    with torch.no_grad():
        policy.trainable()[0][1][0, 0] += 1e-9
    with pytest.raises(ModelError, match="learner rank 0 has other weights than the driver"):
        RemoteLearner(config, policy)


def test_a_run_whose_learner_dies_resumes_in_one_process_as_if_unbroken(tmp_path, monkeypatch):
    policy = make_policy(tmp_path / "policy")
    settings = ("policy.dtype=float64", "check.every=0")
    on_ray = ("cluster.kind=ray", "cluster.rollout_workers=1", "cluster.learner_workers=2", "cluster.worker_cpus=0.5")
    unbroken = train(tiny_config(policy, tmp_path / "unbroken", *settings))

    started = []
    start = RemoteLearner._start
    monkeypatch.setattr(RemoteLearner, "_start", lambda self, config: started.append(self) or start(self, config))

    def kill_a_learner(event):
        if isinstance(event, StepRecord) and event.step == 1:
            os.kill(started[0].pids[1], signal.SIGKILL)

    with pytest.raises(LearnersError, match=r"learner rank 1 of 2 died .*resume the run from its last checkpoint"):
        train(tiny_config(policy, tmp_path / "run", *settings, *on_ray), on_event=kill_a_learner)
    resumed = train(tiny_config(policy, tmp_path / "run", *settings), resume=True)
    assert [record.step for record in resumed] == [record.step for record in unbroken]
    assert [record.reward for record in resumed] == [record.reward for record in unbroken]
    assert [record.loss for record in resumed] == pytest.approx([record.loss for record in unbroken], rel=1e-6)
    tokens = [[row.tokens for row in read_trace(tmp_path / run / "rollouts.jsonl")] for run in ("run", "unbroken")]
    assert tokens[0] == tokens[1]


def test_all_of_a_batch_travels_and_groups_stay_apart():
    batch = batch_of(1)
    again = SentBatch.of(batch).batch()
    assert vars(again).keys() == vars(batch).keys()
    assert [batch.group_ids.index(group) for group in batch.group_ids] == [
        again.group_ids.index(group) for group in again.group_ids
    ]

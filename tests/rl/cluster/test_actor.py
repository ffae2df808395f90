"""Rollout workers as Ray actors: the tokens of the engine in this process, and ends that are noticed."""

import os
import signal
import subprocess
import sys
import time

import pytest
from msgspec.structs import replace

from paceline.config import load_config
from paceline.rl.cluster.codec import decode, encode
from paceline.rl.cluster.transport import make_sender
from paceline.rl.engine import make_engine
from paceline.rl.fleet import Report, Weights
from paceline.rl.policy import Policy
from paceline.schema import RolloutRequest, SamplingParams
from ray_processes import ends
from tiny_policies import save_tiny

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

from paceline.rl.cluster.actor import start_worker  # noqa: E402


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = save_tiny(tmp_path_factory.mktemp("policy"))
    other = save_tiny(tmp_path_factory.mktemp("other"), seed=1)
    return load_config(
        None,
        [f"policy.path={path}", f"out={other}", "policy.dtype=float64", "cluster.kind=ray", "drafter.kind=history"],
    )


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def ask(policy, count=8):
    params = SamplingParams(max_tokens=24)
    prompts = [policy.encode_prompt(f"prompt {number // 2}") for number in range(count)]
    return [
        RolloutRequest(request_id=f"r{n}", prompt=p, params=params, group=f"g{n // 2}") for n, p in enumerate(prompts)
    ]


def gather(workers, count):
    found, reports = {}, {}
    deadline = time.monotonic() + 120
    while len(found) < count and time.monotonic() < deadline:
        for worker in workers:
            report = reports[worker] = decode(Report, ray.get(worker.collect.remote(0.5)))
            assert report.failure is None
            found |= {rollout.request_id: rollout for rollout in report.rollouts}
    return found, reports


DRIVER = """
import os, signal, sys, ray
from paceline.config import load_config
from paceline.rl.cluster.actor import start_worker
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
config = load_config(None, [f"policy.path={sys.argv[1]}", "policy.dtype=float64"])
print(ray.get(start_worker(config, "worker-0", has_grammars=False).ping.remote()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_ends_when_its_driver_is_killed(config):
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, config.policy.path], capture_output=True, text=True, timeout=180
    )
    assert driver.returncode == -signal.SIGKILL
    pid = int(driver.stdout)
    assert ends(pid, 60)


def test_two_actors_say_what_one_engine_says_and_their_ends_are_seen(cluster, config, tmp_path):
    # The weights of the run are not those of the files from which the workers build their policies.
    policy = Policy.load(replace(config.policy, path=config.out), config.seed)
    asked = ask(policy)
    engine = make_engine(config, policy, tmp_path, has_grammars=False)
    whole = {rollout.request_id: rollout for rollout in engine.generate(asked)}
    engine.close()

    workers = [start_worker(config, f"worker-{number}", has_grammars=False) for number in range(2)]
    pids = ray.get([worker.ping.remote() for worker in workers])
    assert len({*pids, os.getpid()}) == 3
    sender = make_sender("shared_memory")
    parcel = sender.send(Weights(3, policy.refit_tensors()))
    for number, worker in enumerate(workers):
        worker.load.remote(parcel)
        worker.submit.remote(encode(asked[number::2]))
    found, reports = gather(workers, len(asked))
    sender.close()
    assert found.keys() == whole.keys()
    for name, rollout in found.items():
        assert rollout.tokens.tolist() == whole[name].tokens.tolist()
        assert set(rollout.versions) == {3}
    assert {report.version for report in reports.values()} == {3}

    os.kill(pids[0], signal.SIGINT)  # Ctrl-C at the driver's terminal
    assert ray.get(workers[0].ping.remote(), timeout=60) == pids[0]
    assert ray.get(workers[1].close.remote(), timeout=60) is None
    waiting = workers[0].collect.remote(60.0)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(waiting, timeout=60)
    ray.kill(workers[1])


def test_a_policy_that_cannot_be_loaded_is_said_in_a_report(cluster, config, tmp_path):
    gone = replace(config, policy=replace(config.policy, path=str(tmp_path / "gone")))
    worker = start_worker(gone, "worker-0", has_grammars=False)
    report = decode(Report, ray.get(worker.collect.remote(60.0), timeout=120))
    assert "gone" in report.failure
    assert report.version == -1
    ray.kill(worker)

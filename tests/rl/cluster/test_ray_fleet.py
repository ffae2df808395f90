"""A fleet of real processes on Ray: killed, stopped or failing, it gives the tokens of the engine in this process."""

import os
import signal
import time
from pathlib import Path

import pytest

import failing_verifier
from failing_verifier import FOLDER
from paceline.config import ClusterConfig, Config
from paceline.rl.cluster import ray_fleet
from paceline.rl.cluster.ray_fleet import RayFleet
from paceline.rl.cluster.session import RayCluster
from paceline.rl.curriculum import load_items, rollout_requests
from paceline.rl.engine import make_engine
from paceline.rl.fleet import Order, Weights
from paceline.rl.policy import Policy
from paceline.rl.tasks.registry import make_task
from paceline.schema import PacelineError
from ray_processes import ends, worker_pids
from tiny_run import make_policy, tiny_config

pytestmark = pytest.mark.ray

SECONDS = 120
SETTINGS = (
    "policy.dtype=float64", "sampling.ignore_eos=true", "sampling.max_tokens=150", "engine.slots=2", "cluster.kind=ray",
    "cluster.rollout_workers=2", "cluster.ahead=2", "engine.verifier=failing_verifier:failing", "allow_lossy=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """Where word is left for ``failing_verifier``, which workers find beside this process' helpers."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        patch.setenv("PYTHONPATH", str(Path(failing_verifier.__file__).parent), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def cluster(faults):
    own = RayCluster(Config(cluster=ClusterConfig(kind="ray", rollout_workers=4)))
    yield own
    own.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"), max_position_embeddings=256)


class Bench:
    """A fleet, the policy whose weights it gets, and the prompts that it is asked."""

    def __init__(self, folder, out, *overrides):
        self.config = tiny_config(folder, out, *SETTINGS, *overrides)
        self.out = out
        self.policy = Policy.load(self.config.policy, self.config.seed)
        tasks = {name: make_task(name, task, self.config.seed) for name, task in self.config.tasks.items()}
        self.items = load_items(tasks, "train", self.policy.encode_prompt)
        self.fleet = RayFleet(self.config, has_grammars=False)

    def weights(self, version):
        tensors = {name: tensor * (1 + version / 8) for name, tensor in self.policy.refit_tensors().items()}
        return Weights(version, tensors)

    def orders(self, visit="0", version=0, size=4, seed=0):
        made = [rollout_requests([item], size, self.config.sampling, seed, "0") for item in self.items]
        for requests in made:
            for request in requests:
                request.request_id = request.request_id.replace("0/", f"{visit}/", 1)
        return [Order(step=0, group=f"{visit}/{r[0].group}", version=version, requests=r) for r in made]

    def in_this_process(self, orders, version=0):
        engine = make_engine(self.config, self.policy, self.out / "export", False)
        engine.load_weights(version, self.weights(version).policy)
        with engine.plain():
            return {r.request_id: r.tokens.tolist() for r in engine.generate([r for o in orders for r in o.requests])}

    def collect(self, count, at_least=None):
        """``count`` rollouts (or the first ``at_least``), by id, each once."""
        found, end = {}, time.monotonic() + SECONDS
        while len(found) < (at_least or count):
            for rollout in self.fleet.collect(0.2):
                assert rollout.request_id not in found
                found[rollout.request_id] = rollout
            assert time.monotonic() < end, f"{len(found)} of {count} came: {self.fleet.stats().events}"
        return found


@pytest.fixture
def bench(cluster, folder, tmp_path):
    """Makes benches; their fleets are closed at the end, and leave no process behind."""
    made = []

    def make(*overrides):
        made.append(Bench(folder, tmp_path, *overrides))
        return made[-1]

    yield make
    for each in made:
        each.fleet.close()
    end = time.monotonic() + SECONDS
    while worker_pids():
        assert time.monotonic() < end, "workers outlive their fleet"
        time.sleep(0.1)


def tokens_of(found):
    return {name: rollout.tokens.tolist() for name, rollout in found.items()}


def test_killed_and_stopped_workers_change_no_token(bench, faults):
    # field G11
    bench = bench("cluster.hang_seconds=6", "rl.max_age_steps=1")
    orders, later = bench.orders(), bench.orders("1", version=1)
    bench.fleet.begin(bench.weights(0))
    bench.fleet.submit(orders)
    found = bench.collect(24, at_least=1)
    killed = worker_pids()[0]
    os.kill(killed, signal.SIGKILL)
    found |= bench.collect(24 - len(found))
    assert tokens_of(found) == bench.in_this_process(orders)
    bench.fleet.publish(bench.weights(1))
    bench.fleet.submit(later)
    found = bench.collect(24, at_least=1)
    stopped = worker_pids()[-1]
    os.kill(stopped, signal.SIGSTOP)
    found |= bench.collect(24 - len(found))
    assert tokens_of(found) == bench.in_this_process(later, version=1)
    events = bench.fleet.stats().events
    assert (events["worker_lost"], events["worker_hung"]) == (1, 1)
    assert events["requests_retried"] >= 2
    assert ends(killed)
    assert ends(stopped)


def test_a_pass_that_fails_once_costs_no_worker_and_a_request_that_always_fails_is_named(bench, faults):
    bench = bench()
    orders = bench.orders()
    bench.fleet.begin(bench.weights(0))
    (faults / "once").touch()
    bench.fleet.submit(orders)
    assert tokens_of(bench.collect(24)) == bench.in_this_process(orders)
    events = bench.fleet.stats().events
    assert (events["pass_failed"], events.get("worker_lost", 0)) == (1, 0)
    (faults / "always").touch()
    try:
        bench.fleet.submit(bench.orders("1"))
        with pytest.raises(PacelineError, match=r"request \S+, response position 0: RuntimeError: it always fails"):
            bench.collect(24)
    finally:
        (faults / "always").unlink()


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_rollouts_go_on_by_newer_weights(bench, in_flight):
    # field G11
    bench = bench("rl.max_age_steps=1", f"rl.in_flight={in_flight}")
    bench.fleet.begin(bench.weights(0))
    bench.fleet.submit(bench.orders())
    found = bench.collect(24, at_least=1)
    bench.fleet.publish(bench.weights(1))
    found |= bench.collect(24 - len(found))
    assert len(found) == 24
    assert all(len(r.tokens) == 150 and r.finish_reason == "length" for r in found.values())
    assert any(set(r.versions) == {0, 1} for r in found.values()), "some were in flight"
    assert all((r.versions[1:] >= r.versions[:-1]).all() for r in found.values())
    assert bench.fleet.stats().weight_version == 1


def test_what_one_worker_said_the_other_drafts_from(bench):
    bench = bench("cluster.share_seconds=0.05", "budget.mode=fixed", "cluster.hang_seconds=600")
    bench.fleet.begin(bench.weights(0))
    bench.fleet.submit(bench.orders())
    first = bench.collect(24)
    time.sleep(1)  # what was said is on its way
    os.kill(worker_pids()[0], signal.SIGKILL)
    bench.fleet.submit(bench.orders("1"))
    second = bench.collect(24)
    assert [r.tokens.tolist() for _, r in sorted(second.items())] == [
        r.tokens.tolist() for _, r in sorted(first.items())
    ]
    before, after = (sum(r.accepted for r in found.values()) for found in (first, second))
    assert after > 0.7 * 24 * 150 > before


def test_what_the_cluster_does_not_have_is_said(cluster, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_fleet, "_PLACE_SECONDS", 1.0)
    message = r"cluster.rollout_workers=2: each worker needs 64 CPU, the cluster has \d CPU free; there was no room"
    with pytest.raises(PacelineError, match=message):
        Bench(folder, tmp_path, "cluster.worker_cpus=64")

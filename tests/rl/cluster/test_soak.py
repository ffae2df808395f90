"""Hundreds of requests through two workers: memory stays, queues keep their bounds, each request is answered once."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tiny_run import make_policy, tiny_config

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "worker_soak.py"
REQUESTS = 800


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("worker_soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_memory_is_flat_after_the_warm_up_and_every_queue_is_bounded(benchmark, tmp_path):
    config = tiny_config(
        make_policy(tmp_path / "policy"), tmp_path / "run", "cluster.kind=ray", "rl.max_age_steps=1",
        "sampling.max_tokens=24", "engine.slots=4", "cluster.ahead=2", "cluster.history_mib=1",
        "drafter.history.window=8", "drafter.history.elsewhere_tokens=4096", "cluster.share_seconds=0.2",
    )  # fmt: skip
    found = benchmark.soak(config, REQUESTS, publish_every=60, look_seconds=0.1)
    assert found.answers.size == REQUESTS
    assert (found.answers == 1).all()
    assert max(sample.outstanding for sample in found.samples) <= found.most_outstanding == 2 * 3 * 4
    assert max(max(sample.held.values()) for sample in found.samples) <= found.most_held == 6
    assert 0 < found.history_bytes <= 1 << 20
    assert not found.events.get("worker_lost", 0)
    warm = [sample for sample in found.samples if sample.rollouts >= REQUESTS // 2]
    assert len(warm) > 4
    for process in warm[0].mib:
        grown = max(sample.mib[process] for sample in warm) - warm[0].mib[process]
        assert grown < 16, f"{process} grew by {grown:.1f} MiB over {REQUESTS // 2} requests of some kilobytes"

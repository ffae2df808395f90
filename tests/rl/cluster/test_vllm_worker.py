"""Rollout workers on Ray whose engine is the real vLLM: a run trains on what they sampled, with every refit."""

import numpy as np
import pytest

import vllm_models  # noqa: F401  sets vLLM's environment before anything imports it
from paceline.report.trace import read_trace
from paceline.rl.loop import train
from tiny_run import make_policy, tiny_config

pytest.importorskip("vllm")
pytest.importorskip("ray")
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("in_flight", "age"), [("wait", 0), ("keep", 1)])
def test_a_run_trains_on_what_a_vllm_worker_sampled_by_the_weights_that_it_was_sent(tmp_path, in_flight, age):
    policy = make_policy(tmp_path / "policy", head_dim=32)  # a head size that vLLM has
    options = ("engine.kind=vllm", "cluster.kind=ray", "cluster.rollout_workers=1", "rl.lr=3e-2", "check.every=0")
    ahead = (f"rl.in_flight={in_flight}", f"rl.max_age_steps={age}")
    records = train(tiny_config(policy, tmp_path / "run", *options, *ahead))
    rows = list(read_trace(tmp_path / "run" / "rollouts.jsonl"))
    assert len(rows) == len({row.key for row in rows}) == 4 * 3 * 4
    assert not any(record.events.get("worker_lost") for record in records)
    for row in rows:
        assert len(row.logprobs) == len(row.tokens)
        assert 0 <= row.step - np.min(row.version) <= age
    drift = [record.mismatch_kl for record in records if np.isfinite(record.mismatch_kl)]
    if age == 0:
        assert drift
        assert max(drift) < 1e-9, "sampler and trainer have the same weights"
    else:
        assert max(drift) > 1e-5, "what was sampled a version ago is off policy, and that is seen"

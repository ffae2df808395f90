"""Which engine a run gets, and what is said where it cannot have it."""

import os
import signal
import subprocess
import sys

import pytest

from paceline.engines.vllm import versions
from paceline.rl.loop import train
from paceline.rl.notices import weights_stale
from paceline.schema import PacelineError, SamplingParams
from paceline.signals import deaf_to_stop_signals
from tiny_run import make_policy, tiny_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(
    ("installed", "options", "said"),
    [
        (None, (), "vLLM is not installed; versions"),
        ("0.12.0", (), "vLLM 0.12.0 is not among the versions"),
        ("0.32.0", ("policy.dtype=float64",), "policy.dtype=float64: vLLM has no such dtype"),
    ],
)
def test_a_run_that_vllm_cannot_serve_ends_with_one_line(policy, tmp_path, monkeypatch, installed, options, said):
    monkeypatch.setattr(versions, "installed", lambda: installed)
    with pytest.raises(PacelineError, match=f"^{said}[^\n]*$"):
        train(tiny_config(policy, tmp_path / "run", "engine.kind=vllm", *options))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml"]


def test_rounding_is_no_staleness_and_a_shaped_law_is_not_judged():
    plain, shaped = SamplingParams(), SamplingParams(top_k=5)
    assert weights_stale(3, 1e-7, plain, "float32") is None
    assert weights_stale(3, float("nan"), plain, "float32") is None
    assert weights_stale(3, 5e-3, plain, "bfloat16") is None
    assert weights_stale(3, 0.1, shaped, "float32") is None
    assert "step 3: mismatch_kl is 0.001 nats" in str(weights_stale(3, 1e-3, plain, "float32"))
    assert weights_stale(3, 0.1, plain, "bfloat16") is not None


def test_a_process_that_was_started_deaf_outlives_a_ctrl_c():
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('up', flush=True); print(input())"
    command = [sys.executable, "-c", script]
    with deaf_to_stop_signals():
        deaf = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    hearing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for process in (deaf, hearing):
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGINT)
    assert deaf.communicate("still here\n")[0] == "still here\n"
    assert hearing.wait(60) == -signal.SIGINT

"""The plug-in's history over the end of vLLM's process, whichever way it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_models import save_tiny, started

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

SPECULATIVE = {
    "method": "custom_class",
    "model": "paceline.integrations.vllm.HistoryProposer",
    "num_speculative_tokens": 8,
}
PROMPTS = [[5], [6, 7], [9, 8, 7, 6, 5]]

#: A vLLM with its engine in a process of its own, as a server runs it.
SEPARATE = """
import sys
from vllm_models import settings
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, snapshot, speculative = sys.argv[1], sys.argv[2], eval(sys.argv[3])
    llm = LLM(**settings(
        model, speculative_config=speculative,
        additional_config={"paceline": {"budget": {"mode": "fixed"}, "snapshot": snapshot}},
    ))
    how = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(ids)} for ids in eval(sys.argv[4])]
    for output in llm.generate(prompts, how, use_tqdm=False):
        print("said", *output.outputs[0].token_ids)
    print("ready", flush=True)
    sys.stdin.read()
"""


def passes_and_answers(model: Path, snapshot: Path) -> tuple[int, list[list[int]], dict[str, Any]]:
    """Passes that a vLLM with this snapshot takes for the prompts, what it says, and its plug-in's report."""
    from vllm import SamplingParams

    settings = {"budget": {"mode": "fixed"}, "snapshot": str(snapshot)}
    with started(model, speculative_config=SPECULATIVE, additional_config={"paceline": settings}) as llm:
        how = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], how, use_tqdm=False)
        report = llm.collective_rpc(lambda worker: worker.model_runner.drafter.report())[0]
    return report["row_forwards"], [list(output.outputs[0].token_ids) for output in outputs], report


def test_history_outlives_an_engine_s_process_that_is_told_to_end(tmp_path: Path) -> None:
    model, snapshot = save_tiny(tmp_path / "model"), tmp_path / "kept" / "history.plhist"
    script = tmp_path / "separate.py"
    script.write_text(SEPARATE, encoding="utf-8")
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(model), str(snapshot), repr(SPECULATIVE), repr(PROMPTS)]
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said: list[list[int]] = []
        for line in process.stdout:
            if line.startswith("said"):
                said.append([int(word) for word in line.split()[1:]])
            if line.startswith("ready"):
                break
        assert len(said) == len(PROMPTS)
        assert not snapshot.exists()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        assert children
        for child in children:
            os.kill(int(child), signal.SIGTERM)
        for _ in range(120):
            if snapshot.exists():
                break
            time.sleep(0.5)
        process.stdin.close()
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
    assert snapshot.exists()
    passes, again, report = passes_and_answers(model, snapshot)
    assert again == said
    assert len(PROMPTS) * 40 / passes > 4
    assert "history_lost" not in report["events"]


def test_a_snapshot_that_cannot_be_read_is_a_cold_start_with_a_name(tmp_path: Path) -> None:
    model, snapshot = save_tiny(tmp_path / "model"), tmp_path / "history.plhist"
    snapshot.write_bytes(b"not a snapshot")
    cold, said, report = passes_and_answers(model, snapshot)
    assert report["events"]["history_lost"] == 1
    # Written over at shutdown, in this process as well; the next start is warm.
    warm, again, report = passes_and_answers(model, snapshot)
    assert again == said
    assert warm < cold / 2
    assert "history_lost" not in report["events"]

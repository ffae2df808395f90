"""The script for one GPU: the same code on the CPU, with the smallest shapes."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_cotrain.py"


def test_it_measures_every_depth_on_the_same_tokens_and_every_phase(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("gpu_cotrain", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules["gpu_cotrain"] = script
    spec.loader.exec_module(script)
    shape = replace(script.SHAPES["tiny"], policy_seconds=0.5, facts=1, documents=8, epochs=1)
    monkeypatch.setitem(script.SHAPES, "tiny", shape)
    monkeypatch.setattr(script, "DEPTHS", (1, 3))
    monkeypatch.setattr(sys, "argv", ["gpu_cotrain.py", "--tiny", "--json", str(tmp_path / "found.json")])
    script.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert [cell["depth"] for cell in found["cells"]] == [0, 1, 3, 3]
    assert len({cell["tokens"] for cell in found["cells"]}) == 1
    assert set(found["phases"]) == {"data", "logprob", "train", "drafter", "refit", "refit of the head"}
    assert found["head"]["tokens_per_second"] > 0
    assert capsys.readouterr().out.count("| 4 |") == len(found["cells"])

"""``paceline plan`` shows what fits and what does not, writes both as JSON and a picture, and tells bad input."""

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from paceline.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plan.md"


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "160"})


def test_the_plan_of_a_large_mixture_names_layouts_that_fit(tmp_path: Path) -> None:
    done = plan("--model", "Qwen3-235B-A22B", "--pipeline", 4, "--json", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    assert "qwen3-235b-a22b: 235.09 B parameters, 22.19 B active; eagle3 drafter: 0.93 B, 3 passes" in done.output
    assert "0.5 GiB of trunk keys and values a layer; the teacher's logits, never whole, would take 74.2" in done.output
    result = json.loads((tmp_path / "plan.json").read_text())
    first = result["layouts"][0]
    assert f"{result['fitting']} of {result['possible']} layouts fit 72.0 GiB a rank" in done.output
    assert first["layout"]["pipeline"] == 4
    assert first["slots"]["recommended"] == {"0": 3, "1": 2}
    assert "0: 3 (1), 1: 2 (1)" in done.output
    for kind, count in (first["memory"] | first["sent"]).items():
        shown = re.search(rf"^{kind} +([\d.]+)$", done.output, re.MULTILINE)
        assert (shown and shown[1]) == (f"{count / 2**30:.2f}" if count else None)


def test_a_model_too_large_is_told_how_much_it_lacks_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.svg"
    done = plan("--model", "llama-3.1-70b", "--gpus", 8, "--batch", 8, "--drafter", "dflash", "--out", picture)
    assert done.exit_code == 0, done.output
    assert "layouts fits 72.0 GiB a rank; the smallest lacks " in done.output
    assert "dflash drafter" in done.output
    drawn = picture.read_text()
    assert "drafter activations" in drawn
    assert "d1 c8 t1 p1 e1" in drawn
    assert "tensor" not in drawn


def test_a_configuration_of_ones_own_is_planned_for(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 96, **sizes}))
    done = plan("--model", tmp_path, "--context", 4096, "--gpus", 2, "--no-checkpoint", "--passes", 2)
    assert done.exit_code == 0, done.output
    assert "2 passes; 64 sequences of 4096 tokens a step on 2 GPUs, layers not checkpointed" in done.output


def test_all_schedules_are_compared_in_one_table_with_what_one_refuses(tmp_path: Path) -> None:
    arguments = ["--model", "qwen3-8b", "--context", 65536, "--gpus", 8, "--pipeline", 4, "--batch", 4]
    done = plan(*arguments, "--schedule", "all", "--json", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "plan.json").read_text())
    table = done.output[done.output.index("Schedules, data ") :]
    assert len(result["schedules"]) == 7
    for one in result["schedules"]:
        name = one["schedule"] + (f" x {one['stages_per_rank']}" if one["stages_per_rank"] > 1 else "")
        (row,) = (line for line in table.splitlines() if line.startswith(f"{name} "))
        if one["plan"] is None:
            assert one["schedule"] in one["objection"]
            continue
        cells = row.removeprefix(name).split()
        own = one["plan"]
        assert cells[0] == ("checkpointed" if own["checkpointed"] else "whole")
        assert cells[1:3] == [str(max(own["in_flight"])), f"{own['memory_bytes'] / 2**30:.1f}"]
        assert cells[3:6] == ["yes" if own["fits"] else "no", str(own["drafter_rank"]), f"{own['relative_time']:.2f}"]
    assert [one["schedule"] for one in result["schedules"] if one["plan"] is None] == ["DualPipeV"]
    assert "at least as many" in " ".join(table.split())


def test_the_page_shows_what_the_command_prints() -> None:
    """Line by line, but for what the page leaves out at dots."""
    blocks = re.findall(r"^```\n\$ paceline plan (.*)\n((?s:.*?))```", PAGE.read_text(), re.MULTILINE)
    assert len(blocks) == 3
    for command, shown in blocks:
        printed = "\n".join(line.rstrip() for line in plan(*command.split()).output.splitlines())
        for part in shown.split("...\n"):
            assert part.strip("\n") in printed
            printed = printed[printed.index(part.strip("\n")) :]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen3-9b"], "error: --model qwen3-9b: no such config.json, and no preset; did you mean qwen3-"),
        (
            ["--model", "qwen3-8b", "--gpus", 8, "--tensor", 3],
            "error: no layout of 8 GPUs is possible: tensor=3 does not divide 8 KV heads\n",
        ),
        (["--model", "qwen3-8b", "--schedule", "zbv"], "error: --schedule zbv: no such schedule; "),
        (["--model", "qwen3-8b", "--stages-per-rank", 2], "error: --stages-per-rank 2: 1F1B has one stage a rank; "),
        (
            ["--model", "qwen3-8b", "--gpus", 8, "--pipeline", 8, "--batch", 4],
            "error: no layout of 8 GPUs is possible: 1F1B of 8 ranks, 8 stages and 4 micro-batches: Number of micro",
        ),
        (["--model", "qwen3-8b", "--memory-gib", -1], "error: --memory-gib -1.0: a GPU's memory is above 0\n"),
        (["--model", "qwen3-8b", "--out", "nowhere/x.png"], "error: --out nowhere/x.png: cannot be written: "),
        (["--model", "qwen3-8b", "--json", "nowhere/x.json"], "error: --json nowhere/x.json: cannot be written: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[object], message: str) -> None:
    done = plan(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1

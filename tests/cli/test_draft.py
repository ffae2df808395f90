"""``paceline draft`` hands the head of a run, or one that lies about, to engines."""

import json

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import dump_config
from paceline.cotrain.export import stored_head, write_head
from paceline.drafters.heads.files import read_head
from paceline.rl import checkpoint
from paceline.rl.engine import head_of
from paceline.rl.policy import Policy
from tiny_run import make_policy, tiny_config


def invoke(*arguments):
    return CliRunner().invoke(app, ["draft", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was cut off after its first step, and the head of its checkpoint."""
    out = tmp_path_factory.mktemp("runs") / "run"
    policy = make_policy(tmp_path_factory.mktemp("policy"))
    config = tiny_config(policy, out, "drafter.kind=eagle3", "drafter.head.taps=[0,1]")
    head = head_of(config, Policy.load(config.policy, config.seed))
    with torch.no_grad():
        head.fc.weight.add_(1)
    checkpoint.save(out / "checkpoints", 1, {"drafter": head.checkpoint()}, {"drafting": {"version": 1}})
    (out / "config.yaml").write_text(dump_config(config))
    return out, head, str(policy)


def test_the_head_of_a_run_that_was_cut_off_comes_from_its_checkpoint(run, tmp_path):
    out, head, policy = run
    done = invoke("export", out, "--format", "speculators", "--out", tmp_path / "head", "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    assert f"{tmp_path / 'head'}: eagle3 head for speculators" in done.stdout
    assert f"version 1 of {policy}" in done.stdout
    assert "reads the outputs of layers 0, 1, counted from 0" in done.stdout
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["kind"], result["taps"], result["vocabulary"], result["version"]) == ("eagle3", [0, 1], 12, 1)
    assert torch.equal(read_head(tmp_path / "head").tensors["fc.weight"], head.fc.weight)
    named = invoke("export", tmp_path / "head", "--out", tmp_path / "named", "--policy", "org/model")
    assert named.exit_code == 0, named.output
    assert read_head(tmp_path / "named").policy == "org/model"


def test_a_run_that_ended_has_its_head_in_its_folder(run, tmp_path):
    out, head, _ = run
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_bytes((out / "config.yaml").read_bytes())
    write_head(stored_head(head, policy="p", version=9), folder / "drafter")
    assert invoke("export", folder, "--out", tmp_path / "head").exit_code == 0
    assert read_head(tmp_path / "head").version == 9


def test_what_cannot_be_exported_is_one_line(run, tmp_path):
    out, _, _ = run
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes((out / "config.yaml").read_bytes())
    for arguments, said in (
        ((tmp_path / "run",), "no head was trained in this run"),
        ((tmp_path / "nowhere",), "no such directory"),
        ((out, "--format", "sglang"), "a head of 2 taps: SGLang reads three"),
        ((out, "--taps", "one"), "--taps one: give numbers of layers"),
    ):
        done = invoke("export", *arguments, "--out", tmp_path / "head")
        assert done.exit_code == 2
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "head").exists()


def test_a_head_is_trained_before_the_run_and_its_numbers_are_written(run, tmp_path):
    _, _, policy = run
    config = tmp_path / "run.yaml"
    config.write_text(dump_config(tiny_config(policy, tmp_path / "run", "drafter.kind=eagle3", "drafter.budget=3")))
    small = ("--prompts", 4, "--samples", 2, "--epochs", 2, "--batch", 4)
    done = invoke("train", config, "cotrain.passes=2", *small, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["drafter"] == f"{tmp_path}/run-drafter/drafter"
    assert [mark["epoch"] for mark in result["marks"]] == [0, 1, 2]
    assert f"{result['marks'][-1]['held_out']['overlap_2']:.3f}" in done.output
    assert read_head(result["drafter"]).kind == "eagle3"
    again = invoke("train", config, *small)
    assert again.exit_code == 2
    assert "is used already" in again.output


def test_a_drafter_without_a_model_is_not_trained(run, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(dump_config(tiny_config(run[2], tmp_path / "run", "drafter.kind=history")))
    done = invoke("train", config)
    assert done.exit_code == 2
    assert done.output.strip().splitlines()[-1].startswith("error: drafter.kind=history has no model")

"""Every option and argument of every command, given what nobody should: in order, or one line and exit code 2.

The commands and their options are read from the command line itself, so that a new one is attacked too.
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from commands import check_ending
from paceline.cli import app
from recorded import write_trace
from sample_run import make_records, make_rows, write_run

pytestmark = pytest.mark.attacks

_NUMBERS = (
    "1000000000", "999999999", "100000000000000000000", "-1", "0", "nan", "inf", "-inf", "1e308", "1e-320", "1_0",
    "0x10",
)  # fmt: skip
_TEXTS = (
    "", " ", "a\0b", "x" * 5000, "\ud800", "\x1b[2J", "[/]", "--", ",", "=", "a=1,a=2", "1," * 500, "/dev/zero",
    "/dev/full", ".", "\u00e9" * 300,
)  # fmt: skip
_VALUES = (*_NUMBERS, *_TEXTS)
#: Values that one run of this file tries for an option; which ones, changes with the option's name only.
_TRIED = 3


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By command: arguments with which it does its work in a moment, or refuses to before it loads a model."""
    folder = tmp_path_factory.mktemp("given")
    records = make_records(2, 2)
    run = str(write_run(folder / "run", records, make_rows(records, 2)))
    trace = str(write_trace(folder, [[[5, 6, 7, 8] * 3]] * 4))
    (folder / "times.json").write_text("[[1, 1, 1e6], [1, 17, 1e6], [8, 8, 1e6], [8, 136, 1e6]]")
    times = str(folder / "times.json")
    (folder / "run.yaml").write_text("policy: {path: /nowhere}\n")
    config = str(folder / "run.yaml")
    simulate = "--prompts=2 --siblings=2 --mean-tokens=20 --max-tokens=40 --slots=4 --repeats=1"
    out = str(folder / "out")
    return {
        "train": [config, "--out", out],
        "warmup": [config, "--out", out],
        "replay": [trace, "--drafters", "prompt_lookup"],
        "profile": [config],
        "simulate": ["--cost", "llama-3.1-8b-h100", "--drafted", "1", *simulate.split(" ")],
        "tune": [trace, "--cost", times, "--budgets", "1", "--drafters", "prompt_lookup"],
        "plan": ["--model", "llama-3.1-8b"],
        "doctor": [config, "--no-check"],
        "audit": ["--case", "greedy", "--scale", "0.01"],
        "diff": [run, run],
        "report": [str(folder / "none")],
        "timeline": [run],
        "top": [run, "--once"],
        "serve": ["/nowhere"],
        "config": [config],
        "assets": ["--nothing"],  # which would fetch
        "cache inspect": [run],
        "cache verify": [run],
        "cache prune": [run, "--out", out],
        "cache export": [run],
        "cache merge": [run, "--out", out],
        "draft train": [config, "--out", out],
        "draft export": ["/nowhere", "--out", out],
    }


def commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    def below(command, path):
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                yield from below(inner, (*path, name))
        else:
            yield " ".join(path), command

    yield from below(typer.main.get_command(app), ())


def options(command) -> list[str]:
    found = [p.opts[0] for p in command.params if p.param_type_name == "option" and not getattr(p, "is_flag", False)]
    return [name for name in found if name.startswith("--")]


_ATTACKED = sorted(f"{name}|{option}" for name, command in commands() for option in options(command))


def test_every_command_has_arguments_to_attack_it_with(given: dict[str, list[str]]) -> None:
    assert sorted(given) == sorted(name for name, _ in commands())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    # A value that names no file is asked of the hub, minutes long where there is no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("attacked", _ATTACKED)
def test_no_value_of_an_option_ends_in_a_traceback(given: dict[str, list[str]], attacked: str) -> None:
    name, _, option = attacked.partition("|")
    values = _VALUES if os.environ.get("PACELINE_ATTACK_ALL") else random.Random(attacked).sample(_VALUES, _TRIED)
    for value in values:
        if option == "--every" and value.startswith("1"):
            continue
        check_ending(*name.split(), *given[name], f"{option}={value}")


@pytest.mark.parametrize("name", sorted(name for name, _ in commands()))
def test_no_argument_ends_in_a_traceback(given: dict[str, list[str]], name: str) -> None:
    values = _TEXTS if os.environ.get("PACELINE_ATTACK_ALL") else random.Random(name).sample(_TEXTS, _TRIED)
    for value in values:
        if name == "top" or value == "--":
            continue
        check_ending(*name.split(), value, *given[name][1:])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("replay TRACE --budget 1000000000", "budget"),
        ("plan --model llama-3.1-8b --gpus 999999999", "gpus"),
        ("config CONFIG rl.lr=nan", "lr"),
        ("config CONFIG seed=100000000000000000000000", "seed"),
        ("config CONFIG rl.epochs=-5", "epochs"),
        ("config CONFIG rl.epochs=1e400", "epochs"),
    ],
)
def test_numbers_beyond_reason_are_one_line(given: dict[str, list[str]], line: str, says: str) -> None:
    from commands import refused_in_one_line

    words = line.replace("TRACE", given["replay"][0]).replace("CONFIG", given["config"][0]).split()
    assert says in refused_in_one_line(*words)


def test_an_empty_or_unwritable_json_path_is_one_line(given: dict[str, list[str]], tmp_path: Path) -> None:
    from commands import refused_in_one_line

    for path in ("", str(tmp_path), "/dev/full", "a\0b", "x" * 5000, str(tmp_path / "no" / "folder.json")):
        said = refused_in_one_line("config", given["config"][0], f"--json={path}")
        assert "--json" in said
        assert len(said) < 400
    assert not list(tmp_path.iterdir())


def test_a_sound_json_path_is_written(given: dict[str, list[str]], tmp_path: Path) -> None:
    assert check_ending("config", given["config"][0], "--json", str(tmp_path / "c.json")) == 0
    assert json.loads((tmp_path / "c.json").read_text())

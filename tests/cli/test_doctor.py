"""The doctor says in one line each what is missing, broken, hurts or would be refused, and never falls over it."""

import importlib
import importlib.metadata
import json
import re
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import paceline.audit.subject
import paceline.engines.vllm.versions as versions
from broken.registry import BROKEN
from paceline.audit.subject import Joined, ToySubject
from paceline.cli import app, doctor_machine, doctor_run
from paceline.cli.doctor_findings import guarded, ok
from paceline.cli.doctor_machine import memory, quota, room, threads
from paceline.cli.doctor_packages import PACKAGES, Package, canonical, found, numbers, oldest_versions, vllm
from paceline.cli.doctor_run import configured
from paceline.config import load_config
from paceline.rl.sandbox import NOTHING, Isolation
from tiny_run import make_policy

ROOT = Path(__file__).parents[2]
doctor = importlib.import_module("paceline.cli.doctor")  # the package has the command by that name


def invoke(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def outcomes(findings):
    return [finding.outcome for finding in findings]


# Packages


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package with a version, whose import does what ``code`` does."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(version, code="", **changes):
        (tmp_path / "thing_of_ours.py").write_text(code)
        info = tmp_path / f"thing_of_ours-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: thing-of-ours\nVersion: {version}\n")
        return Package("thing-of-ours", "thing_of_ours", "pip install thing", "tests", ("1.2.3", "1.1.0"), **changes)

    yield make
    sys.modules.pop("thing_of_ours", None)


@pytest.mark.parametrize(
    ("version", "outcome", "says"),
    [
        ("1.2.3", "ok", "1.2.3, which paceline is run with"),
        ("1.1.0+cpu", "ok", "1.1.0+cpu, which paceline is run with"),
        ("1.2.9", "ok", "1.2.9; paceline is run with 1.2.3, 1.1.0"),
        ("1.3.0", "warning", "1.3.0 is newer than any that paceline was run with (1.2.3)"),
        ("1.10", "warning", "1.10 is newer than any that paceline was run with (1.2.3)"),
        ("1.0.9", "refused", "1.0.9 is older than 1.1"),
    ],
)
def test_a_version_is_one_that_is_run_with_known_too_new_or_too_old(package, version, outcome, says):
    finding = found(package(version), is_needed=True, oldest="1.1")
    assert (finding.outcome, finding.says) == (outcome, says)
    assert bool(finding.do) == (outcome != "ok")


@pytest.mark.parametrize("code", ["raise OSError('libthing.so: cannot open')", "import absent_thing", "1 / 0"])
def test_a_broken_package_is_a_line_where_it_is_needed_or_tried(package, code):
    broken = package("1.2.3", code, tried=True)
    needed, tried = found(broken, is_needed=True), found(broken, is_needed=False)
    assert (needed.outcome, tried.outcome) == ("refused", "warning")
    assert needed.says.startswith("1.2.3 cannot be imported: ")
    assert "\n" not in needed.says


def test_what_nobody_needs_is_not_imported(package):
    assert found(package("1.2.3", "raise OSError"), is_needed=False).outcome == "ok"
    assert "thing_of_ours" not in sys.modules


def test_a_missing_package_is_refused_only_where_the_run_needs_it():
    absent = Package("absent", "absent_thing", "pip install absent", "tests")
    for is_needed, outcome in ((True, "refused"), (False, "ok")):
        finding = found(absent, is_needed)
        assert (finding.outcome, finding.do) == (outcome, "pip install absent")
    vital = Package("absent", "absent_thing", "pip install absent", "every run")
    assert found(vital, is_needed=False).outcome == "warning"


def test_the_versions_that_are_run_with_are_those_of_the_constraints():
    pinned = {}
    for name in ("constraints.txt", "constraints-vllm.txt"):
        for pin in re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE):
            pinned.setdefault(canonical(pin[0]), set()).add(pin[1])
    told = {canonical(package.name): set(package.run_with) for package in PACKAGES}
    assert told == {name: pinned.get(name, set()) for name in told}


def test_the_oldest_versions_are_those_that_paceline_asks_for():
    floors = oldest_versions(importlib.metadata.requires("paceline"))
    assert numbers(floors["torch"]) >= (2, 6)
    assert oldest_versions(["Prometheus_Client[x]>=0.20; extra == 'track'", "vllm; extra == 'vllm'"]) == {
        "prometheus-client": "0.20"
    }


@pytest.mark.parametrize(
    ("version", "is_needed", "expected"),
    [
        (None, False, ["ok"]),
        (None, True, ["refused"]),
        ("0.99.0", False, ["refused"]),
        ("0.23.0", False, ["warning"]),
        ("0.23.0", True, ["refused"]),
        ("0.32.0", False, ["ok", "ok", "ok"]),
    ],
)
def test_vllm_is_known_by_its_version_with_its_faults_and_is_not_imported(monkeypatch, version, is_needed, expected):
    monkeypatch.setattr(versions, "installed", lambda: version)
    before = set(sys.modules)
    findings = list(vllm(is_needed))
    assert outcomes(findings) == expected
    assert "vllm" not in set(sys.modules) - before
    if version == "0.32.0":
        assert "long_row (vllm#58080)" in findings[1].says
        assert "ignored_parameters" in findings[2].says
        monkeypatch.setattr(versions, "installed", lambda: "0.30.0")
        assert "second_engine" in findings[1].says
        assert "second_engine" not in list(vllm(False))[1].says


# The machine


@pytest.mark.parametrize(
    ("found", "outcome", "says"),
    [
        (Isolation(seccomp=True, landlock=7), "ok", "seccomp filter, Landlock 7, limits on memory, file size"),
        (Isolation(seccomp=True, landlock=0), "warning", "rewards can read every file of this user"),
        (Isolation(seccomp=False, landlock=7), "warning", "rewards can use the network and start processes"),
        (NOTHING, "warning", "rewards can write files, use the network and signal other processes"),
    ],
)
def test_the_isolation_of_the_machine_is_named_mechanism_by_mechanism(found, outcome, says):
    (finding,) = doctor_machine.sandbox(found)
    assert finding.outcome == outcome
    assert says in finding.says


def test_a_task_that_is_unsafe_is_a_warning():
    config = load_config(None, ["tasks={function_call: {unsafe: true}}"])
    found = {finding.name: finding.outcome for finding in doctor_run.tasks(config)}
    assert found == {"task function_call": "ok", "task function_call: sandbox": "warning"}


@pytest.mark.parametrize(
    ("environ", "cores", "computing", "says"),
    [
        ({}, 2.0, 2, "ok"),
        ({"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}, 2.0, 1, "ok"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2.0, 1, "OMP_WAIT_POLICY=ACTIVE"),
        ({"GOMP_SPINCOUNT": "infinity"}, 2.0, 1, "GOMP_SPINCOUNT=infinity"),
        ({"KMP_BLOCKTIME": "1000"}, 2.0, 1, "KMP_BLOCKTIME=1000"),
        ({}, 1.5, 8, "torch computes with 8 threads on 1.5 cores"),
    ],
)
def test_threads_that_spin_or_outnumber_the_cores_are_warned_of(environ, cores, computing, says):
    (finding,) = threads(environ, cores, computing)
    assert finding.outcome == ("ok" if says == "ok" else "warning")
    assert says in finding.says or says == "ok"


def test_a_control_groups_quota_is_its_cores():
    assert (quota("150000 100000\n"), quota("max 100000\n"), quota("")) == (1.5, float("inf"), float("inf"))


def test_little_memory_and_little_room_are_warned_of(tmp_path):
    assert [memory(free).outcome for free in (1e9, 1e10, float("inf"))] == ["warning", "ok", "ok"]
    assert room("cache", tmp_path / "not" / "yet", 1, "").outcome == "ok"
    full = room("cache", tmp_path, 1 << 60, "move")
    assert (full.outcome, full.do) == ("warning", "move")


def test_what_was_found_before_something_broke_is_kept():
    def look():
        yield ok("a", "b", "fine")
        raise RuntimeError("two\nlines")

    kept, broken = guarded("a", "c", look)
    assert kept.says == "fine"
    assert (broken.outcome, broken.says) == ("refused", "RuntimeError: two lines")


# A run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"out: {tmp_path / 'run'}\npolicy: {{path: {make_policy(tmp_path / 'policy')}}}\n"
        "tasks: {text_to_sql: {train_prompts: 4}}\nsampling: {max_tokens: 2}\n"
    )
    return path


def run_lines(path, *overrides):
    """Whether something is refused, and what is not ok in the run, by name."""
    _, findings = configured(path, overrides)
    wrong = [finding for finding in findings if finding.outcome != "ok"]
    return "refused" in outcomes(wrong), {finding.name: finding.says for finding in wrong}


def test_a_run_that_is_as_it_must_be_has_no_line_of_its_own_and_leaves_nothing_behind(config, tmp_path):
    before = set(tmp_path.rglob("*"))
    done = invoke(config, "--no-check", "--json", tmp_path / "d.json")
    assert done.exit_code == 0, done.output
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "d.json"}
    findings = json.loads((tmp_path / "d.json").read_text())["findings"]
    assert {finding["area"] for finding in findings} == {"installed", "machine", "run"}
    assert {finding["outcome"] for finding in findings if finding["area"] == "run"} == {"ok"}
    assert "task text_to_sql" in done.output


def test_what_is_refused_is_exit_code_1_and_overrides_need_no_file():
    done = invoke("rl.stepz=3", "--no-check")
    assert done.exit_code == 1
    assert "unknown key rl.stepz; did you mean rl.steps?" in " ".join(done.output.split())
    assert done.output.splitlines()[-1].startswith("1 refused, ")


def test_an_unknown_key_is_the_only_line_of_its_run(config):
    says = "the override rl.stepz=3: unknown key rl.stepz; did you mean rl.steps?"
    assert run_lines(config, "rl.stepz=3") == (True, {"configuration": says})
    assert run_lines(config, "threads=9999")[1]["threads"].startswith("threads=9999 on ")


def test_everything_that_a_run_would_refuse_is_told_at_once(config, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        is_refused, lines = run_lines(
            config,
            f"policy.path={tmp_path / 'absent'}",
            "policy.device=cuda:7",
            "tasks.text_to_sql.options={wrong: 1}",
            "engine.invariant=true",
            "policy.dtype=bfloat16",
            "track.to=[tensorboard, prometheus]",
            f"track.prometheus.port={taken.getsockname()[1]}",
            f"out={config}/run",
        )
    assert is_refused
    assert {"policy", "device", "tasks", "engine", "port", "out"} <= set(lines)
    assert "no such directory" in lines["policy"]
    assert "task text_to_sql: unknown option 'wrong'" in lines["tasks"]


def test_a_page_that_others_could_read_is_refused_whatever_else_is_wrong(config, monkeypatch):
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    page = ("track.prometheus.host=0.0.0.0", "track.prometheus.port=0")
    is_refused, lines = run_lines(config, "track.to=[trackio, prometheus]", *page)
    assert is_refused
    assert "others can reach 0.0.0.0; set PACELINE_TOKEN" in lines["prometheus"]
    assert "port" not in lines
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    assert "prometheus" not in run_lines(config, "track.to=[prometheus]", *page)[1]


def test_what_a_run_would_lose_is_a_warning(config, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    is_refused, lines = run_lines(
        config,
        "check.every=0",
        "engine.sentinel.canaries=0",
        "sampling.top_k=3",
        "sampling.max_tokens=100000",
        f"drafter.history.warm={tmp_path / 'absent'}",
        "allow_lossy=true",
        "engine.verifier=lossy_verifier:greedy",
    )
    assert not is_refused
    assert set(lines) == {"identity", "sentinel", "law", "policy: context", "prompts long", "history", "lossy", "out"}
    assert "starts cold" in lines["history"]
    assert "holds a run already" in lines["out"]
    assert set(run_lines(config, "drafter.kind=none")[1]) == {"drafter", "out"}


def test_weights_that_are_no_safetensors_are_refused_by_name(config, tmp_path):
    weights = next((tmp_path / "policy").glob("*.safetensors"))
    weights.rename(weights.with_name("pytorch_model.bin"))
    is_refused, lines = run_lines(config)
    assert is_refused
    assert "pytorch_model.bin is a pickle, which is never loaded" in lines["policy"]


def test_a_grammar_that_does_not_compile_is_refused(config, tmp_path):
    pytest.importorskip("llguidance")
    policy = f"policy.path={ROOT / 'examples' / 'policies' / 'sql-1m'}"
    assert not run_lines(config, policy, "sampling.grammar={kind: regex, text: 'a+'}")[0]
    is_refused, lines = run_lines(config, policy, "sampling.grammar={kind: regex, text: '('}")
    assert is_refused
    assert "the regex does not compile" in lines["sampling"]


# The self-check


def test_the_self_check_audits_cases_that_there_are():
    from paceline.audit.learned import LearnedSubject

    known = {case.name for case in Joined(ToySubject(), LearnedSubject()).cases(1.0)}
    assert set(doctor.CASES) - known == {"refusals"}


def test_the_self_check_passes_here_and_fails_with_a_broken_verifier(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CASES", ("plain", "refusals"))
    monkeypatch.setattr(doctor_machine, "machine", list)
    passed = invoke()
    assert passed.exit_code == 0, passed.output
    assert "lossless: 80 rollouts" in passed.output
    broken = BROKEN["greedy-acceptance"]
    monkeypatch.setattr(paceline.audit.subject, "ToySubject", lambda: ToySubject(broken.build, name=broken.name))
    failed = invoke("--json", tmp_path / "d.json")
    assert failed.exit_code == 1
    assert "refused" in failed.output
    last = json.loads((tmp_path / "d.json").read_text())["findings"][-1]
    assert (last["name"], last["outcome"]) == ("audit", "refused")

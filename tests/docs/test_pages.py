"""The documentation says what the code does: generated references are complete, examples run."""

import importlib.util
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from paceline.config import BudgetConfig, TaskConfig, dump_config, known_keys, load_config
from paceline.report.definitions import EVENTS, METRICS
from paceline.report.elsewhere import ELSEWHERE
from paceline.rl.tasks import make_task

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_reference", DOCS / "gen_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def test_the_configuration_reference_has_every_key(reference: ModuleType) -> None:
    text = reference.on_page_markdown("<!-- reference: configuration -->")
    assert [key for key in known_keys() if f"| `{key}` |" not in text] == []


def test_the_metrics_reference_has_every_metric(reference: ModuleType) -> None:
    text = reference.on_page_markdown("<!-- reference: metrics -->")
    assert [metric.name for metric in METRICS if f"| `{metric.name}` |" not in text] == []


def test_the_events_reference_has_every_event(reference: ModuleType) -> None:
    text = reference.on_page_markdown("<!-- reference: events -->")
    assert [event for event in EVENTS if f"| `{event}` |" not in text] == []


def test_the_names_of_other_tools_are_of_metrics_that_exist_and_all_on_the_page(reference: ModuleType) -> None:
    text = reference.on_page_markdown("<!-- reference: elsewhere -->")
    assert {other.metric for other in ELSEWHERE} <= {metric.name for metric in METRICS}
    assert len({(other.tool, other.name) for other in ELSEWHERE}) == len(ELSEWHERE)
    assert [other.name for other in ELSEWHERE if f"| {other.tool} | `{other.name}` |" not in text] == []


def test_the_faults_page_has_every_row_that_a_test_names(reference: ModuleType) -> None:
    text = reference.on_page_markdown("<!-- reference: faults -->")
    named = reference.fault_tests()
    assert [fault for fault in named if f"| {fault} |" not in text] == []
    assert "test_an_eos_inside_a_draft_ends_the_response" in named["C4"]
    assert "test_a_tensor_missing_from_the_model_is_named" in named["G6"], "a comment above the function"


def test_an_unknown_reference_stops_the_build(reference: ModuleType) -> None:
    with pytest.raises(KeyError):
        reference.on_page_markdown("<!-- reference: nothing -->")


def test_every_marker_of_a_page_stands_alone_on_its_line(reference: ModuleType) -> None:
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert len(reference.MARKER.findall(text)) == text.count("<!-- reference"), page.name


def test_the_task_of_the_tasks_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("docs/tasks.md", "python")
    (tmp_path / "task_of_the_page.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = TaskConfig(kind="task_of_the_page:Doubling", train_prompts=3, eval_prompts=2, options={"start": 10})
    task = make_task("doubling", config, seed=0)
    assert [prompt.data for prompt in task.prompts("train")] == [20, 22, 24]
    assert [prompt.data for prompt in task.prompts("eval")] == [26, 28]
    prompt = task.prompts("train")[0]
    assert task.reward(prompt, task.answer(prompt)) == 1.0
    assert task.reward(prompt, "21") == 0.0


def test_the_example_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks("README.md", "python")
    monkeypatch.chdir(ROOT)
    # How much pays is a matter of the clock, and this is no test of it.
    monkeypatch.setattr("paceline.engines.hf.engine.BudgetConfig", partial(BudgetConfig, mode="fixed"))
    exec(compile(source, "README.md", "exec"), {})
    visits = re.findall(r"([\d.]+) tokens a forward$", capsys.readouterr().out, re.MULTILINE)
    assert len(visits) == 3
    assert float(visits[2]) > float(visits[0]), "history makes the later visits need fewer forwards"


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.yaml")))
def test_every_example_is_a_run_whose_settings_are_honoured(example: str) -> None:
    config = load_config(ROOT / "examples" / example)
    assert yaml.safe_load(dump_config(config))["out"] == f"runs/{Path(example).stem}"

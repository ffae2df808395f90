"""What the table of faults says of paceline is what paceline says."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from broken.registry import BROKEN, Broken
from paceline.config import known_keys
from paceline.report.definitions import METRICS

ROOT = Path(__file__).resolve().parents[2]
FAULTS = yaml.safe_load((ROOT / "docs/faults.yml").read_text(encoding="utf-8"))
SAID = {fault: row["says"] for fault, row in FAULTS.items()}


def test_every_fault_has_a_symptom_a_cause_and_what_paceline_says() -> None:
    assert {tuple(row) for row in FAULTS.values()} == {("seen", "symptom", "cause", "says")}
    assert [fault for fault, row in FAULTS.items() if not all(row.values())] == []


@pytest.mark.parametrize("broken", BROKEN.values(), ids=lambda broken: broken.name)
def test_the_check_that_is_named_is_one_that_a_broken_engine_fails(broken: Broken) -> None:
    source = (ROOT / "tests/audit/test_run.py").read_text(encoding="utf-8")
    (caught,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CAUGHT_BY"
    ]
    checks = {"law"} if broken.kind == "law" else caught.get(broken.name) or caught[broken.kind]
    named = re.split(r", (?:or )?|;", SAID[broken.row].removeprefix("audit: "))
    assert SAID[broken.row].startswith("audit: ")
    assert checks & set(named)


def test_every_name_in_the_table_exists() -> None:
    names = {name for said in SAID.values() for name in re.findall(r"`(?:paceline )?([\w.]+)`", said)}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/paceline").rglob("*.py"))
    known = {
        *known_keys(),
        *(metric.name for metric in METRICS),
        *(p.stem for p in (ROOT / "src/paceline/cli").iterdir()),
    }
    assert len(names) > 12
    assert [name for name in sorted(names - known - {"check"}) if f'"{name}"' not in sources] == []

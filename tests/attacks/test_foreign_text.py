"""Names and texts of files, models and users that are escapes, markup, scripts or formulas are never acted on."""

import json
import logging
import re
import subprocess
import sys
import unicodedata
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.table import Table
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.doctor_findings import findings_table, refused
from paceline.config import load_config
from paceline.history.snapshot import read_snapshot
from paceline.report.html import write_report
from paceline.report.live import LiveView, summary_table
from paceline.report.trace import PromptRow, write_prompts
from paceline.schema import PacelineError
from paceline.simulate.bars import write_bars
from paceline.terminal import as_html, guard_terminal, safe_console, say
from paceline.typed_yaml import dump, load
from sample_run import make_record, make_records, make_rows, write_run

pytestmark = pytest.mark.attacks

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\r"
MARKUP = "math[hard][/][bold red]:smile:"
SCRIPT = "</script><script>alert(1)</script><img src=x onerror='alert(1)'>\"'"
HOSTILE = ESCAPES + MARKUP + SCRIPT + "$\\frac{$_^"


def assert_harmless(text: str) -> None:
    """No character of ``text`` acts on a terminal."""
    acts = [
        char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\n\t"
    ]
    assert acts == []


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# The console, say, and the messages of errors


def test_a_console_shows_brackets_of_strings_cells_titles_and_headings(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console = safe_console(width=400)
    console.print(table)
    console.print(HOSTILE, HOSTILE, sep=ESCAPES, soft_wrap=True)
    shown = capsys.readouterr().out
    assert_harmless(shown)
    assert shown.count(MARKUP) == 6


def test_a_terminal_gets_the_codes_of_the_console_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console = safe_console(width=80)
    console._force_terminal = True
    console.print(PacelineError(HOSTILE), style="bold red")
    left = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert_harmless(left)
    assert "[2J" not in re.sub(r"\\x1b\[2J", "", left)


def test_say_prints_every_character_as_one_that_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"a\n{HOSTILE}")
    say(HOSTILE, error=True)
    shown = capsys.readouterr()
    assert_harmless(shown.out + shown.err)
    assert shown.out.startswith("a\n\\x1b[2J")
    assert MARKUP in shown.err


def test_the_message_of_an_error_is_one_printable_line_of_bounded_length() -> None:
    line = str(PacelineError(f"a: {HOSTILE}\n b\x85c {'x' * 100_000}; do this"))
    assert line.isprintable()
    assert len(line) < 2000
    assert line.startswith("a: \\x1b[2J")
    assert line.endswith("; do this")


def test_warnings_logs_and_tracebacks_are_printed_harmlessly() -> None:
    script = (
        "import logging, warnings, sys\n"
        "from paceline.terminal import guard_terminal\n"
        "guard_terminal()\n"
        f"warnings.warn({HOSTILE!r})\n"
        f"logging.getLogger('paceline.x').warning('%s', {HOSTILE!r})\n"
        f"raise RuntimeError({HOSTILE!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    shown = done.stderr.decode()
    assert_harmless(shown)
    assert shown.count(MARKUP) >= 3
    assert done.returncode == 1


def test_guarding_a_terminal_twice_changes_nothing() -> None:
    before = warnings.formatwarning, sys.excepthook, logging.lastResort.formatter if logging.lastResort else None
    try:
        guard_terminal()
        guard_terminal()
        assert "\x1b" not in warnings.formatwarning("\x1b", UserWarning, "f", 1)
    finally:
        warnings.formatwarning, sys.excepthook = before[:2]
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(before[2])


# Commands


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """The folder of a run whose task, events, reasons and settings are hostile."""
    records = [
        replace(
            record, events={HOSTILE: 2}, draft_reason=HOSTILE, draft_trained=True, lossy=[HOSTILE], identity=HOSTILE
        )
        for record in make_records()
    ]
    rows = [replace(row, task=HOSTILE) for row in make_rows(records)]
    folder = write_run(
        tmp_path / "run",
        records,
        rows,
        load_config(None, ["policy.path=tiny", f"track.name={json.dumps('a' + MARKUP)}"]),
    )
    write_prompts(folder / "prompts.jsonl", [PromptRow(prompt_id=rows[0].prompt_id, task=HOSTILE, tokens=[1, 2])])
    return folder


@pytest.mark.parametrize("command", ["top", "timeline", "report", "replay", "diff"])
def test_a_command_that_reads_a_hostile_run_prints_nothing_that_acts(
    command: str, hostile_run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    if command == "diff":
        write_run(other, make_records(), make_rows(make_records()), load_config(None, ["policy.path=tiny"]))
    arguments = {"diff": [other], "top": ["--once"]}.get(command, [])
    found = run(command, hostile_run, *arguments)
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert_harmless(found.output)


@pytest.mark.parametrize("name", [ESCAPES.replace("\r", ""), "[/]", "[bold]x", "$x^", "<b>"])
def test_a_path_that_is_hostile_is_shown_and_not_acted_on(name: str, tmp_path: Path) -> None:
    for arguments in (
        ["report", tmp_path / name],
        ["top", tmp_path / name],
        ["replay", tmp_path / name],
        ["config", tmp_path / name],
        ["cache", "inspect", tmp_path / name],
        ["plan", "--model", name],
        ["train", tmp_path / name],
        ["config", f"{name}=1"],
        ["config", f"out={json.dumps(name)}"],
        ["draft", "export", tmp_path / name, "-o", tmp_path / "x"],
    ):
        found = run(*arguments)
        assert found.exception is None or isinstance(found.exception, SystemExit), (arguments, found.exception)
        assert_harmless(found.output)


def test_a_configuration_that_is_printed_reads_back_the_same_and_harmless(tmp_path: Path) -> None:
    for value in (ESCAPES, "\x7f", "\u202e", "ünï", "\ue000", "$a[b]"):
        text = dump({"out": f"x{value}"})
        assert_harmless(text)
        file = tmp_path / "c.yaml"
        file.write_text(text)
        from paceline.config import Config

        assert load(Config, file, []).out == f"x{value}"


def test_a_step_and_a_message_of_a_run_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    record = make_record(0, lossy=[HOSTILE], identity=HOSTILE, draft_trained=True, draft_reason=HOSTILE)
    with LiveView(steps=1) as view:
        view.on_event(record)
        view.on_event(HOSTILE)
    safe_console(width=300).print(summary_table([record]))
    shown = capsys.readouterr().out
    assert_harmless(shown)
    assert MARKUP in shown


def test_findings_of_doctor_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    safe_console(width=500).print(findings_table([refused(HOSTILE, HOSTILE, HOSTILE, HOSTILE)]))
    shown = capsys.readouterr().out
    assert_harmless(shown)
    assert shown.count(MARKUP) == 4


# Pages and pictures


class Tags(HTMLParser):
    """What elements and attributes a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(name for name, _ in attrs)}


def test_a_report_of_a_hostile_run_has_no_element_of_its_texts(hostile_run: Path) -> None:
    page = write_report(hostile_run, lambda tokens: [HOSTILE + "\ud800"] * len(tokens)).read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert not tags.found & {"script", "img", "onerror", "iframe", "link"}
    assert_harmless(page)
    assert "&lt;script&gt;" in page


def test_text_of_a_page_is_text_in_attributes_too() -> None:
    tags = Tags()
    tags.feed(f"<p title=\"{as_html(SCRIPT)}\" class='{as_html(SCRIPT)}'>{as_html(SCRIPT)}</p>")
    assert tags.found == {"p", "title", "class"}


def test_the_interactive_page_holds_hostile_names_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.simulate import page
    from paceline.simulate.breakdown import Layout
    from paceline.simulate.hardware import load_hardware
    from paceline.simulate.projection import Scenario
    from paceline.simulate.roofline import Roofline
    from paceline.sizes.shapes import load_shape

    step = Roofline(load_shape("qwen3-8b"), load_hardware("h100"), Layout())
    start = page.Start(scenario=Scenario(trace=HOSTILE), acceptance=(0.8, 0.6), draft_s=(0.0, 0.0), model="qwen3-8b")
    text = page.render(start, step)
    tags = Tags()
    tags.feed(text)
    assert text.count("<script") == 2
    assert "onerror" not in tags.found
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["trace"] == HOSTILE


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_takes_a_dollar_for_a_dollar(tmp_path: Path, suffix: str) -> None:
    names = ["$\\frac{$", "$x_{$", "a$b$c", HOSTILE]
    file = tmp_path / f"bars{suffix}"
    write_bars({name: {"k$^": 1.0} for name in names}, file, title="$\\bad{$", unit="s", limit=("$\\q$", 0.5))
    if suffix == ".svg":
        import xml.etree.ElementTree as Tree

        Tree.parse(file)


def test_an_exported_text_of_history_is_a_line_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from paceline.history.snapshot import Snapshot, encode_snapshot

    class Decoder:
        def decode(self, _tokens: Any) -> str:
            return HOSTILE + "\x7f\u2028"

    made = Snapshot(
        salt=1,
        version=0,
        shards=np.array([5, 5], "<i8"),
        are_prompts=np.array([1, 0], "|u1"),
        versions=np.array([0, 0], "<i4"),
        starts=np.array([0, 0], "<i4"),
        offsets=np.array([0, 1, 3], "<i8"),
        tokens=np.array([1, 2, 3], "<i4"),
        votes=np.array([], "<f8"),
    )
    file = tmp_path / "h.bin"
    file.write_bytes(encode_snapshot(made))
    read_snapshot(file)
    monkeypatch.setattr("paceline.simulate.logs.pretrained_tokenizer", lambda _name: Decoder())
    found = run("cache", "export", file, "--tokenizer", "x")
    lines = found.output.splitlines()
    assert_harmless(found.output)
    assert [json.loads(line)["text"] for line in lines] == [HOSTILE + "\x7f\u2028"] * 2

"""The report is one file that needs nothing else, shows what was measured, and can be rendered from any run."""

import json
import math
import re
from html.parser import HTMLParser

import msgspec
import pytest

from paceline.config import load_config
from paceline.report.example import choose_examples, make_examples
from paceline.report.html import write_report
from paceline.report.trace import PromptRow, TimelineWriter, TraceError, TraceRow, write_prompts
from paceline.schema import StepRecord
from sample_run import decode, make_record, make_records, make_rows, write_run
from spans import make_timeline, overlapped

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Balanced(HTMLParser):
    """Fails where a tag closes what is not open."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return parser


@pytest.fixture
def run(tmp_path):
    records = make_records()
    return write_run(tmp_path / "my run", records, make_rows(records), load_config(None, ["policy.path=tiny"]))


def test_the_report_needs_no_other_file(run):
    page = write_report(run).read_text()
    parsed(page)
    assert not re.search(r"<(link|script|img|iframe)\b", page)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "http" not in page.replace("http://www.w3.org/", "")


def test_the_report_says_what_was_measured(run):
    page = write_report(run).read_text()
    assert "From the second epoch on, 6.1 tokens per forward" in page
    assert "no checked token changed" in page
    assert "16 steps · 4 epochs · 1,024 rollouts" in page
    assert "4 steps checked token by token" in page
    assert "slots_full" in page
    assert "path: tiny" in page
    assert page.count("<svg") == 11


def test_dark_light_and_phones_are_served(run):
    page = write_report(run).read_text()
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert "max-width: 34rem" in page
    for variable in set(re.findall(r"var\((--[\w-]+)\)", page)):
        assert len(re.findall(rf"{variable}: ", page)) == 2, variable


@pytest.fixture
def ahead(tmp_path):
    """A run with workers, one step ahead, that lost one."""
    rows = make_timeline(steps=16)
    records = [msgspec.structs.replace(record, **overlapped(rows)) for record in make_records()]
    records[5].events["worker_lost"] = 1
    run = write_run(tmp_path / "ahead", records)
    with TimelineWriter(run / "timeline.jsonl") as writer:
        writer.write([*rows[:7], msgspec.structs.replace(rows[7], seconds=8.5), *rows[8:]])
    return run


def test_a_run_that_overlaps_shows_what_did_and_its_notable_steps(ahead):
    page = write_report(ahead).read_text()
    parsed(page)
    section = page.split("<h2>Generation and training overlap</h2>")[1].split("<h2>")[0]
    assert re.findall("<h3>(.*?)</h3>", section) == [
        "Who was busy",
        "Age of rollouts",
        "Drift of the sampler",
        "Importance correction",
        "Step 7, the slowest",
        "Step 8, the median",
        "Step 15, the last",
    ]
    assert section.count("<svg") == 7
    assert "Of 128.5 s the learner waited 32.0 s for rollouts and a worker 16.0 s for the learner" in section
    assert "A rollout worker&#x27;s process ended" in page
    assert "<th>learner waited s</th>" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_synchronous_run_in_one_process_has_nothing_to_overlap(run):
    page = write_report(run).read_text()
    assert "overlap</h2>" not in page
    assert "<th>learner waited s</th>" not in page
    assert "<th>drift</th>" in page


def test_a_run_ahead_in_one_process_shows_ages_and_no_lanes(ahead):
    (ahead / "timeline.jsonl").unlink()
    section = write_report(ahead).read_text().split("<h2>Generation and training overlap</h2>")[1].split("<h2>")[0]
    assert re.findall("<h3>(.*?)</h3>", section) == [
        "Age of rollouts",
        "Drift of the sampler",
        "Importance correction",
    ]


def test_a_broken_timeline_is_one_clear_line(ahead):
    with (ahead / "timeline.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(TraceError, match=r"timeline.jsonl:17: not a line of timeline.jsonl"):
        write_report(ahead)


def test_a_failed_identity_check_is_the_headline(run, tmp_path):
    records = [msgspec.structs.replace(record, identity="violation") for record in make_records()]
    page = write_report(write_run(tmp_path / "bad", records)).read_text()
    assert "The identity check failed" in page
    assert '<span class="bad">violation</span>' in page
    assert "no checked token changed" not in page


def test_a_run_without_checks_claims_no_identity(tmp_path):
    page = write_report(write_run(tmp_path / "run", [make_record(0), make_record(2)])).read_text()
    assert "not checked" in page
    assert "no checked token changed" not in page
    assert "times as fast" not in page.split("</h1>")[0]


def test_one_step_is_enough(tmp_path):
    page = write_report(write_run(tmp_path / "run", make_records(1, 1), make_rows(make_records(1, 1)))).read_text()
    parsed(page)
    assert "one: 1 step" not in page
    assert "1 step · 1 epoch" in page
    assert "later epochs" not in page.split("What each number means")[0]


def test_a_run_without_drafts_is_reported_as_such(tmp_path):
    page = write_report(write_run(tmp_path / "run", make_records(drafts=False))).read_text()
    assert "A run without drafts" in page
    assert "Accepted length" not in page


def test_unknown_values_are_dashes(tmp_path):
    unknown = {field.name: math.nan for field in msgspec.structs.fields(StepRecord) if field.type is float}
    page = write_report(write_run(tmp_path / "run", [make_record(0, **unknown, seconds={})])).read_text()
    parsed(page)
    assert "nan" not in re.sub(
        r"<table class=\"words\">.*?</table>|<style>.*?</style>", "", page.lower(), flags=re.DOTALL
    )
    assert "A run of 1 step" in page


def test_no_complete_step_is_one_clear_line(tmp_path):
    with pytest.raises(TraceError, match=r"metrics.jsonl: no complete step yet"):
        write_report(write_run(tmp_path / "run", []))
    with pytest.raises(TraceError, match=r"metrics.jsonl: cannot be read"):
        write_report(tmp_path)


def test_text_from_outside_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>&\""
    rows = [msgspec.structs.replace(row, task=evil) for row in make_rows(make_records(1, 1))]
    record = make_record(0, events={evil: 1}, identity=evil)
    run = write_run(tmp_path / "<b>run", [record], rows)
    write_prompts(run / "prompts.jsonl", [PromptRow(prompt_id=i, task=evil, tokens=[1], text=evil) for i in range(8)])
    (run / "config.yaml").write_text(evil)
    page = write_report(run, lambda tokens: [evil] * len(tokens)).read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert evil in "".join(parsed(page).text)


def test_every_token_is_shown_with_its_source(tmp_path):
    row = TraceRow(
        epoch=0,
        step=0,
        prompt_id=0,
        sample_idx=0,
        reward=1.0,
        tokens=[1, 2, 3, 4],
        forwards=2,
        sources=[("policy", 1), ("history", 2), ("policy", 1)],
    )
    run = write_run(tmp_path / "run", [make_record(0)], [row])
    page = write_report(run, lambda tokens: [f"t{token}" for token in tokens]).read_text()
    assert (
        '<span class="run-of s-policy" title="policy: 1"><span>t1</span></span>'
        '<span class="run-of s-history" title="history: 2"><span>t2</span><span>t3</span></span>'
        '<span class="run-of s-policy" title="policy: 1"><span>t4</span></span>'
    ) in page
    assert "4 tokens in 2 forwards" in page
    assert "an earlier epoch" in page
    assert "a sibling of the group" not in page


def test_texts_are_kept_so_that_rendering_again_needs_no_tokenizer(run):
    first = write_report(run, decode).read_text()
    stored = json.loads((run / "example.json").read_text())
    assert [example["title"] for example in stored] == ["The best", "A typical one"]
    assert write_report(run).read_text() == first


def test_without_texts_token_ids_are_shown(run):
    page = write_report(run).read_text()
    assert "<span>2 </span><span>" in page
    assert not (run / "example.json").exists()


def test_broken_stored_texts_are_one_clear_line(run):
    (run / "example.json").write_text("{}")
    with pytest.raises(TraceError, match=r"example.json: not examples of a run.*delete it"):
        write_report(run)


def test_a_decoder_that_loses_a_token_is_refused(run):
    with pytest.raises(TraceError, match="46 tokens, 45 texts"):
        write_report(run, lambda tokens: ["x"] * (len(tokens) - 1))


def test_the_examples_are_the_best_and_the_median_of_the_last_epoch():
    def row(epoch, sample, reward, forwards):
        runs = [("policy", 12)]
        return TraceRow(
            epoch=epoch,
            step=epoch,
            prompt_id=0,
            sample_idx=sample,
            reward=reward,
            tokens=[1] * 12,
            forwards=forwards,
            sources=runs,
        )

    rows = [row(0, 0, 1.0, 1), row(1, 1, 1.0, 6), row(1, 2, 1.0, 2), row(1, 3, 0.0, 1), row(1, 4, math.nan, 12)]
    assert [(title, found.sample_idx) for title, found in choose_examples(rows)] == [
        ("The best", 2),
        ("A typical one", 1),
    ]
    assert choose_examples([]) == []
    assert choose_examples([msgspec.structs.replace(rows[0], sources=None)]) == []
    assert len(choose_examples(rows[:1])) == 1


def test_a_very_long_example_is_cut_and_says_so(tmp_path):
    row = make_rows([make_record(0)])[0]
    long = msgspec.structs.replace(row, tokens=[1] * 2000, sources=[("policy", 2000)], logprobs=None, forwards=2000)
    run = write_run(tmp_path / "run", [make_record(0)], [long])
    page = write_report(run, decode).read_text()
    assert "500 more tokens are not shown" in page
    assert "2,000 tokens in 2,000 forwards" in page


def test_a_run_without_a_trace_has_no_examples(tmp_path):
    run = write_run(tmp_path / "run", [make_record(0)])
    (run / "rollouts.jsonl").unlink()
    assert make_examples(run, decode) == []
    assert "Where the tokens came from" not in write_report(run).read_text()


def test_settings_of_another_version_do_not_stop_a_report(run):
    (run / "config.yaml").write_text("setting_of_the_future: 1\n")
    assert "setting_of_the_future" in write_report(run).read_text()


def test_a_run_of_an_older_version_shows_no_picture_of_what_it_did_not_record(tmp_path):
    folder = write_run(tmp_path / "old", make_records())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    new = {"depths_tested", "depth_acceptance", "token_sources", "draft_gain_seconds", "draft_propose_seconds"}
    old = [{name: value for name, value in line.items() if name not in new} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    page = write_report(folder).read_text()
    parsed(page)
    assert "Kept by depth" not in page
    assert "Where tokens came from" not in page
    assert "Draft loss" in page

"""Two runs are identical, equal up to near ties, in violation, or not comparable: never anything in between."""

import io
import math

import msgspec
import pytest
from rich.console import Console

from paceline.config import Config, load_config
from paceline.report.diff import diff_runs, diff_table
from paceline.report.trace import TraceError, TraceRow
from sample_run import make_records, make_rows, write_run


def rows_of(steps: int = 3, samples: int = 2) -> list[TraceRow]:
    return [
        TraceRow(
            epoch=0,
            step=step,
            prompt_id=7,
            sample_idx=sample,
            reward=1.0,
            tokens=[step, sample, 3, 4, 5],
            task="sql",
            request_id=f"{step}/{sample}",
            logprobs=[-0.5] * 5,
            logprob_mode="processed",
            near_ties=[],
        )
        for step in range(steps)
        for sample in range(samples)
    ]


def changed(rows: list[TraceRow], index: int, **changes) -> list[TraceRow]:
    if "tokens" in changes:
        changes = {"logprobs": [-0.5] * len(changes["tokens"]), **changes}
    return [msgspec.structs.replace(row, **changes) if at == index else row for at, row in enumerate(rows)]


@pytest.fixture
def compare(tmp_path):
    def compare_rows(a, b, config_a=None, config_b=None, **options):
        write_run(tmp_path / "A", [], a, config_a)
        write_run(tmp_path / "B", [], b, config_b)
        return diff_runs(tmp_path / "A", tmp_path / "B", **options)

    return compare_rows


def test_equal_runs_are_identical_and_counted(compare):
    result = compare(rows_of(), rows_of())
    assert (result.verdict, result.exit_code) == ("identical", 0)
    assert result.message == "identical: 6 rollouts, 30 tokens"
    assert result.logprob_gap == 0.0
    assert result.parted_at is None


def test_the_order_of_lines_does_not_matter(compare):
    assert compare(rows_of(), rows_of()[::-1]).verdict == "identical"


def test_a_wide_margin_is_a_violation(compare):
    result = compare(rows_of(), changed(rows_of(), 3, tokens=[1, 1, 3, 9, 5]))
    (found,) = result.differences
    assert (result.verdict, result.exit_code) == ("violation", 1)
    assert (found.step, found.task, found.prompt_id, found.sample_idx) == (1, "sql", 7, 1)
    assert (found.request_id, found.position, found.token_a, found.token_b) == ("1/1", 3, 4, 9)
    assert found.margin is None
    assert not found.near_tie


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_margin_within_the_tolerance_in_either_run_is_a_near_tie(compare, side):  # field E1
    plain, other = rows_of(), changed(rows_of(), 3, tokens=[1, 1, 3, 9, 5])
    tie = {"near_ties": [(3, 5e-5)]}
    runs = (changed(plain, 3, **tie), other) if side == "a" else (plain, changed(other, 3, **tie))
    result = compare(*runs)
    assert (result.verdict, result.exit_code) == ("near ties", 0)
    assert result.differences[0].margin == 5e-5
    assert result.differences[0].near_tie


def test_the_tolerance_decides_and_its_edge_is_within(compare):
    other = changed(rows_of(), 3, tokens=[1, 1, 3, 9, 5], near_ties=[(3, 5e-5)])
    assert compare(rows_of(), other, tolerance=5e-5).verdict == "near ties"
    assert compare(rows_of(), other, tolerance=4.9e-5).verdict == "violation"


def test_a_near_tie_at_another_position_explains_nothing(compare):
    other = changed(rows_of(), 3, tokens=[1, 1, 3, 9, 5], near_ties=[(2, 1e-6), (4, 1e-6)])
    assert compare(rows_of(), other).verdict == "violation"


def test_one_violation_among_near_ties_is_a_violation_and_every_difference_is_listed(compare):
    other = changed(rows_of(), 2, tokens=[1, 0, 9], near_ties=[(2, 1e-6)])
    other = changed(other, 3, tokens=[1, 9, 3, 4, 5])
    result = compare(rows_of(), other)
    assert result.verdict == "violation"
    assert [found.near_tie for found in result.differences] == [True, False]
    assert result.message.startswith("violation: 1 of 4 rollouts")


def test_steps_after_the_first_difference_are_reported_not_compared(compare):
    other = changed(rows_of(), 1, tokens=[0, 1, 3, 9, 5], near_ties=[(3, 1e-6)])
    other = changed(other, 4, tokens=[8, 8])
    result = compare(rows_of(), other)
    assert (result.verdict, result.parted_at, result.after_parting) == ("near ties", 0, 4)
    assert len(result.differences) == 1
    assert "4 rollouts after step 0 were not compared" in result.notes[-1]


def test_a_rollout_that_ends_earlier_is_a_violation_even_at_a_near_tie(compare):
    result = compare(rows_of(), changed(rows_of(), 3, tokens=[1, 1, 3], near_ties=[(3, 1e-9)]))
    assert result.verdict == "violation"
    assert (result.differences[0].position, result.differences[0].token_b) == (3, None)


def test_a_rollout_missing_within_the_common_steps_is_a_violation(compare):
    result = compare(rows_of(), rows_of()[:3] + rows_of()[4:])
    assert (result.verdict, result.exit_code) == ("violation", 1)
    assert "B lacks step 1 sql 7 sample 1" in result.message


def test_a_step_missing_in_the_middle_is_a_violation(compare):
    assert compare([row for row in rows_of() if row.step != 1], rows_of()).verdict == "violation"


def test_a_longer_run_is_compared_as_far_as_both_go(compare):
    result = compare(rows_of(3), rows_of(2))
    assert result.message == "identical: 4 rollouts, 20 tokens"
    assert "2 rollouts of" in result.notes[0]
    assert "come after step 1" in result.notes[0]


@pytest.mark.parametrize("rows", [[], [msgspec.structs.replace(row, task="other") for row in rows_of()]])
def test_runs_with_nothing_in_common_fail(compare, rows):
    assert compare(rows_of(), rows).exit_code == 1


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=1", "seed (A: 0, B: 1)"),
        ("sampling.temperature=0.5", "sampling.temperature (A: 1.0, B: 0.5)"),
        ("policy.dtype=float64", "policy.dtype"),
        ("rl.lr=1e-3", "rl.lr"),
        ("tasks.a.options={x: 1}", "tasks.a.options.x (A: None, B: 1)"),
    ],
)
def test_runs_with_settings_that_decide_tokens_are_not_compared(compare, override, named):
    result = compare(rows_of(), rows_of(), Config(), load_config(None, [override]))
    assert (result.verdict, result.exit_code, result.rollouts) == ("not comparable", 1, 0)
    assert named in result.message


@pytest.mark.parametrize(
    "override",
    ["drafter.kind=none", "drafter.budget=3", "engine.slots=2", "out=elsewhere", "rl.steps=9", "check.every=0"],
)
def test_settings_that_must_not_change_a_token_may_differ(compare, override):
    assert compare(rows_of(), rows_of(), Config(), load_config(None, [override])).verdict == "identical"


def test_bare_trace_files_are_compared_with_a_note(tmp_path, compare):
    compare(rows_of(), rows_of())
    (tmp_path / "A" / "config.yaml").unlink()
    result = diff_runs(tmp_path / "A" / "rollouts.jsonl", tmp_path / "B")
    assert result.verdict == "identical"
    assert "settings were not compared" in result.notes[0]


def test_a_rollout_that_is_there_twice_is_refused(compare):
    with pytest.raises(TraceError, match="step 0 sql 7 sample 0 is there twice"):
        compare([*rows_of(), rows_of()[0]], rows_of())


@pytest.mark.parametrize("tolerance", [-1e-9, 2e-3, math.nan])
def test_a_tolerance_that_the_trace_cannot_decide_is_refused(compare, tolerance):
    with pytest.raises(TraceError, match="must be between 0 and"):
        compare(rows_of(), rows_of(), tolerance=tolerance)


def test_a_missing_run_is_one_clear_line(tmp_path):
    with pytest.raises(TraceError, match=r"rollouts.jsonl: cannot be read|absent: cannot be read"):
        diff_runs(tmp_path / "absent", tmp_path / "absent")


def test_logprobs_of_equal_tokens_are_compared(compare):
    other = changed(rows_of(), 0, logprobs=[-0.5, -0.5, -0.5, -0.75, -0.5])
    assert compare(rows_of(), other).logprob_gap == 0.25


def test_traces_without_logprobs_have_no_gap(compare):
    rows = [msgspec.structs.replace(row, logprobs=None) for row in rows_of()]
    assert math.isnan(compare(rows, rows_of()).logprob_gap)


def test_a_whole_run_against_itself_is_identical(compare):
    rows = make_rows(make_records())
    assert compare(rows, rows).message.startswith(f"identical: {len(rows)} rollouts")


def test_the_table_shows_each_difference(compare):
    other = changed(rows_of(), 2, tokens=[1, 0, 9], near_ties=[(2, 1e-6)])
    other = changed(other, 3, tokens=[1, 1, 3, 4])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(diff_table(compare(rows_of(), other)))
    shown = console.export_text()
    assert "step 1 sql 7 sample 0" in shown
    assert "1.00e-06" in shown
    assert "near tie" in shown
    assert "end" in shown
    assert "violation" in shown


@pytest.mark.parametrize(("a", "b"), [("rejection", "coupled"), ("coupled", "block"), ("block", "block")])
def test_runs_that_keep_the_law_alone_are_no_violation_and_no_proof_either(compare, a, b):
    drawn = ["drafter.kind=draft_model", "drafter.draft_model.path=small"]
    configs = [load_config(None, [f"engine.acceptance={mode}", *drawn]) for mode in (a, b)]
    result = compare(rows_of(), changed(rows_of(), 3, tokens=[1, 1, 3, 9, 5]), *configs)
    assert (result.verdict, result.exit_code) == ("law only", 1)
    assert "equal in distribution only" in result.message
    assert "use paceline audit" in result.message
    assert compare(rows_of(), rows_of(), *configs).verdict == "identical"
    assert compare(rows_of(), rows_of()[1:], *configs).verdict == "violation", "no law loses a rollout"


def test_runs_on_vllm_keep_the_law_and_can_be_compared_with_the_reference_engines(compare):
    ours, theirs = load_config(None), load_config(None, ["engine.kind=vllm", "engine.vllm.in_process=false"])
    rows = changed(rows_of(), 3, tokens=[1, 1, 3, 9, 5])
    for configs in ((ours, theirs), (theirs, theirs)):
        result = compare(rows_of(), rows, *configs)
        assert result.verdict == "law only"
        assert "as engine.kind=vllm" in result.message
    assert compare(rows_of(), rows, ours, ours).verdict == "violation"


def test_point_masses_keep_their_tokens_in_every_mode_of_acceptance(compare):
    config = load_config(None, ["engine.acceptance=rejection"])
    changed_rows = changed(rows_of(), 3, tokens=[1, 1, 3, 9, 5])
    assert compare(rows_of(), changed_rows, config, config).verdict == "violation"


def test_a_lossy_run_is_named_and_its_differences_stay_violations(compare):
    stamped = [msgspec.structs.replace(row, lossy=["verifier='own:greedy'"]) for row in rows_of()]
    config = load_config(None, ["engine.verifier=own:greedy", "allow_lossy=true", "engine.acceptance=block"])
    same = compare(stamped, rows_of(), config)
    assert (same.verdict, same.lossy) == ("identical", ["verifier='own:greedy'"])
    assert "A is lossy (verifier='own:greedy')" in same.notes[-1]
    assert compare(stamped, changed(rows_of(), 3, tokens=[1, 1, 3, 9, 5]), config).verdict == "violation"

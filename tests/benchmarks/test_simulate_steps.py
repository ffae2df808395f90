"""The benchmark of predicted steps: phases that are summed by hand, real files read back, and no judged second."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from grpo_steps import predicting, runs

from paceline.report.trace import StepSpans, TimelineWriter, TraceRow, read_metrics, read_trace
from paceline.rl.loop import train
from paceline.schema import Span
from paceline.simulate.cost import LinearCost
from paceline.simulate.drafting import LinearDraftCost
from paceline.simulate.rlstep import Phases
from paceline.simulate.steptime import MeasuredStepTime
from tiny_run import make_policy, tiny_config

#: A pass takes 10 ms and 1 ms a token, a draft 4 ms.
STEP = MeasuredStepTime("by hand", LinearCost(0.0, 1e-3, 10e-3))
COST = LinearDraftCost("measured", "by hand", fixed=4e-3)
REST = {"reward": 0.02, "check": 0.0, "eval": 0.0, "other": 0.01, "refit": 0.03, "train": 0.2, "drafter": 0.0}


def step(lengths, kept=((0,),), tested=((0,),), share=0.0, seconds=9.0, **phases):
    told = predicting.Told(list(lengths), [list(own) for own in kept], [list(own) for own in tested], share)
    return predicting.Step(told, {"generation": 5.0, **REST, **phases}, seconds, 1.0)


def means(drafted, cost=None, batch=2):
    return predicting.Means(batch, drafted, STEP, cost, reading_seconds=6e-3)


def test_a_plain_step_is_its_passes_the_reading_of_its_prompts_and_the_other_phases():
    # Two slots: 3 passes of two rows and 1 of one, then 2 of one; 12 and 11 ms. Three prompts read two at a time.
    generated = 3 * 12e-3 + 2 * 11e-3 + 3 / 2 * 6e-3
    told = step([3, 5]).told
    assert predicting.generation(told, means(0)) == pytest.approx(generated - 6e-3 / 2)
    total, of_it = predicting.predict([told], [step([1])], means(0))
    assert of_it == pytest.approx(generated - 3e-3)
    assert total == pytest.approx(of_it + 0.02 + 0.01 + 0.03 + 0.2)


def test_a_drafted_step_verifies_what_is_drafted_and_pays_for_drafts_and_their_training():
    # All kept: 3 drafted and one more a pass, so 8 tokens take two passes in the one slot. Half of what is asked
    # for is drafted.
    told = step([8, 8], kept=[[2, 2, 2]] * 2, tested=[[2, 2, 2]] * 2, share=0.5).told
    total, of_it = predicting.predict([told], [step([1])], means(3, COST, batch=1), drafter=0.4)
    assert of_it == pytest.approx(2 * (2 * (10e-3 + 2.5e-3 + 4e-3) + 6e-3))
    assert total == pytest.approx(of_it + 0.26 + 0.4)


def test_asynchronously_the_longer_side_is_the_step_and_each_slows_the_other_while_both_run():
    told, plain = step([100]).told, [step([1])]
    bare = predicting.Beside()
    # Generation alone is 100 * 11 ms and the reading, in one slot; the learner's side 0.26 s.
    generated = 1.1 + 6e-3
    assert predicting.predict([told], plain, means(0, batch=1), beside=bare, age=1)[0] == pytest.approx(generated)
    assert predicting.predict([told], plain, means(0, batch=1), 2.0, bare, 1)[0] == pytest.approx(2.26)
    # Training takes 1.5 times as long; meanwhile decoding does half of what it would, so half of 0.39 s is lost.
    slow = predicting.Beside(decoding=2.0, training=1.5, between=0.05)
    expected = generated + 0.05 + 1.5 * 0.26 / 2
    assert predicting.predict([told], plain, means(0, batch=1), 0.0, slow, 1)[0] == pytest.approx(expected)
    # A bound of 0 waits for everything.
    waits = predicting.predict([told], plain, means(0, batch=1), beside=bare)[0]
    assert waits == pytest.approx(generated + 0.26)


def test_the_shorter_side_is_slow_all_along():
    phases = predicting.overlapped(Phases(generation=1.0, train=4.0), predicting.Beside(decoding=1.5, training=2.0))
    assert (phases.generation, phases.train) == (pytest.approx(1.5), pytest.approx(4.0 + 1.5 / 2))


def test_another_seeds_steps_stand_for_each_other():
    first, second = predicting.levelled([step([1], train=0.0), step([2], train=0.4)])
    assert first.phases == second.phases
    assert first.phases["train"] == pytest.approx(0.2)
    assert (first.told.lengths, second.told.lengths) == ([1], [2])


@pytest.mark.parametrize("beside", [None, predicting.Beside(1.2, 1.3, 0.01)])
def test_no_second_of_a_judged_step_moves_its_prediction(beside):
    plain = [step([length] * 2, train=0.1 * length) for length in (13, 14, 15, 16)]
    run = [step([length] * 2, [[2], [3]], [[5], [5]], 1.0) for length in (9, 9, 7, 5)]
    slow = [
        replace(one, seconds=99.0 * number, phases=dict.fromkeys(one.phases, 7.0 * number))
        for number, one in enumerate(run, 1)
    ]
    found, other = (
        predicting.compare(("x", "y"), one, plain, means(1, COST), 0.1, beside, 1, warm=2) for one in (run, slow)
    )
    assert (found.predicted, found.beforehand) == (other.predicted, other.beforehand)
    assert found.predicted_generation == other.predicted_generation
    assert found.measured == 9.0
    assert other.measured == pytest.approx(99.0 * 3.5)
    assert found.error == pytest.approx(found.predicted / 9.0 - 1)
    # Beforehand nothing of the judged steps counts, and what came before does.
    better = step([40, 9], [[9], [9]], [[10], [10]], 0.1)
    later, unlike = (
        [*run[:2], better, better],
        [run[0], replace(run[1], told=replace(better.told, share=1.0)), *run[2:]],
    )
    before, kept = (
        predicting.compare(("x", "y"), one, plain, means(1, COST), 0.1, beside, 1, warm=2).beforehand
        for one in (later, unlike)
    )
    assert before == found.beforehand > kept


def row(*sources, drafted=0, finish="stop", number=0):
    count = sum(times for _, times in sources)
    forwards = sum(times for name, times in sources if name == "policy") + (sources[-1][0] != "policy")
    return TraceRow(
        epoch=0, step=number, prompt_id=0, sample_idx=0, reward=0.0, tokens=[1] * count, finish=finish,
        forwards=forwards, drafted=drafted, sources=list(sources),
    )  # fmt: skip


def test_what_was_kept_is_read_from_where_tokens_came_from():
    whole = row(("policy", 2), ("history", 2), ("policy", 1), ("sibling", 1), ("history", 1), drafted=6)
    assert runs.accept_lengths(whole).tolist() == [0, 0, 2, 2]
    told = runs.told_of([whole], 3)
    assert (told.lengths, told.share) == ([7], 6 / 12)
    # The last forward ended on a drafted token: of what would have come behind it nothing is known.
    assert told.rates == [2 / 4, 1.0, 0.0]
    assert runs.accept_lengths(row(("policy", 3))).tolist() == [0, 0, 0]


def test_the_files_of_a_run_say_what_its_steps_said(tmp_path):
    policy = make_policy(tmp_path / "policy")
    config = tiny_config(policy, tmp_path / "run", "drafter.kind=history", "drafter.budget=3", "check.every=0")
    records = train(config)
    found = runs.read_run(tmp_path / "run", 3)
    assert len(found) == len(records) == 4
    for one, record in zip(found, records, strict=True):
        assert len(one.told.lengths) == record.rollouts
        assert sum(one.told.lengths) == record.tokens
        assert one.told.share == pytest.approx(record.drafted_per_forward / 3)
        assert one.seconds == pytest.approx(sum(record.seconds.values()))
        assert one.rest == pytest.approx(one.seconds - record.seconds["generation"])
    rows = list(read_trace(tmp_path / "run" / "rollouts.jsonl"))
    for number, record in enumerate(records):
        kept = [count for one in rows if one.step == number for count in runs.accept_lengths(one).tolist()]
        assert [kept.count(n) for n in range(len(record.accept_lengths))] == record.accept_lengths
    assert sum(record.accept_lengths[1] for record in records if len(record.accept_lengths) > 1) > 0

    # With workers a step is as long as its timeline says; between two batches its worker gets what it needs.
    told = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record.step for record in told] == list(range(4))
    with TimelineWriter(tmp_path / "run" / "timeline.jsonl") as timeline:
        for number in range(4):
            ends = [0.0, 0.1, 0.1 + 0.02 * (number + 1), 1.0]
            spans = [
                Span(role="worker-0", doing=doing, start=number + start, seconds=end - start)
                for doing, (start, end) in zip(("idle", "load", "decode"), pairwise(ends), strict=True)
            ]
            timeline.write([StepSpans(step=number, start=float(number), seconds=1.0, spans=spans)])
    assert [one.seconds for one in runs.read_run(tmp_path / "run", 3)] == [1.0] * 4
    assert runs.between(tmp_path / "run") == pytest.approx(0.1 + (0.06 + 0.08) / 2)


def test_the_tables_say_errors_by_schedule(capsys):
    plain = predicting.Predicted("synchronous", "plain", 4, 0, 1.0, 2.0, 2.2, 1.8, 1.0, 1.1, [])
    drafted = replace(plain, side="history", drafted=3, measured=1.0, predicted=0.7, beforehand=0.9)
    later = replace(
        plain, measured=4.0, predicted=4.4, beforehand=3.6, schedule="asynchronous", measured_generation=None
    )
    predicting.show([plain, drafted, later])
    printed = capsys.readouterr().out
    assert (
        "| history | 4 | 3 | 1.00 | 1.000 | 0.700 | -30.0% | 0.900 | -10.0% | 1.000 | 1.100 | 2.00 | 3.14 |" in printed
    )
    assert "| 4.000 | 4.400 | +10.0% | 3.600 | -10.0% |  | 1.100 |" in printed
    assert "synchronous, told, 2 cells: median error 20.0%, worst 30.0%; 0 are within 10 %" in printed
    assert "asynchronous, beforehand, 1 cells: median error 10.0%, worst 10.0%; 1 are within 10 %" in printed

"""Each metric has one definition, and the derived ones are sums before they are ratios."""

import math

import msgspec
import numpy as np
import pytest

from paceline.report.definitions import IDENTITIES, METRICS, PHASES
from paceline.report.metrics import (
    DRAFTER_COSTS,
    acceptance,
    budget_metrics,
    draft_savings,
    event_counts,
    identity_verdict,
    phase_seconds,
    ratio,
    rollout_metrics,
    speedup,
    tokens_per_forward,
)
from paceline.report.summary import first_and_later, summarise
from paceline.schema import EngineStats, StepRecord
from sample_run import make_record, make_rollout


def test_every_field_of_a_step_record_is_defined_once_and_in_order():
    assert [metric.name for metric in METRICS] == [field.name for field in msgspec.structs.fields(StepRecord)]


def test_every_definition_is_a_sentence():
    assert all(metric.definition.endswith(".") for metric in METRICS)


def test_nothing_over_nothing_is_nan():
    assert math.isnan(ratio(0, 0))
    assert math.isnan(acceptance(0, 0))
    assert math.isnan(tokens_per_forward(0, 0))
    assert math.isnan(speedup(1.0, 0.0))


def test_metrics_of_rollouts_count_tokens_rows_and_drafts():
    rollouts = [
        make_rollout([1, 2, 3, 4, 5, 6], accept_lengths=[0, 3, 0], drafted=8, finish_reason="stop"),
        make_rollout([1, 2], accept_lengths=[0, 0], drafted=0, finish_reason="length"),
    ]
    assert rollout_metrics(rollouts) == {
        "rollouts": 2,
        "tokens": 8,
        "response_tokens_mean": 4.0,
        "tokens_per_forward": 8 / 5,
        "acceptance": 3 / 8,
        "drafted_per_forward": 8 / 5,
        "truncated": 0.5,
        "accept_lengths": [4, 0, 0, 1],
        "token_sources": {"policy": 8},
    }


def test_tokens_are_counted_by_where_they_came_from():
    sources = [np.array(found, dtype=np.uint8) for found in ([0, 7, 7], [0, 3])]
    rollouts = [make_rollout(range(len(found)), sources=found) for found in sources]
    assert rollout_metrics(rollouts)["token_sources"] == {"policy": 2, "history": 1, "model": 2}


def test_acceptance_by_depth_is_of_the_row_forwards_that_came_so_deep():
    before, after = EngineStats(events={}), EngineStats(events={})
    after.count_depths([3, 1, 2, 0], [2, 0, 2, 0])
    found = budget_metrics(before, after, 1.0)
    assert found["depths_tested"] == [3, 2, 1]
    assert found["depth_acceptance"] == [2 / 3, 1.0, 0.0]
    assert budget_metrics(after, after, 1.0)["depths_tested"] == []
    records = [
        make_record(0, depths_tested=[3, 2, 1], depth_acceptance=[2 / 3, 1.0, 0.0]),
        make_record(1, depths_tested=[1], depth_acceptance=[0.0]),
    ]
    assert summarise(records).depth_acceptance == pytest.approx([0.5, 1.0, 0.0])


def test_what_drafts_save_is_known_before_and_after_what_the_drafter_costs():
    before = EngineStats(plain_seconds=1.0, pass_seconds=1.0)
    after = EngineStats(plain_seconds=6.0, pass_seconds=4.0, draft_seconds=0.75, read_seconds=0.25)
    found = budget_metrics(before, after, 3.0)
    assert found["draft_gain_seconds"] == 2.0
    record = make_record(
        0,
        draft_train_seconds=1.0,
        draft_refit_seconds=0.125,
        **{name: found[name] for name in ("draft_gain_seconds", "draft_propose_seconds", "draft_read_seconds")},
    )
    assert draft_savings(record) == 2.75
    assert {name: cost(record) for name, cost in DRAFTER_COSTS} == {
        "drafting": 0.5, "catching up": 0.25, "training": 0.875, "refit": 0.125,
    }  # fmt: skip
    assert math.isnan(budget_metrics(before, before, 1.0)["draft_gain_seconds"])


def test_metrics_of_no_rollouts_are_nan_not_an_error():
    metrics = rollout_metrics([])
    assert metrics["tokens"] == 0
    assert metrics["accept_lengths"] == []
    assert math.isnan(metrics["tokens_per_forward"])


def test_metrics_of_rollouts_fit_a_step_record():
    fields = {field.name for field in msgspec.structs.fields(StepRecord)}
    assert set(rollout_metrics([])) <= fields


def test_a_summary_weighs_steps_by_their_tokens():
    short = make_record(0, tokens=10, tokens_per_forward=1.0, rollouts=1, reward=0.0)
    long = make_record(1, tokens=90, tokens_per_forward=9.0, rollouts=3, reward=1.0)
    summary = summarise([short, long])
    assert summary.tokens_per_forward == pytest.approx(100 / (10 + 10))
    assert summary.reward == pytest.approx(0.75)
    assert summary.response_tokens_mean == pytest.approx(25)


def test_a_summary_weighs_acceptance_by_drafted_tokens():
    # 10 row-forwards with 1 drafted token each, all kept; 10 with 3 each, none kept.
    kept = make_record(0, tokens=10, tokens_per_forward=1.0, drafted_per_forward=1.0, acceptance=1.0)
    lost = make_record(1, tokens=10, tokens_per_forward=1.0, drafted_per_forward=3.0, acceptance=0.0)
    assert summarise([kept, lost]).acceptance == pytest.approx(10 / 40)
    assert summarise([kept, lost]).drafted_per_forward == pytest.approx(2.0)


def test_a_summary_of_steps_without_drafts_has_no_acceptance():
    plain = make_record(0, tokens=10, tokens_per_forward=1.0, drafted_per_forward=0.0, acceptance=math.nan)
    summary = summarise([plain])
    assert math.isnan(summary.acceptance)
    assert summary.tokens_per_forward == 1.0


def test_ages_are_added_and_weights_of_importance_weighed_by_tokens():
    records = [
        make_record(0, ages=[4], tokens=10, importance_mean=1.0, exposed_generation_seconds=1.0),
        make_record(1, ages=[1, 2, 1], tokens=30, importance_mean=2.0, exposed_generation_seconds=0.5),
        make_record(2, ages=[], tokens=99),
    ]
    summary = summarise(records)
    assert (summary.age_mean, summary.age_max) == (0.5, 2)
    assert summary.importance_mean == 1.75
    assert summary.exposed_generation_seconds == 1.5
    assert math.isnan(summary.effective_samples)
    assert summarise(records[2:]).age_max is None


def test_tokens_per_second_are_of_steps_that_did_not_decode_meanwhile():
    alone = make_record(0, tokens=80, seconds={"generation": 8.0, "train": 8.0})
    overlapping = make_record(1, tokens=80, seconds={"generation": 0.1}, ages=[0, 8], overlap_share=0.9)
    assert summarise([alone, overlapping]).tokens_per_second == 10.0
    assert math.isnan(summarise([overlapping]).tokens_per_second)
    assert summarise([overlapping]).generation_seconds == 0.1


def test_a_speedup_over_steps_is_a_ratio_of_times():
    slow = make_record(0, seconds={"generation": 10.0}, plain_seconds_projected=10.0)
    fast = make_record(1, seconds={"generation": 1.0}, plain_seconds_projected=12.0)
    assert summarise([slow, fast]).speedup_projected == pytest.approx(2.0)


def test_a_measured_speedup_uses_only_the_steps_that_measured():
    checked = make_record(0, plain_seconds_measured=6.0, speedup_measured=2.0)
    unchecked = make_record(1, plain_seconds_measured=math.nan, speedup_measured=math.nan)
    assert summarise([checked, unchecked]).speedup_measured == pytest.approx(2.0)
    assert math.isnan(summarise([unchecked]).speedup_measured)


def test_a_summary_keeps_the_last_evaluation():
    steps = [make_record(0, eval_reward=0.2), make_record(1, eval_reward=0.4), make_record(2, eval_reward=math.nan)]
    assert summarise(steps).eval_reward == 0.4


def test_later_epochs_are_summed_apart_from_the_first():
    first, later = first_and_later([make_record(0, epoch=0), make_record(1, epoch=1), make_record(2, epoch=2)])
    assert (first.steps, later.steps) == (1, 2)
    assert first_and_later([make_record(0, epoch=0)])[1] is None


def test_phases_come_in_the_order_of_the_step_and_unknown_ones_last():
    seconds = {"odd": 1.0, "train": 2.0, "generation": 3.0, "other": math.nan}
    assert list(phase_seconds([make_record(0, seconds=seconds)])) == ["generation", "train", "other", "odd"]
    assert phase_seconds([make_record(0, seconds=seconds)] * 2)["train"] == 4.0
    assert PHASES[0] == "generation"


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (["not checked"], ("not checked", 0)),
        (["identical", "not checked", "identical"], ("identical", 2)),
        (["identical", "near ties"], ("near ties", 2)),
        (["violation", "identical"], ("violation", 2)),
        (["something else", "identical"], ("violation", 2)),
    ],
)
def test_the_verdict_is_the_worst_that_any_check_found(found, verdict):
    assert identity_verdict([make_record(i, identity=value) for i, value in enumerate(found)]) == verdict
    assert verdict[0] in IDENTITIES


def test_events_are_summed_and_the_most_frequent_comes_first():
    steps = [make_record(0, events={"a": 1, "b": 2}), make_record(1, events={"a": 5})]
    assert list(event_counts(steps).items()) == [("a", 6), ("b", 2)]


def test_what_the_budget_decided_is_the_difference_of_two_readings_of_the_engine():
    before = EngineStats(forwards=5, nodes_offered=10, tokens_drafted=10, plain_seconds=1.0)
    after = EngineStats(
        forwards=25, passes_plain=8, passes_probed=1, nodes_offered=110, tokens_drafted=60, plain_seconds=5.0,
        drafts_asked=40, drafts_prefetched=30, draft_seconds=0.5, drafter_version=3, canary_acceptance=0.8,
    )  # fmt: skip
    found = budget_metrics(before, after, generation_seconds=2.0)
    assert found == {
        "policy_forwards": 20,
        "plain_seconds_counterfactual": 4.0,
        "verified_share": 0.5,
        "passes_plain": 8,
        "passes_probed": 1,
        "prefetch_coverage": 0.75,
        "draft_seconds_share": 0.25,
        "drafter_version": 3,
        "canary_acceptance": 0.8,
        "draft_propose_seconds": 0.5,
        "draft_read_seconds": 0.0,
        "draft_gain_seconds": 4.0,
        "depths_tested": [],
        "depth_acceptance": [],
    }
    assert math.isnan(budget_metrics(before, before, 1.0)["verified_share"])


def test_steps_of_older_versions_know_nothing_of_the_budget():
    old = msgspec.to_builtins(make_record(0))
    for name in budget_metrics(EngineStats(), EngineStats(), 1.0).keys() - {"policy_forwards"}:
        del old[name]
    record = msgspec.convert(old, StepRecord)
    assert record.passes_plain == 0
    assert math.isnan(record.prefetch_coverage)
    assert summarise([record]).draft_seconds_share == 0


def test_passes_without_drafts_and_waiting_are_shares_of_all_steps_together():
    records = [
        make_record(0, passes_plain=60, draft_seconds_share=0.1, seconds={"generation": 1.0}),
        make_record(1, passes_plain=0, draft_seconds_share=0.02, seconds={"generation": 3.0}),
    ]
    summary = summarise(records)
    assert summary.plain_passes == 0.5
    assert summary.draft_seconds_share == pytest.approx(0.04)

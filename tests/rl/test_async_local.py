"""Asynchronous schedules in one process: what the same run on workers is held against."""

from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.report.diff import diff_runs
from paceline.report.trace import read_trace
from paceline.rl import loop
from paceline.rl.learner import Learner
from paceline.rl.loop import train
from tiny_run import make_policy, tiny_config

EXACT = ("policy.dtype=float64", "check.every=0")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """A report takes longer than one of these runs."""
    monkeypatch.setattr(loop, "write_report", lambda *given, **named: None)


def rows_of(run):
    return list(read_trace(run / "rollouts.jsonl"))


def versions(row):
    return row.version if isinstance(row.version, list) else [row.version] * len(row.tokens)


def weights(run):
    return load_file(run / "policy" / "model.safetensors")


def equal(run_a, run_b):
    a, b = weights(run_a), weights(run_b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def tokens(run):
    return {row.key: row.tokens for row in rows_of(run)}


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_without_age_every_mode_is_the_synchronous_run(policy, tmp_path, in_flight):
    train(tiny_config(policy, tmp_path / "a", *EXACT))
    records = train(tiny_config(policy, tmp_path / "b", *EXACT, f"rl.in_flight={in_flight}", "rl.importance=none"))
    assert tokens(tmp_path / "a") == tokens(tmp_path / "b")
    assert equal(tmp_path / "a", tmp_path / "b")
    assert [record.ages for record in records] == [[]] * 4, "there is nothing to tell"


@pytest.mark.parametrize("age", [1, 2])
def test_a_step_that_waits_learns_from_its_own_prompts_said_by_one_version(policy, tmp_path, age):
    records = train(tiny_config(policy, tmp_path / "ahead", *EXACT, "rl.epochs=3", f"rl.max_age_steps={age}"))
    train(tiny_config(policy, tmp_path / "sync", *EXACT, "rl.epochs=3"))
    rows = rows_of(tmp_path / "ahead")
    assert all(set(versions(row)) == {max(0, row.step - age)} for row in rows)
    assert [row.key for row in rows] == [row.key for row in rows_of(tmp_path / "sync")]
    oldest = [min(record.step, age) for record in records]
    assert [np.flatnonzero(record.ages).tolist() for record in records] == [[old] for old in oldest]
    assert all(sum(record.ages) == 12 for record in records)
    first = tokens(tmp_path / "sync")
    same = [row.tokens == first[row.key] for row in rows]
    assert all(same[:12])
    assert not all(same), "older weights say something else"


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
@pytest.mark.parametrize("age", [1, 2])
def test_requests_survive_new_weights_with_a_version_a_token_and_within_the_bound(  # field G11
    policy, tmp_path, in_flight, age
):
    options = (f"rl.max_age_steps={age}", f"rl.in_flight={in_flight}", "rl.epochs=4", "engine.slots=5")
    records = train(tiny_config(policy, tmp_path / "run", *EXACT, *options))
    rows = rows_of(tmp_path / "run")
    assert len(records) == 8
    assert all(len(row.logprobs) == len(row.tokens) == len(versions(row)) for row in rows)
    assert all(sorted(versions(row)) == versions(row) for row in rows)
    assert all(0 <= row.step - min(versions(row)) <= age and max(versions(row)) <= row.step for row in rows)
    assert {row.finish for row in rows} <= {"stop", "length"}
    mixed = [row for row in rows if len(set(versions(row))) > 1]
    assert mixed, "some request was in flight when weights came"
    for record in records:
        own = [row.step - min(versions(row)) for row in rows if row.step == record.step]
        assert record.ages == np.bincount(own, minlength=len(record.ages)).tolist()
        assert sum(record.ages) == 12
    visits = Counter(row.request_id for row in rows)
    assert set(visits.values()) == {1}
    assert Counter((row.prompt_id, row.sample_idx) for row in rows) == {(p, s): 4 for p in range(6) for s in range(4)}


@pytest.mark.parametrize("drafter", ["kind=none", "kind=prompt_lookup"])
def test_the_drafter_decides_no_token_of_a_run_that_is_ahead(policy, tmp_path, drafter):
    train(tiny_config(policy, tmp_path / "a", *EXACT, "rl.max_age_steps=1"))
    train(tiny_config(policy, tmp_path / "b", *EXACT, "rl.max_age_steps=1", f"drafter.{drafter}", "engine.slots=3"))
    assert diff_runs(tmp_path / "a", tmp_path / "b").verdict == "identical"
    assert tokens(tmp_path / "a") == tokens(tmp_path / "b")


class KilledError(BaseException):
    """Nothing may handle it, as nothing handles SIGKILL."""


def test_a_run_that_dies_while_it_is_ahead_resumes_to_the_tokens_and_weights_of_the_unbroken_run(
    policy, tmp_path, monkeypatch
):
    options = (*EXACT, "rl.epochs=3", "rl.max_age_steps=2")
    update, calls = Learner.update, []

    def killed(learner, *given, **named):
        calls.append(1)
        if len(calls) == 4:
            raise KilledError
        return update(learner, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "update", killed)
        with pytest.raises(KilledError):
            train(tiny_config(policy, tmp_path / "broken", *options))
    assert max(row.step for row in rows_of(tmp_path / "broken")) == 2
    records = train(tiny_config(policy, tmp_path / "broken", *options), resume=True)
    unbroken = train(tiny_config(policy, tmp_path / "whole", *options))
    assert [record.step for record in records] == list(range(6))
    assert tokens(tmp_path / "broken") == tokens(tmp_path / "whole")
    assert equal(tmp_path / "broken", tmp_path / "whole")
    assert [record.reward for record in records] == [record.reward for record in unbroken]
    assert [record.ages for record in records] == [record.ages for record in unbroken]


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_a_resumed_run_samples_nothing_twice_and_keeps_the_bound(policy, tmp_path, in_flight):
    options = (*EXACT, "rl.max_age_steps=2", f"rl.in_flight={in_flight}", "engine.slots=5")
    train(tiny_config(policy, tmp_path / "run", *options, "rl.steps=3"))
    train(tiny_config(policy, tmp_path / "run", *options, "rl.steps=6"), resume=True)
    rows = rows_of(tmp_path / "run")
    assert Counter(row.step for row in rows) == dict.fromkeys(range(6), 12)
    assert set(Counter(row.request_id for row in rows).values()) == {1}
    assert all(0 <= row.step - min(versions(row)) <= 2 for row in rows)


def test_what_older_weights_sampled_is_corrected_and_the_step_says_so(policy, tmp_path):
    corrected = train(tiny_config(policy, tmp_path / "a", *EXACT, "rl.max_age_steps=1"))
    left = train(tiny_config(policy, tmp_path / "b", *EXACT, "rl.max_age_steps=1", "rl.importance=none"))
    assert corrected[0].importance_mean == pytest.approx(1) or np.isnan(corrected[0].importance_mean)
    assert all(0 < record.effective_samples < 1 and record.importance_max > 1 for record in corrected[1:])
    assert all(np.isnan(record.importance_mean) for record in left)
    assert all(record.mismatch_kl > 1e-6 for record in (*corrected[1:], *left[1:]))
    assert not equal(tmp_path / "a", tmp_path / "b")

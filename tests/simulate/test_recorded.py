"""Recorded requests are simulated as they were, and acceptance is what a replay or the run itself found."""

import json

import numpy as np
import pytest

from paceline.report.trace import MetricsWriter
from paceline.schema import PacelineError
from paceline.simulate.drafting import Drafting, Drift, LinearDraftCost, tokens_per_pass
from paceline.simulate.recorded import Recording, acceptance
from paceline.simulate.run import replay_traces
from sample_run import make_record

#: Two steps of two prompts with two answers each; the second says a token more, and a history drafts it from the first.
SAID = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9], [15, 16, 17, 18], [15, 16, 17, 18, 19, 20, 21]]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    prompts = [{"prompt_id": n, "task": "t", "tokens": [1 + n, 2, 3]} for n in range(2)]
    place = {"task": "t", "reward": 0.0}
    rollouts = [
        place | {"epoch": s, "step": s, "prompt_id": n // 2, "sample_idx": n % 2, "tokens": [*said, *[99] * s]}
        for s in range(2)
        for n, said in enumerate(SAID)
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    return path


def read(trace):
    return Recording.read(trace, None, lambda _: None)


def test_requests_are_those_of_the_log_the_last_step_first_and_then_drawn_anew(trace):
    recording = read(trace)
    assert len(recording.steps) == 2
    assert recording.requests(0).length_N.tolist() == [7, 6, 5, 8]
    assert recording.requests(1).length_N.tolist() == [6, 5, 4, 7]
    assert recording.requests(1).group_N.tolist() == [0, 0, 1, 1]
    seen = {tuple(recording.requests(seed).length_N.tolist()) for seed in range(2, 80, 2)}
    assert seen == {(7, 6, 5, 8), (5, 8, 7, 6), (7, 6, 7, 6), (5, 8, 5, 8)}


def test_a_scenario_tells_what_was_recorded(trace):
    scenario = read(trace).scenario()
    assert (scenario.prompts, scenario.siblings, scenario.prompt_tokens) == (2, 2, 3)
    assert (scenario.mean_tokens, scenario.max_tokens, scenario.trace) == (6.0, 8, "run")
    assert scenario.sigma == pytest.approx(np.log([6, 5, 4, 7, 7, 6, 5, 8]).std())


def test_replayed_acceptance_gives_the_tokens_per_forward_of_the_replay(trace):
    found, told = acceptance("replay:history", trace, budget=3, batch=4, drift=Drift("linear", 0.1))
    (result,) = replay_traces([trace], ["history"], budget=3, batch=4).traces["run"].drafters.values()
    assert result.tokens_per_forward > 1.2
    whole = result.drafted_per_forward / result.hit_rate
    low, high = (
        tokens_per_pass(Drafting(found, LinearDraftCost("measured", "made up")), length)
        for length in (int(whole), int(whole) + 1)
    )
    assert low <= result.tokens_per_forward <= high
    assert found.drift.per_step == 0.1
    assert told.endswith("by depth, replayed with history in drafts of 3")


def metrics(path, *steps):
    """Each step: tokens, tokens per forward, row-forwards that came to each depth, and the shares that kept a token."""
    names = ("tokens", "tokens_per_forward", "depths_tested", "depth_acceptance")
    with MetricsWriter(path / "metrics.jsonl") as writer:
        writer.write(make_record(number, **dict(zip(names, step, strict=True))) for number, step in enumerate(steps))


def test_a_runs_own_acceptance_gives_its_own_tokens_per_forward(trace):
    # 100 row-forwards: 60 drafted, 45 kept a token; 40 of those drafted a second, 30 kept it.
    metrics(trace, (87, 1.74, [30, 20], [0.8, 0.7]), (88, 1.76, [30, 20], [0.7, 0.8]))
    found, told = acceptance("run", trace, budget=2, batch=4)
    assert found.conditional == pytest.approx((0.45, 30 / 45))
    assert tokens_per_pass(Drafting(found, LinearDraftCost("measured", "made up")), 2) == pytest.approx(1.75)
    assert told == "0.45,0.67 by depth, of 2 steps of run"


def test_a_depth_that_hardly_any_draft_came_to_tells_no_rate(trace):
    metrics(trace, (150, 1.5, [90, 29], [0.5, 1.0]))
    assert acceptance("run", trace, budget=2, batch=4)[0].conditional == pytest.approx((0.45,))


def test_rates_are_taken_as_they_are(trace):
    assert acceptance(".8,.5", trace, budget=2, batch=4)[0].conditional == (0.8, 0.5)


def test_what_cannot_be_taken_is_refused_in_one_line(trace):
    def refused(text, path, match):
        with pytest.raises(PacelineError, match=match):
            acceptance(text, path, budget=2, batch=4)

    refused("run", None, r"--acceptance run: is taken from a log; name it with --trace")
    refused("replay:", trace, r"--acceptance replay: name the drafter")
    refused("replay:nobody", trace, r"nobody")
    refused("run", trace, r"is no folder of a run with metrics.jsonl")
    refused("a,b", trace, r"--acceptance a,b: give numbers")
    metrics(trace, (5, 1.0, [], []))
    refused("run", trace, r"tells of no 30 drafts by depth")

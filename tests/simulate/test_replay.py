"""The replay accepts what equals the recorded tokens, keeps the order of the run, and counts as defined."""

import math

import pytest

from paceline.simulate.cost import LinearCost, MeasuredCost
from paceline.simulate.logs import Step
from paceline.simulate.replay import Replay
from recorded import PROMPT, Scripted, oracle, recorded, step

TEN = list(range(100, 110))


def play(script, *steps, **options):
    drafter = Scripted(script)
    replay = Replay(drafter, **options)
    for one in steps:
        replay.play(one, one.requests())
    return replay.result(), drafter


def test_a_perfect_drafter_emits_its_budget_and_one_token_more():
    result, _ = play(oracle(TEN), step(0, TEN), budget=4)
    assert result.tokens_per_forward == 5.0  # 10 tokens in 2 forwards
    assert (result.acceptance, result.hit_rate, result.drafted_per_forward) == (1.0, 1.0, 4.0)


def test_a_useless_drafter_emits_one_token_a_forward():
    result, _ = play(lambda context, budget: [1] * budget, step(0, TEN), budget=4)
    assert (result.tokens_per_forward, result.acceptance, result.hit_rate) == (1.0, 0.0, 1.0)
    assert result.drafted_per_forward == 4.0


def test_no_draft_costs_nothing():
    result, drafter = play(lambda context, budget: None, step(0, TEN))
    assert (result.tokens_per_forward, result.hit_rate, result.drafted_per_forward) == (1.0, 0.0, 0.0)
    assert math.isnan(result.acceptance)
    assert all(outcome[0][2:] == (0, 0) for outcome in drafter.of("commit"))


def test_an_empty_draft_is_no_draft():
    result, _ = play(lambda context, budget: [], step(0, TEN))
    assert (result.tokens_per_forward, result.hit_rate) == (1.0, 0.0)


def test_a_forward_never_emits_beyond_the_recorded_end():
    seven = TEN[:7]
    result, drafter = play(oracle([*seven, 1, 2, 3, 4]), step(0, seven), budget=4)
    emitted = [outcomes[0] for outcomes in drafter.of("commit")]
    assert emitted == [("0/0", seven[:5], 4, 4), ("0/0", seven[5:], 2, 4)]
    assert result.tokens_per_forward == 3.5
    assert result.acceptance == 6 / 8  # what was drafted past the end was in vain


def test_acceptance_ends_at_the_first_difference():
    result, drafter = play(lambda context, budget: [100, 101, 1, 103], step(0, [100, 101, 102, 103]))
    assert drafter.of("commit")[0] == [("0/0", [100, 101, 102], 2, 4)]
    assert result.tokens_per_forward == 2.0  # 3 tokens, then 1


def test_a_tree_is_walked_along_the_recorded_tokens():
    tree = {"tokens": [5, 6, 9, 8, 7], "parents": [-1, -1, 0, 1, 3]}
    result, drafter = play(lambda context, budget: tree if len(context) == len(PROMPT) else None, step(0, [6, 8, 4, 1]))
    assert drafter.of("commit")[0] == [("0/0", [6, 8, 4], 2, 5)]
    assert result.tokens_per_forward == 2.0
    assert result.acceptance == 2 / 5


def test_a_node_of_another_branch_does_not_count():
    tree = {"tokens": [5, 8, 6], "parents": [-1, 0, -1]}  # 8 hangs below 5, not below 6
    _, drafter = play(lambda context, budget: tree if len(context) == len(PROMPT) else None, step(0, [6, 8, 4]))
    assert drafter.of("commit")[0][0][2] == 1


def test_a_draft_longer_than_the_budget_is_cut():
    result, _ = play(lambda context, budget: oracle(TEN)(context, 100), step(0, TEN), budget=4)
    assert (result.tokens_per_forward, result.drafted_per_forward) == (5.0, 4.0)


def test_a_draft_for_another_length_is_not_verified_and_counted():
    late = {"tokens": TEN, "length": 2}
    result, _ = play(lambda context, budget: late, step(0, TEN))
    assert (result.tokens_per_forward, result.hit_rate, result.stale_drafts) == (1.0, 0.0, 10)


def test_calls_come_in_the_order_of_an_engine():
    _, drafter = play(oracle([1, 2]), step(0, [1, 2]), step(1, [3]))
    names = [name for name, _ in drafter.calls]
    assert names == ["start", "propose", "commit", "finish", "on_weights"] * 2
    assert drafter.of("on_weights") == [1, 2]


def test_a_step_is_in_flight_together_and_a_batch_refills_in_order():
    responses = ([1, 2, 3], [4], [5, 6])
    _, together = play(lambda context, budget: None, step(0, *responses))
    assert together.of("propose") == [["0/0", "0/1", "0/2"], ["0/0", "0/2"], ["0/0"]]
    _, two = play(lambda context, budget: None, step(0, *responses), batch=2)
    assert two.of("start") == [["0/0", "0/1", "0/2"]], "all of a step are known before the first pass"
    assert two.of("propose") == [["0/0", "0/1"], ["0/0", "0/2"], ["0/0", "0/2"]]
    assert two.of("finish") == [["0/1"], ["0/0", "0/2"]]


def test_siblings_share_group_and_key_and_other_prompts_do_not():
    one = Step(0, [recorded([1]), recorded([2]), recorded([3], prompt=(4, 5))])
    first, second, other = one.requests()
    assert (first.group, first.prompt_key) == (second.group, second.prompt_key)
    assert (first.group, first.prompt_key) != (other.group, other.prompt_key)
    again = step(5, [1]).requests()[0]
    assert again.prompt_key == first.prompt_key
    assert again.group != first.group


def test_first_epoch_last_steps_and_epochs_are_told_apart():
    copies = [step(number, TEN, epoch=number) for number in range(4)]
    knows = Scripted(lambda context, budget: None)
    replay = Replay(knows, budget=9)
    for number, one in enumerate(copies):
        if number == 2:
            knows.script = oracle(TEN)
        replay.play(one, one.requests())
    result = replay.result()
    assert result.tokens_per_forward_first_epoch == 1.0
    assert result.tokens_per_forward_last30 == 10.0  # the last 2 of 4 steps
    assert result.tokens_per_forward == 40 / 22
    assert {epoch: found.tokens_per_forward for epoch, found in result.by_epoch.items()} == {
        "0": 1.0,
        "1": 1.0,
        "2": 10.0,
        "3": 10.0,
    }
    assert result.by_epoch["0"].hit_rate == 0.0
    assert result.by_epoch["3"].acceptance == 1.0


def test_calibration_error_is_the_gap_between_promise_and_acceptance():
    # Six forwards promise .75, of which two hold; the other four nodes at .25 never hold.
    promises = {"tokens": [100, 1], "probs": [0.75, 0.25]}
    result, _ = play(lambda context, budget: promises, step(0, [100, 5, 100, 5, 9, 9, 9, 9]))
    # Accepted in the two forwards that begin at a 100, which emit two tokens each; four more forwards follow.
    assert result.tokens_per_forward == 8 / 6
    assert result.calibration_error == pytest.approx((6 * abs(0.75 - 2 / 6) + 6 * 0.25) / 12)


def test_calibration_leaves_out_what_is_drafted_behind_the_end_of_a_response():
    chain = {"tokens": [6, 8, 1, 2], "probs": [1.0, 1.0, 0.9, 0.9]}
    result, _ = play(lambda context, budget: chain if len(context) == len(PROMPT) else None, step(0, [6, 8]))
    assert result.calibration_error == 0.0
    # Of a tree only what hangs below the last token is left out: 5 and what follows it were refused.
    tree = {"tokens": [5, 6, 7, 8, 1], "parents": [-1, -1, 0, 1, 3], "probs": [0.45, 1.0, 0.45, 1.0, 0.95]}
    result, _ = play(lambda context, budget: tree if len(context) == len(PROMPT) else None, step(0, [6, 8]))
    assert result.calibration_error == pytest.approx(0.9 / 4)


def test_calibration_counts_the_nodes_of_a_tree_on_the_path():
    tree = {"tokens": [5, 6, 8], "parents": [-1, -1, 1], "probs": [0.0, 1.0, 1.0]}
    result, _ = play(lambda context, budget: tree if len(context) == len(PROMPT) else None, step(0, [6, 8]))
    assert result.calibration_error == 0.0
    assert result.acceptance == 2 / 3


def test_what_a_drafter_does_not_know_is_nan():
    result, _ = play(oracle(TEN), step(0, TEN))
    unknown = (result.calibration_error, result.prefetch_coverage, result.bytes_per_token, result.projected_speedup)
    assert all(math.isnan(value) for value in unknown)


def test_prefetch_coverage_counts_the_drafts_after_a_request_s_first():
    odd = {"tokens": [1], "prefetched": True}
    result, _ = play(lambda context, budget: odd if len(context) % 2 else {"tokens": [1]}, step(0, TEN))
    assert result.prefetch_coverage == result.by_epoch["0"].prefetch_coverage == 4 / 9


def test_a_prefetcher_hears_of_the_verified_drafts_before_they_are_committed():
    drafter = Scripted(lambda context, budget: oracle(TEN)(context, 100))
    drafter.verifying = lambda drafts: drafter.calls.append(("verifying", [d.tokens.tolist() for d in drafts]))
    replay = Replay(drafter, budget=4)
    replay.play(step(0, TEN), step(0, TEN).requests())
    assert replay.result().prefetch_coverage == 0.0, "it prefetches, and nothing was ready"
    assert drafter.of("verifying") == [[TEN[:4]], [TEN[5:9]]]
    assert [name for name, _ in drafter.calls][1:4] == ["propose", "verifying", "commit"]


def test_bytes_come_from_the_drafter():
    drafter = Scripted(lambda context, budget: None)
    drafter.nbytes = 120
    replay = Replay(drafter)
    replay.play(step(0, TEN), step(0, TEN).requests())
    assert replay.result().bytes_per_token == 12.0
    drafter.tokens_held = 5
    assert replay.result().bytes_per_token == 24.0


def test_times_are_measured():
    result, _ = play(oracle(TEN), step(0, TEN))
    assert 0 < result.draft_us_p50 <= result.draft_us_p99
    assert result.insert_us_per_token > 0


def test_the_projected_speedup_is_plain_time_over_the_time_of_the_passes():
    cost = MeasuredCost([(1, 1, [1.0]), (1, 5, [2.0])])
    result, _ = play(oracle(TEN), step(0, TEN), budget=4, cost=cost)
    assert result.projected_speedup == 10 / 4  # ten passes of 1 s against two of 2 s


def test_drafting_nothing_projects_no_speedup():
    cost = LinearCost(per_kv_token=0.25, per_token=0.5, base=1.0)
    responses = ([1, 2, 3, 4], [5, 6], [7])
    result, _ = play(lambda context, budget: None, step(0, *responses), batch=2, cost=cost)
    assert result.projected_speedup == pytest.approx(1.0)


def test_a_cost_that_does_not_know_the_batch_projects_nothing():
    result, _ = play(oracle(TEN), step(0, TEN, TEN), cost=MeasuredCost([(1, 1, [1.0])]))
    assert math.isnan(result.projected_speedup)


def test_a_pool_spends_what_fixed_lengths_would_on_the_most_probable_nodes():
    sure, unsure = TEN, list(range(200, 210))

    def script(context, budget):
        assert budget == 9
        rest = oracle(sure, unsure)(context, budget)
        sure_of_it = context[len(PROMPT) :] == sure[: len(context) - len(PROMPT)] and len(context) > len(PROMPT)
        if rest is None or len(context) == len(PROMPT):
            return None
        return {"tokens": rest, "probs": [0.9 if sure_of_it else 0.1] * len(rest)}

    result, drafter = play(script, step(0, sure, unsure), budget=2, offer=9)
    drafted = [sum(outcome[3] for outcome in outcomes) for outcomes in drafter.of("commit")]
    assert all(count <= 2 * len(outcomes) for count, outcomes in zip(drafted, drafter.of("commit"), strict=True))
    assert [outcome[3] for outcome in drafter.of("commit")[1]] == [4, 0], "all four nodes go where they are likelier"
    assert result.acceptance == 1.0

"""NVIDIA's projections beside ours: within a tenth where the settings are published, and how the figures come about."""

import pytest

from paceline.simulate.breakdown import Layout
from paceline.simulate.validate_nvidia import EagleTime, cells, policy, rollout_speedup, step_speedup


class Flat:
    mode = "analytic"
    source = "made up"

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        return 1.0 + 0.01 * tokens + 0.001 * kv_tokens


class FlatDrafter:
    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        return 0.1 * drafted


def test_a_rollout_is_as_much_faster_as_its_passes_cost_and_keep():
    plain, verifying, drafting = 1.0 + 0.04 + 0.2, 1.0 + 0.16 + 0.2, 0.3
    found = rollout_speedup(Flat(), FlatDrafter(), rows=4, context=50, drafted=3, tokens_per_forward=2.5)
    assert found == pytest.approx(2.5 * plain / (verifying + drafting))
    assert step_speedup(2.0, 0.5) == pytest.approx(1 / 0.75)
    assert step_speedup(3.0, 0.0) == 1.0


def test_synchronous_cells_are_within_a_tenth_without_a_fit():
    found = cells()[:4]
    assert [cell.published for cell in found] == [2.72, 1.70, 4.07, 1.96]
    assert max(abs(cell.relative_error) for cell in found) < 0.10
    assert all(cell.mode == "analytic" and cell.given and cell.assumed for cell in found)
    assert found[0].relative_error == pytest.approx(found[0].predicted / 2.72 - 1)


def test_batches_in_flight_change_the_asynchronous_cells_only():
    one, three = cells(), cells(in_flight=3)
    assert [cell.predicted for cell in one[:4]] == [cell.predicted for cell in three[:4]]
    assert one[4].predicted < three[4].predicted


def test_drafting_takes_a_pass_of_the_head_for_each_token():
    drafter = EagleTime(Layout(tensor=4))
    times = [drafter.seconds(32, drafted, 32 * 4096) for drafted in (1, 2, 3)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=0.05)
    layer = drafter._layer.seconds(32, 32, 32 * 4096)
    assert times[0] > times[1] - times[0] > layer, "the first pass has more tokens, and mixes the policy's layers"
    assert times[2] < 0.1 * policy(Layout(tensor=4)).seconds(32, 32, 32 * 4096)

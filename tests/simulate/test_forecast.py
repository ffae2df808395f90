"""The forecast is damped, stays near what was seen, and is the surer the more steps were seen."""

from itertools import pairwise

import numpy as np
import pytest

from paceline.simulate.forecast import forecast

LENGTHS = (10, 30, 100, 300, 1000)
GAIN = np.log(1.7)


def noise(steps, candidates=200, deviation=0.05):
    return GAIN + deviation * np.random.default_rng(steps).standard_normal((candidates, steps))


def one(gains, ahead):
    found = forecast(np.array([gains], float), ahead)
    return found.low_C[0], found.mean_C[0], found.high_C[0]


def test_of_one_step_its_gain_is_what_is_forecast():
    low, mean, high = one([0.7], 5)
    assert mean == pytest.approx(0.7)
    assert low < 0.7 < high < 1.0


def test_a_gain_that_never_moved_goes_on():
    for steps in (2, 10, 3000):
        low, mean, high = one([0.7] * steps, 45)
        assert (low, mean, high) == pytest.approx((0.7, 0.7, 0.7), abs=0.5 / steps**0.5)


def test_nothing_known_and_nothing_ahead_are_refused():
    for shape, ahead in (((1, 0), 3), ((1, 3), 0)):
        with pytest.raises(ValueError, match="a forecast takes at least one of each"):
            forecast(np.zeros(shape), ahead)


def test_forecasts_of_noise_about_a_gain_are_surer_with_every_longer_log():
    spreads, widths = [], []
    for steps in LENGTHS:
        found = forecast(noise(steps), 45)
        low, high = np.quantile(found.mean_C, [0.05, 0.95])
        spreads.append(high - low)
        widths.append(np.mean(found.high_C - found.low_C))
    assert spreads == sorted(spreads, reverse=True)
    assert widths == sorted(widths, reverse=True)
    assert 1.55 < np.exp(GAIN - spreads[0] / 2) < np.exp(GAIN + spreads[0] / 2) < 1.87, "of ten steps"
    assert spreads[-1] < 0.02, "of a thousand: 1.69 to 1.71"


def test_intervals_are_narrower_with_every_longer_log_that_holds_three_tenths_out():
    # Noise of the widths: a twentieth.
    widths = [float(np.mean(np.subtract(*intervals(steps)[::-1]))) for steps in (7, 14, 28, 56, 112, 300, 700)]
    assert all(later < 1.05 * before for before, later in pairwise(widths))
    assert widths[-1] < widths[0] / 10


def intervals(steps):
    found = forecast(noise(steps), -(-3 * steps // 7))
    return found.low_C, found.high_C


@pytest.mark.parametrize("steps", LENGTHS)
def test_nine_tenths_of_the_intervals_hold_what_comes(steps):
    ahead = -(-3 * steps // 7)
    gains = noise(steps + ahead)
    found = forecast(gains[:, :steps], ahead)
    came = gains[:, steps:].mean(axis=1)
    assert np.mean((found.low_C <= came) & (came <= found.high_C)) > 0.88


@pytest.mark.parametrize("ahead", [1, 45, 700])
@pytest.mark.parametrize("steps", [2, 3, 7, 40, 240])
def test_whatever_the_log_a_forecast_lies_near_what_was_seen(steps, ahead):
    random = np.random.default_rng(steps)
    logs = np.concatenate(
        [
            random.standard_normal((20, steps)),
            np.cumsum(random.standard_normal((20, steps)), axis=1),
            random.standard_cauchy((20, steps)),
            np.outer([-1.0, 0.001, 1.0], np.arange(steps)),
            np.exp(np.outer([0.01, 0.1], np.arange(steps))),
        ]
    )
    found = forecast(logs, ahead)
    least, most = logs.min(axis=1), logs.max(axis=1)
    margin = 0.1 * (most - least) + 1e-9
    assert np.all((least - margin <= found.mean_C) & (found.mean_C <= most + margin))
    room = np.maximum(most - least, 0.2) + 1e-9
    assert np.all((least - room <= found.low_C) & (found.high_C <= most + room))
    assert np.all((found.low_C <= found.mean_C) & (found.mean_C <= found.high_C))


def test_a_trend_is_carried_on_for_a_few_steps_and_damped():
    rising = 0.1 * np.arange(8)
    near, far = (one(rising, ahead)[1] for ahead in (1, 100))
    assert 0.65 < near < far < 0.77 + 1e-9, "a line would come to 5.8 in the mean of a hundred"


def test_of_a_level_that_moved_the_newest_counts_and_of_one_that_did_not_all():
    random = np.random.default_rng(0)
    moved = np.concatenate([np.zeros(60), np.ones(40)]) + 0.05 * random.standard_normal(100)
    assert one(moved, 40)[1] == pytest.approx(1.0, abs=0.05)
    walk = np.cumsum(0.05 * random.standard_normal((200, 100)), axis=1)
    assert np.mean(np.abs(forecast(walk, 1).mean_C - walk[:, -1])) < 0.02


def test_one_odd_step_moves_little():
    steady = noise(100, 1)[0]
    for odd in (-3.0, 5.0):
        assert one([*steady, odd, *steady[:3]], 40)[1] == pytest.approx(GAIN, abs=0.05)


def test_a_log_of_many_steps_costs_as_its_newest():
    gains = noise(5000, 3)
    whole, newest = forecast(gains, 45), forecast(gains[:, -2000:], 45)
    assert np.array_equal(whole.mean_C, newest.mean_C)

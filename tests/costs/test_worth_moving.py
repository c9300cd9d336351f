# SPDX-License-Identifier: Apache-2.0
"""Whether a move pays off: against draws of gains and costs, and closed forms."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from hetjax.costs.certainty.beliefs import CredibleInterval, lognormal
from hetjax.costs.certainty.worth_moving import Move, measured_gain

NUM_DRAWS = 400_000


def move(
    gain: float, cost_s: float, *, num_steps: int, sigma: float = 0.0, tau: float = 0.0
) -> Move:
    """Return a move; `sigma` and `tau` are log deviations of its gain and cost."""
    return Move(
        gain=lognormal(gain, sigma**2),
        cost_s=lognormal(cost_s, tau**2),
        step_s=2.0,
        num_steps=num_steps,
    )


@pytest.mark.parametrize(
    ("gain", "sigma", "cost_s", "tau", "num_steps"),
    [
        (1.3, 0.10, 20.0, 0.4, 100),
        (1.3, 0.10, 20.0, 0.4, 55),
        (1.05, 0.05, 20.0, 0.2, 1_000),
        (1.02, 0.05, 1.0, 0.0, 100_000),
        (2.0, 0.5, 100.0, 1.0, 90),
        (0.9, 0.10, 5.0, 0.4, 500),
    ],
)
def test_the_odds_are_the_share_of_draws_in_which_the_time_saved_exceeds_the_cost(
    gain: float, sigma: float, cost_s: float, tau: float, num_steps: int
):
    draw = np.random.default_rng(0)
    gain_D = gain * np.exp(sigma * draw.standard_normal(NUM_DRAWS))
    cost_D = cost_s * np.exp(tau * draw.standard_normal(NUM_DRAWS))
    stays_s, goes_D = 2.0 * num_steps, 2.0 * num_steps / gain_D
    expected = float(np.mean(stays_s - goes_D > cost_D))
    found = move(gain, cost_s, num_steps=num_steps, sigma=sigma, tau=tau)
    assert found.probability == pytest.approx(expected, abs=0.003)
    assert found.is_worth_it == (expected >= 0.9)


def test_of_a_sure_gain_exactly_the_steps_that_pay_for_it_decide():
    # 2 s per step, twice as fast: a second saved per step, so 21 steps pay for 20.5 s
    assert not move(2.0, 20.5, num_steps=20).is_worth_it
    assert move(2.0, 20.5, num_steps=21).is_worth_it
    assert move(2.0, 20.5, num_steps=21).saved_s == pytest.approx(21.0)


def test_without_a_cost_to_speak_of_the_odds_are_those_of_any_gain():
    found = move(1.1, 1e-9, num_steps=10, sigma=0.08)
    assert found.probability == pytest.approx(NormalDist().cdf(math.log(1.1) / 0.08))


def test_at_the_end_of_a_run_nothing_is_worth_moving_for():
    assert move(10.0, 0.1, num_steps=0).probability == 0.0
    assert move(10.0, 3.0, num_steps=1, sigma=1.0).probability == 0.0


@pytest.mark.parametrize("gain", [0.8, 1.0, 1.25])
def test_the_interval_of_a_measured_gain_holds_it_nine_times_in_ten(gain: float):
    draw, held, wide = np.random.default_rng(1), list[bool](), list[float]()
    for _ in range(1_000):
        before = np.exp(0.05 * draw.standard_normal(30))
        after = np.exp(0.05 * draw.standard_normal(16)) / gain
        before[0] *= 20  # a pause, which does not count
        found = measured_gain([*map(float, before)], [*map(float, after)])
        held.append(gain in found)
        wide.append(found.factor)
    assert 0.82 <= np.mean(held) <= 0.96
    assert np.median(wide) < 1.05


def test_an_interval_widens_by_what_is_independent():
    found = CredibleInterval(low=1 / 1.1, median=1.0, high=1.1).widened(0.1)
    sigma = math.hypot(math.log(1.1) / 1.6449, 0.1)
    assert found.sigma == pytest.approx(sigma)
    assert found.low == pytest.approx(math.exp(-1.6449 * sigma))

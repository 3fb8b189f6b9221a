import math

import numpy as np
import pytest

from incentives.config import Decay, IncentiveConfig
from incentives.stability import live_scores, metered_variation, simulate_tracked, sweep, tracked_variation

CONFIG = IncentiveConfig()


def test_live_scores_are_validators_times_gamma_over_miners_times_period() -> None:
    assert live_scores(50, 4, CONFIG) == pytest.approx(4 * 600 / (50 * 20))


@pytest.mark.parametrize(("num_miners", "expected"), [(50, 0.62), (250, 1.43)])
def test_tracked_scores_vary_as_the_design_says(num_miners: int, expected: float) -> None:
    assert tracked_variation(num_miners, 4, CONFIG) == pytest.approx(expected, abs=0.01)
    assert tracked_variation(num_miners, 4, CONFIG) < 1.0 / math.sqrt(live_scores(num_miners, 4, CONFIG))


@pytest.mark.parametrize(("num_miners", "num_validators"), [(50, 4), (20, 10)])
def test_drawing_agrees_with_the_formula(num_miners: int, num_validators: int) -> None:
    simulated = simulate_tracked(num_miners, num_validators, CONFIG, num_rounds=60, rng=np.random.default_rng(1))
    assert simulated == pytest.approx(tracked_variation(num_miners, num_validators, CONFIG), rel=0.1)


def test_tracking_everybody_does_not_vary() -> None:
    assert tracked_variation(4, 9, CONFIG) == 0.0


@pytest.mark.parametrize("decay", list(Decay))
def test_metered_pay_varies_as_its_average_does(decay: Decay) -> None:
    config = IncentiveConfig(decay=decay)
    volumes = 1.0 + 0.13 * np.random.default_rng(2).standard_normal((2_000, 300))
    ages = np.arange(300)[::-1]
    kept = (1.0 - 1.0 / 30.0) ** ages if decay is Decay.EXPONENTIAL else (ages < 30).astype(np.float64)
    pay = volumes @ kept
    assert metered_variation(0.13, config) == pytest.approx(float(pay.std() / pay.mean()), rel=0.08)
    assert metered_variation(0.13, config) < 0.025


def test_a_sweep_covers_the_settings_that_make_sense() -> None:
    points = sweep(
        [10.0, 120.0],
        [1.0, 10.0],
        num_miners=50,
        num_validators=4,
        epoch_variation=0.13,
        rng=np.random.default_rng(3),
    )
    assert [(point.sync_period_minutes, point.gamma_hours) for point in points] == [
        (10.0, 1.0),
        (10.0, 10.0),
        (120.0, 10.0),
    ]
    assert points[1].tracked < points[0].tracked
    assert all(point.metered < point.tracked_simulated for point in points)

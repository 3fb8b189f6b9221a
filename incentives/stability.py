"""How steady an honest miner's pay is: the paper's sum of tracked scores against metered volume (papers.md A4, trust.md 3).

The paper's own appendix on stability is not public; this is our model of it. W epochs of work are paid for at one time; in
each, V validators track one of M miners each, or all work is metered.
"""

import math
from collections.abc import Sequence

import numpy as np

from incentives.config import Decay, IncentiveConfig
from subnet.types import Record


class StabilityPoint(Record, frozen=True):
    """Coefficient of variation of pay at one setting of the two clocks."""

    sync_period_minutes: float
    gamma_hours: float
    live_scores: float
    """Scores that a miner has at one time, on average."""
    tracked: float
    """Of the paper's sum of tracked scores, by the formula."""
    tracked_simulated: float
    metered: float
    """Of metered volume."""


def live_scores(num_miners: int, num_validators: int, config: IncentiveConfig) -> float:
    """Mean number of scores a miner has within gamma: V*gamma / (M*T_s)."""
    return config.window_epochs * num_validators / num_miners


def tracked_variation(num_miners: int, num_validators: int, config: IncentiveConfig) -> float:
    """Coefficient of variation of a sum of tracked scores, 1/sqrt(live scores) less what distinct draws save."""
    chance = min(1.0, num_validators / num_miners)
    return math.sqrt((1.0 - chance) / (config.window_epochs * chance))


def metered_variation(epoch_variation: float, config: IncentiveConfig) -> float:
    """Coefficient of variation of metered pay when one epoch's volume varies by `epoch_variation`."""
    if config.decay is Decay.STEP:
        return epoch_variation / math.sqrt(config.window_epochs)
    return epoch_variation / math.sqrt(2.0 * config.window_epochs - 1.0)


def simulate_tracked(
    num_miners: int, num_validators: int, config: IncentiveConfig, *, num_rounds: int, rng: np.random.Generator
) -> float:
    """The same by drawing: each epoch the validators track distinct miners, who all work equally."""
    window = config.window_epochs
    picks = rng.random((num_rounds, window, num_miners)).argsort(axis=2)[:, :, :num_validators]
    counts = np.stack([np.bincount(one.ravel(), minlength=num_miners) for one in picks]).astype(np.float64)
    return float(counts.std() / counts.mean())


def sweep(
    sync_periods_minutes: Sequence[float],
    gammas_hours: Sequence[float],
    *,
    num_miners: int,
    num_validators: int,
    epoch_variation: float,
    rng: np.random.Generator,
) -> tuple[StabilityPoint, ...]:
    """Stability over monitoring time and decay; settings with gamma below T_s are left out."""
    points: list[StabilityPoint] = []
    for period in sync_periods_minutes:
        for gamma in gammas_hours:
            if gamma * 60.0 < period:
                continue
            config = IncentiveConfig(sync_period_minutes=period, gamma_hours=gamma)
            points.append(
                StabilityPoint(
                    sync_period_minutes=period,
                    gamma_hours=gamma,
                    live_scores=live_scores(num_miners, num_validators, config),
                    tracked=tracked_variation(num_miners, num_validators, config),
                    tracked_simulated=simulate_tracked(num_miners, num_validators, config, num_rounds=20, rng=rng),
                    metered=metered_variation(epoch_variation, config),
                )
            )
    return tuple(points)

"""How much has to be looked at until a harmful miner is found (trust.md 4).

Legend: T samples of a run, M miners of a stage, S stages, P pairs of twins; sigma the noise of the harmful miner's samples and
delta its harm, both in nats a token.
"""

import math
from statistics import NormalDist

import numpy as np

from incentives.tails import median_extra, quantile, t_ratio, welch_freedom

_ROUNDS = 60
"""Of a fixed point; it converges within twenty."""


def samples_needed(sigma: float, delta: float, num_miners: int, *, alpha: float = 1e-3, power: float = 0.9) -> float:
    """T in the limit of many samples: 19.1*(sigma/delta)^2*M^2/(M-1).

    A miner has T/M samples, the others T(M-1)/M; the variance of their difference is sigma^2*M^2/(T(M-1)).
    """
    return _reach(alpha, power) ** 2 * (sigma / delta) ** 2 * num_miners**2 / (num_miners - 1)


def samples_to_find(
    sigma: float, delta: float, num_miners: int, *, num_stages: int = 1, alpha: float = 1e-3, power: float = 0.9
) -> float:
    """T of the test as it is made. The limit above takes three things for granted; the fewer samples, the more they cost:

    - sigma is known. It is estimated, mostly from the miner's own T/M samples: the height to exceed is Student's t at Welch's v
      degrees of freedom, and the ratio itself has variance 1 + t^2/(2v) about delta / error (Johnson and Welch 1940).
    - residuals are noise. They are what a fit of 1 + S(M-1) effects has left over; HC3 makes that up and more: its variance is
      1/(1 - leverage) times the truth, leverage (1 + S(M-1))/T.
    - the others' mean is what one is compared with. Ours is their median, which cannot be moved by one of them.

    T is the fixed point of T = reach^2 * (1 + median's extra) * (sigma/delta)^2 * M^2/(M-1), where
    reach = t/sqrt(1 - leverage) + z*sqrt(1 + t^2/(2v)) and z is that of the power.
    """
    num_effects = 1 + num_stages * (num_miners - 1)
    limit = (1.0 + median_extra(num_miners)) * samples_needed(sigma, delta, num_miners, alpha=alpha, power=power)
    least = max(2.0 * num_miners, 1.5 * num_effects)
    total = max(limit, least)
    for _ in range(_ROUNDS):
        left = 1.0 - num_effects / total
        freedom = float(welch_freedom(np.full(num_miners, total / num_miners))[0]) * left
        total = max(limit * _surcharge(alpha, power, freedom, left=left), least)
    return total


def pairs_to_find(noise: float, delta: float, num_miners: int, *, alpha: float = 1e-3, power: float = 0.9) -> float:
    """P of twins spread evenly over a stage, `noise` the deviation of a pair's difference between honest miners.

    Least squares on P pairs gives an effect against the mean of the others the variance noise^2*M/(2P); the noise is estimated
    from all pairs, with P - M + 1 degrees of freedom.
    """
    limit = (1.0 + median_extra(num_miners)) * (_reach(alpha, power) * noise / delta) ** 2 * num_miners / 2.0
    least = num_miners + 1.0
    total = max(limit, least)
    for _ in range(_ROUNDS):
        total = max(limit * _surcharge(alpha, power, total - num_miners + 1.0), least)
    return total


def _surcharge(alpha: float, power: float, freedom: float, *, left: float = 1.0) -> float:
    """What an estimated noise costs, as a factor on the samples of a known one."""
    height = t_ratio(quantile(alpha), freedom)
    reach = height / math.sqrt(left) + NormalDist().inv_cdf(power) * math.sqrt(1.0 + height**2 / (2.0 * freedom))
    return (reach / _reach(alpha, power)) ** 2


def _reach(alpha: float, power: float) -> float:
    return quantile(alpha) + NormalDist().inv_cdf(power)

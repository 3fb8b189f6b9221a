"""How improbable a height is: tails of Student's t, medians in place of means, a limit for those who look again and again.

Legend: m miners of one stage; z a height in standard errors, as improbable as that of a normal value.
"""

import math
from statistics import NormalDist

import numpy as np

from incentives.clasp import Floats

_MEDIAN_VARIANCE = (1.0, 1.0, 1.0, 1.346, 1.193, 1.434, 1.288, 1.472, 1.345, 1.495)
"""Variance of the median of n normal values over that of their mean, by n; pi / 2 for many."""

_ROUNDS = 12
"""Of a fixed point whose error shrinks at least twofold each time, and by far more for heights that matter."""


def quantile(alpha: float) -> float:
    """Height that a normal value exceeds with probability alpha."""
    return NormalDist().inv_cdf(1.0 - alpha)


def normal_score(ratio: float, freedom: float) -> float:
    """The z that is as improbable as Student's t of `ratio` (Wallace's approximation); NaN without degrees of freedom."""
    if freedom < 1.0 or math.isnan(ratio):
        return math.nan
    size = _wallace(freedom) * math.sqrt(freedom * math.log1p(ratio * ratio / freedom))
    return math.copysign(size, ratio)


def t_ratio(z: float, freedom: float) -> float:
    """Inverse of `normal_score`: what Student's t exceeds as rarely as a normal value exceeds `z` > 0."""
    return math.sqrt(freedom * math.expm1((z / _wallace(freedom)) ** 2 / freedom))


def _wallace(freedom: float) -> float:
    return (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0)


def anytime_limit(standard_error: float, *, alpha: float, effect: float) -> float:
    """z that an honest miner reaches with probability alpha at most, however often one looks; `standard_error` is today's.

    The likelihood ratio of harm against none, mixed over harms h > 0 by a half-normal density of deviation `effect`, is
    2/sqrt(1 + I) * exp(z^2*s/2) * Phi(z*sqrt(s)) with I = (effect / standard_error)^2 and s = I/(1 + I). It is a martingale of
    mean 1 for the honest, so that it ever reaches 1/alpha with probability alpha at most (Ville; Robbins 1970). `effect` is the
    harm that is found soonest; it prices the looking, it is no threshold.
    """
    information = (effect / standard_error) ** 2
    share = information / (1.0 + information)
    above = 1.0
    for _ in range(_ROUNDS):
        z = math.sqrt((2.0 * math.log(1.0 / (2.0 * alpha * above)) + math.log1p(information)) / share)
        above = NormalDist().cdf(z * math.sqrt(share))
    return z


def median_of_others(values: Floats) -> Floats:
    """For each value, the median of all others; NaN values count for nobody, and have none."""
    known = np.flatnonzero(~np.isnan(values))
    result = np.full(len(values), np.nan)
    if len(known) < 2:
        return result
    order = known[np.argsort(values[known], kind="stable")]
    ranks = np.arange(len(known))
    ordered = values[order]
    low, high = (len(known) - 2) // 2, (len(known) - 1) // 2
    result[order] = (ordered[low + (ranks <= low)] + ordered[high + (ranks <= high)]) / 2.0
    return result


def median_variance(count: int) -> float:
    """Variance of the median of `count` normal values over that of their mean."""
    return _MEDIAN_VARIANCE[max(0, count)] if count < len(_MEDIAN_VARIANCE) else math.pi / 2.0


def median_extra(num_miners: int) -> float:
    """What the variance of "one less the mean of the others" gains, as a fraction, when their median takes the mean's place."""
    return (median_variance(num_miners - 1) - 1.0) / max(1, num_miners)


def welch_freedom(counts_m: Floats) -> Floats:
    """Degrees of freedom of a miner's variance and the others' in the variance of their difference; 0 where there is none."""
    is_seen_m = counts_m > 0
    num_others = int(is_seen_m.sum()) - 1
    if num_others < 1:
        return np.zeros(len(counts_m))
    own_m = 1.0 / np.maximum(counts_m, 1.0)
    others_m = (np.sum(own_m[is_seen_m]) - own_m) / num_others**2
    share_m = own_m / (own_m + others_m)
    left_m = np.maximum(np.sum(counts_m) - counts_m - num_others, 1e-9)
    freedom_m: Floats = 1.0 / (share_m**2 / np.maximum(counts_m - 1.0, 1e-9) + (1.0 - share_m) ** 2 / left_m)
    return freedom_m

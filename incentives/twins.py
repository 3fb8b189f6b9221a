"""Twins: samples that went through two miners of one stage, all else equal (trust.md 4).

What the text adds to the loss is in both branches and cancels in their difference; what is left is what the two miners' params
differ by. Legend: k pairs, m miners of the stage.
"""

import math

import numpy as np

from incentives.clasp import Floats, Ints
from incentives.tails import median_extra, median_of_others, normal_score


def twin_scores(first_k: Ints, second_k: Ints, differences_k: Floats, num_miners: int) -> Floats:
    """z of each miner's effect against the median of the others, by least squares on the pairs.

    `differences_k` is the loss through the first minus the loss through the second, in nats a token. NaN for a miner without
    twins; for all when nothing is left to estimate the noise from, or when the pairs fall apart into groups that never met.
    """
    rows = np.arange(len(first_k))
    design_km = np.zeros((len(first_k), num_miners))
    design_km[rows, first_k] += 1.0
    design_km[rows, second_k] -= 1.0
    is_seen_m = np.abs(design_km).sum(axis=0) > 0
    num_seen, rank = int(is_seen_m.sum()), int(np.linalg.matrix_rank(design_km)) if len(first_k) else 0
    freedom = len(first_k) - rank
    if freedom < 1 or rank < num_seen - 1:
        return np.full(num_miners, np.nan)
    inverse_mm = np.linalg.pinv(design_km.T @ design_km, hermitian=True)
    raw_m = inverse_mm @ (design_km.T @ differences_k)
    noise = math.sqrt(float(np.sum((differences_k - design_km @ raw_m) ** 2)) / freedom)
    effects_m = np.where(is_seen_m, raw_m, np.nan)
    effects_m = effects_m - median_of_others(effects_m)
    # effects sum to zero: from the mean of the others one lies M/(M-1) times as far as from zero, and their median is less sure
    widening = num_seen / (num_seen - 1) * math.sqrt(1.0 + median_extra(num_seen))
    errors_m = noise * widening * np.sqrt(np.diagonal(inverse_mm))
    ratios_m = np.divide(effects_m, errors_m, out=np.full(num_miners, np.nan), where=errors_m > 0.0)
    return np.array([normal_score(ratio, freedom) for ratio in ratios_m])

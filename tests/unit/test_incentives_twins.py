import math

import numpy as np
import pytest

from incentives.clasp import Floats, Ints
from incentives.tails import quantile
from incentives.twins import twin_scores


def twins(num_pairs: int, seed: int) -> tuple[Ints, Ints, Floats]:
    """Miner 0 of five adds 1 nat; the other twins are among the honest."""
    rng = np.random.default_rng(seed)
    first = np.concatenate([np.zeros(num_pairs, np.int64), rng.integers(1, 5, 30)])
    second = (first + rng.integers(1, 5, len(first))) % 5
    second = np.where((second == 0) & (first != 0), first % 4 + 1, second)
    difference = 1.0 * (first == 0) + 0.05 * rng.standard_normal(len(first))
    return first, second, difference


def test_two_pairs_of_twins_show_an_identity_cheat() -> None:
    for seed in range(20):
        z = twin_scores(*twins(2, seed), 5)
        assert z[0] > 3.72
        assert (z[1:] < 3.72).all()


@pytest.mark.parametrize(("num_miners", "num_pairs", "is_heavy"), [(3, 20, False), (5, 12, False), (5, 60, True)])
def test_honest_twins_exceed_a_height_as_rarely_as_it_says(num_miners: int, num_pairs: int, is_heavy: bool) -> None:
    rounds, alpha = 1_000, 0.01
    above = tests = 0
    for seed in range(rounds):
        rng = np.random.default_rng([3, seed])
        first = rng.integers(0, num_miners, num_pairs)
        second = (first + rng.integers(1, num_miners, num_pairs)) % num_miners
        noise = rng.standard_t(4, num_pairs) if is_heavy else rng.standard_normal(num_pairs)
        z = twin_scores(first, second, np.asarray(noise, dtype=np.float64), num_miners)
        above += int((z > quantile(alpha)).sum())
        tests += int(np.isfinite(z).sum())
    assert tests > 0.9 * rounds * num_miners
    assert above <= alpha * tests + 3.0 * math.sqrt(alpha * tests)


def test_twins_that_do_not_exist_say_nothing() -> None:
    nothing = np.zeros(0, np.int64)
    assert np.isnan(twin_scores(nothing, nothing, np.zeros(0), 3)).all()
    one = np.array([0]), np.array([1]), np.array([2.0])
    assert np.isnan(twin_scores(*one, 3)).all()
    several = np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0]), np.array([0.1, 0.2, 0.1, -0.1])
    z = twin_scores(*several, 3)
    assert np.isnan(z[2])
    assert np.isfinite(z[:2]).all()
    assert np.isnan(twin_scores(several[0], several[1], np.zeros(4), 3)).all()


def test_groups_that_never_met_are_not_compared() -> None:
    first, second = np.array([0, 0, 2, 2]), np.array([1, 1, 3, 3])
    assert np.isnan(twin_scores(first, second, np.array([0.1, 0.2, 0.9, 0.8]), 4)).all()

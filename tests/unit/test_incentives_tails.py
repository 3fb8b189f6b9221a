import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from incentives.tails import (
    anytime_limit,
    median_extra,
    median_of_others,
    median_variance,
    normal_score,
    t_ratio,
    welch_freedom,
)


@given(values=st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(math.nan)), max_size=9))
def test_the_median_of_the_others(values: list[float]) -> None:
    result = median_of_others(np.array(values))
    for at, value in enumerate(values):
        others = [other for place, other in enumerate(values) if place != at and not math.isnan(other)]
        if math.isnan(value) or not others:
            assert math.isnan(result[at])
        else:
            assert result[at] == pytest.approx(float(np.median(others)))


def test_a_median_is_less_sure_than_a_mean() -> None:
    """By simulation: what one less the others' median varies by, over one less their mean."""
    rng = np.random.default_rng(1)
    for count in (3, 4, 5, 8, 12):
        values = rng.standard_normal((40_000, count))
        to_mean = values[:, 0] - values[:, 1:].mean(axis=1)
        to_median = values[:, 0] - np.median(values[:, 1:], axis=1)
        assert 1.0 + median_extra(count) == pytest.approx(float(to_median.var() / to_mean.var()), rel=0.02)
    assert median_variance(10_000) == pytest.approx(math.pi / 2.0)


@pytest.mark.parametrize(
    ("t", "freedom", "p"), [(2.764, 10, 0.01), (3.930, 11, 1.18e-3), (4.144, 10, 1e-3), (2.326, 1e6, 0.01)]
)
def test_a_t_value_becomes_the_z_of_the_same_tail(t: float, freedom: float, p: float) -> None:
    assert 1.0 - NormalDist().cdf(normal_score(t, freedom)) == pytest.approx(p, rel=0.03)
    assert normal_score(-t, freedom) == -normal_score(t, freedom)


@given(z=st.floats(0.1, 8.0), freedom=st.floats(1.0, 1e6))
def test_a_t_value_and_its_z_are_each_others_inverse(z: float, freedom: float) -> None:
    assert normal_score(t_ratio(z, freedom), freedom) == pytest.approx(z, rel=1e-6)


def test_without_freedom_there_is_no_score() -> None:
    assert math.isnan(normal_score(3.0, 0.5))
    assert math.isnan(normal_score(math.nan, 10.0))


def test_freedom_is_that_of_two_samples() -> None:
    assert welch_freedom(np.array([10.0, 10.0])).tolist() == pytest.approx([18.0, 18.0])
    own, *_ = welch_freedom(np.array([20.0, 1e9, 1e9]))
    assert own == pytest.approx(19.0, rel=1e-3)
    assert welch_freedom(np.array([7.0, 0.0])).tolist() == [0.0, 0.0]


def test_an_anytime_limit_asks_for_more_than_a_single_look() -> None:
    for error in (0.001, 0.01, 0.1, 1.0):
        assert anytime_limit(error, alpha=0.01, effect=0.05) > NormalDist().inv_cdf(0.99)

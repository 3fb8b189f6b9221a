"""The measure of a replay: finite, blind to nothing it should see."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from subnet.validation.distance import RATIO_LIMIT, Distance, Values, bf16_spacing, distance, ratio

SHAPE = (2, 6, 3)
values = arrays(np.float64, SHAPE, elements=st.floats(-1e6, 1e6, width=32))


def drawn(seed: int) -> Values:
    return np.random.default_rng(seed).normal(size=SHAPE)


@given(claimed=values, replayed=values, given_=st.none() | values, spread=st.booleans())
def test_every_figure_is_finite(claimed: Values, replayed: Values, given_: Values | None, spread: bool) -> None:
    found = distance(claimed, replayed, given_, spread=spread)
    figures = np.array([found.rel_d, found.rel_d_token, found.cosine, found.norm_ratio])
    assert np.isfinite(figures).all()
    assert found.rel_d >= 0 and found.rel_d_token >= 0 and abs(found.cosine) <= 1 + 1e-9


@given(claimed=values)
def test_equal_tensors_have_no_distance(claimed: Values) -> None:
    found = distance(claimed, claimed, None)
    assert (found.rel_d, found.rel_d_token) == (0.0, 0.0)
    assert np.isclose(found.cosine, 1.0) and np.isclose(found.norm_ratio, 1.0)


def test_returning_the_input_counts_as_all_wrong_however_little_the_stage_changes() -> None:
    given_ = drawn(0)
    replayed = given_ + 0.05 * drawn(1)
    found = distance(given_, replayed, given_)
    assert found.cosine > 0.99
    assert 0.4 < found.rel_d < 0.7


def test_the_unit_is_the_smallest_of_change_spread_and_a_tenth_of_the_norm() -> None:
    claimed = drawn(0) + 5.0
    replayed = claimed + 0.1
    error = np.sqrt(0.01 * claimed.size)
    spread = float(np.linalg.norm(claimed - claimed.reshape(-1, 3).mean(axis=0)))
    assert np.isclose(distance(claimed, replayed, None).rel_d, error / spread)
    near = claimed + 0.3 * drawn(2)
    change = max(float(np.linalg.norm(claimed - near)), 0.1 * float(np.linalg.norm(claimed)))
    assert np.isclose(distance(claimed, replayed, near).rel_d, error / change)
    assert np.isclose(distance(claimed, replayed, None, spread=False).rel_d, error / np.linalg.norm(claimed))


def test_one_wrong_token_stands_out() -> None:
    claimed = drawn(0)
    replayed = claimed.copy()
    replayed[1, 2] = -claimed[1, 2]
    found = distance(claimed, replayed, None)
    assert found.rel_d_token > 1.0 > found.rel_d


def test_scaling_shows_in_the_norm_ratio() -> None:
    found = distance(1.2 * drawn(0), drawn(0), None)
    assert np.isclose(found.cosine, 1.0) and np.isclose(found.norm_ratio, 1.2)


def test_zeros_against_zeros_and_against_something() -> None:
    zeros = np.zeros(SHAPE)
    assert distance(zeros, zeros, zeros) == Distance(rel_d=0.0, rel_d_token=0.0, cosine=1.0, norm_ratio=1.0)
    found = distance(zeros, drawn(0), None)
    assert (found.rel_d, found.cosine, found.norm_ratio) == (RATIO_LIMIT, 0.0, 0.0)


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [
        (0, 0, 0),
        (1, 0, RATIO_LIMIT),
        (1, 2, 0.5),
        (1, 1e-300, RATIO_LIMIT),
        (np.inf, np.inf, RATIO_LIMIT),
        (np.nan, 1, RATIO_LIMIT),
    ],
)
def test_ratios_are_finite(part: float, whole: float, expected: float) -> None:
    assert ratio(part, whole) == expected


def test_one_step_of_the_wire_is_no_distance_and_more_is() -> None:
    """Values that honest machines round to different sides: at a narrow cut all tokens may do so at once."""
    claimed = np.full((1, 8, 1), 1.0)
    claimed[0, 0, 0] = 1.5
    spacing = bf16_spacing(claimed)
    assert spacing.ravel().tolist() == [2.0**-7] * 8
    assert distance(claimed, claimed + spacing, None, spacing_BTK=spacing).rel_d == 0.0
    assert distance(claimed, claimed - spacing, None, spacing_BTK=spacing).rel_d_token == 0.0
    assert distance(claimed, claimed + spacing, None).rel_d > 0.04
    assert distance(claimed, claimed + 3 * spacing, None, spacing_BTK=spacing).rel_d > 0.08


def test_the_spacing_is_that_of_bf16() -> None:
    values = np.array([[[0.0, 1.0, -1.0, 0.99609375, 3.0, 2.0**-20]]])
    assert bf16_spacing(values).ravel().tolist() == [0.0, 2.0**-7, 2.0**-7, 2.0**-8, 2.0**-6, 2.0**-27]
    tensor = torch.tensor(values, dtype=torch.bfloat16)
    up = torch.nextafter(tensor, torch.full_like(tensor, math.inf)).double().numpy()
    positive = values > 0
    assert np.array_equal((up - values)[positive], bf16_spacing(values)[positive])

"""Noise levels, bands and drawn tables: check values of papers.md B2."""

import math
import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.config import BlockTrainConfig, Objective, RunConfig, RunKind
from subnet.errors import InvalidConfig
from subnet.model.noise import (
    band_edges,
    band_of,
    codebook,
    loss_weight,
    stage_at,
    training_band,
    training_noise,
    unit_noise,
)
from subnet.types import StageIndex

WIDE = BlockTrainConfig(sigma_min=0.002, sigma_max=80.0)
NARROW = BlockTrainConfig()
RUN = RunConfig(kind=RunKind.BLOCKTRAIN, blocktrain=BlockTrainConfig(objective=Objective.DIFFUSION))


@pytest.mark.parametrize(
    ("blocktrain", "expected"),
    [(WIDE, (0.002, 0.1341, 0.3012, 0.6766, 80.0)), (NARROW, (1.0, 1.238, 1.623, 2.429, 10.0))],
)
def test_edges_are_the_published_ones(blocktrain: BlockTrainConfig, expected: tuple[float, ...]) -> None:
    assert band_edges(blocktrain, 4) == pytest.approx(expected, rel=5e-4)


def test_the_first_stage_has_the_highest_noise() -> None:
    bands = [band_of(NARROW, 4, StageIndex(stage)) for stage in range(4)]
    assert bands[0].high == NARROW.sigma_max and bands[-1].low == NARROW.sigma_min
    assert [band.low for band in bands[:-1]] == [band.high for band in bands[1:]]


@given(overlap=st.floats(0, 0.9), num_stages=st.integers(1, 12))
def test_training_bands_hold_their_own_and_stay_in_range(overlap: float, num_stages: int) -> None:
    blocktrain = BlockTrainConfig(overlap=overlap)
    for stage in range(num_stages):
        own, wide = (of(blocktrain, num_stages, StageIndex(stage)) for of in (band_of, training_band))
        assert blocktrain.sigma_min <= wide.low <= own.low < own.high <= wide.high <= blocktrain.sigma_max


def test_overlap_widens_by_the_band_to_its_power() -> None:
    own, wide = band_of(NARROW, 4, StageIndex(2)), training_band(NARROW, 4, StageIndex(2))
    factor = (own.high / own.low) ** 0.1
    assert wide == pytest.approx((own.low / factor, own.high * factor))


def test_levels_belong_to_the_stage_of_their_band() -> None:
    assert [stage_at(NARROW, 4, sigma) for sigma in (1.0, 1.3, 2.0, 3.0, 10.0)] == [3, 2, 1, 0, 0]
    with pytest.raises(ValueError, match=r"sigma must be in \[1, 10\], got 11"):
        stage_at(NARROW, 4, 11.0)


@given(sigma=st.floats(0.1, 100))
def test_the_weight_is_four_and_the_inverse_square(sigma: float) -> None:
    assert loss_weight(NARROW, sigma) == pytest.approx(4 + 1 / sigma**2)


def test_a_range_upside_down_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="sigma_min must be below"):
        BlockTrainConfig(sigma_min=3.0, sigma_max=2.0)


def test_targets_have_norm_one_and_depend_on_the_seed_alone() -> None:
    table = codebook(RUN)
    assert table.shape == (256, 256) and table.dtype == np.float32
    assert np.linalg.norm(table.astype(np.float64), axis=1) == pytest.approx(1, abs=1e-6)
    assert np.array_equal(table, codebook(RUN))


def test_noise_is_a_function_of_run_epoch_sample_and_stage() -> None:
    drawn = training_noise(RUN, StageIndex(1), 3, 4)
    again = training_noise(RUN, StageIndex(1), 3, 4)
    assert np.array_equal(drawn.sigmas, again.sigmas) and np.array_equal(drawn.unit, again.unit)
    for stage, epoch, sample in ((2, 3, 4), (1, 2, 4), (1, 3, 5)):
        assert not np.array_equal(drawn.unit, training_noise(RUN, StageIndex(stage), epoch, sample).unit)
    assert np.unique(drawn.sigmas).size == RUN.training.microbatch_size


def test_noise_is_the_same_bits_on_every_machine() -> None:
    assert unit_noise(RUN, "golden", 0)[0, 0, :4].tobytes().hex() == "8d42b13fbe907a3f997f2f3e49860340"
    assert [round(float(sigma), 9) for sigma in training_noise(RUN, StageIndex(0), 0, 0).sigmas[:2]] == [
        3.415446453,
        2.244250806,
    ]


def test_levels_follow_the_truncated_log_normal() -> None:
    drawn = np.concatenate([training_noise(RUN, StageIndex(1), 0, sample).sigmas for sample in range(100)])
    wide = training_band(RUN.blocktrain, 3, StageIndex(1))
    assert wide.low <= drawn.min() and drawn.max() <= wide.high
    middle = math.sqrt(wide.low * wide.high)
    low, at, high = (NormalDist(-1.2, 1.2).cdf(math.log(sigma)) for sigma in (wide.low, middle, wide.high))
    expected = (at - low) / (high - low)
    assert abs(np.mean(drawn < middle) - expected) < 4 * math.sqrt(expected * (1 - expected) / drawn.size)


def test_noise_needs_no_torch() -> None:
    code = "import sys; import subnet.model.noise; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

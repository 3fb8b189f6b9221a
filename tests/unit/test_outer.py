import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from subnet.config import TrainingConfig
from subnet.errors import ProtocolViolation
from subnet.training.outer import decode_snapshot, encode_snapshot, keep_params, outer_step, pseudo_gradient

Vector = npt.NDArray[np.float32]
TRAINING = TrainingConfig()
ROOT = Path(__file__).parents[2]


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def random(size: int, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_a_step_is_nesterov_with_every_operation_rounded_alone() -> None:
    params, momentum, merged = random(1_000, 1), random(1_000, 2), random(1_000, 3)
    stepped, moved = outer_step(params, momentum, merged, TRAINING)
    mu, lr = np.float32(0.9), np.float32(0.7)
    for at in range(0, 1_000, 37):
        expected = np.float32(np.float32(mu * momentum[at]) + merged[at])
        assert moved[at] == expected
        assert stepped[at] == np.float32(
            params[at] - np.float32(lr * np.float32(merged[at] + np.float32(mu * expected)))
        )


def test_ten_steps_follow_the_formula_in_float64() -> None:
    params, momentum = random(50, 4), np.zeros(50, np.float32)
    exact, exact_momentum = params.astype(np.float64), np.zeros(50)
    for round_ in range(10):
        merged = random(50, 10 + round_)
        params, momentum = outer_step(params, momentum, merged, TRAINING)
        exact_momentum = 0.9 * exact_momentum + merged
        exact = exact - 0.7 * (merged + 0.9 * exact_momentum)
    np.testing.assert_allclose(params, exact, rtol=1e-5, atol=1e-5)
    assert params.dtype == momentum.dtype == np.float32


def test_inputs_of_a_step_stay_untouched() -> None:
    params, momentum, merged = vector(1, 2), vector(3, 4), vector(5, 6)
    outer_step(params, momentum, merged, TRAINING)
    keep_params(params, momentum, merged)
    assert [list(values) for values in (params, momentum, merged)] == [[1, 2], [3, 4], [5, 6]]


def test_a_lone_miner_keeps_its_params_and_the_momentum_rests() -> None:
    anchor, local, momentum = vector(1.0, -2.0), vector(1.5, -2.25), vector(0.1, 0.2)
    params, rested = keep_params(anchor, momentum, pseudo_gradient(anchor, local))
    assert params.tobytes() == local.tobytes()
    assert rested.tobytes() == momentum.tobytes()


def test_a_pseudo_gradient_is_anchor_minus_local() -> None:
    assert list(pseudo_gradient(vector(3.0, 1.0), vector(1.0, 1.5))) == [2.0, -0.5]


@given(values=hnp.arrays(np.float32, st.integers(1, 30), elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_a_snapshot_round_trips_to_the_bit(values: Vector) -> None:
    data = encode_snapshot(values, -values)
    params, momentum = decode_snapshot(data, values.size)
    assert params.tobytes() == values.tobytes()
    assert momentum.tobytes() == (-values).tobytes()
    assert encode_snapshot(params, momentum) == data


def test_a_snapshot_is_a_safetensors_file() -> None:
    params, momentum = random(37, 1), random(37, 2)
    data = encode_snapshot(params, momentum)
    assert data == safetensors.numpy.save({"params": params, "momentum": momentum})


def test_two_shapes_do_not_make_a_snapshot() -> None:
    with pytest.raises(ValueError, match="shapes"):
        encode_snapshot(random(3, 1), random(4, 1))


@given(cut=st.integers(0, 400), grown=st.binary(max_size=9))
def test_another_size_is_refused(cut: int, grown: bytes) -> None:
    data = encode_snapshot(random(20, 1), random(20, 2))
    changed = data[:cut] + grown
    if len(changed) != len(data):
        with pytest.raises(ProtocolViolation):
            decode_snapshot(changed, 20)


@given(at=st.integers(0, 127), value=st.integers(0, 255))
def test_another_head_is_refused(at: int, value: int) -> None:
    data = bytearray(encode_snapshot(random(20, 1), random(20, 2)))
    if data[at] != value:
        data[at] = value
        with pytest.raises(ProtocolViolation, match="not a snapshot"):
            decode_snapshot(bytes(data), 20)


def test_a_snapshot_of_another_stage_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="21 values"):
        decode_snapshot(encode_snapshot(random(20, 1), random(20, 2)), 21)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    for data in (encode_snapshot(vector(1.0, bad), vector(0, 0)), encode_snapshot(vector(0, 0), vector(1.0, bad))):
        with pytest.raises(ProtocolViolation, match="finite"):
            decode_snapshot(data, 2)


def test_the_outer_step_runs_without_torch() -> None:
    code = "import sys, subnet.training.outer, subnet.merging.reduce; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, check=False, timeout=60)
    assert done.returncode == 0

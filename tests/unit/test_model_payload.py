"""Bytes at a cut: what goes out comes back rounded once, and hostile bytes are refused."""

import math

import numpy as np
import pytest
import torch

from subnet.config import Bottleneck
from subnet.errors import ProtocolViolation
from subnet.model.payload import MAX_ABS, as_sent, decode_payload, encode_payload
from tests.numerics.support import small_config


@pytest.mark.parametrize("bottleneck", [Bottleneck.RESBM, Bottleneck.IOTA, Bottleneck.NONE])
def test_decode_gives_the_rounded_values_and_encodes_to_the_same_bytes(bottleneck: Bottleneck) -> None:
    config = small_config(bottleneck)
    values = torch.randn(config.wire_shape, generator=torch.Generator().manual_seed(1))
    data = encode_payload(config, values)
    decoded = decode_payload(config, data)
    assert torch.equal(decoded, as_sent(config, values))
    assert encode_payload(config, decoded) == data


def test_bf16_is_little_endian() -> None:
    config = small_config()
    values = torch.zeros(config.wire_shape)
    values[0, 0, 0] = 1.0
    assert encode_payload(config, values)[:4] == b"\x80\x3f\x00\x00"


def test_gradient_is_rounded_on_its_way_back() -> None:
    config = small_config()
    values = torch.zeros(config.wire_shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(as_sent(config, values), values, torch.full(config.wire_shape, 1 / 3))
    assert torch.equal(gradient, torch.full(config.wire_shape, 1 / 3).bfloat16().float())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2 * MAX_ABS])
def test_values_out_of_bounds_are_refused_on_both_sides(value: float) -> None:
    config = small_config()
    values = torch.zeros(config.wire_shape)
    values[1, 3, 2] = value
    with pytest.raises(ProtocolViolation, match="NaN, infinity or a value beyond"):
        encode_payload(config, values)
    with pytest.raises(ProtocolViolation, match="NaN, infinity or a value beyond"):
        decode_payload(config, values.to(torch.bfloat16).view(torch.int16).numpy().tobytes())


@pytest.mark.parametrize("size", [0, 1, 2 * 16 * 4 * 2 - 1, 2 * 16 * 4 * 2 + 1, 2 * 16 * 4 * 4])
def test_wrong_sizes_are_refused(size: int) -> None:
    with pytest.raises(ProtocolViolation, match="this run sends 256"):
        decode_payload(small_config(), bytes(size))


def test_the_control_carries_nothing() -> None:
    config = small_config(Bottleneck.K0)
    assert decode_payload(config, bytes(64)).abs().max() == 0
    with pytest.raises(ProtocolViolation, match="zeros"):
        decode_payload(config, np.ones(32, dtype="<i2").tobytes())

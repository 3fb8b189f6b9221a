"""Tensors as they cross a cut: raw little-endian bf16, or float32 where nothing is compressed.

Bytes from a peer are checked for size, finite values and magnitude before any arithmetic (trust.md 6).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subnet.config import Bottleneck, RunConfig
from subnet.errors import ProtocolViolation

MAX_ABS = 1e6
"""No honest activation or gradient comes near this; beyond it products overflow float32."""


def encode_payload(config: RunConfig, values: Tensor) -> bytes:
    """Bytes to send. Raises ProtocolViolation when the values would be refused by their receiver."""
    wide = values.detach().to(torch.float32)
    _check_values(wide, config)
    if config.wire_item_bytes == 4:
        return wide.contiguous().numpy().astype("<f4", copy=False).tobytes()
    return wide.to(torch.bfloat16).contiguous().view(torch.int16).numpy().astype("<i2", copy=False).tobytes()


def decode_payload(config: RunConfig, data: bytes) -> Tensor:
    """(B, T, K) float32 from a peer's bytes. Raises ProtocolViolation."""
    expected = math.prod(config.wire_shape) * config.wire_item_bytes
    if len(data) != expected:
        raise ProtocolViolation(f"payload of {len(data)} bytes, this run sends {expected}")
    if config.wire_item_bytes == 4:
        values = torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    else:
        bits = torch.from_numpy(np.frombuffer(data, dtype="<i2").astype(np.int16))
        values = bits.view(torch.bfloat16).to(torch.float32)
    _check_values(values, config)
    return values.reshape(config.wire_shape)


def _check_values(values: Tensor, config: RunConfig) -> None:
    largest = float(values.abs().max())
    if not math.isfinite(largest) or largest > MAX_ABS:
        raise ProtocolViolation(f"payload holds NaN, infinity or a value beyond {MAX_ABS:g}")
    if config.model.bottleneck is Bottleneck.K0 and largest != 0:
        raise ProtocolViolation("payload of the k0 control must be zeros")


class _Rounded(torch.autograd.Function):
    """What encoding and decoding does to the values, and to the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].to(torch.bfloat16).to(torch.float32)


def as_sent(config: RunConfig, values: Tensor) -> Tensor:
    """The cut inside one process: the same rounding both ways, without bytes."""
    if config.wire_item_bytes == 4:
        return values
    rounded: Tensor = _Rounded.apply(values)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return rounded

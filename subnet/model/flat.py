"""Params of a stage as one float32 vector and back, in the sorted order of their names."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subnet.errors import ProtocolViolation


def flatten(params: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
    """One vector with a copy of every value."""
    pieces = [params[name].detach().reshape(-1) for name in sorted(params)]
    return torch.cat(pieces).numpy().astype(np.float32, copy=False)


def unflatten(vector: npt.NDArray[np.float32], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Params with their own memory. Raises ProtocolViolation when the vector has the wrong type or length, or is not finite."""
    expected = sum(math.prod(shape) for shape in shapes.values())
    if vector.dtype != np.float32 or vector.shape != (expected,):
        raise ProtocolViolation(f"params must be {expected} float32 values, got {vector.dtype} {vector.shape}")
    if not np.isfinite(vector).all():
        raise ProtocolViolation("params hold NaN or infinity: refuse this snapshot and load another copy")
    params: dict[str, Tensor] = {}
    start = 0
    for name in sorted(shapes):
        stop = start + math.prod(shapes[name])
        params[name] = torch.from_numpy(vector[start:stop].copy()).reshape(shapes[name])
        start = stop
    return params

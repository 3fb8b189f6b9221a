"""Outer step: SGD with Nesterov momentum on merged pseudo-gradients, and the snapshot that an epoch starts from (papers.md A2).

Numpy only. Every multiplication and every addition is its own float32 operation, never fused, so that all miners of a stage
get the same bits and their digests can be compared. P elements of a stage's flat parameter vector.
"""

import json

import numpy as np
import numpy.typing as npt

from subnet.config import TrainingConfig
from subnet.errors import ProtocolViolation

Vector = npt.NDArray[np.float32]

_WIRE_FLOAT = np.dtype("<f4")
_HEAD_ALIGNMENT = 8


def pseudo_gradient(anchor_P: Vector, local_P: Vector) -> Vector:
    """Anchor params minus local params, in that order: subtracting it moves the anchor to the local params."""
    return np.subtract(anchor_P, local_P, dtype=np.float32)


def outer_step(
    params_P: Vector, momentum_P: Vector, merged_P: Vector, training: TrainingConfig
) -> tuple[Vector, Vector]:
    """(params, momentum) after m = mu*m + g and params -= lr*(g + mu*m), rounding after each operation."""
    learning_rate = np.float32(training.outer_learning_rate)
    decay = np.float32(training.outer_momentum)
    moved_P = np.multiply(momentum_P, decay, dtype=np.float32)
    np.add(moved_P, merged_P, out=moved_P)
    step_P = np.multiply(moved_P, decay, dtype=np.float32)
    np.add(merged_P, step_P, out=step_P)
    np.multiply(step_P, learning_rate, out=step_P)
    np.subtract(params_P, step_P, out=step_P)
    return step_P, moved_P


def keep_params(params_P: Vector, momentum_P: Vector, merged_P: Vector) -> tuple[Vector, Vector]:
    """(params, momentum) of a stage with one miner: nothing was averaged, so its local params stand (papers.md A6)."""
    return np.subtract(params_P, merged_P, dtype=np.float32), momentum_P


def encode_snapshot(params_P: Vector, momentum_P: Vector) -> bytes:
    """Params and outer momentum as a safetensors file.

    The head is written here and not by the library, so that a host with another version of it computes the same digest.
    """
    if params_P.shape != momentum_P.shape:
        raise ValueError(f"params {params_P.shape} and momentum {momentum_P.shape} have different shapes")
    head = _head(params_P.size)
    vectors = (np.ascontiguousarray(vector, dtype=_WIRE_FLOAT).data for vector in (momentum_P, params_P))
    return b"".join([head, *vectors])


def decode_snapshot(data: bytes, num_elements: int) -> tuple[Vector, Vector]:
    """(params, momentum) of exactly `num_elements` finite values each. Raises ProtocolViolation."""
    head = _head(num_elements)
    expected = len(head) + 2 * num_elements * _WIRE_FLOAT.itemsize
    if len(data) != expected or data[: len(head)] != head:
        raise ProtocolViolation(f"not a snapshot of {num_elements} values: {len(data)} bytes, expected are {expected}")
    values = np.frombuffer(data, dtype=_WIRE_FLOAT, offset=len(head)).astype(np.float32)
    if not bool(np.isfinite(values).all()):
        raise ProtocolViolation("a snapshot holds values that are not finite")
    return values[num_elements:], values[:num_elements]


def _head(num_elements: int) -> bytes:
    """Head of a safetensors file: length, then JSON that places both tensors, padded with spaces to 8 bytes."""
    size = num_elements * _WIRE_FLOAT.itemsize
    places = {"momentum": [0, size], "params": [size, 2 * size]}
    tensors = {name: {"dtype": "F32", "shape": [num_elements], "data_offsets": place} for name, place in places.items()}
    body = json.dumps(tensors, separators=(",", ":")).encode()
    body += b" " * (-len(body) % _HEAD_ALIGNMENT)
    return len(body).to_bytes(8, "little") + body

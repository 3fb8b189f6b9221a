"""What the state of an optimizer can be at all, whatever was trained on: bounds that clipped gradients imply.

The published params say where an epoch begins; the optimizer's state is a miner's own, and the first checkpoint of an epoch may
hold any. Without bounds a forged one makes one honest step a leap to any params, and every replay repeats it (DESIGN.md D90).

Each step's gradient g has at most the stage's norm limit L, and every state begins with zeros. So a mean of gradients (Muon's
momentum, AdamW's m) is no longer than L, AdamW's mean of squares v sums to at most L^2, and by Cauchy-Schwarz over
m = sum (1 - a) a^k g_k and v = sum (1 - b) b^k g_k^2 no |m| exceeds RATIO * sqrt(v).
"""

import math

import numpy as np

from subnet.config import RunConfig
from subnet.errors import ProtocolViolation
from subnet.training.checkpoint import STATE_KINDS, CheckpointState
from subnet.training.optimizers import ADAMW_BETAS, clip_limit
from subnet.types import StageIndex

ROUNDING = 1.01
"""What float32 adds to a bound over a state's life: some 1e-6, for old rounding decays with what it was made on."""
UNDERFLOW = 1e-15
"""A gradient below 1e-19 leaves its mark in m, while its square vanishes; beside AdamW's epsilon of 1e-8 this is nothing."""


def largest_ratio(betas: tuple[float, float]) -> float:
    """Supremum of |m| / sqrt(v) over all histories of gradients: 1.165 for (.9, .95)."""
    mean, square = betas
    return math.sqrt((1 - mean) ** 2 / (1 - square) / (1 - mean**2 / square))


def check_reachable(config: RunConfig, stage: StageIndex, found: CheckpointState) -> None:
    """Raises ProtocolViolation: no history of clipped gradients leads to this optimizer state."""
    limit = clip_limit(config, stage) * ROUNDING
    momentum, means, squares = (found.flat_state(kind) for kind in STATE_KINDS)
    norms = {
        "momentum": _norm(momentum),
        "mean": _norm(means),
        "mean of squares": math.sqrt(float(squares.sum(dtype=np.float64))),
    }
    for name, length in norms.items():
        if length > limit:
            raise ProtocolViolation(
                f"the optimizer's {name} comes to {length:.3g}, clipped gradients to {limit:.3g} at most"
            )
    bounds = np.sqrt(squares, dtype=np.float64) * (largest_ratio(ADAMW_BETAS) * ROUNDING) + UNDERFLOW
    if bool((np.abs(means) > bounds).any()):
        raise ProtocolViolation("the optimizer's mean is larger than any gradients with its mean of squares have")


def _norm(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    return math.sqrt(float(np.square(values, dtype=np.float64).sum()))

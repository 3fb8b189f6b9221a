"""What keeps one miner's slice from steering a merge: norm clip, cosine gate, weight cap (trust.md 5).

E elements of a shard. Every number here decides bits that two reducers must agree on, so sums run in one fixed tree of
element-wise additions: no BLAS, no library sum whose order depends on the host.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Slice = npt.NDArray[np.float32]

MIN_FOR_COSINE = 4
"""With fewer miners the median is one of them or lies between two: no direction can be called the odd one out."""
COSINE_MADS = 4.0
COSINE_SLACK = 0.1
"""Least distance below the median that the gate allows: among few miners the MAD is now and then almost zero."""


def tree_sum(values_E: Floats) -> float:
    """Sum by halving: the same additions in the same order on every host."""
    while values_E.size > 1:
        half = values_E.size // 2
        folded = values_E[:half] + values_E[half : 2 * half]
        values_E = np.append(folded, values_E[2 * half :]) if values_E.size % 2 else folded
    return float(values_E[0]) if values_E.size else 0.0


def dot(left_E: npt.NDArray[np.floating], right_E: npt.NDArray[np.floating]) -> float:
    """Inner product in float64; squares of float32 values are exact in it."""
    return tree_sum(np.multiply(left_E, right_E, dtype=np.float64))


def norm(values_E: npt.NDArray[np.floating]) -> float:
    """Euclidean length."""
    return math.sqrt(dot(values_E, values_E))


def median(values: Sequence[float]) -> float:
    """Middle value, or the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0


def clip_norms(slices: Sequence[Slice], norm_cap: float) -> list[Slice]:
    """Slices longer than `norm_cap` times the median length, scaled down to it and rounded to float32; others untouched."""
    norms = [norm(values) for values in slices]
    limit = norm_cap * median(norms)
    return [
        values if length <= limit else np.multiply(values, limit / length, dtype=np.float64).astype(np.float32)
        for values, length in zip(slices, norms, strict=True)
    ]


def agreeing(slices: Sequence[Slice]) -> list[bool]:
    """For each slice, whether its cosine to the coordinate-wise median lies within 4 MAD of what is usual."""
    if len(slices) < MIN_FOR_COSINE:
        return [True] * len(slices)
    middle_E = _median_slice(slices)
    length = norm(middle_E)
    cosines = [_cosine(values, middle_E, length) for values in slices]
    usual = median(cosines)
    spread = median([abs(cosine - usual) for cosine in cosines])
    return [cosine >= usual - max(COSINE_MADS * spread, COSINE_SLACK) for cosine in cosines]


def cap_batches(num_batches: Sequence[int], weight_cap: float) -> list[int]:
    """Merge weights: batches done, at most `weight_cap` times their median (rounded down, at least 1)."""
    limit = max(1, math.floor(weight_cap * median([float(count) for count in num_batches])))
    return [min(count, limit) for count in num_batches]


def _median_slice(slices: Sequence[Slice]) -> Floats:
    ordered = np.sort(np.stack(slices), axis=0)
    low, high = ordered[(len(slices) - 1) // 2], ordered[len(slices) // 2]
    middle: Floats = np.add(low, high, dtype=np.float64) / 2.0
    return middle


def _cosine(values_E: Slice, middle_E: Floats, length: float) -> float:
    """Cosine of an angle; a zero vector points nowhere and gets 0."""
    scale = norm(values_E) * length
    return dot(values_E, middle_E) / scale if scale > 0.0 else 0.0

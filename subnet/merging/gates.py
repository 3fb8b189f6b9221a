"""What keeps one miner's slice from steering a merge: norm clip, cosine gate, weight cap (trust.md 5).

E elements of a shard. Every number here decides bits that two reducers must agree on, so sums run in one fixed order of
element-wise additions: no BLAS, no library sum whose order depends on the host.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Slice = npt.NDArray[np.float32]

MIN_FOR_COSINE = 4
"""With fewer miners the median is one of them or lies between two: no direction can be called the odd one out."""
COSINE_MADS = 4.0
COSINE_SLACK = 0.1
"""Least distance below the median that the gate allows: among few miners the MAD is now and then almost zero."""
BLOCK = 1 << 15
"""Elements worked on at a time: what is made of them on the way stays in a core's cache."""


def blocks(num_elements: int) -> Iterator[slice]:
    """The blocks of a shard, in order; the last may be shorter."""
    return (slice(at, min(at + BLOCK, num_elements)) for at in range(0, num_elements, BLOCK))


def tree_sum(values_E: Floats) -> float:
    """Sum by halving: the same additions in the same order on every host."""
    while values_E.size > 1:
        half = values_E.size // 2
        folded = values_E[:half] + values_E[half : 2 * half]
        values_E = np.append(folded, values_E[2 * half :]) if values_E.size % 2 else folded
    return float(values_E[0]) if values_E.size else 0.0


def dot(left_E: npt.NDArray[np.floating], right_E: npt.NDArray[np.floating]) -> float:
    """Inner product in float64; squares of float32 values are exact in it. Blocks are added up, then one tree sums the block."""
    sums = np.zeros(min(left_E.size, BLOCK))
    scratch = np.empty_like(sums)
    for block in blocks(left_E.size):
        products = widened(left_E[block], scratch)
        np.multiply(products, products if right_E is left_E else right_E[block], out=products)
        sums[: products.size] += products
    return tree_sum(sums)


def widened(values_E: npt.NDArray[np.floating], scratch: Floats) -> Floats:
    """A block in float64, in `scratch`: numpy multiplies mixed types by way of buffers of its own, at half the speed."""
    wide = scratch[: values_E.size]
    wide[:] = values_E
    return wide


def norm(values_E: npt.NDArray[np.floating]) -> float:
    """Euclidean length."""
    return math.sqrt(dot(values_E, values_E))


def norms(slices: Sequence[Slice]) -> list[float]:
    """Euclidean length of each slice, which both gates ask for."""
    return [norm(values) for values in slices]


def median(values: Sequence[float]) -> float:
    """Middle value, or the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0


def clip_norms(slices: Sequence[Slice], lengths: Sequence[float], norm_cap: float) -> list[Slice]:
    """Slices longer than `norm_cap` times the median length, scaled down to it and rounded to float32; others untouched."""
    limit = norm_cap * median(lengths)
    return [
        values if length <= limit else np.multiply(values, limit / length, dtype=np.float64).astype(np.float32)
        for values, length in zip(slices, lengths, strict=True)
    ]


def agreeing(slices: Sequence[Slice], lengths: Sequence[float]) -> list[bool]:
    """For each slice, whether its cosine to the coordinate-wise median lies within 4 MAD of what is usual."""
    if len(slices) < MIN_FOR_COSINE:
        return [True] * len(slices)
    middle_E = np.empty(slices[0].size)
    for block in blocks(middle_E.size):
        middle_E[block] = coordinate_median([values[block] for values in slices])
    usual_length = norm(middle_E)
    cosines = [
        _cosine(dot(values, middle_E), length * usual_length) for values, length in zip(slices, lengths, strict=True)
    ]
    usual = median(cosines)
    spread = median([abs(cosine - usual) for cosine in cosines])
    return [cosine >= usual - max(COSINE_MADS * spread, COSINE_SLACK) for cosine in cosines]


def cap_batches(num_batches: Sequence[int], weight_cap: float) -> list[int]:
    """Merge weights: batches done, at most `weight_cap` times their median (rounded down, at least 1)."""
    limit = max(1, math.floor(weight_cap * median([float(count) for count in num_batches])))
    return [min(count, limit) for count in num_batches]


def coordinate_median(rows: Sequence[Slice]) -> Floats:
    """Rows are compared whole, in pairs: for four, thirty times as fast as sorting the values of each coordinate."""
    rows = list(rows)
    for low, high, is_low_used, is_high_used in _selection(len(rows)):
        one, other = rows[low], rows[high]
        if is_low_used:
            rows[low] = np.minimum(one, other)
        if is_high_used:
            rows[high] = np.maximum(one, other)
    middle: Floats = np.add(rows[(len(rows) - 1) // 2], rows[len(rows) // 2], dtype=np.float64) / 2.0
    return middle


@functools.cache
def _selection(num_rows: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """The comparisons on which the middle two rows depend, and which of their results do; seen from the last to the first.

    Of those two only the sum is asked for, so that they need not be compared with each other.
    """
    used = {(num_rows - 1) // 2, num_rows // 2}
    found = []
    for low, high in reversed(_comparisons(num_rows)):
        if {low, high} == used or not {low, high} & used:
            continue
        found.append((low, high, low in used, high in used))
        used |= {low, high}
    return tuple(reversed(found))


@functools.cache
def _comparisons(num_rows: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort as a network (Knuth, TAOCP 3, 5.2.2 M): pairs to put in order, one after the other."""
    found, merged = [], 1
    while merged < num_rows:
        apart = merged
        while apart:
            for first in range(apart % merged, num_rows - apart, 2 * apart):
                found += [
                    (low, low + apart)
                    for low in range(first, min(first + apart, num_rows - apart))
                    if low // (2 * merged) == (low + apart) // (2 * merged)
                ]
            apart //= 2
        merged *= 2
    return tuple(found)


def _cosine(product: float, lengths: float) -> float:
    """Cosine of an angle, from an inner product and the product of lengths; a zero vector points nowhere and gets 0."""
    return product / lengths if lengths > 0.0 else 0.0

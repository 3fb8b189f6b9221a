"""One merged shard from every miner's slice, in arithmetic that two reducers repeat to the bit (trust.md 5)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from subnet.config import MergeConfig
from subnet.errors import ProtocolViolation
from subnet.merging import gates

MAX_TOTAL_BATCHES = 1 << 29
"""A float32 value times fewer batches than this is exact in float64 (24 + 29 bits), and so is every partial sum of equal
vectors: merging identical vectors gives the vector, whatever the batch counts."""


def reduce_shard(
    slices: Sequence[npt.NDArray[np.float32]], num_batches: Sequence[int], merge: MergeConfig
) -> npt.NDArray[np.float32]:
    """Mean of `slices` weighted by batches done, gated; both sequences in hotkey order.

    Each slice is clipped in float32; a float64 product and a float64 sum are separate operations, in the order given; one
    division and one rounding end it. Raises ProtocolViolation when sizes or batch counts cannot be right.
    """
    _check(slices, num_batches)
    counts = gates.cap_batches(num_batches, merge.weight_cap)
    lengths = gates.norms(slices)
    clipped = gates.clip_norms(slices, lengths, merge.norm_cap)
    taken = [
        (values, count)
        for values, count, is_taken in zip(clipped, counts, gates.agreeing(slices, lengths), strict=True)
        if is_taken
    ]
    mean, num_taken = np.empty_like(taken[0][0]), float(sum(count for _, count in taken))
    scratch, sums = np.empty(min(mean.size, gates.BLOCK)), np.empty(min(mean.size, gates.BLOCK))
    for block in gates.blocks(mean.size):
        # starts from the first product, not from zeros: 0.0 + -0.0 would lose the sign of a negative zero
        total = gates.widened(taken[0][0][block], sums)
        total *= float(taken[0][1])
        for values, count in taken[1:]:
            product = gates.widened(values[block], scratch)
            product *= float(count)
            total += product
        total /= num_taken
        mean[block] = total
    return mean


def _check(slices: Sequence[npt.NDArray[np.float32]], num_batches: Sequence[int]) -> None:
    if not slices or len(slices) != len(num_batches):
        raise ProtocolViolation(f"{len(slices)} slices and {len(num_batches)} batch counts do not make a merge")
    if len({values.shape for values in slices}) != 1:
        raise ProtocolViolation("slices of one shard have different sizes")
    if min(num_batches) < 1 or sum(num_batches) >= MAX_TOTAL_BATCHES:
        raise ProtocolViolation(f"batch counts must be at least 1 and sum to less than {MAX_TOTAL_BATCHES}")

"""Reducing one shard from stored uploads: the same for a reducer and for the orchestrator as referee (trust.md 5)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from subnet import wire
from subnet.config import MergeConfig
from subnet.errors import ProtocolViolation
from subnet.merging.reduce import reduce_shard
from subnet.merging.schedule import ITEM_BYTES
from subnet.merging.upload import check_chunks, to_bytes, to_vector
from subnet.ports import Compute
from subnet.types import BlobRef, Hotkey

GetSlice = Callable[[BlobRef, int, int], Awaitable[bytes]]
"""(object, first byte, number of bytes) -> bytes."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A shard's merged values, and whose uploads could not be used for it: not as committed, or no numbers."""

    data: bytes
    left_out: tuple[Hotkey, ...] = ()


async def reduced(
    plan: wire.MergePlan, shard: wire.ShardPlan, get_slice: GetSlice, *, merge: MergeConfig, compute: Compute
) -> Reduced:
    """This shard, merged. An upload whose chunks are not the committed ones is left out, by every reducer alike.

    With no upload left the shard does not move. Raises what `get_slice` raises.
    """
    slices, num_batches, left_out = [], [], []
    for upload in plan.uploads:
        data = await get_slice(upload.ref, shard.start * ITEM_BYTES, (shard.stop - shard.start) * ITEM_BYTES)
        try:
            check_chunks(
                data,
                shard.start,
                num_elements=plan.num_elements,
                chunk_digests=upload.chunk_digests,
                chunk_bytes=merge.chunk_bytes,
            )
            values = to_vector(data, shard.stop - shard.start)
        except ProtocolViolation:
            left_out.append(upload.hotkey)
            continue
        slices.append(values)
        num_batches.append(upload.num_batches)
    if not slices:
        return Reduced(to_bytes(np.zeros(shard.stop - shard.start, dtype=np.float32)), tuple(left_out))
    data = await compute.run(lambda: to_bytes(reduce_shard(slices, num_batches, merge)))
    return Reduced(data, tuple(left_out))

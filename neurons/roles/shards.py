"""Reducing one shard from stored uploads: the same for a reducer and for the orchestrator as referee (trust.md 5)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from subnet import wire
from subnet.config import MergeConfig
from subnet.errors import ProtocolViolation
from subnet.merging.reduce import reduce_shard
from subnet.merging.schedule import ITEM_BYTES
from subnet.merging.upload import check_chunks, to_buffer, to_vector
from subnet.orchestration.objects import copy_key
from subnet.ports import Compute
from subnet.types import BlobRef, Hotkey

GetSlice = Callable[[BlobRef, int, int], Awaitable[bytes | memoryview]]
"""(object, first byte, number of bytes) -> bytes, fewer only where the object ends."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A shard's merged values, and whose uploads could not be used for it: not as committed, or no numbers."""

    data: memoryview
    left_out: tuple[Hotkey, ...] = ()


def copies(plan: wire.MergePlan, merged: wire.ReducedShard) -> list[BlobRef]:
    """Where else the merged shard should lie: as the other reducer stored it.

    A bucket binds the size of an object and not its digest, so under the accepted key may lie what its owner liked.
    """
    keys = [copy_key(merged.ref.key, hotkey=hotkey) for hotkey in plan.shards[merged.shard].reducers]
    ref = merged.ref
    return [BlobRef(key=key, digest=ref.digest, size_bytes=ref.size_bytes) for key in keys if key != ref.key]


async def reduced(
    plan: wire.MergePlan, shard: wire.ShardPlan, get_slice: GetSlice, *, merge: MergeConfig, compute: Compute
) -> Reduced:
    """This shard, merged. An upload whose chunks are not the committed ones is left out, by every reducer alike.

    With no upload left the shard does not move. Raises what `get_slice` raises.
    """
    num_elements = shard.stop - shard.start
    parts = [
        await get_slice(upload.ref, shard.start * ITEM_BYTES, num_elements * ITEM_BYTES) for upload in plan.uploads
    ]

    def reduce() -> Reduced:
        slices, num_batches, left_out = [], [], []
        for upload, data in zip(plan.uploads, parts, strict=True):
            try:
                values = to_vector(data, num_elements)
                check_chunks(
                    data,
                    shard.start,
                    num_elements=plan.num_elements,
                    chunk_digests=upload.chunk_digests,
                    chunk_bytes=merge.chunk_bytes,
                )
            except ProtocolViolation:
                left_out.append(upload.hotkey)
                continue
            slices.append(values)
            num_batches.append(upload.num_batches)
        merged = reduce_shard(slices, num_batches, merge) if slices else np.zeros(num_elements, dtype=np.float32)
        return Reduced(to_buffer(merged), tuple(left_out))

    return await compute.run(reduce)

"""Four or more pseudo-gradients of 100 MB, and the plan by which they are merged."""

from typing import Any

import numpy as np

from benches.fleet import RUN
from subnet import wire
from subnet.config import RunConfig
from subnet.merging.schedule import shard_plans
from subnet.orchestration.objects import object_key
from subnet.types import BlobRef, Epoch, Hotkey, StageIndex

NUM_ELEMENTS = 25_000_000
VECTOR_BYTES = 4 * NUM_ELEMENTS
EPOCH, STAGE = Epoch(0), StageIndex(0)
CONFIG = RunConfig()


def vector(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A pseudo-gradient; values do not matter for speed, but none may be an outlier."""
    return np.random.default_rng(number).standard_normal(NUM_ELEMENTS, dtype=np.float32)


def merge_plan(hotkeys: list[Hotkey], uploaded: list[dict[str, Any]], epoch: Epoch) -> wire.MergePlan:
    """The plan that the state machine would make of these commitments."""
    uploads = [
        wire.Upload(
            hotkey=hotkey,
            base_epoch=epoch,
            num_batches=8,
            ref=BlobRef(
                key=object_key(RUN, epoch=epoch, hotkey=hotkey, kind="upload", name="whole", content=found["digest"]),
                digest=found["digest"],
                size_bytes=VECTOR_BYTES,
            ),
            chunk_digests=tuple(found["chunks"]),
        )
        for hotkey, found in zip(hotkeys, uploaded, strict=True)
    ]
    return wire.MergePlan(
        epoch=epoch,
        stage=STAGE,
        num_elements=NUM_ELEMENTS,
        uploads=tuple(sorted(uploads, key=lambda upload: upload.hotkey)),
        shards=shard_plans(
            NUM_ELEMENTS, hotkeys, beacon="bench", stage=STAGE, epoch=epoch, chunk_bytes=CONFIG.merge.chunk_bytes
        ),
    )

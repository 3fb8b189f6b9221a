"""Creating a run: genesis params of every stage, seeded, published before anybody trains (trust.md 5)."""

import numpy as np

from incentives.config import IncentiveConfig
from subnet import wire
from subnet.config import RunConfig, config_bytes
from subnet.frames import digest
from subnet.model.init import initial_params
from subnet.model.partition import num_elements, stage_flops
from subnet.orchestration.events import Created
from subnet.orchestration.objects import object_key
from subnet.ports import BlobStore
from subnet.training.outer import encode_snapshot
from subnet.types import BlobRef, Digest, Hotkey, StageIndex


async def create_run(
    config: RunConfig,
    incentives: IncentiveConfig,
    *,
    run_id: str,
    owner: Hotkey,
    corpus_digest: Digest,
    blobs: BlobStore,
    beacon: str,
    at_s: float,
) -> Created:
    """Store the genesis snapshots and return the run's first event."""
    snapshots = []
    stages = [StageIndex(stage) for stage in range(config.training.num_stages)]
    for stage in stages:
        params = initial_params(config, stage)
        data = encode_snapshot(params, np.zeros_like(params))
        content = digest(data)
        key = object_key(run_id, epoch=0, hotkey=owner, kind="snapshot", name=f"genesis-s{stage}", content=content)
        await blobs.put(key, data)
        snapshots.append(BlobRef(key=key, digest=content, size_bytes=len(data)))
    return Created(
        at_s=at_s,
        run_id=run_id,
        config_json=config_bytes(config).decode(),
        incentives_json=wire.encode(incentives).decode(),
        corpus_digest=corpus_digest,
        snapshots=tuple(snapshots),
        num_elements=tuple(num_elements(config, stage) for stage in stages),
        stage_flops=tuple(stage_flops(config, stage) for stage in stages),
        beacon=beacon,
    )

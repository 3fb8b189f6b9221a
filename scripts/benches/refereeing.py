"""The orchestrator as referee of a merge of 100 MB by four miners, shard after shard, while it serves."""

import asyncio

from benches.fleet import keys
from benches.uploads import EPOCH, merge_plan, vector
from neurons.roles.ports import OrchestratorPorts
from neurons.roles.referee import Referee
from subnet import wire
from subnet.config import RunConfig
from subnet.merging.upload import chunk_digests, to_bytes, upload_digest
from subnet.orchestration.events import RefereeShard

NUM_UPLOADS = 4


class Refereeing:
    """Recomputes from `start` to `stop`, one shard at a time: the most that a merge of false copies asks for."""

    def __init__(self, config: RunConfig, ports: OrchestratorPorts, run_id: str) -> None:
        self.num_shards = 0
        self._chunk_bytes = config.merge.chunk_bytes
        self._blobs = ports.blobs
        self._referee = Referee(config=config, ports=ports, run_id=lambda: run_id)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Store the uploads, and begin."""
        hotkeys = [key.hotkey for key in keys(NUM_UPLOADS)]
        uploads = [await asyncio.to_thread(to_bytes, vector(number)) for number in range(NUM_UPLOADS)]
        committed = [
            {"digest": upload_digest(data), "chunks": chunk_digests(data, self._chunk_bytes)} for data in uploads
        ]
        plan = merge_plan(hotkeys, committed, EPOCH)
        refs = {upload.hotkey: upload.ref for upload in plan.uploads}
        for hotkey, data in zip(hotkeys, uploads, strict=True):
            await self._blobs.put(refs[hotkey].key, data)
        self._task = asyncio.create_task(self._recompute(plan))

    async def stop(self) -> None:
        """End after the shard in progress has been given up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()

    async def _recompute(self, plan: wire.MergePlan) -> None:
        while True:
            for shard in plan.shards:
                await self._referee.shard(RefereeShard(plan=plan, shard=shard.shard))
                self.num_shards += 1

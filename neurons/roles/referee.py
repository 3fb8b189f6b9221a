"""The orchestrator as referee: it recomputes what two miners did not agree on, in the same arithmetic (trust.md 5)."""

import logging
from collections.abc import Callable
from functools import partial

from neurons.roles.ports import OrchestratorPorts
from neurons.roles.shards import Reduced, copies, reduced
from subnet import wire
from subnet.config import RunConfig
from subnet.errors import NotFound, TransientFailure
from subnet.frames import digest
from subnet.merging.upload import to_vector
from subnet.orchestration.events import (
    AuditShard,
    OuterRefereed,
    RefereeOuter,
    RefereeShard,
    ShardRecomputed,
    ShardRefereed,
)
from subnet.orchestration.objects import object_key
from subnet.training.outer import decode_snapshot, encode_snapshot, keep_params, outer_step
from subnet.types import BlobRef

log = logging.getLogger("strata.orchestrator")


class Referee:
    """Reads uploads and shards from the store, and stores what it computes under the owner's key."""

    def __init__(self, *, config: RunConfig, ports: OrchestratorPorts, run_id: Callable[[], str]) -> None:
        self._config = config
        self._ports = ports
        self._run_id = run_id

    async def shard(self, effect: RefereeShard) -> ShardRefereed:
        """Recompute one shard and store it. Raises NotFound, TransientFailure."""
        plan = effect.plan
        found = await self._reduced(plan, effect.shard)
        ref = await self._store(plan.epoch, kind="shard", name=f"s{plan.stage}-{effect.shard}", data=found.data)
        log.info("shard refereed", extra={"epoch": plan.epoch, "stage": plan.stage, "shard": effect.shard})
        return ShardRefereed(
            at_s=self._ports.clock.now(),
            epoch=plan.epoch,
            stage=plan.stage,
            shard=effect.shard,
            ref=ref,
            left_out=found.left_out,
        )

    async def audited_shard(self, effect: AuditShard) -> ShardRecomputed:
        """Recompute a shard on which its reducers agree; stored only when it is not theirs. Raises NotFound, TransientFailure."""
        plan, ref = effect.plan, effect.accepted
        found = await self._reduced(plan, effect.shard)
        if await self._ports.compute.run(partial(digest, found.data)) != ref.digest:
            name = f"audit-s{plan.stage}-{effect.shard}"
            ref = await self._store(plan.epoch, kind="shard", name=name, data=found.data)
            log.warning(
                "agreeing shard is false", extra={"epoch": plan.epoch, "stage": plan.stage, "shard": effect.shard}
            )
        return ShardRecomputed(
            at_s=self._ports.clock.now(),
            epoch=plan.epoch,
            stage=plan.stage,
            shard=effect.shard,
            ref=ref,
            left_out=found.left_out,
        )

    async def _reduced(self, plan: wire.MergePlan, shard: int) -> Reduced:
        async def get_slice(ref: BlobRef, start: int, size_bytes: int) -> bytes:
            return await self._ports.blobs.get(ref.key, start=start, size_bytes=size_bytes)

        merge, compute = self._config.merge, self._ports.compute
        return await reduced(plan, plan.shards[shard], get_slice, merge=merge, compute=compute)

    async def _merged(self, plan: wire.MergePlan, shard: wire.ReducedShard) -> bytes | memoryview:
        """A merged shard as it was announced, or where no reducer stored that, the orchestrator's own sum."""
        for ref in (shard.ref, *copies(plan, shard)):
            try:
                data = await self._ports.blobs.get(ref.key)
            except NotFound:
                continue
            if await self._ports.compute.run(partial(digest, data)) == ref.digest:
                return data
            log.warning("merged shard is not what was announced", extra={"key": ref.key})
        return (await self._reduced(plan, shard.shard)).data

    async def outer(self, effect: RefereeOuter) -> OuterRefereed:
        """Apply the outer step to the previous snapshot. Raises NotFound, TransientFailure."""
        num_elements = effect.plan.num_elements
        previous = await self._ports.blobs.get(effect.previous.key)
        if await self._ports.compute.run(partial(digest, previous)) != effect.previous.digest:
            raise TransientFailure(f"{effect.previous.key} holds other bytes than were published: restore the object")
        parts = [await self._merged(effect.plan, shard) for shard in effect.merged]

        def apply() -> bytes:
            params, momentum = decode_snapshot(previous, num_elements)
            merged = to_vector(b"".join(parts), num_elements)
            if len(effect.plan.shards[0].reducers) == 1:
                return encode_snapshot(*keep_params(params, momentum, merged))
            return encode_snapshot(*outer_step(params, momentum, merged, self._config.training))

        data = await self._ports.compute.run(apply)
        ref = await self._store(effect.epoch, kind="snapshot", name=f"s{effect.stage}", data=data)
        log.info("outer step refereed", extra={"epoch": effect.epoch, "stage": effect.stage})
        return OuterRefereed(at_s=self._ports.clock.now(), epoch=effect.epoch, stage=effect.stage, ref=ref)

    async def _store(self, epoch: int, *, kind: str, name: str, data: bytes | memoryview) -> BlobRef:
        content = await self._ports.compute.run(partial(digest, data))
        key = object_key(
            self._run_id(), epoch=epoch, hotkey=self._ports.signer.hotkey, kind=kind, name=name, content=content
        )
        await self._ports.blobs.put(key, data)
        return BlobRef(key=key, digest=content, size_bytes=len(data))

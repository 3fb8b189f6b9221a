"""A miner's part in committing and merging an epoch, and in answering challenges (papers.md A6, trust.md 1 and 5)."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from neurons.roles.books import Books
from neurons.roles.shards import GetSlice, copies, reduced
from subnet import wire
from subnet.config import RunConfig
from subnet.errors import NotFound, ProtocolViolation
from subnet.frames import digest
from subnet.merging.schedule import ITEM_BYTES
from subnet.merging.upload import chunk_digests, to_bytes, to_vector, upload_digest
from subnet.ports import Blobs, Compute, Control
from subnet.training.outer import decode_snapshot, encode_snapshot, keep_params, outer_step, pseudo_gradient
from subnet.types import BlobRef, Digest, Epoch, Hotkey

log = logging.getLogger("strata.miner")

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Anchor:
    """What an epoch starts from: the stage's published params and outer momentum, flat, and their snapshot's digest."""

    params: Vector
    momentum: Vector
    digest: Digest


@dataclass(slots=True)
class MergeBytes:
    """Payload bytes of one merge, by direction; compared with 4W + 2W/N (papers.md A6)."""

    epoch: int
    vector_bytes: int
    num_miners: int = 0
    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Moved:
    """Payload bytes through the blob store since the process began, by kind of object."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    @property
    def by_kind(self) -> dict[str, dict[str, int]]:
        """Plain values, fit to write down."""
        return {"sent": dict(self.sent), "received": dict(self.received)}


class Sharing:
    """Transfers between one miner and the blob store, by grants of the orchestrator."""

    def __init__(self, *, config: RunConfig, control: Control, blobs: Blobs, compute: Compute, hotkey: Hotkey) -> None:
        self.merges: list[MergeBytes] = []
        self.moved = Moved()
        self._config = config
        self._control = control
        self._blobs = blobs
        self._compute = compute
        self._hotkey = hotkey

    async def put(self, kind: str, *, epoch: Epoch, name: str, data: bytes) -> BlobRef:
        """Store an object of ours. Raises Refused, TransientFailure."""
        request = wire.RequestUpload(kind=kind, epoch=epoch, name=name, digest=digest(data), size_bytes=len(data))
        grant = await self._control.call(request)
        if not isinstance(grant, wire.UploadGrant):
            raise ProtocolViolation(f"asked for an upload grant, got {type(grant).__name__}")
        await self._blobs.put(grant.url, data)
        self.moved.sent[kind] += len(data)
        return grant.ref

    async def urls(self, refs: Sequence[BlobRef]) -> list[str]:
        """Download URLs, in order. Raises Refused, TransientFailure."""
        grant = await self._control.call(wire.RequestDownload(keys=tuple(ref.key for ref in refs)))
        if not isinstance(grant, wire.DownloadGrant) or len(grant.urls) != len(refs):
            raise ProtocolViolation("the orchestrator did not answer with one URL for each key")
        return list(grant.urls)

    async def get(self, kind: str, ref: BlobRef) -> bytes:
        """A whole object, checked against its digest. Raises NotFound, TransientFailure, ProtocolViolation."""
        [url] = await self.urls([ref])
        data = await self._blobs.get(url, limit_bytes=max(1, ref.size_bytes))
        self.moved.received[kind] += len(data)
        if len(data) != ref.size_bytes or digest(data) != ref.digest:
            raise ProtocolViolation(f"object {ref.key} is not the one announced")
        return data

    async def load_anchor(self, snapshot: BlobRef, num_elements: int) -> Anchor:
        """The snapshot an epoch starts from; one that is not whole is never trained on (users.md 8)."""
        data = await self.get("snapshot", snapshot)
        params, momentum = decode_snapshot(data, num_elements)
        return Anchor(params=params, momentum=momentum, digest=snapshot.digest)

    def commitment(self, books: Books, upload: bytes) -> wire.CommitEpoch:
        """The miner's last word on its epoch."""
        return wire.CommitEpoch(
            epoch=books.epoch,
            num_receipts=books.num_receipts,
            head=books.head,
            checkpoints=tuple(books.checkpoints),
            num_batches=books.num_batches,
            upload_digest=upload_digest(upload),
            upload_bytes=len(upload),
            chunk_digests=chunk_digests(upload, self._config.merge.chunk_bytes),
        )

    async def upload(self, epoch: Epoch, data: bytes) -> None:
        """Store the committed pseudo-gradient and say so."""
        await self.put("upload", epoch=epoch, name="whole", data=data)
        self.merges.append(MergeBytes(epoch=epoch, vector_bytes=len(data), sent=len(data)))
        await self._control.call(wire.UploadDone(epoch=epoch))

    async def reduce(self, plan: wire.MergePlan) -> None:
        """Reduce, store and report every shard that is ours."""
        count = self._count(plan.epoch, plan)
        mine = [shard for shard in plan.shards if self._hotkey in shard.reducers]
        get_slice = await self._reader(plan)
        count.num_miners = len(plan.uploads)
        for shard in mine:
            found = await reduced(plan, shard, get_slice, merge=self._config.merge, compute=self._compute)
            name = f"s{plan.stage}-{shard.shard}"
            ref = await self.put("shard", epoch=plan.epoch, name=name, data=bytes(found.data))
            count.sent += len(found.data)
            ours = (wire.ReducedShard(shard=shard.shard, ref=ref),)
            await self._control.call(wire.ReportReduced(epoch=plan.epoch, shards=ours, left_out=found.left_out))

    async def _reader(self, plan: wire.MergePlan) -> GetSlice:
        """Reads parts of the uploads of a merge."""
        count, refs = self._count(plan.epoch, plan), [upload.ref for upload in plan.uploads]
        urls = dict(zip([ref.key for ref in refs], await self.urls(refs), strict=True))

        async def get_slice(ref: BlobRef, start: int, size_bytes: int) -> memoryview:
            buffer = np.empty(size_bytes, np.uint8).data
            num_received = await self._blobs.get_into(urls[ref.key], buffer, start=start)
            count.received += num_received
            self.moved.received["upload"] += num_received
            return buffer[:num_received]

        return get_slice

    def _count(self, epoch: Epoch, plan: wire.MergePlan) -> MergeBytes:
        """This epoch's counters; a process that restarted after its upload begins without it."""
        if not self.merges or self.merges[-1].epoch != epoch:
            self.merges.append(MergeBytes(epoch=epoch, vector_bytes=plan.num_elements * ITEM_BYTES))
        return self.merges[-1]

    async def download_merged(self, plan: wire.MergePlan, merged: Sequence[wire.ReducedShard]) -> Vector:
        """The merged pseudo-gradient, whole, each shard checked against its digest."""
        if [shard.shard for shard in merged] != [shard.shard for shard in plan.shards]:
            raise ProtocolViolation(f"{len(merged)} merged shards do not make the {len(plan.shards)} of the plan")
        urls = await self.urls([shard.ref for shard in merged])
        data = np.empty(plan.num_elements * ITEM_BYTES, np.uint8).data
        for place, shard, url in zip(plan.shards, merged, urls, strict=True):
            part = data[place.start * ITEM_BYTES : place.stop * ITEM_BYTES]
            if not await self._fill(plan, shard.ref, url, part):
                await self._find(plan, shard, part)
        return await self._compute.run(lambda: to_vector(data, plan.num_elements))

    async def _fill(self, plan: wire.MergePlan, ref: BlobRef, url: str, part: memoryview) -> bool:
        """Download a merged shard into its place; whether it is what was announced. Raises TransientFailure."""
        try:
            size_bytes = await self._blobs.get_into(url, part)
        except (NotFound, ProtocolViolation) as error:
            log.warning("merged shard cannot be had", extra={"key": ref.key, "reason": str(error)})
            return False
        self._count(plan.epoch, plan).received += size_bytes
        self.moved.received["shard"] += size_bytes
        is_true = await self._compute.run(partial(digest, part[:size_bytes])) == ref.digest
        if not is_true:
            log.warning("merged shard is not what was announced", extra={"key": ref.key})
        return is_true

    async def _find(self, plan: wire.MergePlan, shard: wire.ReducedShard, part: memoryview) -> None:
        """The shard as another reducer stored it; else our own sum, where that is it. Raises ProtocolViolation."""
        others = copies(plan, shard)
        for ref, url in zip(others, await self.urls(others), strict=True):
            if await self._fill(plan, ref, url, part):
                return
        get_slice = await self._reader(plan)
        own = await reduced(plan, plan.shards[shard.shard], get_slice, merge=self._config.merge, compute=self._compute)
        if await self._compute.run(partial(digest, own.data)) != shard.ref.digest:
            raise ProtocolViolation(f"nobody has shard {shard.shard} of stage {plan.stage} as it was announced")
        part[:] = own.data

    async def apply_outer(self, anchor: Anchor, plan: wire.MergePlan, merged: Vector) -> bytes:
        """Take the outer step with a merged pseudo-gradient; returns the snapshot's bytes."""
        is_alone = len(plan.shards[0].reducers) == 1

        def apply() -> bytes:
            if is_alone:
                return encode_snapshot(*keep_params(anchor.params, anchor.momentum, merged))
            return encode_snapshot(*outer_step(anchor.params, anchor.momentum, merged, self._config.training))

        return await self._compute.run(apply)

    async def report_outer(self, epoch: Epoch, data: bytes, *, must_upload: bool) -> None:
        """Report the outer step's result; the drawn miners also store it for joiners."""
        await self._control.call(wire.ReportOuter(epoch=epoch, digest=digest(data), size_bytes=len(data)))
        if must_upload:
            ref = await self.put("snapshot", epoch=epoch, name="outer", data=data)
            await self._control.call(wire.SnapshotDone(epoch=epoch, ref=ref))

    async def answer(self, challenge: wire.Challenge, books: Books) -> None:
        """Present both checkpoints and the records between them. Raises NotFound when they are not on disk any more."""
        files = await books.segment_files(challenge.epoch, challenge.segment)
        if files is None:
            raise NotFound(f"segment {challenge.segment} of epoch {challenge.epoch} is not on disk any more")
        name = f"segment-{challenge.segment}"
        start = await self.put("checkpoint", epoch=challenge.epoch, name=f"{name}-start", data=files[0])
        end = await self.put("checkpoint", epoch=challenge.epoch, name=f"{name}-end", data=files[1])
        evidence = await self.put("evidence", epoch=challenge.epoch, name=name, data=files[2])
        await self._control.call(
            wire.AnswerChallenge(
                epoch=challenge.epoch, segment=challenge.segment, start=start, end=end, evidence=evidence
            )
        )


def upload_bytes(anchor: Anchor, params: Vector) -> bytes:
    """The pseudo-gradient (anchor minus local params) as it is uploaded."""
    return to_bytes(pseudo_gradient(anchor.params, params))

"""Dishonest miners that act together, or whose numbers follow from what they overhear (trust.md 7)."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from neurons.roles.ports import MinerPorts
from subnet import wire
from subnet.config import RunConfig
from subnet.frames import Frame, digest
from subnet.merging.upload import chunk_digests, to_bytes, upload_digest
from subnet.ports import Control, FrameHandler, Peers
from subnet.training.pipeline import ForwardResult, SampleKey, StageWorker
from subnet.types import Digest, Endpoint, Epoch, Hotkey, NumericMode, StageIndex
from tests.strategies import Tokens, Vector, storing_zeros


@dataclass(frozen=True, slots=True)
class _Overhearing:
    """Shows every answer of the orchestrator's to `hear`."""

    inner: Control
    hear: Callable[[wire.Response], None]

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        response = await self.inner.call(request, timeout_s=timeout_s)
        self.hear(response)
        return response


def colluding() -> Callable[[MinerPorts], MinerPorts]:
    """For all colluders alike: each stores the same zeros for the shards that two of them share, and the truth elsewhere."""
    ring: dict[Hotkey, None] = {}
    shared: dict[str, bool] = {}

    def hear(response: wire.Response) -> None:
        if isinstance(response, wire.MergePlan):
            for shard in response.shards:
                shared[f"s{response.stage}-{shard.shard}"] = all(reducer in ring for reducer in shard.reducers)

    def make(ports: MinerPorts) -> MinerPorts:
        ring[ports.signer.hotkey] = None
        liar = replace(ports, control=_Overhearing(ports.control, hear))
        return storing_zeros("shard", only=lambda request: shared.get(request.name, False))(liar)

    return make


@dataclass(frozen=True, slots=True)
class _SwappedUpload:
    """Commits to other bytes than were trained, and uploads those."""

    ports: MinerPorts
    swap: Callable[[MinerPorts, Epoch], Awaitable[bytes]]
    chunk_bytes: int
    swapped: dict[Epoch, bytes]
    granted: dict[str, bytes]

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        if isinstance(request, wire.CommitEpoch):
            self.swapped[request.epoch] = data = await self.swap(self.ports, request.epoch)
            request = msgspec.structs.replace(
                request, upload_digest=upload_digest(data), chunk_digests=chunk_digests(data, self.chunk_bytes)
            )
        if not isinstance(request, wire.RequestUpload) or request.kind != "upload":
            return await self.ports.control.call(request, timeout_s=timeout_s)
        data = self.swapped[request.epoch]
        grant = await self.ports.control.call(msgspec.structs.replace(request, digest=digest(data)))
        if isinstance(grant, wire.UploadGrant):
            self.granted[grant.url] = data
        return grant

    async def put(self, url: str, data: bytes) -> None:
        await self.ports.blobs.put(url, self.granted.get(url, data))

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        return await self.ports.blobs.get(url, start=start, size_bytes=size_bytes, limit_bytes=limit_bytes)

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        return await self.ports.blobs.get_into(url, buffer, start=start)


@dataclass(frozen=True, slots=True)
class Copying:
    """Two miners of one owner: the first shows its upload to the second, which commits to it as its own."""

    ports: MinerPorts
    commits: dict[Epoch, wire.CommitEpoch]
    uploads: dict[Digest, bytes]
    granted: dict[str, Digest]
    is_copier: bool

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        if isinstance(request, wire.CommitEpoch):
            request = await self._commitment(request)
        if self.is_copier and isinstance(request, wire.RequestUpload) and request.kind == "upload":
            return await self._grant(request)
        return await self.ports.control.call(request, timeout_s=timeout_s)

    async def _commitment(self, own: wire.CommitEpoch) -> wire.CommitEpoch:
        if not self.is_copier:
            self.commits[own.epoch] = own
            return own
        await self._until(lambda: own.epoch in self.commits)
        shown = self.commits[own.epoch]
        return msgspec.structs.replace(own, upload_digest=shown.upload_digest, chunk_digests=shown.chunk_digests)

    async def _grant(self, own: wire.RequestUpload) -> wire.Response:
        copied = self.commits[own.epoch].upload_digest
        await self._until(lambda: copied in self.uploads)
        grant = await self.ports.control.call(msgspec.structs.replace(own, digest=copied))
        if isinstance(grant, wire.UploadGrant):
            self.granted[grant.url] = copied
        return grant

    async def put(self, url: str, data: bytes) -> None:
        self.uploads[digest(data)] = data
        await self.ports.blobs.put(url, self.uploads[self.granted[url]] if url in self.granted else data)

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        return await self.ports.blobs.get(url, start=start, size_bytes=size_bytes, limit_bytes=limit_bytes)

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        return await self.ports.blobs.get_into(url, buffer, start=start)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self.ports.clock.sleep(0.05)


def copying() -> tuple[Callable[[MinerPorts], MinerPorts], Callable[[MinerPorts], MinerPorts]]:
    """The one who is copied, and the one who copies."""
    commits: dict[Epoch, wire.CommitEpoch] = {}
    uploads: dict[Digest, bytes] = {}

    def make(ports: MinerPorts, *, is_copier: bool) -> MinerPorts:
        liar = Copying(ports, commits, uploads, {}, is_copier)
        return replace(ports, control=liar, blobs=liar)

    return partial(make, is_copier=False), partial(make, is_copier=True)


class _Depositing(StageWorker):
    """Honest, and shows what it learned in each epoch to `deposits` once it is asked for it."""

    def __init__(
        self, config: RunConfig, stage: StageIndex, mode: NumericMode, deposits: dict[int, list[Vector]]
    ) -> None:
        super().__init__(config, stage, mode)
        self._deposits = deposits
        self._epoch = -1

    def load(self, params: Vector) -> None:
        super().load(params)
        self._anchor, self._epoch, self._is_shown = params.copy(), self._epoch + 1, False

    def params(self) -> Vector:
        found = super().params()
        if not self._is_shown:
            self._is_shown = True
            self._deposits.setdefault(self._epoch, []).append(np.subtract(self._anchor, found))
        return found


class LittleIsEnough:
    """`count` miners of one stage upload their mean, pushed against itself by `z` of their standard deviations (ALIE).

    Nothing of it lies outside what honest uploads spread over, so that no gate of a merge can see it. Each pushes a little
    harder than the one before, for equal uploads would be void as copies.
    """

    patience = 100
    apart = 0.01

    def __init__(self, count: int, *, z: float, chunk_bytes: int) -> None:
        self._count, self._z, self._chunk_bytes = count, z, chunk_bytes
        self._deposits: dict[int, list[Vector]] = {}
        self._num_made: dict[Epoch, int] = {}

    def worker(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> StageWorker:
        return _Depositing(config, stage, mode, self._deposits)

    def ports(self, ports: MinerPorts) -> MinerPorts:
        liar = _SwappedUpload(ports, self._poisoned, self._chunk_bytes, {}, {})
        return replace(ports, control=liar, blobs=liar)

    async def _poisoned(self, ports: MinerPorts, epoch: Epoch) -> bytes:
        for _ in range(self.patience):
            if len(self._deposits.get(epoch, ())) == self._count:
                break
            await ports.clock.sleep(0.05)
        place = self._num_made[epoch] = self._num_made.get(epoch, -1) + 1
        return to_bytes(little_is_enough(self._deposits[epoch], self._z * (1.0 + self.apart * place)))


def little_is_enough(honest: Sequence[Vector], z: float) -> Vector:
    """Mean of what the colluders learned, less `z` standard deviations in the direction of the mean."""
    mean, spread = np.mean(honest, axis=0), np.std(honest, axis=0)
    poisoned: Vector = np.subtract(mean, z * spread * np.sign(mean)).astype(np.float32)
    return poisoned


class LossAbout(StageWorker):
    """A last stage that lies about the samples of one miner of stage 0 alone: to frame it, or to hide what it does."""

    def __init__(
        self, config: RunConfig, stage: StageIndex, mode: NumericMode, factor: float, overheard: dict[SampleKey, Hotkey]
    ) -> None:
        super().__init__(config, stage, mode)
        self._factor, self._overheard = factor, overheard

    def forward(self, key: SampleKey, tokens: Tokens, activation: bytes | None) -> ForwardResult:
        result = super().forward(key, tokens, activation)
        whom = next(iter(self._overheard.values()), None)
        if result.loss is None or self._overheard.get(key) != whom:
            return result
        return ForwardResult(payload=None, loss=float(np.float32(result.loss * self._factor)))


class Gossip:
    """Notes whose samples come in, so that the worker can lie about the first miner's; `factor` above 1 frames it."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._overheard: dict[SampleKey, Hotkey] = {}

    def worker(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> StageWorker:
        return LossAbout(config, stage, mode, self._factor, self._overheard)

    def ports(self, ports: MinerPorts) -> MinerPorts:
        def note(frame: Frame) -> None:
            lease = frame.header.lease
            self._overheard[wire.sample_key(lease.epoch, lease.sample, lease.branch)] = lease.hops[0]

        return replace(ports, peers=_Noting(ports.peers, note))


@dataclass(frozen=True, slots=True)
class _Noting:
    """Shows every frame that comes in to `note` first."""

    inner: Peers
    note: Callable[[Frame], None]

    async def send(self, receiver: Hotkey, endpoint: Endpoint, frame: Frame) -> None:
        await self.inner.send(receiver, endpoint, frame)

    def on_frame(self, handler: FrameHandler) -> None:
        async def noting(sender: Hotkey, frame: Frame) -> None:
            self.note(frame)
            await handler(sender, frame)

        self.inner.on_frame(noting)

"""Dishonest miners and validators for tests: honest role code, over workers and ports that lie (trust.md 7)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from neurons.roles.ports import MinerPorts
from neurons.roles.validator import ValidatorPorts
from subnet import receipts, wire
from subnet.adapters.memory import MemoryBlobs
from subnet.config import RunConfig
from subnet.draws import uniform
from subnet.errors import Backpressure
from subnet.frames import Frame, check_payload, digest
from subnet.model.payload import decode_payload, encode_payload
from subnet.ports import Blobs, Control, Disk, FrameHandler, Peers, Signer
from subnet.sim.strategies import IdentityWorker
from subnet.training.pipeline import ForwardResult, Params, SampleKey, StageWorker
from subnet.types import Endpoint, Hotkey, NumericMode, Outcome, StageIndex, Verdict
from subnet.validation.evidence import decode_evidence, encode_evidence

Tokens = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float32]


# ---- lying numbers ---------------------------------------------------------------------------------------------------


class HalfSteps(StageWorker):
    """Takes every second inner step and counts them all."""

    def _update(self, mean_gradients: Params) -> None:
        if self._num_steps % 2:
            super()._update(mean_gradients)
        else:
            self._optimizer.num_steps += 1


class ReplayedActivation(StageWorker):
    """Computes one sample of an epoch, and answers every other with what came out of that one."""

    _first: bytes | None = None

    def forward(self, key: SampleKey, tokens: Tokens, activation: bytes | None) -> ForwardResult:
        result = super().forward(key, tokens, activation)
        if result.payload is None:
            return result
        if self._first is None:
            self._first = result.payload
        return ForwardResult(payload=self._first, loss=None)


class FalseLoss(StageWorker):
    """The last stage reports a tenth less than it found, to look better than it is."""

    def forward(self, key: SampleKey, tokens: Tokens, activation: bytes | None) -> ForwardResult:
        result = super().forward(key, tokens, activation)
        return result if result.loss is None else ForwardResult(payload=None, loss=float(np.float32(result.loss * 0.9)))


class Sometimes(StageWorker):
    """Skips its layers on one sample of five, honest on the rest."""

    share = 0.2

    def __init__(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> None:
        super().__init__(config, stage, mode)
        self._honest, self._lazy = self._module, IdentityWorker(config, stage, mode)._module

    def forward(self, key: SampleKey, tokens: Tokens, activation: bytes | None) -> ForwardResult:
        self._module = self._lazy if uniform("sometimes", *key) < self.share else self._honest
        return super().forward(key, tokens, activation)


class PoisonAlongGradient(StageWorker):
    """Pushes what it sends along the last loss gradient it received: small, nearly parallel, and harmful."""

    size = 0.1

    def __init__(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> None:
        super().__init__(config, stage, mode)
        self._uphill: bytes | None = None

    def forward(self, key: SampleKey, tokens: Tokens, activation: bytes | None) -> ForwardResult:
        result = super().forward(key, tokens, activation)
        if result.payload is None or self._uphill is None:
            return result
        sent, uphill = decode_payload(self.config, result.payload), decode_payload(self.config, self._uphill)
        poison = uphill * (self.size * sent.norm() / (uphill.norm() + 1e-30))
        return ForwardResult(payload=encode_payload(self.config, sent + poison), loss=None)

    def backward(self, key: SampleKey, gradient: bytes | None) -> bytes | None:
        self._uphill = gradient
        return super().backward(key, gradient)


class PoisonedUpload(StageWorker):
    """Trains honestly and uploads something else: `factor` times what it learned."""

    factor = -10.0

    def load(self, params: Vector) -> None:
        super().load(params)
        self._anchor = params.copy()

    def params(self) -> Vector:
        learned = np.subtract(super().params(), self._anchor)
        return np.add(self._anchor, np.float32(self.factor) * learned).astype(np.float32)


class ZeroUpload(PoisonedUpload):
    """Trains honestly and keeps what it learned to itself."""

    factor = 0.0


class OtherStart(StageWorker):
    """Does not load the published params: it goes on from its own."""

    _has_loaded = False

    def load(self, params: Vector) -> None:
        super().load(self.params() if self._has_loaded else params)
        self._has_loaded = True


# ---- lying ports -----------------------------------------------------------------------------------------------------

Answer = Callable[[wire.Request], wire.Response | wire.Request]


@dataclass(frozen=True, slots=True)
class LyingControl:
    """Sends another request than the role meant, or swallows it: `lie` returns a request to send, or an answer at once."""

    inner: Control
    lie: Answer

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        told = self.lie(request)
        if isinstance(told, wire.Response):
            return told
        return await self.inner.call(told, timeout_s=timeout_s)


def absent_from_challenges(ports: MinerPorts) -> MinerPorts:
    """Says that it has answered, and never does."""

    def lie(request: wire.Request) -> wire.Response | wire.Request:
        return wire.Done() if isinstance(request, wire.AnswerChallenge) else request

    return replace(ports, control=LyingControl(ports.control, lie))


def silent_reducer(ports: MinerPorts) -> MinerPorts:
    """Takes part in a merge and reports none of its shards."""

    def lie(request: wire.Request) -> wire.Response | wire.Request:
        return wire.Done() if isinstance(request, wire.ReportReduced) else request

    return replace(ports, control=LyingControl(ports.control, lie))


@dataclass(frozen=True, slots=True)
class _ZeroObjects:
    """Stores zeros where an object of one of `kinds` was meant, and asks for the grant to fit."""

    control: Control
    blobs: Blobs
    kinds: tuple[str, ...]
    zeroed: dict[str, int]
    only: Callable[[wire.RequestUpload], bool]

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        is_ours = isinstance(request, wire.RequestUpload) and request.kind in self.kinds and self.only(request)
        if not isinstance(request, wire.RequestUpload) or not is_ours:
            return await self.control.call(request, timeout_s=timeout_s)
        zeros = digest(bytes(request.size_bytes))
        grant = await self.control.call(msgspec.structs.replace(request, digest=zeros), timeout_s=timeout_s)
        if isinstance(grant, wire.UploadGrant):
            self.zeroed[grant.url] = request.size_bytes
        return grant

    async def put(self, url: str, data: bytes) -> None:
        await self.blobs.put(url, bytes(self.zeroed[url]) if url in self.zeroed else data)

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        return await self.blobs.get(url, start=start, size_bytes=size_bytes, limit_bytes=limit_bytes)

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        return await self.blobs.get_into(url, buffer, start=start)


def silent_after_the_merge(ports: MinerPorts) -> MinerPorts:
    """Reduces its shards and never says what its outer step came to."""

    def lie(request: wire.Request) -> wire.Response | wire.Request:
        return wire.Done() if isinstance(request, wire.ReportOuter | wire.SnapshotDone) else request

    return replace(ports, control=LyingControl(ports.control, lie))


def contradicting_itself(ports: MinerPorts) -> MinerPorts:
    """Commits to its upload and to chunks that are not the upload's: nobody can merge it."""

    def lie(request: wire.Request) -> wire.Response | wire.Request:
        if not isinstance(request, wire.CommitEpoch):
            return request
        others = tuple(digest(name.encode()) for name in request.chunk_digests)
        return msgspec.structs.replace(request, chunk_digests=others)

    return replace(ports, control=LyingControl(ports.control, lie))


def storing_zeros(
    kind: str, *, only: Callable[[wire.RequestUpload], bool] = lambda _: True
) -> Callable[[MinerPorts], MinerPorts]:
    """Stores zeros for every object of a kind: a corrupt reducer with `shard`, a false snapshot with `snapshot`."""

    def make(ports: MinerPorts) -> MinerPorts:
        liar = _ZeroObjects(ports.control, ports.blobs, (kind,), {}, only)
        return replace(ports, control=liar, blobs=liar)

    return make


@dataclass(frozen=True, slots=True)
class _OtherBytes:
    """Announces every object as it is and stores zeros in the place of some, as a bucket that binds no digest allows."""

    blobs: Blobs
    kind: str

    async def put(self, url: str, data: bytes) -> None:
        assert isinstance(self.blobs, MemoryBlobs)
        grant = self.blobs._store.redeem(url, method="PUT")
        await self.blobs._store.put(grant.key, bytes(len(data)) if f"/{self.kind}/" in grant.key else data)

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        return await self.blobs.get_into(url, buffer, start=start)

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        return await self.blobs.get(url, start=start, size_bytes=size_bytes, limit_bytes=limit_bytes)


def storing_other_bytes(kind: str) -> Callable[[MinerPorts], MinerPorts]:
    """Reports the right digest of its objects of a kind, and stores something else under it."""
    return lambda ports: replace(ports, blobs=_OtherBytes(ports.blobs, kind))


@dataclass(frozen=True, slots=True)
class _Peers:
    """Frames out go through `alter`; frames in only from those that `takes` lets in."""

    inner: Peers
    alter: Callable[[Frame], Frame]
    takes: Callable[[Hotkey], bool]

    async def send(self, receiver: Hotkey, endpoint: Endpoint, frame: Frame) -> None:
        await self.inner.send(receiver, endpoint, self.alter(frame))

    def on_frame(self, handler: FrameHandler) -> None:
        async def choosy(sender: Hotkey, frame: Frame) -> None:
            if not self.takes(sender):
                raise Backpressure("my buffer is full, for you")
            await handler(sender, frame)

        self.inner.on_frame(choosy)


def sending(alter: Callable[[Frame], Frame]) -> Callable[[MinerPorts], MinerPorts]:
    """Sends other frames than its work gave."""
    return lambda ports: replace(ports, peers=_Peers(ports.peers, alter, lambda _: True))


def choosing_partners(takes: Callable[[Hotkey], bool]) -> Callable[[MinerPorts], MinerPorts]:
    """Takes activations from some of the miners before it and is always full for the others."""
    return lambda ports: replace(ports, peers=_Peers(ports.peers, lambda frame: frame, takes))


def full_of_nan(frame: Frame) -> Frame:
    """The same frame with every value NaN."""
    payload = b"\xc0\x7f" * (len(frame.payload) // 2)
    header = msgspec.structs.replace(frame.header, payload_digest=digest(payload))
    return check_payload(header, payload)


def cut_short(frame: Frame) -> Frame:
    """The same frame with half its tokens, in a shape that says so."""
    payload = frame.payload[: len(frame.payload) // 2]
    B, T, K = frame.header.shape
    header = msgspec.structs.replace(frame.header, payload_digest=digest(payload), shape=(B, T // 2, K))
    return check_payload(header, payload)


@dataclass(frozen=True, slots=True)
class _ForgingDisk:
    """Hands out evidence in which every payload was recomputed; receipts were committed before anything was drawn."""

    inner: Disk

    async def write(self, name: str, data: bytes) -> None:
        await self.inner.write(name, data)

    async def read(self, name: str) -> bytes | None:
        data = await self.inner.read(name)
        if data is None or "evidence" not in name:
            return data
        evidence = decode_evidence(data, limit_bytes=len(data))
        payloads = {digest(payload[::-1]): payload[::-1] for payload in evidence.payloads.values()}
        return encode_evidence(msgspec.structs.replace(evidence, payloads=payloads))

    async def names(self) -> list[str]:
        return await self.inner.names()

    async def delete(self, name: str) -> None:
        await self.inner.delete(name)


def forging_evidence(ports: MinerPorts) -> MinerPorts:
    """Cheats only outside audits: once challenged, it presents other records than it committed to."""
    return replace(ports, disk=_ForgingDisk(ports.disk))


def always(outcome: Outcome) -> Callable[[ValidatorPorts], ValidatorPorts]:
    """A validator that replays nothing it would have to believe: every verdict of its is `outcome`."""

    def make(ports: ValidatorPorts) -> ValidatorPorts:
        def lie(request: wire.Request) -> wire.Response | wire.Request:
            if not isinstance(request, wire.PostVerdict):
                return request
            return wire.PostVerdict(verdict=_signed(request.verdict, outcome, ports.signer))

        return replace(ports, control=LyingControl(ports.control, lie))

    return make


def _signed(verdict: Verdict, outcome: Outcome, signer: Signer) -> Verdict:
    changed = msgspec.structs.replace(verdict, outcome=outcome, reason="because", signature="")
    return msgspec.structs.replace(changed, signature=signer.sign(receipts.verdict_bytes(changed)))

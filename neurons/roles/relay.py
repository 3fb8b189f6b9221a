"""The orchestrator's part of the detour: who has left a frame for whom in the blob store, until it is taken (DESIGN D84).

Nothing here is state of the run: it is not journaled (DESIGN D11), and after a restart senders simply announce again. What a
request may claim is checked against the state: a frame goes from one miner to its neighbour under the sample's newest lease.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from neurons.roles.desk import GRANT_LIFE_S
from subnet import detours, wire
from subnet.config import RunConfig
from subnet.errors import Backpressure, Refused, TransientFailure
from subnet.frames import payload_size
from subnet.lanes import hop
from subnet.orchestration.objects import is_digest, object_key
from subnet.orchestration.state import State
from subnet.ports import BlobStore, Clock
from subnet.types import BlobRef, Direction, FrameHeader, Hotkey

HOLD_S = 15.0
"""An answer is held back for up to this long: less than a client waits for one attempt."""
GAP_S = 1.0
"""A receiver that keeps collecting is back within this time of the last answer."""
COME_S = 3.0
"""For a receiver that is called to come and collect; then it is away."""
AWAY_S = 10.0
"""Nothing is taken for a receiver that did not come, for this long: who is gone is routed around."""
TICK_S = 0.25
SWEEP_S = 1.0
OPEN_PER_SAMPLE = 4
"""Frames of one sender that are not settled, for each sample it may hold open."""


@dataclass(slots=True)
class _Parcel:
    """A frame on the detour; `refusal` is None until its receiver has spoken, and empty when it was taken."""

    sender: Hotkey
    header: FrameHeader
    ref: BlobRef
    signature: str = ""
    is_stored: bool = False
    refusal: str | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Box:
    """What waits for one receiver, and whether it comes for it."""

    receiver: Hotkey
    parcels: dict[str, _Parcel] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    num_collecting: int = 0
    left_s: float = -math.inf
    called_s: float = -math.inf
    away_until_s: float = -math.inf

    def waiting(self, known: tuple[str, ...] = ()) -> list[tuple[str, _Parcel]]:
        """Announced and not settled, oldest first."""
        found = self.parcels.items()
        return [(name, p) for name, p in found if p.is_stored and p.refusal is None and name not in known]

    def is_attended(self, now: float) -> bool:
        """Whether the receiver collects, or did a moment ago."""
        return self.num_collecting > 0 or now < self.left_s + GAP_S


class Relay:
    """Answers the messages of `subnet.detours`. `state` gives the run's, `wake` lets waiting polls look again."""

    def __init__(
        self, *, config: RunConfig, state: Callable[[], State], blobs: BlobStore, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._config = config
        self._read_state = state
        self._blobs = blobs
        self._clock = clock
        self._wake = wake
        self._boxes: dict[Hotkey, _Box] = {}
        self._num_open: Counter[Hotkey] = Counter()
        self._swept_s = -math.inf

    @property
    def _state(self) -> State:
        return self._read_state()

    def is_calling(self, hotkey: Hotkey) -> bool:
        """Whether frames wait for a miner that does not collect."""
        box = self._boxes.get(hotkey)
        return box is not None and bool(box.waiting()) and not box.is_attended(self._clock.now())

    async def answer(self, sender: Hotkey, request: detours.AnyDetourRequest) -> wire.Response:
        """Raises Refused; Backpressure for what the sender should ask again."""
        if sender not in self._state.members:
            raise Refused("not-joined", "join first: this orchestrator does not know your key")
        match request:
            case detours.RequestFrameUpload():
                _, parcel = self._parcel(sender, request.header)
                expires_at_s = min(request.header.lease.deadline_s, self._clock.now() + GRANT_LIFE_S)
                url = self._blobs.upload_url(parcel.ref, expires_at_s=expires_at_s)
                return wire.UploadGrant(ref=parcel.ref, url=url)
            case detours.AnnounceFrame():
                return await self._announce(sender, request)
            case detours.CollectFrames():
                return await self._collect(sender, request)
            case detours.SettleFrame():
                return await self._settle(sender, request)

    # ---- from the sender ---------------------------------------------------------------------------------------

    def _parcel(self, sender: Hotkey, header: FrameHeader) -> tuple[_Box, _Parcel]:
        """The frame's place, made when it is new. Raises Refused, Backpressure."""
        receiver = self._checked(sender, header)
        self._sweep()
        box = self._boxes.setdefault(receiver, _Box(receiver))
        name = detours.frame_name(sender, header)
        parcel = box.parcels.get(name)
        if parcel is None:
            if self._clock.now() < box.away_until_s:
                raise _away(receiver)
            if self._num_open[sender] >= OPEN_PER_SAMPLE * self._config.training.max_in_flight:
                raise Backpressure("too many frames of yours wait to be taken; ask again shortly")
            parcel = box.parcels[name] = _Parcel(sender, header, self._ref(sender, header))
            self._num_open[sender] += 1
        if parcel.header != header:
            raise Refused("repeated", f"another frame was brought for pass {header.pass_id}")
        return box, parcel

    def _checked(self, sender: Hotkey, header: FrameHeader) -> Hotkey:
        """The receiver of a frame that `sender` may send now. Raises Refused naming what does not fit."""
        lease, config = header.lease, self._config
        if (header.shape, header.dtype) != (config.wire_shape, config.wire_dtype):
            raise Refused("frame", f"a frame of this run is {config.wire_dtype} {config.wire_shape}")
        if not is_digest(header.payload_digest):
            raise Refused("frame", "the payload's digest is 64 lower-case hex digits of blake3")
        sample = self._state.current.samples.get(lease.sample)
        is_newest = sample is not None and msgspec.structs.replace(lease, signature="") == sample.lease
        if sample is None or not is_newest or not sample.is_open or lease.deadline_s <= self._clock.now():
            raise Refused("lease", "this lease is not the sample's newest, or the sample is closed")
        step = {Direction.FORWARD: -1, Direction.BACKWARD: 1}.get(header.direction)
        receiver = hop(config, lease, header.stage)
        if step is None or receiver is None or hop(config, lease, header.stage + step) != sender:
            raise Refused("pathway", "the lease does not lead from this miner to that stage in that direction")
        if not self._state.is_at_work(receiver, header.stage):
            raise Refused("not-live", f"{receiver} is not at work in stage {header.stage}: ask for another")
        return receiver

    def _ref(self, sender: Hotkey, header: FrameHeader) -> BlobRef:
        key = object_key(
            self._state.run_id,
            epoch=header.epoch,
            hotkey=sender,
            kind=detours.KIND,
            name=header.pass_id,
            content=header.payload_digest,
        )
        return BlobRef(key=key, digest=header.payload_digest, size_bytes=payload_size(header))

    async def _announce(self, sender: Hotkey, request: detours.AnnounceFrame) -> wire.Response:
        box, parcel = self._parcel(sender, request.header)
        if not parcel.is_stored:
            if await self._blobs.size(parcel.ref.key) != parcel.ref.size_bytes:
                raise Refused("object", f"{parcel.ref.key} is not in the store: upload it first")
            parcel.signature, parcel.is_stored = request.signature, True
            box.arrived.set()
        until_s = self._clock.now() + HOLD_S
        while parcel.refusal is None:
            if self._clock.now() >= until_s:
                raise Backpressure("the receiver has not taken the frame yet; ask again")
            self._call(box)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await parcel.settled.wait()
        if parcel.refusal:
            raise Refused("not-taken", parcel.refusal)
        return wire.Done()

    def _call(self, box: _Box) -> None:
        """Let a receiver that does not collect know that something waits. Raises Refused when it does not come."""
        now = self._clock.now()
        if box.is_attended(now) or now < box.called_s + COME_S:
            return
        if box.called_s > -math.inf:
            box.called_s, box.away_until_s = -math.inf, now + AWAY_S
        if now < box.away_until_s:
            raise _away(box.receiver)
        box.called_s = now
        self._wake()

    # ---- from the receiver -------------------------------------------------------------------------------------

    async def _collect(self, receiver: Hotkey, request: detours.CollectFrames) -> wire.Response:
        box = self._boxes.setdefault(receiver, _Box(receiver))
        box.called_s = box.away_until_s = -math.inf
        box.num_collecting += 1
        try:
            async with asyncio.timeout(HOLD_S):
                while not (found := box.waiting(request.known)):
                    box.arrived.clear()
                    await box.arrived.wait()
        except TimeoutError:
            found = []
        finally:
            box.num_collecting -= 1
            box.left_s = self._clock.now()
        room = detours.MAX_WAITING - len(request.known)
        return detours.WaitingFrames(frames=tuple(self._offer(parcel) for _, parcel in found[:room]))

    def _offer(self, parcel: _Parcel) -> detours.WaitingFrame:
        url = self._blobs.download_url(parcel.ref.key, expires_at_s=parcel.header.lease.deadline_s)
        return detours.WaitingFrame(sender=parcel.sender, header=parcel.header, signature=parcel.signature, url=url)

    async def _settle(self, receiver: Hotkey, request: detours.SettleFrame) -> wire.Response:
        """What is not known here any more was given up by its sender: nobody waits for the word."""
        box = self._boxes.get(receiver)
        parcel = box.parcels.get(request.name) if box is not None else None
        if parcel is not None and parcel.refusal is None:
            self._close(parcel, request.refusal)
            with contextlib.suppress(TransientFailure):  # its epoch's end deletes it otherwise
                await self._blobs.delete(parcel.ref.key)
        return wire.Done()

    # ---- what is over ------------------------------------------------------------------------------------------

    def _close(self, parcel: _Parcel, refusal: str) -> None:
        parcel.refusal = refusal
        parcel.settled.set()
        self._num_open[parcel.sender] -= 1

    def _sweep(self) -> None:
        """Forget frames whose lease is over or replaced; their objects go with the epoch's."""
        now, samples = self._clock.now(), self._state.current.samples
        if now < self._swept_s + SWEEP_S:
            return
        self._swept_s = now
        for box in self._boxes.values():
            for name, parcel in list(box.parcels.items()):
                lease = parcel.header.lease
                sample = samples.get(lease.sample) if lease.epoch == self._state.epoch else None
                is_current = sample is not None and sample.is_open and sample.lease.attempt == lease.attempt
                if is_current and now < lease.deadline_s:
                    continue
                del box.parcels[name]
                if parcel.refusal is None:
                    self._close(parcel, "its lease is over")


def _away(receiver: Hotkey) -> Refused:
    return Refused("away", f"{receiver} does not collect what waits for it")

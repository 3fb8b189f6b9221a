"""The sender's half of the detour: a frame that cannot be pushed goes through the blob store (DESIGN D84)."""

import asyncio
from dataclasses import dataclass

from subnet import detours, wire
from subnet.errors import ProtocolViolation, TransientFailure
from subnet.frames import Frame
from subnet.ports import Blobs, Clock, Control, Signer
from subnet.types import Hotkey


@dataclass(slots=True)
class DetourCounters:
    """Frames that went through the store, and their payloads' bytes."""

    frames_sent: int = 0
    payload_bytes_sent: int = 0
    frames_received: int = 0
    payload_bytes_received: int = 0


class Detour:
    """Store, announce, and wait for the receiver's word, which means what the answer to a push means."""

    def __init__(
        self, *, control: Control, blobs: Blobs, signer: Signer, clock: Clock, counters: DetourCounters
    ) -> None:
        self._control = control
        self._blobs = blobs
        self._signer = signer
        self._clock = clock
        self._counters = counters

    async def send(self, receiver: Hotkey, frame: Frame) -> None:
        """Return once the receiver has taken it. Raises Refused, TransientFailure (also: not in time), ProtocolViolation."""
        left_s = max(0.0, frame.header.lease.deadline_s - self._clock.now())
        try:
            async with asyncio.timeout(left_s):
                await self._send(receiver, frame, left_s)
        except TimeoutError as error:
            raise TransientFailure("its lease ran out on the detour") from error
        self._counters.frames_sent += 1
        self._counters.payload_bytes_sent += len(frame.payload)

    async def _send(self, receiver: Hotkey, frame: Frame, left_s: float) -> None:
        header = frame.header
        grant = await self._control.call(detours.RequestFrameUpload(header=header), timeout_s=left_s)
        if not isinstance(grant, wire.UploadGrant):
            raise ProtocolViolation(f"asked for an upload grant, got {type(grant).__name__}")
        await self._blobs.put(grant.url, frame.payload)
        signature = self._signer.sign(detours.frame_bytes(header, receiver=receiver))
        await self._control.call(detours.AnnounceFrame(header=header, signature=signature), timeout_s=left_s)

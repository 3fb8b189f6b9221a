"""The receiver's half of the detour: frames that could not be pushed here are fetched from the blob store (DESIGN D84).

What arrives this way is looked at like a pushed frame, in the same order: signature, header, and only then is the payload
fetched, of the size that the header announces; digest, lease and values follow. Its sender hears the same words.
"""

import asyncio
import logging
from collections.abc import Callable

from neurons.roles.detour import DetourCounters
from subnet import detours
from subnet.errors import Backpressure, NotFound, ProtocolViolation, Refused, TransientFailure
from subnet.frames import check_payload, payload_size
from subnet.ports import Blobs, Clock, Control, FrameHandler, Signer
from subnet.types import FrameHeader, Hotkey

log = logging.getLogger("strata.collector")

ANSWER_S = 60.0
"""For a collection to be answered, repeats included; the orchestrator holds one back for 15 s."""
QUIET_S = 60.0
"""After this long without a frame the collector rests until the directive calls it again."""
RETRY_S = 0.5
TRIES = 3
"""Failed fetches of one payload until its sender is told."""
ROOM_S = 0.1
"""Between two looks for room in the buffer for activations."""
FETCHES = 4
"""Payloads held in memory at once, beside those that were taken."""

CheckHeader = Callable[[FrameHeader], None]
"""Raises Backpressure while a frame cannot be taken yet, ProtocolViolation for one that never can."""


class Collector:
    """Owns the tasks that fetch; every one ends with its frame's lease at the latest."""

    def __init__(
        self,
        *,
        control: Control,
        blobs: Blobs,
        signer: Signer,
        clock: Clock,
        expect: CheckHeader,
        take: FrameHandler,
        counters: DetourCounters,
    ) -> None:
        self._control = control
        self._blobs = blobs
        self._signer = signer
        self._clock = clock
        self._expect = expect
        self._take = take
        self._counters = counters
        self._called = asyncio.Event()
        self._settled = asyncio.Event()
        self._fetches = asyncio.Semaphore(FETCHES)
        self._open: dict[str, None] = {}
        self._strangers: dict[Hotkey, None] = {}

    def call(self) -> None:
        """The directive says that frames wait."""
        self._called.set()

    async def run(self) -> None:
        """Collect whenever called, until nothing has come for a while."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._called.wait()
                self._called.clear()
                await self._collect(group)

    async def _collect(self, group: asyncio.TaskGroup) -> None:
        came_s = self._clock.now()
        while self._clock.now() < came_s + QUIET_S:
            request = detours.CollectFrames(known=tuple(self._open))
            try:
                answer = await self._control.call(request, timeout_s=ANSWER_S)
            except TransientFailure as error:
                log.info("orchestrator not reached", extra={"reason": str(error)})
                await self._clock.sleep(RETRY_S)
                continue
            except (Refused, ProtocolViolation) as error:
                log.warning("frames not collected", extra={"reason": str(error)})
                await self._clock.sleep(RETRY_S)
                return
            if isinstance(answer, detours.WaitingFrames) and self._start(answer, group):
                came_s = self._clock.now()
            while len(self._open) >= detours.MAX_WAITING:
                self._settled.clear()
                await self._settled.wait()

    def _start(self, answer: detours.WaitingFrames, group: asyncio.TaskGroup) -> bool:
        """Begin with what is new; whether there was any."""
        fresh = [waiting for waiting in answer.frames if waiting.name not in self._open]
        for waiting in fresh[: detours.MAX_WAITING - len(self._open)]:
            self._open[waiting.name] = None
            self._note(waiting.sender)
            group.create_task(self._settle(waiting), name=f"collect {waiting.name}")
        return bool(fresh)

    def _note(self, sender: Hotkey) -> None:
        if sender not in self._strangers:
            self._strangers[sender] = None
            log.warning(
                "a peer could not reach this node; its frames come through the run's store, which takes longer",
                extra={"sender": sender},
            )

    async def _settle(self, waiting: detours.WaitingFrame) -> None:
        try:
            refusal = await self._fetch(waiting)
            await self._control.call(detours.SettleFrame(name=waiting.name, refusal=refusal[:400]))
        except (TransientFailure, Refused, ProtocolViolation) as error:
            log.info("orchestrator not told what became of a frame", extra={"reason": str(error)})
        finally:
            del self._open[waiting.name]
            self._settled.set()

    async def _fetch(self, waiting: detours.WaitingFrame) -> str:
        """Take one frame; "" or the reason why not."""
        header, failures = waiting.header, 0
        message = detours.frame_bytes(header, receiver=self._signer.hotkey)
        if not self._signer.verify(waiting.sender, message, waiting.signature):
            return "the frame is not signed by the sender it names"
        while self._clock.now() < header.lease.deadline_s:
            try:
                self._expect(header)
                await self._take_one(waiting)
                return ""
            except Backpressure:
                await self._clock.sleep(ROOM_S)
            except (Refused, ProtocolViolation) as error:
                return str(error) or "refused"
            except (TransientFailure, NotFound) as error:
                failures += 1
                if failures >= TRIES:
                    return f"its payload could not be fetched: {error}"
                await self._clock.sleep(RETRY_S)
        return "its lease ran out before there was room for it"

    async def _take_one(self, waiting: detours.WaitingFrame) -> None:
        async with self._fetches:
            payload = await self._blobs.get(waiting.url, limit_bytes=payload_size(waiting.header))
        await self._take(waiting.sender, check_payload(waiting.header, payload))
        self._counters.frames_received += 1
        self._counters.payload_bytes_received += len(payload)

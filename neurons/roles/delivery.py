"""Getting a frame to the next miner: retry while its buffer is full; through the blob store when it cannot be reached, and to
another miner when that fails too (system.md 1 and 2).
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from neurons.roles.detour import Detour
from neurons.roles.reach import Reach
from subnet import wire
from subnet.errors import Backpressure, NotFound, ProtocolViolation, Refused, TransientFailure
from subnet.frames import Frame
from subnet.ports import Clock, Control, Peers
from subnet.types import Direction, Endpoint, Hotkey, Lease, StageIndex

log = logging.getLogger("strata.delivery")

TRIES = 2
BACKOFF_S = 0.1
LOOK_UP_S = 5.0

LeaseHandler = Callable[[Lease], None]


class Delivery:
    """Owns the tasks that carry frames out; every one ends with its lease at the latest."""

    def __init__(
        self, *, peers: Peers, control: Control, detour: Detour, clock: Clock, group: asyncio.TaskGroup
    ) -> None:
        self.num_delivered = 0
        self.num_lost = 0
        self.payload_bytes = {Direction.FORWARD: 0, Direction.BACKWARD: 0}
        self._peers = peers
        self._control = control
        self._detour = detour
        self._reach = Reach()
        self._clock = clock
        self._group = group
        self._endpoints: dict[Hotkey, Endpoint] = {}
        """Where peers were when last asked for; who could not be reached there is asked for again."""
        self._asking = asyncio.Lock()

    def start(self, frame: Frame, *, on_lost: LeaseHandler, on_rerouted: LeaseHandler) -> None:
        """Deliver in the background. `on_lost` hears of a forward that found no receiver."""
        self._group.create_task(self._deliver(frame, on_lost, on_rerouted), name=f"deliver {frame.pass_id}")

    async def _deliver(self, frame: Frame, on_lost: LeaseHandler, on_rerouted: LeaseHandler) -> None:
        while True:
            reason = await self._try(frame)
            if reason is None:
                self.num_delivered += 1
                self.payload_bytes[frame.header.direction] += len(frame.payload)
                return
            replaced = await self._reroute(frame)
            if replaced is None:
                self.num_lost += 1
                log.info("frame lost", extra={"frame": frame.pass_id, "reason": reason})
                if frame.header.direction is Direction.FORWARD:
                    on_lost(frame.header.lease)
                return
            frame = replaced
            on_rerouted(frame.header.lease)

    async def _try(self, frame: Frame) -> str | None:
        """None when delivered, else why not: refused, out of time, or unreachable by the detour too."""
        receiver = frame.header.lease.hops[frame.header.stage]
        if self._reach.is_open(receiver):
            try:
                return await self._push(receiver, frame)
            except NotFound as error:
                return str(error)
            except TransientFailure as error:
                self._reach.failed(receiver, now=self._clock.now())
                log.info("peer not reached", extra={"peer": receiver, "reason": str(error)})
        elif self._reach.is_look_due(receiver, now=self._clock.now()):
            self._group.create_task(self._look(receiver, frame), name=f"look {receiver}")
        try:
            await self._detour.send(receiver, frame)
        except (Refused, TransientFailure, ProtocolViolation) as error:
            return str(error)
        return None

    async def _push(self, receiver: Hotkey, frame: Frame) -> str | None:
        """None when taken, else why not. Raises TransientFailure or NotFound when it was not reached twice."""
        lease = frame.header.lease
        failures = 0
        while self._clock.now() < lease.deadline_s:
            try:
                await self._peers.send(receiver, await self._endpoint(receiver, frame.header.stage), frame)
                return None
            except Backpressure:
                await self._clock.sleep(BACKOFF_S)
            except (Refused, ProtocolViolation) as error:
                return str(error)
            except (TransientFailure, NotFound):
                self._endpoints.pop(receiver, None)
                failures += 1
                if failures >= TRIES:
                    raise
                await self._clock.sleep(BACKOFF_S)
        return "its lease ran out"

    async def _look(self, receiver: Hotkey, frame: Frame) -> None:
        """Push a frame that takes the detour as well, to see whether its receiver can be reached now: a repeat is harmless."""
        try:
            endpoint = await self._endpoint(receiver, frame.header.stage)
        except (Refused, TransientFailure, ProtocolViolation, NotFound):
            return  # nobody says where it is: the next frame looks again
        try:
            await self._peers.send(receiver, endpoint, frame)
        except (Backpressure, Refused):
            pass  # it answered
        except TransientFailure:
            self._endpoints.pop(receiver, None)
            self._reach.failed_again(receiver, now=self._clock.now())
            return
        self._reach.answered(receiver)

    async def _endpoint(self, receiver: Hotkey, stage: StageIndex) -> Endpoint:
        """Where a miner is now. Raises NotFound for one that is not live, Refused, TransientFailure, ProtocolViolation."""
        async with self._asking:  # whoever waits here finds what the first one was told
            if receiver not in self._endpoints:
                answer = await self._control.call(wire.GetPeers(stage=stage), timeout_s=LOOK_UP_S)
                if not isinstance(answer, wire.StagePeers):
                    raise ProtocolViolation("the orchestrator did not say who works in a stage")
                self._endpoints |= {peer.hotkey: peer.endpoint for peer in answer.peers}
        if receiver not in self._endpoints:
            raise NotFound(f"{receiver} is not live")
        return self._endpoints[receiver]

    async def _reroute(self, frame: Frame) -> Frame | None:
        """The frame under a new lease, or None. A gradient goes back where its activation came from, or nowhere."""
        lease = frame.header.lease
        if frame.header.direction is Direction.BACKWARD or self._clock.now() >= lease.deadline_s:
            return None
        try:
            answer = await self._control.call(wire.Reroute(lease=lease, stage=frame.header.stage), timeout_s=10.0)
        except (Refused, TransientFailure, ProtocolViolation):
            return None
        if not isinstance(answer, wire.Leases) or not answer.leases:
            return None
        header = msgspec.structs.replace(frame.header, lease=answer.leases[0])
        return Frame(header=header, payload=frame.payload)

"""Getting a frame to the next miner: retry while its buffer is full, re-route when it cannot be reached (system.md 2)."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from subnet import wire
from subnet.errors import Backpressure, NotFound, ProtocolViolation, Refused, TransientFailure
from subnet.frames import Frame
from subnet.ports import Clock, Control, Peers
from subnet.types import Direction, Endpoint, Hotkey, Lease

log = logging.getLogger("strata.delivery")

TRIES = 2
BACKOFF_S = 0.1

LeaseHandler = Callable[[Lease], None]


class Delivery:
    """Owns the tasks that carry frames out; every one ends with its lease at the latest."""

    def __init__(self, *, peers: Peers, control: Control, clock: Clock, group: asyncio.TaskGroup) -> None:
        self.num_delivered = 0
        self.num_lost = 0
        self.payload_bytes = {Direction.FORWARD: 0, Direction.BACKWARD: 0}
        self._peers = peers
        self._control = control
        self._clock = clock
        self._group = group
        self._endpoints: dict[Hotkey, Endpoint] = {}

    def update(self, peers: tuple[wire.StagePeer, ...]) -> None:
        """Who can be reached where now."""
        self._endpoints = {peer.hotkey: peer.endpoint for peer in peers}

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
        """None when delivered, else why not: refused, unreachable twice, or out of time."""
        lease = frame.header.lease
        receiver = lease.hops[frame.header.stage]
        failures = 0
        while self._clock.now() < lease.deadline_s:
            try:
                await self._peers.send(receiver, self._endpoint(receiver), frame)
                return None
            except Backpressure:
                await self._clock.sleep(BACKOFF_S)
            except (Refused, ProtocolViolation) as error:
                return str(error)
            except (TransientFailure, NotFound) as error:
                failures += 1
                if failures >= TRIES:
                    return str(error)
                await self._clock.sleep(BACKOFF_S)
        return "its lease ran out"

    def _endpoint(self, receiver: Hotkey) -> Endpoint:
        endpoint = self._endpoints.get(receiver)
        if endpoint is None:
            raise NotFound(f"{receiver} is not live")
        return endpoint

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

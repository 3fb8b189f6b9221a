"""The orchestrator's part of the detour: who may leave which frame for whom, and what its sender hears (trust.md 6)."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from neurons.roles.relay import AWAY_S, COME_S, HOLD_S, OPEN_PER_SAMPLE, SWEEP_S, Relay
from subnet import detours, frames, wire
from subnet.adapters.memory import MemoryBlobs, MemoryBlobStore
from subnet.errors import Backpressure, Refused
from subnet.frames import Frame
from subnet.sim.loop import EPOCH_S, VirtualClock, run
from subnet.types import Direction, FrameHeader, Lease, StageIndex
from tests.unit.orchestration import CONFIG, MINERS, RUN, STRANGER, Run

SIZE_BYTES = math.prod(CONFIG.wire_shape) * CONFIG.wire_item_bytes
"""What a frame of this run weighs."""


class Clock(VirtualClock):
    """Virtual time from 0, as the state machine's tests count it."""

    def now(self) -> float:
        return super().now() - EPOCH_S


@dataclass
class Office:
    """A relay over a run in training, and the first sample's lease."""

    clock: Clock = field(default_factory=Clock)
    run: Run = field(default_factory=Run)
    num_wakes: int = 0

    def __post_init__(self) -> None:
        self.run.begin(*MINERS)
        self.store = MemoryBlobStore(self.clock)
        self.blobs = MemoryBlobs(self.store)
        self.relay = Relay(
            config=CONFIG, state=lambda: self.run.state, blobs=self.store, clock=self.clock, wake=self.wake
        )
        self.lease = self.run.lease(self.run.state.current.roster[0][0])[0]
        self.sender, self.receiver = self.lease.hops[:2]

    def wake(self) -> None:
        self.num_wakes += 1

    def frame(self, *, fill: bytes = b"\1", lease: Lease | None = None) -> Frame:
        return frames.make(
            lease or self.lease,
            stage=StageIndex(1),
            direction=Direction.FORWARD,
            shape=CONFIG.wire_shape,
            payload=fill * SIZE_BYTES,
        )

    async def upload(self, frame: Frame) -> str:
        """Ask for a grant and use it; the object's key."""
        granted = await self.relay.answer(self.sender, detours.RequestFrameUpload(header=frame.header))
        assert isinstance(granted, wire.UploadGrant)
        await self.blobs.put(granted.url, frame.payload)
        return granted.ref.key

    async def announce(self, frame: Frame) -> wire.Response:
        return await self.relay.answer(self.sender, detours.AnnounceFrame(header=frame.header, signature="signed"))

    async def collect(self, *known: str) -> list[detours.WaitingFrame]:
        answer = await self.relay.answer(self.receiver, detours.CollectFrames(known=known))
        assert isinstance(answer, detours.WaitingFrames)
        return list(answer.frames)

    async def settle(self, name: str, refusal: str = "") -> None:
        await self.relay.answer(self.receiver, detours.SettleFrame(name=name, refusal=refusal))


def at_the_office(test: Callable[[Office], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(Office())

    run(main())


async def refusal(waiting: Awaitable[object]) -> str:
    with pytest.raises(Refused) as found:
        await waiting
    return found.value.code


def test_a_frame_goes_through_the_store_and_its_object_is_gone_once_it_is_taken() -> None:
    async def test(office: Office) -> None:
        frame = office.frame()
        key = await office.upload(frame)
        pass_id = frame.pass_id
        assert key == f"runs/{RUN}/e0/frame/{office.sender}/{pass_id}-{frame.header.payload_digest}"
        announced = asyncio.create_task(office.announce(frame))
        (waiting,) = await office.collect()
        assert (waiting.sender, waiting.header, waiting.signature) == (office.sender, frame.header, "signed")
        assert await office.blobs.get(waiting.url, limit_bytes=SIZE_BYTES) == frame.payload
        assert not announced.done(), "its sender hears nothing before it is taken"
        await office.settle(waiting.name)
        assert await announced == wire.Done()
        assert await office.store.size(key) is None
        assert await office.announce(frame) == wire.Done(), "who lost the answer asks again"

    at_the_office(test)


def test_the_sender_hears_why_its_frame_was_refused() -> None:
    async def test(office: Office) -> None:
        frame = office.frame()
        await office.upload(frame)
        announced = asyncio.create_task(office.announce(frame))
        (waiting,) = await office.collect()
        await office.settle(waiting.name, "frame payload holds NaN or Inf")
        await office.settle(waiting.name)  # a later word changes nothing
        for attempt in (announced, office.announce(frame)):
            with pytest.raises(Refused, match="NaN") as found:
                await attempt
            assert found.value.code == "not-taken"

    at_the_office(test)


def test_a_grant_takes_exactly_the_bytes_that_the_header_announces() -> None:
    async def test(office: Office) -> None:
        frame = office.frame()
        granted = await office.relay.answer(office.sender, detours.RequestFrameUpload(header=frame.header))
        assert isinstance(granted, wire.UploadGrant) and granted.ref.size_bytes == SIZE_BYTES
        for other in (frame.payload[:-1], frame.payload + b"\0", bytes(SIZE_BYTES)):
            with pytest.raises(Refused):
                await office.blobs.put(granted.url, other)
        assert await refusal(office.announce(frame)) == "object"

    at_the_office(test)


Change = Callable[[FrameHeader], FrameHeader]


def changed(**fields: Any) -> Change:
    return lambda header: msgspec.structs.replace(header, **fields)


def leased(**fields: Any) -> Change:
    return lambda header: changed(lease=msgspec.structs.replace(header.lease, **fields))(header)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("frame", changed(shape=(8, 128, 5))),
        ("frame", changed(shape=(1 << 20, 1 << 20))),
        ("frame", changed(dtype="float32")),
        ("frame", changed(payload_digest="../../ledger/000000")),
        ("frame", changed(payload_digest="A" * 64)),
        ("pathway", changed(stage=2)),
        ("pathway", changed(stage=0)),
        ("pathway", changed(stage=-1)),
        ("pathway", changed(stage=99)),
        ("pathway", changed(direction=Direction.BACKWARD)),
        ("pathway", changed(direction=Direction.STEP)),
        ("lease", leased(sample=77)),
        ("lease", leased(attempt=1)),
        ("lease", leased(epoch=1)),
        ("lease", leased(run_id="other")),
        ("lease", leased(hops=("m1", "m2", "m3"))),
        ("lease", leased(hops=())),
        ("lease", leased(deadline_s=1e12)),
    ],
)
def test_what_does_not_fit_the_runs_frames_and_leases_gets_no_grant(code: str, change: Change) -> None:
    async def test(office: Office) -> None:
        header = change(office.frame().header)
        assert await refusal(office.relay.answer(office.sender, detours.RequestFrameUpload(header=header))) == code
        announced = detours.AnnounceFrame(header=header, signature="s")
        assert await refusal(office.relay.answer(office.sender, announced)) == code

    at_the_office(test)


def test_nobody_brings_anothers_frame_and_strangers_bring_nothing() -> None:
    async def test(office: Office) -> None:
        header = office.frame().header
        for other in MINERS:
            if other != office.sender:
                request = detours.RequestFrameUpload(header=header)
                assert await refusal(office.relay.answer(other, request)) == "pathway"
        for asked in (
            detours.CollectFrames(),
            detours.SettleFrame(name="x"),
            detours.RequestFrameUpload(header=header),
        ):
            assert await refusal(office.relay.answer(STRANGER, asked)) == "not-joined"

    at_the_office(test)


def test_a_frame_of_a_lease_that_is_over_or_of_a_closed_sample_is_not_taken() -> None:
    async def test(office: Office) -> None:
        frame = office.frame()
        await office.upload(frame)
        await office.clock.sleep(CONFIG.deadlines.sample_s)
        assert await refusal(office.announce(frame)) == "lease"
        office.run.tick(office.clock.now() - office.run.now_s)
        assert not office.run.state.current.samples[office.lease.sample].is_open
        assert await refusal(office.announce(frame)) == "lease"

    at_the_office(test)


def test_a_receiver_that_is_not_live_gets_no_frames() -> None:
    async def test(office: Office) -> None:
        office.run.done(office.receiver, wire.Leave(num_open_samples=0, session=f"{office.receiver}-1"))
        assert await refusal(office.upload(office.frame())) == "not-live"

    at_the_office(test)


def test_one_pass_has_one_frame() -> None:
    async def test(office: Office) -> None:
        await office.upload(office.frame())
        assert await refusal(office.upload(office.frame(fill=b"\2"))) == "repeated"

    at_the_office(test)


def test_a_receiver_that_does_not_come_is_called_and_then_taken_for_away() -> None:
    async def test(office: Office) -> None:
        began = office.clock.now()
        frame = office.frame()
        await office.upload(frame)
        assert await refusal(office.announce(frame)) == "away"
        assert office.num_wakes == 1
        assert COME_S <= office.clock.now() - began < 2 * COME_S
        other = office.run.lease(office.sender)[0]
        while other.hops[1] != office.receiver:
            other = office.run.lease(office.sender)[0]
        assert await refusal(office.upload(office.frame(lease=other))) == "away"
        await office.clock.sleep(AWAY_S)
        await office.upload(office.frame(lease=other))

    at_the_office(test)


def test_who_is_called_is_told_by_its_directive_until_it_collects() -> None:
    async def test(office: Office) -> None:
        frame = office.frame()
        await office.upload(frame)
        assert not office.relay.is_calling(office.receiver)
        announced = asyncio.create_task(office.announce(frame))
        await office.clock.sleep(0.1)
        assert office.relay.is_calling(office.receiver) and not office.relay.is_calling(office.sender)
        (waiting,) = await office.collect()
        assert not office.relay.is_calling(office.receiver)
        await office.settle(waiting.name)
        await announced

    at_the_office(test)


def test_a_collection_waits_for_what_is_not_known_yet() -> None:
    async def test(office: Office) -> None:
        frame = office.frame()
        await office.upload(frame)
        announced = asyncio.create_task(office.announce(frame))
        (waiting,) = await office.collect()
        assert await office.collect() == [waiting], "an answer that was lost is given again"
        began = office.clock.now()
        with pytest.raises(Backpressure):  # meanwhile its sender was told to ask again
            assert await office.collect(waiting.name) == []
            assert office.clock.now() - began == pytest.approx(HOLD_S)
            await announced

    at_the_office(test)


def test_a_sender_has_only_so_many_frames_on_the_way() -> None:
    async def test(office: Office) -> None:
        limit = OPEN_PER_SAMPLE * CONFIG.training.max_in_flight
        granted = 0
        with pytest.raises(Backpressure):
            for lease in office.run.lease(office.sender, count=limit + 1):
                await office.upload(office.frame(lease=lease))
                granted += 1
        assert granted == limit
        await office.clock.sleep(CONFIG.deadlines.sample_s)
        office.run.tick(office.clock.now() - office.run.now_s)
        await office.upload(office.frame(lease=office.run.lease(office.sender)[0]))

    at_the_office(test)


def test_a_lease_that_ends_tells_its_sender() -> None:
    async def test(office: Office) -> None:
        frame = office.frame()
        await office.upload(frame)
        announced = asyncio.create_task(office.announce(frame))
        await office.collect()
        reroute = wire.Reroute(lease=office.lease, stage=StageIndex(1))
        replaced = office.run.ask(office.sender, reroute)
        assert isinstance(replaced, wire.Leases)
        await office.clock.sleep(SWEEP_S)
        other = office.run.lease(office.sender)[0]
        await office.upload(office.frame(lease=other))
        assert await refusal(announced) == "not-taken"
        await office.settle(detours.frame_name(office.sender, frame.header))  # nobody waits for the word any more

    at_the_office(test)

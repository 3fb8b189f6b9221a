"""The receiver's half of the detour: a fetched frame is looked at like a pushed one, with the same answer (trust.md 6)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from neurons.roles.collector import ANSWER_S, FETCHES, QUIET_S, TRIES, Collector
from neurons.roles.detour import DetourCounters
from subnet import detours, frames, wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.memory import MemoryBlobs, MemoryBlobStore
from subnet.detours import MAX_WAITING
from subnet.errors import Backpressure, ProtocolViolation, Refused, TransientFailure
from subnet.frames import Frame
from subnet.sim.loop import EPOCH_S, VirtualClock, run
from subnet.sim.network import Network, NetworkConfig, SimControl
from subnet.types import Direction, Epoch, FrameHeader, Hotkey, Lease, SampleId, StageIndex

ME, PEER, EVE = (KeypairSigner.from_uri(f"//{name}", deterministic=True) for name in ("me", "peer", "eve"))
HOLD_S = 15.0
LIFE_S = 20.0


def frame(sample: int = 0, direction: Direction = Direction.FORWARD) -> Frame:
    lease = Lease(
        run_id="r",
        epoch=Epoch(0),
        sample=SampleId(sample),
        branch=0,
        attempt=0,
        hops=(PEER.hotkey, ME.hotkey),
        deadline_s=EPOCH_S + LIFE_S,
    )
    return frames.make(lease, stage=StageIndex(1), direction=direction, shape=(1, 2, 1), payload=b"\1\2\3\4")


@dataclass
class World:
    """A collector, and an orchestrator that offers what a test puts into `waiting` until it is settled."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    waiting: dict[str, detours.WaitingFrame] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)
    taken: list[tuple[Hotkey, Frame]] = field(default_factory=list)
    expect: Callable[[FrameHeader], None] = lambda header: None
    refuse: list[Exception] = field(default_factory=list)
    """What taking a frame raises, in turn."""
    errors: list[Exception] = field(default_factory=list)
    """What collecting raises, in turn."""
    is_deaf: bool = False
    """Whether the orchestrator refuses to hear what became of a frame."""
    num_collections: int = 0
    num_fetches: int = 0

    def __post_init__(self) -> None:
        self.store = MemoryBlobStore(self.clock)
        self.counters = DetourCounters()
        network = Network(NetworkConfig(), seed=0, clock=self.clock)
        network.server.handler = self.handle
        self.collector = Collector(
            control=SimControl(network, ME.hotkey, self.clock),
            blobs=self,
            signer=ME,
            clock=self.clock,
            expect=self.expect,
            take=self.take,
            counters=self.counters,
        )

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        self.num_fetches += 1
        return await MemoryBlobs(self.store).get(url, start=start, size_bytes=size_bytes, limit_bytes=limit_bytes)

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        raise AssertionError("a frame's payload is read as bytes")

    async def put(self, url: str, data: bytes) -> None:
        raise AssertionError("a receiver stores nothing")

    async def take(self, sender: Hotkey, arrived: Frame) -> None:
        if self.refuse:
            raise self.refuse.pop(0)
        self.taken.append((sender, arrived))

    async def handle(self, sender: Hotkey, envelope: wire.Envelope) -> wire.Response:
        match envelope.request:
            case detours.CollectFrames(known=known):
                self.num_collections += 1
                if self.errors:
                    raise self.errors.pop()
                fresh = [waiting for name, waiting in self.waiting.items() if name not in known]
                if not fresh:
                    await self.clock.sleep(HOLD_S)
                return detours.WaitingFrames(frames=tuple(fresh))
            case detours.SettleFrame(name=name, refusal=refusal):
                if self.is_deaf:
                    self.waiting.pop(name, None)
                    raise Refused("not-joined", "join first")
                self.settled[name] = refusal
                self.waiting.pop(name, None)
                return wire.Done()
            case _:
                raise AssertionError("asks for nothing else")

    async def offer(self, sent: Frame, *, signer: KeypairSigner = PEER, stored: bytes | None = None) -> str:
        key = f"{sent.pass_id}-{sent.header.payload_digest}"
        await self.store.put(key, sent.payload if stored is None else stored)
        waiting = detours.WaitingFrame(
            sender=PEER.hotkey,
            header=sent.header,
            signature=signer.sign(detours.frame_bytes(sent.header, receiver=ME.hotkey)),
            url=self.store.download_url(key, expires_at_s=EPOCH_S + LIFE_S),
        )
        self.waiting[waiting.name] = waiting
        return waiting.name

    async def collect(self, seconds: float) -> None:
        """Called once, then left alone for a while."""
        self.collector.call()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.collector.run()


def collected(
    *sent: Frame,
    signer: KeypairSigner = PEER,
    stored: bytes | None = None,
    expect: Callable[[FrameHeader], None] = lambda header: None,
    refuse: tuple[Exception, ...] = (),
    seconds: float = LIFE_S + 5.0,
) -> World:
    """What becomes of frames that wait when the collector is called."""
    worlds: list[World] = []

    async def main() -> None:
        world = World(expect=expect, refuse=list(refuse))
        worlds.append(world)
        for one in sent:
            await world.offer(one, signer=signer, stored=stored)
        await world.collect(seconds)

    run(main())
    return worlds[0]


def said(world: World) -> str:
    """The one word that a sender heard."""
    (word,) = world.settled.values()
    return word


def test_what_waits_is_fetched_handed_over_and_settled() -> None:
    world = collected(frame(1), frame(2))
    assert world.taken == [(PEER.hotkey, frame(1)), (PEER.hotkey, frame(2))]
    assert set(world.settled.values()) == {""}
    assert (world.counters.frames_received, world.counters.payload_bytes_received) == (2, 8)


def test_a_frame_that_its_sender_has_not_signed_is_not_even_fetched() -> None:
    world = collected(frame(), signer=EVE)
    assert (world.taken, world.num_fetches) == ([], 0)
    assert "not signed" in said(world)


@pytest.mark.parametrize("stored", [b"\1\2\3\5", b"\1\2\3", b"\1\2\3\4\5", b""])
def test_other_bytes_than_the_header_names_are_refused(stored: bytes) -> None:
    world = collected(frame(), stored=stored)
    assert not world.taken and said(world)


def test_a_header_that_is_not_expected_is_refused_before_anything_is_fetched() -> None:
    def expect(header: FrameHeader) -> None:
        raise ProtocolViolation("frame is for stage 1, this miner holds stage 2")

    world = collected(frame(), expect=expect)
    assert world.num_fetches == 0 and "holds stage 2" in said(world)


def test_the_miners_own_refusal_is_the_senders_answer() -> None:
    world = collected(frame(), refuse=(Refused("repeated", "the same activation came under sample 7"),))
    assert said(world) == "the same activation came under sample 7"


def test_a_frame_waits_in_the_store_until_there_is_room_and_others_pass_it() -> None:
    busy = {"forward"}

    def expect(header: FrameHeader) -> None:
        if header.direction in busy:
            raise Backpressure("the buffer for activations is full")

    async def main() -> None:
        world = World(expect=expect)
        for number in range(2 * FETCHES):
            await world.offer(frame(number))
        gradient = frame(99, Direction.BACKWARD)
        await world.offer(gradient)
        await world.collect(5.0)
        assert world.taken == [(PEER.hotkey, gradient)] and world.num_fetches == 1
        busy.clear()
        await world.collect(5.0)
        assert len(world.taken) == 2 * FETCHES + 1

    run(main())


def test_a_frame_for_which_there_is_never_room_ends_with_its_lease() -> None:
    def expect(header: FrameHeader) -> None:
        raise Backpressure("full")

    assert "lease ran out" in said(collected(frame(), expect=expect))


def test_a_buffer_that_fills_meanwhile_is_waited_for() -> None:
    world = collected(frame(), refuse=(Backpressure("full"),) * 3)
    assert (said(world), len(world.taken)) == ("", 1)


def test_a_payload_that_is_not_there_is_tried_again_and_then_reported() -> None:
    async def main() -> None:
        world = World()
        await world.offer(frame())
        await world.store.delete(f"{frame().pass_id}-{frame().header.payload_digest}")
        await world.collect(LIFE_S)
        assert world.num_fetches == TRIES and "could not be fetched" in said(world)

    run(main())


def test_the_collector_rests_when_nothing_has_come_for_a_while_and_can_be_called_again() -> None:
    async def main() -> None:
        world = World()
        await world.collect(10 * QUIET_S)
        assert world.num_collections == QUIET_S / HOLD_S
        await world.collect(HOLD_S)
        assert world.num_collections == QUIET_S / HOLD_S + 1

    run(main())


@pytest.mark.parametrize("error", [TransientFailure("down"), Refused("not-joined", "join first")])
def test_an_orchestrator_that_does_not_answer_now_is_asked_again(error: Exception) -> None:
    async def main() -> None:
        world = World(errors=[error] * 3)
        await world.offer(frame())
        for _ in range(4):
            await world.collect(4.0)
        assert len(world.taken) == 1

    run(main())


def test_an_orchestrator_that_is_away_for_minutes_is_asked_again() -> None:
    async def main() -> None:
        world = World(errors=[TransientFailure("down")] * 10_000)
        await world.collect(3 * ANSWER_S)
        num_asked = world.num_collections
        await world.collect(ANSWER_S)
        assert world.num_collections > num_asked > 100

    run(main())


def test_a_word_that_nobody_hears_costs_nothing() -> None:
    async def main() -> None:
        world = World(is_deaf=True)
        await world.offer(frame(1))
        await world.offer(frame(2))
        await world.collect(5.0)
        assert (len(world.taken), world.settled) == (2, {})

    run(main())


def test_only_so_many_frames_are_open_at_a_time() -> None:
    busy = {"forward"}

    def expect(header: FrameHeader) -> None:
        if header.direction in busy:
            raise Backpressure("the buffer for activations is full")

    async def main() -> None:
        world = World(expect=expect)
        for number in range(MAX_WAITING + 10):
            await world.offer(frame(number))
        collecting = asyncio.create_task(world.collect(LIFE_S))
        await world.clock.sleep(5.0)
        assert world.num_collections == 1, "the rest is not asked for"
        busy.clear()
        await collecting
        assert len(world.taken) == MAX_WAITING + 10

    run(main())

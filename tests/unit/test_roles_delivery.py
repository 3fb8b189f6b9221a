"""Getting a frame to the next miner: retried, by the detour, re-routed, or given up and said so (users.md 7, 22, 39)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from neurons.roles.delivery import Delivery
from neurons.roles.detour import Detour, DetourCounters
from subnet import detours, frames, wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.memory import MemoryBlobs, MemoryBlobStore
from subnet.errors import Backpressure, ProtocolViolation, Refused, TransientFailure
from subnet.frames import Frame
from subnet.sim.loop import EPOCH_S, VirtualClock, run
from subnet.sim.network import Network, NetworkConfig, SimControl, SimPeers
from subnet.types import BlobRef, Direction, Endpoint, Epoch, Hotkey, Lease, SampleId, StageIndex

SIGNER = KeypairSigner.from_uri("//me", deterministic=True)
ME, NEXT, OTHER = Hotkey("me"), Hotkey("next"), Hotkey("other")
LEASE = Lease(
    run_id="r", epoch=Epoch(0), sample=SampleId(1), branch=0, attempt=0, hops=(ME, NEXT), deadline_s=EPOCH_S + 10.0
)
SHAPE = (1, 2, 1)
AWAY = Refused("away", "nobody collects")


def frame(direction: Direction = Direction.FORWARD, lease: Lease = LEASE) -> Frame:
    return frames.make(lease, stage=StageIndex(1), direction=direction, shape=SHAPE, payload=bytes(4))


@dataclass
class Outcome:
    lost: list[Lease] = field(default_factory=list)
    rerouted: list[Lease] = field(default_factory=list)
    taken: list[tuple[Hotkey, str]] = field(default_factory=list)
    reroutes_asked: int = 0
    look_ups: int = 0
    num_tries: int = 0
    num_delivered: int = 0
    detours_asked: int = 0
    num_detoured: int = 0


Answers = dict[Hotkey, list[Exception | None]]


@dataclass
class World:
    """Receivers and an orchestrator around one delivery."""

    answers: Answers
    reroute: Callable[[], wire.Response | Exception]
    detour: Exception | None
    found: Outcome
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self.network = Network(NetworkConfig(), seed=0, clock=self.clock)
        self.network.server.handler = self.handle
        self.store = MemoryBlobStore(self.clock)
        for name in self.answers:
            SimPeers(self.network, name).on_frame(self.receiver(name))

    def receiver(self, name: Hotkey) -> Callable[[Hotkey, Frame], Awaitable[None]]:
        async def take(sender: Hotkey, arrived: Frame) -> None:
            self.found.num_tries += 1
            error = self.answers[name].pop(0) if self.answers[name] else None
            if error is not None:
                raise error
            self.found.taken.append((name, arrived.pass_id))

        return take

    async def handle(self, sender: Hotkey, envelope: wire.Envelope) -> wire.Response:
        answer: wire.Response | Exception
        match envelope.request:
            case wire.GetPeers(stage=stage):
                assert stage == 1
                self.found.look_ups += 1
                here = Endpoint(host="h", port=1)
                return wire.StagePeers(peers=tuple(wire.StagePeer(hotkey=name, endpoint=here) for name in self.answers))
            case detours.RequestFrameUpload(header=header):
                self.found.detours_asked += 1
                ref = BlobRef(key=header.pass_id, digest=header.payload_digest, size_bytes=4)
                return wire.UploadGrant(ref=ref, url=self.store.upload_url(ref, expires_at_s=self.clock.now() + 60.0))
            case detours.AnnounceFrame():
                answer = self.detour or wire.Done()
            case _:
                self.found.reroutes_asked += 1
                answer = self.reroute()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def deliver(self, *sent: Frame, pause_s: float = 0.0) -> None:
        control, counters = SimControl(self.network, ME, self.clock), DetourCounters()
        by_store = Detour(
            control=control, blobs=MemoryBlobs(self.store), signer=SIGNER, clock=self.clock, counters=counters
        )
        found = self.found
        async with asyncio.TaskGroup() as group:
            peers = SimPeers(self.network, ME)
            delivery = Delivery(peers=peers, control=control, detour=by_store, clock=self.clock, group=group)
            for one in sent:
                delivery.start(one, on_lost=found.lost.append, on_rerouted=found.rerouted.append)
                await self.clock.sleep(pause_s)
        found.num_delivered, found.num_detoured = delivery.num_delivered, counters.frames_sent
        assert counters.payload_bytes_sent == 4 * counters.frames_sent
        assert delivery.num_lost + delivery.num_delivered == len(sent)
        assert sum(delivery.payload_bytes.values()) == 4 * delivery.num_delivered


def deliver(
    answers: Answers,
    *,
    direction: Direction = Direction.FORWARD,
    reroute: Callable[[], wire.Response | Exception] = lambda: Refused("no-replica", "none is left"),
    detour: Exception | None = AWAY,
    lease: Lease = LEASE,
) -> Outcome:
    """Deliver one frame; each receiver answers with its exceptions in turn, then takes what comes.

    `detour` is what a frame that was announced comes to: nobody collects anything unless a test says so.
    """
    found = Outcome()

    async def main() -> None:
        await World(answers, reroute, detour, found).deliver(frame(direction, lease))

    run(main())
    return found


def test_a_frame_arrives() -> None:
    found = deliver({NEXT: []})
    assert found.taken == [(NEXT, frame().pass_id)]
    assert (found.lost, found.rerouted, found.num_delivered, found.look_ups) == ([], [], 1, 1)


def test_who_does_not_answer_is_looked_up_again_for_it_may_have_moved() -> None:
    found = deliver({NEXT: [TransientFailure("reset")]})
    assert (found.num_tries, found.num_delivered, found.look_ups) == (2, 1, 2)
    full = deliver({NEXT: [Backpressure("full")] * 3})
    assert (full.num_delivered, full.look_ups) == (1, 1)


def test_a_full_buffer_is_waited_for_and_never_counts_as_a_failure() -> None:
    found = deliver({NEXT: [Backpressure("full")] * 20})
    assert (found.num_tries, found.num_delivered, found.reroutes_asked) == (21, 1, 0)


def test_a_buffer_that_stays_full_ends_with_the_lease() -> None:
    found = deliver({NEXT: [Backpressure("full")] * 10_000})
    assert found.lost == [LEASE] and found.num_delivered == 0
    assert found.reroutes_asked == 0, "no time is left for another miner"


OTHER_LEASE = msgspec.structs.replace(LEASE, attempt=1, hops=(ME, OTHER))


def test_a_miner_that_cannot_be_reached_is_replaced_by_the_orchestrators_draw() -> None:
    found = deliver({OTHER: []}, reroute=lambda: wire.Leases(leases=(OTHER_LEASE,)))
    assert found.taken == [(OTHER, frame(lease=OTHER_LEASE).pass_id)]
    assert found.rerouted == [OTHER_LEASE] and not found.lost


@pytest.mark.parametrize("error", [Refused("epoch", "over"), ProtocolViolation("bad")])
def test_a_refusal_is_not_retried(error: Exception) -> None:
    found = deliver({NEXT: [error], OTHER: []}, reroute=lambda: wire.Leases(leases=(OTHER_LEASE,)))
    assert found.num_tries == 2
    assert found.taken == [(OTHER, frame(lease=OTHER_LEASE).pass_id)]


@pytest.mark.parametrize(
    "answer", [Refused("no-replica", "none"), ProtocolViolation("bad"), wire.Done(), wire.Leases(leases=())]
)
def test_without_a_replica_the_sample_is_lost_and_its_miner_is_told(answer: wire.Response | Exception) -> None:
    found = deliver({}, reroute=lambda: answer)
    assert found.lost == [LEASE]
    assert found.num_delivered == 0


def test_a_gradient_goes_back_where_its_activation_came_from_or_nowhere() -> None:
    found = deliver({}, direction=Direction.BACKWARD)
    assert (found.reroutes_asked, found.lost, found.num_delivered) == (0, [], 0)


def test_an_expired_lease_is_not_even_tried() -> None:
    found = deliver({NEXT: []}, lease=msgspec.structs.replace(LEASE, deadline_s=EPOCH_S))
    assert (found.num_tries, len(found.lost)) == (0, 1)


GONE = TransientFailure("connection refused")


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_a_frame_that_cannot_be_pushed_twice_goes_through_the_store(direction: Direction) -> None:
    found = deliver({NEXT: [GONE] * 10}, direction=direction, detour=None)
    assert (found.num_tries, found.num_delivered, found.num_detoured) == (2, 1, 1)
    assert (found.reroutes_asked, found.lost) == (0, [])


@pytest.mark.parametrize("refused", [AWAY, Refused("not-taken", "NaN"), ProtocolViolation("bad")])
def test_what_the_detour_does_not_deliver_goes_to_another_miner_as_ever(refused: Exception) -> None:
    answers: Answers = {NEXT: [GONE] * 2, OTHER: []}
    found = deliver(answers, detour=refused, reroute=lambda: wire.Leases(leases=(OTHER_LEASE,)))
    assert found.taken == [(OTHER, frame(lease=OTHER_LEASE).pass_id)]
    assert (found.detours_asked, found.num_detoured, found.rerouted) == (1, 0, [OTHER_LEASE])


def test_a_refusal_takes_no_detour() -> None:
    assert deliver({NEXT: [Refused("epoch", "over")]}, detour=None).detours_asked == 0


def test_a_detour_that_never_ends_ends_with_the_lease() -> None:
    found = deliver({NEXT: [GONE] * 2}, detour=Backpressure("not taken yet"))
    assert (found.num_delivered, found.lost) == (0, [LEASE])


def many(answers: Answers) -> Outcome:
    """One frame a second for a minute, and a detour that delivers."""
    found = Outcome()
    far = [msgspec.structs.replace(LEASE, sample=SampleId(n), deadline_s=EPOCH_S + 100.0) for n in range(60)]

    async def main() -> None:
        world = World(answers, lambda: Refused("no-replica", "none"), None, found)
        await world.deliver(*(frame(lease=lease) for lease in far), pause_s=1.0)

    run(main())
    assert found.num_delivered == len(far) and not found.lost
    return found


def test_a_peer_that_is_out_of_reach_is_not_dialled_for_every_frame_and_found_when_it_is_back() -> None:
    """Two tries, then looks after 5, 10 and 20 s, of which the last one is answered; from then on frames are pushed."""
    found = many({NEXT: [GONE] * 4})
    assert 30 < found.num_detoured < 45
    assert found.num_tries == 4 + 1 + (60 - found.num_detoured)


@pytest.mark.parametrize("answer", [Refused("epoch", "over"), Backpressure("full")])
def test_whatever_a_peer_answers_to_a_look_it_is_in_reach(answer: Exception) -> None:
    found = many({NEXT: [GONE, GONE, answer]})
    assert 5 <= found.num_detoured < 10


def test_a_peer_that_nobody_knows_is_not_looked_for() -> None:
    """It has left, so nobody would collect either."""
    found = deliver({})
    assert (found.num_tries, found.detours_asked) == (0, 0)

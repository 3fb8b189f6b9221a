"""Getting a frame to the next miner: retried, re-routed, or given up and said so (users.md 7, 22)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from neurons.roles.delivery import Delivery
from subnet import frames, wire
from subnet.errors import Backpressure, ProtocolViolation, Refused, TransientFailure
from subnet.frames import Frame
from subnet.sim.loop import EPOCH_S, VirtualClock, run
from subnet.sim.network import Network, NetworkConfig, SimControl, SimPeers
from subnet.types import Direction, Endpoint, Epoch, Hotkey, Lease, SampleId, StageIndex

ME, NEXT, OTHER = Hotkey("me"), Hotkey("next"), Hotkey("other")
LEASE = Lease(
    run_id="r", epoch=Epoch(0), sample=SampleId(1), branch=0, attempt=0, hops=(ME, NEXT), deadline_s=EPOCH_S + 10.0
)
SHAPE = (1, 2, 1)


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


def deliver(
    answers: dict[Hotkey, list[Exception | None]],
    *,
    direction: Direction = Direction.FORWARD,
    reroute: Callable[[], wire.Response | Exception] = lambda: Refused("no-replica", "none is left"),
    lease: Lease = LEASE,
) -> Outcome:
    """Deliver one frame; each receiver answers with its exceptions in turn, then takes what comes."""
    found = Outcome()
    here = Endpoint(host="h", port=1)
    peers = wire.StagePeers(peers=tuple(wire.StagePeer(hotkey=name, endpoint=here) for name in answers))

    async def main() -> None:
        clock = VirtualClock()
        network = Network(NetworkConfig(), seed=0, clock=clock)

        def receiver(name: Hotkey) -> Callable[[Hotkey, Frame], Awaitable[None]]:
            async def take(sender: Hotkey, arrived: Frame) -> None:
                found.num_tries += 1
                error = answers[name].pop(0) if answers[name] else None
                if error is not None:
                    raise error
                found.taken.append((name, arrived.pass_id))

            return take

        async def handle(sender: Hotkey, envelope: wire.Envelope) -> wire.Response:
            if isinstance(envelope.request, wire.GetPeers):
                assert envelope.request.stage == 1
                found.look_ups += 1
                return peers
            found.reroutes_asked += 1
            answer = reroute()
            if isinstance(answer, Exception):
                raise answer
            return answer

        for name in answers:
            SimPeers(network, name).on_frame(receiver(name))
        network.server.handler = handle
        async with asyncio.TaskGroup() as group:
            delivery = Delivery(
                peers=SimPeers(network, ME), control=SimControl(network, ME, clock), clock=clock, group=group
            )
            delivery.start(frame(direction, lease), on_lost=found.lost.append, on_rerouted=found.rerouted.append)
        found.num_delivered = delivery.num_delivered
        assert delivery.num_lost + delivery.num_delivered == 1
        assert delivery.payload_bytes[direction] == 4 * delivery.num_delivered

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

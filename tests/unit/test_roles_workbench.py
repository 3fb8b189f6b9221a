"""Which frames a miner puts work into: a sample once, whoever brings it (trust.md 1.2)."""

import asyncio
import math

import msgspec
import pytest

from neurons.roles.books import Books
from neurons.roles.delivery import Delivery
from neurons.roles.detour import Detour, DetourCounters
from neurons.roles.ports import MinerPorts
from neurons.roles.workbench import Workbench
from subnet import frames, receipts
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.corpus import make_corpus
from subnet.adapters.memory import InlineCompute, MemoryBlobs, MemoryBlobStore, MemoryDisk
from subnet.config import RunConfig
from subnet.errors import ProtocolViolation, Refused
from subnet.frames import Frame
from subnet.sim.loop import VirtualClock
from subnet.sim.network import Network, NetworkConfig, SimControl, SimPeers
from subnet.training.pipeline import StageWorker
from subnet.types import Direction, Epoch, Lease, SampleId, StageIndex
from tests.sim.world import CONFIG

OWNER, ME, FIRST, SECOND, THIRD = (
    KeypairSigner.from_uri(f"//{name}", deterministic=True) for name in ("owner", "me", "first", "second", "third")
)
MINE = StageIndex(2)


def bench(config: RunConfig = CONFIG) -> Workbench:
    """A miner of the last stage, at work in epoch 0."""
    clock = VirtualClock()
    network = Network(NetworkConfig(), seed=0, clock=clock)
    ports = MinerPorts(
        signer=ME,
        control=SimControl(network, ME.hotkey, clock),
        peers=SimPeers(network, ME.hotkey),
        blobs=MemoryBlobs(MemoryBlobStore(clock)),
        disk=MemoryDisk(),
        corpus=make_corpus(config),
        compute=InlineCompute(),
        clock=clock,
    )
    by_store = Detour(control=ports.control, blobs=ports.blobs, signer=ME, clock=clock, counters=DetourCounters())
    made = Workbench(
        config=config,
        run_id="r",
        orchestrator=OWNER.hotkey,
        worker=StageWorker(config, MINE),
        books=Books(run_id="r", hotkey=ME.hotkey, stage=MINE, disk=ports.disk),
        delivery=Delivery(
            peers=ports.peers, control=ports.control, detour=by_store, clock=clock, group=asyncio.TaskGroup()
        ),
        ports=ports,
    )
    made.begin(Epoch(0))
    return made


def activation(sender: KeypairSigner, *, sample: int, attempt: int = 0, epoch: int = 0, fill: bytes = b"\x01") -> Frame:
    """What the miner of the middle stage sends under a signed lease."""
    lease = Lease(
        run_id="r",
        epoch=Epoch(epoch),
        sample=SampleId(sample),
        branch=0,
        attempt=attempt,
        hops=(FIRST.hotkey, sender.hotkey, ME.hotkey),
        deadline_s=1e10,
    )
    lease = msgspec.structs.replace(lease, signature=OWNER.sign(receipts.lease_bytes(lease)))
    payload = fill * (2 * math.prod(CONFIG.wire_shape))
    return frames.make(lease, stage=MINE, direction=Direction.FORWARD, shape=CONFIG.wire_shape, payload=payload)


async def test_a_frame_delivered_again_is_taken_once_and_not_refused() -> None:
    mine, frame = bench(), activation(SECOND, sample=1)
    await mine.take(SECOND.hotkey, frame)
    await mine.take(SECOND.hotkey, frame)


async def test_a_sample_that_comes_from_another_miner_after_a_reroute_is_refused() -> None:
    """Its first bearer died after it had passed it on: worked twice in a segment, it would fail an honest miner's audit."""
    mine = bench()
    await mine.take(SECOND.hotkey, activation(SECOND, sample=1))
    with pytest.raises(Refused, match="sample 1 came here before, from another miner: a third has to take it"):
        await mine.take(THIRD.hotkey, activation(THIRD, sample=1, attempt=1, fill=b"\x02"))
    await mine.take(THIRD.hotkey, activation(THIRD, sample=2, fill=b"\x02"))


async def test_the_activation_of_another_sample_is_refused_and_its_sample_is_not_used_up() -> None:
    mine = bench()
    await mine.take(SECOND.hotkey, activation(SECOND, sample=1))
    with pytest.raises(Refused, match="the same activation came under sample 1"):
        await mine.take(SECOND.hotkey, activation(SECOND, sample=2))
    await mine.take(THIRD.hotkey, activation(THIRD, sample=2, attempt=1, fill=b"\x02"))


async def test_a_sample_may_come_again_in_another_epoch() -> None:
    mine = bench()
    await mine.take(SECOND.hotkey, activation(SECOND, sample=1))
    mine.begin(Epoch(1))
    await mine.take(THIRD.hotkey, activation(THIRD, sample=1, epoch=1))


async def test_room_is_asked_for_only_under_a_lease_that_the_orchestrator_signed() -> None:
    """`expect` answers before any byte of a payload is read: a forged lease must not get that far, nor a signature twice."""
    mine, genuine = bench(), activation(SECOND, sample=1).header
    mine.expect(genuine)
    forged = msgspec.structs.replace(genuine.lease, signature=SECOND.sign(receipts.lease_bytes(genuine.lease)))
    moved = msgspec.structs.replace(genuine.lease, sample=SampleId(2))
    for lease in (forged, moved):
        with pytest.raises(ProtocolViolation, match="not signed by this run's orchestrator"):
            mine.expect(msgspec.structs.replace(genuine, lease=lease))
    mine.expect(genuine)
    await mine.take(SECOND.hotkey, activation(SECOND, sample=1))

"""One frame by the detour over everything real: signed requests on loopback, presigned URLs, an S3 server (DESIGN D84)."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from neurons.roles.collector import Collector
from neurons.roles.detour import Detour, DetourCounters
from neurons.roles.relay import Relay
from subnet import detours, frames, wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.blobs import HttpBlobs
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.http_server import mount_control
from subnet.adapters.listener import Listener
from subnet.adapters.s3 import Bucket, S3BlobStore
from subnet.adapters.system import SystemClock
from subnet.frames import Frame
from subnet.orchestration.objects import folder
from subnet.types import Direction, Hotkey, StageIndex
from tests.unit.orchestration import CONFIG, RUN, Run, created

CLOCK = SystemClock()
OWNER = KeypairSigner.from_uri("//owner")
SIGNERS = {signer.hotkey: signer for signer in (KeypairSigner.from_uri(f"//miner{number}") for number in range(6))}


def training() -> Run:
    """A run whose miners have real keys, in its first epoch, by the clock on the wall."""
    run = Run(now_s=CLOCK.now())
    run.feed(created())
    run.chain(registered=tuple(SIGNERS), permits=())
    run.join(*SIGNERS)
    run.ready(*SIGNERS)
    return run


class Receiver:
    """Takes every frame."""

    def __init__(self) -> None:
        self.taken: list[tuple[Hotkey, Frame]] = []

    async def take(self, sender: Hotkey, frame: Frame) -> None:
        self.taken.append((sender, frame))


@contextlib.asynccontextmanager
async def orchestrating(relay: Relay) -> AsyncIterator[str]:
    """Answers the requests of the detour under a URL."""

    async def handle(sender: Hotkey, envelope: wire.Envelope) -> wire.Response:
        assert isinstance(envelope.request, detours.DetourRequest)
        return await relay.answer(sender, envelope.request)

    listener = Listener()
    mount_control(listener, handle, receiver=OWNER.hotkey, clock=CLOCK, taken_over_s=0.0)
    await listener.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.port}"
    finally:
        await listener.stop()


async def test_a_frame_goes_through_a_real_bucket_and_leaves_nothing_there(s3_bucket: Bucket) -> None:
    run, store, receiver, counters = training(), S3BlobStore(s3_bucket, clock=CLOCK), Receiver(), DetourCounters()
    lease = run.lease(run.state.current.roster[0][0])[0]
    payload = bytes(range(256)) * (math.prod(CONFIG.wire_shape) * CONFIG.wire_item_bytes // 256)
    frame = frames.make(
        lease, stage=StageIndex(1), direction=Direction.FORWARD, shape=CONFIG.wire_shape, payload=payload
    )
    called = asyncio.Event()
    relay = Relay(config=CONFIG, state=lambda: run.state, blobs=store, clock=CLOCK, wake=called.set)
    sending, receiving = (SIGNERS[hotkey] for hotkey in lease.hops[:2])
    async with orchestrating(relay) as url, open_session() as session:

        def control(signer: KeypairSigner) -> HttpControl:
            return HttpControl(session, url, signer=signer, orchestrator=OWNER.hotkey, clock=CLOCK)

        collector = Collector(
            control=control(receiving),
            blobs=HttpBlobs(session),
            signer=receiving,
            clock=CLOCK,
            expect=lambda header: None,
            take=receiver.take,
            counters=counters,
        )
        detour = Detour(
            control=control(sending), blobs=HttpBlobs(session), signer=sending, clock=CLOCK, counters=counters
        )
        collecting = asyncio.create_task(collector.run())
        sent = asyncio.create_task(detour.send(receiving.hotkey, frame))
        await called.wait()
        collector.call()
        await sent
        collecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await collecting
    assert receiver.taken == [(sending.hotkey, frame)]
    assert (counters.frames_sent, counters.frames_received) == (1, 1)
    assert (counters.payload_bytes_sent, counters.payload_bytes_received) == (len(payload), len(payload))
    left = folder(RUN, epoch=0, kind=detours.KIND)
    assert await store.size(f"{left}/{sending.hotkey}/{frame.pass_id}-{frame.header.payload_digest}") is None

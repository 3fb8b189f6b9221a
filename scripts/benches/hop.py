"""Hop of a 1 MiB activation between two processes, receipts on both sides, against plain aiohttp with the same bytes."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import msgspec
import numpy as np
import yarl
from aiohttp import web

from benches.measure import Child, Line, answer_questions, children, fact, limit, median, percentile, run_loop
from neurons.roles.books import Attested, Books
from neurons.roles.delivery import Delivery
from neurons.roles.detour import Detour, DetourCounters
from neurons.roles.ports import MinerPorts
from neurons.roles.workbench import Workbench
from subnet import frames, receipts
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.blobs import HttpBlobs
from subnet.adapters.corpus import make_corpus
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.memory import MemoryDisk
from subnet.adapters.peers import HttpPeers
from subnet.adapters.system import SystemClock, ThreadCompute
from subnet.config import ModelConfig, RunConfig, TrainingConfig
from subnet.training.pipeline import StageWorker
from subnet.types import Digest, Direction, Endpoint, Epoch, FrameHeader, Hotkey, Lease, Receipt, SampleId, StageIndex

RUN = "bench"
EPOCH = Epoch(0)
CONFIG = RunConfig(
    model=ModelConfig(width=64, num_layers=2, num_heads=2, num_kv_heads=2, ffn_width=64, bottleneck_width=64),
    training=TrainingConfig(num_stages=2, microbatch_size=8, num_tokens=1024),
)
PAYLOAD_BYTES = 1 << 20
_BLOCK = 20
"""Exchanges of one side before it is the other's turn."""
_FAR_S = 1e12


def signer(name: str) -> KeypairSigner:
    return KeypairSigner.from_uri(f"//Bench//{name}")


def receipt(header: FrameHeader, *, stage: int, direction: Direction) -> Receipt:
    """What the sender (its output) or the receiver (its input) puts on its chain for this payload."""
    is_sender = stage != header.stage
    return Receipt(
        run_id=RUN,
        epoch=EPOCH,
        sample=header.sample,
        branch=0,
        stage=StageIndex(stage),
        direction=direction,
        params_version=0,
        input_digest=Digest("") if is_sender else header.payload_digest,
        output_digest=header.payload_digest if is_sender else Digest(""),
    )


@asynccontextmanager
async def receiving(session: aiohttp.ClientSession) -> AsyncIterator[tuple[HttpPeers, Books]]:
    """Stage 1 as a miner has it: port, workbench, books."""

    def expect(header: FrameHeader) -> None:
        workbench.expect(header)

    me, clock = signer("receiver"), SystemClock()
    peers = HttpPeers(me, session=session, clock=clock, expect=expect)
    control = HttpControl(session, "http://127.0.0.1:1", signer=me, orchestrator=signer("owner").hotkey, clock=clock)
    ports = MinerPorts(
        signer=me,
        control=control,
        peers=peers,
        blobs=HttpBlobs(session),
        disk=MemoryDisk(),
        corpus=make_corpus(CONFIG),
        compute=ThreadCompute(),
        clock=clock,
    )
    books = Books(run_id=RUN, hotkey=me.hotkey, stage=StageIndex(1), disk=ports.disk)
    detour = Detour(control=control, blobs=ports.blobs, signer=me, clock=clock, counters=DetourCounters())
    await books.open(EPOCH, b"")
    async with asyncio.TaskGroup() as group:
        workbench = Workbench(
            config=CONFIG,
            run_id=RUN,
            orchestrator=signer("owner").hotkey,
            worker=StageWorker(CONFIG, StageIndex(1)),
            books=books,
            delivery=Delivery(peers=peers, control=control, detour=detour, clock=clock, group=group),
            ports=ports,
        )
        workbench.begin(EPOCH)

        async def take(sender: Hotkey, frame: frames.Frame) -> None:
            await workbench.take(sender, frame)
            workbench.begin(EPOCH)  # as if the worker had taken it from the inbox
            received = Attested(frame.payload, frame.header.payload_digest)
            books.record(receipt(frame.header, stage=1, direction=Direction.FORWARD), received)

        peers.on_frame(take)
        await peers.start("127.0.0.1", 0)
        yield peers, books
        await peers.stop()


def receiver(connection: Connection) -> None:
    """Both sides' receivers in one process."""

    async def plain(request: web.BaseRequest) -> web.StreamResponse:
        b"".join([piece async for piece in request.content.iter_any()])
        return web.Response(status=204)

    async def main() -> None:
        runner = web.ServerRunner(web.Server(plain, read_bufsize=1 << 18, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with open_session() as session, receiving(session) as (peers, books):

            async def reply(question: Any) -> object:
                return {
                    "ours": peers.port,
                    "plain": runner.addresses[0][1],
                    "cpu_s": time.process_time(),
                    "receipts": books.num_receipts,
                }

            await answer_questions(connection, reply)
        await runner.cleanup()

    run_loop(main())


class _Sender:
    """Stage 0, and the plain client beside it."""

    def __init__(self, session: aiohttp.ClientSession, places: dict[str, int]) -> None:
        self._me, self._you, self._owner = signer("sender"), signer("receiver"), signer("owner")
        self._session = session
        self._peers = HttpPeers(self._me, session=session, clock=SystemClock(), expect=lambda header: None)
        self._endpoint = Endpoint(host="127.0.0.1", port=places["ours"])
        self._plain = yarl.URL(f"http://127.0.0.1:{places['plain']}/")
        self.books = Books(run_id=RUN, hotkey=self._me.hotkey, stage=StageIndex(0), disk=MemoryDisk())
        values = np.random.default_rng(0).standard_normal(PAYLOAD_BYTES // 2, dtype=np.float32)
        self._payload = (values.view("<u4") >> 16).astype("<u2").tobytes()  # bf16
        self._head = frames.encode_head(self._frame(self.lease(0)).header)

    def lease(self, sample: int) -> Lease:
        """Signed beforehand: leases come with the work, not with the hop."""
        lease = Lease(
            run_id=RUN,
            epoch=EPOCH,
            sample=SampleId(sample),
            branch=0,
            attempt=0,
            hops=(self._me.hotkey, self._you.hotkey),
            deadline_s=_FAR_S,
        )
        return msgspec.structs.replace(lease, signature=self._owner.sign(receipts.lease_bytes(lease)))

    def _frame(self, lease: Lease) -> frames.Frame:
        return frames.make(
            lease,
            stage=StageIndex(1),
            direction=Direction.FORWARD,
            shape=CONFIG.wire_shape,
            payload=self._payload,
        )

    async def hop(self, lease: Lease) -> None:
        """From a payload to its acknowledged delivery, receipts on both chains."""
        frame = self._frame(lease)
        sent = Attested(frame.payload, frame.header.payload_digest)
        self.books.record(receipt(frame.header, stage=0, direction=Direction.FORWARD), sent)
        await self._peers.send(self._you.hotkey, self._endpoint, frame)

    async def plain(self) -> None:
        """The same number of bytes and nothing else."""
        async with self._session.post(self._plain, data=aiohttp.BytesPayload(self._head + self._payload)) as response:
            await response.read()
            assert response.status == 204


async def _measure(child: Child, blocks: int) -> list[Line]:
    places = await child.ask_later("where")
    async with open_session() as session:
        sender = _Sender(session, places)
        await sender.books.open(EPOCH, b"")
        leases = [sender.lease(number) for number in range((blocks + 1) * _BLOCK)]
        ours: list[float] = []
        plain: list[float] = []
        cpu = {"ours": 0.0, "plain": 0.0}
        for block in range(blocks + 1):
            for side, times in (("ours", ours), ("plain", plain)):
                before = time.process_time() + (await child.ask_later("cpu"))["cpu_s"]
                for number in range(block * _BLOCK, (block + 1) * _BLOCK):
                    began = time.perf_counter()
                    await (sender.hop(leases[number]) if side == "ours" else sender.plain())
                    times.append(time.perf_counter() - began)
                cpu[side] += time.process_time() + (await child.ask_later("cpu"))["cpu_s"] - before
        assert (await child.ask_later("count"))["receipts"] == len(leases)
    ours, plain = ours[_BLOCK:], plain[_BLOCK:]
    return [
        limit("hop of 1 MiB with receipts / plain aiohttp, median", median(ours) / median(plain), 1.3),
        fact(
            "median (p99)",
            f"{1e3 * median(ours):.2f} ({1e3 * percentile(ours, 99):.1f}) ms against "
            f"{1e3 * median(plain):.2f} ({1e3 * percentile(plain, 99):.1f}) ms, {len(ours)} exchanges each",
        ),
        fact(
            "CPU of both processes",
            f"{1e3 * cpu['ours'] / len(leases):.2f} against {1e3 * cpu['plain'] / len(leases):.2f} ms "
            f"({cpu['ours'] / cpu['plain']:.2f}x)",
        ),
    ]


def bench(scale: float) -> list[Line]:
    """Blocks of 20 exchanges, ours and plain in turn."""
    with children(Child(receiver)) as (child,):
        found: list[Line] = run_loop(_measure(child, max(2, round(15 * scale))))
    return found

"""Hop of a 1 MiB activation by the detour against a push: a real orchestrator with a directory of blobs, three processes."""

import asyncio
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benches.fleet import EPOCH, created, join, keys
from benches.measure import Child, Line, answer_questions, children, fact, median, percentile, run_loop
from benches.owner import OWNER, orchestrator_process
from neurons.roles.collector import Collector
from neurons.roles.detour import Detour, DetourCounters
from subnet import frames, wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.blobs import HttpBlobs
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.peers import HttpPeers
from subnet.adapters.system import SystemClock
from subnet.config import DeadlineConfig, ModelConfig, RunConfig, TrainingConfig
from subnet.orchestration.events import encode_event
from subnet.types import Direction, Endpoint, FrameHeader, Hotkey, Lease, StageIndex

CONFIG = RunConfig(
    model=ModelConfig(width=64, num_layers=2, num_heads=2, num_kv_heads=2, ffn_width=64, bottleneck_width=64),
    training=TrainingConfig(
        num_stages=2, min_miners=2, target_batches=1_000_000, microbatch_size=8, num_tokens=1024, max_in_flight=64
    ),
    deadlines=DeadlineConfig(gathering_s=3600, training_s=36000, sample_s=36000, silent_s=3600),
)
PAYLOAD_BYTES = 1 << 20
_BLOCK = 20
"""Frames of one way before it is the other's turn."""


def control_of(session: aiohttp.ClientSession, url: str, signer: KeypairSigner) -> HttpControl:
    """A miner's way to the orchestrator."""
    return HttpControl(session, url, signer=signer, orchestrator=OWNER.hotkey, clock=SystemClock())


async def ready(control: HttpControl) -> StageIndex:
    """Join, and hold what the first epoch starts from."""
    joined = await control.call(join())
    assert isinstance(joined, wire.Joined)
    directive = await control.call(wire.Poll(known_version=0, wait_s=0.0))
    assert isinstance(directive, wire.Directive) and directive.snapshot is not None
    await control.call(wire.Ready(epoch=EPOCH, anchor=directive.snapshot.digest))
    return joined.stage


def receiver(connection: Connection, url: str) -> None:
    """A miner of the last stage that takes whatever comes."""

    def expect(header: FrameHeader) -> None:
        assert header.shape == CONFIG.wire_shape

    async def take(sender: Hotkey, frame: frames.Frame) -> None:
        frames.check_finite(frame)

    async def main() -> None:
        me, clock, counters = keys(2)[0], SystemClock(), DetourCounters()
        async with open_session() as session:
            peers = HttpPeers(me, session=session, clock=clock, expect=expect)
            peers.on_frame(take)
            await peers.start("127.0.0.1", 0)
            control = control_of(session, url, me)
            assert await ready(control) == 1
            collector = Collector(
                control=control,
                blobs=HttpBlobs(session),
                signer=me,
                clock=clock,
                expect=expect,
                take=take,
                counters=counters,
            )
            collector.call()
            collecting = asyncio.create_task(collector.run())

            async def reply(question: Any) -> object:
                return {"port": peers.port, "cpu_s": time.process_time(), "detoured": counters.frames_received}

            await answer_questions(connection, reply)
            collecting.cancel()
            await peers.stop()

    run_loop(main())


class _Sender:
    """A miner of the first stage."""

    def __init__(self, session: aiohttp.ClientSession, url: str, port: int) -> None:
        me, self._you = keys(2)[1], keys(2)[0].hotkey
        self.control = control_of(session, url, me)
        self._peers = HttpPeers(me, session=session, clock=SystemClock(), expect=lambda header: None)
        self._detour = Detour(
            control=self.control, blobs=HttpBlobs(session), signer=me, clock=SystemClock(), counters=DetourCounters()
        )
        self._endpoint = Endpoint(host="127.0.0.1", port=port)
        values = np.random.default_rng(0).standard_normal(PAYLOAD_BYTES // 2, dtype=np.float32)
        self._payload = (values.view("<u4") >> 16).astype("<u2").tobytes()  # bf16

    def _frame(self, lease: Lease) -> frames.Frame:
        shape = CONFIG.wire_shape
        return frames.make(lease, stage=StageIndex(1), direction=Direction.FORWARD, shape=shape, payload=self._payload)

    async def push(self, lease: Lease) -> None:
        """To the receiver's port."""
        await self._peers.send(self._you, self._endpoint, self._frame(lease))

    async def go_round(self, lease: Lease) -> None:
        """Through the store."""
        await self._detour.send(self._you, self._frame(lease))


async def _measure(owner: Child, other: Child, url: str, blocks: int) -> list[Line]:
    place = await other.ask_later("where")
    async with open_session() as session:
        sender = _Sender(session, url, place["port"])
        assert await ready(sender.control) == 0
        times: dict[str, list[float]] = {"push": [], "detour": []}
        cpu_s = dict.fromkeys(times, 0.0)
        for _ in range(blocks + 1):
            for way, send in (("push", sender.push), ("detour", sender.go_round)):
                answer = await sender.control.call(wire.LeaseSamples(epoch=EPOCH, count=_BLOCK))
                assert isinstance(answer, wire.Leases) and len(answer.leases) == _BLOCK
                before = [time.process_time(), *[(await child.ask_later("cpu"))["cpu_s"] for child in (owner, other)]]
                for lease in answer.leases:
                    began = time.perf_counter()
                    await send(lease)
                    times[way].append(time.perf_counter() - began)
                after = [time.process_time(), *[(await child.ask_later("cpu"))["cpu_s"] for child in (owner, other)]]
                cpu_s[way] += sum(after) - sum(before)
        assert (await other.ask_later("count"))["detoured"] == (blocks + 1) * _BLOCK
    push, detour = (times[way][_BLOCK:] for way in ("push", "detour"))
    count = (blocks + 1) * _BLOCK
    return [
        fact("1 MiB by the detour / pushed, median", f"{median(detour) / median(push):.2f}x"),
        fact(
            "median (p99)",
            f"{1e3 * median(detour):.2f} ({1e3 * percentile(detour, 99):.1f}) ms against "
            f"{1e3 * median(push):.2f} ({1e3 * percentile(push, 99):.1f}) ms, {len(push)} frames each",
        ),
        fact(
            "CPU of all three processes",
            f"{1e3 * cpu_s['detour'] / count:.1f} against {1e3 * cpu_s['push'] / count:.1f} ms",
        ),
    ]


def bench(scale: float) -> list[Line]:
    """Blocks of 20 frames, both ways in turn."""
    with tempfile.TemporaryDirectory() as directory:
        hotkeys = [key.hotkey for key in keys(2)]
        genesis = encode_event(created(CONFIG, at_s=time.time())).decode()
        owner = Child(orchestrator_process, str(Path(directory)), hotkeys, genesis)
        with children(owner):
            url = owner.ask("where")["url"]
            with children(Child(receiver, url)) as (other,):
                found: list[Line] = run_loop(_measure(owner, other, url, max(2, round(8 * scale))))
    return found

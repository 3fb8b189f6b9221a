"""The orchestrator at its edge: one process a key, reads that are never journaled, recovery from the journal alone."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from incentives.config import IncentiveConfig
from neurons.description import config_digest
from neurons.init_run import create_run
from neurons.roles.orchestrator import Orchestrator
from neurons.roles.ports import OrchestratorPorts
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.memory import InlineCompute, MemoryBlobStore, MemoryStateStore
from subnet.adapters.memory_chain import MemoryChainConfig, MemoryChainState
from subnet.dashboard.views import RunView
from subnet.errors import Refused, TransientFailure
from subnet.frames import digest
from subnet.receipts import ack_bytes, first_head
from subnet.sim.loop import VirtualClock, run
from subnet.types import Endpoint, Epoch, Hotkey, NumericMode
from tests.sim.world import CONFIG

OWNER = KeypairSigner.from_uri("//owner", deterministic=True)
MINER = KeypairSigner.from_uri("//miner", deterministic=True).hotkey
JOIN = wire.Join(endpoint=Endpoint(host="h", port=1), mode=NumericMode.FP32, session="first")


class Desk:
    """An orchestrator with one registered miner; `restart` kills it and starts another on the same store."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.store = MemoryStateStore(self.clock)
        self.blobs = MemoryBlobStore(self.clock)
        self.chain = MemoryChainState(
            self.clock, MemoryChainConfig(block_time_s=1.0, tempo=20), owner_hotkey=OWNER.hotkey
        )
        self.chain.register(MINER, "coldkey")
        self.num_asked = 0
        self.orchestrator: Orchestrator | None = None
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> Orchestrator:
        corpus = digest(b"corpus")
        genesis = await create_run(
            CONFIG, IncentiveConfig(), run_id="run", owner=OWNER.hotkey, corpus_digest=corpus, blobs=self.blobs,
            beacon="b", at_s=self.clock.now(),
        )  # fmt: skip
        c = config_digest(CONFIG, IncentiveConfig(), corpus)
        self.orchestrator = Orchestrator(
            config=CONFIG,
            ports=OrchestratorPorts(
                signer=OWNER,
                store=self.store,
                blobs=self.blobs,
                chain=self.chain.view(OWNER.hotkey),
                compute=InlineCompute(),
                clock=self.clock,
            ),
            discovery=wire.Discovery(u="u", r="run", v=wire.PROTOCOL_VERSION, c=c),
            genesis=lambda: genesis,
        )
        self.task = asyncio.create_task(self.orchestrator.run())
        await self.clock.sleep(5.0)
        return self.orchestrator

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def ask(self, request: wire.Request, *, sender: Hotkey = MINER, request_id: str = "") -> wire.Response:
        self.num_asked += 1
        assert self.orchestrator is not None
        envelope = wire.Envelope(request_id=request_id or f"r{self.num_asked}", request=request)
        return await self.orchestrator.handle(sender, envelope)

    async def journal(self) -> list[bytes]:
        return [entry async for entry in self.store.read()]


def with_desk(story: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = Desk()
        await desk.start()
        await story(desk)
        await desk.stop()

    run(main())


def test_of_two_processes_on_one_hotkey_the_first_is_told_to_stop() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask(JOIN)
        assert isinstance(await desk.ask(wire.Poll(known_version=0, wait_s=0.0, session="first")), wire.Directive)
        await desk.ask(msgspec.structs.replace(JOIN, session="second"))
        with pytest.raises(Refused) as found:
            await desk.ask(wire.Poll(known_version=0, wait_s=0.0, session="first"))
        assert found.value.code == "session"
        assert isinstance(await desk.ask(wire.Poll(known_version=0, wait_s=0.0, session="second")), wire.Directive)

    with_desk(story)


def test_a_poll_waits_for_news_and_no_longer_than_it_may() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask(JOIN)
        view = await desk.ask(wire.Poll(known_version=0, wait_s=0.0))
        assert isinstance(view, wire.Directive)
        began = desk.clock.now()
        again = await desk.ask(wire.Poll(known_version=view.version, wait_s=2.0))
        assert again == view and desk.clock.now() - began == pytest.approx(2.0, abs=0.3)
        before = len(await desk.journal())
        await desk.ask(wire.RequestDownload(keys=()))
        assert len(await desk.journal()) == before, "reading changes nothing"

    with_desk(story)


def test_what_was_answered_survives_the_process() -> None:
    async def story(desk: Desk) -> None:
        first = await desk.ask(JOIN, request_id="same")
        head = first_head("run", Epoch(0), MINER)
        refused = wire.Ready(epoch=Epoch(3), anchor=head)
        with pytest.raises(Refused):
            await desk.ask(refused, request_id="no")
        journal = await desk.journal()
        state = desk.orchestrator.state if desk.orchestrator else None
        await desk.stop()
        again = await desk.start()
        assert state is not None and again.state.ledger == state.ledger
        assert await desk.ask(JOIN, request_id="same") == first
        with pytest.raises(Refused):
            await desk.ask(refused, request_id="no")
        assert (await desk.journal())[: len(journal)] == journal
        assert len(again.state.members) == 1

    with_desk(story)


def test_a_repeat_that_arrives_meanwhile_gets_the_same_answer() -> None:
    async def story(desk: Desk) -> None:
        answers = await asyncio.gather(*(desk.ask(JOIN, request_id="same") for _ in range(5)))
        assert all(answer == answers[0] for answer in answers)
        assert desk.orchestrator is not None and len(desk.orchestrator.state.members) == 1

    with_desk(story)


def test_nobody_is_served_before_the_state_is_whole() -> None:
    async def main() -> None:
        desk = Desk()
        orchestrator = await desk.start()
        orchestrator.is_ready.clear()
        with pytest.raises(TransientFailure):
            await desk.ask(JOIN)
        with pytest.raises(TransientFailure):
            await orchestrator.public("config")
        await desk.stop()

    run(main())


def test_a_silent_miner_is_routed_around_and_welcome_back() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask(JOIN)
        assert desk.orchestrator is not None
        member = desk.orchestrator.state.members[MINER]
        await desk.clock.sleep(CONFIG.deadlines.silent_s + 2.0)
        assert not member.is_live
        await desk.ask(wire.Poll(known_version=0, wait_s=1.0))
        await desk.clock.sleep(1.0)
        assert member.is_live

    with_desk(story)


def test_acknowledgements_are_signed() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask(JOIN)
        assert desk.orchestrator is not None
        state = desk.orchestrator.state
        state.phase = state.phase.TRAINING
        head = first_head("run", Epoch(0), MINER)
        ack = await desk.ask(wire.PostReceipts(epoch=Epoch(0), num_before=0, receipts=(), head=head))
        assert isinstance(ack, wire.Ack)
        signed = ack_bytes("run", epoch=Epoch(0), hotkey=MINER, num_receipts=0, head=head)
        assert OWNER.verify(OWNER.hotkey, signed, ack.signature)

    with_desk(story)


def test_public_objects_are_those_there_are() -> None:
    async def story(desk: Desk) -> None:
        assert desk.orchestrator is not None
        public = desk.orchestrator.public
        found = await public("run")
        assert found is not None and wire.decode(wire.Discovery, found).r == "run"
        config = await public("config")
        assert config is not None and len(config.splitlines()) == 3
        status = await public("status")
        assert status is not None and msgspec.json.decode(status, type=RunView).run_id == "run"
        assert await public("snapshots/0") is not None
        for name in ("snapshots/9", "snapshots/x", "ledger/0", "ledger/99999999999", "else/0", "", "../secret"):
            assert await public(name) is None
        await desk.blobs.delete(desk.orchestrator.state.snapshots[0].key)
        assert await public("snapshots/0") is None

    with_desk(story)

"""The orchestrator at its edge: one process a key, reads that are never journaled, recovery from the journal alone."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from incentives.config import IncentiveConfig
from neurons.description import config_digest
from neurons.init_run import create_run
from neurons.roles.announcing import LOOK_S
from neurons.roles.orchestrator import Orchestrator
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.dashboard.views import RunView
from subnet.errors import Refused, TransientFailure
from subnet.frames import digest
from subnet.receipts import ack_bytes, first_head
from subnet.sim.loop import run
from subnet.types import Endpoint, Epoch, Hotkey, NumericMode, StageIndex
from tests.sim.world import CONFIG
from tests.unit.orchestrators import OWNER, World, killed

MINER = KeypairSigner.from_uri("//miner", deterministic=True).hotkey
JOIN = wire.Join(endpoint=Endpoint(host="h", port=1), mode=NumericMode.FP32, session="first")


class Desk(World):
    """An orchestrator with one registered miner; `stop` kills it, `start` begins another on the same store."""

    def __init__(self) -> None:
        super().__init__()
        self.chain.register(MINER, "coldkey")
        self.num_asked = 0
        self.started: Orchestrator | None = None
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> Orchestrator:
        corpus = digest(b"corpus")
        genesis = await create_run(
            CONFIG, IncentiveConfig(), run_id="run", owner=OWNER.hotkey, corpus_digest=corpus, blobs=self.blobs,
            beacon="b", at_s=self.clock.now(),
        )  # fmt: skip
        c = config_digest(CONFIG, IncentiveConfig(), corpus)
        self.started = self.orchestrator(CONFIG, run_id="run", digest=c, genesis=lambda: genesis)
        self.task = asyncio.create_task(self.started.run())
        await self.clock.sleep(5.0)
        return self.started

    async def stop(self) -> None:
        assert self.task is not None
        await killed(self.task)

    async def ask(self, request: wire.Request, *, sender: Hotkey = MINER, request_id: str = "") -> wire.Response:
        self.num_asked += 1
        assert self.started is not None
        envelope = wire.Envelope(request_id=request_id or f"r{self.num_asked}", request=request)
        return await self.started.handle(sender, envelope)

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
        state = desk.started.state if desk.started else None
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
        assert desk.started is not None and len(desk.started.state.members) == 1

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


def test_a_leader_that_was_held_up_answers_nobody_and_leaves_the_chain_alone() -> None:
    """Until it knows better another may lead: the journal would stop its events, and nothing would stop the rest."""

    async def story(desk: Desk) -> None:
        await desk.ask(JOIN)
        assert desk.started is not None
        view = await desk.ask(wire.Poll(known_version=0, wait_s=0.0))
        assert isinstance(view, wire.Directive)
        waiting = asyncio.create_task(desk.ask(wire.Poll(known_version=view.version, wait_s=2.0)))
        await desk.clock.sleep(1.0)
        chain = desk.chain.view(OWNER.hotkey)
        before, journal = await chain.commitment(OWNER.hotkey), await desk.journal()
        desk.may_lead = False
        desk.started._announcer.note_sealed(1, digest(b"of a segment"))
        for answer in (
            desk.ask(JOIN),
            desk.ask(wire.GetPeers(stage=StageIndex(0))),
            desk.started.public("run"),
            waiting,
        ):
            with pytest.raises(TransientFailure, match="another may lead"):
                await answer
        await desk.clock.sleep(3.0)
        assert await chain.commitment(OWNER.hotkey) == before and await desk.journal() == journal
        desk.may_lead = True
        await desk.clock.sleep(3.0)
        assert await chain.commitment(OWNER.hotkey) != before

    with_desk(story)


def test_what_another_put_over_the_record_on_chain_does_not_stay() -> None:
    async def story(desk: Desk) -> None:
        chain = desk.chain.view(OWNER.hotkey)
        ours = await chain.commitment(OWNER.hotkey)
        await chain.commit(b"what a paused leader had begun to write")
        await desk.clock.sleep(LOOK_S + 5.0)
        assert await chain.commitment(OWNER.hotkey) == ours

    with_desk(story)


def test_keys_that_cost_nothing_leave_nothing_behind() -> None:
    """Anybody can draw keys and sign; only a registration has a price."""

    async def story(desk: Desk) -> None:
        assert desk.started is not None
        for number in range(3):
            with pytest.raises(Refused) as found:
                await desk.ask(JOIN, sender=Hotkey(f"drawn-{number}"))
            assert found.value.code == "not-registered"
        assert not any(b"drawn" in entry for entry in await desk.journal())
        assert not desk.started.state.answers and not desk.started._heard

    with_desk(story)


def test_a_silent_miner_is_routed_around_and_welcome_back() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask(JOIN)
        assert desk.started is not None
        member = desk.started.state.members[MINER]
        await desk.clock.sleep(CONFIG.deadlines.silent_s + 2.0)
        assert not member.is_live
        await desk.ask(wire.Poll(known_version=0, wait_s=1.0))
        await desk.clock.sleep(1.0)
        assert member.is_live

    with_desk(story)


def test_acknowledgements_are_signed() -> None:
    async def story(desk: Desk) -> None:
        await desk.ask(JOIN)
        assert desk.started is not None
        state = desk.started.state
        state.phase = state.phase.TRAINING
        head = first_head("run", Epoch(0), MINER)
        ack = await desk.ask(wire.PostReceipts(epoch=Epoch(0), num_before=0, receipts=(), head=head))
        assert isinstance(ack, wire.Ack)
        signed = ack_bytes("run", epoch=Epoch(0), hotkey=MINER, num_receipts=0, head=head)
        assert OWNER.verify(OWNER.hotkey, signed, ack.signature)

    with_desk(story)


def test_public_objects_are_those_there_are() -> None:
    async def story(desk: Desk) -> None:
        assert desk.started is not None
        public = desk.started.public
        found = await public("run")
        assert found is not None and wire.decode(wire.Discovery, found).r == "run"
        config = await public("config")
        assert config is not None and len(config.splitlines()) == 3
        status = await public("status")
        assert status is not None and msgspec.json.decode(status, type=RunView).run_id == "run"
        assert await public("snapshots/0") is not None
        for name in ("snapshots/9", "snapshots/x", "ledger/0", "ledger/99999999999", "else/0", "", "../secret"):
            assert await public(name) is None
        await desk.blobs.delete(desk.started.state.snapshots[0].key)
        assert await public("snapshots/0") is None

    with_desk(story)

"""Orchestrator: feed events to the state machine, journal them, carry out the effects.

One task owns the state. An event is stepped, then journaled and flushed, and only then is anything it caused told to
anybody, so what was acknowledged survives a crash. Reading requests are answered from the state and never journaled.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from neurons.roles.announcing import Announcer
from neurons.roles.desk import Desk
from neurons.roles.keeping import RETRY_S, Keeper, until_done
from neurons.roles.ports import OrchestratorPorts
from neurons.roles.recovery import recover
from neurons.roles.referee import Referee
from neurons.roles.relay import Relay
from subnet import detours, receipts, wire
from subnet.config import RunConfig
from subnet.dashboard.views import run_view
from subnet.errors import NotFound, ProtocolViolation, Refused, TransientFailure
from subnet.orchestration import invariants, machine, views
from subnet.orchestration.events import (
    Answer,
    AnyEffect,
    AnyEvent,
    AuditShard,
    AwaitBlock,
    BlockSeen,
    CommitRoot,
    Created,
    DeleteObjects,
    HeardFrom,
    RefereeOuter,
    RefereeShard,
    Requested,
    Returned,
    RootIncluded,
    StoreSegment,
    Ticked,
    Wake,
    chain_seen,
    encode_event,
)
from subnet.orchestration.ledger import Segment
from subnet.orchestration.segments import segment_key
from subnet.orchestration.state import State
from subnet.orchestration.work import sign_leases
from subnet.types import Hotkey, Phase

log = logging.getLogger("strata.orchestrator")

CHAIN_POLL_S = 2.0
BATCH = 256
UNITS_PER_EVENT = 32
"""Units of work looked at by the invariants for each event: about a tenth of what stepping one costs, however long the epoch."""


@dataclass(slots=True)
class _Pending:
    """An event on its way through the journal, and who waits for its answer."""

    event: AnyEvent
    answered: asyncio.Future[wire.Response] | None = None


@dataclass(slots=True)
class _Watch:
    """Checks the invariants at every change of phase, and in between as often as the size of the epoch's work allows."""

    phase: Phase | None = None
    num_events: int = 0
    num_units: int = 0

    def look(self, state: State, num_events: int) -> None:
        """After `num_events` more events. Raises InvariantBroken."""
        self.num_events += num_events
        if state.phase is self.phase and self.num_events * UNITS_PER_EVENT < self.num_units:
            return
        invariants.check_state(state)
        work = state.current.work.values()
        self.phase, self.num_events = state.phase, 0
        self.num_units = len(state.current.open_samples) + sum(len(books.credited) for books in work)


class Orchestrator:
    """One run. `genesis` gives the first event when the store is empty."""

    def __init__(
        self,
        *,
        config: RunConfig,
        ports: OrchestratorPorts,
        discovery: wire.Discovery,
        genesis: Callable[[], Created],
    ) -> None:
        self.state = State()
        self._config = config
        self._ports = ports
        self._genesis = genesis
        self._announcer = Announcer(ports=ports, discovery=discovery)
        self._watch = _Watch()
        self._keeper = Keeper(
            journal=ports.store,
            blobs=ports.blobs,
            clock=ports.clock,
            on_kept=lambda segment: self._announcer.note_sealed(segment.index + 1, segment.head),
        )
        self._sealed: list[Segment] = []
        """Segments that the keeper has not been given yet."""
        self._desk = Desk(state=lambda: self.state, signer=ports.signer, blobs=ports.blobs, clock=ports.clock)
        self._relay = Relay(
            config=config, state=lambda: self.state, blobs=ports.blobs, clock=ports.clock, wake=self._wake
        )
        self._referee = Referee(config=config, ports=ports, run_id=lambda: self.state.run_id)
        self._inbox: asyncio.Queue[_Pending] = asyncio.Queue()
        self._inflight: dict[tuple[Hotkey, str], asyncio.Future[wire.Response]] = {}
        self._changed = asyncio.Event()
        self._heard: dict[Hotkey, float] = {}
        self._jobs: asyncio.Queue[AnyEffect] = asyncio.Queue()
        self.is_ready = asyncio.Event()

    async def run(self) -> None:
        """Recover, then serve until cancelled."""
        effects = await self._recover()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._own_state(), name="state")
            group.create_task(self._watch_chain(), name="chain")
            group.create_task(self._watch_time(), name="time")
            group.create_task(self._announcer.run(self._announced), name="announcer")
            group.create_task(self._keeper.run(), name="keeper")
            group.create_task(self._work(group), name="jobs")
            for effect in effects:
                self._jobs.put_nowait(effect)
            self.is_ready.set()

    # ---- what comes in -----------------------------------------------------------------------------------------

    async def handle(self, sender: Hotkey, envelope: wire.Envelope) -> wire.Response:
        """Answer one verified request. Raises Refused, ProtocolViolation, TransientFailure."""
        self._require_ready()
        if not self.state.knows(sender):  # not journaled: keys cost nothing, and every answer is kept
            raise Refused("not-registered", f"{sender} is not registered on the subnet: register it, then start again")
        self._heard[sender] = self._ports.clock.now()
        request = envelope.request
        match request:
            case wire.Poll():
                return await self._poll(sender, request)
            case wire.RequestUpload() | wire.RequestDownload() | wire.GetPeers() | wire.GetMergePlan():
                return self._desk.read(sender, request)
            case detours.DetourRequest():
                return await self._relay.answer(sender, request)
            case _:
                await self._desk.check(sender, request)
        response = await self._ask(sender, envelope)
        if isinstance(response, wire.ErrorBody):
            raise Refused(response.code, response.reason)
        return self._signed(sender, response)

    def _require_ready(self) -> None:
        if not self.is_ready.is_set():
            raise TransientFailure("the orchestrator is recovering its state; try again in a moment")
        self._ports.require_lead()

    async def _ask(self, sender: Hotkey, envelope: wire.Envelope) -> wire.Response:
        """Put a request through the state machine; a repeat that arrives meanwhile waits for the same answer."""
        key = (sender, envelope.request_id)
        answered = self._inflight.get(key)
        if answered is None:
            answered = asyncio.get_running_loop().create_future()
            self._inflight[key] = answered
            event = Requested(
                at_s=self._ports.clock.now(), sender=sender, request_id=envelope.request_id, request=envelope.request
            )
            self._inbox.put_nowait(_Pending(event, answered))
        return await asyncio.shield(answered)

    async def public(self, name: str) -> bytes | None:
        """Public objects: `run`, `config` (what it pins), `status`, `ledger/INDEX` (sealed segments), `snapshots/STAGE`.

        None for one that there is not. Raises TransientFailure.
        """
        self._require_ready()
        state = self.state
        if name == "run":
            return wire.encode(self._announcer.discovery)
        if name == "config":
            return "\n".join((state.config_json, state.incentives_json, state.corpus_digest)).encode()
        if name == "status":
            return wire.encode(run_view(state))
        part, _, index = name.partition("/")
        if not index.isdigit() or len(index) > 9:
            return None
        number = int(index)
        if part == "ledger" and number < state.ledger.num_segments:
            key = segment_key(state.run_id, number)
        elif part == "snapshots" and number < len(state.snapshots):
            key = state.snapshots[number].key
        else:
            return None
        try:
            return await self._ports.blobs.get(key)
        except NotFound:
            return None

    async def _poll(self, sender: Hotkey, request: wire.Poll) -> wire.Response:
        member = self.state.members.get(sender)
        if member is not None and request.session and member.session != request.session:
            raise Refused("session", "another process has joined with this hotkey since; this one should stop")
        is_silent = (member is not None and not member.is_live) or not self.state.auditors.get(sender, True)
        if is_silent and sender in self.state.registered:
            self._submit(HeardFrom(at_s=self._ports.clock.now(), hotkey=sender, is_live=True))
        deadline = self._ports.clock.now() + min(request.wait_s, self._config.deadlines.silent_s / 3)
        while True:
            self._require_ready()
            changed = self._changed
            view = views.directive(self.state, sender, has_frames=self._relay.is_calling(sender))
            left_s = deadline - self._ports.clock.now()
            if view.version != request.known_version or left_s <= 0:
                return view
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()
            self._heard[sender] = self._ports.clock.now()

    def _signed(self, sender: Hotkey, response: wire.Response) -> wire.Response:
        match response:
            case wire.Leases():
                return sign_leases(
                    response.leases,
                    tuple(self._ports.signer.sign(receipts.lease_bytes(lease)) for lease in response.leases),
                )
            case wire.Ack():
                message = receipts.ack_bytes(
                    self.state.run_id,
                    epoch=response.epoch,
                    hotkey=sender,
                    num_receipts=response.num_receipts,
                    head=response.head,
                )
                return msgspec.structs.replace(response, signature=self._ports.signer.sign(message))
            case _:
                return response

    # ---- the one task that owns the state ----------------------------------------------------------------------

    def _submit(self, event: AnyEvent) -> None:
        self._inbox.put_nowait(_Pending(event))

    async def _recover(self) -> list[AnyEffect]:
        """Take up the run where it was left; returns what a crash may have left undone."""
        found = await recover(self._config, self._ports, self._announcer.discovery.r)
        self.state, self._sealed, now = found.state, found.segments, self._ports.clock.now()
        if found.num_kept:
            self._announcer.note_sealed(found.num_kept, found.kept_head)
        await self._store_and_step([_Pending(Returned(at_s=now) if self.state.run_id else self._genesis())])
        facts = {"at_record": found.at_record, "events": found.num_events}
        log.info("recovered", extra=facts | {"epoch": self.state.epoch, "phase": self.state.phase})
        self._heard = dict.fromkeys([*self.state.members, *self.state.auditors], now)
        self._announcer.note_root(*self.state.newest_root)
        return machine.outstanding(self.state, self._config)

    async def _own_state(self) -> None:
        while True:
            batch = [await self._inbox.get()]
            while len(batch) < BATCH and not self._inbox.empty():
                batch.append(self._inbox.get_nowait())
            await self._store_and_step(batch)

    async def _store_and_step(self, batch: list[_Pending]) -> None:
        outcomes = [machine.step(self.state, pending.event, self._config) for pending in batch]
        self._watch.look(self.state, len(batch))
        at_record = await self._ports.store.append([encode_event(pending.event) for pending in batch])
        for pending, effects in zip(batch, outcomes, strict=True):
            for effect in effects:
                self._perform(effect, pending.answered)
        if self._sealed:
            self._keeper.keep(self._sealed, self.state, at_record=at_record)
            self._sealed = []

    def _perform(self, effect: AnyEffect, answered: asyncio.Future[wire.Response] | None) -> None:
        match effect:
            case Answer():
                self._inflight.pop((effect.sender, effect.request_id), None)
                if answered is not None and not answered.done():
                    answered.set_result(effect.response)
            case Wake():
                self._wake()
            case StoreSegment():
                self._sealed.append(effect.segment)
            case _:
                self._jobs.put_nowait(effect)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- effects that take time --------------------------------------------------------------------------------

    async def _work(self, group: asyncio.TaskGroup) -> None:
        while True:
            effect = await self._jobs.get()
            group.create_task(self._carry_out(effect), name=type(effect).__name__)

    async def _carry_out(self, effect: AnyEffect) -> None:
        await until_done(lambda: self._once(effect), name=type(effect).__name__, clock=self._ports.clock)

    async def _once(self, effect: AnyEffect) -> None:
        self._ports.require_lead()
        match effect:
            case CommitRoot():
                self._announcer.note_root(*self.state.newest_root)
            case AwaitBlock():
                await self._await_block(effect)
            case RefereeShard():
                self._submit(await self._referee.shard(effect))
            case AuditShard():
                self._submit(await self._referee.audited_shard(effect))
            case RefereeOuter():
                self._submit(await self._referee.outer(effect))
            case DeleteObjects():
                self._submit(await self._desk.delete(effect))
            case Answer() | Wake() | StoreSegment():
                pass
            case _:
                assert_never(effect)

    async def _await_block(self, effect: AwaitBlock) -> None:
        while (block_hash := await self._ports.chain.block_hash(effect.at_block)) is None:
            await self._ports.clock.sleep(RETRY_S / 2)
        self._submit(
            BlockSeen(at_s=self._ports.clock.now(), epoch=effect.epoch, at_block=effect.at_block, block_hash=block_hash)
        )

    # ---- chain and time ----------------------------------------------------------------------------------------

    def _announced(self, record: wire.Discovery, at_block: int) -> None:
        """The record on chain says what `record` says since `at_block`; that may complete a commit."""
        current = self.state.current
        if record.e == current.epoch and record.m == current.commit_root and current.root_at_block < 0:
            self._submit(RootIncluded(at_s=self._ports.clock.now(), epoch=current.epoch, at_block=at_block))

    async def _watch_chain(self) -> None:
        last: tuple[object, object] = (tuple(sorted(self.state.registered.items())), self.state.permits)
        while True:
            try:
                seen = chain_seen(await self._ports.chain.metagraph(), at_s=self._ports.clock.now())
                if (seen.registered, seen.permits) != last:
                    last = (seen.registered, seen.permits)
                    self._submit(seen)
            except (TransientFailure, NotFound, ProtocolViolation) as error:
                log.warning("metagraph not read", extra={"reason": str(error)})
            await self._ports.clock.sleep(CHAIN_POLL_S)

    async def _watch_time(self) -> None:
        """Send a tick when a deadline passes, and tell the machine who fell silent."""
        while True:
            now = self._ports.clock.now()
            if now >= machine.next_tick_s(self.state, self._config):
                self._submit(Ticked(at_s=now))
            live = [hotkey for hotkey, member in self.state.members.items() if member.is_live]
            live += [hotkey for hotkey, is_live in self.state.auditors.items() if is_live]
            for hotkey in live:
                if now - self._heard.get(hotkey, now) > self._config.deadlines.silent_s:
                    self._submit(HeardFrom(at_s=now, hotkey=hotkey, is_live=False))
            await self._ports.clock.sleep(RETRY_S / 4)

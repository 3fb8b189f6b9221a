"""A stage host: takes steps from gateways and from the stage before, runs its layers, hands the rows on (docs/serving.md)."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from subnet.adapters.serving_link import Link, LinkCounters, LinkServer, dial
from subnet.errors import ProtocolViolation, TransientFailure
from subnet.inference.cache import CacheBook
from subnet.inference.engine import Ahead, Choices, Engine, Item, PooledEngine
from subnet.inference.messages import (
    Drop,
    Failed,
    Hello,
    Ping,
    Pong,
    Result,
    Step,
    Welcome,
    check_payload,
)
from subnet.inference.rows import decode_rows, encode_rows
from subnet.inference.sampling import Choice
from subnet.ports import Compute
from subnet.types import Endpoint

MAX_QUEUED = 64
"""Steps that wait for the layers; a gateway keeps a few under way, so more is a fault of its."""

log = logging.getLogger("strata.serve")


@dataclass(frozen=True, slots=True)
class _Arrived:
    step: Step
    payload: bytes
    is_ahead: bool = False
    """Told by the gateway before the rows are here."""


@dataclass(slots=True)
class _Work:
    """One step with the caches of its pieces, ready for the layers."""

    items: list[Item] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Rows of the payload that belong to them."""
    lost: list[int] = field(default_factory=list)


class StageHost:
    """One serving stage on one port."""

    def __init__(
        self, *, engine: Engine, book: CacheBook, welcome: Welcome, compute: Compute, shared_key: bytes
    ) -> None:
        self.counters = LinkCounters()
        self.server = LinkServer(self._serve, shared_key=shared_key, counters=self.counters)
        self.num_steps = 0
        self.num_rows = 0
        self._engine = engine
        self._pooled = engine if isinstance(engine, PooledEngine) else None
        self._ahead: OrderedDict[tuple[str, int], Ahead] = OrderedDict()
        """By session and step; a step that never comes stays until its place is needed."""
        self._book = book
        self._welcome = welcome
        self._compute = compute
        self._key = shared_key
        self._gateways: dict[str, Link] = {}
        self._arrived: asyncio.Queue[_Arrived] = asyncio.Queue(MAX_QUEUED)
        self._hops: dict[Endpoint, asyncio.Queue[_Arrived]] = {}

    async def work(self) -> None:
        """Run steps in the order they arrive, until cancelled."""
        async with asyncio.TaskGroup() as hops:
            while True:
                arrived = await self._arrived.get()
                await self._run(arrived, hops)

    @property
    def pong(self) -> Pong:
        """What this host holds and has done."""
        return Pong(
            number=0,
            num_sequences=len(self._book.caches),
            cache_bytes=self._book.size_bytes,
            num_steps=self.num_steps,
            num_rows=self.num_rows,
            payload_bytes_sent=self.counters.payload_bytes_sent,
            frame_bytes_sent=self.counters.frame_bytes_sent,
        )

    # ---- connections ---------------------------------------------------------------------------------------------

    async def _serve(self, link: Link) -> None:
        hello, _ = await link.receive()
        if not isinstance(hello, Hello):
            raise ProtocolViolation("a connection begins with Hello")
        await link.send(self._welcome)
        if hello.role == "host":
            await self._listen(link, session=None)
            return
        self._gateways[hello.session] = link
        try:
            await self._listen(link, session=hello.session)
        finally:
            if self._gateways.get(hello.session) is link:
                del self._gateways[hello.session]
                freed = self._book.drop_session(hello.session)
                for key in [key for key in self._ahead if key[0] == hello.session]:
                    del self._ahead[key]
                log.info("gateway gone", extra={"session": hello.session, "sequences_freed": freed})

    async def _listen(self, link: Link, *, session: str | None) -> None:
        """Messages of one connection; a gateway speaks for its own session only."""
        while True:
            message, payload = await link.receive()
            match message:
                case Step():
                    if session is not None and message.session != session:
                        raise ProtocolViolation("a step names another gateway's session")
                    is_ahead = session is not None and self._pooled is not None and not self._engine.is_first
                    await self._arrive(_Arrived(message, payload, is_ahead))
                case Drop() if session is not None:
                    for sequence in message.sequences:
                        self._book.drop((session, sequence))
                case Ping() if session is not None:
                    await link.send(msgspec.structs.replace(self.pong, number=message.number))
                case _:
                    raise ProtocolViolation(f"a stage host is not told {type(message).__name__} here")

    async def _arrive(self, arrived: _Arrived) -> None:
        try:
            self._arrived.put_nowait(arrived)
        except asyncio.QueueFull:
            if not arrived.is_ahead:
                await self._fail(arrived.step, f"{MAX_QUEUED} steps are waiting already")

    # ---- steps ---------------------------------------------------------------------------------------------------

    async def _run(self, arrived: _Arrived, hops: asyncio.TaskGroup) -> None:
        step = arrived.step
        if step.session not in self._gateways:
            return  # nobody waits for it any more
        try:
            self._check(arrived)
        except ProtocolViolation as error:
            await self._fail(step, str(error))
            return
        work = self._open(step)
        if arrived.is_ahead:
            await self._compute_ahead(step, work)
            return
        if not work.items:
            await self._answer(step, (), work.lost)
            return
        ahead = self._ahead.pop((step.session, step.step), None)
        rows, choices = await self._compute.run(lambda: self._through_layers(work, arrived, ahead))
        self.num_steps += 1
        self.num_rows += sum(len(piece.ids) + piece.num_targets for piece, _ in work.items)
        if rows is None:
            await self._answer(step, choices, work.lost)
            return
        dtype, payload = encode_rows(rows)
        onward = msgspec.structs.replace(
            step,
            pieces=tuple(piece for piece, _ in work.items),
            route=step.route[1:],
            lost=tuple(work.lost),
            dtype=dtype,
        )
        peer = step.route[0]
        if peer not in self._hops:
            self._hops[peer] = asyncio.Queue()
            hops.create_task(self._carry(peer, self._hops[peer]))
        self._hops[peer].put_nowait(_Arrived(onward, payload))

    async def _compute_ahead(self, step: Step, work: _Work) -> None:
        """Keep what needs no rows. Whatever is not kept is computed when the rows come."""
        if self._pooled is None or not work.items:
            return
        engine = self._pooled
        found = await self._compute.run(lambda: engine.ahead(work.items))
        if step.session in self._gateways:
            self._ahead[step.session, step.step] = found
        while len(self._ahead) > MAX_QUEUED:
            self._ahead.popitem(last=False)

    def _check(self, arrived: _Arrived) -> None:
        """Raise ProtocolViolation for what would break the arithmetic."""
        step, served = arrived.step, self._engine.served
        has_rows = not (self._engine.is_first or arrived.is_ahead)
        dtype, width = (served.wire_dtype, served.wire_width) if has_rows else ("none", 0)
        num_rows = sum(self._engine.num_rows(piece) for piece in step.pieces)
        check_payload(step, arrived.payload, num_rows=num_rows, width=width, dtype=dtype)
        stages_left = self._welcome.num_stages - self._welcome.stage - 1
        if len(step.route) != stages_left:
            raise ProtocolViolation(
                f"a step at stage {self._welcome.stage} has {stages_left} hosts to go, not {len(step.route)}"
            )
        vocab_size = served.run.model.vocab_size
        for piece in step.pieces:
            if not piece.ids or max(piece.ids) >= vocab_size:
                raise ProtocolViolation(f"token ids must be in [0, {vocab_size})")
            if max(piece.capacity, piece.start + len(piece.ids) + piece.num_targets) > self._welcome.max_positions:
                raise ProtocolViolation(f"a sequence has at most {self._welcome.max_positions} positions here")

    def _open(self, step: Step) -> _Work:
        work = _Work(lost=list(step.lost))
        at = 0
        for piece in step.pieces:
            rows = range(at, at + self._engine.num_rows(piece))
            at = rows.stop
            cache = self._book.open(
                (step.session, piece.sequence),
                start=piece.start,
                stop=piece.start + len(piece.ids),
                capacity=piece.capacity,
            )
            if cache is None:
                work.lost.append(piece.sequence)
                continue
            work.items.append((piece, cache))
            work.rows += rows
        return work

    def _through_layers(self, work: _Work, arrived: _Arrived, ahead: Ahead | None) -> tuple[Tensor | None, Choices]:
        """On the compute thread: rows to send on, or the tokens that were chosen."""
        engine, received = self._engine, None
        if not engine.is_first:
            received = decode_rows(arrived.payload, engine.served.wire_dtype, engine.served.wire_width)[work.rows]
        if self._pooled is not None:
            return self._pooled.run(work.items, received, ahead)
        return engine.run(work.items, received)

    # ---- onward --------------------------------------------------------------------------------------------------

    async def _carry(self, peer: Endpoint, queue: asyncio.Queue[_Arrived]) -> None:
        """Deliver to one next host in order; each step that cannot be delivered is reported to its gateway."""
        link: Link | None = None
        hello = Hello(role="host", session="")
        while True:
            arrived = await queue.get()
            try:
                if link is None or link.is_closed:
                    link = await dial(peer, hello, shared_key=self._key, counters=self.counters)
                    await link.receive()
                await link.send(arrived.step, arrived.payload)
            except (TransientFailure, ProtocolViolation) as error:
                link = None
                await self._fail(arrived.step, str(error), at=peer)

    async def _answer(self, step: Step, choices: Sequence[tuple[int, Choice]], lost: Sequence[int]) -> None:
        await self._tell(step.session, Result(step=step.step, choices=tuple(choices), lost=tuple(lost)))

    async def _fail(self, step: Step, reason: str, *, at: Endpoint | None = None) -> None:
        log.warning("step failed", extra={"step": step.step, "reason": reason})
        await self._tell(step.session, Failed(step=step.step, reason=reason, at=at))

    async def _tell(self, session: str, message: Result | Failed) -> None:
        link = self._gateways.get(session)
        if link is not None:
            try:
                await link.send(message)
            except TransientFailure:
                link.close()  # its own task frees what the gateway held

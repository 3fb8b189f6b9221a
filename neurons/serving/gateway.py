"""The gateway's side of the hosts: keeps a connection to each, carries out what the batcher decides, hands tokens to requests."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from subnet.adapters.serving_link import Link, LinkCounters, dial, name_of
from subnet.errors import ProtocolViolation, Refused, TransientFailure
from subnet.inference.batching import Batcher
from subnet.inference.jobs import BatchLimits, Effect, End, Ended, Job, SendDrop, SendStep, Token
from subnet.inference.messages import POOLED, AnyMessage, Drop, Failed, Hello, Ping, Pong, Result, Step, Welcome
from subnet.ports import Clock
from subnet.types import Endpoint

PING_EVERY_S = 1.0
SILENT_S = 5.0
"""A host that answers no ping for this long is lost."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two attempts to reach a host."""
TICK_S = 0.2

log = logging.getLogger("strata.serve")

Answer = Token | Ended


class Model(NamedTuple):
    """What every host of this gateway must serve."""

    digest: str
    mode: str
    num_stages: int


@dataclass(slots=True)
class _Host:
    """One configured host; `welcome` while it is up."""

    endpoint: Endpoint
    outbox: asyncio.Queue[Step | Drop | Ping]
    welcome: Welcome | None = None
    pong: Pong | None = None
    answered_s: float = 0.0
    trouble: str = "not reached yet"


async def find_num_stages(hosts: Sequence[Endpoint], *, shared_key: bytes, clock: Clock, timeout_s: float) -> int:
    """Into how many stages the model is cut: what the first host that answers says. Raises TransientFailure."""
    reasons: dict[Endpoint, str] = {}
    deadline_s = clock.now() + timeout_s
    while clock.now() < deadline_s:
        for endpoint in hosts:
            try:
                link = await dial(
                    endpoint, Hello(role="host", session=""), shared_key=shared_key, counters=LinkCounters()
                )
                try:
                    async with asyncio.timeout(SILENT_S):
                        welcome, _ = await link.receive()
                finally:
                    link.close()
            except (TransientFailure, ProtocolViolation, TimeoutError) as error:
                reason = str(error) or "no answer"
                if reasons.get(endpoint) != reason:
                    log.warning("host not reached", extra={"host": name_of(endpoint), "reason": reason})
                reasons[endpoint] = reason
                continue
            if isinstance(welcome, Welcome):
                return welcome.num_stages
        await clock.sleep(FIRST_PAUSE_S)
    raise TransientFailure(f"no stage host answers: {'; '.join(reasons.values())}")


class Gateway:
    """Requests in, tokens out."""

    def __init__(
        self,
        hosts: Sequence[Endpoint],
        model: Model,
        *,
        session: str,
        shared_key: bytes,
        clock: Clock,
        limits: BatchLimits,
    ) -> None:
        self.counters = LinkCounters()
        self.batcher = Batcher(session, model.num_stages, limits)
        self.num_tokens = 0
        self.num_steps = 0
        self._hosts = {endpoint: _Host(endpoint, asyncio.Queue()) for endpoint in hosts}
        self._model = model
        self._session = session
        self._key = shared_key
        self._clock = clock
        self._streams: dict[int, asyncio.Queue[Answer]] = {}
        self._next_key = 1
        self._changed = asyncio.Event()

    # ---- for requests --------------------------------------------------------------------------------------------

    def take_keys(self, count: int) -> range:
        """Fresh names for the choices of one request."""
        keys = range(self._next_key, self._next_key + count)
        self._next_key = keys.stop
        return keys

    def submit(self, jobs: list[Job]) -> asyncio.Queue[Answer]:
        """Where the answers of all these jobs arrive. Raises Backpressure, TransientFailure (a stage has no host)."""
        if not self.batcher.is_whole and not self.batcher.num_running:
            raise TransientFailure("a stage of the model has no host now: " + self.trouble)
        effects = self.batcher.submit(jobs, self._clock.now())
        stream: asyncio.Queue[Answer] = asyncio.Queue()
        self._streams |= {job.key: stream for job in jobs}
        self._perform(effects)
        return stream

    def cancel(self, keys: Sequence[int]) -> None:
        """Nobody reads these any more: their caches are freed on all hosts."""
        for key in keys:
            self._streams.pop(key, None)
            self._perform(self.batcher.cancel(key, self._clock.now()))

    @property
    def max_positions(self) -> int:
        """The longest sequence that every stage can take now; 0 while one has no host."""
        longest = [host.welcome.max_positions for host in self._hosts.values() if host.welcome is not None]
        return min([self.batcher.max_capacity, *longest])

    @property
    def trouble(self) -> str:
        """What is wrong with the hosts that are not up, for a person."""
        return "; ".join(
            f"{name_of(host.endpoint)}: {host.trouble}" for host in self._hosts.values() if not host.welcome
        )

    def facts(self) -> list[dict[str, object]]:
        """A row for each host, for the health page."""
        return [
            {
                "host": name_of(host.endpoint),
                "is_up": host.welcome is not None,
                "stage": host.welcome.stage if host.welcome else None,
                "num_sequences": host.pong.num_sequences if host.pong and host.welcome else None,
                "cache_bytes": host.pong.cache_bytes if host.pong and host.welcome else None,
                "payload_bytes_sent": host.pong.payload_bytes_sent if host.pong and host.welcome else None,
                "trouble": "" if host.welcome else host.trouble,
            }
            for host in self._hosts.values()
        ]

    async def refresh(self, timeout_s: float = SILENT_S) -> None:
        """Ask every live host what it holds, and wait for the answers. Raises TimeoutError."""
        asked = [host for host in self._hosts.values() if host.welcome is not None]
        for host in asked:
            host.pong = None
            host.outbox.put_nowait(Ping(number=0))
        async with asyncio.timeout(timeout_s):
            await self.until(lambda: all(host.pong is not None or host.welcome is None for host in asked))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is so of the requests or hosts; put a time limit around it."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def until_idle(self) -> None:
        """Wait until no request and no step is under way; put a time limit around it."""
        batcher = self.batcher
        await self.until(lambda: batcher.num_running + batcher.num_waiting + batcher.num_in_flight == 0)

    async def until_whole(self, timeout_s: float) -> bool:
        """Wait until every stage has a host; False when that did not happen in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: self.batcher.is_whole)
        except TimeoutError:
            return False
        return True

    # ---- the hosts -----------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Keep the connections and the time limits, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for host in self._hosts.values():
                group.create_task(self._keep(host))
            while True:
                await self._clock.sleep(TICK_S)
                self._perform(self.batcher.tick(self._clock.now()))

    async def _keep(self, host: _Host) -> None:
        """Connect, and connect again."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                link = await dial(
                    host.endpoint,
                    Hello(role="gateway", session=self._session),
                    shared_key=self._key,
                    counters=self.counters,
                )
                try:
                    await self._greet(host, link)
                    pause_s = FIRST_PAUSE_S
                    await self._converse(host, link)
                finally:
                    link.close()
            except (TransientFailure, ProtocolViolation, Refused, TimeoutError) as error:
                self._lose(host, str(error) or f"no answer to a ping for {SILENT_S:g} s")
            await self._clock.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _greet(self, host: _Host, link: Link) -> None:
        """Hear what the host is. Raises Refused when it is no part of this model."""
        async with asyncio.timeout(SILENT_S):
            welcome, _ = await link.receive()
        if not isinstance(welcome, Welcome):
            raise ProtocolViolation("a host answers Hello with Welcome")
        found = Model(digest=welcome.model, mode=welcome.mode, num_stages=welcome.num_stages)
        if found != self._model:
            raise Refused("model", f"it serves another model or is cut into other stages: {found}, not {self._model}")
        host.outbox = asyncio.Queue()
        host.welcome, host.pong, host.answered_s = welcome, None, self._clock.now()
        log.info("host up", extra={"host": name_of(host.endpoint), "stage": welcome.stage})
        self._perform(self.batcher.host_up(host.endpoint, welcome.stage, welcome.limit_tokens, self._clock.now()))

    def _lose(self, host: _Host, reason: str) -> None:
        if host.welcome is not None:
            log.warning("host lost", extra={"host": name_of(host.endpoint), "reason": reason})
        elif host.trouble != reason:  # a mistyped address or key is heard of at once, and once
            log.warning("host not reached", extra={"host": name_of(host.endpoint), "reason": reason})
        host.welcome, host.trouble = None, reason
        self._perform(self.batcher.host_down(host.endpoint, self._clock.now()))

    async def _converse(self, host: _Host, link: Link) -> None:
        """Send, receive and ping; the first to fail ends all three. Raises what it raised."""
        tasks = [
            asyncio.ensure_future(self._send(host, link)),
            asyncio.ensure_future(self._receive(host, link)),
            asyncio.ensure_future(self._ping(host)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        raise next(error for error in ended if isinstance(error, Exception))

    async def _send(self, host: _Host, link: Link) -> None:
        while True:
            await link.send(await host.outbox.get())

    async def _receive(self, host: _Host, link: Link) -> None:
        while True:
            message, _ = await link.receive()
            host.answered_s = self._clock.now()
            self._hear(host, message)

    async def _ping(self, host: _Host) -> None:
        number = 0
        while True:
            asked_s = self._clock.now()
            await self._clock.sleep(PING_EVERY_S)
            # time in which this process itself did not get to run is no silence of the host
            host.answered_s += max(0.0, self._clock.now() - asked_s - 2 * PING_EVERY_S)
            if self._clock.now() - host.answered_s > SILENT_S:
                raise TimeoutError
            number += 1
            host.outbox.put_nowait(Ping(number=number))

    def _hear(self, host: _Host, message: AnyMessage) -> None:
        now_s = self._clock.now()
        match message:
            case Result():
                self._perform(self.batcher.on_result(message, now_s))
            case Failed():
                self._perform(self.batcher.on_failed(message, now_s))
            case Pong():
                host.pong = message
                self._changed.set()
            case _:
                raise ProtocolViolation(f"a gateway is not told {type(message).__name__}")

    # ---- effects -------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        self._changed.set()
        for effect in effects:
            match effect:
                case SendStep(endpoint, step):
                    self.num_steps += 1
                    self._send_step(endpoint, step)
                case SendDrop(endpoint, drop):
                    self._hosts[endpoint].outbox.put_nowait(drop)
                case Token(key, _):
                    self.num_tokens += 1
                    self._answer(key, effect)
                case Ended(key, _, _):
                    self._answer(key, effect)
                    self._streams.pop(key, None)

    def _send_step(self, endpoint: Endpoint, step: Step) -> None:
        """To the first host; where no stage needs another's rows, also to those after it, which begin at once."""
        self._hosts[endpoint].outbox.put_nowait(step)
        later = step.route if self._model.mode == POOLED else ()
        for at, host in enumerate(later, start=1):
            self._hosts[host].outbox.put_nowait(msgspec.structs.replace(step, route=step.route[at:]))

    def _answer(self, key: int, answer: Answer) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            stream.put_nowait(answer)

    def end_all(self) -> None:
        """Tell every open request that it ends unfinished."""
        for key, stream in self._streams.items():
            stream.put_nowait(Ended(key, End.UNAVAILABLE, "the gateway is stopping"))
        self._streams.clear()

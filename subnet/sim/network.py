"""A seeded network between the roles of one process: latency, loss, and processes that die in the middle of an exchange."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from subnet import draws, frames, wire
from subnet.errors import NotFound, ProtocolViolation, TransientFailure
from subnet.ports import Clock, FrameHandler, Peers
from subnet.types import Endpoint, Hotkey

Handler = Callable[[Hotkey, wire.Envelope], Awaitable[wire.Response]]
PublicReader = Callable[[str], Awaitable[bytes | None]]

RETRY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Latency is drawn in [min, max] for each exchange; `loss` is the chance that one vanishes."""

    min_latency_s: float = 0.005
    max_latency_s: float = 0.04
    loss: float = 0.0


@dataclass(slots=True)
class Server:
    """The orchestrator's process: `handler` is None while it is down. A kill takes the exchanges in progress with it."""

    handler: Handler | None = None
    public: PublicReader | None = None
    exchanges: dict[asyncio.Task[wire.Response], None] = field(default_factory=dict)

    def stop(self) -> None:
        """The process died."""
        self.handler = self.public = None
        for task in list(self.exchanges):
            task.cancel()
        self.exchanges.clear()


class Network:
    """Who can reach whom now, and how long it takes."""

    def __init__(self, config: NetworkConfig, *, seed: int, clock: Clock) -> None:
        self.server = Server()
        self.receivers: dict[Hotkey, FrameHandler] = {}
        self.payload_bytes = 0
        self.head_bytes = 0
        self._config = config
        self._seed = seed
        self._clock = clock
        self._num_draws = 0

    def _draw(self) -> float:
        self._num_draws += 1
        return draws.uniform(self._seed, "network", self._num_draws)

    async def cross(self) -> None:
        """One message on its way. Raises TransientFailure when it is lost."""
        config = self._config
        await self._clock.sleep(config.min_latency_s + self._draw() * (config.max_latency_s - config.min_latency_s))
        if config.loss and self._draw() < config.loss:
            raise TransientFailure("the message was lost")

    def request_id(self, sender: Hotkey) -> str:
        """A fresh id for a request."""
        self._num_draws += 1
        return draws.seed_bytes(self._seed, sender, self._num_draws).hex()[:32]


class SimControl:
    """ports.Control over the simulated network; every message is encoded and decoded as on a real one."""

    def __init__(self, network: Network, hotkey: Hotkey, clock: Clock) -> None:
        self._network = network
        self._hotkey = hotkey
        self._clock = clock

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        """Retry with one request id until an answer or a refusal comes, or time is up."""
        body = wire.encode(wire.Envelope(request_id=self._network.request_id(self._hotkey), request=request))
        deadline = self._clock.now() + timeout_s
        while True:
            try:
                return await self._attempt(body, deadline)
            except TransientFailure as error:
                if self._clock.now() + RETRY_S >= deadline:
                    raise TransientFailure(f"no answer within {timeout_s} s: {error}") from error
                await self._clock.sleep(RETRY_S)

    async def _attempt(self, body: bytes, deadline: float) -> wire.Response:
        await self._network.cross()
        server = self._network.server
        if server.handler is None:
            raise TransientFailure("connection refused")
        envelope = wire.decode(wire.Envelope, body)
        task = asyncio.ensure_future(server.handler(self._hotkey, envelope))
        server.exchanges[task] = None
        try:
            await asyncio.wait((task,), timeout=max(0.0, deadline - self._clock.now()))
        finally:
            server.exchanges.pop(task, None)
            if not task.done():
                task.cancel()
        if task.cancelled() or not task.done():
            raise TransientFailure("the connection broke")
        failure = task.exception()
        await self._network.cross()
        if failure is not None:
            raise failure
        kind = cast("type[wire.Response]", wire.Response)  # a union is no type to the type checker
        return wire.decode(kind, wire.encode(task.result()), limit_bytes=wire.RESPONSE_LIMIT_BYTES)


class SimPublic:
    """ports.PublicRecord over the simulated network."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def read(self, name: str, *, limit_bytes: int) -> bytes:
        """A public object."""
        await self._network.cross()
        public = self._network.server.public
        if public is None:
            raise TransientFailure("connection refused")
        data = await public(name)
        if data is None:
            raise NotFound(f"no public object {name}")
        if len(data) > limit_bytes:
            raise ProtocolViolation(f"public object {name} has {len(data)} bytes, limit {limit_bytes}")
        return data


class SimPeers:
    """ports.Peers over the simulated network."""

    def __init__(self, network: Network, hotkey: Hotkey) -> None:
        self._network = network
        self._hotkey = hotkey

    async def send(self, receiver: Hotkey, endpoint: Endpoint, frame: frames.Frame) -> None:
        """Deliver once; a lost answer leaves the sender in doubt, as on a real network."""
        await self._network.cross()
        handler = self._network.receivers.get(receiver)
        if handler is None:
            raise TransientFailure("connection refused")
        data = frames.encode(frame)
        self._network.payload_bytes += len(frame.payload)
        self._network.head_bytes += len(data) - len(frame.payload)
        await handler(self._hotkey, frames.decode(data, limit_bytes=len(data)))
        await self._network.cross()

    def on_frame(self, handler: FrameHandler) -> None:
        """Be reachable from now on."""
        self._network.receivers[self._hotkey] = handler


class NatPeers:
    """ports.Peers of a node that nobody can dial: its router lets nothing in, and what it sends goes out as ever."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def send(self, receiver: Hotkey, endpoint: Endpoint, frame: frames.Frame) -> None:
        """Deliver once."""
        await self._peers.send(receiver, endpoint, frame)

    def on_frame(self, handler: FrameHandler) -> None:
        """Nothing ever arrives."""


@dataclass(slots=True, kw_only=True)
class CutPeers:
    """ports.Peers of a node that cannot dial `unreachable` during [since_s, until_s), virtual time."""

    peers: Peers
    clock: Clock
    unreachable: tuple[Hotkey, ...]
    since_s: float
    until_s: float
    num_cut: int = 0
    num_healed: int = 0
    """Frames that went to one of them after that."""

    async def send(self, receiver: Hotkey, endpoint: Endpoint, frame: frames.Frame) -> None:
        """Deliver once. Raises TransientFailure while the way is cut."""
        if receiver in self.unreachable and self.since_s <= self.clock.now() < self.until_s:
            self.num_cut += 1
            raise TransientFailure("no route to host")
        await self.peers.send(receiver, endpoint, frame)
        self.num_healed += receiver in self.unreachable and self.clock.now() >= self.until_s

    def on_frame(self, handler: FrameHandler) -> None:
        """Be reachable for those who can dial us."""
        self.peers.on_frame(handler)

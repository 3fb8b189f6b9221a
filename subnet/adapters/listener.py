"""A guarded HTTP listener: deadlines, caps and rate limits around handlers mounted by path (trust.md 6).

It stands on aiohttp's low-level server: dispatch is a look-up of the path, and nothing reads a body but the handler.
"""

import asyncio
import errno
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Annotated, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from msgspec import Meta

from subnet import wire
from subnet.adapters.rates import RateLimiter
from subnet.adapters.routes import ANSWERABLE, status_and_body
from subnet.errors import Backpressure, NotFound, ProtocolViolation
from subnet.types import Record

Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
"""Answers one request; the second argument is the path after the mounted prefix."""

Positive = Annotated[float, Meta(gt=0)]
_MANY = 1 << 20
_GONE = (ConnectionError, asyncio.CancelledError)


class ListenLimits(Record, frozen=True):
    """What strangers may ask of one listener."""

    header_s: Positive = 10.0
    """From the first byte (or the connection) to the end of the headers."""
    body_s: Positive = 60.0
    """For a whole JSON body."""
    idle_s: Positive = 75.0
    """How long an unused keep-alive connection stays open."""
    max_connections: Annotated[int, Meta(ge=1)] = 4096
    """Open at once; never more than half of what this process may open, which needs files and peers of its own."""
    max_connections_per_address: Annotated[int, Meta(ge=1)] = 1024
    """Of these from one address, which could keep everybody out otherwise; a proxy counts as one."""
    requests_per_s_per_address: Positive = 5000.0
    requests_per_s_per_hotkey: Positive = 500.0
    bytes_per_s_per_hotkey: Positive = 256.0 * 1024
    """Of control requests: they are journaled before it is known whether they are refused. A miner's work comes to 88 KB an epoch
    of 128 samples (LOG, the state store).
    """
    burst_s: Positive = 4.0
    """A bucket holds this many seconds of its rate."""


def max_descriptors() -> int:
    """How many files and sockets this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else soft


class _Connection(RequestHandler):
    """One connection, closed when its headers are late.

    aiohttp itself bounds idle time and headers together; that bound also holds for headers sent ahead of an answer.
    """

    __slots__ = ("_address", "_header_s", "_header_timer")

    def __init__(self, manager: "_Server", *, loop: asyncio.AbstractEventLoop, header_s: float, **kwargs: Any) -> None:
        super().__init__(manager, loop=loop, **kwargs)
        self._header_s = header_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        manager, peer = self._manager, transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        if isinstance(manager, _Server) and not manager.admit(self._address):
            self.force_close()
            return
        self._header_timer = self._loop.call_later(self._header_s, self.force_close)

    def data_received(self, data: bytes) -> None:
        num_requests, is_waiting = self._request_count, self._waiter is not None
        if data and is_waiting and self._header_timer is None:
            self._header_timer = self._loop.call_later(self._header_s, self.force_close)
        super().data_received(data)
        if self._request_count > num_requests:
            self._stop_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        if isinstance(self._manager, _Server):
            self._manager.release(self._address)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # What a stranger can cause at will (a cut connection, bytes that are no HTTP) must not fill the log.
        if not isinstance(kw.get("exc_info"), ConnectionError | HttpProcessingError):
            super().log_exception(*args, **kw)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _Server(web.Server):
    """Makes guarded connections."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limits: ListenLimits
    ) -> None:
        super().__init__(handler)
        self._limits = limits
        self._max_connections = min(limits.max_connections, max_descriptors() // 2)
        self._of_address: Counter[str] = Counter()

    def admit(self, address: str) -> bool:
        """Count a connection that was just made; whether it may stay. Every one is to be released."""
        self._of_address[address] += 1
        is_full = len(self._connections) > self._max_connections
        return not is_full and self._of_address[address] <= self._limits.max_connections_per_address

    def release(self, address: str) -> None:
        """Forget a connection."""
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    def __call__(self) -> RequestHandler:
        # No decompression: a body is what was signed, and a small one cannot swell.
        return _Connection(
            self,
            loop=self._loop,
            header_s=self._limits.header_s,
            keepalive_timeout=self._limits.idle_s,
            lingering_time=2.0,
            read_bufsize=1 << 18,
            auto_decompress=False,
            access_log=None,
        )


class _Watch:
    """Keeps the first exception that no handler may raise, so that the process can end instead of answering 500 for ever."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, _GONE) and not self.failure.done():
            self.failure.set_exception(error)


class Listener:
    """Listens on one address and hands requests to the handlers mounted on it."""

    def __init__(self, limits: ListenLimits | None = None) -> None:
        self.limits = limits or ListenLimits()
        self._handlers: dict[str, Handler] = {}
        rate = self.limits.requests_per_s_per_address
        self._addresses = RateLimiter(rate, burst=rate * self.limits.burst_s)
        self._runner: web.ServerRunner | None = None
        self._watch: _Watch | None = None

    def mount(self, prefix: str, handler: Handler) -> None:
        """Send requests below `prefix` (one that ends with a slash) or for exactly `prefix` to `handler`."""
        self._handlers[prefix] = handler

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises OSError that names the port when it is taken."""
        self._watch = _Watch()
        self._runner = web.ServerRunner(_Server(self._answer, self.limits), shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024, reuse_address=True).start()
        except OSError as error:
            await self._runner.cleanup()
            self._runner = None
            if error.errno == errno.EADDRINUSE:
                raise OSError(errno.EADDRINUSE, f"port {port} on {host} is already in use") from error
            raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error

    @property
    def port(self) -> int:
        """The port that is really listened on."""
        if self._runner is None:
            raise RuntimeError("the listener has not been started")
        return int(self._runner.addresses[0][1])

    @property
    def num_connections(self) -> int:
        """Connections open now."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    async def stop(self) -> None:
        """Close the socket and every connection; running handlers get a moment to end."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._watch is not None and self._watch.failure.done():
            self._watch.failure.exception()  # seen: a failure nobody waited for is in aiohttp's log

    async def wait_failed(self) -> None:
        """Wait until a handler raised what no handler may raise, and raise it here: for the owner's task group."""
        if self._watch is None:
            raise RuntimeError("the listener has not been started")
        await asyncio.shield(self._watch.failure)

    def _find(self, path: str) -> tuple[Handler, str]:
        """Handler of the longest prefix, and the rest of the path. Raises NotFound."""
        # By the few prefixes, not by the path's parts: a stranger's path of 8,000 slashes took 20 ms.
        fitting = [
            prefix for prefix in self._handlers if path == prefix or (prefix[-1] == "/" and path.startswith(prefix))
        ]
        if fitting:
            prefix = max(fitting, key=len)
            return self._handlers[prefix], path[len(prefix) :]
        raise NotFound(f"no route {path[:200]}; the other side may be of another version")

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._watch is not None
        with self._watch:
            return await self._dispatch(request)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            if not self._addresses.take(request.remote or ""):
                raise Backpressure("too many requests from your address; slow down")
            handler, rest = self._find(request.path)
            return await handler(request, rest)
        except ANSWERABLE as error:
            status, body = status_and_body(error)
            headers = {"Retry-After": "1"} if status in (429, 503) else None
            return web.Response(status=status, body=wire.encode(body), content_type="application/json", headers=headers)


async def read_body(request: web.BaseRequest, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body within its limits. Raises ProtocolViolation: too long, too slow, cut off."""
    if (request.content_length or 0) > limit_bytes:
        raise ProtocolViolation(f"body of {request.content_length} bytes, limit {limit_bytes}")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit_bytes:
                    raise ProtocolViolation(f"body longer than {limit_bytes} bytes")
    except TimeoutError as error:
        raise ProtocolViolation(f"body did not arrive within {timeout_s:g} s") from error
    except web.RequestPayloadError as error:
        raise ProtocolViolation(f"body is cut off or malformed: {error}") from error
    return bytes(body)

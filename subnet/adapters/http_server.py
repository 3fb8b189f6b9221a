"""The orchestrator's routes: signed control requests, public reads, health and metrics."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from subnet import wire
from subnet.adapters import routes
from subnet.adapters.auth import MAX_AHEAD_S, verify_request
from subnet.adapters.listener import Listener, ListenLimits, read_body
from subnet.adapters.memory import ReplayMemory
from subnet.adapters.rates import RateLimiter
from subnet.adapters.system import check_name
from subnet.errors import Backpressure, NotFound, ProtocolViolation, Refused
from subnet.ports import Clock
from subnet.types import Hotkey

ControlHandler = Callable[[Hotkey, wire.Envelope], Awaitable[wire.Response]]
"""Answers a request of a verified hotkey; long polls simply take their time. Raises routes.Answerable."""
PublicReader = Callable[[str], Awaitable[bytes | None]]
"""Bytes of a public object by its name, None when there is none."""


def mount_control(
    listener: Listener, handler: ControlHandler, *, receiver: Hotkey, clock: Clock, taken_over_s: float = 0.0
) -> None:
    """Offer `POST /v1/control/<message>` for requests signed to `receiver`.

    Nonces are remembered by this process alone. Until `taken_over_s` (unix s, 0 for never) another may have served
    `receiver`: what that one can have accepted, requests signed up to MAX_AHEAD_S later, is refused as stale, and its
    sender signs anew.
    """
    control = _Control(handler, receiver=receiver, clock=clock, limits=listener.limits, taken_over_s=taken_over_s)
    listener.mount(routes.CONTROL, control.answer)


class _Control:
    """Signature, replay, rate, schema, then the handler."""

    def __init__(
        self, handler: ControlHandler, *, receiver: Hotkey, clock: Clock, limits: ListenLimits, taken_over_s: float
    ) -> None:
        self._handler = handler
        self._receiver = receiver
        self._memory = ReplayMemory(clock)
        self._signed_after_s = taken_over_s + MAX_AHEAD_S
        self._clock = clock
        self._body_s = limits.body_s
        rate = limits.requests_per_s_per_hotkey
        self._hotkeys = RateLimiter(rate, burst=rate * limits.burst_s)
        rate = limits.bytes_per_s_per_hotkey
        self._bytes = RateLimiter(rate, burst=max(rate * limits.burst_s, wire.REQUEST_LIMIT_BYTES))

    async def answer(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        if request.method != "POST" or name not in routes.MESSAGES:
            raise NotFound(
                f"no control message {name[:80]!r} in protocol {wire.PROTOCOL_VERSION}; the older side must update"
            )
        check_protocol(request.headers)
        body = await read_body(request, limit_bytes=wire.REQUEST_LIMIT_BYTES, timeout_s=self._body_s)
        hotkey = await verify_request(
            request.headers,
            body,
            method="POST",
            path=request.raw_path,
            receiver=self._receiver,
            memory=self._memory,
            now=self._clock.now(),
            signed_after_s=self._signed_after_s,
        )
        if not self._hotkeys.take(hotkey) or not self._bytes.take(hotkey, len(body)):
            raise Backpressure("too many requests from your hotkey, or too long ones; slow down")
        envelope = wire.decode(wire.Envelope, body)
        if type(envelope.request).__name__ != name:
            raise ProtocolViolation(f"a {type(envelope.request).__name__} was sent to the route of {name}")
        answer = await self._handler(hotkey, envelope)
        return _json(wire.encode(answer))


def check_protocol(headers: Mapping[str, str]) -> None:
    """Raise Refused, saying which side to update, when the peer names another protocol version."""
    theirs = headers.get(routes.PROTOCOL_HEADER, "")
    if theirs == str(wire.PROTOCOL_VERSION):
        return
    if not theirs.isascii() or not theirs.isdecimal() or len(theirs) > 6:
        raise ProtocolViolation(f"header {routes.PROTOCOL_HEADER} with the protocol version is missing")
    side = "update your software" if int(theirs) < wire.PROTOCOL_VERSION else "the other side must update"
    raise Refused("protocol_version", f"you speak protocol {theirs}, this node {wire.PROTOCOL_VERSION}: {side}")


def mount_public(listener: Listener, read: PublicReader) -> None:
    """Offer `GET /v1/public/<name>` to everybody, no key needed."""

    async def answer(request: web.BaseRequest, name: str) -> web.StreamResponse:
        try:
            data = await read(check_name(name)) if request.method == "GET" else None
        except ValueError:
            data = None
        if data is None:
            raise NotFound(f"nothing public is called {name[:200]!r}")
        kind = "application/json" if name.endswith(".json") else "application/octet-stream"
        return web.Response(body=data, content_type=kind, headers={"X-Content-Type-Options": "nosniff"})

    listener.mount(routes.PUBLIC, answer)


def mount_status(
    listener: Listener, *, health: Callable[[], Mapping[str, object]], metrics: Callable[[], bytes] | None = None
) -> None:
    """Offer `/health` (JSON, with the protocol version) and, when given, `/metrics` (Prometheus text)."""

    async def answer_health(request: web.BaseRequest, rest: str) -> web.StreamResponse:
        facts = {"status": "ok", "protocol_version": wire.PROTOCOL_VERSION, **health()}
        return _json(msgspec.json.encode(facts))

    listener.mount(routes.HEALTH, answer_health)
    if metrics is None:
        return
    render = metrics

    async def answer_metrics(request: web.BaseRequest, rest: str) -> web.StreamResponse:
        return web.Response(body=render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    listener.mount(routes.METRICS, answer_metrics)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")

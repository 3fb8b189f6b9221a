"""Can peers dial a node? It asks the orchestrator, which dials back the address the question came from, and no other.

Only an asker's own address is ever dialled (behind a reverse proxy on a private address: the one that the proxy names), so the
route is no means to look into somebody's network.
"""

import asyncio
import contextlib
import enum
import ipaddress
import re

import aiohttp
from aiohttp import web

from subnet import wire
from subnet.adapters import routes
from subnet.adapters.http_client import NETWORK_ERRORS, read_response, say
from subnet.adapters.listener import Listener
from subnet.adapters.rates import RateLimiter
from subnet.errors import Backpressure, NotFound, ProtocolViolation, TransientFailure
from subnet.types import Record

_PORT = re.compile(r"[1-9][0-9]{0,4}")
SAID_BYTES = 16
"""What the far side says first is told up to here, so that an asker knows its own port from a neighbour's."""
_DIAL_S = 5.0
_LISTEN_S = 1.0
_ASK_S = 15.0
_MAX_DIALS = 32
_PER_ADDRESS_PER_S, _BURST = 0.5, 10.0
_ANSWER_LIMIT_BYTES = 4096


class Dialled(enum.StrEnum):
    """What became of a connection."""

    OPEN = "open"
    REFUSED = "refused"
    SILENT = "silent"


class Reached(Record, frozen=True):
    """What the orchestrator found at the asker's `address` and `port`; `said` is hex of what was said there first."""

    address: str
    port: int
    dialled: Dialled
    said: str = ""


def mount_reach(listener: Listener) -> None:
    """Offer `GET /v1/reach/<port>`, no key needed."""
    rates = RateLimiter(_PER_ADDRESS_PER_S, burst=_BURST)
    dials = asyncio.Semaphore(_MAX_DIALS)

    async def answer(request: web.BaseRequest, text: str) -> web.StreamResponse:
        if request.method != "GET" or not _PORT.fullmatch(text) or int(text) > 65535:
            raise NotFound(f"{routes.REACH}PORT takes a port, 1 to 65535")
        address = asker(request.remote, request.headers.get("X-Forwarded-For", ""))
        if not rates.take(address) or dials.locked():
            raise Backpressure("too many ports to dial; ask again in a few seconds")
        async with dials:
            found = await _dial(address, int(text))
        return web.Response(body=wire.encode(found), content_type="application/json")

    listener.mount(routes.REACH, answer)


def asker(remote: str | None, forwarded_for: str) -> str:
    """Address of who asks; what a proxy in front of us says counts only when a proxy of ours can be what we see.

    Raises ProtocolViolation for who is gone already, and unless the proxy names a public address: where a container's network
    hides who connects, a stranger writes that header, and must not have the owner's own network dialled.
    """
    if remote is None:
        raise ProtocolViolation("the connection is closed")
    seen = _address(remote)
    forwarded = forwarded_for.rpartition(",")[2].strip()
    if seen.is_global or not forwarded:
        return str(seen)
    try:
        named = _address(forwarded)
    except ValueError as error:
        raise ProtocolViolation("X-Forwarded-For names no address") from error
    if not named.is_global or named.is_multicast or getattr(named, "scope_id", None):
        raise ProtocolViolation("X-Forwarded-For names no public address")
    return str(named)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address; one of IPv4 that a socket for both spells as IPv6 is the former. Raises ValueError."""
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


async def _dial(address: str, port: int) -> Reached:
    try:
        async with asyncio.timeout(_DIAL_S):
            reader, writer = await asyncio.open_connection(address, port)
    except TimeoutError:
        return Reached(address=address, port=port, dialled=Dialled.SILENT)
    except OSError:
        return Reached(address=address, port=port, dialled=Dialled.REFUSED)
    said = b""
    with contextlib.closing(writer), contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(_LISTEN_S):  # a node that works says nothing until it is spoken to
            said = await reader.read(SAID_BYTES)
    return Reached(address=address, port=port, dialled=Dialled.OPEN, said=said.hex())


async def ask_reach(session: aiohttp.ClientSession, url: str, port: int) -> Reached:
    """What the orchestrator at `url` finds when it dials us. Raises TransientFailure, ProtocolViolation, NotFound (older)."""
    target = f"{url.rstrip('/')}{routes.REACH}{port}"
    try:
        async with asyncio.timeout(_ASK_S), session.get(target, allow_redirects=False) as answer:
            body = await read_response(answer, limit_bytes=_ANSWER_LIMIT_BYTES)
    except NETWORK_ERRORS as error:
        raise TransientFailure(f"the orchestrator did not say whether it can reach us: {say(error)}") from error
    if answer.status != 200:
        raise routes.error_of(answer.status, body)
    return wire.decode(Reached, body)

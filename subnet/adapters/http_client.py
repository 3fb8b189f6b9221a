"""Requests to the orchestrator: signed anew at each attempt, one request id over all of them (ports.Control)."""

import asyncio
import secrets
from typing import cast

import aiohttp
import yarl
from aiohttp.abc import AbstractStreamWriter

from subnet import draws, wire
from subnet.adapters import routes
from subnet.adapters.auth import KeypairSigner, RequestSigner
from subnet.errors import ProtocolViolation, Refused, TransientFailure
from subnet.ports import Clock
from subnet.types import Hotkey

_ATTEMPT_S = 20.0
"""An attempt without an answer for this long (beyond a long poll's wait) is given up and made again."""
PIECE_BYTES = 1 << 18
"""A body is handed to the connection in pieces of this size: smaller ones wake both sides more often."""
_REFUSAL_LIMIT_BYTES = 1 << 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, UnicodeError)
"""What an exchange that may be repeated can end in; the last is what a resolver makes of a host such as `a..b`."""


def open_session(*, max_connections: int = 256) -> aiohttp.ClientSession:
    """A session to share within one process; time limits are set around each exchange, never by the session."""
    connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=30.0)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "strata"},
        read_bufsize=1 << 18,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def parse_url(url: str) -> yarl.URL:
    """`url` with its encoding as it was signed. Raises ProtocolViolation: others wrote it."""
    try:
        parsed = yarl.URL(url, encoded=True)
        _ = parsed.port  # checked when it is asked for
    except ValueError as error:
        raise ProtocolViolation(f"{url[:80]!r} is no URL: {error}") from error
    return parsed


class Body(aiohttp.Payload):
    """A body of buffers, sent in pieces without copying: a large one neither doubles in memory nor holds up the loop."""

    _autoclose = True

    def __init__(self, *parts: bytes | memoryview) -> None:
        super().__init__(parts, content_type="application/octet-stream")
        self._parts = parts
        self._size = sum(len(part) for part in parts)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The whole body as text, which aiohttp asks of every payload."""
        return b"".join(self._parts).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send piece after piece; each waits until the connection has room."""
        for part in self._parts:
            view = memoryview(part)
            for at in range(0, len(part), PIECE_BYTES):
                await writer.write(view[at : at + PIECE_BYTES])


async def read_response(response: aiohttp.ClientResponse, *, limit_bytes: int) -> bytes:
    """The whole body. Raises ProtocolViolation when it is longer than `limit_bytes`."""
    if (response.content_length or 0) > limit_bytes:
        raise ProtocolViolation(f"answer of {response.content_length} bytes, limit {limit_bytes}")
    chunks, size_bytes = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            raise ProtocolViolation(f"answer longer than {limit_bytes} bytes")
    return b"".join(chunks)


async def read_into(response: aiohttp.ClientResponse, buffer: memoryview) -> int:
    """The whole body, into `buffer`; its size. Raises ProtocolViolation when it is longer than that.

    Pieces are let go of as they come. To keep them, and then to join them, touches fresh memory twice, which costs more than to
    receive them (LOG, the merge without copies).
    """
    size_bytes = 0
    async for piece, _ in response.content.iter_chunks():
        stop = size_bytes + len(piece)
        if stop > len(buffer):
            raise ProtocolViolation(f"answer longer than {len(buffer)} bytes")
        buffer[size_bytes:stop] = piece
        size_bytes = stop
    return size_bytes


async def read_refusal(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer that is not what was asked for; empty when it is long, and its status has to do."""
    try:
        return await read_response(response, limit_bytes=_REFUSAL_LIMIT_BYTES)
    except ProtocolViolation:
        return b""


class HttpControl:
    """The orchestrator, as one node sees it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        signer: KeypairSigner,
        orchestrator: Hotkey,
        clock: Clock,
    ) -> None:
        self._session = session
        self._base = url.rstrip("/")
        self._orchestrator = orchestrator
        self._signer = RequestSigner(signer, clock)

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        """The answer. Raises Refused, TransientFailure (no answer within `timeout_s`), ProtocolViolation."""
        envelope = wire.Envelope(request_id=secrets.token_hex(16), request=request)
        body = wire.encode(envelope)
        if len(body) > wire.REQUEST_LIMIT_BYTES:
            raise ProtocolViolation(f"request of {len(body)} bytes, limit {wire.REQUEST_LIMIT_BYTES}; send it in parts")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        wait_s = request.wait_s if isinstance(request, wire.Poll) else 0.0
        attempt = 0
        while True:
            left_s = deadline - loop.time()
            try:
                return await self._attempt(routes.control_path(request), body, min(left_s, _ATTEMPT_S + wait_s))
            except (TransientFailure, Refused) as error:
                if isinstance(error, Refused) and error.code != "stale_request":
                    raise
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
                pause_s *= 0.5 + draws.uniform(envelope.request_id, attempt)
                if deadline - loop.time() <= pause_s:
                    raise
            await asyncio.sleep(pause_s)
            attempt += 1

    async def _attempt(self, path: str, body: bytes, timeout_s: float) -> wire.Response:
        url = parse_url(self._base + path)
        headers = self._signer.headers("POST", url.raw_path_qs, receiver=self._orchestrator, body=body)
        headers |= {"Content-Type": "application/json", routes.PROTOCOL_HEADER: str(wire.PROTOCOL_VERSION)}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                answer = await read_response(response, limit_bytes=wire.RESPONSE_LIMIT_BYTES)
        except NETWORK_ERRORS as error:
            raise TransientFailure(f"no answer from the orchestrator at {self._base}: {say(error)}") from error
        if response.status != 200:
            raise _known(routes.error_of(response.status, answer))
        kind = cast("type[wire.Response]", wire.Response)  # a union is no type to the type checker
        return wire.decode(kind, answer, limit_bytes=wire.RESPONSE_LIMIT_BYTES)


def _known(error: Exception) -> Exception:
    """Only what ports.Control names: a missing route or record is a refusal."""
    return (
        error if isinstance(error, Refused | TransientFailure | ProtocolViolation) else Refused("not_found", str(error))
    )


def say(error: BaseException) -> str:
    """`error` in words; some of the network's have none."""
    return "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__

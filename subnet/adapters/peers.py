"""Frames between miners over HTTP: `POST /v1/frames/<pass>/<blake3 of the frame's head>` (trust.md 6, ports.Peers).

The signature covers the path and an empty body. The path names the head's digest and the head names the payload's, so
every byte is hashed once and nothing is used before it fits what was signed. 204 = taken, 429 = buffer full.
"""

import asyncio
import contextlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import blake3
import yarl
from aiohttp import web
from msgspec import Meta

from subnet import frames
from subnet.adapters import routes
from subnet.adapters.auth import KeypairSigner, RequestSigner, verify_request
from subnet.adapters.http_client import NETWORK_ERRORS, PIECE_BYTES, Body, read_refusal, say
from subnet.adapters.listener import Listener, ListenLimits
from subnet.adapters.memory import ReplayMemory
from subnet.adapters.rates import RateLimiter, transfer_limit_s
from subnet.errors import Backpressure, NotFound, ProtocolViolation, Refused, StrataError, TransientFailure
from subnet.ports import Clock, FrameHandler
from subnet.types import Digest, Direction, Endpoint, FrameHeader, Hotkey, Record

Count = Annotated[int, Meta(ge=1)]
Expect = Callable[[FrameHeader], None]
"""Raises ProtocolViolation or Refused for a header whose payload is not wanted: shape, dtype, epoch, lease."""

_PREFIX_BYTES = 10
_PATH = re.compile(r"([a-z0-9-]{1,120})/([0-9a-f]{64})")
_HOST = re.compile(r"[A-Za-z0-9.:-]{1,253}")


class PeerLimits(Record, frozen=True):
    """What other miners may ask of this one."""

    max_payload_bytes: Count = 64 << 20
    max_buffered_bytes: Count = 512 << 20
    """Announced bytes of all frames being received at once; beyond it senders see 429."""
    handler_s: Annotated[float, Meta(gt=0)] = 30.0
    max_remembered: Count = 16384
    """Taken frames whose repetition is answered without work."""
    listen: ListenLimits = ListenLimits()


@dataclass(slots=True)
class PeerCounters:
    """Bytes of taken frames, heads apart from payloads, and how many were taken and turned away."""

    frames_sent: int = 0
    head_bytes_sent: int = 0
    payload_bytes_sent: int = 0
    frames_received: int = 0
    head_bytes_received: int = 0
    payload_bytes_received: int = 0
    frames_repeated: int = 0
    frames_refused: int = 0


class HttpPeers:
    """One miner's port, and its way to the ports of others."""

    def __init__(
        self,
        signer: KeypairSigner,
        *,
        session: aiohttp.ClientSession,
        clock: Clock,
        expect: Expect,
        limits: PeerLimits | None = None,
    ) -> None:
        self.limits = limits or PeerLimits()
        self.counters = PeerCounters()
        self.listener = Listener(self.limits.listen)
        self.listener.mount(routes.FRAMES, self._receive)
        self._hotkey = signer.hotkey
        self._request_signer = RequestSigner(signer, clock)
        self._session = session
        self._clock = clock
        self._expect = expect
        self._memory = ReplayMemory(clock)
        rate = self.limits.listen.requests_per_s_per_hotkey
        self._senders = RateLimiter(rate, burst=rate * self.limits.listen.burst_s)
        self._handler: FrameHandler | None = None
        self._taken: OrderedDict[tuple[Hotkey, str], bool] = OrderedDict()
        self._buffered_bytes = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises OSError that names the port when it is taken."""
        await self.listener.start(host, port)

    async def stop(self) -> None:
        """Stop listening."""
        await self.listener.stop()

    @property
    def port(self) -> int:
        """The port that is really listened on."""
        return self.listener.port

    def on_frame(self, handler: FrameHandler) -> None:
        """Set what receives frames; before it is set, senders see Backpressure."""
        self._handler = handler

    # ---- sending -------------------------------------------------------------------------------------------------

    async def send(self, receiver: Hotkey, endpoint: Endpoint, frame: frames.Frame) -> None:
        """Deliver once. Raises Backpressure, Refused, TransientFailure."""
        head = frames.encode_head(frame.header)
        path = f"{routes.FRAMES}{frame.pass_id}/{frames.digest(head)}"
        url = yarl.URL(_base(endpoint) + path, encoded=True)
        try:
            await self._post(url, path, receiver, head=head, payload=frame.payload)
        except aiohttp.ServerDisconnectedError:
            # A kept-alive connection that the receiver had just closed; a repetition is harmless.
            await self._post(url, path, receiver, head=head, payload=frame.payload)
        self.counters.frames_sent += 1
        self.counters.head_bytes_sent += len(head)
        self.counters.payload_bytes_sent += len(frame.payload)

    async def _post(self, url: yarl.URL, path: str, receiver: Hotkey, *, head: bytes, payload: bytes) -> None:
        size_bytes = len(head) + len(payload)
        # A head alone in the first packet would wake the receiver twice: half the speed of a hop on busy machines.
        first = PIECE_BYTES - len(head)
        body = Body(head + payload[:first], memoryview(payload)[first:])
        headers = self._request_signer.headers("POST", path, receiver=receiver)
        try:
            async with (
                asyncio.timeout(transfer_limit_s(size_bytes)),
                self._session.post(url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                if response.status == 204:
                    return
                answer = await read_refusal(response)
        except aiohttp.ServerDisconnectedError:
            raise
        except NETWORK_ERRORS as error:
            raise TransientFailure(
                f"{receiver} at {url.raw_host}:{url.port} did not take the frame: {say(error)}"
            ) from error
        raise _as_sender(routes.error_of(response.status, answer))

    # ---- receiving -----------------------------------------------------------------------------------------------

    async def _receive(self, request: web.BaseRequest, rest: str) -> web.StreamResponse:
        try:
            return await self._take(request, rest)
        except StrataError:
            self.counters.frames_refused += 1
            raise

    async def _take(self, request: web.BaseRequest, rest: str) -> web.StreamResponse:
        named = _PATH.fullmatch(rest)
        if request.method != "POST" or named is None:
            raise NotFound(f"frames are sent by POST {routes.FRAMES}<pass>/<blake3 of the head>")
        sender = await verify_request(
            request.headers,
            b"",
            method="POST",
            path=request.raw_path,
            receiver=self._hotkey,
            memory=self._memory,
            now=self._clock.now(),
        )
        if not self._senders.take(sender):
            raise Backpressure("too many frames from your hotkey; slow down")
        if (sender, rest) in self._taken:
            return self._repeated(sender, rest)
        size_bytes = request.content_length or 0
        if not 0 < size_bytes <= self.limits.max_payload_bytes + frames.HEADER_LIMIT_BYTES:
            raise ProtocolViolation(f"a frame announces its length, at most {self.limits.max_payload_bytes} bytes")
        if self._handler is None:
            raise Backpressure("not ready for this frame; try again shortly")
        with _receiving(size_bytes):
            async with asyncio.timeout(transfer_limit_s(frames.HEADER_LIMIT_BYTES)):
                head = await _read_head(request.content, Digest(named[2]))
        header = frames.decode_head(head)
        _check_neighbours(header, sender=sender, receiver=self._hotkey)
        if header.pass_id != named[1]:
            raise ProtocolViolation("frame head belongs to another pass than the path says")
        self._expect(header)
        if len(head) + frames.payload_size(header) != size_bytes:
            raise ProtocolViolation(f"request of {size_bytes} bytes is not the frame its head announces")
        # Room is taken up by frames that are expected and by none else: a key costs nothing, and its announcements could
        # keep everybody out.
        if self._buffered_bytes + size_bytes > self.limits.max_buffered_bytes:
            raise Backpressure("no room for this frame; try again shortly")
        self._buffered_bytes += size_bytes
        try:
            with _receiving(size_bytes):
                async with asyncio.timeout(transfer_limit_s(size_bytes)):
                    frame = await _read_payload(request.content, header)
            return await self._hand_over(sender, rest, frame, head_bytes=len(head))
        finally:
            self._buffered_bytes -= size_bytes

    async def _hand_over(
        self, sender: Hotkey, rest: str, frame: frames.Frame, *, head_bytes: int
    ) -> web.StreamResponse:
        """Call the handler once for each frame, also when two deliveries of it arrive at the same time."""
        handler, key = self._handler, (sender, rest)
        if handler is None:
            raise Backpressure("not ready for this frame; try again shortly")
        if key in self._taken:
            return self._repeated(sender, rest)
        self._taken[key] = False
        try:
            async with asyncio.timeout(self.limits.handler_s):
                await handler(sender, frame)
            self._taken[key] = True
        except TimeoutError as error:
            raise Backpressure("the frame could not be taken in time; try again") from error
        finally:
            if not self._taken.get(key):
                self._taken.pop(key, None)
        while len(self._taken) > self.limits.max_remembered:
            self._taken.popitem(last=False)
        self.counters.frames_received += 1
        self.counters.head_bytes_received += head_bytes
        self.counters.payload_bytes_received += len(frame.payload)
        return web.Response(status=204)

    def _repeated(self, sender: Hotkey, rest: str) -> web.StreamResponse:
        if not self._taken.get((sender, rest)):
            raise Backpressure("this very frame is being taken right now")
        self.counters.frames_repeated += 1
        return web.Response(status=204)


@contextlib.contextmanager
def _receiving(size_bytes: int) -> Iterator[None]:
    """What ends a frame's bytes early, as ProtocolViolation."""
    try:
        yield
    except TimeoutError as error:
        raise ProtocolViolation(f"frame of {size_bytes} bytes came too slowly") from error
    except (asyncio.IncompleteReadError, web.RequestPayloadError) as error:
        raise ProtocolViolation("frame is cut off") from error


async def _read_head(content: aiohttp.StreamReader, head_digest: Digest) -> bytes:
    """The bytes before the payload, which the sender signed."""
    prefix = await content.readexactly(_PREFIX_BYTES)
    head = prefix + await content.readexactly(frames.head_size(prefix) - _PREFIX_BYTES)
    if frames.digest(head) != head_digest:
        raise ProtocolViolation("frame head is not the one that was signed")
    return head


async def _read_payload(content: aiohttp.StreamReader, header: FrameHeader) -> frames.Frame:
    hasher, pieces = blake3.blake3(), []
    async for piece in content.iter_any():
        hasher.update(piece)
        pieces.append(piece)
    payload = b"".join(pieces)
    if len(payload) != frames.payload_size(header):
        raise ProtocolViolation(
            f"frame payload of {len(payload)} bytes, header announces {frames.payload_size(header)}"
        )
    if hasher.hexdigest() != header.payload_digest:
        raise ProtocolViolation("frame payload does not match its digest")
    return frames.Frame(header=header, payload=payload)


def _check_neighbours(header: FrameHeader, *, sender: Hotkey, receiver: Hotkey) -> None:
    """Raise Refused unless the lease's pathway leads from the sender to us in this direction."""
    hops, stage = header.lease.hops, header.stage
    source = stage - 1 if header.direction is Direction.FORWARD else stage + 1
    if header.direction not in (Direction.FORWARD, Direction.BACKWARD):
        raise ProtocolViolation(f"a frame goes forward or backward, not {header.direction}")
    if not (0 <= stage < len(hops) and hops[stage] == receiver):
        raise Refused("not_my_pass", "the pathway of this frame does not lead through this miner at that stage")
    if not (0 <= source < len(hops) and hops[source] == sender):
        raise Refused("not_my_neighbour", "the pathway of this frame has another sender")


def _base(endpoint: Endpoint) -> str:
    """URL of an announced endpoint. Raises Refused: it was announced by a stranger."""
    if not _HOST.fullmatch(endpoint.host) or not 0 < endpoint.port < 65536:
        raise Refused("bad_endpoint", f"{endpoint.host[:80]}:{endpoint.port} is no address")
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"http://{host}:{endpoint.port}"


def _as_sender(error: StrataError) -> StrataError:
    """What ports.Peers lets a sender see."""
    match error:
        case Refused(code="stale_request"):
            return TransientFailure(error.reason)
        case ProtocolViolation():
            return Refused("protocol_violation", str(error))
        case NotFound():
            return Refused("not_found", str(error))
        case _:
            return error

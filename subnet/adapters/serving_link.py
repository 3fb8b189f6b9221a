"""TCP between gateways and stage hosts: a greeting that proves the shared key, then sealed frames (inference.messages)."""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from subnet.errors import ProtocolViolation, TransientFailure
from subnet.inference import messages
from subnet.inference.messages import AnyMessage, Hello, Seal
from subnet.types import Endpoint

GREETING_S = 5.0
"""For connecting and proving the key."""
SEND_S = 30.0
"""A frame that the other side does not take for this long ends the connection."""
_NONCE_BYTES = 32
_BUFFER_BYTES = 1 << 20


@dataclass(slots=True)
class LinkCounters:
    """Bytes handed to connections of one process: payloads, and frames whole."""

    payload_bytes_sent: int = 0
    frame_bytes_sent: int = 0
    num_frames_sent: int = 0


@dataclass(slots=True)
class Link:
    """One connection after its greeting. Only one task receives; several may send."""

    peer: Endpoint
    counters: LinkCounters
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _sealing: Seal
    _opening: Seal
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def send(self, message: AnyMessage, payload: bytes = b"") -> None:
        """Hand a frame to the connection. Raises TransientFailure."""
        async with self._lock:
            frame = messages.encode_frame(self._sealing, message, payload)
            try:
                async with asyncio.timeout(SEND_S):
                    self._writer.writelines(frame)
                    await self._writer.drain()
            except (OSError, TimeoutError) as error:
                self._writer.transport.abort()
                raise TransientFailure(f"{name_of(self.peer)} does not take a frame: {error or 'time-out'}") from error
        self.counters.payload_bytes_sent += len(payload)
        self.counters.frame_bytes_sent += sum(len(part) for part in frame)
        self.counters.num_frames_sent += 1

    async def receive(self) -> tuple[AnyMessage, bytes]:
        """The next frame. Raises TransientFailure when the connection ends, ProtocolViolation for bytes that are none."""
        try:
            lengths = messages.frame_lengths(await self._reader.readexactly(messages.LENGTHS.size))
            head = await self._reader.readexactly(lengths[0])
            payload = await self._reader.readexactly(lengths[1])
            mac = await self._reader.readexactly(messages.MAC_BYTES)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise TransientFailure(f"{name_of(self.peer)} has closed the connection") from error
        return messages.decode_frame(self._opening, head, payload, mac), payload

    @property
    def is_closed(self) -> bool:
        """Whether either side has ended the connection."""
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        """End the connection; what was not sent is lost."""
        self._writer.transport.abort()


def name_of(peer: Endpoint) -> str:
    """HOST:PORT for people."""
    return f"[{peer.host}]:{peer.port}" if ":" in peer.host else f"{peer.host}:{peer.port}"


async def dial(peer: Endpoint, hello: Hello, *, shared_key: bytes, counters: LinkCounters) -> Link:
    """Connect, prove the key, say hello. Raises TransientFailure, ProtocolViolation (another key, no Strata host)."""
    try:
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(peer.host, peer.port, limit=_BUFFER_BYTES)
            try:
                link = await _greet(peer, reader, writer, shared_key=shared_key, counters=counters)
                await link.send(hello)
            except BaseException:
                writer.transport.abort()
                raise
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise TransientFailure(f"{name_of(peer)} does not answer: {error or 'time-out'}") from error
    return link


async def _greet(
    peer: Endpoint,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    shared_key: bytes,
    counters: LinkCounters,
) -> Link:
    """The side that connected: it sees the other's proof before it gives its own."""
    own = secrets.token_bytes(_NONCE_BYTES)
    writer.write(messages.GREETING.pack(messages.MAGIC, messages.VERSION, own))
    nonces = own + _nonce(await reader.readexactly(messages.GREETING.size))
    if not hmac.compare_digest(await reader.readexactly(_NONCE_BYTES), messages.prove(shared_key, "server", nonces)):
        raise ProtocolViolation(f"{name_of(peer)} has another key: start it with the same STRATA_SERVE_KEY")
    writer.write(messages.prove(shared_key, "client", nonces))
    seals = Seal(shared_key, "client", nonces), Seal(shared_key, "server", nonces)
    return Link(peer, counters, reader, writer, *seals)


def _nonce(greeting: bytes) -> bytes:
    magic, version, nonce = messages.GREETING.unpack(greeting)
    if magic != messages.MAGIC:
        raise ProtocolViolation("the other side is no Strata stage host")
    if version != messages.VERSION:
        raise ProtocolViolation(f"the other side speaks serving protocol {version}, this one {messages.VERSION}")
    return bytes(nonce)


Serve = Callable[[Link], Awaitable[None]]
"""Holds one accepted connection to its end. Raises TransientFailure, ProtocolViolation."""


class LinkServer:
    """Listens, and hands each connection whose other side proved the key to `serve`."""

    def __init__(self, serve: Serve, *, shared_key: bytes, counters: LinkCounters) -> None:
        self._serve = serve
        self._key = shared_key
        self._counters = counters
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_refused = 0
        """Connections that ended in bytes that were no frame, or without the key."""

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=_BUFFER_BYTES, backlog=256)

    @property
    def port(self) -> int:
        """The port that is really listened on."""
        assert self._server is not None, "the server has not been started"
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the socket and every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(await self._answer(reader, writer))
        except ProtocolViolation:
            self.num_refused += 1
        except (TransientFailure, OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the connection is over, which is no news to anybody but its owner
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        address = writer.get_extra_info("peername")
        if address is None:  # gone before it was accepted
            raise TransientFailure("the other side has closed the connection")
        host, port = address[:2]
        async with asyncio.timeout(GREETING_S):
            own = secrets.token_bytes(_NONCE_BYTES)
            nonces = _nonce(await reader.readexactly(messages.GREETING.size)) + own
            writer.write(messages.GREETING.pack(messages.MAGIC, messages.VERSION, own))
            writer.write(messages.prove(self._key, "server", nonces))
            proof = await reader.readexactly(_NONCE_BYTES)
        if not hmac.compare_digest(proof, messages.prove(self._key, "client", nonces)):
            raise ProtocolViolation("the other side does not know the key")
        seals = Seal(self._key, "server", nonces), Seal(self._key, "client", nonces)
        return Link(Endpoint(host=str(host), port=int(port)), self._counters, reader, writer, *seals)

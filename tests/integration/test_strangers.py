"""Bytes that no HTTP client sends, to every kind of route: each is answered or cut off, and no process ends of them."""

import asyncio
import contextlib
import gc
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from subnet import frames, wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.blobs import DirectoryBlobStore, HttpBlobs
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.http_server import mount_control, mount_public, mount_status
from subnet.adapters.listener import Listener, ListenLimits
from subnet.adapters.page import mount_page
from subnet.adapters.peers import HttpPeers
from subnet.adapters.reach import mount_reach
from subnet.adapters.serving_link import Link, LinkCounters, LinkServer, dial
from subnet.adapters.system import SystemClock
from subnet.errors import NotFound, ProtocolViolation, Refused, TransientFailure
from subnet.inference.messages import Hello
from subnet.types import Direction, Endpoint, Epoch, FrameHeader, Hotkey, Lease, SampleId, StageIndex

OWNER = KeypairSigner.from_uri("//Owner")
CLOCK = SystemClock()
END = b"Connection: close\r\n\r\n"
FRAME = b"POST /v1/frames/abc/" + b"0" * 64
POLL = b"POST /v1/control/Poll"


def signed(**claims: bytes) -> bytes:
    """Headers in the shape of a signed request; `claims` replace some."""
    headers = {
        b"X-Strata-Protocol": b"1",
        b"X-Bittensor-Version": b"1",
        b"X-Bittensor-Hotkey": OWNER.hotkey.encode(),
        b"X-Bittensor-Receiver": OWNER.hotkey.encode(),
        b"X-Bittensor-Nonce": str(time.time_ns()).encode(),
        b"X-Bittensor-Signature": b"0x" + b"00" * 64,
        b"Content-Length": b"0",
    }
    headers |= {name.replace("_", "-").encode(): value for name, value in claims.items()}
    return b"".join(name + b": " + value + b"\r\n" for name, value in headers.items())


def request(line: bytes, headers: bytes = b"") -> bytes:
    return line + b" HTTP/1.1\r\nHost: x\r\n" + headers + END


ODD = {
    "key no UTF-8": request(POLL, signed(X_Bittensor_Hotkey=b"5\xff\xfe")),
    "key no UTF-8 with a frame": request(FRAME, signed(X_Bittensor_Hotkey=b"5\xff\xfe")),
    "receiver no UTF-8": request(POLL, signed(X_Bittensor_Receiver=b"\xff")),
    "signature in other digits": request(POLL, signed(X_Bittensor_Signature="0x\uff11\uff12".encode())),
    "signature too short": request(FRAME, signed(X_Bittensor_Signature=b"0x12")),
    "scheme of another chain": request(FRAME, signed(X_Bittensor_Crypto=b"ecdsa")),
    "nonce far below zero": request(POLL, signed(X_Bittensor_Nonce=b"-" + b"9" * 190)),
    "headers twice": request(POLL, signed() + signed(X_Bittensor_Hotkey=b"5")),
    "query no UTF-8": request(POLL + b"?\xff", signed()),
    "path no UTF-8": request(b"GET /\xff\xfe"),
    "path of half a character": request(b"GET /%ed%a0%80"),
    "name of nothing": request(b"GET /v1/public/%00"),
    "path upwards": request(b"GET /v1/blobs/%2e%2e/%2e%2e/etc/passwd?method=GET"),
    "expiry of many digits": request(b"GET /v1/blobs/a?method=GET&signature=%ff&expires=" + b"9" * 4000),
    "grant for less than nothing": request(b"PUT /v1/blobs/a?method=PUT&expires=9&size=-1&digest=%0a&signature=1"),
    "port after zeros": request(b"GET /v1/reach/0000019999999"),
    "port of many digits": request(b"GET /v1/reach/000001" + b"1" * 5000),
    "address with a zone": request(b"GET /v1/reach/80", b"X-Forwarded-For: fe80::1%\xff\r\n"),
    "address with a long zone": request(b"GET /v1/reach/80", b"X-Forwarded-For: fe80::1%" + b"a" * 300 + b"\r\n"),
    "host that is none": request(b"GET http://[::1/"),
    "host with a port beyond all": request(b"GET http://x:99999999/health"),
    "nowhere": request(b"CONNECT x:99"),
    "everywhere": request(b"OPTIONS *"),
    "chunks that are none": request(POLL, b"X-Strata-Protocol: 1\r\nTransfer-Encoding: chunked\r\n") + b"zz\r\n",
    "two lengths": request(POLL, b"Content-Length: 5\r\nContent-Length: 6\r\n"),
    "length beyond all": request(POLL, b"Content-Length: 99999999999999999999\r\n"),
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "zeros": b"\0" * 1000,
}


@contextlib.asynccontextmanager
async def listeners(blobs: Path) -> AsyncIterator[tuple[Listener, Listener]]:
    """An orchestrator's, with every route, and a miner's."""

    async def answer(hotkey: Hotkey, envelope: wire.Envelope) -> wire.Response:
        return wire.Done()

    async def read(name: str) -> bytes | None:
        return None

    def expect(header: FrameHeader) -> None:
        return None

    async with open_session() as session:
        orchestrator = Listener()
        mount_control(orchestrator, answer, receiver=OWNER.hotkey, clock=CLOCK)
        mount_public(orchestrator, read)
        mount_status(orchestrator, health=lambda: {}, metrics=lambda: b"")
        mount_reach(orchestrator)
        mount_page(orchestrator, {"index.html": b"page"})
        DirectoryBlobStore(blobs, "http://x/v1/blobs", secret=b"secret", clock=CLOCK).mount_on(orchestrator)
        miner = HttpPeers(OWNER, session=session, clock=CLOCK, expect=expect)
        miner.on_frame(lambda sender, frame: CLOCK.sleep(0))
        await orchestrator.start("127.0.0.1", 0)
        await miner.start("127.0.0.1", 0)
        try:
            yield orchestrator, miner.listener
        finally:
            await miner.stop()
            await orchestrator.stop()


async def say(port: int, data: bytes) -> bytes:
    """All that is answered to `data`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
async def test_odd_bytes_are_turned_away_and_end_nothing(tmp_path: Path, data: bytes) -> None:
    async with listeners(tmp_path) as both:
        for listener in both:
            async with asyncio.TaskGroup() as group:
                failed = group.create_task(listener.wait_failed())
                answer = await say(listener.port, data)
                assert answer.split()[1][:1] == b"4", answer
                assert (await say(listener.port, request(b"GET /nowhere"))).split()[1] == b"404"
                assert not failed.done(), failed
                failed.cancel()


async def test_a_path_of_slashes_costs_no_more_than_another(tmp_path: Path) -> None:
    async with listeners(tmp_path) as (listener, _):
        spent_s = []
        for path in (b"/" + b"a" * 7999, b"/" * 8000):
            began_s = time.process_time()
            for _ in range(20):
                assert (await say(listener.port, request(b"GET " + path))).split()[1] == b"404"
            spent_s.append(time.process_time() - began_s)
        assert spent_s[1] < 4 * spent_s[0] + 0.1


def test_who_is_gone_before_a_stage_host_accepts_is_no_news() -> None:
    """Such a connection has no address on the loop that processes run on; an error would be a traceback in the log for each."""
    uvloop.run(_gone_before_accepted())


async def _gone_before_accepted() -> None:
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    served = asyncio.Event()

    async def serve(link: Link) -> None:
        served.set()

    server = LinkServer(serve, shared_key=b"key", counters=LinkCounters())
    await server.start("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    here, hello = Endpoint(host="127.0.0.1", port=server.port), Hello(role="gateway", session="after it")
    link = await dial(here, hello, shared_key=b"key", counters=LinkCounters())
    async with asyncio.timeout(30):
        await served.wait()
    link.close()
    await server.stop()
    gc.collect()
    assert not faults


def a_frame() -> frames.Frame:
    lease = Lease(
        run_id="run",
        epoch=Epoch(0),
        sample=SampleId(1),
        branch=0,
        attempt=0,
        hops=(OWNER.hotkey, Hotkey("5E")),
        deadline_s=1e12,
        signature="00",
    )
    return frames.make(lease, stage=StageIndex(1), direction=Direction.FORWARD, shape=(1,), payload=bytes(2))


NO_HOSTS = ["[bad", "x:99999999", "a..b", ".", "a" * 64 + ".com", "a" * 300, "xn--a"]


@pytest.mark.parametrize("host", NO_HOSTS)
async def test_a_url_whose_host_is_none_costs_its_author_and_no_process(host: str) -> None:
    """The orchestrator's grants and the owner's record name URLs; what they name may be nothing that can be asked."""
    async with open_session() as session:
        blobs = HttpBlobs(session)
        with pytest.raises((ProtocolViolation, TransientFailure)):
            await blobs.get(f"http://{host}/v1/blobs/x", limit_bytes=1)
        with pytest.raises((Refused, TransientFailure)):
            await blobs.put(f"http://{host}/v1/blobs/x", b"1")
        control = HttpControl(session, f"http://{host}", signer=OWNER, orchestrator=OWNER.hotkey, clock=CLOCK)
        with pytest.raises((ProtocolViolation, TransientFailure)):
            await control.call(wire.Enlist(), timeout_s=0.05)


@pytest.mark.parametrize("host", ["a..b", ".", "a" * 64 + ".com", "a" * 200, "xn--a", ":::::", "[bad"])
async def test_a_miner_that_announces_no_host_keeps_no_neighbour_from_its_work(host: str) -> None:
    async with open_session() as session:
        peers = HttpPeers(OWNER, session=session, clock=CLOCK, expect=lambda header: None)
        with pytest.raises((Refused, TransientFailure)):
            await peers.send(Hotkey("5E"), Endpoint(host=host, port=9), a_frame())


@contextlib.asynccontextmanager
async def answering(head: bytes, body: bytes = b"") -> AsyncIterator[str]:
    """A server that reads a request's head and says only this; its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head + b"Connection: close\r\n\r\n" + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


ODD_ANSWERS = {
    "nothing": (b"", b""),
    "no HTTP": (b"220 mail.example ESMTP\r\n", b""),
    "a long refusal": (b"HTTP/1.1 503 Busy\r\nContent-Length: 200000\r\n", bytes(200_000)),
    "an endless refusal": (b"HTTP/1.1 409 No\r\n", bytes(1 << 20)),
    "a refusal that is no text": (b"HTTP/1.1 403 No\r\nContent-Length: 4\r\n", b"\xff\xfe{}"),
    "somewhere else": (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n", b""),
    "less than announced": (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n", b"1"),
    "more than asked for": (b"HTTP/1.1 206 Partial\r\nContent-Length: 99\r\n", bytes(99)),
    "all of it": (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n", bytes(99)),
    "headers without end": (b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 100_000, b""),
    "a status that is none": (b"HTTP/1.1 999999 OK\r\n", b""),
    "chunks that are none": (b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n", b"zz\r\n1"),
}


@pytest.mark.parametrize(("head", "body"), ODD_ANSWERS.values(), ids=ODD_ANSWERS)
async def test_what_a_store_or_a_miner_answers_never_ends_who_asked(head: bytes, body: bytes) -> None:
    """Each ends in what the port names (ports.Blobs, ports.Peers): a long page of a proxy was a protocol violation once."""
    async with answering(head, body) as host, open_session() as session:
        blobs = HttpBlobs(session)
        with pytest.raises((NotFound, TransientFailure, ProtocolViolation)):
            await blobs.get(f"http://{host}/x", start=3, size_bytes=9, limit_bytes=9)
        if not head.startswith(b"HTTP/1.1 200 OK\r\nContent-Length: 99"):
            with pytest.raises((Refused, TransientFailure)):
                await blobs.put(f"http://{host}/x", b"1")
        with pytest.raises((Refused, TransientFailure)):
            address, _, port = host.rpartition(":")
            peers = HttpPeers(OWNER, session=session, clock=CLOCK, expect=lambda header: None)
            await peers.send(Hotkey("5E"), Endpoint(host=address, port=int(port)), a_frame())


async def test_one_address_cannot_take_every_connection() -> None:
    listener = Listener(ListenLimits(max_connections_per_address=3))
    mount_status(listener, health=lambda: {})
    await listener.start("127.0.0.1", 0)
    held = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3)]
    async with asyncio.timeout(30):
        while listener.num_connections < 3:
            await CLOCK.sleep(0)
    assert await say(listener.port, request(b"GET /health")) == b""  # turned away at once
    elsewhere, writer = await asyncio.open_connection("127.0.0.1", listener.port, local_addr=("127.0.0.2", 0))
    writer.write(request(b"GET /health"))
    assert (await elsewhere.readline()).split()[1] == b"200"
    for _, mine in (*held, (elsewhere, writer)):
        mine.close()
    async with asyncio.timeout(30):
        while listener.num_connections:
            await CLOCK.sleep(0)
    assert (await say(listener.port, request(b"GET /health"))).split()[1] == b"200"
    await listener.stop()


async def test_connections_leave_half_of_what_a_process_may_open() -> None:
    """Strangers who hold connections must not keep it from its files, its chain and its peers."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    listener = Listener()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        await listener.start("127.0.0.1", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)  # this test holds both ends
    held = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(128)]
    async with asyncio.timeout(30):
        while listener.num_connections < len(held):
            await CLOCK.sleep(0)
    assert await say(listener.port, request(b"GET /health")) == b""
    for _, writer in held:
        writer.close()
    await listener.stop()

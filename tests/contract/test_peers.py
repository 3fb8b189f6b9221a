"""Contract of Peers over real sockets: delivery, repetition, refusal, and frames bent by strangers."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet import frames, wire
from subnet.adapters.auth import KeypairSigner, RequestSigner
from subnet.adapters.http_client import open_session
from subnet.adapters.peers import HttpPeers, PeerLimits
from subnet.adapters.system import SystemClock
from subnet.errors import Backpressure, ProtocolViolation, Refused, TransientFailure
from subnet.types import Direction, Endpoint, Epoch, FrameHeader, Hotkey, Lease, SampleId, StageIndex

ALICE, BOB, EVE = (KeypairSigner.from_uri(uri) for uri in ("//Alice", "//Bob", "//Eve"))
CLOCK = SystemClock()
SHAPE = (2, 8, 4)


def lease(sample: int = 1, hops: tuple[Hotkey, ...] = (ALICE.hotkey, BOB.hotkey)) -> Lease:
    return Lease(
        run_id="run",
        epoch=Epoch(0),
        sample=SampleId(sample),
        branch=0,
        attempt=0,
        hops=hops,
        deadline_s=1e12,
        signature="00",
    )


def frame(sample: int = 1, *, shape: tuple[int, ...] = SHAPE, fill: bytes = b"\1\2") -> frames.Frame:
    size = shape[0] * shape[1] * shape[2]
    return frames.make(
        lease(sample), stage=StageIndex(1), direction=Direction.FORWARD, shape=shape, payload=fill * size
    )


def expect(header: FrameHeader) -> None:
    if header.shape[1:] != SHAPE[1:]:
        raise ProtocolViolation(f"shape {header.shape}, expected {SHAPE}")


@dataclass
class Pair:
    """Alice sends, Bob receives."""

    alice: HttpPeers
    bob: HttpPeers
    session: aiohttp.ClientSession
    taken: list[tuple[Hotkey, frames.Frame]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(host="127.0.0.1", port=self.bob.port)

    async def handle(self, sender: Hotkey, received: frames.Frame) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append((sender, received))


@contextlib.asynccontextmanager
async def connected(limits: PeerLimits | None = None, *, is_ready: bool = True) -> AsyncIterator[Pair]:
    async with open_session() as session:
        alice, bob = (
            HttpPeers(signer, session=session, clock=CLOCK, expect=expect, limits=limits) for signer in (ALICE, BOB)
        )
        pair = Pair(alice=alice, bob=bob, session=session)
        if is_ready:
            bob.on_frame(pair.handle)
        await bob.start("127.0.0.1", 0)
        try:
            yield pair
        finally:
            await bob.stop()


async def test_a_frame_arrives_whole_from_a_verified_sender_and_is_counted() -> None:
    async with connected() as pair:
        sent = frame(shape=(4096, 8, 4))
        await pair.alice.send(BOB.hotkey, pair.endpoint, sent)
        assert pair.taken == [(ALICE.hotkey, sent)]
        ours, theirs = pair.alice.counters, pair.bob.counters
        assert ours.payload_bytes_sent == theirs.payload_bytes_received == len(sent.payload)
        assert ours.head_bytes_sent == theirs.head_bytes_received == len(frames.encode_head(sent.header))
        assert (ours.frames_sent, theirs.frames_received) == (1, 1)


async def test_a_gradient_comes_from_the_next_stage() -> None:
    async with connected() as pair:
        upstream = frames.make(
            lease(hops=(BOB.hotkey, ALICE.hotkey)),
            stage=StageIndex(0),
            direction=Direction.BACKWARD,
            shape=SHAPE,
            payload=bytes(256),
        )
        await pair.alice.send(BOB.hotkey, pair.endpoint, upstream)
        assert pair.taken == [(ALICE.hotkey, upstream)]


async def test_a_repeated_frame_is_taken_once() -> None:
    async with connected() as pair:
        for _ in range(3):
            await pair.alice.send(BOB.hotkey, pair.endpoint, frame())
        assert len(pair.taken) == 1
        assert pair.bob.counters.frames_repeated == 2


async def test_a_frame_that_was_not_taken_may_come_again() -> None:
    async with connected() as pair:
        pair.errors = [Backpressure("full"), Refused("late", "the lease is over"), ProtocolViolation("odd")]
        for expected in (Backpressure, Refused, Refused):
            with pytest.raises(expected):
                await pair.alice.send(BOB.hotkey, pair.endpoint, frame())
        await pair.alice.send(BOB.hotkey, pair.endpoint, frame())
        assert len(pair.taken) == 1


async def test_two_deliveries_at_once_call_the_handler_once() -> None:
    async with connected(is_ready=False) as pair:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def handle(sender: Hotkey, received: frames.Frame) -> None:
            entered.set()
            await leave.wait()
            await pair.handle(sender, received)

        pair.bob.on_frame(handle)
        first = asyncio.create_task(pair.alice.send(BOB.hotkey, pair.endpoint, frame()))
        await entered.wait()
        with pytest.raises(Backpressure):
            await pair.alice.send(BOB.hotkey, pair.endpoint, frame())
        leave.set()
        await first
        assert len(pair.taken) == 1


async def test_a_receiver_that_is_not_ready_pushes_back() -> None:
    async with connected(is_ready=False) as pair:
        with pytest.raises(Backpressure):
            await pair.alice.send(BOB.hotkey, pair.endpoint, frame())
    async with connected(PeerLimits(max_buffered_bytes=100)) as pair:
        with pytest.raises(Backpressure):
            await pair.alice.send(BOB.hotkey, pair.endpoint, frame())
    async with connected(PeerLimits(handler_s=0.05), is_ready=False) as pair:
        pair.bob.on_frame(lambda sender, received: CLOCK.sleep(60))
        with pytest.raises(Backpressure):
            await pair.alice.send(BOB.hotkey, pair.endpoint, frame())


async def test_a_receiver_that_is_gone_is_transient() -> None:
    async with connected() as pair:
        await pair.alice.send(BOB.hotkey, pair.endpoint, frame())
        endpoint = pair.endpoint
        await pair.bob.stop()
        with pytest.raises(TransientFailure, match=str(endpoint.port)):
            await pair.alice.send(BOB.hotkey, endpoint, frame(2))


async def test_memory_of_taken_frames_is_bounded() -> None:
    async with connected(PeerLimits(max_remembered=3)) as pair:
        for sample in range(10):
            await pair.alice.send(BOB.hotkey, pair.endpoint, frame(sample))
        assert len(pair.bob._taken) == 3


@pytest.mark.parametrize(
    ("host", "port"), [("evil/path?x=", 80), ("a@b", 80), ("", 80), ("127.0.0.1", 0), ("127.0.0.1", 70000)]
)
async def test_an_announced_endpoint_that_is_no_address_is_refused(host: str, port: int) -> None:
    async with connected() as pair:
        with pytest.raises(Refused, match="is no address"):
            await pair.alice.send(BOB.hotkey, Endpoint(host=host, port=port), frame())


async def test_a_frame_for_somebody_else_or_from_somebody_else_is_refused() -> None:
    async with connected() as pair:
        eve = HttpPeers(EVE, session=pair.session, clock=CLOCK, expect=expect)
        with pytest.raises(Refused) as refused:
            await eve.send(BOB.hotkey, pair.endpoint, frame())
        assert refused.value.code == "not_my_neighbour"
        elsewhere = frames.make(
            lease(hops=(ALICE.hotkey, EVE.hotkey)),
            stage=StageIndex(1),
            direction=Direction.FORWARD,
            shape=SHAPE,
            payload=bytes(256),
        )
        with pytest.raises(Refused) as refused:
            await pair.alice.send(BOB.hotkey, pair.endpoint, elsewhere)
        assert refused.value.code == "not_my_pass"
        with pytest.raises(Refused) as refused:
            await pair.alice.send(EVE.hotkey, pair.endpoint, frame())
        assert refused.value.code == "wrong_receiver"
        with pytest.raises(Refused, match="shape"):
            await pair.alice.send(BOB.hotkey, pair.endpoint, frame(shape=(2, 2, 4)))
        assert not pair.taken


async def _post(pair: Pair, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    url = f"http://127.0.0.1:{pair.bob.port}{path}"
    async with pair.session.post(url, data=io.BytesIO(body), headers=headers) as response:
        data = await response.read()
        return response.status, wire.decode(wire.ErrorBody, data).reason if data else ""


def _path(sent: frames.Frame, head: bytes | None = None) -> str:
    return f"/v1/frames/{sent.pass_id}/{frames.digest(head or frames.encode_head(sent.header))}"


async def test_bytes_that_do_not_fit_what_was_signed_are_refused() -> None:
    async with connected(PeerLimits(max_payload_bytes=4096)) as pair:
        sent = frame()
        head, payload = frames.encode_head(sent.header), sent.payload
        nan = bytes([payload[0] ^ 1]) + payload[1:]
        other_head = frames.encode_head(frame(2).header)
        header = msgspec.structs.replace(sent.header, dtype="int8")
        bad_type = frames.encode_head(header)
        sideways = frames.encode_head(msgspec.structs.replace(sent.header, direction=Direction.STEP))
        cases = [
            (_path(sent), head + nan, "digest"),
            (_path(sent), head + payload + b"0", "not the frame"),
            (_path(sent), head + payload[:-1], "not the frame"),
            (_path(sent), head[:5], "cut off"),
            (_path(sent), other_head + payload, "not the one that was signed"),
            (_path(sent, other_head), other_head + payload, "another pass"),
            (_path(sent, bad_type), bad_type + payload, "dtype"),
            (_path(sent, sideways), sideways + payload, "forward or backward"),
            (_path(sent), b"PICK" + head[4:] + payload, "not a Strata frame"),
            (_path(sent), b"", "announces its length"),
            (_path(sent), head + bytes(40_000), "announces its length"),
            ("/v1/frames/../../etc/passwd", head, "no route"),
            ("/v1/frames/x/y", head, "frames are sent by"),
        ]
        for path, body, reason in cases:
            headers = RequestSigner(ALICE, CLOCK).headers("POST", path, receiver=BOB.hotkey)
            status, said = await _post(pair, path, body, headers)
            assert status in (400, 404), (path, said)
            assert reason in said, (path, said)
        assert not pair.taken
        assert pair.bob._buffered_bytes == 0
        await pair.alice.send(BOB.hotkey, pair.endpoint, sent)


async def test_unsigned_replayed_and_bent_frames_are_refused() -> None:
    async with connected() as pair:
        sent = frame()
        path, body = _path(sent), frames.encode(sent)
        headers = RequestSigner(ALICE, CLOCK).headers("POST", path, receiver=BOB.hotkey)
        assert (await _post(pair, path, body, {}))[0] == 401
        assert (await _post(pair, _path(frame(2)), body, headers))[0] == 401
        assert (await _post(pair, path, body, headers))[0] == 204
        status, said = await _post(pair, path, body, headers)
        assert (status, "already accepted" in said) == (401, True)
        assert len(pair.taken) == 1


async def _announce(pair: Pair, signer: KeypairSigner, sent: frames.Frame) -> asyncio.StreamWriter:
    """The headers of a signed frame, and none of its bytes."""
    headers = RequestSigner(signer, CLOCK).headers("POST", _path(sent), receiver=BOB.hotkey)
    lines = [f"POST {_path(sent)} HTTP/1.1", "Host: x", f"Content-Length: {len(frames.encode(sent))}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    _, writer = await asyncio.open_connection("127.0.0.1", pair.bob.port)
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    await writer.drain()
    return writer


async def test_announced_frames_of_a_stranger_keep_nobody_out() -> None:
    """A key costs nothing: what it merely announces takes up no room."""
    size_bytes = len(frames.encode(frame()))
    async with connected(PeerLimits(max_buffered_bytes=2 * size_bytes)) as pair:
        writers = [await _announce(pair, EVE, frame(sample)) for sample in range(10)]
        async with asyncio.timeout(20):
            while pair.bob.listener.num_connections < len(writers):
                await CLOCK.sleep(0)
        await pair.alice.send(BOB.hotkey, pair.endpoint, frame())
        assert len(pair.taken) == 1
        for writer in writers:
            writer.close()


async def test_a_cut_connection_leaves_nothing_behind() -> None:
    async with connected() as pair:
        sent = frame()
        path = _path(sent)
        headers = RequestSigner(ALICE, CLOCK).headers("POST", path, receiver=BOB.hotkey)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(frames.encode(sent))}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", pair.bob.port)
        writer.write(head.encode() + frames.encode(sent)[:-10])
        await writer.drain()
        async with asyncio.timeout(5):
            while not pair.bob._buffered_bytes:
                await CLOCK.sleep(0)
            writer.close()
            await writer.wait_closed()
            while pair.bob._buffered_bytes:
                await CLOCK.sleep(0)
        assert not pair.taken
        await pair.alice.send(BOB.hotkey, pair.endpoint, sent)


async def test_a_frame_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subnet.adapters.peers.transfer_limit_s", lambda size_bytes: 0.3)
    async with connected() as pair:
        sent = frame()
        headers = RequestSigner(ALICE, CLOCK).headers("POST", _path(sent), receiver=BOB.hotkey)
        head = f"POST {_path(sent)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(frames.encode(sent))}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.bob.port)
        writer.write(head.encode() + frames.encode(sent)[:-10])
        async with asyncio.timeout(5):
            assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert pair.bob._buffered_bytes == 0


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 2000), flip=st.integers(1, 255), cut=st.integers(0, 40))
def test_no_bent_byte_of_a_frame_is_taken(at: int, flip: int, cut: int) -> None:
    async def run() -> None:
        async with connected() as pair:
            sent = frame()
            body = bytearray(frames.encode(sent))
            body[at % len(body)] ^= flip
            headers = RequestSigner(ALICE, CLOCK).headers("POST", _path(sent), receiver=BOB.hotkey)
            status, _ = await _post(pair, _path(sent), bytes(body[: len(body) - cut]), headers)
            assert status == 400
            assert not pair.taken

    asyncio.run(run())

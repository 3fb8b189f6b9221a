"""Control requests over real sockets: answers, errors, retries, and what strangers may try."""

import asyncio
import contextlib
import errno
import io
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
import yarl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subnet import wire
from subnet.adapters import routes
from subnet.adapters.auth import MAX_AHEAD_S, KeypairSigner, RequestSigner
from subnet.adapters.blobs import HttpBlobs
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.http_server import mount_control, mount_public, mount_status
from subnet.adapters.listener import Listener, ListenLimits
from subnet.adapters.system import SystemClock
from subnet.errors import Backpressure, InvariantBroken, NotFound, ProtocolViolation, Refused, TransientFailure
from subnet.types import Epoch, Hotkey

OWNER = KeypairSigner.from_uri("//Owner")
MINER = KeypairSigner.from_uri("//Miner")
CLOCK = SystemClock()


class Orchestrator:
    """Answers with what the test put in; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Hotkey, wire.Envelope]] = []
        self.errors: list[Exception] = []
        self.news = asyncio.Event()

    async def handle(self, hotkey: Hotkey, envelope: wire.Envelope) -> wire.Response:
        self.asked.append((hotkey, envelope))
        if self.errors:
            raise self.errors.pop(0)
        if isinstance(envelope.request, wire.Poll):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(envelope.request.wait_s):
                    await self.news.wait()
        return wire.Done()

    async def read(self, name: str) -> bytes | None:
        return {"run.json": b"{}", "segments/0": b"\0\1"}.get(name)


async def get(session: aiohttp.ClientSession, url: str, *, limit_bytes: int) -> bytes:
    return await HttpBlobs(session).get(url, limit_bytes=limit_bytes)


@contextlib.asynccontextmanager
async def serving(
    limits: ListenLimits | None = None, *, taken_over_s: float = 0.0
) -> AsyncIterator[tuple[Orchestrator, Listener, str]]:
    orchestrator, listener = Orchestrator(), Listener(limits)
    mount_control(listener, orchestrator.handle, receiver=OWNER.hotkey, clock=CLOCK, taken_over_s=taken_over_s)
    mount_public(listener, orchestrator.read)
    mount_status(listener, health=lambda: {"role": "orchestrator"}, metrics=lambda: b"strata_up 1\n")
    await listener.start("127.0.0.1", 0)
    try:
        yield orchestrator, listener, f"http://127.0.0.1:{listener.port}"
    finally:
        await listener.stop()


@contextlib.asynccontextmanager
async def calling(
    limits: ListenLimits | None = None, *, signer: KeypairSigner = MINER
) -> AsyncIterator[tuple[Orchestrator, HttpControl]]:
    async with serving(limits) as (orchestrator, _, url), open_session() as session:
        yield orchestrator, HttpControl(session, url, signer=signer, orchestrator=OWNER.hotkey, clock=CLOCK)


@pytest.mark.parametrize("signer", [MINER, KeypairSigner.from_uri("//Miner", deterministic=True)])
async def test_a_request_arrives_with_its_verified_hotkey(signer: KeypairSigner) -> None:
    async with calling(signer=signer) as (orchestrator, control):
        assert await control.call(wire.UploadDone(epoch=Epoch(3))) == wire.Done()
        [(hotkey, envelope)] = orchestrator.asked
        assert (hotkey, envelope.request) == (signer.hotkey, wire.UploadDone(epoch=Epoch(3)))


async def test_long_polls_wait_while_other_requests_pass() -> None:
    async with calling() as (orchestrator, control):
        poll = asyncio.create_task(control.call(wire.Poll(known_version=0, wait_s=20.0)))
        await control.call(wire.UploadDone(epoch=Epoch(0)))
        assert not poll.done()
        orchestrator.news.set()
        assert await poll == wire.Done()


async def test_stopping_does_not_wait_for_long_polls() -> None:
    async with serving() as (orchestrator, listener, url), open_session() as session:
        control = HttpControl(session, url, signer=MINER, orchestrator=OWNER.hotkey, clock=CLOCK)
        poll = asyncio.create_task(control.call(wire.Poll(known_version=0, wait_s=60.0), timeout_s=3.0))
        async with asyncio.timeout(30):
            while not orchestrator.asked:
                await CLOCK.sleep(0.001)
        async with asyncio.timeout(30):
            await listener.stop()
        with pytest.raises(TransientFailure):
            await poll


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (Refused("phase_over", "too late"), Refused),
        (Refused("banned", "register first"), Refused),
        (ProtocolViolation("nonsense"), ProtocolViolation),
        (NotFound("no epoch 7"), Refused),
    ],
)
async def test_a_refusal_reaches_the_caller_at_once_with_code_and_reason(
    raised: Exception, expected: type[Exception]
) -> None:
    async with calling() as (orchestrator, control):
        orchestrator.errors = [raised]
        with pytest.raises(expected, match=str(raised)) as error:
            await control.call(wire.UploadDone(epoch=Epoch(0)))
        assert len(orchestrator.asked) == 1
        if isinstance(raised, Refused) and isinstance(error.value, Refused):
            assert error.value.code == raised.code


async def test_a_transient_failure_is_retried_with_the_same_request_id() -> None:
    async with calling() as (orchestrator, control):
        orchestrator.errors = [TransientFailure("store is away"), Backpressure("busy")]
        assert await control.call(wire.UploadDone(epoch=Epoch(0))) == wire.Done()
        ids = [envelope.request_id for _, envelope in orchestrator.asked]
        assert len(ids) == 3
        assert len(set(ids)) == 1


async def test_no_answer_in_time_is_transient() -> None:
    async with calling() as (orchestrator, control):
        orchestrator.errors = [TransientFailure("store is away")] * 50
        with pytest.raises(TransientFailure, match="store is away"):
            await control.call(wire.UploadDone(epoch=Epoch(0)), timeout_s=3.0)
        orchestrator.errors = []
        with pytest.raises(TransientFailure, match="timed out"):
            await control.call(wire.Poll(known_version=0, wait_s=5.0), timeout_s=0.3)


async def test_a_dead_orchestrator_is_transient_and_says_where() -> None:
    async with serving() as (_, _, url):
        pass
    async with open_session() as session:
        control = HttpControl(session, url, signer=MINER, orchestrator=OWNER.hotkey, clock=CLOCK)
        with pytest.raises(TransientFailure, match=url):
            await control.call(wire.UploadDone(epoch=Epoch(0)), timeout_s=3.0)


async def test_signing_for_another_receiver_is_refused() -> None:
    async with serving() as (orchestrator, _, url), open_session() as session:
        control = HttpControl(session, url, signer=MINER, orchestrator=MINER.hotkey, clock=CLOCK)
        with pytest.raises(Refused) as refused:
            await control.call(wire.UploadDone(epoch=Epoch(0)))
        assert refused.value.code == "wrong_receiver"
        assert not orchestrator.asked


async def test_the_port_that_is_taken_is_named() -> None:
    async with serving() as (_, listener, _):
        with pytest.raises(OSError, match=f"port {listener.port} on 127.0.0.1 is already in use") as error:
            await Listener().start("127.0.0.1", listener.port)
        assert error.value.errno == errno.EADDRINUSE


async def test_what_no_handler_may_raise_reaches_the_owner_of_the_listener() -> None:
    async with serving() as (orchestrator, listener, url), open_session() as session:
        orchestrator.errors = [InvariantBroken("two leases for one sample")] * 50
        control = HttpControl(session, url, signer=MINER, orchestrator=OWNER.hotkey, clock=CLOCK)
        with pytest.raises(TransientFailure):
            await control.call(wire.UploadDone(epoch=Epoch(0)), timeout_s=3.0)
        with pytest.raises(InvariantBroken, match="two leases"):
            await listener.wait_failed()


async def test_public_routes_need_no_key() -> None:
    async with serving() as (_, _, url), open_session() as session:
        assert await get(session, url + "/v1/public/segments/0", limit_bytes=10) == b"\0\1"
        health = msgspec.json.decode(await get(session, url + "/health", limit_bytes=1000))
        assert health == {"status": "ok", "protocol_version": wire.PROTOCOL_VERSION, "role": "orchestrator"}
        assert await get(session, url + "/metrics", limit_bytes=1000) == b"strata_up 1\n"
        with pytest.raises(ProtocolViolation, match="limit 1"):
            await get(session, url + "/v1/public/segments/0", limit_bytes=1)
        for name in ("nothing", "../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "", "a%00b"):
            with pytest.raises(NotFound):
                await get(session, url + "/v1/public/" + name, limit_bytes=1000)


# ---- strangers -----------------------------------------------------------------------------------------------------

Answer = tuple[int, wire.ErrorBody]
_BODY = wire.encode(wire.Envelope(request_id="1", request=wire.UploadDone(epoch=Epoch(0))))
_PATH = "/v1/control/UploadDone"


async def _post(url: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    async with open_session() as session, session.post(url + path, data=io.BytesIO(body), headers=headers) as response:
        return response.status, wire.decode(wire.ErrorBody, await response.read())


def _signed(path: str, body: bytes) -> dict[str, str]:
    headers = RequestSigner(MINER, CLOCK).headers("POST", path, receiver=OWNER.hotkey, body=body)
    return headers | {routes.PROTOCOL_HEADER: str(wire.PROTOCOL_VERSION)}


async def test_bad_requests_get_a_typed_answer() -> None:
    async with serving() as (orchestrator, _, url):
        good = _signed(_PATH, _BODY)
        assert await _post(url, "/nowhere", b"", {}) == (404, await _reason(url, "/nowhere"))
        cases = [
            (_PATH, b"x" * ((1 << 20) + 1), good, 400, "protocol_violation"),
            (_PATH, _BODY + b" ", good, 401, "bad_signature"),
            (_PATH, _BODY, {**good, routes.PROTOCOL_HEADER: "2"}, 409, "protocol_version"),
            (_PATH, _BODY, {**good, routes.PROTOCOL_HEADER: "²"}, 400, "protocol_violation"),
            (_PATH, _BODY, {}, 400, "protocol_violation"),
            (_PATH, _BODY, {routes.PROTOCOL_HEADER: "1"}, 401, "malformed_auth"),
            ("/v1/control/Nothing", _BODY, good, 404, "not_found"),
            ("/v1/control/Ready", _BODY, _signed("/v1/control/Ready", _BODY), 400, "protocol_violation"),
            (_PATH, b"{}", _signed(_PATH, b"{}"), 400, "protocol_violation"),
            (_PATH, b"[" * 100_000, _signed(_PATH, b"[" * 100_000), 400, "protocol_violation"),
        ]
        for path, body, headers, status, code in cases:
            answer = await _post(url, path, body, headers)
            assert (answer[0], answer[1].code) == (status, code), (path, body[:40], answer)
        assert not orchestrator.asked


async def _reason(url: str, path: str) -> wire.ErrorBody:
    return (await _post(url, path, b"", {}))[1]


async def test_right_after_a_takeover_a_request_is_signed_anew_until_it_is_taken() -> None:
    taken_over_s = CLOCK.now() - MAX_AHEAD_S + 0.2
    async with serving(taken_over_s=taken_over_s) as (orchestrator, _, url), open_session() as session:
        status, error = await _post(url, _PATH, _BODY, _signed(_PATH, _BODY))
        assert (status, error.code) == (401, "stale_request")
        control = HttpControl(session, url, signer=MINER, orchestrator=OWNER.hotkey, clock=CLOCK)
        assert await control.call(wire.UploadDone(epoch=Epoch(0))) == wire.Done()
        assert len(orchestrator.asked) == 1


async def test_a_request_sent_twice_byte_for_byte_is_a_replay() -> None:
    async with serving() as (orchestrator, _, url), open_session() as session:
        headers = _signed(_PATH, _BODY)
        async with session.post(url + _PATH, data=_BODY, headers=headers) as response:
            assert response.status == 200
        status, error = await _post(url, _PATH, _BODY, headers)
        assert (status, error.code) == (401, "replayed_request")
        assert len(orchestrator.asked) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.text(max_size=60), body=st.binary(max_size=300), signed=st.booleans())
def test_no_bytes_bring_the_server_down(path: str, body: bytes, signed: bool) -> None:
    async def run() -> None:
        async with serving() as (orchestrator, _, url), open_session() as session:
            target = yarl.URL(url + "/v1/control/UploadDone").joinpath(path.replace("/", "_") or "x")
            headers = _signed(target.raw_path_qs, body) if signed else {}
            async with session.post(target, data=body, headers=headers) as response:
                assert 400 <= response.status < 500
            async with session.post(url + _PATH, data=_BODY, headers=_signed(_PATH, _BODY)) as response:
                assert response.status == 200
            assert len(orchestrator.asked) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/control/UploadDone HTTP/1.1\r\nHost: x\r\nX-Slow: "],
    ids=["silent", "slow header"],
)
@pytest.mark.parametrize("is_second", [False, True])
async def test_late_headers_close_the_connection(sent: bytes, is_second: bool) -> None:
    async with serving(ListenLimits(header_s=2.0, idle_s=4.0)) as (_, listener, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        if is_second:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"strata_up 1\n")
        writer.write(sent)
        async with asyncio.timeout(30):
            while await reader.read(4096):
                pass
        writer.close()
        await writer.wait_closed()


async def test_an_idle_connection_may_stay_longer_than_headers_may_take() -> None:
    # A loop that freezes between an accept and the first read spends the sender's time too: seconds, not tenths.
    header_s = 3.0
    async with serving(ListenLimits(header_s=header_s)) as (_, listener, url), open_session() as session:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        control = HttpControl(session, url, signer=MINER, orchestrator=OWNER.hotkey, clock=CLOCK)
        for idle_s in (header_s + 0.3, 0.0):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"strata_up 1\n")
            await control.call(wire.Poll(known_version=0, wait_s=idle_s))
        writer.close()
        await writer.wait_closed()


async def test_a_slow_or_cut_body_is_answered_or_dropped_never_kept() -> None:
    async with serving(ListenLimits(body_s=0.2)) as (orchestrator, listener, _):
        head = f"POST {_PATH} HTTP/1.1\r\nHost: x\r\nX-Strata-Protocol: 1\r\nContent-Length: 50\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(head + b"{")
        async with asyncio.timeout(30):
            answer = await reader.read(4096)
        assert b" 400 " in answer.split(b"\r\n")[0]
        assert b"did not arrive within" in answer
        writer.close()
        await writer.wait_closed()
        assert not orchestrator.asked


async def test_connections_over_the_cap_are_closed() -> None:
    async with serving(ListenLimits(max_connections=3)) as (_, listener, _):
        opened = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(4)]
        async with asyncio.timeout(30):
            assert await opened[3][0].read(1) == b""
        opened[0][1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(30):
            assert (await opened[0][0].readline()).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()


async def test_a_hotkey_sends_no_more_than_honest_work_can_make_of_it() -> None:
    """What is refused is journaled as well, and the journal lies in memory."""
    long = wire.RequestDownload(keys=("x" * 900_000,))
    limits = ListenLimits(bytes_per_s_per_hotkey=1.0)
    async with serving(limits) as (orchestrator, _, url), open_session() as session:
        control = HttpControl(session, url, signer=MINER, orchestrator=OWNER.hotkey, clock=CLOCK)
        await control.call(long)
        with pytest.raises(Backpressure, match="too long"):
            await control.call(long, timeout_s=0.5)
        await control.call(wire.UploadDone(epoch=Epoch(0)))
        assert len(orchestrator.asked) == 2


async def test_rates_are_limited_by_hotkey_and_by_address() -> None:
    limits = ListenLimits(requests_per_s_per_hotkey=0.01, burst_s=200.0)
    async with serving(limits) as (_, _, url), open_session() as session:
        impatient, patient = (
            HttpControl(session, url, signer=signer, orchestrator=OWNER.hotkey, clock=CLOCK)
            for signer in (MINER, OWNER)
        )
        for _ in range(2):
            await impatient.call(wire.UploadDone(epoch=Epoch(0)))
        with pytest.raises(Backpressure, match="hotkey"):
            await impatient.call(wire.UploadDone(epoch=Epoch(0)), timeout_s=3.0)
        await patient.call(wire.UploadDone(epoch=Epoch(0)))
    async with (
        serving(ListenLimits(requests_per_s_per_address=0.01, burst_s=200.0)) as (_, _, url),
        open_session() as session,
    ):
        for _ in range(2):
            await get(session, url + "/health", limit_bytes=1000)
        with pytest.raises(TransientFailure, match="address"):
            await get(session, url + "/health", limit_bytes=1000)

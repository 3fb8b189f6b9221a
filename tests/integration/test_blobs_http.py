"""The directory store's routes under hostile requests: everything a granted URL must not be good for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yarl
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.adapters.blobs import DirectoryBlobStore, HttpBlobs
from subnet.adapters.grants import check_grant
from subnet.adapters.http_client import open_session
from subnet.adapters.listener import Listener
from subnet.adapters.system import SystemClock
from subnet.errors import ProtocolViolation, Refused, TransientFailure
from subnet.frames import digest
from subnet.types import BlobRef

CLOCK = SystemClock()
DATA = b"shard" * 1000
REF = BlobRef(key="run/0/shard/x", digest=digest(DATA), size_bytes=len(DATA))


@contextlib.asynccontextmanager
async def serving(root: Path) -> AsyncIterator[tuple[DirectoryBlobStore, aiohttp.ClientSession, Listener]]:
    listener = Listener()
    await listener.start("127.0.0.1", 0)
    store = DirectoryBlobStore(root, f"http://127.0.0.1:{listener.port}/v1/blobs", secret=b"s" * 32, clock=CLOCK)
    store.mount_on(listener)
    async with open_session() as session:
        yield store, session, listener
    await listener.stop()


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


async def test_an_upload_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (store, session, listener):
        url = yarl.URL(store.upload_url(REF, expires_at_s=CLOCK.now() + 60), encoded=True)
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        head = f"PUT {url.raw_path_qs} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(DATA)}\r\n\r\n"
        writer.write(head.encode() + DATA[:-1])
        await writer.drain()
        async with asyncio.timeout(5):
            while not files(tmp_path):
                await CLOCK.sleep(0.001)
            writer.close()
            await writer.wait_closed()
            while files(tmp_path):
                await CLOCK.sleep(0.001)
        await HttpBlobs(session).put(str(url), DATA)
        assert files(tmp_path) == [REF.key]


async def test_one_grant_does_not_fill_the_disk_with_copies(tmp_path: Path) -> None:
    async with serving(tmp_path) as (store, session, listener):
        soon = CLOCK.now() + 600
        url = yarl.URL(store.upload_url(REF, expires_at_s=soon), encoded=True)
        head = f"PUT {url.raw_path_qs} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(DATA)}\r\n\r\n"
        writers = []
        async with asyncio.timeout(60):
            for number in range(4):
                _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                writer.write(head.encode() + DATA[:-1])
                writers.append(writer)
                while len(files(tmp_path)) <= number:
                    await CLOCK.sleep(0.001)
            with pytest.raises(TransientFailure, match="is being uploaded already"):
                await HttpBlobs(session).put(str(url), DATA)
            other = BlobRef(key="run/0/shard/y", digest=digest(DATA), size_bytes=len(DATA))
            await HttpBlobs(session).put(store.upload_url(other, expires_at_s=soon), DATA)
            for writer in writers:
                writer.close()
                await writer.wait_closed()
            while files(tmp_path) != [other.key]:
                await CLOCK.sleep(0.001)
        await HttpBlobs(session).put(str(url), DATA)
        assert files(tmp_path) == [REF.key, other.key]


@pytest.mark.parametrize("length", [None, len(DATA) + 1, len(DATA) - 1])
async def test_the_length_is_checked_before_a_byte_is_read(tmp_path: Path, length: int | None) -> None:
    async with serving(tmp_path) as (store, _, listener):
        url = yarl.URL(store.upload_url(REF, expires_at_s=CLOCK.now() + 60), encoded=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        writer.write(f"PUT {url.raw_path_qs} HTTP/1.1\r\nHost: x\r\n{size}\r\n\r\n".encode())
        async with asyncio.timeout(5):
            assert b" 409 " in await reader.readline()
            assert b"wrong_size" in await reader.readuntil(b"}")
        writer.close()
        await writer.wait_closed()
        assert not files(tmp_path)


@pytest.mark.parametrize(
    ("asked", "status", "content_range", "body"),
    [
        ("bytes=-3", 206, "bytes 4997-4999/5000", b"ard"),
        ("bytes=4998-9999", 206, "bytes 4998-4999/5000", b"rd"),
        ("bytes=5000-", 416, "bytes */5000", b""),
        ("bytes=0-1,4-5", 416, "bytes */5000", b""),
        ("lines=0-1", 416, "bytes */5000", b""),
    ],
)
async def test_a_range_is_answered_as_http_says(
    tmp_path: Path, asked: str, status: int, content_range: str, body: bytes
) -> None:
    async with serving(tmp_path) as (store, session, _):
        await store.put(REF.key, DATA)
        url = yarl.URL(store.download_url(REF.key, expires_at_s=CLOCK.now() + 60), encoded=True)
        async with session.get(url, headers={"Range": asked}) as response:
            assert (response.status, response.headers["Content-Range"]) == (status, content_range)
            assert await response.read() == body


async def test_a_store_that_gives_more_than_was_asked_for_is_not_read_on(tmp_path: Path) -> None:
    async def generous(request: web.BaseRequest, rest: str) -> web.StreamResponse:
        return web.Response(status=206, body=DATA)

    async with serving(tmp_path) as (_, session, listener):
        listener.mount("/generous", generous)
        buffer = bytearray(10)
        with pytest.raises(ProtocolViolation, match="longer than 10 bytes"):
            await HttpBlobs(session).get_into(f"http://127.0.0.1:{listener.port}/generous", memoryview(buffer))
        assert buffer == bytes(10)


async def test_other_methods_and_names_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    async with serving(tmp_path / "blobs") as (store, session, _):
        await store.put(REF.key, DATA)
        url = store.download_url(REF.key, expires_at_s=CLOCK.now() + 60)
        async with session.delete(yarl.URL(url, encoded=True)) as response:
            assert response.status == 404
        for key in ("../secret", "%2e%2e/secret", "run/0/shard", "run/0/shard/../shard/x", ""):
            bent = yarl.URL(url.replace(REF.key, key), encoded=True)
            async with session.get(bent) as response:
                assert response.status in (403, 404)
        assert await store.size(REF.key) == len(DATA)


async def test_a_directory_that_cannot_be_written_is_transient(tmp_path: Path) -> None:
    async with serving(tmp_path) as (store, session, _):
        (tmp_path / "run").write_text("a file where a directory should be")
        with pytest.raises(TransientFailure):
            await store.put(REF.key, DATA)
        with pytest.raises(TransientFailure):
            await HttpBlobs(session).put(store.upload_url(REF, expires_at_s=CLOCK.now() + 60), DATA)


async def test_a_slow_reader_is_cut_off_and_the_listener_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subnet.adapters.file_ranges.transfer_limit_s", lambda size_bytes: 0.5)
    big = bytes(64 << 20)
    async with serving(tmp_path) as (store, session, listener):
        await store.put("big", big)
        url = yarl.URL(store.download_url("big", expires_at_s=CLOCK.now() + 60), encoded=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, limit=1024)
        async with asyncio.timeout(5):
            while not listener.num_connections:
                await CLOCK.sleep(0.01)
        writer.write(f"GET {url.raw_path_qs} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        size_bytes = 0
        async with asyncio.timeout(5):
            while listener.num_connections:
                await CLOCK.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                while data := await reader.read(1 << 20):
                    size_bytes += len(data)
        assert size_bytes < len(big)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await store.put("small", b"1")
        async with session.get(
            yarl.URL(store.download_url("small", expires_at_s=CLOCK.now() + 60), encoded=True)
        ) as response:
            assert await response.read() == b"1"


@given(key=st.text(max_size=40), query=st.text(max_size=120))
@settings(max_examples=200)
def test_no_forged_query_is_a_grant(key: str, query: str) -> None:
    for method in ("GET", "PUT"):
        with pytest.raises(Refused):
            check_grant(key, query, method=method, secret=b"s", now=0.0)

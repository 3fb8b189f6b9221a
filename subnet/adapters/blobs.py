"""Blob stores: a directory behind the orchestrator's own routes, and a client for granted URLs of any store.

An object's key is made by the orchestrator and an object never changes, so a repeated upload is harmless (trust.md 6).
"""

import asyncio
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import aiohttp
import blake3
from aiohttp import web

from subnet.adapters import routes
from subnet.adapters.file_ranges import give_file
from subnet.adapters.grants import Grant, check_grant, check_range, check_upload, grant_url
from subnet.adapters.http_client import NETWORK_ERRORS, Body, parse_url, read_into, read_refusal, read_response, say
from subnet.adapters.listener import Listener
from subnet.adapters.rates import transfer_limit_s
from subnet.adapters.system import check_name, publish, remove_left_overs, temporary_beside, write_atomically
from subnet.errors import Backpressure, NotFound, ProtocolViolation, Refused, TransientFailure
from subnet.ports import Clock
from subnet.types import BlobRef, Digest

_BATCH_BYTES = 1 << 20
"""An upload is handed to a thread in parts of this size: smaller ones wake threads more often."""
_UPLOADS_OF_ONE = 4
"""Uploads of one object at once: more than one when connections break, but one grant must not fill the disk with copies."""
_RETRYABLE = frozenset({408, 425, 429})


class DirectoryBlobStore:
    """Objects as files below one directory (ports.BlobStore).

    Miners reach them by signed URLs below `base_url`, which is where the routes of `mount_on` are seen from outside.
    """

    def __init__(self, root: Path, base_url: str, *, secret: bytes, clock: Clock) -> None:
        self._root = root
        self._base_url = base_url.rstrip("/")
        self._secret = secret
        self._clock = clock
        self._receiving: Counter[str] = Counter()
        root.mkdir(parents=True, exist_ok=True)
        remove_left_overs(root)

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store atomically. Raises TransientFailure."""
        try:
            await asyncio.to_thread(write_atomically, self._path(key), data)
        except OSError as error:
            raise TransientFailure(f"cannot store {key}: {error}") from error

    async def get(self, key: str, *, start: int = 0, size_bytes: int | None = None) -> bytes:
        """Read a range. Raises NotFound, TransientFailure."""
        check_range(start, size_bytes)
        try:
            return await asyncio.to_thread(_read_range, self._path(key), start, size_bytes)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(f"no object {key}, or none of its bytes from {start} on") from error
        except OSError as error:
            raise TransientFailure(f"cannot read {key}: {error}") from error

    async def size(self, key: str) -> int | None:
        """Size in bytes, or None when there is no such object."""
        path = self._path(key)
        try:
            return path.stat().st_size if path.is_file() else None
        except FileNotFoundError:  # deleted in between
            return None

    async def delete(self, key: str) -> None:
        """Remove; a key that is not there is no error. Raises TransientFailure."""
        try:
            await asyncio.to_thread(self._path(key).unlink, missing_ok=True)
        except (IsADirectoryError, NotADirectoryError):  # no object has that key
            return
        except OSError as error:
            raise TransientFailure(f"cannot delete {key}: {error}") from error

    async def delete_under(self, prefix: str) -> None:
        """Remove the folder `prefix` with all in it. Raises TransientFailure."""
        try:
            await asyncio.to_thread(shutil.rmtree, self._path(prefix))
        except FileNotFoundError:
            return
        except OSError as error:
            raise TransientFailure(f"cannot delete what lies under {prefix}: {error}") from error

    def upload_url(self, ref: BlobRef, *, expires_at_s: float) -> str:
        """URL that takes exactly these bytes until it expires."""
        return grant_url(self._base_url, self._secret, Grant.upload(ref, expires_at_s))

    def download_url(self, key: str, *, expires_at_s: float) -> str:
        """URL that gives `key`, with ranges, until it expires."""
        return grant_url(self._base_url, self._secret, Grant.download(key, expires_at_s))

    def mount_on(self, listener: Listener) -> None:
        """Offer `PUT` and `GET /v1/blobs/<key>` to whoever holds a granted URL."""
        listener.mount(routes.BLOBS, self._answer)

    def _path(self, key: str) -> Path:
        return self._root / check_name(key)

    async def _answer(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        if request.method not in ("GET", "PUT"):
            raise NotFound("objects are put and got, nothing else")
        now = self._clock.now()
        grant = check_grant(key, request.query_string, method=request.method, secret=self._secret, now=now)
        return await (self._take(request, grant) if grant.method == "PUT" else self._give(request, grant))

    async def _take(self, request: web.BaseRequest, grant: Grant) -> web.StreamResponse:
        if request.content_length != grant.size_bytes:
            raise Refused("wrong_size", f"Content-Length {request.content_length}, granted were {grant.size_bytes}")
        if self._receiving[grant.key] >= _UPLOADS_OF_ONE:
            raise Backpressure("this object is being uploaded already; try again shortly")
        path = self._path(grant.key)
        temporary = temporary_beside(path)
        self._receiving[grant.key] += 1
        try:
            await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            try:
                async with asyncio.timeout(transfer_limit_s(grant.size_bytes)):
                    size_bytes, digest = await _receive(request.content, temporary, limit_bytes=grant.size_bytes)
            except TimeoutError as error:
                raise ProtocolViolation("upload came too slowly; it needs 64 KiB/s") from error
            except web.RequestPayloadError as error:
                raise ProtocolViolation("upload is cut off") from error
            check_upload(grant, size_bytes=size_bytes, digest=digest)
            await asyncio.to_thread(publish, temporary, path)
        except ConnectionError:
            raise  # the client is gone: nobody to answer
        except OSError as error:
            raise TransientFailure(f"cannot store {grant.key}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
            self._receiving[grant.key] -= 1
            if not self._receiving[grant.key]:
                del self._receiving[grant.key]
        return web.Response(status=200)

    async def _give(self, request: web.BaseRequest, grant: Grant) -> web.StreamResponse:
        return await give_file(request, self._path(grant.key))


async def _receive(content: aiohttp.StreamReader, path: Path, *, limit_bytes: int) -> tuple[int, Digest]:
    """Stream a body into a new flushed file; its size and digest."""
    hasher, size_bytes, num_added = blake3.blake3(), 0, 0
    pieces: list[bytes] = []
    file = await asyncio.to_thread(path.open, "xb")
    try:
        async for piece, _ in content.iter_chunks():
            size_bytes += len(piece)
            if size_bytes > limit_bytes:
                raise ProtocolViolation(f"upload is longer than {limit_bytes} bytes")
            pieces.append(piece)
            if size_bytes - num_added >= _BATCH_BYTES:
                await asyncio.to_thread(_add, pieces, hasher, file)
                pieces, num_added = [], size_bytes
        await asyncio.to_thread(_add, pieces, hasher, file)
        await asyncio.to_thread(_flush, file)
    finally:
        await asyncio.to_thread(file.close)
    return size_bytes, Digest(hasher.hexdigest())


def _add(pieces: list[bytes], hasher: blake3.blake3, file: BinaryIO) -> None:
    for piece in pieces:
        hasher.update(piece)
        file.write(piece)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _read_range(path: Path, start: int, size_bytes: int | None) -> bytes:
    with path.open("rb") as file:
        if start and start >= os.fstat(file.fileno()).st_size:
            raise FileNotFoundError(path)
        file.seek(start)
        return file.read(-1 if size_bytes is None else size_bytes)


class HttpBlobs:
    """Granted URLs of any store over HTTP (ports.Blobs); one attempt for each call, at the least speed of bulk transfers."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def put(self, url: str, data: bytes) -> None:
        """Upload exactly the granted bytes. Raises Refused (grant does not fit), TransientFailure."""
        try:
            target = parse_url(url)
        except ProtocolViolation as error:
            raise Refused("bad_grant", str(error)) from error
        try:
            async with (
                asyncio.timeout(transfer_limit_s(len(data))),
                self._session.put(target, data=Body(data), allow_redirects=False) as response,
            ):
                if response.status in (200, 201, 204):
                    return
                answer = await read_refusal(response)
        except NETWORK_ERRORS as error:
            raise TransientFailure(f"upload failed: {say(error)}") from error
        raise _refusal(response.status, answer)

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        """Download a range. Raises NotFound, TransientFailure (also: URL expired), ProtocolViolation (too long)."""
        expected = limit_bytes if size_bytes is None else min(size_bytes, limit_bytes)
        async with self._download(url, start=start, size_bytes=size_bytes, expected_bytes=expected) as response:
            data = await read_response(response, limit_bytes=limit_bytes)
        if size_bytes is not None and len(data) > size_bytes:
            raise ProtocolViolation(f"the store gave {len(data)} bytes, asked for were {size_bytes}")
        return data

    async def get_into(self, url: str, buffer: memoryview, *, start: int = 0) -> int:
        """Download as much as `buffer` holds. Raises NotFound, TransientFailure (also: URL expired), ProtocolViolation (more)."""
        size_bytes = len(buffer)
        async with self._download(url, start=start, size_bytes=size_bytes, expected_bytes=size_bytes) as response:
            return await read_into(response, buffer)

    @contextlib.asynccontextmanager
    async def _download(
        self, url: str, *, start: int, size_bytes: int | None, expected_bytes: int
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer that brings a range, open until its bytes are read; within the time that `expected_bytes` may take."""
        check_range(start, size_bytes)
        headers = {}
        if start or size_bytes is not None:
            headers["Range"] = f"bytes={start}-{'' if size_bytes is None else start + size_bytes - 1}"
        try:
            async with (
                asyncio.timeout(transfer_limit_s(expected_bytes)),
                self._session.get(parse_url(url), headers=headers, allow_redirects=False) as response,
            ):
                if response.status != (206 if headers else 200):
                    raise await _unusable(response, start)
                yield response
        except NETWORK_ERRORS as error:
            raise TransientFailure(f"download failed: {say(error)}") from error


async def _unusable(response: aiohttp.ClientResponse, start: int) -> NotFound | ProtocolViolation | TransientFailure:
    """What an answer without the bytes that were asked for means."""
    if response.status == 200:
        return ProtocolViolation("the store ignores ranges")
    answer = await read_refusal(response)
    if response.status in (404, 416):
        return NotFound(f"no such object, or none of its bytes from {start} on")
    error = routes.error_of(response.status, answer)
    return TransientFailure(f"download refused with status {response.status}: {error}")


def _refusal(status: int, answer: bytes) -> Refused | TransientFailure:
    """Every definite no is Refused, whichever store said it."""
    error = routes.error_of(status, answer)
    if status >= 500 or status in _RETRYABLE:
        return TransientFailure(f"upload failed with status {status}: {error}")
    return error if isinstance(error, Refused) else Refused("upload_refused", f"{error} (status {status})")

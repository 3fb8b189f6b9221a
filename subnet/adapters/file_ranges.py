"""A range of a file as the answer to a GET, sent out of the page cache without a copy in this process.

aiohttp's own file response needs `loop.sendfile`, which uvloop has not got; it then reads pieces on a thread and copies them,
1.4 s of CPU for each GB (LOG, the merge without copies).
"""

import asyncio
import mmap
import os
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from subnet.adapters.rates import transfer_limit_s
from subnet.errors import NotFound

_PIECE_BYTES = 1 << 20
"""Written at once; other connections get their turn between two pieces."""


async def give_file(request: web.BaseRequest, path: Path) -> web.StreamResponse:
    """Answer with what the request's Range asks for, to a reader that keeps up the least speed. The file must never get shorter.

    Raises NotFound, and ConnectionResetError when the reader is too slow.
    """
    try:
        file = await asyncio.to_thread(path.open, "rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NotFound(f"no object {path.name}") from error
    with file:
        size_bytes = os.fstat(file.fileno()).st_size
        is_part = "Range" in request.headers
        try:
            start, stop, _ = request.http_range.indices(size_bytes)
        except ValueError:  # several ranges, or none of bytes
            start = stop = size_bytes
        if is_part and start >= stop:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{size_bytes}"})
        response = web.StreamResponse(
            status=206 if is_part else 200, headers={"Content-Type": "application/octet-stream"}
        )
        response.content_length = stop - start
        if is_part:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size_bytes}"
        try:
            async with asyncio.timeout(transfer_limit_s(stop - start)):
                await response.prepare(request)
                await _send(response, file, start, stop)
                await response.write_eof()
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()  # to close it would wait until the reader has taken what was written
            raise ConnectionResetError("the reader is too slow") from error
        return response


async def _send(response: web.StreamResponse, file: BinaryIO, start: int, stop: int) -> None:
    """Write [start, stop) of `file`, mapped: what waits in the connection's buffer is the page cache's memory, not ours."""
    if start == stop:
        return  # nothing cannot be mapped
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    # Nobody closes it: the connection may hold on to pieces of it for longer than we do.
    mapped = memoryview(mmap.mmap(file.fileno(), stop - first, prot=mmap.PROT_READ, offset=first))
    for at in range(start, stop, _PIECE_BYTES):
        end = min(at + _PIECE_BYTES, stop)
        await _bring_to_memory(file, at, end)
        await response.write(mapped[at - first : end - first])


async def _bring_to_memory(file: BinaryIO, start: int, stop: int) -> None:
    """Let a thread wait for the disk where a range is not in the page cache: the event loop would stand still in `write`."""
    try:
        os.preadv(file.fileno(), [bytearray(1)], stop - 1, os.RWF_NOWAIT)
    except OSError:  # not there, or the file system cannot say; a disk that fails does so here, and not in the mapping
        await asyncio.to_thread(os.pread, file.fileno(), stop - start, start)

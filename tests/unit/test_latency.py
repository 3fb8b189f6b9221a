"""The proxy that makes a hop long."""

import asyncio
import contextlib

import pytest

from subnet.sim.latency import LatencyProxy
from subnet.types import Endpoint


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
    writer.close()


async def _closed(writer: asyncio.StreamWriter, server: asyncio.Server | None = None) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    if server is not None:
        server.close()
        await server.wait_closed()


async def test_bytes_come_in_order_and_later_both_ways() -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    target = Endpoint(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    loop = asyncio.get_running_loop()
    async with LatencyProxy(target, 0.03).running() as through:
        reader, writer = await asyncio.open_connection(through.host, through.port)
        began_s = loop.time()
        sent = bytes(range(256)) * 2000
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent
        took_s = loop.time() - began_s
        assert 0.06 <= took_s < 5
        writer.write_eof()
        assert await reader.read() == b""
        await _closed(writer)
    server.close()


async def test_the_end_of_either_side_ends_the_other() -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    target = Endpoint(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    async with LatencyProxy(target, 0.0).running() as through:
        reader, writer = await asyncio.open_connection(through.host, through.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(1)
    await _closed(writer, server)
    async with LatencyProxy(target, 0.0).running() as through:
        reader, writer = await asyncio.open_connection(through.host, through.port)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        await _closed(writer)

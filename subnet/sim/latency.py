"""A TCP proxy that hands on every byte a fixed time later: a wide-area hop on one machine, with as much bandwidth as there is."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from subnet.types import Endpoint

_PIECE_BYTES = 1 << 18
_CONNECT_S = 10.0


class LatencyProxy:
    """Before one listener. `delay_s` is added each way."""

    def __init__(self, target: Endpoint, delay_s: float) -> None:
        self._target = target
        self._delay_s = delay_s
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Endpoint]:
        """Where to connect instead; on leaving, every connection through it is cut."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield Endpoint(host="127.0.0.1", port=int(server.sockets[0].getsockname()[1]))
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._join(reader, writer)
        except asyncio.CancelledError:
            pass  # the proxy is leaving; asyncio would report a connection's cancelled task as a fault
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both directions, until one side is gone."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._carry(reader, far_writer))
                    group.create_task(self._carry(far_reader, writer))
            finally:
                far_writer.transport.abort()
        except* (OSError, TimeoutError):
            pass

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: what was read is due `delay_s` later, in order. Raises ConnectionResetError at the end of the stream."""
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                at_s, piece = await due.get()
                await asyncio.sleep(at_s - loop.time())
                writer.write(piece)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            writing = group.create_task(write())
            while piece := await reader.read(_PIECE_BYTES):
                due.put_nowait((loop.time() + self._delay_s, piece))
            await asyncio.sleep(self._delay_s)
            writing.cancel()
        raise ConnectionResetError("the other side has closed")

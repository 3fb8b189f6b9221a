"""Stage hosts as real processes, and a gateway in the test's own event loop."""

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from openai import AsyncOpenAI

from neurons.lifecycle import run_role
from neurons.serving.children import LISTENS
from neurons.serving.completions import Limits
from neurons.serving.gateway import Gateway, Model
from neurons.serving.gateway_process import model_names
from neurons.serving.host_process import run_host
from neurons.serving.http import CompletionsApi, Text
from neurons.serving.options import ServeOptions
from subnet.adapters.listener import Listener
from subnet.adapters.model_files import ModelDirectory
from subnet.adapters.system import SystemClock
from subnet.inference.engine import mode_of
from subnet.inference.jobs import BatchLimits
from subnet.types import Endpoint

KEY = "a key for tests only"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.integration.serving"])


def _play(directory: Path, options: ServeOptions, said: Connection) -> None:
    """Inside the process: what `strata serve host` does, with its first line going to the test."""
    sys.stdout = os.fdopen(os.dup(said.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(run_role(lambda stop: run_host(ModelDirectory(directory), options, KEY, stop), role="stage-host"))


@dataclass
class HostProcess:
    endpoint: Endpoint
    process: BaseProcess

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@contextlib.contextmanager
def host_processes(place: Path, stages: list[int], num_stages: int = 3) -> Iterator[list[HostProcess]]:
    """One process for each entry of `stages`; an entry twice is a replica."""
    started: list[tuple[Connection, BaseProcess]] = []
    try:
        for stage in stages:
            options = ServeOptions(model=str(place), stage=f"{stage}/{num_stages}", num_threads=1)
            reader, writer = _CONTEXT.Pipe(duplex=False)
            process: BaseProcess = _CONTEXT.Process(target=_play, args=(place, options, writer), daemon=True)
            process.start()
            writer.close()
            started.append((reader, process))
        found = []
        for reader, process in started:
            with os.fdopen(os.dup(reader.fileno())) as lines:
                line = lines.readline()
            assert line.startswith(LISTENS), line
            found.append(HostProcess(Endpoint(host="127.0.0.1", port=int(line.rsplit(":", 1)[1])), process))
        yield found
    finally:
        for reader, process in started:
            process.terminate()
            process.join(10)
            reader.close()
            assert not process.is_alive()


@dataclass
class Served:
    """A gateway that listens."""

    gateway: Gateway
    api: CompletionsApi
    url: str
    client: AsyncOpenAI
    """The official client."""

    async def assert_nothing_left(self) -> None:
        """No sequence and no byte of a cache on any host, nothing waiting, nothing under way."""
        async with asyncio.timeout(10):
            await self.gateway.until_idle()
        await self.gateway.refresh()
        rows = [row for row in self.gateway.facts() if row["is_up"]]
        assert rows
        assert [(row["num_sequences"], row["cache_bytes"]) for row in rows] == [(0, 0)] * len(rows)
        batcher = self.gateway.batcher
        assert (batcher.num_waiting, batcher.num_running, batcher.num_in_flight) == (0, 0, 0)


@contextlib.asynccontextmanager
async def serving(
    place: Path,
    hosts: list[Endpoint],
    *,
    num_stages: int = 3,
    limits: BatchLimits | None = None,
    api_key: str = "",
    key: str = KEY,
) -> AsyncIterator[Served]:
    directory, clock, listener = ModelDirectory(place), SystemClock(), Listener()
    gateway = Gateway(
        hosts,
        Model(digest=directory.digest, mode=mode_of(directory.served), num_stages=num_stages),
        session=secrets.token_hex(8),
        shared_key=key.encode(),
        clock=clock,
        limits=limits or BatchLimits(),
    )
    tokenizer = directory.tokenizer()
    text = Text(
        encode=lambda text: list(tokenizer.encode(text).ids),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        eos_ids=(),
        vocab_size=256,
    )
    api = CompletionsApi(
        gateway,
        text,
        names=model_names(directory.served, "tiny"),
        limits=Limits(max_positions=512, max_tokens=200, max_body_bytes=4096),
        clock=clock,
        api_key=api_key,
    )
    api.mount(listener)
    await listener.start("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.port}"
    served = Served(gateway, api, url, AsyncOpenAI(base_url=f"{url}/v1", api_key="anything", max_retries=0))
    work = asyncio.create_task(gateway.work())
    try:
        yield served
    finally:
        await served.client.close()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        await listener.stop()

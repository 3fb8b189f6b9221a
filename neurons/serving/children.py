"""The stage hosts that `strata serve DIR` starts on this machine: one process for each stage, started again when it dies."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from neurons import settings
from neurons.exit_codes import ExitCode
from neurons.lifecycle import log
from neurons.serving.options import ServeOptions
from subnet.errors import StartupRefused
from subnet.types import Endpoint

LISTENS = "strata stage host listens on "
"""What a host prints when it is ready, followed by HOST:PORT."""
START_S = 600.0
RESTART_PAUSE_S = 1.0
STOP_S = 4.0
_HOST = "127.0.0.1"


@dataclass(slots=True)
class _Child:
    """A host process; its port is chosen when it first starts, and kept."""

    command: list[str]
    environment: Mapping[str, str]
    port: int = 0
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Until it listens. Its standard input is held open by this process alone, so that it ends with us."""
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            "--port",
            str(self.port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self.environment,
            start_new_session=True,  # Ctrl-C in the terminal is for the gateway, which then ends its hosts
        )
        assert self.process.stdout is not None
        line = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                line = (await self.process.stdout.readline()).decode()
        if not line.startswith(LISTENS):
            raise StartupRefused("a stage host did not start; its reason stands above.", ExitCode.UNAVAILABLE)
        self.port = int(line.rsplit(":", 1)[1])

    async def keep(self) -> None:
        """Start it again when it dies, on the port it had."""
        while self.process is not None:
            code = await self.process.wait()
            log.warning("stage host died", extra={"port": self.port, "code": code})
            await asyncio.sleep(RESTART_PAUSE_S)
            with contextlib.suppress(StartupRefused):
                await self.start()

    async def stop(self) -> None:
        """Ask, then insist."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@contextlib.asynccontextmanager
async def local_hosts(options: ServeOptions, serve_key: str) -> AsyncIterator[list[Endpoint]]:
    """Where the hosts of stages 0 to N - 1 listen, while they run. Raises StartupRefused."""
    environment = settings.without_variables() | {settings.SERVE_KEY_VARIABLE: serve_key}
    children = [_Child(_command(options, stage), environment) for stage in range(options.num_hosts)]
    watchers: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(child.start())
        watchers = [asyncio.create_task(child.keep()) for child in children]
        yield [Endpoint(host=_HOST, port=child.port) for child in children]
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in children))


def _command(options: ServeOptions, stage: int) -> list[str]:
    num_threads = options.num_threads or max(1, (os.cpu_count() or 1) // options.num_hosts)
    flags = {
        "--model": options.model,
        "--stage": f"{stage}/{options.num_hosts}",
        "--host": _HOST,
        "--threads": num_threads,
        "--cache-tokens": options.cache_tokens,
        "--max-context": options.max_context,
        "--log-level": options.log_level,
    }
    spelled = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "neurons.cli", "serve", "host", *spelled, "--until-eof"]

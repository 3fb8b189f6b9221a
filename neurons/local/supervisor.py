"""Starts the processes of a local subnet from a warm parent, restarts those that die, and ends all of them.

Roles are forked from a process that has torch loaded, so that the tenth starts in milliseconds. Each is the leader of its own
process group, so whatever it started ends with it.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from neurons.exit_codes import RESTART_IS_USELESS, ExitCode
from neurons.local.children import AnyJob, KeepChain, PlayRole, play
from neurons.settings import without_variables
from subnet.adapters.system import write_atomically
from subnet.errors import StartupRefused
from subnet.types import Hotkey, Record

PRELOADED = (
    "torch",
    "bittensor",
    "typer",
    "neurons.orchestrator",
    "neurons.miner",
    "neurons.validator",
    "neurons.local.children",
)
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""A dozen processes share the cores; threads of one would only wait for those of another."""
STOP_LIMIT_S = 9.0
"""A role ends within 8 s of SIGTERM; after this it is killed."""
_CHAIN_STOP_LIMIT_S = 4.0
_KILL_LIMIT_S = 2.0
_STEADY_S = 20.0
_MAX_QUICK_DEATHS = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_LAST_WORDS_BYTES = 4096
_POLL_S = 0.05


class ProcessNote(Record, frozen=True):
    """One line of processes.json. `pid` is 0 while the process is down."""

    name: str
    role: str
    pid: int
    port: int
    started_at: float
    restarts: int
    hotkey: Hotkey
    log: str


@dataclass(slots=True)
class Child:
    """One process, over all its lives."""

    job: AnyJob
    role: str
    port: int
    hotkey: Hotkey
    process: BaseProcess | None = None
    started_at: float = 0.0
    restarts: int = 0
    quick_deaths: int = 0
    last_exit: int = 0
    is_given_up: bool = False

    @property
    def is_running(self) -> bool:
        """Whether there is a process now."""
        return self.process is not None

    @property
    def note(self) -> ProcessNote:
        """As others see it."""
        pid = self.process.pid if self.process is not None and self.process.pid else 0
        return ProcessNote(
            name=self.job.name,
            role=self.role,
            pid=pid,
            port=self.port,
            started_at=self.started_at,
            restarts=self.restarts,
            hotkey=self.hotkey,
            log=self.job.log,
        )


class Supervisor:
    """All processes of one local subnet. `processes_file` is rewritten at each change; `tell` gets a line for people."""

    def __init__(self, processes_file: Path, *, environment: dict[str, str], tell: Callable[[str], None]) -> None:
        self._file = processes_file
        self._tell = tell
        self._is_stopping = False
        self.children: dict[str, Child] = {}
        _set_environment(ONE_THREAD | environment)
        self._warm = multiprocessing.get_context("forkserver")
        self._cold = multiprocessing.get_context("spawn")
        self._warm.set_forkserver_preload(list(PRELOADED))

    def warm_up(self) -> None:
        """Begin to load what the roles need, in a process of its own; returns at once."""
        forkserver.ensure_running()

    async def keep(self, child: Child) -> None:
        """Run a process for as long as the subnet runs. Raises StartupRefused when restarting cannot help."""
        self.children[child.job.name] = child
        while not self._is_stopping:
            await self._start(child)
            code = await self._ended(child)
            if self._is_stopping or self._gives_up(child, code):
                return
            child.restarts += 1
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**child.quick_deaths)
            self._tell(f"{child.job.name} ended ({describe_exit(code)}); restart {child.restarts} in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def run_once(self, child: Child) -> int:
        """Run a process to its end; returns its exit code."""
        self.children[child.job.name] = child
        await self._start(child)
        code = await self._ended(child)
        del self.children[child.job.name]
        self._write()
        return code

    async def stop(self) -> None:
        """End every process that was started and none else: roles first, then the chain they write to."""
        self._is_stopping = True
        chains = [child for child in self.children.values() if isinstance(child.job, KeepChain)]
        roles = [child for child in self.children.values() if child not in chains]
        await self._stop_these(roles, STOP_LIMIT_S)
        await self._stop_these(chains, _CHAIN_STOP_LIMIT_S)
        for process in multiprocessing.active_children():  # one that was just being started
            process.kill()
        _end_warm_parent()

    async def stop_roles(self) -> None:
        """End the roles and leave the chain as it is; nothing is restarted from now on."""
        self._is_stopping = True
        roles = [child for child in self.children.values() if isinstance(child.job, PlayRole)]
        await self._stop_these(roles, STOP_LIMIT_S)

    async def _start(self, child: Child) -> None:
        cold = isinstance(child.job, KeepChain)
        context = self._cold if cold else self._warm
        process: BaseProcess = context.Process(
            target=play, args=(msgspec.json.encode(child.job),), name=child.job.name, daemon=True
        )
        if cold:  # in this thread: a process dies with the thread that started it
            process.start()
        else:  # waits for the warm parent, which may still be loading
            await asyncio.to_thread(process.start)
        child.process, child.started_at = process, time.time()
        self._write()

    async def _ended(self, child: Child) -> int:
        process = child.process
        if process is None:
            return child.last_exit
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
        process.join()
        if process.pid is not None:
            _kill_group(process.pid)  # what it had started itself, such as the embedded state store
        child.last_exit, child.process = process.exitcode or 0, None
        self._write()
        return child.last_exit

    def _gives_up(self, child: Child, code: int) -> bool:
        """Whether a dead process stays down; raises StartupRefused when the subnet cannot go on without it."""
        name = child.job.name
        if code in RESTART_IS_USELESS:
            if isinstance(child.job, PlayRole) and child.job.cheat:
                self._tell(f"{name}, which cheats, was turned away: {last_words(Path(child.job.log))}")
                child.is_given_up = True
                return True
            raise StartupRefused(f"{name} cannot go on: {last_words(Path(child.job.log))}", code)
        is_quick = time.time() - child.started_at < _STEADY_S
        child.quick_deaths = child.quick_deaths + 1 if is_quick else 0
        if child.quick_deaths > _MAX_QUICK_DEATHS:
            raise StartupRefused(
                f"{name} ended {child.quick_deaths} times within {_STEADY_S:g} s of its start "
                f"({describe_exit(code)}): {last_words(Path(child.job.log))}\nIts log: {child.job.log}",
                code if code > 0 else ExitCode.UNEXPECTED,
            )
        return False

    async def _stop_these(self, children: list[Child], limit_s: float) -> None:
        for child in children:
            _signal(child, signal.SIGTERM)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while any(map(_is_alive, children)) and loop.time() < deadline:  # noqa: ASYNC110  # several processes, one wait
            await asyncio.sleep(_POLL_S)
        for child in children:
            if _is_alive(child):
                self._tell(f"{child.job.name} did not stop within {limit_s:g} s and was killed")
                _signal(child, signal.SIGKILL)
        deadline = loop.time() + _KILL_LIMIT_S
        while any(map(_is_alive, children)) and loop.time() < deadline:  # noqa: ASYNC110  # several processes, one wait
            await asyncio.sleep(_POLL_S)
        for child in children:
            if child.process is not None and child.process.pid is not None:
                _kill_group(child.process.pid)
                child.process = None
        self._write()

    def _write(self) -> None:
        notes = [child.note for child in self.children.values()]
        write_atomically(self._file, msgspec.json.format(msgspec.json.encode(notes)) + b"\n")


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def last_words(log: Path) -> str:
    """What a process said last on its own behalf: the lines that begin with "strata", else its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    said = [at for at, line in enumerate(lines) if line.startswith("strata")]
    if said:
        return " ".join(line.strip() for line in lines[said[-1] :] if not line.startswith("{")).removeprefix("strata: ")
    return lines[-1] if lines else "it said nothing"


def _set_environment(wanted: dict[str, str]) -> None:
    """For the processes to come: what a person set for other subnets stays out of this one."""
    kept = without_variables()
    for name in [name for name in os.environ if name not in kept]:
        del os.environ[name]
    os.environ.update(wanted)


def _end_warm_parent() -> None:
    """It ends by itself, but only after it has loaded everything; Python has no public way to tell it."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _is_alive(child: Child) -> bool:
    return child.process is not None and child.process.is_alive()


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.pid and child.process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process.pid, number)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)

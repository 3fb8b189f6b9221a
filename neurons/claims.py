"""What one process holds on its machine: a hotkey, a directory, a port. A second claim is refused, naming the first."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from neurons.exit_codes import ExitCode
from subnet.errors import StartupRefused
from subnet.types import Hotkey

_MARKER = "run-id"
_LOCK = ".lock"
_NOT_STATE = {".toml", ".log", ".jsonl"}
"""Files that people and supervisors put beside a node's state; they do not make a directory somebody else's."""


@contextlib.contextmanager
def hotkey_claim(lock_dir: Path, hotkey: Hotkey, *, chain: str, netuid: int, role: str) -> Iterator[None]:
    """Hold `hotkey` on this subnet for this process. Raises StartupRefused naming the process that already does.

    The lock is the kernel's and ends with its process, however that ends; the file's text only says who holds it.
    """
    subnet = hashlib.sha256(f"{chain}\n{netuid}".encode()).hexdigest()[:12]
    with _locked(lock_dir / f"{hotkey}-{subnet}.lock", role, flag="--set node.lock_dir=DIR") as holder:
        if holder is not None:
            raise StartupRefused(
                f"hotkey {hotkey} is already at work on netuid {netuid}: {holder}.\n"
                "Stop that process first, or start this one with another hotkey (--wallet.hotkey).",
                ExitCode.SECOND_PROCESS,
            )
        yield


@contextlib.contextmanager
def directory_claim(directory: Path, run_id: str, *, role: str, flag: str = "--data-dir") -> Iterator[None]:
    """Hold `directory` for this process and this run. Raises StartupRefused for another run's or a stranger's directory."""
    with _locked(directory / _LOCK, role, flag=flag) as holder:
        if holder is not None:
            raise StartupRefused(
                f"{directory} is in use: {holder}.\nStop that process first, or name another directory with {flag}.",
                ExitCode.SECOND_PROCESS,
            )
        _check_owner(directory, run_id, flag)
        yield


def claimed_run(directory: Path) -> str | None:
    """The run that `directory` belongs to, None when no run has claimed it yet."""
    marker = directory / _MARKER
    return marker.read_text(encoding="utf-8", errors="replace").strip() if marker.exists() else None


def last_holder(directory: Path) -> int | None:
    """The pid of the process that holds `directory`, or held it last; None when no process has."""
    try:
        return int(json.loads((directory / _LOCK).read_text(encoding="utf-8"))["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_owner(directory: Path, run_id: str, flag: str) -> None:
    marker = directory / _MARKER
    found = claimed_run(directory)
    if found is not None:
        if found != run_id:
            raise StartupRefused(
                f"{directory} belongs to run {found[:80] or '(unreadable)'}, this is run {run_id}; nothing was changed.\n"
                f"Name another directory with {flag}, or move this one away.",
                ExitCode.FOREIGN_DIRECTORY,
            )
        return
    strangers = sorted(
        entry.name for entry in directory.iterdir() if entry.name != _LOCK and entry.suffix not in _NOT_STATE
    )
    if strangers:
        raise StartupRefused(
            f"{directory} is not empty and not Strata's (it has {', '.join(strangers[:3])}); nothing was changed.\n"
            f"Name an empty or new directory with {flag}.",
            ExitCode.FOREIGN_DIRECTORY,
        )
    temporary = directory / f"{_MARKER}.toml"  # a suffix that the next start does not take for a stranger's
    temporary.write_text(run_id + "\n", encoding="utf-8")
    temporary.replace(marker)


@contextlib.contextmanager
def _locked(path: Path, role: str, *, flag: str) -> Iterator[str | None]:
    """Yield None while holding the lock at `path`, or who holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupRefused(
            f"{path.parent} cannot be written: {error.strerror}.\nName a directory of yours with {flag}.",
            ExitCode.FOREIGN_DIRECTORY,
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(path)
        os.close(descriptor)
        yield holder
        return
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "role": role, "since_s": time.time()}).encode())
        yield None
    finally:
        os.close(descriptor)


def _holder(path: Path) -> str:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(note["since_s"])))
        return f"pid {int(note['pid'])} (strata {note['role']}), since {since}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and is just writing its name
        return "another strata process, which is just starting"


def require_free_port(host: str, port: int, *, flag: str = "--port") -> None:
    """Raises StartupRefused when `port` of `host` cannot be listened on, saying who has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise StartupRefused(_why_not(error, host, port, flag), ExitCode.PORT_TAKEN) from error


def _why_not(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = _listener(port)
        by = f" by {holder}" if holder else ""
        return f"port {port} is taken{by}.\nStop that process, or choose another port with {flag}."
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has.\nChoose one above 1023 with {flag}."
    return f"cannot listen on {host}, port {port}: {error.strerror or error}.\nName an address of this machine."


def _listener(port: int) -> str | None:
    """The process that listens on `port`, as far as the kernel lets this user see it."""
    inodes = _listening_inodes(port)
    for process in sorted(Path("/proc").glob("[0-9]*")) if inodes else ():
        with contextlib.suppress(OSError):  # gone by now, or another user's
            if any(_target(link) in inodes for link in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f"pid {process.name} ({words.strip()[:80]})"
    return None


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed in the meantime
        return ""


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                is_listening = fields[3] == "0A"
                if is_listening and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found

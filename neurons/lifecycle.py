"""How a process starts, logs, and ends: signals, bounded shutdown, one message and one exit code for each reason."""

import asyncio
import contextlib
import errno
import gc
import logging
import logging.handlers
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import structlog
import uvloop

from neurons.exit_codes import ExitCode, exit_code_of
from neurons.settings import user_path
from subnet.errors import InvalidConfig, StartupRefused, StrataError

SHUTDOWN_LIMIT_S = 8.0
"""From the first signal to the end of the process, whatever happens."""
_GRACE = 0.7
"""Share of the limit that a role has to finish by itself before it is cancelled."""
_LOG_FILE_BYTES = 64 << 20
_NUM_OLD_LOG_FILES = 3
_DESCRIPTORS = 65_536
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
_CHATTY = ("aiohttp.access", "asyncio", "bittensor", "websockets", "hpack", "httpx")

log = logging.getLogger("strata")


class Stop:
    """The request to stop that a role waits for, and where it says what it could not finish."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self.reason = ""
        self.lost: list[str] = []

    @property
    def is_requested(self) -> bool:
        """Whether the role should finish now."""
        return self._requested.is_set()

    async def wait(self) -> str:
        """Return the reason once a stop is requested."""
        await self._requested.wait()
        return self.reason

    def request(self, reason: str) -> None:
        """Ask the role to finish; the first reason stands."""
        self.reason = self.reason or reason
        self._requested.set()

    def report_lost(self, what: str) -> None:
        """Note work that ends unfinished, in words for a person: "3 samples in flight"."""
        self.lost.append(what)


RoleMain = Callable[[Stop], Awaitable[None]]


def run_role(
    main: RoleMain,
    *,
    role: str,
    log_level: str = "info",
    log_file: str = "",
    limit_s: float = SHUTDOWN_LIMIT_S,
) -> int:
    """Run `main` to its end, or to `limit_s` seconds after SIGTERM, SIGINT or SIGHUP; returns the exit code.

    A second signal, or a role that does not stop in time, ends the process at once with ExitCode.FORCED. Every reason to
    end that the project knows becomes a line or two on stderr; what it does not know becomes a traceback in the log.
    """
    try:
        set_up_logs(role, level=log_level, file=log_file)
        spare_what_is_loaded()
        open_as_many_as_allowed()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_supervise(main, role, limit_s))
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # the only one: `end_of` tells faults of ours apart
        reason = known_reason(error)
        if reason is not None:
            log.error("ended", extra={"error": type(reason).__name__, "reason": str(reason)})
        return end_of(error)
    return ExitCode.OK


def open_as_many_as_allowed() -> None:
    """Raise the soft limit of open files and sockets: many systems start with 1,024, which a few hundred peers use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def spare_what_is_loaded() -> None:
    """Take what exists now out of the garbage collector's sight: modules stay as long as the process.

    They are over a hundred thousand objects, and a full collection that looks at them stops everything for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


async def _supervise(main: RoleMain, role: str, limit_s: float) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in _signals_to_handle():
        loop.add_signal_handler(number, _on_signal, number, stop, limit_s)
    work = asyncio.ensure_future(main(stop))
    signalled = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if not work.done():
        await asyncio.wait({work}, timeout=limit_s * _GRACE)
    if not work.done():
        stop.report_lost("whatever was in progress: the role did not finish by itself")
        work.cancel()
        await asyncio.wait({work})
    if not work.cancelled():
        await work
    if stop.is_requested:
        lost = "; ".join(stop.lost) or "nothing"
        log.info("stopped", extra={"reason": stop.reason, "lost": lost})
        _say(f"strata {role} stopped ({stop.reason}); lost: {lost}")


async def until_stopped(stop: Stop, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends by itself or a stop is requested, then cancel it. Raises what `work` raises."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _signals_to_handle() -> Iterator[signal.Signals]:
    yield signal.SIGTERM
    yield signal.SIGINT
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the process outlives its terminal
        yield signal.SIGHUP


def _on_signal(number: signal.Signals, stop: Stop, limit_s: float) -> None:
    if stop.is_requested:
        _leave_at_once(f"told twice to stop ({number.name})")
    stop.request(number.name)
    # The watchdog is a thread and stays armed: it also ends a blocked event loop and threads that never join.
    watchdog = threading.Timer(limit_s, _leave_at_once, (f"did not stop within {limit_s:g} s of {number.name}",))
    watchdog.daemon = True
    watchdog.start()


def _leave_at_once(why: str) -> None:
    _say(f"strata: {why}; ended at once, work in progress is lost")
    os._exit(ExitCode.FORCED)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def tell(error: StrataError) -> int:
    """Say on stderr why the process ends, in a line or two, and return its exit code."""
    _say(f"strata: {error}")
    return exit_code_of(error)


def known_reason(error: BaseException) -> StrataError | None:
    """Why, when all that failed has a reason for people, the first of a task group; None for a fault of ours."""
    reasons = [_reason(leaf) for leaf in _leaves(error)]
    known = [reason for reason in reasons if reason is not None]
    return known[0] if len(known) == len(reasons) else None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _reason(error: BaseException) -> StrataError | None:
    for one in (error, error.__cause__):  # the second: a store that could not write says so in words of its own
        if isinstance(one, OSError) and one.errno in _DISK:
            text = (
                f"the disk takes no more: {one.strerror}.\nMake room, then start again; what was written whole is kept."
            )
            return StartupRefused(text, ExitCode.DISK_FULL)
    return error if isinstance(error, StrataError) else None


def end_of(error: BaseException) -> int:
    """Say on stderr why the process ends, a fault of ours with its traceback in the log, and return the exit code."""
    reason = known_reason(error)
    if reason is not None:
        return tell(reason)
    log.critical("ended by a fault of Strata", exc_info=error)
    _say(f"strata: a fault of Strata: {type(error).__name__}: {error}")
    return ExitCode.UNEXPECTED


def set_up_logs(role: str, *, level: str = "info", file: str = "") -> None:
    """Send every log record to stderr (coloured lines on a terminal, JSON elsewhere) and, as JSON, to `file`."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(_formatter(role, for_people=sys.stderr.isatty()))
    root.addHandler(shown)
    if file:
        kept = _log_file(user_path(file))
        kept.setFormatter(_formatter(role, for_people=False))
        root.addHandler(kept)


class _LogFile(logging.handlers.RotatingFileHandler):
    """Left when its disk takes no more, which is said once: the library prints a traceback for each record instead."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the library's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logging.getLogger().removeHandler(self)
        _say(
            f"strata: {self.baseFilename} cannot be written ({error.strerror}); from here on the log goes to stderr alone"
        )


def _log_file(path: Path) -> _LogFile:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _LogFile(path, maxBytes=_LOG_FILE_BYTES, backupCount=_NUM_OLD_LOG_FILES, encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"node.log_file (--log-file): {path} cannot be written: {error.strerror}") from error


def _formatter(role: str, *, for_people: bool) -> logging.Formatter:
    def add_role(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["role"] = role
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.contextvars.merge_contextvars,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if for_people else "iso", utc=not for_people),
        add_role,
    ]
    last: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if for_people
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )

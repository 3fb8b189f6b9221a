"""What every measurement shares: lines with a verdict, interleaved repeats, and child processes that are asked for figures."""

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import uvloop

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the report. `is_met` is None for a figure that has no target, or that could not be measured here."""

    what: str
    measured: str
    target: str = ""
    is_met: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "ok", False: "MISSED", None: ""}[self.is_met]
        target = (
            f"  [target {self.target}: {verdict}]"
            if self.target and verdict
            else f"  [{self.target}]" * bool(self.target)
        )
        return f"  {self.what}: {self.measured}{target}"


def limit(what: str, value: float, most: float, *, unit: str = "x") -> Line:
    """A figure that should not exceed `most`."""
    return Line(what=what, measured=f"{value:.2f}{unit}", target=f"<= {most:g}{unit}", is_met=value <= most)


def floor(what: str, value: float, least: float, *, unit: str = "x") -> Line:
    """A figure that should reach `least`."""
    return Line(what=what, measured=f"{value:.2f}{unit}", target=f">= {least:g}{unit}", is_met=value >= least)


def fact(what: str, measured: str, note: str = "") -> Line:
    """A figure without a target."""
    return Line(what=what, measured=measured, target=note)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of 100 lie, by rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def median(values: Sequence[float]) -> float:
    """Middle value by rank."""
    return percentile(values, 50)


def interleaved(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """A, B, A, B, ...: what the machine does meanwhile meets both sides alike. The first round only warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            value = side()
            if turn:
                found[name].append(value)
    return found


def timed(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cpu_timed(work: Callable[[], object]) -> float:
    """CPU seconds of this process in one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


class Child:
    """A process of its own that answers questions: JSON there, JSON back."""

    def __init__(self, main: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._connection = ours
        self._process = context.Process(target=main, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def ask(self, question: object) -> Any:
        """Send and wait for the answer. Raises EOFError when the child has died."""
        self.tell(question)
        return self.answer()

    def tell(self, question: object) -> None:
        """Send; `answer` is to follow."""
        self._connection.send_bytes(msgspec.json.encode(question))

    def answer(self) -> Any:
        """The next answer."""
        return msgspec.json.decode(self._connection.recv_bytes())

    async def ask_later(self, question: object) -> Any:
        """As `ask`, without holding up the event loop."""
        return await asyncio.to_thread(self.ask, question)

    def stop(self) -> None:
        """End the process: by asking, then by force."""
        with contextlib.suppress(OSError):
            self.tell(None)
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


@contextlib.contextmanager
def children(*started: Child) -> Iterator[tuple[Child, ...]]:
    """Stop every one of them at the end."""
    try:
        yield started
    finally:
        for child in started:
            child.stop()


async def answer_questions(connection: Connection, reply: Callable[[Any], Coroutine[Any, Any, object]]) -> None:
    """In a child: answer until told to stop, or until the parent is gone."""
    while True:
        try:
            question = msgspec.json.decode(await asyncio.to_thread(connection.recv_bytes))
        except EOFError:
            return
        if question is None:
            return
        connection.send_bytes(msgspec.json.encode(await reply(question)))


def one_thread() -> None:
    """Keep numeric libraries to one thread, here and in children; to be called before they are imported."""
    for name in ONE_THREAD:
        os.environ[name] = "1"


def run_loop(main: Coroutine[Any, Any, Any]) -> Any:
    """Run on the event loop that the roles use."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def load() -> str:
    """How busy the machine is."""
    one, five, _ = os.getloadavg()
    return f"load {one:.1f} (5 min {five:.1f})"

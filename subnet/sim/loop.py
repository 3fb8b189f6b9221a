"""An event loop whose time moves only when everybody waits: hours pass in seconds, and the order of events is fixed."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_S = 1_800_000_000.0
"""Unix time at which virtual time begins."""


class _NoWaiting(selectors.SelectSelector):
    """Instead of waiting for sockets, lets the loop's clock jump to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("virtual time cannot pass: every task waits for something that no timer will bring")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs tasks in order of their timers. Threads and sockets have no place in it: nothing would wait for them."""

    def __init__(self) -> None:
        self._jumping = _NoWaiting()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop began."""
        return self._jumping.now_s


class VirtualClock:
    """ports.Clock on the loop's own time."""

    def now(self) -> float:
        """Unix time in seconds, from a fixed beginning."""
        return EPOCH_S + asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

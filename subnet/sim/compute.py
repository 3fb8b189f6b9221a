"""Tensor work in virtual time: done at once, and paid for with seconds drawn around the node's speed."""

from collections.abc import Callable
from typing import TypeVar

from subnet import draws
from subnet.ports import Clock

T = TypeVar("T")


class SimCompute:
    """ports.Compute: `seconds_per_call` for each call, give or take 20 %."""

    def __init__(self, *, seconds_per_call: float, seed: int, name: str, clock: Clock) -> None:
        self._seconds_per_call = seconds_per_call
        self._seed = seed
        self._name = name
        self._clock = clock
        self._num_calls = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` inline, then let the time pass that it stands for."""
        self._num_calls += 1
        share = 0.8 + 0.4 * draws.uniform(self._seed, "compute", self._name, self._num_calls)
        result = work()
        await self._clock.sleep(self._seconds_per_call * share)
        return result

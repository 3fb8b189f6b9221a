"""A validator's weights are renewed each tempo, so that it does not stop counting while nothing new is sealed."""

import pytest

from neurons.roles.weights import PostedWeights
from subnet.adapters.memory_chain import MemoryChainConfig, MemoryChainState
from subnet.errors import Refused
from subnet.types import Hotkey

OWNER, VALIDATOR, MINER = Hotkey("owner"), Hotkey("validator"), Hotkey("miner")
CONFIG = MemoryChainConfig(tempo=20, weights_rate_limit=2, activity_cutoff=30)


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        self._now_s += seconds


async def a_subnet() -> tuple[Clock, MemoryChainState]:
    """A validator with a permit and a miner, one block after an epoch."""
    clock = Clock()
    world = MemoryChainState(clock, CONFIG, owner_hotkey=OWNER)
    world.register(VALIDATOR, "cold", stake=1_000.0)
    world.register(MINER, "cold")
    await pass_blocks(clock, 21)
    return clock, world


async def pass_blocks(clock: Clock, count: int) -> None:
    await clock.sleep(count * CONFIG.block_time_s)


async def test_weights_are_set_again_a_tempo_later_and_keep_the_validator_active() -> None:
    clock, world = await a_subnet()
    chain = world.view(VALIDATOR)
    posted = PostedWeights(chain)
    assert await posted.renew() is None
    first = await posted.put({MINER: 1.0})
    assert await posted.renew() is None
    for _ in range(4):
        await pass_blocks(clock, CONFIG.tempo + 1)
        again = await posted.renew()
        assert again is None or again > first
    neurons = (await chain.metagraph()).by_hotkey()
    assert neurons[VALIDATOR].last_update_block > first + 2 * CONFIG.tempo
    assert neurons[VALIDATOR].is_active and neurons[MINER].incentive == 1.0


async def test_weights_that_are_refused_are_not_renewed() -> None:
    _, world = await a_subnet()
    posted = PostedWeights(world.view(MINER))
    with pytest.raises(Refused):
        await posted.put({VALIDATOR: 1.0})
    assert await posted.renew() is None

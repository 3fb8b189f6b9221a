"""The chain in memory: what the simulation relies on beyond the port."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from subnet.adapters.memory_chain import MemoryChainConfig, MemoryChainState
from subnet.errors import Refused
from subnet.types import Hotkey
from tests.contract.chain_harness import SteppingClock
from tests.devnet_bench import NETUID, Bench, address

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def world(**knobs: Any) -> tuple[MemoryChainState, SteppingClock]:
    clock = SteppingClock()
    config = MemoryChainConfig(weights_rate_limit=1, **knobs)
    return MemoryChainState(clock, config, owner_hotkey=Hotkey("owner"), owner_coldkey="owner's"), clock


def test_hashes_follow_from_the_seed() -> None:
    (one, clock), (two, _), (other, _) = world(seed=1), world(seed=1), world(seed=2)
    run(clock.sleep(1_000))
    digests = [run(state.view(Hotkey("owner")).block_hash(0)) for state in (one, two, other)]
    assert digests[0] == digests[1] != digests[2]


def test_epochs_run_when_time_is_looked_at_however_late() -> None:
    state, clock = world(tempo=20)
    state.register(Hotkey("v"), "c", stake=10)
    run(clock.sleep(20 * 12 * 7))
    assert state.num_epochs == 7
    assert run(state.view(Hotkey("v")).metagraph()).by_hotkey()[Hotkey("v")].stake > 10


def test_a_full_subnet_makes_room_by_pruning_the_lowest_earner_but_never_the_owner() -> None:
    state, _ = world(max_uids=3)
    state.register(Hotkey("a"), "c")
    state.register(Hotkey("b"), "c")
    assert state.register(Hotkey("c"), "c") == 1
    keys = [neuron.hotkey for neuron in run(state.view(Hotkey("b")).metagraph()).neurons]
    assert keys == ["owner", "c", "b"]
    with pytest.raises(Refused):
        state.register(Hotkey("b"), "c")


def test_devnet_and_simulator_agree_to_the_rao() -> None:
    """The same subnet on both: emission of every epoch, and stake at the end, equal to the last digit."""
    bench = Bench(tempo=20, weights_rate_limit=1)
    bench.register("Val", "M0", "M1")
    bench.stake("Val", 1_000)
    clock = SteppingClock()
    config = MemoryChainConfig(tempo=20, weights_rate_limit=1)
    state = MemoryChainState(clock, config, owner_hotkey=Hotkey("owner"), owner_coldkey="owner's")
    for name in ("Val", "M0", "M1"):
        run(clock.sleep(12))
        state.register(Hotkey(name), "bank", stake=1_000 if name == "Val" else 0)
    run(clock.sleep(12 * (20 - 3)))
    bench.blocks(20 - bench.chain.head.number)
    row: dict[str, Any] = {"netuid": NETUID, "mecid": 0, "dests": [2, 3], "weights": [65_535, 21_845], "version_key": 0}
    assert bench.send("Val", "set_mechanism_weights", **row) is None
    run(state.view(Hotkey("Val")).set_weights({Hotkey("M0"): 0.75, Hotkey("M1"): 0.25}))
    for _ in range(3):
        bench.blocks(20)
        run(clock.sleep(20 * 12))
        graph = run(state.view(Hotkey("M0")).metagraph()).by_hotkey()
        emission = bench.get("Emission", NETUID)
        for uid, name in ((1, "Val"), (2, "M0"), (3, "M1")):
            assert round(graph[Hotkey(name)].emission * 1e9) == emission[uid]
            assert state.stake_rao[Hotkey(name)] == bench.get("TotalHotkeyAlpha", address(name), NETUID)

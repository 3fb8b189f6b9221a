"""One subnet behind the Chain port, on each adapter, for the contract suite."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bittensor.keyfiles import Keypair

from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.chain_session import ChainLimits
from subnet.adapters.memory_chain import MemoryChainConfig, MemoryChainState
from subnet.adapters.weights_conform import WeightRules
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.ports import Chain
from subnet.types import Hotkey

NETUID = 7
TEMPO = 12
KINDS = ("memory", "devnet")


class SteppingClock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self._now_s = 1_000.0

    def now(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@dataclass
class Subnet:
    """A subnet with an owner; `chain(name)` is the chain as that key sees it."""

    owner: Hotkey
    chain: Callable[..., Any]
    register: Callable[..., Awaitable[Hotkey]]
    pass_blocks: Callable[[int], Awaitable[None]]
    unreachable: Callable[[], Chain]
    missing_netuid: Callable[[], Chain]
    opened: list[BittensorChain] = field(default_factory=list)

    async def pass_epochs(self, count: int) -> None:
        await self.pass_blocks(TEMPO * count)


def keypair(name: str) -> Keypair:
    return Keypair.create_from_uri(f"//{name}")


def hotkey(name: str) -> Hotkey:
    return Hotkey(keypair(name).ss58_address)


@asynccontextmanager
async def subnet(kind: str, **knobs: int) -> AsyncIterator[Subnet]:
    """A running subnet; `knobs` are hyperparameters by the chain's names."""
    if kind == "memory":
        yield _memory(knobs)
        return
    genesis = SubnetGenesis(
        netuid=NETUID, hyperparameters={"tempo": TEMPO, "weights_rate_limit": 2, "serving_rate_limit": 25, **knobs}
    )
    funded = {str(hotkey("Bank")): 100_000.0}
    node = Node(DevnetConfig(port=0, block_time_s=0.05, subnets=(genesis,), prefunded=funded))
    async with node.running():
        made = _devnet(node)
        try:
            yield made
        finally:
            for chain in made.opened:
                await chain.close()


def _memory(knobs: dict[str, int]) -> Subnet:
    clock = SteppingClock()

    def state(netuid: int) -> MemoryChainState:
        config = MemoryChainConfig(
            netuid=netuid,
            tempo=TEMPO,
            weights_rate_limit=2,
            serving_rate_limit=25,
            version_key=knobs.get("weights_version", 0),
            rules=WeightRules(
                min_allowed_weights=knobs.get("min_allowed_weights", 1),
                max_weights_limit=knobs.get("max_weights_limit", 65_535),
            ),
        )
        return MemoryChainState(clock, config, owner_hotkey=hotkey("Alice"), owner_coldkey="alice")

    world = state(NETUID)

    async def register(name: str, stake: float = 0.0) -> Hotkey:
        world.register(hotkey(name), f"coldkey of {name}", stake=stake)
        return hotkey(name)

    async def pass_blocks(count: int) -> None:
        await clock.sleep(count * world.config.block_time_s)

    def unreachable() -> Chain:
        down = state(NETUID)
        down.is_down = True
        return down.view(hotkey("Alice"))

    return Subnet(
        owner=hotkey("Alice"),
        chain=lambda name, version_key=1: world.view(hotkey(name), version_key=version_key),
        register=register,
        pass_blocks=pass_blocks,
        unreachable=unreachable,
        missing_netuid=lambda: state(0).view(hotkey("Alice")),
    )


def _devnet(node: Node) -> Subnet:
    limits = ChainLimits(metagraph_max_age_s=0.0, connect_timeout_s=5.0)
    opened: list[BittensorChain] = []
    by_name: dict[Any, BittensorChain] = {}

    def chain(name: str, version_key: int = 1, netuid: int = NETUID, url: str = node.url) -> BittensorChain:
        key = (name, version_key, netuid, url)
        if key not in by_name:
            by_name[key] = BittensorChain(url, netuid, keypair(name), version_key=version_key, limits=limits)
            opened.append(by_name[key])
        return by_name[key]

    async def register(name: str, stake: float = 0.0) -> Hotkey:
        accounts = ChainAccounts(chain("Alice"))
        await accounts.burned_register(keypair("Bank"), hotkey(name))
        if stake:
            await accounts.add_stake(keypair("Bank"), hotkey(name), stake)
        return hotkey(name)

    async def pass_blocks(count: int) -> None:
        await chain("Alice").session.wait_for_block(await chain("Alice").block() + count)

    return Subnet(
        owner=hotkey("Alice"),
        chain=chain,
        register=register,
        pass_blocks=pass_blocks,
        unreachable=lambda: chain("Alice", url="ws://127.0.0.1:9"),
        missing_netuid=lambda: chain("Alice", netuid=99),
        opened=opened,
    )

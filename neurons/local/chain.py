"""The chain of a local subnet: its genesis, and what coldkeys do on it before anybody trains."""

import asyncio
from pathlib import Path

import bittensor as bt
import msgspec

from neurons.exit_codes import ExitCode
from neurons.local.plan import HOST, NETUID, VALIDATOR_STAKE_TAO, GenesisFile, Layout, Plan
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.chain_session import ChainLimits
from subnet.adapters.system import write_atomically
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.errors import StartupRefused, TransientFailure

_MINERS_TAO = 1000.0
_KEPT_BLOCKS = 4096
_CONNECT_S = 30.0
_POLL_S = 0.1


def make_genesis(plan: Plan, wallets: dict[str, bt.Wallet]) -> GenesisFile:
    """A started subnet of the owner's, and money for everybody who has to pay for something."""
    owner = wallets[plan.orchestrator.name]
    funds = {wallet.coldkeypub.ss58_address: _MINERS_TAO for wallet in wallets.values()}
    funds |= {wallets[part.name].coldkeypub.ss58_address: 2 * VALIDATOR_STAKE_TAO for part in plan.of_role("validator")}
    num_neurons = len(plan.parts)
    return GenesisFile(
        netuid=NETUID,
        owner_coldkey=owner.coldkeypub.ss58_address,
        owner_hotkey=owner.hotkey.ss58_address,
        hyperparameters={
            "tempo": plan.options.tempo_blocks,
            "max_allowed_uids": max(256, num_neurons),
            "max_validators": max(64, plan.options.num_validators + 1),
            "weights_rate_limit": 4,
        },
        prefunded=funds,
        block_time_s=plan.options.block_time_s,
    )


def write_genesis(layout: Layout, genesis: GenesisFile) -> None:
    """Keep the genesis beside the chain's file."""
    write_atomically(layout.genesis, msgspec.json.format(msgspec.json.encode(genesis)) + b"\n")


def read_genesis(layout: Layout) -> GenesisFile:
    """The genesis of a local subnet that was started here. Raises StartupRefused."""
    try:
        return msgspec.json.decode(layout.genesis.read_bytes(), type=GenesisFile)
    except OSError:
        raise StartupRefused(
            f"{layout.root} holds no local subnet (there is no {layout.genesis.relative_to(layout.root)}).\n"
            "Name the directory that was given to: strata localnet --dir",
            ExitCode.FOREIGN_DIRECTORY,
        ) from None
    except msgspec.DecodeError as error:
        raise StartupRefused(f"{layout.genesis} is damaged: {error}", ExitCode.DAMAGED_STATE) from error


def devnet_config(genesis: GenesisFile, *, directory: Path, port: int) -> DevnetConfig:
    """The chain node's configuration; the same genesis opens the same chain again."""
    subnet = SubnetGenesis(
        netuid=genesis.netuid,
        owner_coldkey=genesis.owner_coldkey,
        owner_hotkey=genesis.owner_hotkey,
        name="strata",
        hyperparameters=genesis.hyperparameters,
    )
    return DevnetConfig(
        host=HOST,
        port=port,
        block_time_s=genesis.block_time_s,
        subnets=(subnet,),
        prefunded=genesis.prefunded,
        finality_lag=1,
        kept_blocks=_KEPT_BLOCKS,
        directory=directory,
    )


def open_chain(url: str, *, netuid: int = NETUID) -> BittensorChain:
    """A connection that only reads, unless a call brings its own wallet."""
    return BittensorChain(url, netuid, limits=ChainLimits(connect_timeout_s=5.0))


async def until_up(chain: BittensorChain) -> None:
    """Wait for the chain node to answer. Raises TransientFailure when it does not within half a minute."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _CONNECT_S
    while True:
        try:
            await chain.block()
            return
        except TransientFailure:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(_POLL_S)


async def register_all(plan: Plan, wallets: dict[str, bt.Wallet]) -> None:
    """Register every hotkey and stake on validators; each coldkey's transactions in turn, the coldkeys side by side."""
    by_coldkey: dict[str, list[str]] = {}
    for part in plan.parts:
        if part.role != "orchestrator":
            by_coldkey.setdefault(part.wallet, []).append(part.name)
    async with asyncio.TaskGroup() as group:
        for wallet, names in by_coldkey.items():
            group.create_task(_register(plan, [wallets[name] for name in names]), name=wallet)


async def _register(plan: Plan, wallets: list[bt.Wallet]) -> None:
    chain = open_chain(plan.chain_url)
    validators = {f"v{number}" for number in range(1, plan.options.num_validators + 1)}
    try:
        accounts = ChainAccounts(chain)
        for wallet in wallets:
            await accounts.burned_register(wallet)
            if wallet.hotkey_str in validators:
                await accounts.add_stake(wallet, wallet.hotkey.ss58_address, VALIDATOR_STAKE_TAO)
    finally:
        await chain.close()

"""The doctor's facts and the commands for people, on a running devnet."""

import asyncio
import time

import pytest
from bittensor.keyfiles import Keypair

from neurons.chain_checks import findings, read_facts
from neurons.chain_tools import run_chain
from neurons.devnet import ask
from neurons.devnet import commands as devnet_commands
from neurons.findings import Role
from neurons.settings import NodeSettings
from subnet.adapters.chain import BittensorChain
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.errors import StartupRefused
from subnet.types import Hotkey

ALICE, STRANGER = (Keypair.create_from_uri(f"//{name}").ss58_address for name in ("Alice", "Stranger"))


async def test_a_subnet_that_was_never_started_and_a_stranger_on_it() -> None:
    genesis = SubnetGenesis(netuid=1, is_started=False, hyperparameters={"tempo": 5, "immunity_period": 5})
    async with Node(DevnetConfig(port=0, block_time_s=0.05, subnets=(genesis,))).running() as node:
        chain = BittensorChain(node.url, 1)
        facts = await read_facts(chain, Hotkey(STRANGER), coldkey=STRANGER, now_s=time.time())
        codes = [finding.code for finding in findings(facts, Role.MINER, version_key=1)]
        assert {"not_started", "no_run", "not_registered", "balance", "immunity_short", "clock"} <= set(codes)
        late = await read_facts(chain, Hotkey(ALICE), coldkey=ALICE, now_s=time.time() - 60)
        assert "clock_skew" in [finding.code for finding in findings(late, Role.OWNER, version_key=1)]
        assert "knobs_frozen" in [finding.code for finding in findings(late, Role.OWNER, version_key=1)]
        await chain.close()


async def test_the_commands_show_a_running_node(capsys: pytest.CaptureFixture[str]) -> None:
    async with Node(DevnetConfig(port=0, block_time_s=0.05)).running() as node:
        assert await asyncio.to_thread(run_chain, NodeSettings(netuid=1, network=node.url)) == 0
        shown = capsys.readouterr().out
        assert ALICE[:8] in shown and "weights_rate_limit" in shown
        await asyncio.to_thread(devnet_commands, ["status", "--url", node.url], standalone_mode=False)
        assert "finalized" in capsys.readouterr().out
        for command in (["finality", "5"], ["reorg", "2"], ["upgrade"], ["stall"], ["stall", "--end"], ["drop"]):
            await asyncio.to_thread(devnet_commands, [*command, "--url", node.url], standalone_mode=False)
        for command in (
            ["freeze"],
            ["freeze", "--end"],
            ["lossy"],
            ["lossy", "--end"],
            ["fail", "chain_getHead", "no"],
        ):
            await asyncio.to_thread(devnet_commands, [*command, "--url", node.url], standalone_mode=False)
        with pytest.raises(StartupRefused, match="refused chain_getHead"):
            await ask(node.url, "chain_getHead")
    with pytest.raises(StartupRefused, match="no devnet answers"):
        await ask("ws://127.0.0.1:9", "devnet_status")

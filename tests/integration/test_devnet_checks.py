"""The doctor's facts and the commands for people, on a running devnet."""

import asyncio
import io
import time

import pytest
from bittensor.keyfiles import Keypair
from rich.console import Console

from neurons.chain_checks import findings, read_facts
from neurons.chain_tools import metagraph_table, run_chain, weights_table
from neurons.devnet import ask
from neurons.devnet import commands as devnet_commands
from neurons.findings import Role
from neurons.settings import NodeSettings
from subnet.adapters.chain import BittensorChain
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.errors import StartupRefused
from subnet.types import Endpoint, Hotkey, Metagraph, Neuron, Uid

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
        assert ALICE[:8] in shown and "weights_rate_limit" in shown and "no validator has weights" in shown
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


def test_a_narrow_terminal_cuts_hotkeys_short_and_nothing_else() -> None:
    owner, validator = (
        Neuron(
            uid=Uid(uid),
            hotkey=Hotkey(address),
            coldkey="c",
            stake=1_234.5,
            validator_permit=True,
            registered_at_block=1,
            last_update_block=777,
            is_active=True,
            incentive=0.25,
            dividends=0.5,
            emission=12.5,
            endpoint=Endpoint(host="203.0.113.7", port=8_091),
        )
        for uid, address in enumerate((ALICE, STRANGER))
    )
    metagraph = Metagraph(netuid=1, at_block=9, owner_hotkey=owner.hotkey, tempo=20, neurons=(owner, validator))
    console = Console(width=108, record=True, file=io.StringIO())
    console.print(metagraph_table(metagraph, width=108))
    console.print(weights_table({validator.hotkey: {Uid(0): 30, Uid(1): 10}}, metagraph))
    shown = console.export_text()
    for words in ("0*", "1,234.500", "203.0.113.7:8091", "0: 0.7500, 1: 0.2500", "dividends", "set at"):
        assert words in shown
    wide = Console(width=200, record=True, file=io.StringIO())
    wide.print(metagraph_table(metagraph, width=200))
    assert ALICE in wide.export_text()

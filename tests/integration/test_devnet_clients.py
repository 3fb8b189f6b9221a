"""The other clients people have: substrate-interface, whose codec is independent of ours, and btcli."""

import asyncio
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import bittensor as bt
import pytest
from bittensor.keyfiles import Keypair

from subnet.adapters.chain import BittensorChain
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package is no longer maintained and says so on import
    import substrateinterface

NETUID = 1
TEMPO = 10


def config(**funded: float) -> DevnetConfig:
    genesis = SubnetGenesis(netuid=NETUID, hyperparameters={"tempo": TEMPO, "weights_rate_limit": 2})
    return DevnetConfig(port=0, block_time_s=0.05, subnets=(genesis,), prefunded=funded)


class Legacy:
    """substrate-interface as a second client; it blocks, so it runs in a thread."""

    def __init__(self, url: str) -> None:
        self.node = substrateinterface.SubstrateInterface(url=url)

    def call(self, signer: Any, pallet: str, function: str, **params: Any) -> None:
        """Send a call and see it succeed."""
        composed = self.node.compose_call(pallet, function, params)
        extrinsic = self.node.create_signed_extrinsic(call=composed, keypair=signer)
        receipt = self.node.submit_extrinsic(extrinsic, wait_for_inclusion=True)
        assert receipt.is_success, receipt.error_message

    def value(self, item: str, *params: Any) -> Any:
        return self.node.query("SubtensorModule", item, list(params)).value


def legacy_life(url: str) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Register, stake, serve, wait for a permit, set weights; returns the weights and who has which uid."""
    alice, validator, miner = (
        substrateinterface.Keypair.create_from_uri(f"//{name}") for name in ("Alice", "LegacyVal", "LegacyMiner")
    )
    client = Legacy(url)
    pallet = "SubtensorModule"
    for key in (validator, miner):
        client.call(alice, pallet, "burned_register", netuid=NETUID, hotkey=key.ss58_address)
    stake = {"hotkey": validator.ss58_address, "netuid": NETUID, "amount_staked": 10**12}
    client.call(alice, pallet, "add_stake", **stake)
    axon = {"version": 1, "ip": 2_130_706_433, "port": 8_091, "ip_type": 4, "protocol": 4}
    client.call(miner, pallet, "serve_axon", netuid=NETUID, **axon, placeholder1=0, placeholder2=0)
    while not client.value("ValidatorPermit", NETUID)[1]:
        client.call(alice, "System", "remark", remark=b"tick")
    row = {"dests": [2], "weights": [65_535], "version_key": 0}
    client.call(validator, pallet, "set_weights", netuid=NETUID, **row)
    weights = client.value("Weights", NETUID, 1)
    uids = {key.value: uid.value for key, uid in client.node.query_map(pallet, "Uids", [NETUID])}
    client.node.close()
    return weights, uids


async def test_substrate_interface_lives_a_subnets_life() -> None:
    async with Node(config()).running() as node:
        weights, uids = await asyncio.to_thread(legacy_life, node.url)
    assert weights == [(2, 65_535)]
    assert sorted(uids.values()) == [0, 1, 2]


@pytest.mark.slow
async def test_btcli_lives_a_subnets_life(tmp_path: Path) -> None:
    wallet = bt.Wallet(name="w", hotkey="h", path=str(tmp_path / "wallets"))
    wallet.create_new_coldkey(n_words=12, use_password=False, overwrite=True, suppress=True)
    wallet.create_new_hotkey(n_words=12, use_password=False, overwrite=True, suppress=True)
    async with Node(config(**{wallet.coldkeypub.ss58_address: 5_000.0})).running() as node:
        key = ["-w", "w", "-H", "h", "--wallet-path", str(tmp_path / "wallets"), "--yes"]
        assert "devnet" in await btcli(node, tmp_path, "subnets", "list")
        await btcli(node, tmp_path, "subnets", "register", "--netuid", "1", *key)
        await btcli(node, tmp_path, "stake", "add", "--netuid", "1", "--amount", "100", *key)
        await btcli(node, tmp_path, "tx", "serve-axon", "--netuid", "1", "--ip", "127.0.0.1", "--port", "8091", *key)
        await btcli(node, tmp_path, "tx", "set-weights", "--netuid", "1", "--uids", "0", "--weights", "1.0", *key)
        assert "metagraph" in await btcli(node, tmp_path, "subnets", "metagraph", "1")
        chain = BittensorChain(node.url, NETUID)
        neuron = (await chain.metagraph()).neurons[1]
        assert neuron.hotkey == wallet.hotkey.ss58_address and neuron.stake >= 100
        assert neuron.endpoint is not None and neuron.validator_permit
        assert await chain.weights(neuron.hotkey) == {0: 65_535}
        await btcli(node, tmp_path, "subnets", "create", *key)
        created = node.chain.storage()
        assert created.get("SubnetOwner", 2) == wallet.coldkeypub.ss58_address
        assert created.get("SubnetOwnerHotkey", 2) == wallet.hotkey.ss58_address
        await chain.close()


async def btcli(node: Node, home: Path, *arguments: str) -> str:
    """Run a btcli command against the node, in a home directory of its own; it must succeed."""
    program = Path(sys.executable).parent / "btcli"
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        "-n",
        node.url,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HOME": str(home), "BITTENSOR_RUNTIME_CACHE_DIR": str(home / "cache"), "COLUMNS": "200"},
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def test_the_development_account_is_the_ecosystems() -> None:
    assert Keypair.create_from_uri("//Alice").ss58_address == "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"

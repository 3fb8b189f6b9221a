"""Commit-reveal, version 4: sealed by the SDK, opened by the devnet with a pulse of the real beacon."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import bittensor as bt
import bittensor_core
import pytest
from bittensor.keyfiles import Keypair

from neurons.devnet import ask
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.chain_session import ChainLimits
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.devnet.scale import compact, vector
from subnet.types import Hotkey

NETUID = 1
TEMPO = 16
ROUND = 1_000
SIGNATURE = "b44679b9a59af2ec876b1a6b1ad52ea9b1615fc3982b19576350f93447cb1125e342b73a8dd2bacbe47e4b6b63ed5e39"
"""Pulse of round 1,000 of drand's quicknet, public since August 2023."""
BANK, VALIDATOR = (Keypair.create_from_uri(f"//{name}") for name in ("Bank", "Validator"))
MINERS = [Keypair.create_from_uri(f"//Miner{index}") for index in range(2)]
LIMITS = ChainLimits(connect_timeout_s=5.0, metagraph_max_age_s=0.0)


@asynccontextmanager
async def validating(tmp_path: Path) -> AsyncIterator[tuple[Node, BittensorChain]]:
    """A validator with a permit and two miners on a subnet that reveals weights an epoch later."""
    knobs = {"tempo": TEMPO, "weights_rate_limit": 2, "commit_reveal_weights_enabled": 1}
    genesis = SubnetGenesis(netuid=NETUID, hyperparameters=knobs)
    funded = {BANK.ss58_address: 10_000.0}
    config = DevnetConfig(port=0, block_time_s=0.05, subnets=(genesis,), prefunded=funded, finality_lag=1)
    async with Node(config).running() as node:
        chain = BittensorChain(node.url, NETUID, VALIDATOR, version_key=3, limits=LIMITS, lock_directory=tmp_path)
        accounts = ChainAccounts(chain)
        await accounts.burned_register(BANK, VALIDATOR.ss58_address)
        await accounts.add_stake(BANK, VALIDATOR.ss58_address, 1_000.0)
        for miner in MINERS:
            await accounts.burned_register(BANK, miner.ss58_address)
        await chain.session.wait_for_block(await chain.block() + TEMPO)
        try:
            yield node, chain
        finally:
            await chain.close()


def sealed(signer: Keypair, uids: list[int], values: list[int], *, version_key: int) -> bytes:
    """What the SDK seals, for a round whose pulse is known: hotkey, uids, values, version key."""
    payload = vector(bytes(signer.public_key))
    for numbers in (uids, values):
        payload += compact(len(numbers)) + b"".join(number.to_bytes(2, "little") for number in numbers)
    payload += version_key.to_bytes(8, "little")
    envelope, _ = bittensor_core.encrypt_at_round(payload, ROUND)
    return bytes(bittensor_core.inner_ciphertext(bytes(envelope)))


async def commit(chain: BittensorChain, signer: Keypair, commit_bytes: bytes) -> bt.ExtrinsicResult:
    built = bt.calls.SubtensorModule.commit_timelocked_mechanism_weights(
        netuid=NETUID, mecid=0, commit=commit_bytes, reveal_round=ROUND, commit_reveal_version=4
    )
    result: bt.ExtrinsicResult = await chain.session.read(
        "commit", lambda client: client.submit_call(built, signer, signer="hotkey")
    )
    return result


async def test_weights_commit_is_dated_and_sealed(tmp_path: Path) -> None:
    async with validating(tmp_path) as (_, chain):
        key = Hotkey(VALIDATOR.ss58_address)
        block = await chain.set_weights({Hotkey(MINERS[0].ss58_address): 1.0})
        assert (await chain.metagraph()).by_hotkey()[key].last_update_block == block
        assert await chain.weights(key) == {}
        pending = await chain.session.read(
            "commits", lambda client: client.weights.timelocked_weight_commits(netuid=NETUID)
        )
        (commits,) = pending.values()
        assert [entry["hotkey"] for entry in commits] == [key]


async def test_a_restart_between_commit_and_reveal_neither_sets_twice_nor_forgets(tmp_path: Path) -> None:
    async with validating(tmp_path) as (node, chain):
        wanted = {Hotkey(MINERS[0].ss58_address): 1.0}
        await chain.session.wait_for_block(await _next_epoch(chain) + 1)
        block = await chain.set_weights(wanted)
        restarted = BittensorChain(node.url, NETUID, VALIDATOR, version_key=3, limits=LIMITS, lock_directory=tmp_path)
        assert await restarted.set_weights(wanted) == block
        other = await restarted.set_weights({Hotkey(MINERS[1].ss58_address): 1.0})
        assert other > block
        await restarted.close()


async def test_the_devnet_reveals_with_a_real_pulse_and_pays_by_it(tmp_path: Path) -> None:
    async with validating(tmp_path) as (node, chain):
        await chain.session.wait_for_block(await _next_epoch(chain) + 1)
        result = await commit(chain, VALIDATOR, sealed(VALIDATOR, [2, 3], [65_535, 21_845], version_key=3))
        assert result.success, result.message
        await ask(node.url, "devnet_drandPulse", ROUND, SIGNATURE)
        epoch = await _next_epoch(chain)
        assert await chain.weights(Hotkey(VALIDATOR.ss58_address)) == {}
        await chain.session.wait_for_block(epoch + TEMPO + 1)
        assert await chain.weights(Hotkey(VALIDATOR.ss58_address)) == {2: 65_535, 3: 21_845}
        miners = [(await chain.metagraph()).neurons[uid] for uid in (2, 3)]
        assert miners[0].emission == pytest.approx(3 * miners[1].emission, rel=1e-3)
        assert miners[0].stake > 0


async def test_weights_sealed_for_another_hotkey_are_worth_nothing(tmp_path: Path) -> None:
    async with validating(tmp_path) as (node, chain):
        stolen = sealed(MINERS[0], [2], [65_535], version_key=3)
        assert (await commit(chain, VALIDATOR, stolen)).success
        await ask(node.url, "devnet_drandPulse", ROUND, SIGNATURE)
        await chain.session.wait_for_block(await chain.block() + 2 * TEMPO)
        assert await chain.weights(Hotkey(VALIDATOR.ss58_address)) == {}
        pending = await chain.session.read(
            "commits", lambda client: client.weights.timelocked_weight_commits(netuid=NETUID)
        )
        assert pending == {}


async def test_a_commit_on_the_block_of_an_epoch_counts_for_the_next_one(tmp_path: Path) -> None:
    """The chain starts the epoch before it takes the block's transactions."""
    async with validating(tmp_path) as (node, chain):
        node.faults.is_stalled = True  # first, or a busy machine is past that block by the time it is known
        epoch_block = await _next_epoch(chain)
        while node.chain.head.number < epoch_block - 1:
            node.make_block()
        index = node.chain.storage().get("SubnetEpochIndex", NETUID)
        sending = asyncio.ensure_future(commit(chain, VALIDATOR, sealed(VALIDATOR, [2], [65_535], version_key=3)))
        while len(node.chain.pool) == 0:  # noqa: ASYNC110 - the pool is the node's, it wakes nobody
            await asyncio.sleep(0)
        node.make_block()
        assert node.chain.storage().get("LastEpochBlock", NETUID) == node.chain.head.number == epoch_block
        assert len(node.chain.storage().get("TimelockedWeightCommits", NETUID, index + 1)) == 1
        node.faults.is_stalled = False
        assert (await sending).success
        await ask(node.url, "devnet_drandPulse", ROUND, SIGNATURE)
        await chain.session.wait_for_block(epoch_block + TEMPO + 2)
        assert await chain.weights(Hotkey(VALIDATOR.ss58_address)) == {2: 65_535}


async def _next_epoch(chain: BittensorChain) -> int:
    status = await chain.session.read("epoch", lambda client: client.epochs.epoch_status(netuid=NETUID))
    return int(status["next_epoch_start_block"])

"""The unmodified Bittensor SDK against the devnet: every step of a subnet's life."""

import hashlib

import bittensor as bt
import pytest
from bittensor.intents import AddStake, BurnedRegister, ServeAxon, SetWeights, Transfer
from bittensor.keyfiles import Keypair

from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node

NETUID = 2
ALICE, BANK, VALIDATOR, MINER, OTHER = (
    Keypair.create_from_uri(f"//{name}") for name in ("Alice", "Bank", "Validator", "Miner", "Other")
)


def node(**knobs: int) -> Node:
    genesis = SubnetGenesis(netuid=NETUID, hyperparameters={"tempo": 10, "weights_rate_limit": 3, **knobs})
    config = DevnetConfig(
        port=0, block_time_s=0.05, subnets=(genesis,), prefunded={BANK.ss58_address: 10_000.0}, finality_lag=1
    )
    return Node(config)


async def call(client: bt.Client, built: object, wallet: Keypair, signer: str = "coldkey") -> bt.ExtrinsicResult:
    result: bt.ExtrinsicResult = await client.submit_call(built, wallet, signer=signer)
    return result


async def registered(client: bt.Client) -> None:
    for key in (VALIDATOR, MINER, OTHER):
        built = bt.calls.SubtensorModule.burned_register(netuid=NETUID, hotkey=key.ss58_address)
        assert (await call(client, built, BANK)).success
    staked = await client.execute(
        AddStake(hotkey_ss58=VALIDATOR.ss58_address, netuid=NETUID, amount_tao=bt.tao(1_000.0)), BANK
    )
    assert staked.success


async def test_from_registration_to_emission() -> None:
    async with node().running() as chain, bt.Client(chain.url) as client:
        await registered(client)
        await client.wait_for_epoch(NETUID, timeout=20)
        intent = SetWeights(netuid=NETUID, weights={2: 0.8, 3: 0.2})  # type: ignore[arg-type]
        result = await client.execute(intent, VALIDATOR)
        assert result.success, result.message
        assert await client.weights.weights(netuid=NETUID) == {
            1: {2: pytest.approx(0.8, abs=1e-4), 3: pytest.approx(0.2, abs=1e-4)}
        }
        again = SetWeights(netuid=NETUID, weights={2: 1.0})  # type: ignore[arg-type]
        with pytest.raises(bt.ChainError) as limited:
            await client.execute(again, VALIDATOR)
        assert limited.value.code is bt.ErrorCode.RATE_LIMITED
        await client.wait_for_epoch(NETUID, timeout=20)
        graph = await client.subnets.metagraph(NETUID)
        assert graph is not None
        miner = graph.neurons[2]
        assert miner.incentive == pytest.approx(0.8, abs=1e-4)
        assert miner.emission.rao > 0 and miner.alpha_stake.rao >= miner.emission.rao
        assert graph.neurons[1].validator_permit and graph.neurons[1].dividends == pytest.approx(1.0, abs=1e-4)


async def test_shielded_registration_is_included_in_the_clear() -> None:
    async with node().running() as chain, bt.Client(chain.url) as client:
        result = await client.execute(BurnedRegister(netuid=NETUID, hotkey_ss58=MINER.ss58_address), BANK)
        assert result.success, result.message
        assert result.data["shielded"]
        assert await client.neurons.uid(hotkey_ss58=MINER.ss58_address, netuid=NETUID) == 1


async def test_a_refused_call_names_the_runtimes_error_and_costs_only_its_fee() -> None:
    async with node().running() as chain, bt.Client(chain.url) as client:
        before = (await client.balances.get(BANK.ss58_address)).rao
        built = bt.calls.SubtensorModule.burned_register(netuid=9, hotkey=MINER.ss58_address)
        result = await call(client, built, BANK)
        assert result.error is not None and result.error.name == "SubnetNotExists"
        paid = before - (await client.balances.get(BANK.ss58_address)).rao
        assert 0 < paid < 1_000_000


async def test_the_price_rises_with_each_registration_and_falls_back() -> None:
    async with node(burn=50_000_000, burn_half_life=5).running() as chain, bt.Client(chain.url) as client:
        before = (await client.subnets.burn(NETUID)).rao
        built = bt.calls.SubtensorModule.burned_register(netuid=NETUID, hotkey=MINER.ss58_address)
        assert (await call(client, built, BANK)).success
        raised = (await client.subnets.burn(NETUID)).rao
        await client.wait_for_block(await client.block() + 12, timeout=20)
        fallen = (await client.subnets.burn(NETUID)).rao
        assert 500_000 <= fallen < raised
        assert raised < before * 1.27


async def test_an_axon_is_served_and_rate_limited() -> None:
    async with node(serving_rate_limit=40).running() as chain, bt.Client(chain.url) as client:
        await registered(client)
        assert (await client.execute(ServeAxon(netuid=NETUID, ip="127.0.0.1", port=8_091), MINER)).success
        refused = await client.execute(ServeAxon(netuid=NETUID, ip="127.0.0.1", port=8_092), MINER)
        assert refused.error is not None and refused.error.name == "ServingRateLimitExceeded"
        graph = await client.subnets.metagraph(NETUID)
        assert graph is not None and graph.neurons[2].axon == "127.0.0.1:8091"


async def test_commitments_are_readable_through_the_sdk() -> None:
    async with node().running() as chain, bt.Client(chain.url) as client:
        await registered(client)
        info = {"fields": [{"Raw5": "0x" + b"hello".hex()}, {"Sha256": "0x" + hashlib.sha256(b"x").hexdigest()}]}
        built = bt.calls.Commitments.set_commitment(netuid=NETUID, info=info)
        assert (await call(client, built, MINER, "hotkey")).success
        found = await client.identity.commitment(netuid=NETUID, hotkey_ss58=MINER.ss58_address)
        assert found is not None and found.data == "hello"
        every = await client.subnets.commitments(NETUID)
        assert every[MINER.ss58_address].status == "plain"


async def test_hyperparameters_epochs_and_stake_are_readable() -> None:
    async with node(immunity_period=77).running() as chain, bt.Client(chain.url) as client:
        await registered(client)
        knobs = await client.subnets.subnet_hyperparameters(netuid=NETUID)
        assert knobs is not None and (knobs["tempo"], knobs["immunity_period"]) == (10, 77)
        status = await client.epochs.epoch_status(netuid=NETUID)
        assert status["next_epoch_start_block"] == status["last_epoch_block"] + 10
        stake = await client.staking.get(BANK.ss58_address, VALIDATOR.ss58_address, NETUID)
        assert stake.rao >= 1_000 * 10**9
        assert len(await client.neurons.all(NETUID)) == 4
        assert await client.block_time() == 0.05


async def test_a_transfer_moves_what_it_says() -> None:
    async with node().running() as chain, bt.Client(chain.url) as client:
        sent = Transfer(dest_ss58=OTHER.ss58_address, amount_tao=bt.tao(3.0))
        assert (await client.execute(sent, BANK)).success
        assert (await client.balances.get(OTHER.ss58_address)).rao == 3 * 10**9
        too_much = bt.calls.Balances.transfer_keep_alive(dest=BANK.ss58_address, value=10**15)
        refused = await call(client, too_much, OTHER)
        assert refused.error is not None and refused.error.name == "InsufficientBalance"

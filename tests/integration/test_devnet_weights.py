"""Weights that cannot be set: refused before a fee is paid, told with a remedy, remembered over a restart."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from bittensor.keyfiles import Keypair

from neurons.observe import weights_health, weights_measures
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.chain_session import ChainLimits
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.errors import Refused, TransientFailure
from subnet.types import Hotkey

NETUID = 1
TEMPO = 10
LIMITS = ChainLimits(connect_timeout_s=5.0, read_timeout_s=2.0, metagraph_max_age_s=0.0)
BANK, VALIDATOR, MINER = (Keypair.create_from_uri(f"//{name}") for name in ("Bank", "Validator", "Miner"))
WANTED = {Hotkey(MINER.ss58_address): 1.0}


@asynccontextmanager
async def registered(tmp_path: Path, *, stake: float, **knobs: int) -> AsyncIterator[tuple[Node, BittensorChain]]:
    """A validator and a miner on a subnet whose weights need 500 alpha."""
    genesis = SubnetGenesis(netuid=NETUID, hyperparameters={"tempo": TEMPO, "weights_rate_limit": 2, **knobs})
    config = DevnetConfig(
        port=0,
        block_time_s=0.05,
        subnets=(genesis,),
        prefunded={BANK.ss58_address: 10_000.0},
        finality_lag=1,
        stake_threshold_tao=500.0,
    )
    async with Node(config).running() as node:
        chain = BittensorChain(node.url, NETUID, VALIDATOR, version_key=1, limits=LIMITS, lock_directory=tmp_path)
        accounts = ChainAccounts(chain)
        for key in (VALIDATOR, MINER):
            await accounts.burned_register(BANK, key.ss58_address)
        if stake:
            await accounts.add_stake(BANK, VALIDATOR.ss58_address, stake)
        try:
            yield node, chain
        finally:
            await chain.close()


@pytest.mark.parametrize("is_sealed", [0, 1], ids=["plain", "commit-reveal"])
async def test_weights_without_the_stake_they_need_cost_nothing_and_are_an_alert_until_they_are_set(
    tmp_path: Path, is_sealed: int
) -> None:
    async with registered(tmp_path, stake=100.0, commit_reveal_weights_enabled=is_sealed) as (node, chain):
        before = await chain.balance(BANK.ss58_address)
        for _ in range(2):
            with pytest.raises(Refused, match="weights need 500 staked on the hotkey, there are 100"):
                await chain.set_weights(WANTED)
        assert await chain.balance(BANK.ss58_address) == before
        restarted = BittensorChain(node.url, NETUID, VALIDATOR, version_key=1, limits=LIMITS, lock_directory=tmp_path)
        alert, shown = restarted.weights_alert, chain.weights_alert
        assert alert is not None and alert == shown
        assert (alert.code, alert.hotkey) == ("NotEnoughStakeToSetWeights", VALIDATOR.ss58_address)
        assert "btcli stake add --netuid 1" in str(weights_health(chain)["weights_alert"])
        measures = {measure.name: measure for measure in weights_measures(chain)}
        assert measures["strata_weights_alert"].value == 1 and measures["strata_weights_failed"].value == 2
        await ChainAccounts(chain).add_stake(BANK, VALIDATOR.ss58_address, 900.0)
        await chain.session.wait_for_block(await chain.block() + TEMPO)
        block = await chain.set_weights(WANTED)
        assert weights_health(chain) == {"weights_at_block": block}
        again = BittensorChain(node.url, NETUID, VALIDATOR, lock_directory=tmp_path)
        assert weights_health(again) == {"weights_at_block": None}
        measures = {measure.name: measure for measure in weights_measures(chain)}
        assert measures["strata_weights_alert"].value == 0 and measures["strata_weights_block"].value == block
        await restarted.close()


async def test_a_chain_out_of_reach_is_an_alert_too(tmp_path: Path) -> None:
    chain = BittensorChain("ws://127.0.0.1:9", NETUID, VALIDATOR, limits=LIMITS, lock_directory=tmp_path)
    with pytest.raises(TransientFailure):
        await chain.set_weights(WANTED)
    assert chain.weights_alert is not None and "--subtensor.chain_endpoint" in chain.weights_alert.remedy
    reader = BittensorChain("ws://127.0.0.1:9", NETUID)
    assert reader.weights_alert is None
    await chain.close()

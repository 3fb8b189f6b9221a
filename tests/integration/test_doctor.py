"""`strata doctor` on a running devnet: every case it has to tell apart, made to happen."""

from pathlib import Path

import bittensor as bt
import msgspec
import pytest
from bittensor.keyfiles import Keypair
from rich.console import Console

from neurons.doctor import diagnose, run_doctor, show
from neurons.findings import Finding, Level, Role
from neurons.settings import NodeConfig, NodeSettings
from subnet import wire
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_accounts import ChainAccounts
from subnet.adapters.weights_alert import WeightsAlerts
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.context import Context
from subnet.devnet.node import Node
from subnet.errors import InvalidConfig, Refused
from subnet.types import Hotkey
from tests.unit.test_reach_checks import free_port

TEMPO = 20
ALICE, BANK = (Keypair.create_from_uri(f"//{name}") for name in ("Alice", "Bank"))


def devnet() -> Node:
    """Netuid 1 is healthy, netuid 2 was never started and prunes newcomers at once."""
    knobs = {"tempo": TEMPO, "weights_rate_limit": 2}
    subnets = (
        SubnetGenesis(netuid=1, hyperparameters=knobs),
        SubnetGenesis(netuid=2, is_started=False, hyperparameters={**knobs, "immunity_period": 5}),
    )
    return Node(DevnetConfig(port=0, block_time_s=0.05, subnets=subnets, prefunded={BANK.ss58_address: 10_000.0}))


def settings(tmp_path: Path, node: Node, netuid: int = 1) -> NodeConfig:
    return NodeConfig(
        node=NodeSettings(
            wallet_path=str(tmp_path / "wallets"),
            netuid=netuid,
            network=node.url,
            data_dir=str(tmp_path / "data"),
            lock_dir=str(tmp_path / "locks"),
            port=free_port(),
            num_threads=1,
        )
    )


def make_wallet(tmp_path: Path) -> Hotkey:
    wallet = bt.Wallet("default", "default", str(tmp_path / "wallets"))
    wallet.create_new_coldkey(n_words=12, use_password=False, overwrite=True, suppress=True)
    wallet.create_new_hotkey(n_words=12, use_password=False, overwrite=True, suppress=True)
    return Hotkey(wallet.hotkey.ss58_address)


def troubles(found: list[Finding]) -> dict[str, Finding]:
    assert all(finding.remedy for finding in found if finding.level is not Level.OK)
    return {finding.code: finding for finding in found if finding.level is not Level.OK}


async def root_sets(chain: BittensorChain, node: Node, item: str, value: int) -> None:
    def change(ctx: Context) -> None:
        ctx.put(item, value)

    node.chain.as_root(change)
    await chain.session.wait_for_block(await chain.block() + 1)


async def after_epoch(chain: BittensorChain) -> None:
    """Wait until the next epoch has run."""
    status = await chain.session.read("epoch", lambda client: client.epochs.epoch_status(netuid=chain.netuid))
    await chain.session.wait_for_block(status["next_epoch_start_block"] + 1)


async def test_before_there_is_a_wallet_on_a_subnet_that_was_never_started(tmp_path: Path) -> None:
    async with devnet().running() as node:
        found = troubles(await diagnose(settings(tmp_path, node, netuid=2), Role.MINER))
        assert {"no_wallet", "not_started", "no_run", "immunity_short", "not_reachable"} <= set(found)
        assert "not_registered" not in found
        assert found["no_wallet"].remedy.startswith("Create one with: btcli wallet create")
        owner = troubles(await diagnose(settings(tmp_path, node, netuid=2), Role.OWNER))
        assert "btcli tx start-call --netuid 2" in owner["not_started"].remedy
        nowhere = troubles(await diagnose(settings(tmp_path, node, netuid=9), Role.MINER))
        assert "no_subnet" in nowhere
        unnamed = troubles(await diagnose(settings(tmp_path, node, netuid=0), Role.MINER))
        assert "no_netuid" in unnamed
    unreachable = troubles(await diagnose(settings(tmp_path, node), Role.VALIDATOR))
    assert "chain_unreachable" in unreachable


async def test_from_a_new_wallet_to_weights_that_burn_everything(tmp_path: Path) -> None:
    hotkey = make_wallet(tmp_path)
    async with devnet().running() as node:
        config = settings(tmp_path, node)
        chain = BittensorChain(node.url, 1, bt.Wallet("default", "default", config.node.wallet_path), version_key=1)
        accounts = ChainAccounts(chain)

        async def found(role: Role) -> dict[str, Finding]:
            return troubles(await diagnose(config, role))

        stranger = await found(Role.MINER)
        assert {"not_registered", "balance"} <= set(stranger)
        assert f"-w default -H default -n {node.url}" in stranger["not_registered"].remedy
        await accounts.burned_register(BANK, hotkey)
        registered = await found(Role.VALIDATOR)
        assert "no_permit" in registered and "not_registered" not in registered

        await accounts.add_stake(BANK, hotkey, 1_000.0)
        await after_epoch(chain)
        assert not {"no_permit", "permit_without_stake"} & set(await found(Role.VALIDATOR))
        await after_epoch(chain)
        await root_sets(chain, node, "StakeThreshold", 10**15)
        assert "permit_without_stake" in await found(Role.VALIDATOR)
        await root_sets(chain, node, "StakeThreshold", 0)
        await after_epoch(chain)

        await chain.set_weights({Hotkey(ALICE.ss58_address): 1.0})
        await after_epoch(chain)
        assert "burns_all" in await found(Role.MINER)
        await root_sets(chain, node, "AdminFreezeWindow", TEMPO)
        assert "knobs_frozen" in await found(Role.OWNER)
        await root_sets(chain, node, "AdminFreezeWindow", 0)
        assert {"not_owner"} <= set(await found(Role.OWNER)) and "knobs_frozen" not in await found(Role.OWNER)

        alerts = WeightsAlerts(config.node.lock_path / "chain", hotkey, 1)
        alerts.put(Refused("NotEnoughStakeToSetWeights", "weights need 5 staked on the hotkey, there are 1"))
        told = (await found(Role.VALIDATOR))["weights_not_set"]
        assert "weights need 5" in told.text and "btcli stake add --netuid 1" in told.remedy
        await chain.close()


async def test_a_run_whose_orchestrator_is_away_or_newer(tmp_path: Path) -> None:
    async with devnet().running() as node:
        config = settings(tmp_path, node)
        chain = BittensorChain(node.url, 1, ALICE)
        run = wire.Discovery(u=f"http://127.0.0.1:{free_port()}", r="run-1", v=wire.PROTOCOL_VERSION, c="0" * 64)
        await chain.commit(wire.encode(run))
        assert "orchestrator_silent" in troubles(await diagnose(config, Role.MINER))
        await chain.commit(wire.encode(msgspec.structs.replace(run, v=wire.PROTOCOL_VERSION + 1)))
        found = troubles(await diagnose(config, Role.MINER))["version_mismatch"]
        assert found.remedy.startswith("Update this software")
        await chain.close()


def test_what_is_shown_ends_with_a_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = [Finding("a", Level.PROBLEM, "it is [broken]", "mend it"), Finding("b", Level.OK, "well")]
    show(found, Role.MINER, Console(width=40))
    shown = capsys.readouterr().out
    assert "PROBLEM  it is [broken]\n          -> mend it\n      ok  well\n\nto be done first: 1" in shown
    show(found[1:], Role.OWNER, Console())
    assert "nothing stands in the way of: strata orchestrator" in capsys.readouterr().out
    with pytest.raises(InvalidConfig, match="--role must be one of miner, validator, owner, got 'boss'"):
        run_doctor(NodeConfig(), "boss")
    nobody = NodeConfig(node=NodeSettings(wallet_path=str(tmp_path), data_dir=str(tmp_path), num_threads=1))
    assert run_doctor(nobody, "owner") == 1

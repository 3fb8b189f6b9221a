"""`strata doctor`: what stands in the way of a role on this machine, and what to do about each thing. It changes nothing."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import bittensor as bt
from bittensor.keyfiles import KeyfileError
from rich.console import Console
from rich.text import Text

from incentives.config import IncentiveConfig
from neurons.chain_checks import findings as chain_findings
from neurons.chain_checks import read_facts
from neurons.discovery import find_run
from neurons.exit_codes import ExitCode
from neurons.findings import Finding, Level, Role, problems_first
from neurons.machine_checks import machine_findings, read_machine
from neurons.owner_checks import config_findings
from neurons.reach_checks import reach_findings, read_reach
from neurons.settings import NodeConfig, NodeSettings
from neurons.wallets import load_hotkey
from neurons.wiring import VERSION_KEY, endpoint_of, read_description
from subnet.adapters.chain import BittensorChain
from subnet.adapters.chain_session import ChainLimits
from subnet.adapters.http_client import open_session
from subnet.adapters.public import HttpPublic
from subnet.adapters.weights_alert import WeightsAlerts
from subnet.config import RunConfig
from subnet.errors import InvalidConfig, NotFound, StartupRefused, TransientFailure
from subnet.types import Hotkey

_CHAIN_LIMITS = ChainLimits(connect_timeout_s=15.0)
_BURNS_ALL = 0.999
_MARKS = {Level.PROBLEM: ("PROBLEM", "bold red"), Level.WARNING: ("warning", "yellow"), Level.OK: ("ok", "green")}
_START = {Role.MINER: "strata miner", Role.VALIDATOR: "strata validator", Role.OWNER: "strata orchestrator"}


@dataclass(frozen=True, slots=True)
class _Keys:
    """Addresses of the wallet, as far as they can be had without a password."""

    hotkey: Hotkey | None
    coldkey: str | None


@dataclass(frozen=True, slots=True)
class _Run:
    """What the run's orchestrator serves, where there is one that answers."""

    url: str
    config: RunConfig
    incentives: IncentiveConfig


def run_doctor(config: NodeConfig, role: str) -> int:
    """Print what was found; returns the exit code: 0 when nothing has to be done first."""
    if role not in set(Role):
        raise InvalidConfig(f"--role must be one of {', '.join(Role)}, got {role!r}")
    found = asyncio.run(diagnose(config, Role(role)))
    show(found, Role(role), Console())
    return ExitCode.CHECK_FAILED if any(finding.level is Level.PROBLEM for finding in found) else ExitCode.OK


def show(found: Iterable[Finding], role: Role, console: Console) -> None:
    """One line for each finding, and below it what to do."""
    num_problems = 0
    for finding in found:
        mark, style = _MARKS[finding.level]
        console.print(Text(f"{mark:>8}  ", style).append(finding.text, "default"), soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"{'':>8}  -> {finding.remedy}", "bold"), soft_wrap=True)
        num_problems += finding.level is Level.PROBLEM
    verdict = (
        f"nothing stands in the way of: {_START[role]}" if not num_problems else f"to be done first: {num_problems}"
    )
    console.print(f"\n{verdict}", soft_wrap=True)


async def diagnose(config: NodeConfig, role: Role) -> list[Finding]:
    """Everything that was found, problems first."""
    keys, found = _about_wallet(config.node)
    run, of_chain = await _about_chain(config, role, keys)
    found += of_chain
    shape = config.run if run is None else run.config
    machine = await asyncio.to_thread(read_machine, config.node, role)
    found += machine_findings(machine, shape, config.node, role)
    if role is Role.OWNER:
        found += config_findings(shape)
    if role is not Role.VALIDATOR:
        url = None if run is None else run.url
        found += reach_findings(
            await read_reach(config.node, endpoint_of(config, config.node.port), orchestrator_url=url)
        )
    return problems_first(found)


def _about_wallet(node: NodeSettings) -> tuple[_Keys, list[Finding]]:
    wallet = bt.Wallet(node.wallet, node.hotkey, node.wallet_path)
    try:
        hotkey = str(load_hotkey(node, is_interactive=False).ss58_address)
    except StartupRefused as error:
        text, _, remedy = str(error).partition("\n")
        code = "hotkey_encrypted" if error.exit_code == ExitCode.HOTKEY_ENCRYPTED else "no_wallet"
        keys = _Keys(_public(wallet, "hotkeypub"), _public(wallet, "coldkeypub"))
        return keys, [Finding(code, Level.PROBLEM, text, remedy)]
    text = f"wallet {node.wallet!r} has hotkey {node.hotkey!r}: {hotkey}"
    return _Keys(Hotkey(hotkey), _public(wallet, "coldkeypub")), [Finding("wallet", Level.OK, text)]


def _public(wallet: bt.Wallet, which: str) -> Hotkey | None:
    """An address from its public file, None when there is none."""
    try:
        is_there = Path(getattr(wallet, f"{which}_file").path).is_file()
        return Hotkey(getattr(wallet, which).ss58_address) if is_there else None
    except (KeyfileError, OSError, ValueError):
        return None


async def _about_chain(config: NodeConfig, role: Role, keys: _Keys) -> tuple[_Run | None, list[Finding]]:
    node = config.node
    if node.netuid == 0:
        remedy = "name the subnet with --netuid, to hear about it too; the list: btcli subnets list"
        return None, [
            Finding("no_netuid", Level.WARNING, "no subnet was named: nothing was asked of the chain", remedy)
        ]
    chain = BittensorChain(node.endpoint, node.netuid, limits=_CHAIN_LIMITS)
    try:
        facts = await read_facts(chain, keys.hotkey, coldkey=keys.coldkey, now_s=time.time(), flags=_btcli_flags(node))
        found = chain_findings(facts, role, version_key=VERSION_KEY)
        text = f"{node.endpoint} answers; newest block {facts.metagraph.at_block}"
        found.append(Finding("chain", Level.OK, text))
        run, of_run = await _about_run(chain, node.netuid, has_run=facts.has_run)
    except NotFound as error:
        return None, [
            Finding("no_subnet", Level.PROBLEM, str(error), "check --netuid and --network: btcli subnets list")
        ]
    except TransientFailure as error:
        remedy = "check the connection, --network and --subtensor.chain_endpoint"
        return None, [Finding("chain_unreachable", Level.PROBLEM, f"the chain cannot be reached: {error}", remedy)]
    finally:
        await chain.close()
    if role is Role.VALIDATOR and keys.hotkey is not None:
        of_run += _about_weights(node, keys.hotkey)
    return run, found + of_run


def _btcli_flags(node: NodeSettings) -> str:
    network = "" if node.endpoint == "finney" else f" -n {node.endpoint}"
    return f" -w {node.wallet} -H {node.hotkey}{network}"


async def _about_run(chain: BittensorChain, netuid: int, *, has_run: bool) -> tuple[_Run | None, list[Finding]]:
    """Whether the run's orchestrator answers, speaks our protocol and serves what its owner committed."""
    if not has_run:
        return None, []
    try:
        discovery, _ = await find_run(chain, netuid)
        async with open_session() as session:
            run, incentives, _ = await read_description(HttpPublic(session, discovery.u), discovery)
    except StartupRefused as error:
        text, _, remedy = str(error).partition("\n")
        code = {
            ExitCode.VERSION_MISMATCH: "version_mismatch",
            ExitCode.UNAVAILABLE: "orchestrator_silent",
        }.get(ExitCode(error.exit_code), "no_run")
        return None, [Finding(code, Level.PROBLEM, text, remedy or "ask the subnet's owner")]
    found = [
        Finding("run", Level.OK, f"run {discovery.r} answers at {discovery.u}, same protocol, as committed on chain")
    ]
    if incentives.burn_share >= _BURNS_ALL:
        text = f"you will earn 0 because this run gives {incentives.burn_share:.1%} of all weight to the owner's hotkey"
        remedy = "nothing on this machine changes that; its owner lowers incentives.burn_share"
        found.append(Finding("burns_all", Level.PROBLEM, text, remedy))
    return _Run(discovery.u, run, incentives), found


def _about_weights(node: NodeSettings, hotkey: Hotkey) -> list[Finding]:
    """What a validator of this machine last failed at."""
    alert = WeightsAlerts(node.lock_path / "chain", hotkey, node.netuid).current
    if alert is None:
        return []
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alert.since_s))
    return [
        Finding("weights_not_set", Level.PROBLEM, f"weights are not set since {since}: {alert.reason}", alert.remedy)
    ]

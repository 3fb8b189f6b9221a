"""`strata localnet --virtual`: the same roles in one process and in virtual time; same seed, same digest."""

import time
from dataclasses import replace

import torch
from rich.console import Group
from rich.table import Table

from neurons.local.report import console
from neurons.roles.ports import MinerPorts
from neurons.scoring import scored
from neurons.settings import LocalnetOptions, NodeConfig
from neurons.virtual import VirtualPlan, VirtualResult, run_virtual
from subnet.adapters.corpus import make_corpus
from subnet.config import RunConfig, RunKind
from subnet.sim.network import NatPeers
from subnet.sim.strategies import make_worker
from subnet.training.pipeline import StageWorker
from subnet.types import NumericMode, StageIndex


class Cheat:
    """Makes the worker of a dishonest miner."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, config: RunConfig, stage: StageIndex, mode: NumericMode) -> StageWorker:
        """One worker of this kind."""
        return make_worker(self._kind, config, stage, mode)


def behind_nat(ports: MinerPorts) -> MinerPorts:
    """The ports of a miner that nobody can dial."""
    return replace(ports, peers=NatPeers(ports.peers))


def run_simulated(config: NodeConfig, options: LocalnetOptions) -> int:
    """A whole run, its invariants checked on the way; returns the exit code. Raises InvariantBroken when one does not hold."""
    torch.set_num_threads(config.node.num_threads or 1)
    began = time.monotonic()
    plan = VirtualPlan(
        seed=options.seed,
        num_miners=options.num_miners,
        num_validators=options.num_validators,
        workers={f"m{number}": Cheat(kind) for number, kind in options.cheat_of.items()},
        miner_ports={f"m{number}": behind_nat for number in options.unreachable},
    )
    result = run_virtual(config.run, config.incentives, make_corpus(config.run), plan)
    out = console()
    out.print(Group(_losses(result, config.run), _miners(result, options)))
    entries = result.record.entries
    virtual_s = entries[-1].at_s - entries[0].at_s
    out.print(
        f"{virtual_s:.0f} s of virtual time in {time.monotonic() - began:.0f} s; {len(entries)} events; all invariants held"
    )
    out.print(f"seed {options.seed}  digest {result.digest}")
    return 0


def _losses(result: VirtualResult, run: RunConfig) -> Table:
    without = "first stage alone" if run.kind is RunKind.BLOCKTRAIN else "wires zeroed"
    table = Table("epoch", "held-out loss", without, box=None, pad_edge=False)
    for epoch, account in sorted(result.record.accounts.epochs.items()):
        if account.evaluation is not None:
            found = account.evaluation
            table.add_row(str(epoch), f"{found.loss:.3f}", f"{found.loss_wires_zeroed:.3f}")
    return table


def _miners(result: VirtualResult, options: LocalnetOptions) -> Table:
    table = Table("miner", "units", "score", "weight", "why", box=None, pad_edge=False)
    scores = scored(result.record)
    accounts = result.record.accounts.epochs.values()
    for number in range(1, options.num_miners + 1):
        name = f"m{number}"
        hotkey = result.hotkeys[name]
        units = sum(len(account.units.get(hotkey, {})) for account in accounts)
        score = scores.get(hotkey)
        cheat = f" ({options.cheat_of[number]})" if number in options.cheat_of else ""
        weight = f"{result.expected.get(hotkey, 0.0):.2%}"
        table.add_row(
            name + cheat,
            str(units),
            f"{score.score:.1f}" if score else "0",
            weight,
            score.reason if score else "never worked",
        )
    return table

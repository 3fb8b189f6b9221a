"""`strata yuma` and `strata chain`: what weights pay, and what a subnet looks like now."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from neurons.discovery import read_metagraph
from neurons.exit_codes import ExitCode
from neurons.settings import NodeSettings
from subnet import yuma
from subnet.adapters.chain import BittensorChain
from subnet.errors import InvalidConfig
from subnet.types import Hotkey, Metagraph, Neuron, Uid

_RAO = 1e9
_WIDE = 140
_PIPE_WIDTH = 200
_SHORT_HOTKEY = 10
_SVG_WIDTH, _SVG_HEIGHT, _SVG_MARGIN = 720, 360, 48
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `strata yuma` reads: stake by name, and each validator's weights by name, on any scale.

    `weights` may be a list, one entry for each epoch; the last one holds on. `burn` names the owner's key.
    """

    stake: dict[str, float]
    weights: dict[str, dict[str, float]] | list[dict[str, dict[str, float]]]
    tempo: int = 360
    kappa: float = 32_767 / yuma.U16_MAX
    bonds_moving_average: float = 0.9
    bonds_penalty: float = 1.0
    max_validators: int = 128
    burn: str | None = None


@dataclass(frozen=True, slots=True)
class EpochPay:
    """Alpha that each key gets in one epoch, as validator and as miner."""

    dividends: Mapping[str, float]
    incentive: Mapping[str, float]


def read_scenario(path: Path) -> Scenario:
    """A scenario from a JSON file. Raises InvalidConfig naming what is wrong."""
    try:
        scenario = msgspec.json.decode(path.read_bytes(), type=Scenario)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise InvalidConfig(f"{path} is no scenario: {error}") from error
    _check_scenario(scenario, path)
    return scenario


def _check_scenario(scenario: Scenario, path: Path) -> None:
    if not 1 <= scenario.tempo <= 50_400:
        raise InvalidConfig(f"{path}: tempo must be in 1..50400 blocks, got {scenario.tempo}")
    for name in ("kappa", "bonds_moving_average", "bonds_penalty"):
        if not 0 <= getattr(scenario, name) <= 1:
            raise InvalidConfig(f"{path}: {name} must be in 0..1, got {getattr(scenario, name)}")
    for key, stake in scenario.stake.items():
        _check_amount(f"{path}: stake of {key}", stake)
    for rows in _weight_rows(scenario):
        for validator, row in rows.items():
            if validator not in scenario.stake:
                raise InvalidConfig(f"{path}: {validator} sets weights and has no stake; give it one, 0 if need be")
            for target, weight in row.items():
                _check_amount(f"{path}: weight of {validator} for {target}", weight)


def _check_amount(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidConfig(f"{name} must be a number of at least 0, got {value}")


def _weight_rows(scenario: Scenario) -> list[dict[str, dict[str, float]]]:
    return scenario.weights if isinstance(scenario.weights, list) else [scenario.weights]


def pay(scenario: Scenario, *, epochs: int) -> list[EpochPay]:
    """What the chain's consensus pays over some epochs, with bonds carried on."""
    rows = _weight_rows(scenario)
    targets = {target for row in rows for weights in row.values() for target in weights}
    names = sorted(scenario.stake.keys() | targets | ({scenario.burn} if scenario.burn else set()))
    uid_of = {name: uid for uid, name in enumerate(names)}
    params = yuma.YumaParams(
        kappa=scenario.kappa,
        bonds_moving_average=scenario.bonds_moving_average,
        bonds_penalty=scenario.bonds_penalty,
        max_validators=scenario.max_validators,
    )
    block = yuma.block_emission()
    emission = yuma.Emission(*(part * scenario.tempo for part in (block.owner, block.server, block.validator)))
    bonds, paid = np.zeros((len(names), len(names))), []
    for epoch in range(epochs):
        before = _subnet(scenario, rows[min(epoch, len(rows) - 1)], uid_of, bonds)
        result = yuma.yuma_epoch(before, params)
        bonds = result.bonds_nn
        payouts = dict(zip(names, yuma.payouts(result, emission), strict=True))
        paid.append(
            EpochPay(
                dividends={name: dividend / _RAO for name, (_, dividend) in payouts.items()},
                incentive={
                    name: 0.0 if name == scenario.burn else incentive / _RAO for name, (incentive, _) in payouts.items()
                },
            )
        )
    return paid


def _subnet(
    scenario: Scenario, rows: Mapping[str, Mapping[str, float]], uid_of: Mapping[str, int], bonds: yuma.Floats
) -> yuma.YumaInput:
    num_keys = len(uid_of)
    weights = np.zeros((num_keys, num_keys))
    for validator, row in rows.items():
        for target, weight in row.items():
            weights[uid_of[validator], uid_of[target]] = weight
    stake = np.array([scenario.stake.get(name, 0.0) for name in uid_of])
    return yuma.YumaInput(
        stake_n=stake,
        weights_nn=weights,
        bonds_nn=bonds,
        permits_n=stake > 0,
        active_n=np.ones(num_keys, dtype=bool),
        last_update_n=np.ones(num_keys, dtype=np.int64),
        registered_n=np.zeros(num_keys, dtype=np.int64),
        owner_uid=None if scenario.burn is None else uid_of[scenario.burn],
    )


def pay_table(paid: Sequence[EpochPay], scenario: Scenario) -> Table:
    """First and last epoch and the sum, for each key."""
    table = Table(title=f"alpha over {len(paid)} epochs of {scenario.tempo} blocks")
    for column in ("key", "stake", "as validator, last", "as miner, last", "all epochs", "share"):
        table.add_column(column, justify="left" if column == "key" else "right")
    totals = {
        name: math.fsum(epoch.dividends[name] + epoch.incentive[name] for epoch in paid) for name in paid[-1].dividends
    }
    everything = math.fsum(totals.values())
    for name, total in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
        label = f"{name} (burned)" if name == scenario.burn else name
        share = f"{total / everything:.2%}" if everything else "-"
        stake = f"{scenario.stake.get(name, 0.0):,.2f}"
        last = f"{paid[-1].dividends[name]:,.4f}", f"{paid[-1].incentive[name]:,.4f}"
        table.add_row(label, stake, *last, f"{total:,.4f}", share)
    return table


def pay_plot(paid: Sequence[EpochPay]) -> str:
    """An SVG of what each key is paid, epoch by epoch."""
    names = sorted(paid[0].dividends)
    series = {name: [epoch.dividends[name] + epoch.incentive[name] for epoch in paid] for name in names}
    top = max((max(values) for values in series.values()), default=0.0) or 1.0
    wide, high = _SVG_WIDTH - 2 * _SVG_MARGIN, _SVG_HEIGHT - 2 * _SVG_MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SVG_WIDTH} {_SVG_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_SVG_WIDTH}" height="{_SVG_HEIGHT}" fill="white"/>',
        f'<text x="{_SVG_MARGIN}" y="20" font-size="12">alpha for each epoch, up to {top:,.2f}</text>',
        f'<path d="M{_SVG_MARGIN} {_SVG_MARGIN}v{high}h{wide}" fill="none" stroke="black"/>',
    ]
    for index, name in enumerate(names):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(
            f"{_SVG_MARGIN + wide * epoch / max(1, len(paid) - 1):.1f},{_SVG_MARGIN + high * (1 - value / top):.1f}"
            for epoch, value in enumerate(series[name])
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _SVG_MARGIN + 14 * index
        label = name.replace("&", "&amp;").replace("<", "&lt;")
        lines.append(f'<text x="{_SVG_WIDTH - 120}" y="{y}" font-size="11" fill="{colour}">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def metagraph_table(metagraph: Metagraph, *, width: int) -> Table:
    """Every neuron: who it is, what it earns, when it last set weights. A narrow terminal gets the hotkeys' beginnings."""
    title = f"netuid {metagraph.netuid} at block {metagraph.at_block}, tempo {metagraph.tempo}; * owner"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("uid", "hotkey", "stake", "permit", "incentive", "dividends", "emission", "set at", "endpoint"):
        is_text = column in ("hotkey", "endpoint")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for neuron in metagraph.neurons:
        mark = "*" if neuron.hotkey == metagraph.owner_hotkey else ""
        hotkey = neuron.hotkey if width >= _WIDE else neuron.hotkey[:_SHORT_HOTKEY]
        table.add_row(
            f"{neuron.uid}{mark}",
            hotkey,
            f"{neuron.stake:,.3f}",
            "yes" if neuron.validator_permit else "",
            f"{neuron.incentive:.4f}",
            f"{neuron.dividends:.4f}",
            f"{neuron.emission:,.4f}",
            str(neuron.last_update_block) if neuron.last_update_block > neuron.registered_at_block else "never",
            _endpoint(neuron),
        )
    return table


def _endpoint(neuron: Neuron) -> str:
    return "" if neuron.endpoint is None else f"{neuron.endpoint.host}:{neuron.endpoint.port}"


def weights_table(weights: Mapping[Hotkey, Mapping[Uid, int]], metagraph: Metagraph) -> Table:
    """Who gives how much to whom, as shares of each validator's weights, and since when."""
    table = Table("validator", "set at block", "weights", title="weights, as shares of each validator's")
    for hotkey, row in weights.items():
        total = sum(row.values())
        neuron = metagraph.by_hotkey()[hotkey]
        shares = ", ".join(f"{target}: {value / total:.4f}" for target, value in row.items())
        table.add_row(str(neuron.uid), str(neuron.last_update_block), shares)
    return table


async def _show_subnet(node: NodeSettings, console: Console) -> None:
    chain = BittensorChain(node.endpoint, node.netuid)
    try:
        metagraph = await read_metagraph(chain, node.netuid)
        knobs = await chain.hyperparameters()
        validators = [neuron.hotkey for neuron in metagraph.neurons if neuron.validator_permit]
        weights = {hotkey: await chain.weights(hotkey) for hotkey in validators}
    finally:
        await chain.close()
    console.print(metagraph_table(metagraph, width=console.width))
    posted = {hotkey: row for hotkey, row in weights.items() if row}
    console.print(weights_table(posted, metagraph) if posted else "no validator has weights on chain")
    table = Table("hyperparameter", "value", title="hyperparameters (raw)")
    for name, value in sorted(knobs.items()):
        table.add_row(name, str(value))
    console.print(table)


def run_yuma(path: str, epochs: int, plot: str | None) -> int:
    """Print what a scenario pays; returns the exit code."""
    if not 1 <= epochs <= 10_000:
        raise InvalidConfig(f"--epochs must be in 1..10000, got {epochs}")
    scenario = read_scenario(Path(path))
    paid = pay(scenario, epochs=epochs)
    console = Console()
    console.print(pay_table(paid, scenario))
    if plot is not None:
        Path(plot).write_text(pay_plot(paid))
        console.print(f"plot written to {plot}")
    return ExitCode.OK


def run_chain(node: NodeSettings) -> int:
    """Print a subnet; returns the exit code. Raises StartupRefused: no netuid said, no such netuid, chain out of reach."""
    console = Console()
    asyncio.run(_show_subnet(node, console if console.is_terminal else Console(width=_PIPE_WIDTH)))
    return ExitCode.OK

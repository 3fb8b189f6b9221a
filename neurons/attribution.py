"""`strata clasp`: what each miner adds to the loss of its samples, from the record alone (papers.md A7, trust.md 4)."""

import asyncio
import math

import numpy as np
from rich.console import Console
from rich.table import Table

from incentives.config import ClaspConfig
from incentives.flags import flags, limits, stage_test
from incentives.power import samples_to_find
from neurons.exit_codes import ExitCode
from neurons.flagging import Window, open_window
from neurons.local.report import console
from neurons.plots import MinerLoss, miner_losses
from neurons.sources import open_record, read_segments
from subnet.types import Epoch, Hotkey, StageIndex
from subnet.types import Record as Value


class MinerEffect(Value, frozen=True):
    """One miner of one stage. `mean_loss` is the paper's estimator; `effect` is against the median of the others, nats a token.

    `z` above `limit` is a flag, unless a single miner of the last stage is all that says so; NaN where nobody is to compare with.
    """

    hotkey: Hotkey
    stage: StageIndex
    num_samples: int
    mean_loss: float
    effect: float
    standard_error: float
    z: float
    limit: float
    is_flagged: bool


def effects(window: Window, config: ClaspConfig) -> list[MinerEffect]:
    """Every miner that worked in the window, in order of stage and hotkey."""
    fit, found = window.attribution.fit, []
    flagged = {(flag.stage, flag.hotkey) for flag in flags(window.attribution, window.stages, config)}
    for stage, hotkeys in enumerate(window.stages):
        test = stage_test(window.attribution, stage)
        limits_m = limits(test, config, is_last=stage == len(window.stages) - 1)
        rows = fit.rows(stage)
        for at, hotkey in enumerate(hotkeys):
            found.append(
                MinerEffect(
                    hotkey=hotkey,
                    stage=StageIndex(stage),
                    num_samples=int(fit.counts_p[rows][at]),
                    mean_loss=float(fit.means_p[rows][at]),
                    effect=float(test.effects_m[at]),
                    standard_error=float(test.errors_m[at]),
                    z=float(test.z_m[at]),
                    limit=float(limits_m[at]),
                    is_flagged=(StageIndex(stage), hotkey) in flagged,
                )
            )
    return found


def samples_for(miners: list[MinerEffect], num_stages: int, config: ClaspConfig) -> float:
    """Samples of the run until one look finds the harm `config.effect` in this stage with 90 %; infinite for a lone miner.

    The noise of a sample is taken from the errors: error^2 = sigma^2 * M^2 / (T(M-1)) where work is spread evenly.
    """
    if len(miners) < 2:
        return math.inf
    total, count = sum(one.num_samples for one in miners), len(miners)
    variance = float(np.median([one.standard_error**2 for one in miners]))
    sigma = math.sqrt(variance * total * (count - 1)) / count
    return samples_to_find(sigma, config.effect, count, num_stages=num_stages, alpha=config.alpha)


def _show(miners: list[MinerEffect], num_stages: int, config: ClaspConfig, out: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"stage {miners[0].stage}", no_wrap=True)
    for column in ("samples", "mean loss", "effect", "error", "z", "limit"):
        table.add_column(column, justify="right")
    for one in miners:
        cells = [f"{one.effect:+.4f}", f"{one.standard_error:.4f}", f"{one.z:+.1f}", f"{one.limit:.1f}"]
        table.add_row(
            one.hotkey[:12],
            str(one.num_samples),
            f"{one.mean_loss:.4f}",
            *("-" if math.isnan(one.z) else cell for cell in cells),
            style="bold red" if one.is_flagged else "",
        )
    out.print(table)
    needed = samples_for(miners, num_stages, config)
    if math.isfinite(needed):
        out.print(
            f"  one look finds a harm of {config.effect:g} nats in 90 % of runs with {needed:.0f} samples", markup=False
        )
    out.print()


def _draw(miners: list[MinerEffect], title: str, path: str) -> None:
    rows = [
        MinerLoss(
            stage=one.stage,
            mean=one.mean_loss,
            effect=one.effect,
            error=one.standard_error,
            is_flagged=one.is_flagged,
        )
        for one in miners
    ]
    miner_losses([(title, rows)], path)


def run_clasp(target: str, epoch: int | None = None, png: str | None = None) -> int:
    """Print the effects of a window; returns the exit code. Raises StartupRefused."""
    record, out = open_record(asyncio.run(read_segments(target))), console()
    published = record.accounts.published()
    config = record.incentives().clasp
    newest = Epoch(epoch) if epoch is not None else published[-1].epoch if published else Epoch(-1)
    window = open_window(record.accounts, newest, config)
    if window is None:
        nothing = f"no loss that miners share is on record up to epoch {newest}"
        out.print(nothing if published else "no epoch is published yet", markup=False)
        return ExitCode.OK
    fit, miners = window.attribution.fit, effects(window, config)
    for stage in range(len(window.stages)):
        _show([one for one in miners if one.stage == stage], len(window.stages), config, out)
    title = f"epochs {window.epochs[0]} to {window.epochs[-1]}, {fit.num_samples} samples"
    refused = "" if fit.condition <= config.max_condition else f", over {config.max_condition:g}: nobody is flagged"
    out.print(f"{title}, condition of the pathways {fit.condition:.1f}{refused}", markup=False)
    named = [one.hotkey for one in miners if one.is_flagged]
    out.print(f"flagged: {', '.join(named) or 'none'}", markup=False)
    if png is not None:
        _draw(miners, title, png)
        out.print(f"plot written to {png}", markup=False)
    return ExitCode.OK

"""`strata agreement`: how often the two copies of each shard were equal, by pair of miners (papers.md A6).

What the matrix cannot show is computed beside it: colluders who corrupt only the shards they share never disagree.
"""

import asyncio
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from incentives.economy import epochs_to_detect
from neurons.exit_codes import ExitCode
from neurons.local.report import console
from neurons.plots import heat_maps
from neurons.sources import open_record, read_segments
from subnet.merging.agreement import AgreementMatrix, Comparison, agreement_matrix
from subnet.merging.audits import colluding_share, detection_probability
from subnet.merging.schedule import p_valid
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.ledger import ShardMerged
from subnet.types import Epoch, StageIndex
from subnet.types import Record as Value

_PAIR = 2
_MAX_COLUMNS = 16
"""Miners up to which the whole matrix is printed; more go into the picture."""


class StageAgreement(Value, frozen=True):
    """One stage. `num_missing` shards had a copy that never came, which is no disagreement; `num_refereed` were recomputed.

    `num_miners` reduced in its newest epoch.
    """

    stage: StageIndex
    num_miners: int
    num_shards: int
    num_missing: int
    num_refereed: int


def comparisons(shards: Iterable[ShardMerged]) -> list[Comparison]:
    """Shards of which two copies came and that hold anything: an empty shard is equal whoever copies it."""
    return [
        Comparison(pair=(shard.reducers[0], shard.reducers[1]), is_equal=shard.reported[0] == shard.reported[1])
        for shard in shards
        if len(shard.reducers) == _PAIR and all(shard.reported) and shard.accepted.size_bytes
    ]


def stage_agreements(accounts: Accounts, *, epoch: Epoch | None = None) -> list[tuple[StageAgreement, AgreementMatrix]]:
    """Matrix of each stage over all epochs, or over one."""
    shards = [
        shard for at, account in sorted(accounts.epochs.items()) if epoch in (None, at) for shard in account.shards
    ]
    found = []
    for stage in sorted({shard.stage for shard in shards}):
        own = [shard for shard in shards if shard.stage == stage]
        summary = StageAgreement(
            stage=stage,
            num_miners=len({reducer for shard in own if shard.epoch == own[-1].epoch for reducer in shard.reducers}),
            num_shards=len(own),
            num_missing=sum(not all(shard.reported) for shard in own),
            num_refereed=sum(shard.is_refereed for shard in own),
        )
        found.append((summary, agreement_matrix(comparisons(own))))
    return found


class Collusion(Value, frozen=True):
    """`num_colluders` of a stage's miners who corrupt every shard they share, and how soon audits of agreeing shards tell."""

    num_colluders: int
    num_shards: int
    share: float
    found: float
    """Chance that an epoch's audits recompute at least one of them."""
    epochs: float
    """Until they are found with 95 %."""


def collusions(num_miners: int, audit_fraction: float) -> list[Collusion]:
    """The fewest that share a shard, and a third of the stage."""
    found = []
    for count in sorted({_PAIR, num_miners // 3} - {0, 1}) if num_miners >= _PAIR else ():
        num_shards = count * (count - 1) // 2
        chance = detection_probability(num_shards, audit_fraction)
        found.append(
            Collusion(
                num_colluders=count,
                num_shards=num_shards,
                share=colluding_share(num_miners, count),
                found=chance,
                epochs=epochs_to_detect(chance, 1.0),
            )
        )
    return found


def _show_odds(num_miners: int, audit_fraction: float, out: Console) -> None:
    """What the stage can lose and what its colluders can hide, by its size."""
    num_failed = max(_PAIR, num_miners // 5)
    if num_miners > _PAIR:
        kept = p_valid(num_miners, num_failed)
        out.print(f"  if {num_failed} of {num_miners} miners fail, {kept:.1%} of shards keep a reducer", markup=False)
    for one in collusions(num_miners, audit_fraction):
        odds = f"{one.found:.1%} an epoch, 95 % within {one.epochs:.0f}"
        out.print(
            f"  {one.num_colluders} colluders share {one.num_shards} of the shards ({one.share:.1%}) and agree there; "
            f"recomputing {audit_fraction:.0%} of agreeing shards finds them with {odds}",
            markup=False,
            soft_wrap=True,
        )


def _show(summary: StageAgreement, matrix: AgreementMatrix, out: Console) -> None:
    outside = matrix.out_of_consensus()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"stage {summary.stage}", no_wrap=True)
    table.add_column("equal", justify="right")
    table.add_column("differs with", justify="right")
    columns = matrix.hotkeys if len(matrix.hotkeys) <= _MAX_COLUMNS else ()
    for other in columns:
        table.add_column(other[:6], justify="right")
    for hotkey, row in zip(matrix.hotkeys, matrix.rows(), strict=True):
        cells = [matrix.cells[pair] for pair in matrix.cells if hotkey in pair]
        equal, compared = sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)
        shown = ["-" if value is None else f"{value:.2f}" for value in row] if columns else []
        style = "bold red" if hotkey in outside else ""
        table.add_row(hotkey[:12], f"{equal}/{compared}", f"{matrix.disagreeing(hotkey):.0%}", *shown, style=style)
    out.print(table)
    out.print(
        f"  {summary.num_shards} shards: {summary.num_refereed} recomputed by the referee, "
        f"{summary.num_missing} with a copy missing",
        markup=False,
    )
    out.print(f"  out of consensus: {', '.join(outside) or 'none'}", markup=False)


def run_agreement(target: str, epoch: int | None = None, png: str | None = None) -> int:
    """Print the matrix of each stage; returns the exit code. Raises StartupRefused."""
    record = open_record(asyncio.run(read_segments(target)))
    found = stage_agreements(record.accounts, epoch=None if epoch is None else Epoch(epoch))
    out = console()
    if not found:
        out.print("nothing was merged yet" if epoch is None else f"nothing was merged in epoch {epoch}", markup=False)
    for summary, matrix in found:
        _show(summary, matrix, out)
        _show_odds(summary.num_miners, record.run_config().merge.audit_fraction, out)
        out.print()
    if png is not None:
        titles = {f"stage {summary.stage}": matrix for summary, matrix in found if matrix.hotkeys}
        heat_maps(
            {title: matrix.rows() for title, matrix in titles.items()},
            {title: matrix.hotkeys for title, matrix in titles.items()},
            png,
        )
        out.print(f"heat map written to {png}", markup=False)
    return ExitCode.OK

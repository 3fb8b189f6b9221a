"""`strata agreement`: how often the two copies of each shard were equal, by pair of miners (papers.md A6)."""

import asyncio
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from neurons.exit_codes import ExitCode
from neurons.local.report import console
from neurons.plots import heat_maps
from neurons.sources import open_record, read_segments
from subnet.merging.agreement import AgreementMatrix, Comparison, agreement_matrix
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.ledger import ShardMerged
from subnet.types import Epoch, StageIndex
from subnet.types import Record as Value

_PAIR = 2
_MAX_COLUMNS = 16
"""Miners up to which the whole matrix is printed; more go into the picture."""


class StageAgreement(Value, frozen=True):
    """One stage. `num_missing` shards had a copy that never came, which is no disagreement; `num_refereed` were recomputed."""

    stage: StageIndex
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
            num_shards=len(own),
            num_missing=sum(not all(shard.reported) for shard in own),
            num_refereed=sum(shard.is_refereed for shard in own),
        )
        found.append((summary, agreement_matrix(comparisons(own))))
    return found


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
    named = ", ".join(outside) or "none"
    out.print(f"  out of consensus: {named}\n", markup=False)


def run_agreement(target: str, epoch: int | None = None, png: str | None = None) -> int:
    """Print the matrix of each stage; returns the exit code. Raises StartupRefused."""
    record = open_record(asyncio.run(read_segments(target)))
    found = stage_agreements(record.accounts, epoch=None if epoch is None else Epoch(epoch))
    out = console()
    if not found:
        out.print("nothing was merged yet" if epoch is None else f"nothing was merged in epoch {epoch}", markup=False)
    for summary, matrix in found:
        _show(summary, matrix, out)
    if png is not None:
        titles = {f"stage {summary.stage}": matrix for summary, matrix in found if matrix.hotkeys}
        heat_maps(
            {title: matrix.rows() for title, matrix in titles.items()},
            {title: matrix.hotkeys for title, matrix in titles.items()},
            png,
        )
        out.print(f"heat map written to {png}", markup=False)
    return ExitCode.OK

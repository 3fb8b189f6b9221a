"""The one screen at the end of a local subnet: what was learned, who did what and got what, and whether all of it holds."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from neurons.checks import Finding
from neurons.local.apart import round_rows
from neurons.local.evidence import (
    CheatRow,
    Evidence,
    LossRow,
    MinerRow,
    PlaneBytes,
    Report,
    RoundRow,
    ValidatorRow,
    cheat_rows,
    loss_rows,
    miner_rows,
    plane_bytes,
    validator_rows,
)
from subnet.config import WIRE_COMPRESSION

_PLAIN_WIDTH = 150
_WRAPPED = ("why", "detail", "invariant", "weights on chain, u16, read back by the SDK")
_WORDS = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("n/a", "yellow")}


def make_report(evidence: Evidence, findings: tuple[Finding, ...], *, took_s: float) -> Report:
    """Everything as values."""
    created = evidence.history.record.accounts.created
    reference = evidence.reference
    return Report(
        run_id=created.run_id if created else "",
        is_ok=all(finding.holds is not False for finding in findings),
        took_s=took_s,
        losses=loss_rows(evidence),
        unigram=evidence.unigram,
        reference_loss=reference.heldout_loss if reference else None,
        reference_samples=reference.num_samples if reference else None,
        miners=miner_rows(evidence),
        validators=validator_rows(evidence),
        bytes_by_plane=plane_bytes(evidence),
        rounds=round_rows(evidence),
        cheats=cheat_rows(evidence),
        findings=findings,
    )


def console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    out = Console(highlight=False, soft_wrap=False)
    return out if out.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def one_screen(report: Report, root: Path) -> RenderableType:
    """The report for people."""
    parts: list[RenderableType] = [
        Text(f"\nRun {report.run_id} ended after {report.took_s:.0f} s.", style="bold"),
        _losses(report.losses, report),
        *([_rounds(report.rounds)] if report.rounds else []),
        _miners(report.miners),
        _validators(report.validators),
        _bytes(report.bytes_by_plane, has_cuts=not report.rounds),
        *[_cheat(row) for row in report.cheats],
        findings_table(report.findings),
        _verdict(report),
        _next(root),
    ]
    return Group(*parts)


def _table(*columns: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column not in _WRAPPED)
    return table


def _losses(rows: Sequence[LossRow], report: Report) -> Table:
    without = "first stage alone" if report.rounds else "wires zeroed"
    table = _table("held-out loss", "epoch", "loss", "of unigram", without, left=("held-out loss",))
    for row in rows:
        share = "" if row.share is None else f"{row.share:.3f}"
        table.add_row("this subnet", str(row.epoch), f"{row.loss:.3f}", share, f"{row.loss_wires_zeroed:.3f}")
    if report.reference_loss is not None:
        share = f"{report.reference_loss / report.unigram:.3f}" if report.unigram else ""
        name = f"one process, {report.reference_samples} samples"
        table.add_row(name, "", f"{report.reference_loss:.3f}", share, "")
    if report.unigram is not None:
        table.add_row("unigram", "", f"{report.unigram:.3f}", "1.000", "")
    return table


def _rounds(rows: Sequence[RoundRow]) -> Table:
    """Mean local loss of each stage's samples and its participation, a line for each epoch."""
    stages = sorted({row.stage for row in rows})
    table = _table("round, mean local loss, participation", *(f"stage {stage}" for stage in stages))
    for epoch in sorted({row.epoch for row in rows}):
        table.add_row(f"epoch {epoch}", *(_round(row) for row in rows if row.epoch == epoch))
    return table


def _round(row: RoundRow) -> str:
    loss = "-" if row.loss is None else f"{row.loss:.3f}"
    late = f" +{row.late} late" if row.late else ""
    return f"{loss}  {row.accepted}/{row.assigned}{late}"


def _miners(rows: Sequence[MinerRow]) -> Table:
    columns = ("miner", "stage", "units", "audits", "score", "weight", "alpha", "hotkey", "why")
    table = _table(*columns, left=("miner", "hotkey", "why"))
    for row in rows:
        audits = f"{row.audits_passed} ok" + (f" {row.audits_failed} failed" if row.audits_failed else "")
        audits += f" {row.audits_open} open" if row.audits_open else ""
        restarts = f"restarted {row.restarts}x  " if row.restarts else ""
        table.add_row(
            row.name + (f" ({row.cheat})" if row.cheat else ""),
            "-" if row.stage is None else str(row.stage),
            str(row.units),
            audits,
            f"{row.score:.1f}",
            f"{row.weight:.2%}",
            f"{row.earned_alpha:.3f}",
            row.hotkey[:8],
            restarts + row.reason,
        )
    return table


def _validators(rows: Sequence[ValidatorRow]) -> Table:
    columns = ("validator", "weights on chain, u16, read back by the SDK")
    table = _table(*columns, left=columns)
    for row in rows:
        shown = " ".join(f"{name} {value}" for name, value in row.on_chain.items()) or "none"
        expected = "as the scores" if row.on_chain == row.expected else f"the scores yield {row.expected}"
        table.add_row(row.name, f"{shown}   ({expected})")
    return table


def _bytes(found: PlaneBytes, *, has_cuts: bool) -> Text:
    ratio = "" if found.worst_merge_ratio is None else f"; a miner's merge {found.worst_merge_ratio:.3f} of 4W + 2W/N"
    if not has_cuts:
        return Text(f"bytes   merges {found.merge_payload:,}{ratio}")
    sent = found.activation_payload + found.gradient_payload
    full = f" = 1/{found.full_width_fp32 / sent:.1f} of full width in fp32" if sent else ""
    return Text(
        f"bytes   activations {found.activation_payload:,}  gradients {found.gradient_payload:,}{full}"
        f" (aim 1/{WIRE_COMPRESSION})  headers {found.frame_heads:,}  in {found.passes:,} passes\n"
        f"{_detoured(found)}"
        f"        merges {found.merge_payload:,}{ratio}"
    )


def _detoured(found: PlaneBytes) -> str:
    if not found.detoured:
        return ""
    return (
        f"        {found.detoured_payload:,} of them in {found.detoured:,} passes through the store: not to be pushed\n"
    )


def _cheat(row: CheatRow) -> Text:
    ours = f"convicted for epoch {row.convicted_in_epoch}: {row.reason}" if row.reason else "not convicted"
    rule = {True: "would have passed it", False: "would have failed it too", None: "had nothing to measure"}
    cosine = "" if row.cosine is None else f" (cosine {row.cosine:.4f}, largest relD {row.rel_d:.4f})"
    return Text(
        f"cheat   {row.name} {row.kind}: {ours}; the published rule, cosine > 0.9, {rule[row.published_rule_passes]}{cosine}"
    )


def findings_table(findings: Sequence[Finding]) -> Table:
    """What was checked, one line each."""
    table = _table("", "invariant", "detail", left=("", "invariant", "detail"))
    for finding in findings:
        word, style = _WORDS[finding.holds]
        table.add_row(Text(word, style=style), finding.name, finding.detail)
    return table


def _verdict(report: Report) -> Text:
    failed = sum(finding.holds is False for finding in report.findings)
    if failed:
        return Text(f"{failed} of {len(report.findings)} do not hold", style="bold red")
    return Text("Every invariant held.", style="bold green")


def _next(root: Path) -> Text:
    """What to type, as it can be typed here: scripts/localnet runs a `strata` that no PATH may lead to."""
    strata = "strata" if shutil.which("strata") else str(Path(sys.executable).with_name("strata"))
    return Text(
        f"next    {strata} audit {root}          recompute every score and compare with the chain\n"
        f"        less {root}/report.json      this, as JSON; logs are in {root}/logs\n"
        f"        {strata} localnet --cheat identity:1 --dir other      watch a cheat lose its pay"
    )

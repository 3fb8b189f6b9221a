"""What the report of a local subnet says of stages that train apart: rounds, and whether they can be repeated (papers.md B3)."""

from collections.abc import Iterator

from neurons.checks import Finding
from neurons.local.children import RoundWork
from neurons.local.evidence import Evidence, RoundRow, loss_rows
from subnet.config import RunKind
from subnet.lanes import lanes
from subnet.orchestration.accounts import EpochAccount
from subnet.orchestration.rounds import mean_losses, participation


def is_apart(evidence: Evidence) -> bool:
    """Whether the run is one of stages that train apart."""
    return evidence.config.run.kind is RunKind.BLOCKTRAIN


def disturbed(evidence: Evidence) -> list[str]:
    """Processes whose doings the record does not tell whole: what they computed cannot be repeated from it."""
    return [part.name for part in evidence.parts.values() if part.cheat or evidence.restarts.get(part.name)]


def round_rows(evidence: Evidence) -> tuple[RoundRow, ...]:
    """One row for each published epoch and stage; none of a pipeline."""
    if not is_apart(evidence):
        return ()
    shape = lanes(evidence.config.run)
    return tuple(
        RoundRow(
            epoch=account.epoch, stage=one.stage, loss=loss, assigned=one.assigned, accepted=one.accepted, late=one.late
        )
        for account in evidence.history.record.accounts.published()
        for one, loss in zip(participation(account), mean_losses(account, shape), strict=True)
    )


def round_work(account: EpochAccount) -> RoundWork:
    """What the record says of a published epoch."""
    assert account.snapshots is not None
    return RoundWork(
        epoch=account.epoch,
        samples=tuple(
            {hotkey: tuple(sorted(account.units[hotkey])) for hotkey in hotkeys}
            for hotkeys in account.snapshots.participants
        ),
        snapshots=tuple(ref.digest for ref in account.snapshots.snapshots),
    )


def apart_findings(evidence: Evidence) -> Iterator[Finding]:
    """What is promised of such a run beside what is promised of any."""
    yield _stages_add(evidence)
    yield _can_be_repeated(evidence)


def _stages_add(evidence: Evidence) -> Finding:
    name = "all stages together tell held-out text better than the first alone"
    rows = loss_rows(evidence)
    if not rows:
        return Finding(name=name, holds=False, detail="it was not measured")
    last = rows[-1]
    shown = f"{last.loss:.3f} against {last.loss_wires_zeroed:.3f}"
    return Finding(name=name, holds=last.loss < last.loss_wires_zeroed, detail=shown)


def _can_be_repeated(evidence: Evidence) -> Finding:
    name = "one process that trains and averages the same samples publishes the same params, to the bit"
    if names := disturbed(evidence):
        return Finding(name=name, holds=None, detail=f"does not apply: {', '.join(names)} cheated or was restarted")
    if not evidence.repeated:
        return Finding(name=name, holds=None, detail="it was not tried")
    differ = [
        f"epoch {row.epoch} stage {stage}"
        for row in evidence.repeated
        for stage, same in enumerate(row.same)
        if not same
    ]
    count = sum(len(row.same) for row in evidence.repeated)
    detail = f"other bits: {', '.join(differ[:3])}" if differ else f"{count} snapshots"
    return Finding(name=name, holds=not differ, detail=detail)

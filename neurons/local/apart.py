"""What the report of a local subnet says of stages that train apart: rounds, and whether they can be repeated (papers.md B3)."""

from neurons.checks import Finding
from neurons.local.children import RoundWork
from neurons.local.evidence import Evidence, RoundRow, loss_rows
from subnet.config import Objective, RunKind
from subnet.lanes import lanes
from subnet.orchestration.accounts import EpochAccount
from subnet.orchestration.rounds import mean_losses, participation

ROUNDS_BETWEEN = 2
_MIN_EPOCHS_FOR_GAIN = 4
"""That the stages add to each other is a promise about the default length of a run, like the bound on its loss."""


def is_apart(evidence: Evidence) -> bool:
    """Whether the run is one of stages that train apart."""
    return evidence.config.run.kind is RunKind.BLOCKTRAIN


def disturbed(evidence: Evidence) -> list[str]:
    """Why the record does not tell the whole of what was computed, so that it cannot be repeated; empty where it does."""
    accounts = evidence.history.record.accounts.published()
    names = [part.name for part in evidence.parts.values() if part.cheat or evidence.restarts.get(part.name)]
    reasons = [f"{', '.join(names)} cheated or was restarted"] if names else []
    reasons += [f"samples of epoch {account.epoch} were dropped" for account in accounts if account.num_dropped]
    reasons += [f"an update came late into epoch {account.epoch}" for account in accounts if account.merged_late]
    return reasons


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


def every_stage_learns(evidence: Evidence) -> Finding:
    """By its own loss, which its workers compute with the neighbours of their round.

    The loss of all stages together may rise for a round: it puts a stage over others that have moved on since it trained.
    """
    name = "each stage's mean local loss is below that of two rounds before"
    by_stage: dict[int, list[float]] = {}
    for row in round_rows(evidence):
        if row.loss is not None:
            by_stage.setdefault(row.stage, []).append(row.loss)
    rises = [
        f"stage {stage} from {earlier:.3f} to {later:.3f}"
        for stage, losses in by_stage.items()
        for earlier, later in zip(losses, losses[ROUNDS_BETWEEN:], strict=False)
        if later >= earlier
    ]
    if max(map(len, by_stage.values()), default=0) <= ROUNDS_BETWEEN:
        return Finding(name=name, holds=None, detail="does not apply: there are too few rounds")
    return Finding(name=name, holds=not rises, detail="; ".join(rises) or f"{len(by_stage)} stages")


def together_say_more(evidence: Evidence) -> Finding:
    """Held-out loss of all stages against that of the first alone; the other objectives do not promise that (docs/results.md)."""
    name = "all stages together say more than the first alone"
    rows, run = loss_rows(evidence), evidence.config.run
    if not rows:
        return Finding(name=name, holds=False, detail="it was not measured")
    shown = f"{rows[-1].loss:.3f} against {rows[-1].loss_wires_zeroed:.3f}"
    if run.blocktrain.objective is not Objective.POOLED:
        return Finding(
            name=name, holds=None, detail=f"{shown}; not promised of the objective {run.blocktrain.objective}"
        )
    if run.training.num_epochs < _MIN_EPOCHS_FOR_GAIN or run.training.num_stages == 1:
        why = f"fewer than {_MIN_EPOCHS_FOR_GAIN} epochs, or one stage"
        return Finding(name=name, holds=None, detail=f"{shown}; does not apply: {why}")
    return Finding(name=name, holds=rows[-1].loss < rows[-1].loss_wires_zeroed, detail=shown)


def can_be_repeated(evidence: Evidence) -> Finding:
    """That the processes published what one process does."""
    name = "one process that trains and averages the same samples publishes the same params, to the bit"
    if reasons := disturbed(evidence):
        return Finding(name=name, holds=None, detail=f"does not apply: {'; '.join(reasons)}")
    if not evidence.repeated:
        return Finding(name=name, holds=None, detail="it was not tried")
    differ = [
        f"epoch {row.epoch} stage {stage}"
        for row in evidence.repeated
        for stage, same in enumerate(row.same)
        if not same
    ]
    if len(evidence.repeated) < len(evidence.history.record.accounts.published()):
        return Finding(name=name, holds=False, detail=f"it ended after {len(evidence.repeated)} rounds; see its log")
    count = sum(len(row.same) for row in evidence.repeated)
    detail = f"other bits: {', '.join(differ[:3])}" if differ else f"{count} snapshots"
    return Finding(name=name, holds=not differ, detail=detail)

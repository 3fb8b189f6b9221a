"""What changed from one look to the next, as lines: what a local subnet prints where there is no terminal."""

from collections.abc import Iterator, Mapping

from neurons.local.watch import Snapshot
from subnet.config import RunKind
from subnet.dashboard.views import AuditView, RunView
from subnet.types import Hotkey, Phase

Names = Mapping[Hotkey, str]


def changes(before: Snapshot, after: Snapshot, names: Names, *, unigram: float | None) -> list[str]:
    """Notable changes, oldest first."""
    lines: list[str] = []
    if after.run is not None:
        lines += _run_changes(before.run, after.run, names, unigram=unigram)
    if after.is_stale and not before.is_stale and before.run is not None:
        lines.append("the orchestrator does not answer")
    if before.is_stale and not after.is_stale and before.run is not None:
        lines.append("the orchestrator answers again")
    lines += _weight_changes(before, after, names)
    return lines


def _run_changes(before: RunView | None, after: RunView, names: Names, *, unigram: float | None) -> Iterator[str]:
    if before is not None and before.epoch < after.epoch:
        merged = "  ".join(f"{stage.num_merged}/{stage.num_assigned}" for stage in after.stages)
        yield f"epoch {after.epoch - 1}  merged by stage, of the miners assigned: {merged}"
    if before is None or (before.epoch, before.phase) != (after.epoch, after.phase):
        yield _phase_line(after)
    known = {view.epoch: view.loss for view in before.evaluations} if before else {}
    for view in after.evaluations:
        if view.loss is not None and known.get(view.epoch) is None:
            without = "the first stage alone" if after.kind is RunKind.BLOCKTRAIN else "with wires zeroed"
            zeroed = "" if view.loss_wires_zeroed is None else f", {without} {view.loss_wires_zeroed:.3f}"
            share = "" if unigram is None else f" = {view.loss / unigram:.3f} of unigram {unigram:.3f}"
            yield f"epoch {view.epoch}  held-out loss {view.loss:.3f}{share}{zeroed}"
    closed = {(view.epoch, view.hotkey): view.outcome for view in before.audits} if before else {}
    for audit in after.audits:
        if audit.outcome and not closed.get((audit.epoch, audit.hotkey)):
            yield audit_line(audit, names)
    was_banned = {view.hotkey: view.banned_until for view in before.miners} if before else {}
    for miner in after.miners:
        if miner.banned_until >= 0 and was_banned.get(miner.hotkey, -1) < 0:
            yield f"{names.get(miner.hotkey, miner.hotkey)} is convicted and banned until epoch {miner.banned_until}"


def _phase_line(run: RunView) -> str:
    stages = "+".join(str(stage.num_live) for stage in run.stages)
    loss = f"  loss {run.recent_loss:.3f}" if run.recent_loss is not None else ""
    if run.phase is Phase.CLOSING:
        return "the last epoch is published; the last audits are being judged"
    if run.phase is Phase.FINISHED:
        return f"the run is finished: {run.sealed_segments} segments, {run.num_ledger_entries} events"
    return f"epoch {run.epoch}  {run.phase.value}  miners {stages}{loss}"


def audit_line(audit: AuditView, names: Names) -> str:
    """One audit and what came of it."""
    who = names.get(audit.hotkey, audit.hotkey)
    by = ", ".join(names.get(hotkey, hotkey) for hotkey in audit.validators)
    measures = "".join(
        f"  {label} {value:.4f}" for label, value in (("relD", audit.rel_d), ("dw", audit.rel_dw)) if value is not None
    )
    reason = "" if audit.outcome == "pass" or not audit.reasons else f"  {audit.reasons[-1]}"
    return f"epoch {audit.epoch}  audit of {who} by {by or 'nobody'}: {audit.outcome}{measures}{reason}"


def _weight_changes(before: Snapshot, after: Snapshot, names: Names) -> Iterator[str]:
    if after.metagraph is None:
        return
    uids = {neuron.uid: names.get(neuron.hotkey, neuron.hotkey) for neuron in after.metagraph.neurons}
    for validator, row in after.weights.items():
        if row and row != before.weights.get(validator):
            total = sum(row.values())
            shares = "  ".join(f"{uids.get(uid, uid)} {value / total:.1%}" for uid, value in row.items())
            yield f"{names.get(validator, validator)} set weights on chain: {shares}"

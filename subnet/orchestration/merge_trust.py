"""What a merge tells of its miners beyond two copies that differ: copied uploads, agreeing copies that are both false, and who
did not do its part.

Colluders who corrupt only the shards they share never differ (trust.md 5). So a share of the agreeing shards is recomputed by
the orchestrator, drawn from the next epoch's beacon, which is younger than the copies.
"""

from subnet.frames import digest
from subnet.merging.audits import audited_shards, copied_uploads
from subnet.merging.schedule import ITEM_BYTES
from subnet.orchestration.events import AnyEffect, AuditShard, ShardRecomputed, Wake
from subnet.orchestration.ledger import MergeMissed, ReducerConvicted, ShardAudited, UploadCopied
from subnet.orchestration.merge import merged_in_time, participants, record_left_out
from subnet.orchestration.state import PublishedEpoch, ShardAudit, StageMerge, State, Turn
from subnet.orchestration.work import drop_through
from subnet.types import Digest, Epoch, Hotkey, StageIndex


def note_copies(turn: Turn) -> None:
    """Once all commitments are in and before anything is drawn: who committed to another's upload."""
    current = turn.state.current
    for stage in range(turn.config.training.num_stages):
        digests = {hotkey: current.commits[hotkey].chunk_digests for hotkey in participants(turn, stage)}
        for copied in copied_uploads(digests, untouched=_untouched(turn, stage)):
            current.copied |= dict.fromkeys(copied.pair)
            turn.record(
                UploadCopied(epoch=current.epoch, stage=StageIndex(stage), pair=copied.pair, share=copied.share)
            )


def _untouched(turn: Turn, stage: int) -> tuple[Digest, ...]:
    """Digests of chunks of zeros, a whole one and the last: params that no sample touched are equal in honest uploads."""
    size, chunk = turn.state.num_elements[stage] * ITEM_BYTES, turn.config.merge.chunk_bytes
    return digest(bytes(min(size, chunk))), digest(bytes(size % chunk or chunk))


def note_missing(turn: Turn) -> None:
    """Half of the merge's time is over: put on record who is there and has not done its part, once.

    Not when nobody has stored anything, for then it is the store that is missing. The outer step needs all shards first, so who
    got the last of them a moment ago is not to blame.
    """
    current = turn.state.current
    if current.has_counted_missing:
        return
    current.has_counted_missing = True
    if not any(merge.copies for merge in current.merges):
        return
    for stage, merge in enumerate(current.merges):
        for hotkey in _owing(turn, merge):
            turn.record(MergeMissed(epoch=current.epoch, hotkey=hotkey, stage=StageIndex(stage)))


def _owing(turn: Turn, merge: StageMerge) -> list[Hotkey]:
    if merge.plan is None or merge.snapshot is not None:
        return []
    owing = {
        hotkey: None
        for shard in merge.plan.shards
        for hotkey in shard.reducers
        if hotkey not in merge.copies.get(shard.shard, {})
    }
    if turn.now_s - merge.whole_at_s >= turn.config.deadlines.merging_s / 4:
        owing |= {hotkey: None for hotkey in merged_in_time(merge) if hotkey not in merge.outer}
        owing |= {hotkey: None for hotkey in merge.uploaders if hotkey not in merge.stored}
    present = turn.state.current.commits
    return sorted(hotkey for hotkey in owing if hotkey in present and turn.state.members[hotkey].is_live)


def draw_shard_audits(turn: Turn, merged: PublishedEpoch | None, *, beacon: str) -> None:
    """Draw which agreeing shards of a published epoch are recomputed."""
    if merged is None:
        return
    for stage, merge in enumerate(merged.merges):
        if merge.plan is None:
            continue
        agreed = [shard for shard in merge.plan.shards if shard.shard in merge.agreed]
        for number in audited_shards(
            agreed, turn.config.merge.audit_fraction, beacon=beacon, stage=StageIndex(stage), epoch=merged.epoch
        ):
            audit = ShardAudit(plan=merge.plan, accepted=merge.accepted[number])
            turn.state.shard_audits[merged.epoch, StageIndex(stage), number] = audit
            turn.ask(AuditShard(plan=merge.plan, shard=number, accepted=audit.accepted))


def pending(state: State) -> list[AnyEffect]:
    """Shard audits that a crash may have swallowed."""
    return [
        AuditShard(plan=audit.plan, shard=number, accepted=audit.accepted)
        for (_, _, number), audit in state.shard_audits.items()
    ]


def shard_recomputed(turn: Turn, event: ShardRecomputed) -> None:
    """Record what came out; where it is not what both reducers reported, both are convicted."""
    audit = turn.state.shard_audits.pop((event.epoch, event.stage, event.shard), None)
    if audit is None:
        return
    shard = audit.plan.shards[event.shard]
    turn.record(
        ShardAudited(
            epoch=event.epoch,
            stage=event.stage,
            shard=event.shard,
            reducers=shard.reducers,
            accepted=audit.accepted,
            recomputed=event.ref,
        )
    )
    record_left_out(turn, event)
    if event.ref.digest != audit.accepted.digest:
        turn.keep(turn.state.epoch, audit.accepted, event.ref)
        for hotkey in shard.reducers:
            _convict(turn, event, hotkey)
    turn.ask(Wake())


def _convict(turn: Turn, event: ShardRecomputed, hotkey: Hotkey) -> None:
    state = turn.state
    member = state.members[hotkey]
    member.banned_until = max(member.banned_until, state.epoch + turn.config.audit.ban_epochs)
    drop_through(turn, hotkey)
    turn.record(
        ReducerConvicted(
            epoch=event.epoch,
            hotkey=hotkey,
            stage=event.stage,
            shard=event.shard,
            banned_until=Epoch(member.banned_until),
            at_epoch=state.epoch,
        )
    )

"""Committing, uploading, merging and publishing an epoch (system.md 3, trust.md 1.4 and 5).

Both copies of every shard are compared; where they differ, or one is missing, the orchestrator recomputes: nothing is put
to a vote and no first copy wins. The same holds for the outer step.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from subnet import draws, receipts, wire
from subnet.errors import ProtocolViolation, Refused
from subnet.merging.schedule import shard_plans
from subnet.merging.upload import check_commitment
from subnet.orchestration.events import (
    CommitRoot,
    OuterRefereed,
    RefereeOuter,
    RefereeShard,
    ShardRecomputed,
    ShardRefereed,
    Wake,
)
from subnet.orchestration.ledger import Committed, ShardMerged, UploadAccepted, UploadRejected
from subnet.orchestration.membership import member_of
from subnet.orchestration.objects import is_digest, object_key
from subnet.orchestration.state import StageMerge, Turn, Work
from subnet.orchestration.work import RECEIPTS_PER_UNIT, check_epoch
from subnet.types import BlobRef, Digest, Direction, Hotkey, Phase, StageIndex

SNAPSHOT_UPLOADERS = 2
"""Miners of a stage that each store its snapshot, where there are as many."""


def upload_ref(run_id: str, hotkey: Hotkey, commit: wire.CommitEpoch) -> BlobRef:
    """Where the pseudo-gradient that a miner committed to must lie."""
    key = object_key(
        run_id, epoch=commit.epoch, hotkey=hotkey, kind="upload", name="whole", content=commit.upload_digest
    )
    return BlobRef(key=key, digest=commit.upload_digest, size_bytes=commit.upload_bytes)


def commit_epoch(turn: Turn, sender: Hotkey, request: wire.CommitEpoch) -> wire.Response:
    """Take a miner's last word on its epoch. Raises Refused when it does not fit what is recorded."""
    current = turn.state.current
    check_epoch(turn, request.epoch, phase=Phase.COMMITTING)
    member = member_of(turn, sender)
    if sender not in current.roster[member.stage]:
        raise Refused("roster", f"not in the roster of epoch {current.epoch}")
    if member.banned_until >= current.epoch:
        raise Refused("banned", f"banned until epoch {member.banned_until}: an audit of its work failed")
    if sender in current.commits:
        if current.commits[sender] == request:
            return wire.Done()
        raise Refused("committed", "this epoch was committed already, with other contents")
    _check_commit(turn, sender, member.stage, request)
    current.commits[sender] = request
    turn.record(
        Committed(
            epoch=request.epoch,
            hotkey=sender,
            num_receipts=request.num_receipts,
            head=request.head,
            checkpoints=request.checkpoints,
            num_batches=request.num_batches,
            upload_digest=request.upload_digest,
        )
    )
    if merge_weight(turn, sender) >= turn.config.training.min_batches:
        member.epochs_credited += 1
    if len(current.commits) == sum(len(stage) for stage in current.roster):
        turn.ask(Wake())
    return wire.Done()


def _check_commit(turn: Turn, sender: Hotkey, stage: StageIndex, request: wire.CommitEpoch) -> None:
    state, current = turn.state, turn.state.current
    work = current.work.get(sender)
    first = receipts.first_head(state.run_id, current.epoch, sender)
    heads = [first, *(work.heads if work else ())]
    if len(heads) != request.num_receipts + 1 or heads[-1] != request.head:
        raise Refused("chain", f"{len(heads) - 1} receipts are recorded under another head: post the rest first")
    for checkpoint in request.checkpoints:
        place = checkpoint.num_receipts
        if not 0 <= place < len(heads) or heads[place] != checkpoint.head:
            raise Refused("checkpoint", f"checkpoint {checkpoint.digest[:12]} does not lie on the recorded chain")
    places = [checkpoint.num_receipts for checkpoint in request.checkpoints]
    if not places or places[0] != 0 or places != sorted(set(places)):
        raise Refused("checkpoint", "checkpoints must begin with the epoch's start and follow the chain in order")
    _check_segments(turn, work, request)
    digests = [checkpoint.digest for checkpoint in request.checkpoints]
    if not all(is_digest(found) for found in (request.upload_digest, *request.chunk_digests, *digests)):
        raise Refused("digest", "a digest is 64 lower-case hex digits of blake3")
    try:
        check_commitment(
            request.upload_bytes,
            request.chunk_digests,
            num_elements=state.num_elements[stage],
            chunk_bytes=turn.config.merge.chunk_bytes,
        )
    except ProtocolViolation as error:
        raise Refused("upload", str(error)) from error


def _check_segments(turn: Turn, work: Work | None, request: wire.CommitEpoch) -> None:
    """A segment is what one audit replays, so its size is bounded: by the work between two checkpoints, and by receipts."""
    quota = turn.config.training.accumulate * turn.config.audit.checkpoint_every
    recorded = work.receipts if work else []
    places = [checkpoint.num_receipts for checkpoint in request.checkpoints]
    for start, end in pairwise(places):
        segment = recorded[start:end]
        num_backward = sum(receipt.direction is Direction.BACKWARD for receipt in segment)
        if num_backward > quota or len(segment) > RECEIPTS_PER_UNIT * quota:
            raise Refused(
                "checkpoint", f"a segment holds {num_backward} backwards in {len(segment)} receipts, quota {quota}"
            )
    if places[-1] != len(recorded):
        raise Refused("checkpoint", "the last checkpoint must close the chain")


def close_commits(turn: Turn) -> None:
    """Fix the commit root and ask for it to be put on chain; nothing is drawn before it is there."""
    current = turn.state.current
    leaves = [
        receipts.canonical([hotkey, commit.num_receipts, commit.head, commit.upload_digest, commit.checkpoints])
        for hotkey, commit in sorted(current.commits.items())
    ]
    current.commit_root = receipts.merkle_root(leaves)
    turn.ask(CommitRoot(epoch=current.epoch, root=current.commit_root))


def upload_done(turn: Turn, sender: Hotkey, request: wire.UploadDone) -> wire.Response:
    """The committed pseudo-gradient is in the store (the edge has looked). Late ones of this epoch are still paid."""
    state, current = turn.state, turn.state.current
    if request.epoch != current.epoch or sender not in current.commits:
        raise Refused("epoch", f"no commitment of epoch {request.epoch} is open for an upload")
    if state.phase not in (Phase.COMMITTING, Phase.UPLOADING, Phase.MERGING):
        raise Refused("phase", f"epoch {request.epoch} is in phase {state.phase}")
    if sender not in current.uploaded:
        current.uploaded[sender] = upload_ref(state.run_id, sender, current.commits[sender])
        turn.keep(current.epoch, current.uploaded[sender])
        turn.record(UploadAccepted(epoch=request.epoch, hotkey=sender))
        turn.ask(Wake())
    return wire.Done()


def merge_weight(turn: Turn, hotkey: Hotkey) -> int:
    """Batches that count in the merge: those a miner did that its neighbours attest as well."""
    current = turn.state.current
    work = current.work.get(hotkey)
    return min(current.commits[hotkey].num_batches, len(work.credited) if work else 0)


def participants(turn: Turn, stage: int) -> list[Hotkey]:
    """Who committed enough work in a stage to take part in its merge, sorted."""
    current = turn.state.current
    return sorted(
        hotkey
        for hotkey in current.roster[stage]
        if hotkey in current.commits
        and merge_weight(turn, hotkey) >= turn.config.training.min_batches
        and turn.state.members[hotkey].banned_until < current.epoch
    )


def open_merges(turn: Turn, late: Mapping[StageIndex, Sequence[wire.Upload]]) -> None:
    """Draw the shard pairs of every stage over those who committed; who did not upload is left out of the sums.

    `late` are uploads of earlier epochs, by stage, to be summed as well.
    """
    stages = [StageIndex(stage) for stage in range(turn.config.training.num_stages)]
    turn.state.current.merges = [_open_merge(turn, stage, late.get(stage, ())) for stage in stages]
    turn.ask(Wake())


def _open_merge(turn: Turn, stage: StageIndex, late: Sequence[wire.Upload]) -> StageMerge:
    state, current = turn.state, turn.state.current
    miners = participants(turn, stage)
    uploads = [
        wire.Upload(
            hotkey=hotkey,
            base_epoch=current.epoch,
            num_batches=merge_weight(turn, hotkey),
            ref=current.uploaded[hotkey],
            chunk_digests=current.commits[hotkey].chunk_digests,
        )
        for hotkey in miners
        if hotkey in current.uploaded and hotkey not in current.copied
    ]
    summed = sorted((*uploads, *late), key=lambda upload: (upload.hotkey, upload.base_epoch))
    if not summed:
        return StageMerge(snapshot=state.snapshots[stage])
    plan = wire.MergePlan(
        epoch=current.epoch,
        stage=stage,
        num_elements=state.num_elements[stage],
        uploads=tuple(summed),
        shards=shard_plans(
            state.num_elements[stage],
            miners or sorted({upload.hotkey for upload in late}),
            beacon=current.next_beacon,
            stage=stage,
            epoch=current.epoch,
            chunk_bytes=turn.config.merge.chunk_bytes,
        ),
    )
    drawn = snapshot_uploaders(
        sorted({upload.hotkey for upload in uploads or late}), beacon=current.next_beacon, stage=stage
    )
    return StageMerge(plan=plan, uploaders=drawn)


def snapshot_uploaders(hotkeys: Sequence[Hotkey], *, beacon: str, stage: StageIndex) -> tuple[Hotkey, ...]:
    """Who stores the snapshot, drawn among those whose updates are merged (sorted)."""
    return tuple(sorted(draws.chosen(hotkeys, SNAPSHOT_UPLOADERS, beacon, "snapshot", stage)))


def report_reduced(turn: Turn, sender: Hotkey, request: wire.ReportReduced) -> wire.Response:
    """A reducer's copies. Equal pairs are accepted, unequal ones go to the referee at once."""
    merge, plan = _merge_of(turn, sender, request.epoch)
    if not set(request.left_out) <= {upload.hotkey for upload in plan.uploads}:
        raise Refused("shard", "an upload was left out that is no part of this merge")
    for copy in request.shards:
        shard = plan.shards[copy.shard] if 0 <= copy.shard < len(plan.shards) else None
        if shard is None or sender not in shard.reducers:
            raise Refused("shard", f"shard {copy.shard} is not the sender's to reduce")
        if copy.ref.size_bytes != (shard.stop - shard.start) * 4:
            raise Refused("shard", f"shard {copy.shard} has {(shard.stop - shard.start) * 4} bytes")
    for copy in request.shards:
        merge.copies.setdefault(copy.shard, {}).setdefault(sender, copy.ref)
        turn.keep(request.epoch, copy.ref)
        if request.left_out:
            merge.doubted[copy.shard] = None
        _compare(turn, merge, plan.shards[copy.shard])
    return wire.Done()


def _merge_of(turn: Turn, sender: Hotkey, epoch: int) -> tuple[StageMerge, wire.MergePlan]:
    state = turn.state
    if epoch != state.epoch or state.phase is not Phase.MERGING:
        raise Refused(
            "phase", f"epoch {state.epoch} is in phase {state.phase}; nothing of epoch {epoch} is being merged"
        )
    merge = state.current.merges[member_of(turn, sender).stage]
    if merge.plan is None:
        raise Refused("merge", "nobody takes part in this stage's merge")
    return merge, merge.plan


def _compare(turn: Turn, merge: StageMerge, shard: wire.ShardPlan) -> None:
    copies = merge.copies.get(shard.shard, {})
    if shard.shard in merge.accepted or len(copies) < len(shard.reducers):
        return
    digests = {copies[reducer].digest for reducer in shard.reducers}
    if len(digests) == 1 and len(shard.reducers) > 1 and shard.shard not in merge.doubted:
        _accept(turn, merge, shard, copies[shard.reducers[0]], is_refereed=False)
    else:
        _ask_referee(turn, merge, shard.shard)


def _ask_referee(turn: Turn, merge: StageMerge, shard: int) -> None:
    if merge.plan is not None and shard not in merge.referee_asked:
        merge.referee_asked[shard] = None
        turn.ask(RefereeShard(plan=merge.plan, shard=shard))


def _accept(turn: Turn, merge: StageMerge, shard: wire.ShardPlan, ref: BlobRef, *, is_refereed: bool) -> None:
    if merge.plan is None or shard.shard in merge.accepted:
        return
    merge.accepted[shard.shard] = ref
    if not is_refereed:
        merge.agreed[shard.shard] = None
    copies = merge.copies.get(shard.shard, {})
    turn.record(
        ShardMerged(
            epoch=turn.state.epoch,
            stage=merge.plan.stage,
            shard=shard.shard,
            reducers=shard.reducers,
            reported=tuple(copies[reducer].digest if reducer in copies else Digest("") for reducer in shard.reducers),
            accepted=ref,
            is_refereed=is_refereed,
        )
    )
    if len(merge.accepted) == len(merge.plan.shards):
        merge.whole_at_s = turn.now_s
        turn.ask(Wake())


def shard_refereed(turn: Turn, event: ShardRefereed) -> None:
    """The orchestrator's own sum stands."""
    state = turn.state
    if event.epoch != state.epoch or state.phase is not Phase.MERGING:
        return
    merge = state.current.merges[event.stage]
    if merge.plan is not None:
        turn.keep(event.epoch, event.ref)
        if event.shard not in merge.accepted:
            record_left_out(turn, event)
        _accept(turn, merge, merge.plan.shards[event.shard], event.ref, is_refereed=True)


def record_left_out(turn: Turn, event: ShardRefereed | ShardRecomputed) -> None:
    """Uploads that the orchestrator itself could not use: whoever made them is not paid for that epoch."""
    for hotkey in event.left_out:
        turn.record(UploadRejected(epoch=event.epoch, hotkey=hotkey, stage=event.stage, shard=event.shard))


def report_outer(turn: Turn, sender: Hotkey, request: wire.ReportOuter) -> wire.Response:
    """Digest of the snapshot that the sender computed from the merged shards."""
    merge, _ = _merge_of(turn, sender, request.epoch)
    merge.outer.setdefault(sender, request.digest)
    _settle_outer(turn, merge)
    return wire.Done()


def snapshot_done(turn: Turn, sender: Hotkey, request: wire.SnapshotDone) -> wire.Response:
    """A drawn miner stored its snapshot."""
    merge, _ = _merge_of(turn, sender, request.epoch)
    if sender not in merge.uploaders:
        raise Refused("snapshot", "another miner was drawn to store the snapshot")
    merge.stored.setdefault(sender, request.ref)
    turn.keep(request.epoch, request.ref)
    _settle_outer(turn, merge)
    return wire.Done()


def _settle_outer(turn: Turn, merge: StageMerge) -> None:
    """The stored snapshots stand when every live participant's outer step came to the same; else the orchestrator steps."""
    if merge.plan is None or merge.snapshot is not None or len(merge.stored) < len(merge.uploaders):
        return
    found = {ref.digest for ref in merge.stored.values()} | set(merge.outer.values())
    if len(found) > 1 or len(merge.uploaders) == 1:
        ask_outer_referee(turn, merge)
        return
    members = turn.state.members
    if all(hotkey in merge.outer for hotkey in merged_in_time(merge) if members[hotkey].is_live):
        merge.snapshot = merge.stored[merge.uploaders[0]]


def merged_in_time(merge: StageMerge) -> tuple[Hotkey, ...]:
    """Whose update of the merge's own epoch is in it; they hold its start and take the outer step."""
    plan = merge.plan
    return tuple(upload.hotkey for upload in plan.uploads if upload.base_epoch == plan.epoch) if plan else ()


def ask_outer_referee(turn: Turn, merge: StageMerge) -> None:
    """Have the orchestrator apply the outer step itself, once."""
    if merge.plan is None or merge.is_outer_refereed:
        return
    merge.is_outer_refereed = True
    turn.ask(
        RefereeOuter(
            epoch=turn.state.epoch,
            stage=merge.plan.stage,
            previous=turn.state.snapshots[merge.plan.stage],
            merged=merged_shards(merge),
            plan=merge.plan,
        )
    )


def outer_refereed(turn: Turn, event: OuterRefereed) -> None:
    """The orchestrator's own outer step stands."""
    state = turn.state
    if event.epoch == state.epoch and state.phase is Phase.MERGING:
        turn.keep(event.epoch, event.ref)
        state.current.merges[event.stage].snapshot = event.ref


def merged_shards(merge: StageMerge) -> tuple[wire.ReducedShard, ...]:
    """All accepted shards in order, or nothing while one is missing: coverage is whole or there is none (users.md 8)."""
    if merge.plan is None or len(merge.accepted) < len(merge.plan.shards):
        return ()
    return tuple(wire.ReducedShard(shard=shard, ref=merge.accepted[shard]) for shard in sorted(merge.accepted))


def hurry_merges(turn: Turn, *, is_late: bool) -> None:
    """Referee what its miners will not deliver: at once when they are gone, else once the merge is late."""
    for merge in turn.state.current.merges:
        if merge.plan is None or merge.snapshot is not None:
            continue
        for shard in merge.plan.shards:
            if shard.shard not in merge.accepted and (is_late or _any_gone(turn, shard.reducers)):
                _ask_referee(turn, merge, shard.shard)
        _settle_outer(turn, merge)
        is_whole = merge.snapshot is None and bool(merged_shards(merge))
        if is_whole and (is_late or _any_gone(turn, merge.uploaders)):
            ask_outer_referee(turn, merge)


def _any_gone(turn: Turn, hotkeys: Iterable[Hotkey]) -> bool:
    return any(not turn.state.members[hotkey].is_live for hotkey in hotkeys)

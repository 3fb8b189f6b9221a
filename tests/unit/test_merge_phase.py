"""Committing, uploading, merging, publishing (system.md 3, trust.md 1.4 and 5)."""

from typing import Any

import msgspec
import pytest

from subnet import receipts, wire
from subnet.frames import digest
from subnet.orchestration import machine
from subnet.orchestration.events import (
    AwaitBlock,
    BlockSeen,
    CommitRoot,
    HeardFrom,
    OuterRefereed,
    RefereeOuter,
    RefereeShard,
    RootIncluded,
    ShardRefereed,
)
from subnet.orchestration.ledger import Committed, EpochPublished, RootCommitted, ShardMerged, UploadAccepted
from subnet.orchestration.objects import object_key
from subnet.types import NO_DIGEST, BlobRef, Checkpoint, Digest, Epoch, Hotkey, Phase, StageIndex
from tests.unit.orchestration import CONFIG, MINERS, NINE, RUN, START, STRANGER, Run

SIX = MINERS


@pytest.fixture
def run() -> Run:
    """Six miners that have trained: two a stage."""
    run = Run()
    run.begin(*SIX)
    run.train()
    return run


def merging(run: Run) -> Run:
    run.commit()
    run.upload()
    run.effects = []
    return run


def pair(run: Run, stage: int = 0) -> tuple[Hotkey, Hotkey]:
    one, two = run.state.current.roster[stage]
    return one, two


# ---- committing ------------------------------------------------------------------------------------------------------


def test_a_commitment_is_taken_once_and_may_be_repeated(run: Run) -> None:
    request = run.commitment(SIX[0])
    run.done(SIX[0], request)
    run.done(SIX[0], request)
    assert len(run.facts(Committed)) == 1
    other = msgspec.structs.replace(request, num_batches=3)
    assert run.refusal(SIX[0], other) == "committed"


def test_who_did_nothing_commits_an_empty_chain_and_is_not_merged() -> None:
    run = Run()
    run.begin(*SIX)
    run.tick(run.config.deadlines.training_s)
    run.commit()
    for miner in SIX:
        run.done(miner, wire.UploadDone(epoch=Epoch(0)))
    assert run.is_in(Phase.PUBLISHED), "there was nothing to merge"
    assert run.state.previous is not None
    assert [merge.plan for merge in run.state.previous.merges] == [None] * 3
    assert run.state.snapshots == (START,) * 3
    assert run.facts(EpochPublished)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"num_receipts": 1}, "chain"),
        ({"head": digest(b"x")}, "chain"),
        ({"checkpoints": ()}, "checkpoint"),
        ({"upload_bytes": 4}, "upload"),
        ({"chunk_digests": ()}, "upload"),
        ({"epoch": Epoch(4)}, "epoch"),
    ],
)
def test_a_commitment_that_does_not_fit_the_record_is_refused(run: Run, change: dict[str, Any], code: str) -> None:
    assert run.refusal(SIX[0], msgspec.structs.replace(run.commitment(SIX[0]), **change)) == code


@pytest.mark.parametrize("bad", ["", "../../etc/passwd", "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_what_is_no_digest_is_refused_before_it_becomes_part_of_a_key(run: Run, bad: str) -> None:
    """The store raises on a strange key; once that would have ended the orchestrator when it cleaned up."""
    request = run.commitment(SIX[0])
    start, end = request.checkpoints
    for change in (
        {"upload_digest": bad},
        {"chunk_digests": (Digest(bad),) * len(request.chunk_digests)},
        {"checkpoints": (msgspec.structs.replace(start, digest=Digest(bad)), end)},
    ):
        assert run.refusal(SIX[0], msgspec.structs.replace(request, **change)) == "digest"


def test_checkpoints_lie_on_the_chain_in_order_from_its_start(run: Run) -> None:
    request = run.commitment(SIX[0])
    start, end = request.checkpoints
    off = msgspec.structs.replace(end, head=digest(b"off"))
    far = msgspec.structs.replace(end, num_receipts=999)
    for checkpoints in [(end,), (end, start), (start, start), (start, off), (start, far)]:
        assert run.refusal(SIX[0], msgspec.structs.replace(request, checkpoints=checkpoints)) == "checkpoint"


def test_a_segment_is_no_longer_than_an_audit_can_replay() -> None:
    config = msgspec.structs.replace(CONFIG, audit=msgspec.structs.replace(CONFIG.audit, checkpoint_every=1))
    run = Run(config=config)
    run.begin(*SIX)
    run.train()
    assert run.refusal(SIX[0], run.commitment(SIX[0])) == "checkpoint", "two units, where one is the quota"


def test_the_last_checkpoint_closes_the_chain(run: Run) -> None:
    request = run.commitment(SIX[0])
    assert run.refusal(SIX[0], msgspec.structs.replace(request, checkpoints=request.checkpoints[:1])) == "checkpoint"


def test_who_may_not_commit(run: Run) -> None:
    request = run.commitment(SIX[0])
    assert run.refusal(STRANGER, request) == "not-joined"
    run.chain(registered=(*SIX, STRANGER))
    run.join(STRANGER)
    assert run.refusal(STRANGER, run.commitment(STRANGER) if STRANGER in run.state.members else request) == "roster"
    run.state.members[SIX[0]].banned_until = 2
    assert run.refusal(SIX[0], request) == "banned"


def test_the_root_covers_every_commitment_and_comes_before_any_draw(run: Run) -> None:
    for miner in SIX:
        run.done(miner, run.commitment(miner))
    root = run.state.current.commit_root
    assert root and not run.state.cases
    assert [effect.root for effect in run.effects if isinstance(effect, CommitRoot)] == [root]
    commits = run.state.current.commits
    leaves = [
        receipts.canonical([miner, c.num_receipts, c.head, c.upload_digest, c.checkpoints])
        for miner, c in sorted(commits.items())
    ]
    assert root == receipts.merkle_root(leaves)
    run.feed(RootIncluded(at_s=run.now_s, epoch=Epoch(0), at_block=10))
    assert [effect.at_block for effect in run.effects if isinstance(effect, AwaitBlock)] == [12]
    run.feed(BlockSeen(at_s=run.now_s, epoch=Epoch(0), at_block=12, block_hash="b1"))
    assert run.is_in(Phase.UPLOADING) and run.state.cases


def test_only_the_first_root_and_the_first_beacon_count(run: Run) -> None:
    run.commit()
    cases = dict(run.state.cases)
    run.feed(RootIncluded(at_s=run.now_s, epoch=Epoch(0), at_block=99))
    run.feed(BlockSeen(at_s=run.now_s, epoch=Epoch(0), at_block=99, block_hash="chosen again"))
    run.feed(RootIncluded(at_s=run.now_s, epoch=Epoch(5), at_block=99))
    run.feed(BlockSeen(at_s=run.now_s, epoch=Epoch(5), at_block=99, block_hash="another epoch's"))
    assert [fact.at_block for fact in run.facts(RootCommitted)] == [10]
    assert run.state.current.next_beacon == "b1" and run.state.cases == cases


def test_the_slowest_never_decides(run: Run) -> None:
    """Commit and upload end at their deadlines; what did not come is left out, its miner keeps its place."""
    for miner in SIX[:3]:
        run.done(miner, run.commitment(miner))
    run.tick(run.config.deadlines.committing_s)
    run.beacon()
    for miner in SIX[:2]:
        run.done(miner, wire.UploadDone(epoch=Epoch(0)))
    run.tick(run.config.deadlines.uploading_s)
    assert run.is_in(Phase.MERGING)
    uploads = {u.hotkey for merge in run.state.current.merges if merge.plan for u in merge.plan.uploads}
    assert uploads == set(SIX[:2])
    assert set(run.state.members) == set(SIX)


def test_a_miner_that_is_gone_is_not_waited_for(run: Run) -> None:
    run.feed(HeardFrom(at_s=run.now_s, hotkey=SIX[0], is_live=False))
    for miner in SIX[1:]:
        run.done(miner, run.commitment(miner))
    assert run.state.current.commit_root


# ---- uploading -------------------------------------------------------------------------------------------------------


def test_an_upload_needs_its_commitment_and_counts_once(run: Run) -> None:
    run.done(SIX[0], run.commitment(SIX[0]))
    run.done(SIX[0], wire.UploadDone(epoch=Epoch(0)))
    run.done(SIX[0], wire.UploadDone(epoch=Epoch(0)))
    assert [fact.hotkey for fact in run.facts(UploadAccepted)] == [SIX[0]]
    assert run.refusal(SIX[1], wire.UploadDone(epoch=Epoch(0))) == "epoch"
    assert run.refusal(SIX[0], wire.UploadDone(epoch=Epoch(1))) == "epoch"


def test_a_late_upload_is_still_paid(run: Run) -> None:
    run.commit()
    for miner in SIX[1:]:
        run.done(miner, wire.UploadDone(epoch=Epoch(0)))
    run.tick(run.config.deadlines.uploading_s)
    assert run.is_in(Phase.MERGING)
    run.done(SIX[0], wire.UploadDone(epoch=Epoch(0)))
    assert SIX[0] in {fact.hotkey for fact in run.facts(UploadAccepted)}


def test_an_upload_outside_its_phases_is_refused(run: Run) -> None:
    run.done(SIX[0], run.commitment(SIX[0]))
    run.state.phase = Phase.PUBLISHED
    run.state.current.roster = ()
    assert run.refusal(SIX[0], wire.UploadDone(epoch=Epoch(0))) == "phase"


# ---- merging ---------------------------------------------------------------------------------------------------------


def test_equal_copies_are_accepted_and_a_stage_is_published_when_all_agree(run: Run) -> None:
    merging(run)
    run.merge()
    assert run.state.epoch == 1 and run.is_in(Phase.PUBLISHED)
    shards = run.facts(ShardMerged)
    assert not any(shard.is_refereed for shard in shards)
    assert all(set(shard.reported) == {shard.accepted.digest} for shard in shards)
    (published,) = run.facts(EpochPublished)
    assert sorted(miner for stage in published.participants for miner in stage) == sorted(SIX)
    assert not any(isinstance(effect, RefereeOuter) for effect in run.effects)


def test_copies_that_differ_are_refereed_at_once(run: Run) -> None:
    merging(run)
    one, two = pair(run)
    run.reduce(one)
    assert not [effect for effect in run.effects if isinstance(effect, RefereeShard)]
    run.reduce(two, "false")
    (asked,) = [effect for effect in run.effects if isinstance(effect, RefereeShard)]
    assert machine.outstanding(run.state, run.config) == [asked]
    run.reduce(two, "another lie")
    run.referee()
    (merged,) = run.facts(ShardMerged)
    assert merged.is_refereed
    assert merged.accepted.key.startswith("o/")
    assert len(set(merged.reported)) == 2
    assert machine.outstanding(run.state, run.config) == []
    run.feed(ShardRefereed(at_s=0.0, epoch=Epoch(0), stage=StageIndex(0), shard=0, ref=merged.accepted))
    assert len(run.facts(ShardMerged)) == 1


def test_a_missing_copy_is_refereed_when_its_reducer_is_gone_or_late(run: Run) -> None:
    merging(run)
    one, two = pair(run)
    run.reduce(one)
    run.feed(HeardFrom(at_s=run.now_s, hotkey=two, is_live=False))
    assert [effect.plan.stage for effect in run.effects if isinstance(effect, RefereeShard)] == [0]
    run.referee()
    (merged,) = run.facts(ShardMerged)
    assert NO_DIGEST in merged.reported
    run.tick(run.config.deadlines.merging_s / 2)
    assert [effect.plan.stage for effect in run.effects if isinstance(effect, RefereeShard)] == [1, 2]
    outer = [effect.stage for effect in run.effects if isinstance(effect, RefereeOuter)]
    assert outer == [0], "its shards are whole, and a drawn miner of it is gone"
    for effect in [effect for effect in run.effects if isinstance(effect, RefereeShard)]:
        assert effect.plan.stage in (1, 2)
    run.referee()
    run.tick()
    asked = [effect for effect in run.effects if isinstance(effect, RefereeOuter)]
    assert [effect.stage for effect in asked] == [1, 2]
    assert machine.outstanding(run.state, run.config) == asked
    run.referee()
    assert run.state.epoch == 1


def test_a_lone_miner_is_checked_by_the_orchestrator() -> None:
    run = Run()
    run.begin(*SIX[:3])
    run.train()
    merging(run)
    for miner in SIX[:3]:
        run.reduce(miner)
    assert [effect.plan.stage for effect in run.effects if isinstance(effect, RefereeShard)] == [2, 1, 0]
    run.referee()
    for miner in SIX[:3]:
        run.outer(miner)
        run.store(miner)
    assert len([effect for effect in run.effects if isinstance(effect, RefereeOuter)]) == 3
    run.referee()
    assert run.state.epoch == 1


def test_shards_that_are_not_ones_own_or_of_another_size_are_refused(run: Run) -> None:
    merging(run)
    one, other = pair(run)[0], pair(run, 1)[0]
    plan = run.state.current.merges[0].plan
    assert plan is not None
    copy = run.copy(one, plan.shards[0])
    report = wire.ReportReduced(epoch=Epoch(0), shards=(copy,))
    foreign = msgspec.structs.replace(copy, shard=5)
    assert run.refusal(one, wire.ReportReduced(epoch=Epoch(0), shards=(foreign,))) == "shard"
    assert run.refusal(other, report) == "shard", "its stage's only shard has another size"
    short = msgspec.structs.replace(copy, ref=msgspec.structs.replace(copy.ref, size_bytes=4))
    assert run.refusal(one, wire.ReportReduced(epoch=Epoch(0), shards=(short,))) == "shard"
    assert run.refusal(one, wire.ReportReduced(epoch=Epoch(1), shards=(copy,))) == "phase"
    assert run.refusal(STRANGER, report) == "not-joined"


def three_a_stage() -> Run:
    config = msgspec.structs.replace(CONFIG, training=msgspec.structs.replace(CONFIG.training, min_miners=9))
    run = Run(config=config)
    run.begin(*NINE)
    run.train(rounds=3)
    merging(run)
    for miner in NINE:
        run.reduce(miner)
    return run


def test_two_that_store_the_same_false_snapshot_are_contradicted_by_the_third() -> None:
    """Once the digests of those who were not drawn were kept and never compared."""
    run = three_a_stage()
    merge = run.state.current.merges[0]
    (witness,) = [miner for miner in run.state.current.roster[0] if miner not in merge.uploaders]
    for liar in merge.uploaders:
        run.outer(liar, "false")
        run.store(liar, "false")
    assert merge.snapshot is None, "the third has not spoken yet"
    run.outer(witness)
    assert [effect.stage for effect in run.effects if isinstance(effect, RefereeOuter)] == [0]
    run.referee()
    (snapshot,) = [found.snapshot for found in run.state.current.merges if found.snapshot]
    assert snapshot.key.startswith("o/"), "the orchestrator's own"


def test_a_witness_that_is_gone_is_not_waited_for() -> None:
    run = three_a_stage()
    merge = run.state.current.merges[0]
    (witness,) = [miner for miner in run.state.current.roster[0] if miner not in merge.uploaders]
    for miner in merge.uploaders:
        run.outer(miner)
        run.store(miner)
    run.feed(HeardFrom(at_s=run.now_s, hotkey=witness, is_live=False))
    assert merge.snapshot == run.snapshot(merge.uploaders[0])


def test_a_snapshot_is_stored_by_those_who_were_drawn(run: Run) -> None:
    merging(run)
    merge = run.state.current.merges[0]
    merge.uploaders = (pair(run)[0],)
    ref = run.snapshot(pair(run)[1])
    assert run.refusal(pair(run)[1], wire.SnapshotDone(epoch=Epoch(0), ref=ref)) == "snapshot"


def test_snapshots_that_differ_are_refereed(run: Run) -> None:
    merging(run)
    for miner in pair(run):
        run.reduce(miner)
    for miner, what in zip(pair(run), ("honest", "false"), strict=True):
        run.outer(miner, what)
        run.store(miner, what)
    asked = [effect for effect in run.effects if isinstance(effect, RefereeOuter)]
    assert len(asked) == 1
    run.store(pair(run)[0])
    assert len([effect for effect in run.effects if isinstance(effect, RefereeOuter)]) == 1
    run.referee()
    assert run.state.current.merges[0].snapshot is not None
    run.store(pair(run)[0])


def test_what_comes_after_the_merge_changes_nothing(run: Run) -> None:
    merging(run)
    run.merge()
    ref = BlobRef(key="late", digest=digest(b"late"), size_bytes=8)
    for epoch in (Epoch(0), Epoch(1)):
        run.feed(ShardRefereed(at_s=0.0, epoch=epoch, stage=StageIndex(0), shard=0, ref=ref))
        run.feed(OuterRefereed(at_s=0.0, epoch=epoch, stage=StageIndex(0), ref=ref))
    assert "late" not in {snapshot.key for snapshot in run.state.snapshots}
    assert run.refusal(SIX[0], wire.ReportOuter(epoch=Epoch(0), digest=digest(b"x"), size_bytes=8)) == "phase"


def test_a_stage_nobody_takes_part_in_keeps_its_params(run: Run) -> None:
    stage_0 = pair(run)
    for miner in SIX:
        if miner not in stage_0:
            run.done(miner, run.commitment(miner))
    run.tick(run.config.deadlines.committing_s)
    run.beacon()
    run.upload()
    assert run.state.current.merges[0].plan is None
    assert run.refusal(stage_0[0], wire.ReportOuter(epoch=Epoch(0), digest=digest(b"x"), size_bytes=8)) == "merge"
    ref = BlobRef(key="o/x", digest=digest(b"x"), size_bytes=8)
    run.feed(ShardRefereed(at_s=0.0, epoch=Epoch(0), stage=StageIndex(0), shard=0, ref=ref))
    run.merge()
    assert run.state.snapshots[0] == START


def test_a_banned_miner_is_not_merged(run: Run) -> None:
    run.commit()
    run.state.members[SIX[0]].banned_until = 4
    run.upload()
    uploads = {u.hotkey for merge in run.state.current.merges if merge.plan for u in merge.plan.uploads}
    assert SIX[0] not in uploads


def test_a_merge_counts_batches_that_neighbours_attest(run: Run) -> None:
    """A miner that claims 99 batches weighs as many as it was credited for."""
    merging(run)
    for merge in run.state.current.merges:
        assert merge.plan is not None
        for upload in merge.plan.uploads:
            assert upload.num_batches == len(run.state.current.work[upload.hotkey].credited) < 99


def test_keys_of_objects_end_in_their_digest() -> None:
    key = object_key(RUN, epoch=3, hotkey="m1", kind="shard", name="s0-1", content=digest(b"x"))
    assert key == f"runs/{RUN}/e3/shard/m1/s0-1-{digest(b'x')}"
    assert Checkpoint(digest=digest(b"x"), num_steps=0, num_receipts=0, head=NO_DIGEST).digest in key

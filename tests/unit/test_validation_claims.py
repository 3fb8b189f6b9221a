"""What miners claim is believed only as far as others bear it out (users.md 7, 8, 26, 32)."""

import msgspec
import pytest

from neurons.roles.desk import Desk
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.memory import MemoryBlobs, MemoryBlobStore
from subnet.adapters.system import SystemClock
from subnet.errors import Refused
from subnet.frames import digest
from subnet.orchestration import views
from subnet.orchestration.ledger import Credited
from subnet.orchestration.merge import merged_shards
from subnet.types import Epoch
from tests.unit.orchestration import CONFIG, MINERS, NINE, Run


def test_work_that_the_next_stage_never_received_earns_nothing() -> None:
    """Heartbeats and receipts of one's own look healthy; delivered work is what the neighbour attests."""
    run = Run()
    run.begin(*MINERS)
    lease = run.lease(run.state.current.roster[0][0])[0]
    run.work(lease, without=(lease.hops[2],))
    assert [fact.stage for fact in run.facts(Credited)] == [0]
    lease = run.lease(run.state.current.roster[0][0])[0]
    run.work(lease, without=(lease.hops[1],))
    assert [fact.stage for fact in run.facts(Credited) if fact.sample == lease.sample] == []


def merging() -> Run:
    """Three miners in each stage, so that a stage has three shards."""
    training = msgspec.structs.replace(CONFIG.training, min_miners=9)
    run = Run(config=msgspec.structs.replace(CONFIG, training=training))
    run.begin(*NINE)
    run.train(rounds=3)
    run.commit()
    run.upload()
    return run


def test_a_merge_is_whole_or_there_is_none() -> None:
    run = merging()
    merge = run.state.current.merges[0]
    assert merge.plan is not None and len(merge.plan.shards) == 3
    miner = run.state.current.roster[0][0]
    for shard in merge.plan.shards:
        assert merged_shards(merge) == views.directive(run.state, miner).merged == ()
        for reducer in shard.reducers:
            run.done(reducer, wire.ReportReduced(epoch=run.state.epoch, shards=(run.copy(reducer, shard),)))
    assert [shard.shard for shard in merged_shards(merge)] == [0, 1, 2]
    assert views.directive(run.state, miner).merged == merged_shards(merge)


async def test_an_object_that_another_stored_is_not_ones_own() -> None:
    run = Run()
    run.begin(*MINERS)
    owner, thief = MINERS[:2]
    store = MemoryBlobStore(SystemClock())
    signer = KeypairSigner.from_uri("//owner", deterministic=True)
    desk = Desk(state=lambda: run.state, signer=signer, blobs=store, clock=SystemClock())
    wanted = wire.RequestUpload(kind="snapshot", epoch=Epoch(0), name="outer", digest=digest(b"params"), size_bytes=6)
    granted = desk.grant_upload(owner, wanted)
    assert isinstance(granted, wire.UploadGrant)
    await MemoryBlobs(store).put(granted.url, b"params")
    report = wire.SnapshotDone(epoch=Epoch(0), ref=granted.ref)
    await desk.check(owner, report)
    with pytest.raises(Refused, match="not an object of the sender's"):
        await desk.check(thief, report)

"""Stages that train apart, by the state machine alone: leases of one hop, rounds of equal work, updates that come late."""

import msgspec
import pytest

from subnet import wire
from subnet.config import BlockTrainConfig, Objective, RunConfig, RunKind
from subnet.lanes import lanes
from subnet.orchestration import late, views
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.events import HeardFrom
from subnet.orchestration.invariants import check_record, check_state
from subnet.orchestration.ledger import Credited, EpochStarted, LossRecorded, UpdateMergedLate, UploadAccepted
from subnet.orchestration.merge import merged_in_time, merged_shards
from subnet.orchestration.rounds import Participation, mean_losses, participation
from subnet.orchestration.state import StageMerge
from subnet.types import Epoch, Hotkey, Phase, StageIndex
from tests.unit.orchestration import CONFIG, MINERS, START, Run, passes

SIX = MINERS
"""Joined in this order: m1 at stage 2, m2 at 1, m3 at 0, and once more round."""


def apart(*, max_staleness: int = 0, **training: object) -> RunConfig:
    return msgspec.structs.replace(
        CONFIG,
        kind=RunKind.BLOCKTRAIN,
        training=msgspec.structs.replace(CONFIG.training, **{"quorum": 1.0, "num_epochs": 4} | training),
        blocktrain=BlockTrainConfig(max_staleness=max_staleness),
    )


def begun(config: RunConfig, *miners: Hotkey) -> Run:
    run = Run(config=config)
    run.begin(*(miners or SIX))
    return run


def accounts(run: Run) -> Accounts:
    return Accounts().add(run.entries)


def holds(run: Run) -> None:
    check_state(run.state)
    check_record(run.entries, lanes(run.config))


# ---- leases and credit ----


def test_every_miner_begins_samples_of_its_own_stage() -> None:
    run = begun(apart())
    leases = {miner: run.lease(miner, 2) for miner in SIX}
    shape = lanes(run.config)
    for miner, mine in leases.items():
        assert [lease.hops for lease in mine] == [(miner,)] * 2
        assert {shape.of_sample(lease.sample).start for lease in mine} == {run.stage_of(miner)}
    numbers = [lease.sample for mine in leases.values() for lease in mine]
    assert len(set(numbers)) == 12, "no two miners get one sample"


def test_a_sample_is_credited_by_its_one_miner_alone() -> None:
    run = begun(apart())
    (lease,) = run.lease(SIX[0])
    run.work(lease)
    assert [(fact.stage, fact.hotkey) for fact in run.facts(Credited)] == [(StageIndex(2), SIX[0])]
    assert [fact.sample for fact in run.facts(LossRecorded)] == [lease.sample]
    holds(run)


def test_receipts_for_the_sample_of_another_stage_earn_nothing() -> None:
    run = begun(apart())
    (foreign,) = run.lease(SIX[1])
    claimed = [msgspec.structs.replace(receipt, stage=StageIndex(2)) for receipt in passes(foreign, 0, 1)]
    assert isinstance(run.post(SIX[0], *claimed), wire.Ack)
    assert not run.facts(Credited)


def test_a_pass_has_nowhere_to_be_rerouted_to() -> None:
    run = begun(apart())
    (lease,) = run.lease(SIX[0])
    assert run.refusal(SIX[0], wire.Reroute(lease=lease, stage=StageIndex(2))) == "lease"
    assert run.refusal(SIX[0], wire.Reroute(lease=lease, stage=StageIndex(0))) == "lease"


def test_a_round_gives_everybody_the_same_number_of_samples_and_gives_a_lost_one_again() -> None:
    run = begun(apart(target_batches=2))
    miner = SIX[0]
    first, second = run.lease(miner, 9)
    assert run.lease(miner, 9) == []
    run.work(first)
    run.tick(run.config.deadlines.sample_s + 1)
    assert second.sample not in run.state.current.open_samples
    (third,) = run.lease(miner, 9)
    run.work(third)
    assert run.lease(miner, 9) == []
    assert len({first.sample, second.sample, third.sample}) == 3


def test_units_that_a_restart_voids_are_given_again() -> None:
    run = begun(apart(target_batches=2))
    miner = SIX[0]
    for lease in run.lease(miner, 2):
        run.work(lease)
    start = run.commitment(miner).checkpoints[0]
    answer = run.ask(miner, wire.Resume(epoch=Epoch(0), num_receipts=0, head=start.head))
    assert isinstance(answer, wire.Resumed)
    assert len(run.lease(miner, 9)) == 2
    holds(run)


def test_leases_follow_from_the_roster_and_not_from_the_chain() -> None:
    """Two runs on other chains, joined in the same order, train on the same samples (papers.md B3)."""
    orders = []
    for beacon in ("b0", "another"):
        run = begun(apart())
        run.state.current.beacon = beacon
        orders.append([lease.sample for miner in SIX for lease in run.lease(miner, 2)])
    assert orders[0] == orders[1]


# ---- rounds ----


def test_a_round_ends_when_every_live_worker_is_done() -> None:
    run = begun(apart())
    *most, last = SIX
    for miner in most:
        for lease in run.lease(miner, 2):
            run.work(lease)
    assert run.is_in(Phase.TRAINING)
    for lease in run.lease(last, 2):
        run.work(lease)
    assert run.is_in(Phase.COMMITTING)


def test_a_stage_without_a_worker_holds_nobody_up_and_stays_as_it_is() -> None:
    """Both miners of stage 2 are gone: the round ends with the work of the others."""
    run = begun(apart())
    gone = [miner for miner in SIX if run.stage_of(miner) == 2]
    before = run.state.snapshots
    for miner in gone:
        run.feed(HeardFrom(at_s=run.now_s, hotkey=miner, is_live=False))
    present = [miner for miner in SIX if miner not in gone]
    for miner in present:
        for lease in run.lease(miner, 2):
            run.work(lease)
    assert run.is_in(Phase.COMMITTING)
    run.commit(*present)
    run.upload()
    run.merge()
    assert run.state.snapshots[2] == before[2]
    assert all(run.state.snapshots[stage] != before[stage] for stage in (0, 1))
    found = participation(accounts(run).epoch(Epoch(0)))
    assert [(one.assigned, one.accepted) for one in found] == [(2, 2), (2, 2), (2, 0)]
    assert [one.share for one in found] == [1.0, 1.0, 0.0]
    holds(run)


def test_a_round_begins_without_a_stage_that_nobody_is_ready_for_once_it_is_late() -> None:
    run = begun(apart(), *SIX[:3])
    run.train()
    run.commit()
    run.upload()
    run.merge()
    run.ready(*SIX[:2])
    assert run.is_in(Phase.PUBLISHED)
    run.tick(run.config.deadlines.ready_s)
    assert run.is_in(Phase.TRAINING)
    assert run.facts(EpochStarted)[-1].roster == ((), (SIX[1],), (SIX[0],))
    assert run.refusal(SIX[2], wire.LeaseSamples(epoch=Epoch(1), count=1)) == "roster"
    run.work(run.lease(SIX[0])[0])
    holds(run)


def test_mean_losses_are_told_by_stage() -> None:
    run = begun(apart())
    for miner in SIX[:2]:
        run.work(run.lease(miner)[0])
    assert mean_losses(accounts(run).epoch(Epoch(0)), lanes(run.config)) == (None, 1.5, 1.5)


def test_miners_and_auditors_are_told_what_the_neighbours_of_a_stage_were_published_as() -> None:
    """A greedy stage computes with those below it."""
    run = begun(apart())
    run.state.snapshots = tuple(msgspec.structs.replace(START, key=f"s{stage}") for stage in range(3))
    told = {run.stage_of(miner): views.directive(run.state, miner).snapshots for miner in SIX}
    assert {stage: [ref.key for ref in refs] for stage, refs in told.items()} == {0: [], 1: ["s0"], 2: ["s0", "s1"]}
    run.train()
    run.commit()
    for (_, miner), case in run.state.cases.items():
        assert case.challenge.neighbours == told[run.stage_of(miner)]
    assert len(run.state.cases) == 6
    diffusion = msgspec.structs.replace(apart(), blocktrain=BlockTrainConfig(objective=Objective.DIFFUSION))
    assert not any(views.directive(begun(diffusion).state, miner).snapshots for miner in SIX)


# ---- updates that come late ----


def late_round(config: RunConfig) -> tuple[Run, Hotkey]:
    """A first epoch in which everybody commits and one does not upload; returns the run in the second epoch's training."""
    run = begun(config)
    run.train()
    run.commit()
    (straggler, *others) = SIX
    for miner in others:
        run.done(miner, wire.UploadDone(epoch=Epoch(0)))
    run.tick(config.deadlines.uploading_s)
    assert run.is_in(Phase.MERGING)
    finish_merge(run)
    run.ready(*SIX)
    assert run.is_in(Phase.TRAINING)
    return run, straggler


def finish_merge(run: Run) -> None:
    """Who uploaded in time does its part; the orchestrator does the rest once it is late."""
    epoch, run.effects, merges = run.state.epoch, [], run.state.current.merges
    for miner in [hotkey for stage_merge in merges for hotkey in merged_in_time(stage_merge)]:
        run.reduce(miner)
    step_and_store(run, merges)
    run.tick(run.config.deadlines.merging_s / 2)
    run.referee()
    step_and_store(run, merges)
    run.tick()
    run.referee()
    assert run.state.epoch == epoch + 1


def step_and_store(run: Run, merges: list[StageMerge]) -> None:
    """In every merge whose shards are all there."""
    for stage_merge in [found for found in merges if merged_shards(found) and found.snapshot is None]:
        for miner in merged_in_time(stage_merge):
            run.outer(miner)
            if miner in stage_merge.uploaders:
                run.store(miner)


def test_an_update_one_round_late_is_merged_beside_the_next() -> None:
    """Its epoch is not paid all the same where its miner was there and did not reduce."""
    run, straggler = late_round(apart(max_staleness=1))
    assert straggler not in accounts(run).epoch(Epoch(0)).uploaded
    assert late.committed_upload(run.state, straggler, 0) is not None
    run.done(straggler, wire.UploadDone(epoch=Epoch(0)))
    run.done(straggler, wire.UploadDone(epoch=Epoch(0)))
    assert [fact.epoch for fact in run.facts(UploadAccepted) if fact.hotkey == straggler] == [Epoch(0)]
    first = accounts(run).epoch(Epoch(0))
    assert straggler in first.uploaded
    assert first.voided == tuple(first.missed) == (straggler,)
    run.train()
    run.commit()
    run.upload()
    plan = run.state.current.merges[2].plan
    assert plan is not None
    assert [(upload.hotkey, upload.base_epoch) for upload in plan.uploads] == [
        (straggler, 0), (straggler, 1), (SIX[3], 1),
    ]  # fmt: skip
    (fact,) = run.facts(UpdateMergedLate)
    assert (fact.epoch, fact.base_epoch, fact.hotkey, fact.stage) == (1, 0, straggler, 2)
    finish_merge(run)
    assert participation(accounts(run).epoch(Epoch(1)))[2] == Participation(
        stage=StageIndex(2), assigned=2, accepted=2, late=1
    )
    assert not run.state.late
    holds(run)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_update_that_is_too_late_is_refused(max_staleness: int) -> None:
    run, straggler = late_round(apart(max_staleness=max_staleness))
    for _ in range(max_staleness):
        run.train()
        run.commit(*SIX[1:])
        run.upload()
        finish_merge(run)
        run.ready(*SIX)
    assert run.refusal(straggler, wire.UploadDone(epoch=Epoch(0))) == "epoch"
    assert late.committed_upload(run.state, straggler, 0) is None
    assert straggler in accounts(run).epoch(Epoch(0)).voided


def test_an_upload_that_came_during_the_merge_is_in_the_next() -> None:
    run = begun(apart(max_staleness=1))
    run.train()
    run.commit()
    (straggler, *others) = SIX
    for miner in others:
        run.done(miner, wire.UploadDone(epoch=Epoch(0)))
    run.tick(run.config.deadlines.uploading_s)
    run.done(straggler, wire.UploadDone(epoch=Epoch(0)))
    finish_merge(run)
    assert [key for key, waiting in run.state.late.items() if waiting.ref] == [(Epoch(0), straggler)]


def test_a_late_update_of_a_banned_miner_is_left_out() -> None:
    run, straggler = late_round(apart(max_staleness=1))
    run.done(straggler, wire.UploadDone(epoch=Epoch(0)))
    run.state.members[straggler].banned_until = 9
    run.tick(run.config.deadlines.training_s)
    run.commit(*SIX[1:])
    for miner in SIX[1:]:
        run.done(miner, wire.UploadDone(epoch=Epoch(1)))
    assert run.state.epoch == 2
    assert not run.facts(UpdateMergedLate)


def test_a_late_update_alone_is_refereed() -> None:
    """Nobody of the stage worked in the epoch into which it comes: the orchestrator sums and steps."""
    run, straggler = late_round(apart(max_staleness=1))
    run.done(straggler, wire.UploadDone(epoch=Epoch(0)))
    others = [miner for miner in SIX if run.stage_of(miner) != 2]
    for miner in others:
        for lease in run.lease(miner, 2):
            run.work(lease)
    run.tick(run.config.deadlines.training_s)
    run.commit(*others)
    run.upload()
    before = run.state.snapshots[2]
    run.effects = []
    finish_merge(run)
    assert run.state.snapshots[2] != before
    assert [(one.accepted, one.late) for one in participation(accounts(run).epoch(Epoch(1)))] == [
        (2, 0),
        (2, 0),
        (0, 1),
    ]
    holds(run)


def test_a_pipeline_waits_for_no_late_update() -> None:
    run = begun(msgspec.structs.replace(apart(max_staleness=3), kind=RunKind.PIPELINE))
    assert late.max_staleness(run.config) == 0
    run.train()
    run.commit()
    for miner in SIX[1:]:
        run.done(miner, wire.UploadDone(epoch=Epoch(0)))
    run.tick(run.config.deadlines.uploading_s)
    finish_merge(run)
    assert not run.state.late

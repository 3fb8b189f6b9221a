"""Who misses its part of a merge, whose upload cannot be merged, and time in which nobody could reach the orchestrator."""

import msgspec
import pytest

from subnet import wire
from subnet.frames import digest
from subnet.orchestration import merge
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.events import (
    HeardFrom,
    RefereeShard,
    Returned,
    ShardRecomputed,
    ShardRefereed,
    decode_event,
    encode_event,
)
from subnet.orchestration.ledger import Absent, MergeMissed, ShardMerged, UploadRejected
from subnet.orchestration.state import ShardAudit
from subnet.types import BlobRef, Epoch, Hotkey, Phase, StageIndex
from tests.unit.orchestration import MINERS, Run

HALF_S = 10.0
"""Of CONFIG's time for a merge."""


@pytest.fixture
def run() -> Run:
    """Six miners, two a stage, whose uploads are in."""
    run = Run()
    run.begin(*MINERS)
    run.train()
    run.commit()
    run.upload()
    run.effects = []
    return run


def share(run: Run, *miners: Hotkey) -> None:
    """These do all of their part that can be done."""
    for miner in miners:
        run.reduce(miner)
    for miner in miners:
        if merge.merged_shards(run.state.current.merges[run.stage_of(miner)]):
            run.outer(miner)
            run.store(miner)


def missed(run: Run) -> list[Hotkey]:
    return [fact.hotkey for fact in run.facts(MergeMissed)]


def voided(run: Run) -> tuple[Hotkey, ...]:
    return Accounts().add(run.entries).epoch(Epoch(0)).voided


def test_who_is_there_and_has_not_reduced_at_half_time_is_not_paid(run: Run) -> None:
    lazy, *others = MINERS
    share(run, *others)
    run.tick(HALF_S - 1.0)
    assert not missed(run)
    run.tick(1.0)
    assert missed(run) == [lazy]
    assert lazy in voided(run)
    assert [effect.plan.stage for effect in run.effects if isinstance(effect, RefereeShard)] == [run.stage_of(lazy)]
    run.reduce(lazy)
    run.tick(1.0)
    assert missed(run) == [lazy], "counted once"


def test_who_is_gone_is_not_blamed(run: Run) -> None:
    gone, *others = MINERS
    share(run, *others)
    run.feed(HeardFrom(at_s=run.now_s, hotkey=gone, is_live=False))
    run.tick(HALF_S)
    assert not missed(run)


def test_when_nobody_stored_anything_it_is_the_store_that_was_missing(run: Run) -> None:
    run.tick(HALF_S)
    assert not missed(run)
    for miner in MINERS[1:]:
        run.reduce(miner)
    run.tick(1.0)
    assert not missed(run)


def test_who_never_reports_its_outer_step_is_not_paid(run: Run) -> None:
    lazy, *others = MINERS
    for miner in MINERS:
        run.reduce(miner)
    for miner in others:
        run.outer(miner)
        run.store(miner)
    run.tick(HALF_S)
    assert missed(run) == [lazy]
    assert run.state.epoch == 0
    run.referee()
    assert run.state.epoch == 1


def test_who_says_it_stepped_and_does_not_store_the_snapshot_is_not_paid(run: Run) -> None:
    lazy, *others = MINERS
    for miner in MINERS:
        run.reduce(miner)
        run.outer(miner)
    for miner in others:
        run.store(miner)
    run.tick(HALF_S)
    assert missed(run) == [lazy]


def test_who_got_the_last_shard_a_moment_ago_is_not_blamed_for_the_outer_step(run: Run) -> None:
    run.now_s += HALF_S - 1.0
    for miner in MINERS:
        run.reduce(miner)
    run.tick(1.0)
    assert not missed(run)


def left_out_by(run: Run, reducer: Hotkey, *hotkeys: Hotkey) -> wire.ReportReduced:
    plan = run.state.current.merges[run.stage_of(reducer)].plan
    assert plan is not None
    (shard,) = [shard for shard in plan.shards if reducer in shard.reducers]
    return wire.ReportReduced(epoch=Epoch(0), shards=(run.copy(reducer, shard),), left_out=hotkeys)


def recomputed_ref(run: Run, stage: StageIndex) -> BlobRef:
    plan = run.state.current.merges[stage].plan
    assert plan is not None
    size = (plan.shards[0].stop - plan.shards[0].start) * 4
    return BlobRef(key="o/sum", digest=digest(b"sum"), size_bytes=size)


def test_an_upload_that_cannot_be_merged_is_looked_at_and_not_paid(run: Run) -> None:
    one, other = run.state.current.roster[0]
    run.done(one, left_out_by(run, one, other))
    run.done(other, left_out_by(run, other, other))
    (asked,) = [effect for effect in run.effects if isinstance(effect, RefereeShard)]
    assert not run.facts(ShardMerged), "equal copies are not enough where something was left out"
    event = ShardRefereed(
        at_s=run.now_s,
        epoch=Epoch(0),
        stage=StageIndex(0),
        shard=asked.shard,
        ref=recomputed_ref(run, StageIndex(0)),
        left_out=(other,),
    )
    assert decode_event(encode_event(event)) == event
    run.feed(event)
    run.feed(event)
    assert [(fact.hotkey, fact.shard) for fact in run.facts(UploadRejected)] == [(other, asked.shard)]
    assert other in voided(run)


def test_a_reducer_that_leaves_a_good_upload_out_is_the_false_one(run: Run) -> None:
    one, other = run.state.current.roster[0]
    lie = msgspec.structs.replace(left_out_by(run, one, other), shards=(run.copy(one, plan_of(run), "without it"),))
    run.done(one, lie)
    run.reduce(other)
    run.referee()
    assert not run.facts(UploadRejected)
    assert voided(run)[:1] == (one,)
    assert other not in Accounts().add(run.entries).epoch(Epoch(0)).false_reducers


def plan_of(run: Run) -> wire.ShardPlan:
    plan = run.state.current.merges[0].plan
    assert plan is not None
    return plan.shards[0]


def test_an_upload_of_another_merge_cannot_be_left_out(run: Run) -> None:
    reducer, stranger = run.state.current.roster[0][0], run.state.current.roster[1][0]
    assert run.refusal(reducer, left_out_by(run, reducer, stranger)) == "shard"


def test_what_two_reducers_kept_silent_about_shows_when_their_shard_is_audited(run: Run) -> None:
    run.merge()
    assert run.state.previous is not None
    done, one = run.state.previous.merges[0], run.state.previous.roster[0][0]
    assert done.plan is not None
    run.state.shard_audits[Epoch(0), StageIndex(0), 0] = ShardAudit(plan=done.plan, accepted=done.accepted[0])
    run.feed(
        ShardRecomputed(
            at_s=run.now_s,
            epoch=Epoch(0),
            stage=StageIndex(0),
            shard=0,
            ref=done.accepted[0],
            left_out=(one,),
        )
    )
    assert [fact.hotkey for fact in run.facts(UploadRejected)] == [one]


def test_time_in_which_the_orchestrator_was_away_counts_against_nobody() -> None:
    """Once each audited miner was absent, and twice absent is banned, after two outages longer than a challenge."""
    run = Run()
    run.begin(*MINERS)
    run.train()
    run.commit()
    assert run.state.cases
    due_s = {key: case.due_s for key, case in run.state.cases.items()}
    deadline_s = run.state.phase_deadline_s
    run.now_s += 5000.0
    run.feed(Returned(at_s=run.now_s))
    run.tick()
    assert not run.facts(Absent)
    assert run.is_in(Phase.UPLOADING)
    assert run.state.phase_deadline_s == deadline_s + 5000.0
    assert {key: case.due_s for key, case in run.state.cases.items()} == {
        key: before + 5000.0 for key, before in due_s.items()
    }
    run.tick(run.config.deadlines.challenge_s)
    assert run.facts(Absent), "what is still missing then is missing"

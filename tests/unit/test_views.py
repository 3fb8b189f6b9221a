"""What each node is told: a pure function of the state, so a restarted node needs nothing else."""

import pytest

from subnet import wire
from subnet.errors import Refused
from subnet.orchestration import late, views
from subnet.orchestration.events import HeardFrom
from subnet.types import Epoch, Outcome, Phase, StageIndex
from tests.unit.orchestration import MINERS, STRANGER, VALIDATORS, Run, created

SIX = MINERS


@pytest.fixture
def run() -> Run:
    run = Run()
    run.begin(*SIX)
    return run


def test_strangers_and_who_did_not_join_are_told_what_to_do(run: Run) -> None:
    with pytest.raises(Refused) as found:
        views.directive(run.state, STRANGER)
    assert found.value.code == "not-registered"
    run.chain(registered=(*SIX, STRANGER))
    with pytest.raises(Refused) as found:
        views.directive(run.state, STRANGER)
    assert found.value.code == "not-joined"


def test_the_version_changes_when_something_else_does(run: Run) -> None:
    before = views.directive(run.state, SIX[0])
    assert views.directive(run.state, SIX[0]) == before
    assert views.directive(run.state, SIX[1]).version != before.version
    run.lease(run.state.current.roster[0][0])
    assert views.directive(run.state, SIX[0]).version != before.version


def test_a_miner_sees_its_stage_and_its_phase(run: Run) -> None:
    view = views.directive(run.state, SIX[0])
    assert (view.stage, view.is_in_roster, view.epoch, view.phase) == (2, True, 0, Phase.TRAINING)
    assert view.snapshot == run.state.snapshots[2]
    assert view.note == "" and view.is_settled


def test_a_miner_hears_who_is_live_in_a_stage(run: Run) -> None:
    run.feed(HeardFrom(at_s=0.0, hotkey=SIX[5], is_live=False))
    found = [views.stage_peers(run.state, SIX[0], wire.GetPeers(stage=StageIndex(stage))) for stage in range(3)]
    assert [{peer.hotkey for peer in one.peers} for one in found] == [
        {hotkey for hotkey in SIX[:5] if run.stage_of(hotkey) == stage} for stage in range(3)
    ]
    for asker, stage, code in ((STRANGER, 0, "not-joined"), (SIX[0], 3, "stage"), (SIX[0], -1, "stage")):
        with pytest.raises(Refused) as refused:
            views.stage_peers(run.state, asker, wire.GetPeers(stage=StageIndex(stage)))
        assert refused.value.code == code


def test_notes_say_why_there_is_nothing_to_do(run: Run) -> None:
    early = Run()
    early.feed(created())
    early.chain()
    early.join(SIX[0])
    assert "being gathered" in views.directive(early.state, SIX[0]).note
    run.chain(registered=(*SIX, STRANGER))
    run.join(STRANGER)
    assert "waits for epoch 1" in views.directive(run.state, STRANGER).note
    run.state.members[SIX[0]].banned_until = 4
    assert "banned until epoch 4" in views.directive(run.state, SIX[0]).note


def test_before_genesis_there_is_no_snapshot() -> None:
    run = Run()
    run.chain()
    run.join(SIX[0])
    assert views.directive(run.state, SIX[0]).snapshot is None


def test_a_merge_is_seen_by_its_stage(run: Run) -> None:
    run.train()
    run.commit()
    view = views.directive(run.state, SIX[0])
    assert (view.has_committed, view.has_uploaded, view.is_merging) == (True, False, False)
    with pytest.raises(Refused) as found:
        views.merge_plan(run.state, SIX[0], wire.GetMergePlan(epoch=Epoch(0)))
    assert found.value.code == "phase"
    run.upload()
    view = views.directive(run.state, SIX[0])
    assert view.is_merging and view.has_uploaded and view.merged == ()
    plan = views.merge_plan(run.state, SIX[0], wire.GetMergePlan(epoch=Epoch(0)))
    assert plan.stage == run.stage_of(SIX[0])
    for miner in SIX:
        run.reduce(miner)
    view = views.directive(run.state, SIX[0])
    assert [shard.shard for shard in view.merged] == [shard.shard for shard in plan.shards]
    assert view.must_upload_snapshot
    run.state.current.merges[0].plan = None
    for sender, code in ((STRANGER, "not-joined"), (run.state.current.roster[0][0], "merge")):
        with pytest.raises(Refused) as found:
            views.merge_plan(run.state, sender, wire.GetMergePlan(epoch=Epoch(0)))
        assert found.value.code == code


def test_a_challenge_is_seen_by_its_miner_until_answered_and_then_by_its_validator(run: Run) -> None:
    run.train()
    run.commit()
    miner = SIX[0]
    validator = run.state.cases[Epoch(0), miner].asked[-1]
    mine = [challenge.hotkey for challenge in views.directive(run.state, miner).challenges]
    assert mine == [miner]
    assert miner not in {challenge.hotkey for challenge in views.directive(run.state, validator).challenges}
    run.done(miner, run.answer(miner))
    assert views.directive(run.state, miner).challenges == ()
    assert miner in {challenge.hotkey for challenge in views.directive(run.state, validator).challenges}
    run.done(validator, run.verdict(validator, miner, Outcome.PASS))
    assert miner not in {challenge.hotkey for challenge in views.directive(run.state, validator).challenges}


def test_the_drawn_validator_sees_what_to_evaluate(run: Run) -> None:
    run.train()
    run.commit()
    run.upload()
    run.merge()
    drawn = run.state.evaluations[Epoch(0)].validator
    view = views.directive(run.state, drawn)
    assert (view.evaluate_epoch, view.snapshots, view.sealed_segments) == (0, run.state.snapshots, 1)
    other = next(name for name in VALIDATORS if name != drawn)
    assert views.directive(run.state, other).evaluate_epoch is None
    run.done(drawn, wire.PostEvaluation(epoch=Epoch(0), loss=1.0, loss_wires_zeroed=1.0))
    assert views.directive(run.state, drawn).evaluate_epoch is None


def test_where_a_committed_upload_must_lie(run: Run) -> None:
    assert late.committed_upload(run.state, SIX[0], 0) is None
    run.train()
    run.done(SIX[0], run.commitment(SIX[0]))
    ref = late.committed_upload(run.state, SIX[0], 0)
    assert ref is not None and ref.key.endswith(ref.digest) and f"/{SIX[0]}/" in ref.key
    assert late.committed_upload(run.state, SIX[0], 1) is None

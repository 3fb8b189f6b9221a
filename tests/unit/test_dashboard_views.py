"""The run as a person sees it."""

import msgspec

from subnet import wire
from subnet.dashboard.views import RunView, run_view
from subnet.orchestration.state import State
from subnet.types import NO_DIGEST, Digest, Epoch, Measures, Outcome, Phase
from tests.unit.orchestration import MINERS, VALIDATORS, Run

MEASURES = Measures(
    num_passes=8, num_failing=0, rel_d=0.01, rel_d_max=0.02, rel_d_token=0.1, rel_d_backward=0.0, rel_dw=0.05,
    loss_error=0.0, cosine=1.0, norm_ratio=1.0,
)  # fmt: skip


def test_an_empty_run_can_be_shown() -> None:
    view = run_view(State())
    assert (view.miners, view.stages, view.recent_loss, view.phase) == ((), (), None, Phase.GATHERING)


def test_a_run_in_training_shows_who_did_what() -> None:
    run = Run()
    run.begin(*MINERS)
    run.work(run.lease(run.state.current.roster[0][0])[0])
    run.state.members[MINERS[0]].banned_until = 0
    view = run_view(run.state)
    assert view.recent_loss == 1.5
    assert sum(miner.units for miner in view.miners) == 3
    assert [miner.stage for miner in view.miners] == [0, 0, 1, 1, 2, 2]
    assert {miner.hotkey for miner in view.miners if miner.banned_until >= 0} == {MINERS[0]}
    assert view.validators == VALIDATORS
    assert view.stages[0].num_live == 2 and view.stages[2].num_live == 1
    assert not any(stage.is_published for stage in view.stages)


def test_a_merge_and_an_audit_are_shown_as_they_go() -> None:
    run = Run()
    run.begin(*MINERS)
    run.train()
    run.commit()
    miner = MINERS[0]
    open_case = next(audit for audit in run_view(run.state).audits if audit.hotkey == miner)
    assert (open_case.outcome, open_case.is_answered, open_case.rel_d) == ("", False, None)
    run.done(miner, run.answer(miner))
    validator = run.state.cases[Epoch(0), miner].asked[-1]
    verdict = run.verdict(validator, miner, Outcome.PASS).verdict
    measured = msgspec.structs.replace(verdict, measures=MEASURES, published_rule_passes=True)
    run.done(validator, wire.PostVerdict(verdict=measured))
    closed = next(audit for audit in run_view(run.state).audits if audit.hotkey == miner)
    assert (closed.outcome, closed.rel_d, closed.rel_dw, closed.published_rule_passes) == ("pass", 0.01, 0.05, True)
    run.upload()
    assert [stage.num_shards for stage in run_view(run.state).stages] == [1, 1, 1]
    run.merge()
    view = run_view(run.state)
    assert view.recent_loss == 1.5, "of the epoch that ended, until the next has one"
    assert (view.epoch, view.sealed_segments, view.evaluations[0].loss) == (1, 1, None)
    run.done(view.validators[0], wire.PostScores(segment=0, ledger_head=view_head(view), scores={}, weights={}))
    assert run_view(run.state).posted == {VALIDATORS[0]: 0}


def test_standings_are_those_of_the_newest_segment_and_dissent_is_named() -> None:
    run = Run()
    run.begin(*MINERS)
    run.train()
    run.commit()
    run.upload()
    run.merge()
    assert run_view(run.state).standings == ()
    one, other = {MINERS[0]: 0.25, MINERS[1]: 0.75}, {MINERS[0]: 1.0}
    for validator, segment, weights in ((VALIDATORS[0], 0, one), (VALIDATORS[1], 0, other), (VALIDATORS[2], 9, other)):
        scores = {hotkey: 2.0 * weight for hotkey, weight in weights.items()}
        run.ask(validator, wire.PostScores(segment=segment, ledger_head=NO_DIGEST, scores=scores, weights=weights))
    view = run_view(run.state)
    assert [(row.hotkey, row.score, row.weight) for row in view.standings] == [
        (MINERS[0], 0.5, 0.25),
        (MINERS[1], 1.5, 0.75),
    ]
    assert view.dissenting == (VALIDATORS[1],), "a segment that is not sealed yet is nobody's"


def view_head(view: RunView) -> Digest:
    return Digest(view.ledger_head)


def test_a_view_travels_as_json() -> None:
    run = Run()
    run.begin(*MINERS)
    view = run_view(run.state)
    assert msgspec.json.decode(wire.encode(view), type=RunView) == view

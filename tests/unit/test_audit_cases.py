"""Drawing audits, and what the verdicts of one come to (trust.md 1.4 to 1.6)."""

from typing import Any

import msgspec
import pytest

from subnet import wire
from subnet.config import AuditMode
from subnet.frames import digest
from subnet.orchestration import audits
from subnet.orchestration.events import HeardFrom
from subnet.orchestration.ledger import (
    Absent,
    Answered,
    CaseClosed,
    Challenged,
    Evaluated,
    ScoresPosted,
    VerdictRecorded,
)
from subnet.orchestration.state import Turn
from subnet.types import NO_DIGEST, Direction, Epoch, Hotkey, Outcome, Phase, SampleId
from tests.unit.orchestration import CONFIG, MINERS, STRANGER, VALIDATORS, Run

SIX = MINERS
MINER = SIX[0]
FIRST = Epoch(0)


def audited(**audit: Any) -> Run:
    """Six miners, each challenged about epoch 0; uploads are under way."""
    run = Run(config=msgspec.structs.replace(CONFIG, audit=msgspec.structs.replace(CONFIG.audit, **audit)))
    run.begin(*SIX)
    run.train()
    run.commit()
    return run


@pytest.fixture
def run() -> Run:
    return audited()


def asked(run: Run, miner: Hotkey = MINER) -> Hotkey:
    return run.state.cases[FIRST, miner].asked[-1]


def closed(run: Run) -> list[tuple[Hotkey, str]]:
    return [(fact.hotkey, fact.outcome) for fact in run.facts(CaseClosed)]


def judge(run: Run, *outcomes: Outcome, miner: Hotkey = MINER) -> None:
    """Validators answer as drawn, one after the other."""
    run.done(miner, run.answer(miner))
    for outcome in outcomes:
        validator = asked(run, miner)
        run.done(validator, run.verdict(validator, miner, outcome))


# ---- drawing ---------------------------------------------------------------------------------------------------------


def test_everybody_is_challenged_when_the_probability_is_one(run: Run) -> None:
    assert sorted(fact.hotkey for fact in run.facts(Challenged)) == sorted(SIX)
    for (_, hotkey), case in run.state.cases.items():
        assert case.challenge.hotkey == hotkey
        assert case.challenge.anchor == run.state.snapshots[case.challenge.stage]
        assert case.challenge.upload_digest == run.state.current.commits[hotkey].upload_digest


def test_without_a_draw_without_segments_or_without_validators_nobody_is_challenged() -> None:
    assert not audited(probability=0.0, probation_epochs=0).state.cases
    idle = Run()
    idle.begin(*SIX)
    idle.tick(idle.config.deadlines.training_s)
    idle.commit()
    assert not idle.state.cases
    alone = Run()
    alone.begin(*SIX)
    alone.train()
    alone.chain(permits=())
    alone.commit()
    assert not alone.state.cases


def test_newcomers_are_audited_more_often() -> None:
    runs = [audited(probability=0.0, probation_epochs=30) for _ in range(2)]
    assert list(runs[0].state.cases) == list(runs[1].state.cases)
    assert 0 < len(runs[0].state.cases) < 6, "about half of them"


def test_only_the_last_segment_is_compared_with_the_upload() -> None:
    run = Run()
    run.begin(*SIX)
    run.train()
    for miner in SIX:
        request = run.commitment(miner)
        start, end = request.checkpoints
        head = run.state.current.work[miner].heads[0]
        middle = msgspec.structs.replace(end, digest=digest(b"middle"), num_receipts=1, head=head)
        run.done(miner, msgspec.structs.replace(request, checkpoints=(start, middle, end)))
    run.beacon()
    named = {case.challenge.segment: bool(case.challenge.upload_digest) for case in run.state.cases.values()}
    assert named.get(1) is True and named.get(0, False) is False


def test_both_ends_of_an_epoch_are_drawn_however_many_segments_lie_between() -> None:
    """Only the first shows another start, only the last another upload: with two dozen segments one draw in 24 found each."""
    num_segments, num_beacons = 24, 400
    run = Run()
    run.begin(*SIX)
    run.train()
    request, work = run.commitment(MINER), run.state.current.work[MINER]
    backward = next(receipt for receipt in work.receipts if receipt.direction is Direction.BACKWARD)
    samples = [SampleId(1000 + number) for number in range(num_segments)]
    work.receipts[:] = [msgspec.structs.replace(backward, sample=sample) for sample in samples]
    work.credited = dict.fromkeys(samples)
    start = request.checkpoints[0]
    ends = tuple(msgspec.structs.replace(start, num_receipts=count) for count in range(num_segments + 1))
    run.state.current.commits[MINER] = msgspec.structs.replace(request, checkpoints=ends)
    drawn = []
    for beacon in range(num_beacons):
        run.state.current.next_beacon, run.state.cases = f"beacon {beacon}", {}
        audits.draw_audits(Turn(state=run.state, config=run.config, now_s=run.now_s))
        drawn.append(run.state.cases[Epoch(0), MINER].challenge.segment)
    expected = audits.END_SHARE + (1.0 - 2.0 * audits.END_SHARE) / num_segments
    for end in (0, num_segments - 1):
        assert drawn.count(end) / num_beacons == pytest.approx(expected, abs=0.07)
    assert len(set(drawn)) > num_segments / 2


def test_a_live_auditor_is_preferred_and_a_silent_one_is_the_last_resort() -> None:
    run = Run()
    run.begin(*SIX)
    run.train()
    for validator in VALIDATORS[:2]:
        run.feed(HeardFrom(at_s=run.now_s, hotkey=validator, is_live=False))
    run.commit()
    assert {case.asked[0] for case in run.state.cases.values()} == {VALIDATORS[2]}
    judge(run, Outcome.FAIL)
    assert asked(run) in VALIDATORS[:2]


def test_nobody_audits_itself() -> None:
    run = Run()
    run.begin(*SIX)
    run.train()
    run.state.auditors[MINER] = True
    run.chain(permits=(MINER,))
    run.commit()
    assert (FIRST, MINER) not in run.state.cases
    assert len(run.state.cases) == 5


# ---- answering -------------------------------------------------------------------------------------------------------


def test_an_answer_presents_what_was_committed_once(run: Run) -> None:
    request = run.answer(MINER)
    run.done(MINER, request)
    run.done(MINER, request)
    assert len(run.facts(Answered)) == 1
    assert run.state.cases[FIRST, MINER].challenge.evidence == request.evidence


def test_an_answer_that_is_not_the_one_asked_for_is_refused(run: Run) -> None:
    request = run.answer(MINER)
    other = msgspec.structs.replace(request.start, digest=digest(b"x"))
    assert run.refusal(MINER, msgspec.structs.replace(request, start=other)) == "challenge"
    assert run.refusal(MINER, msgspec.structs.replace(request, end=other)) == "challenge"
    assert run.refusal(MINER, msgspec.structs.replace(request, segment=7)) == "challenge"
    assert run.refusal(MINER, msgspec.structs.replace(request, epoch=Epoch(5))) == "challenge"
    assert run.refusal(STRANGER, request) == "challenge"


def test_an_answer_after_the_case_is_closed_is_refused(run: Run) -> None:
    run.tick(CONFIG.deadlines.challenge_s)
    assert (MINER, "inconclusive") in closed(run)
    assert run.refusal(MINER, run.answer(MINER)) == "challenge"


# ---- verdicts --------------------------------------------------------------------------------------------------------

P, F, UNSURE = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("verdicts", "outcome"),
    [
        ((P,), P),
        ((F, F), F),
        ((F, P, F), F),
        ((F, P, P), P),
        ((UNSURE, P), P),
        ((UNSURE, F, F), F),
        ((F, UNSURE, F), F),
        ((UNSURE, UNSURE, UNSURE), UNSURE),
        ((F, P, UNSURE), UNSURE),
        ((UNSURE, UNSURE, F), UNSURE),
        ((F, UNSURE, UNSURE), UNSURE),
    ],
)
def test_what_verdicts_come_to(run: Run, verdicts: tuple[Outcome, ...], outcome: Outcome) -> None:
    """One pass clears, two fails convict, a split is decided by a third, and nobody is convicted by one alone."""
    judge(run, *verdicts)
    assert closed(run) == [(MINER, outcome)]
    validators = [fact.verdict.validator for fact in run.facts(VerdictRecorded)]
    assert len(set(validators)) == len(verdicts)
    assert run.state.members[MINER].banned_until == (CONFIG.audit.ban_epochs if outcome is F else -1)


def test_a_verdict_is_its_validators_own_for_this_run_and_this_segment(run: Run) -> None:
    run.done(MINER, run.answer(MINER))
    validator = asked(run)
    other = next(name for name in VALIDATORS if name != validator)
    honest = run.verdict(validator, MINER, P)
    assert run.refusal(other, honest) == "verdict"
    assert run.refusal(other, run.verdict(other, MINER, P)) == "verdict", "it was not drawn"
    for change in ({"run_id": "x"}, {"segment": 9}, {"epoch": Epoch(9)}, {"hotkey": STRANGER}):
        verdict = msgspec.structs.replace(honest.verdict, **change)
        assert run.refusal(validator, wire.PostVerdict(verdict=verdict)) == "verdict"
    assert not run.facts(VerdictRecorded)


def test_a_verdict_counts_once_and_not_after_the_case_is_closed(run: Run) -> None:
    run.done(MINER, run.answer(MINER))
    first = asked(run)
    run.done(first, run.verdict(first, MINER, F))
    run.done(first, run.verdict(first, MINER, F))
    assert len(run.facts(VerdictRecorded)) == 1
    second = asked(run)
    run.done(second, run.verdict(second, MINER, F))
    assert closed(run) == [(MINER, F)]
    third = next(name for name in VALIDATORS if name not in (first, second))
    assert run.refusal(third, run.verdict(third, MINER, P)) == "verdict"


def test_a_validator_that_does_not_answer_is_replaced_and_may_still_speak(run: Run) -> None:
    run.done(MINER, run.answer(MINER))
    first = asked(run)
    run.tick(CONFIG.deadlines.verdict_s)
    second = asked(run)
    assert second != first
    run.done(first, run.verdict(first, MINER, P))
    assert closed(run)[-1] == (MINER, P)


def test_when_no_validator_is_left_the_case_is_inconclusive(run: Run) -> None:
    run.done(MINER, run.answer(MINER))
    for _ in VALIDATORS:
        run.tick(CONFIG.deadlines.verdict_s)
    assert (MINER, UNSURE) in closed(run)


def test_a_ban_takes_every_open_lease_and_the_next_epochs_with_it() -> None:
    run = Run()
    run.begin(*SIX)
    run.train()
    run.commit()
    run.upload()
    run.merge()
    run.ready(*SIX)
    assert run.is_in(Phase.TRAINING)
    leases = [lease for miner in run.state.current.roster[0] for lease in run.lease(miner, 4)]
    judge(run, F, F)
    held = {lease.sample for lease in leases if MINER in lease.hops}
    assert held and not held.intersection(run.state.current.open_samples)
    assert set(run.state.current.open_samples) == {lease.sample for lease in leases} - held
    assert MINER not in run.state.live_members(run.stage_of(MINER))
    assert SampleId(0) in run.state.current.samples


# ---- absence ---------------------------------------------------------------------------------------------------------


def test_the_first_absence_voids_and_the_second_convicts() -> None:
    run = audited(absences_to_fail=2)
    run.state.members[SIX[1]].absences.append(0)
    run.state.members[SIX[2]].absences.append(-99)
    run.tick(CONFIG.deadlines.challenge_s)
    assert sorted(fact.hotkey for fact in run.facts(Absent)) == sorted(SIX)
    assert dict(closed(run)) == {miner: F if miner == SIX[1] else UNSURE for miner in SIX}


def test_cases_are_forgotten_when_they_are_closed_and_old(run: Run) -> None:
    turn = Turn(state=run.state, config=run.config, now_s=run.now_s)
    judge(run, P)
    run.state.current.epoch = Epoch(1)
    audits.forget_old_cases(turn)
    assert len(run.state.cases) == 6
    run.state.current.epoch = Epoch(2)
    audits.forget_old_cases(turn)
    assert (FIRST, MINER) not in run.state.cases and len(run.state.cases) == 5
    assert not audits.all_closed(turn)
    assert audits.next_due_s(turn) < float("inf")
    run.state.cases.clear()
    assert audits.all_closed(turn) and audits.next_due_s(turn) == float("inf")


# ---- the whole epoch -------------------------------------------------------------------------------------------------


def in_full() -> Run:
    """Every miner's epoch is replayed whole; MINER's has two segments."""
    audit = msgspec.structs.replace(CONFIG.audit, mode=AuditMode.FULL)
    run = Run(config=msgspec.structs.replace(CONFIG, audit=audit))
    run.begin(*SIX)
    run.train()
    for miner in SIX:
        request = run.commitment(miner)
        start, end = request.checkpoints
        head = run.state.current.work[miner].heads[0]
        middle = msgspec.structs.replace(end, digest=digest(b"middle"), num_receipts=1, head=head)
        run.done(miner, msgspec.structs.replace(request, checkpoints=(start, middle, end)))
    run.beacon()
    return run


def test_in_full_one_segment_after_the_other_is_audited_while_all_is_well() -> None:
    run = in_full()
    assert {case.challenge.segment for case in run.state.cases.values()} == {0}
    assert not any(case.challenge.upload_digest for case in run.state.cases.values())
    auditor = asked(run)
    judge(run, P)
    case = run.state.cases[FIRST, MINER]
    assert (case.challenge.segment, case.outcome, case.asked) == (1, None, [auditor])
    assert case.challenge.upload_digest == run.state.current.commits[MINER].upload_digest
    assert case.due_s == run.now_s + CONFIG.deadlines.challenge_s
    judge(run, P)
    assert run.state.cases[FIRST, MINER].outcome is P
    drawn = [fact.segment for fact in run.facts(Challenged) if fact.hotkey == MINER]
    assert (drawn, closed(run)) == ([0, 1], [(MINER, P), (MINER, P)])


@pytest.mark.parametrize("verdicts", [(F, F), (UNSURE, UNSURE, UNSURE)])
def test_in_full_nothing_follows_a_segment_that_did_not_pass(verdicts: tuple[Outcome, ...]) -> None:
    run = in_full()
    judge(run, *verdicts)
    assert [fact.segment for fact in run.facts(Challenged) if fact.hotkey == MINER] == [0]


# ---- evaluation and scores -------------------------------------------------------------------------------------------


def test_one_drawn_validator_measures_each_published_epoch_once(run: Run) -> None:
    run.upload()
    run.merge()
    drawn = run.state.evaluations[FIRST].validator
    request = wire.PostEvaluation(epoch=FIRST, loss=2.0, loss_wires_zeroed=2.5)
    other = next(name for name in VALIDATORS if name != drawn)
    assert run.refusal(other, request) == "evaluation"
    assert run.refusal(drawn, msgspec.structs.replace(request, epoch=Epoch(7))) == "evaluation"
    run.done(drawn, request)
    run.done(drawn, msgspec.structs.replace(request, loss=0.0))
    assert [(fact.loss, fact.loss_wires_zeroed) for fact in run.facts(Evaluated)] == [(2.0, 2.5)]


def test_without_a_live_validator_nobody_evaluates(run: Run) -> None:
    for validator in VALIDATORS:
        run.feed(HeardFrom(at_s=run.now_s, hotkey=validator, is_live=False))
    run.upload()
    run.merge()
    assert not run.state.evaluations


def test_scores_are_posted_by_validators_for_sealed_segments_forwards_only(run: Run) -> None:
    run.upload()
    run.merge()
    request = wire.PostScores(segment=0, ledger_head=digest(b"x"), scores={MINER: 1.0}, weights={MINER: 1.0})
    assert run.refusal(MINER, request) == "permit"
    for segment in (-1, 1):
        assert run.refusal(VALIDATORS[0], msgspec.structs.replace(request, segment=segment)) == "segment"
    run.done(VALIDATORS[0], request)
    run.done(VALIDATORS[0], request)
    assert len(run.facts(ScoresPosted)) == 1
    assert run.state.posted[VALIDATORS[0]].ledger_head != NO_DIGEST

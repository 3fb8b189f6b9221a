"""What must hold at every moment; each breach is named (trust.md 8)."""

import pytest

from subnet.config import AuditConfig
from subnet.errors import InvariantBroken
from subnet.frames import digest
from subnet.lanes import Lanes
from subnet.orchestration.invariants import check_cases, check_record, check_state, check_weights
from subnet.orchestration.ledger import (
    Absent,
    AnyFact,
    CaseClosed,
    Credited,
    Enlisted,
    Entry,
    EpochPublished,
    EpochStarted,
    Leased,
    VerdictRecorded,
    Voided,
)
from subnet.orchestration.state import Work
from subnet.types import NO_DIGEST, Epoch, Hotkey, Outcome, SampleId, StageIndex, Verdict
from tests.unit.orchestration import MINERS, START, Run

A, B = Hotkey("a"), Hotkey("b")
E, S = Epoch(0), SampleId(0)
LANES = Lanes(num_stages=2, length=2)
LEASE = Leased(epoch=E, sample=S, attempt=0, hops=(A, B), deadline_s=1.0)
STARTED = EpochStarted(epoch=E, beacon="b", roster=((A,), (B,)))
CREDIT = Credited(epoch=E, sample=S, stage=StageIndex(0), hotkey=A)
VOID = Voided(epoch=E, hotkey=A, samples=(S,))


def published(epoch: int, stages: int = 2) -> EpochPublished:
    return EpochPublished(epoch=Epoch(epoch), snapshots=(START,) * stages, participants=())


def check(*facts: AnyFact) -> None:
    entries = [Entry(seq=seq, at_s=0.0, fact=fact, head=NO_DIGEST) for seq, fact in enumerate(facts)]
    check_record(entries, LANES)


def test_a_whole_record_holds() -> None:
    check(STARTED, Enlisted(validator=A), LEASE, CREDIT, published(0), published(1))
    check(STARTED, LEASE, CREDIT, VOID)


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ((STARTED, LEASE, CREDIT, CREDIT), "event 3.*credited twice"),
        ((CREDIT,), "event 0.*without a lease"),
        ((STARTED, LEASE, Credited(epoch=E, sample=S, stage=StageIndex(1), hotkey=A)), "event 2.*without a lease"),
        ((STARTED, LEASE, CREDIT, VOID, CREDIT), "event 4.*credited twice"),
        ((STARTED, LEASE, VOID), "event 2.*never credited"),
        ((LEASE,), "event 0.*outside the roster"),
        ((STARTED, Leased(epoch=E, sample=S, attempt=0, hops=(B, A), deadline_s=1.0)), "event 1.*outside the roster"),
        ((EpochStarted(epoch=E, beacon="b", roster=((A,), (A,))),), "two stages"),
        ((published(1),), "event 0.*epoch 1 follows -1"),
        ((published(0), published(0)), "event 1.*epoch 0 follows 0"),
        ((published(0, stages=1),), "misses a stage"),
    ],
)
def test_each_breach_of_a_record_is_named(facts: tuple[AnyFact, ...], what: str) -> None:
    with pytest.raises(InvariantBroken, match=what):
        check(*facts)


def said(outcome: Outcome, validator: str, hotkey: Hotkey = A) -> VerdictRecorded:
    verdict = Verdict(
        run_id="r", epoch=E, hotkey=hotkey, segment=0, validator=Hotkey(validator), outcome=outcome, reason=""
    )
    return VerdictRecorded(verdict=verdict)


def closed(outcome: Outcome, epoch: Epoch = E) -> CaseClosed:
    return CaseClosed(epoch=epoch, hotkey=A, segment=0, outcome=outcome, banned_until=E, at_epoch=E)


def check_closed(*facts: AnyFact) -> int:
    entries = [Entry(seq=seq, at_s=0.0, fact=fact, head=NO_DIGEST) for seq, fact in enumerate(facts)]
    return check_cases(entries, AuditConfig())


PASS, FAIL, UNSURE = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE
GONE = Absent(epoch=E, hotkey=A, segment=0)
GONE_AGAIN = Absent(epoch=Epoch(3), hotkey=A, segment=0)


@pytest.mark.parametrize(
    "facts",
    [
        (said(PASS, "v"), closed(PASS)),
        (said(FAIL, "v"), said(FAIL, "w"), closed(FAIL)),
        (said(FAIL, "v"), said(PASS, "w"), said(PASS, "x"), closed(PASS)),
        (said(FAIL, "v"), said(UNSURE, "w"), closed(UNSURE)),
        (closed(UNSURE),),
        (GONE, closed(UNSURE), GONE_AGAIN, closed(FAIL, Epoch(3))),
    ],
)
def test_audits_that_were_closed_as_their_verdicts_say(facts: tuple[AnyFact, ...]) -> None:
    assert check_closed(*facts) == sum(isinstance(fact, CaseClosed) for fact in facts)


@pytest.mark.parametrize(
    "facts",
    [
        (closed(FAIL),),
        (said(FAIL, "v"), closed(FAIL)),
        (said(FAIL, "v"), said(FAIL, "v"), closed(FAIL)),
        (said(FAIL, "v"), said(FAIL, "w", B), closed(FAIL)),
        (said(FAIL, "v"), closed(FAIL), said(FAIL, "w")),
        (GONE, closed(FAIL)),
        (closed(PASS),),
        (said(PASS, A), closed(PASS)),
        (said(FAIL, "v"), said(FAIL, "w"), closed(PASS)),
        (said(FAIL, "v"), said(FAIL, "w"), closed(UNSURE)),
    ],
)
def test_an_orchestrator_neither_bans_nor_clears_anybody_by_itself(facts: tuple[AnyFact, ...]) -> None:
    with pytest.raises(InvariantBroken, match="which its verdicts and absences do not come to"):
        check_closed(*facts)


def test_a_state_that_holds_and_three_that_do_not() -> None:
    run = Run()
    run.begin(*MINERS)
    run.work(run.lease(run.state.current.roster[0][0])[0])
    lease = run.lease(run.state.current.roster[0][0])[0]
    check_state(run.state)
    run.state.members[lease.hops[1]].banned_until = 5
    with pytest.raises(InvariantBroken, match="holds a lease"):
        check_state(run.state)
    run.state.members[lease.hops[1]].banned_until = -1
    other = next(hotkey for hotkey in run.state.current.roster[1] if hotkey not in lease.hops)
    run.state.current.work[other] = Work(head=digest(b"x"), credited={lease.sample: None})
    with pytest.raises(InvariantBroken, match="without a lease"):
        check_state(run.state)
    run.state.current.work.clear()
    run.state.current.roster = ((A,), (A,))
    with pytest.raises(InvariantBroken, match="two stages"):
        check_state(run.state)


@pytest.mark.parametrize("weights", [{}, {A: 1.0}, {A: 0.25, B: 0.75}])
def test_weights_that_hold(weights: dict[Hotkey, float]) -> None:
    check_weights(weights)


@pytest.mark.parametrize("weights", [{A: float("nan")}, {A: -0.5, B: 1.5}, {A: 0.5}, {A: 2.0}])
def test_weights_that_do_not(weights: dict[Hotkey, float]) -> None:
    with pytest.raises(InvariantBroken):
        check_weights(weights)

"""The record folded into accounts: what a score follows from (system.md 4)."""

import msgspec
import pytest

from subnet import wire
from subnet.frames import digest
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.ledger import (
    Absent,
    AnyFact,
    CaseClosed,
    Committed,
    Credited,
    Entry,
    EpochPublished,
    EpochStarted,
    Evaluated,
    LossRecorded,
    RootCommitted,
    RunCreated,
    SampleDropped,
    ScoresPosted,
    ShardMerged,
    UploadAccepted,
    VerdictRecorded,
    Voided,
)
from subnet.types import NO_DIGEST, BlobRef, Digest, Epoch, Hotkey, Outcome, Phase, SampleId, StageIndex
from tests.unit.orchestration import CONFIG, MINERS, START, Run

A, B, C = Hotkey("a"), Hotkey("b"), Hotkey("c")
E = Epoch(0)
STARTED = EpochStarted(epoch=E, beacon="b", roster=((A,), (B, C)))


def fold(*facts: AnyFact) -> Accounts:
    return Accounts().add(Entry(seq=seq, at_s=0.0, fact=fact, head=NO_DIGEST) for seq, fact in enumerate(facts))


def credit(hotkey: Hotkey, sample: int, stage: int) -> Credited:
    return Credited(epoch=E, sample=SampleId(sample), stage=StageIndex(stage), hotkey=hotkey)


def closed(hotkey: Hotkey, outcome: Outcome) -> CaseClosed:
    return CaseClosed(epoch=E, hotkey=hotkey, segment=0, outcome=outcome, banned_until=E, at_epoch=E)


def test_credit_is_weighted_by_the_stages_flops() -> None:
    account = fold(STARTED, credit(A, 0, 0), credit(A, 1, 0), credit(B, 0, 1)).epoch(E)
    found = account.contributions((10, 25))
    assert [(c.hotkey, c.stage, c.units, c.volume) for c in found] == [(A, 0, 2, 2.0), (B, 1, 1, 2.5)]


def test_voided_units_are_taken_back_and_counted() -> None:
    void = Voided(epoch=E, hotkey=A, samples=(SampleId(1), SampleId(7)))
    account = fold(STARTED, credit(A, 0, 0), credit(A, 1, 0), void).epoch(E)
    assert list(account.units[A]) == [0]
    assert account.num_voided == {A: 2}
    assert fold(void).epoch(E).units == {}, "a record that voids what was never credited is refused elsewhere"


def test_an_epoch_counts_for_who_uploaded_and_was_there() -> None:
    uploads = [UploadAccepted(epoch=E, hotkey=hotkey) for hotkey in (A, B)]
    work = [credit(A, 0, 0), credit(B, 0, 1), credit(C, 1, 1)]
    assert fold(STARTED, *work, *uploads).epoch(E).voided == (C,)
    absent = Absent(epoch=E, hotkey=B, segment=0)
    assert fold(STARTED, *work, *uploads, absent).epoch(E).voided == (B, C)


def merged(reported: tuple[Digest, ...], accepted: Digest, *, is_refereed: bool) -> ShardMerged:
    ref = BlobRef(key="k", digest=accepted, size_bytes=4)
    return ShardMerged(
        epoch=E, stage=StageIndex(1), shard=0, reducers=(B, C), reported=reported, accepted=ref, is_refereed=is_refereed
    )


@pytest.mark.parametrize(
    ("reported", "is_refereed", "false"),
    [
        (("right", "right"), False, ()),
        (("right", "wrong"), True, (C,)),
        (("wrong", "wronger"), True, (B, C)),
        (("right", ""), True, ()),
        (("", ""), True, ()),
    ],
)
def test_a_copy_that_the_referee_contradicts_voids_its_epoch(
    reported: tuple[str, str], is_refereed: bool, false: tuple[Hotkey, ...]
) -> None:
    """A missing copy is no lie: who was killed must not pay for it."""
    names = tuple(digest(name.encode()) if name else NO_DIGEST for name in reported)
    fact = merged(names, digest(b"right"), is_refereed=is_refereed)
    account = fold(STARTED, fact).epoch(E)
    assert account.false_reducers == account.voided == false
    assert account.shards == [fact]


def test_convictions_are_those_of_closed_cases() -> None:
    account = fold(closed(B, Outcome.FAIL), closed(A, Outcome.PASS), closed(C, Outcome.INCONCLUSIVE)).epoch(E)
    assert account.failed == (B,)


def test_the_rest_of_the_record_has_its_place() -> None:
    run = Run()
    run.begin(*MINERS)
    run.train()
    run.commit()
    validator = run.state.cases[E, MINERS[0]].asked[-1]
    run.done(MINERS[0], run.answer(MINERS[0]))
    run.done(validator, run.verdict(validator, MINERS[0], Outcome.PASS))
    run.upload()
    run.merge()
    drawn = run.state.evaluations[E].validator
    run.done(drawn, wire.PostEvaluation(epoch=E, loss=2.0, loss_wires_zeroed=3.0))
    run.done(drawn, wire.PostScores(segment=0, ledger_head=digest(b"x"), scores={}, weights={}))
    accounts = Accounts().add(run.entries)
    (account,) = accounts.published()
    assert isinstance(accounts.created, RunCreated)
    assert account.stage_of == {miner: run.stage_of(miner) for miner in MINERS}
    assert sorted(account.committed) == sorted(account.uploaded) == sorted(MINERS)
    assert len(account.losses) == len(run.facts(LossRecorded))
    assert account.num_dropped == len(run.facts(SampleDropped))
    assert account.root == run.facts(RootCommitted)[0]
    assert account.snapshots == run.facts(EpochPublished)[0]
    assert account.evaluation == run.facts(Evaluated)[0]
    assert [account.committed[miner] for miner in sorted(MINERS)] == sorted(
        run.facts(Committed), key=lambda fact: fact.hotkey
    )
    assert len(account.verdicts) == len(run.facts(VerdictRecorded)) == 1
    assert account.outcomes == {MINERS[0]: Outcome.PASS}
    assert account.beacon is not None and account.beacon.beacon == "b1"
    assert len(run.facts(ScoresPosted)) == 1
    assert run.is_in(Phase.PUBLISHED) and START not in run.state.snapshots


def test_samples_that_ran_out_are_counted() -> None:
    run = Run()
    run.begin(*MINERS)
    run.lease(run.state.current.roster[0][0], 3)
    run.tick(CONFIG.deadlines.sample_s)
    account = Accounts().add(run.entries).epoch(E)
    assert account.num_dropped == 3
    assert msgspec.structs.asdict(run.facts(SampleDropped)[0])["reason"] == "its lease ran out"

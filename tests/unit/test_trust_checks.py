"""What an outsider finds wrong about flags and recomputed shards."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from neurons.checks import History, read_history
from neurons.flagging import find_flags
from neurons.trust_checks import check_audit_draws, check_flags, check_shard_audits
from subnet import wire
from subnet.draws import uniform
from subnet.merging.audits import audited_shards
from subnet.orchestration.audits import PROBATION_PROBABILITY
from subnet.orchestration.ledger import (
    AnyFact,
    BeaconSeen,
    Challenged,
    EpochPublished,
    Flagged,
    Leased,
    LossRecorded,
    OutputRepeated,
    ReducerConvicted,
    ShardAudited,
    ShardMerged,
    Voided,
)
from subnet.types import Epoch, Hotkey, LossFlag, SampleId, StageIndex
from tests.unit.recorded import CONFIG as RUN
from tests.unit.recorded import A, B, Book, C, D, V, altered, commitment, ref

STAGES = tuple(tuple(Hotkey(f"{stage}{name}") for name in "abcd") for stage in "xyz")
HARMFUL = STAGES[0][1]


def history(book: Book) -> History:
    found, whole = read_history(book.seal().segments, owner=V)
    assert whole.holds
    return found


def book_with_losses() -> Book:
    rng, book = np.random.default_rng(1), Book()
    for sample in range(320):
        hops = tuple(stage[int(at)] for stage, at in zip(STAGES, rng.integers(0, 4, 3), strict=True))
        loss = 4.0 + 0.1 * float(rng.standard_normal()) + 0.6 * (hops[0] == HARMFUL)
        number = SampleId(sample)
        book.say(Leased(epoch=Epoch(0), sample=number, attempt=0, hops=hops, deadline_s=1.0))
        book.say(LossRecorded(epoch=Epoch(0), sample=number, loss=loss))
    return book.say(EpochPublished(epoch=Epoch(0), snapshots=(ref("a"), ref("b")), participants=()))


def true_flag() -> LossFlag:
    (flag,) = find_flags(history(book_with_losses()).record.accounts, Epoch(0), RUN_CLASP)
    return LossFlag(
        run_id="r",
        epoch=Epoch(0),
        hotkey=flag.hotkey,
        stage=flag.stage,
        validator=V,
        effect=flag.effect,
        standard_error=flag.standard_error,
        z=flag.z,
        num_samples=flag.num_samples,
        signature="s",
    )


RUN_CLASP = Book().incentives.clasp


FLAG = LossFlag(
    run_id="r",
    epoch=Epoch(-1),
    hotkey=A,
    stage=StageIndex(0),
    validator=V,
    effect=0.1,
    standard_error=0.01,
    z=9.0,
    num_samples=40,
)


def signed(hotkey: Hotkey, message: bytes, signature: str) -> bool:
    return signature == "s"


def test_a_flag_that_follows_holds() -> None:
    flag = true_flag()
    assert flag.hotkey == HARMFUL
    near = msgspec.structs.replace(flag, z=flag.z * (1 + 1e-4))
    finding = check_flags(history(book_with_losses().say(Flagged(flag=flag), Flagged(flag=near))), signed)
    assert (finding.holds, finding.detail) == (True, "2 flags")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda flag: msgspec.structs.replace(flag, signature=""), "is not signed by it"),
        (lambda flag: msgspec.structs.replace(flag, hotkey=STAGES[0][2]), "has no ground in the record"),
        (lambda flag: msgspec.structs.replace(flag, z=flag.z + 1.0), "says z"),
        (lambda flag: msgspec.structs.replace(flag, effect=9.0), "says effect 9"),
    ],
)
def test_a_false_flag_names_its_validator(change: Callable[[LossFlag], LossFlag], text: str) -> None:
    book = book_with_losses()
    book.say(Flagged(flag=change(true_flag())))
    finding = check_flags(history(book), signed)
    assert finding.holds is False
    assert text in finding.detail and f"{V}'s flag on" in finding.detail


# ---- audits ----


def audits_of(*challenged: Hotkey, probability: float = 0.0, extra: tuple[AnyFact, ...] = ()) -> History:
    """An epoch in which A and B commit with two units each and C with none, then its beacon and who was challenged."""
    config = altered(RUN, "audit", probability=probability, probation_epochs=0)
    book = Book(config=config).start(0)
    for sample, hops in enumerate([(A, C), (A, C), (B, C), (B, C)]):
        book.sample(0, sample, *hops)
    book.say(Voided(epoch=Epoch(0), hotkey=C, samples=tuple(SampleId(sample) for sample in range(4))), *extra)
    book.say(*(commitment(0, hotkey) for hotkey in (A, B, C)), commitment(0, D, num_batches=0, num_checkpoints=1))
    book.say(BeaconSeen(epoch=Epoch(0), at_block=1, beacon=BEACON))
    book.say(
        *(Challenged(epoch=Epoch(0), hotkey=hotkey, stage=StageIndex(0), segment=0, auditor=V) for hotkey in challenged)
    )
    return history(book)


BEACON = next(
    text
    for text in map(str, range(1000))
    if uniform(text, "audit", 0, C)
    < PROBATION_PROBABILITY
    < min(uniform(text, "audit", 0, hotkey) for hotkey in (A, B))
)
"""Draws a miner on probation, which C still is without credited work, and none of the others."""


def test_audits_fall_where_the_beacon_draws_them() -> None:
    finding = check_audit_draws(audits_of(C))
    assert (finding.holds, finding.detail) == (True, "1 audits")
    assert check_audit_draws(audits_of(A, B, C, probability=1.0)).holds
    assert check_audit_draws(audits_of()).holds, "without a validator nobody is audited"


def test_a_flag_on_record_makes_the_draw_certain() -> None:
    flag = msgspec.structs.replace(FLAG, hotkey=A)
    older = msgspec.structs.replace(flag, epoch=Epoch(-20))
    assert check_audit_draws(audits_of(A, C, extra=(Flagged(flag=flag), Flagged(flag=older)))).holds
    spared = check_audit_draws(audits_of(C, extra=(Flagged(flag=flag),)))
    assert spared.detail == f"epoch 0: {A} was drawn and not audited"


def test_who_sent_the_same_twice_is_drawn_for_certain() -> None:
    repeated = OutputRepeated(epoch=Epoch(0), hotkey=A, sample=SampleId(1), first=SampleId(0))
    assert check_audit_draws(audits_of(A, C, extra=(repeated,))).holds
    assert check_audit_draws(audits_of(C, extra=(repeated,))).detail == f"epoch 0: {A} was drawn and not audited"


def test_a_favour_and_a_persecution_are_named() -> None:
    assert check_audit_draws(audits_of(A, C)).detail == f"epoch 0: {A} was audited and not drawn"
    favoured = check_audit_draws(audits_of(A, B, probability=1.0))
    assert favoured.detail == f"epoch 0: {C} was drawn and not audited"
    assert check_audit_draws(History(owner=V)).holds is False


# ---- shards ----

PAIRS = ((A, B), (A, C), (B, C))


def merged(epoch: int, shard: int, **changes: object) -> ShardMerged:
    fact = ShardMerged(
        epoch=Epoch(epoch),
        stage=StageIndex(0),
        shard=shard,
        reducers=PAIRS[shard % 3],
        reported=(ref("x").digest, ref("x").digest),
        accepted=ref("x"),
        is_refereed=False,
    )
    return msgspec.structs.replace(fact, **changes)


def audited(epoch: int, shard: int, outcome: str = "x") -> ShardAudited:
    return ShardAudited(
        epoch=Epoch(epoch),
        stage=StageIndex(0),
        shard=shard,
        reducers=PAIRS[shard % 3],
        accepted=ref("x"),
        recomputed=ref(outcome),
    )


def convicted(epoch: int, shard: int, hotkey: Hotkey) -> ReducerConvicted:
    return ReducerConvicted(
        epoch=Epoch(epoch),
        hotkey=hotkey,
        stage=StageIndex(0),
        shard=shard,
        banned_until=Epoch(9),
        at_epoch=Epoch(1),
    )


def published(epoch: int) -> tuple[AnyFact, ...]:
    beacon = BeaconSeen(epoch=Epoch(epoch), at_block=1, beacon=f"beacon {epoch}")
    return beacon, EpochPublished(epoch=Epoch(epoch), snapshots=(ref("a"), ref("b")), participants=())


def book_of(*extra: AnyFact, fraction: float = 0.5, num_epochs: int = 0, upto: int = 3) -> Book:
    """Nine agreeing shards in epoch 0, then quiet epochs."""
    config = altered(altered(RUN, "merge", audit_fraction=fraction), "training", num_epochs=num_epochs)
    book = Book(config=config).say(*(merged(0, shard) for shard in range(9)), *published(0))
    for epoch in range(1, upto):
        book.say(*published(epoch))
    return book.say(*extra)


def drawn(beacon: str, fraction: float = 0.5) -> tuple[int, ...]:
    plans = [wire.ShardPlan(shard=shard, start=0, stop=1, reducers=PAIRS[shard % 3]) for shard in range(9)]
    return audited_shards(plans, fraction, beacon=beacon, stage=StageIndex(0), epoch=Epoch(0))


def test_shards_recomputed_as_drawn_hold() -> None:
    numbers = drawn("beacon 1")
    assert 0 < len(numbers) < 9
    finding = check_shard_audits(history(book_of(*(audited(0, shard) for shard in numbers))))
    assert (finding.holds, finding.detail) == (True, f"{len(numbers)} shards")


def test_a_shard_that_was_not_drawn_or_not_recomputed_is_named() -> None:
    numbers = drawn("beacon 1")
    (other, *_) = sorted(set(range(9)) - set(numbers))
    spare = check_shard_audits(history(book_of(*(audited(0, shard) for shard in (*numbers, other)))))
    assert spare.detail == f"epoch 0: shard {other} of stage 0 was recomputed and not drawn"
    missing = check_shard_audits(history(book_of(*(audited(0, shard) for shard in numbers[1:]))))
    assert missing.detail == f"epoch 0: shard {numbers[0]} of stage 0 was drawn and not recomputed"
    assert check_shard_audits(history(book_of(upto=2))).holds, "still under way"
    assert check_shard_audits(history(book_of(upto=1))).holds, "not drawn yet"


def test_refereed_and_single_shards_are_not_drawn() -> None:
    config = altered(RUN, "merge", audit_fraction=1.0)
    book = Book(config=config).say(
        merged(0, 0, is_refereed=True),
        merged(0, 1, reducers=(A,), reported=(ref("x").digest,)),
        *published(0),
        *published(1),
        *published(2),
    )
    assert check_shard_audits(history(book)).holds


def test_the_last_epoch_of_a_bounded_run_is_drawn_from_the_records_head() -> None:
    book = book_of(num_epochs=1, upto=1)
    numbers = drawn(book.ledger.head)
    assert check_shard_audits(history(book.say(*(audited(0, shard) for shard in numbers)))).holds
    (other, *_) = sorted(set(range(9)) - set(numbers))
    wrong = check_shard_audits(history(book_of(audited(0, other), num_epochs=1, upto=1)))
    assert wrong.holds is False


def test_convictions_follow_from_false_shards_and_from_nothing_else() -> None:
    both = [convicted(0, 0, hotkey) for hotkey in PAIRS[0]]
    assert check_shard_audits(history(book_of(audited(0, 0, "y"), *both, fraction=1.0, upto=2))).holds
    spared = check_shard_audits(history(book_of(audited(0, 0, "y"), both[0], fraction=1.0, upto=2)))
    assert spared.detail == f"epoch 0: {B} reduced a false shard and was not convicted"
    framed = check_shard_audits(history(book_of(audited(0, 0), both[0], fraction=1.0, upto=2)))
    assert framed.detail == f"epoch 0: {A} was convicted for no shard"

"""Why a hotkey earns what it earns: each condition of users.md 21, the first that fails named."""

from pathlib import Path

import msgspec
import pytest

from incentives.config import Decay, IncentiveConfig
from neurons.exit_codes import ExitCode
from neurons.explain import ChainView, Step, explanation, find_hotkey, ladder, run_explain
from neurons.trail import Trail
from subnet.errors import InvalidConfig, StartupRefused
from subnet.orchestration.ledger import (
    Absent,
    Answered,
    CaseClosed,
    Challenged,
    Flagged,
    Leased,
    MergeMissed,
    OutputRepeated,
    ReducerConvicted,
    ShardAudited,
    UploadAccepted,
    UploadCopied,
    UploadRejected,
    VerdictRecorded,
    Voided,
)
from subnet.types import (
    Epoch,
    Hotkey,
    LossFlag,
    Measures,
    Metagraph,
    Neuron,
    Outcome,
    SampleId,
    StageIndex,
    Uid,
    Verdict,
)
from tests.unit.recorded import INCENTIVES, A, B, Book, C, D, V, commitment, quiet_epoch, ref

OWNER = Hotkey("5O" + "x" * 46)
STRANGER = Hotkey("5S" + "x" * 46)


def chain(*, paid: float = 1.5, u16: int = 40000, registered: tuple[Hotkey, ...] = (A, B, C, D, V, OWNER)) -> ChainView:
    neurons = tuple(
        Neuron(
            uid=Uid(uid),
            hotkey=hotkey,
            coldkey="c",
            stake=1.0,
            validator_permit=hotkey == V,
            registered_at_block=1,
            last_update_block=2,
            is_active=True,
            incentive=paid / 10,
            dividends=0.0,
            emission=paid,
        )
        for uid, hotkey in enumerate(registered)
    )
    metagraph = Metagraph(netuid=2, at_block=9, owner_hotkey=OWNER, tempo=40, neurons=neurons)
    return ChainView(metagraph=metagraph, weights={V: {Uid(uid): u16 for uid in range(4)}, OWNER: {}})


def book_of(num_epochs: int, incentives: IncentiveConfig = INCENTIVES) -> Book:
    book = Book(incentives=incentives)
    for epoch in range(num_epochs):
        quiet_epoch(book, epoch)
    return book


def explained(book: Book, hotkey: Hotkey, view: ChainView | None = None) -> str:
    return "\n".join(explanation(book.record(), hotkey, view or chain()))


def first_failing(book: Book, hotkey: Hotkey, view: ChainView | None = None) -> Step:
    record = book.record()
    steps = ladder(record, Trail(hotkey).add(record.entries), view or chain())
    return next(step for step in steps if step.holds is False)


def verdict(outcome: Outcome, *, measures: Measures | None = None) -> Verdict:
    return Verdict(
        run_id="r", epoch=Epoch(0), hotkey=C, segment=0, validator=V, outcome=outcome, reason="why", measures=measures
    )


def test_the_chain_from_passes_to_emission_has_every_number_and_its_event() -> None:
    text = explained(book_of(2), C)
    assert "1 stages assigned (event 3)" in text
    assert "epoch 0: stage 1; published" in text
    assert "leased     2 samples (events 6..18)" in text
    assert "credited   2 units (events 8..20)" in text
    assert "committed  2 batches (event 26)" in text
    assert "upload     accepted (event 27)" in text
    assert "score      3.000 = 0.000 x (1 - 1/30) + 3.000" in text
    assert "score      5.900 = 3.000 x (1 - 1/30) + 3.000" in text
    assert "trust      0.3000 = min(1, 0.25 + 0.75 x 2/30)" in text
    assert "claim      1.770 = score 5.900 x trust 0.3000" in text
    assert "weight     30.0000% of all claims, 5.900" in text
    assert f"uid 2: u16 40000 by {V[:8]}; expected 65535" in text
    assert "emission   1.500000 alpha a tempo, incentive 0.1500" in text
    assert "does not hold" not in text


def test_step_decay_is_told_in_its_own_words() -> None:
    text = explained(book_of(2, IncentiveConfig(decay=Decay.STEP)), A)
    assert "score      4.000 = volume of the last 30 epochs, 2.000 of it from this one" in text


def test_audits_are_told_with_verdicts_and_measures() -> None:
    measures = Measures(
        num_passes=4,
        num_failing=2,
        rel_d=0.5,
        rel_d_max=0.9,
        rel_d_token=0.2,
        rel_d_backward=0.1,
        rel_dw=0.3,
        loss_error=0.001,
        cosine=0.9,
        norm_ratio=1.1,
    )
    book = quiet_epoch(Book(), 0)
    book.say(
        Challenged(epoch=Epoch(0), hotkey=C, stage=StageIndex(1), segment=0, auditor=V),
        Answered(epoch=Epoch(0), hotkey=C, segment=0, start=ref("a"), end=ref("b"), evidence=ref("e")),
        VerdictRecorded(verdict=verdict(Outcome.FAIL, measures=measures)),
        VerdictRecorded(verdict=verdict(Outcome.INCONCLUSIVE)),
        CaseClosed(epoch=Epoch(0), hotkey=C, segment=0, outcome="fail", banned_until=Epoch(217), at_epoch=Epoch(1)),
    ).seal()
    text = explained(book, C)
    assert f"segment 0: drawn, to be replayed by {V[:8]} (event 31)" in text
    assert "segment 0: presented (event 32)" in text
    assert f"fail by {V[:8]}: why; relD 0.5 (largest 0.9), token 0.2, gradients 0.1, dw 0.3" in text
    assert f"inconclusive by {V[:8]}: why (event 34)" in text
    assert "closed in epoch 1: fail, banned until epoch 217 (event 35)" in text
    assert "trust      0, banned until epoch 217" in text
    assert first_failing(book, C).name == "audited"
    assert "epoch 0 failed and was confirmed" in text


def test_flags_copies_and_shards_are_told_beside_the_audits() -> None:
    flag = LossFlag(
        run_id="r",
        epoch=Epoch(0),
        hotkey=C,
        stage=StageIndex(1),
        validator=V,
        effect=0.25,
        standard_error=0.05,
        z=5.0,
        num_samples=40,
    )
    audited = ShardAudited(
        epoch=Epoch(0), stage=StageIndex(1), shard=2, reducers=(C, D), accepted=ref("a"), recomputed=ref("a")
    )
    convicted = ReducerConvicted(
        epoch=Epoch(0), hotkey=C, stage=StageIndex(1), shard=3, banned_until=Epoch(9), at_epoch=Epoch(1)
    )
    book = quiet_epoch(Book(), 0).say(
        Flagged(flag=flag),
        UploadCopied(epoch=Epoch(0), stage=StageIndex(1), pair=(C, D), share=0.9),
        audited,
        msgspec.structs.replace(audited, shard=3, recomputed=ref("b")),
        convicted,
        OutputRepeated(epoch=Epoch(0), hotkey=C, sample=SampleId(4), first=SampleId(2)),
        UploadRejected(epoch=Epoch(0), hotkey=C, stage=StageIndex(1), shard=5),
        MergeMissed(epoch=Epoch(0), hotkey=C, stage=StageIndex(1)),
    )
    text = explained(book.seal(), C)
    assert f"{V[:8]}: its samples lose +0.2500 nats a token, error 0.0500, z 5.00, over 40 samples (event 31)" in text
    assert f"90% of its upload is {D[:8]}'s: credit void (event 32)" in text
    assert f"2, shared with {D[:8]}: recomputed, the same (event 33)" in text
    assert "recomputed, not what both reducers stored (event 34)" in text
    assert "shard      3 was false: banned until epoch 9 (event 35)" in text
    assert "it sent the same for samples 2 and 4: its audits are certain (event 36)" in text
    assert "its part of shard 5 is not what was committed: left out, credit void (event 37)" in text
    assert "its part was missing when half of the time was over: credit void (event 38)" in text
    assert first_failing(book, C).name == "audited"
    assert "nats a token" not in explained(book, A)


def test_a_stranger_is_not_registered_and_a_registered_key_may_not_have_joined() -> None:
    assert first_failing(book_of(1), STRANGER).name == "registered"
    step = first_failing(book_of(1), STRANGER, chain(registered=(A, STRANGER)))
    assert (step.name, step.detail) == ("assigned", "it never joined the run: start strata miner")
    text = explained(book_of(1), STRANGER)
    assert "never assigned a stage" in text
    assert "on chain   not registered on the subnet" in text


def test_each_condition_of_work_is_found_in_its_turn() -> None:
    idle = Book().start(0).sample(0, 0, A, C).finish(0, A, C)
    assert first_failing(idle, B).name == "working"
    leased = Leased(epoch=Epoch(0), sample=SampleId(9), attempt=0, hops=(B, D), deadline_s=1.0)
    assert first_failing(Book().start(0).say(leased).sample(0, 0, A, C).finish(0, A, C), B).name == "delivered"
    few = Book().start(0).sample(0, 0, B, D).sample(0, 1, A, C).finish(0, A, B, C, D)
    assert first_failing(few, B).name == "qualified"
    late = Book().start(0).sample(0, 0, B, D).sample(0, 1, B, D).say(commitment(0, B)).finish(0, D)
    assert first_failing(late, B).name == "merged"


def test_work_that_was_taken_back_is_not_counted() -> None:
    book = Book().start(0).sample(0, 0, B, D).sample(0, 1, B, D)
    book.say(Voided(epoch=Epoch(0), hotkey=B, samples=(SampleId(0), SampleId(1)))).finish(0, B, D)
    assert first_failing(book, B).name == "delivered"
    assert "voided     2 units" in explained(book, B)


def test_an_absence_leaves_nothing_to_score() -> None:
    book = quiet_epoch(Book(), 0).say(Absent(epoch=Epoch(0), hotkey=A, segment=0)).seal()
    step = first_failing(book, A)
    assert step.name == "scored"
    assert "absent from its challenge" in step.detail
    assert "segment 0: not presented in time" in explained(book, A)


def test_weights_and_emission_come_last() -> None:
    assert first_failing(book_of(1), A, chain(u16=0)).name == "weighted on chain"
    step = first_failing(book_of(1), A, chain(paid=0.0))
    assert (step.name, "next tempo" in step.detail) == ("emitted to", True)
    assert "from nobody" in explained(book_of(1), A, ChainView(metagraph=chain().metagraph))


def test_without_a_chain_nothing_is_claimed_about_it() -> None:
    record = book_of(1).record()
    steps = ladder(record, Trail(A).add(record.entries), ChainView(note="the chain is gone"))
    assert [step.name for step in steps if step.holds is None] == ["registered", "weighted on chain", "emitted to"]
    assert "u16 43690 expected; the chain is gone" in explained(book_of(1), A, ChainView(note="the chain is gone"))
    burning = book_of(1, IncentiveConfig(burn_share=0.5))
    assert "weight     10.0000%" in explained(burning, A, ChainView())


def test_an_epoch_under_way_is_shown_and_not_judged() -> None:
    book = quiet_epoch(Book(), 0).start(1).sample(1, 0, A, C).say(UploadAccepted(epoch=Epoch(1), hotkey=A)).seal()
    assert "epoch 1: stage 0; not over" in explained(book, A)
    joined_late = Book().start(0).sample(0, 0, A, C).finish(0, A, C)
    joined_late.say(Leased(epoch=Epoch(1), sample=SampleId(0), attempt=0, hops=(A, STRANGER), deadline_s=1.0)).seal()
    assert "epoch 1: not in its roster; not over" in explained(joined_late, STRANGER)


def test_a_hotkey_is_found_by_its_beginning() -> None:
    record = book_of(1).record()
    assert find_hotkey(record, ChainView(), "5A") == A
    assert find_hotkey(record, ChainView(), STRANGER) == STRANGER
    assert find_hotkey(record, chain(registered=(STRANGER,)), "5S") == STRANGER
    for typed, text in (("5", "4 hotkeys begin"), ("6", "no hotkey begins")):
        with pytest.raises(InvalidConfig, match=text):
            find_hotkey(record, ChainView(), typed)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupRefused) as caught:
        run_explain("5A", str(tmp_path))
    assert caught.value.exit_code == ExitCode.FOREIGN_DIRECTORY

"""Flags: found in the record, taken by the orchestrator, and nothing but the odds of an audit follows (trust.md 3, 4)."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from incentives.config import ClaspConfig
from neurons.flagging import find_flags
from subnet import wire
from subnet.config import AuditConfig, RunConfig, TrainingConfig
from subnet.dashboard.views import run_view
from subnet.errors import Refused
from subnet.orchestration import flags
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.audits import draw_audits
from subnet.orchestration.ledger import Challenged, EpochPublished, Flagged, Leased, LossRecorded
from subnet.orchestration.state import EpochState, Member, State, Turn
from subnet.types import (
    Endpoint,
    Epoch,
    Hotkey,
    LossFlag,
    NumericMode,
    SampleId,
    StageIndex,
)
from tests.unit.recorded import A, Book, C, V, W, checkpoint, ref
from tests.unit.test_merge_trust import chunks, commitment

STAGES = tuple(tuple(Hotkey(f"{stage}{name}") for name in "abcd") for stage in "xyz")
CLASP = ClaspConfig()
Harm = Callable[[tuple[Hotkey, ...]], float]


def accounts_of(harm: Harm, *, num_epochs: int = 3, num_samples: int = 160, seed: int = 0) -> Accounts:
    """Losses that fall from epoch to epoch, and what `harm` adds to those of a pathway."""
    rng, book = np.random.default_rng(seed), Book()
    for epoch in range(num_epochs):
        for sample in range(num_samples):
            hops = tuple(stage[int(at)] for stage, at in zip(STAGES, rng.integers(0, 4, 3), strict=True))
            loss = 5.0 - 0.5 * epoch - 0.4 * sample / num_samples + 0.1 * float(rng.standard_normal()) + harm(hops)
            number = SampleId(sample)
            book.say(Leased(epoch=Epoch(epoch), sample=number, attempt=0, hops=STAGES[0][:3], deadline_s=1.0))
            book.say(Leased(epoch=Epoch(epoch), sample=number, attempt=1, hops=hops, deadline_s=1.0))
            book.say(LossRecorded(epoch=Epoch(epoch), sample=number, loss=loss))
        book.say(EpochPublished(epoch=Epoch(epoch), snapshots=(ref("a"), ref("b")), participants=()))
    return book.seal().record().accounts


def test_a_miner_that_poisons_the_loss_is_flagged_and_nobody_else() -> None:
    accounts = accounts_of(lambda hops: 0.2 * (hops[1] == STAGES[1][2]))
    (flag,) = find_flags(accounts, Epoch(2), CLASP)
    assert (flag.hotkey, flag.stage) == (STAGES[1][2], 1)
    assert flag.effect == pytest.approx(0.2, abs=0.05)
    assert flag.z > 5.0
    assert flag.num_samples > 80


def test_honest_miners_are_not_flagged_though_the_loss_falls() -> None:
    for seed in range(5):
        assert find_flags(accounts_of(lambda _: 0.0, seed=seed), Epoch(2), CLASP) == ()


def test_a_last_stage_that_reports_too_little_is_flagged_as_well() -> None:
    flagged = find_flags(accounts_of(lambda hops: -0.3 * (hops[2] == STAGES[2][0])), Epoch(2), CLASP)
    assert [(flag.hotkey, flag.effect < 0) for flag in flagged] == [(STAGES[2][0], True)]


@pytest.mark.parametrize("loss", [1e308, 1e200, 1e9, -1e308])
def test_a_loss_that_is_no_loss_ends_no_validator_and_hides_nobody(loss: float) -> None:
    """A last-stage miner writes two of them into its receipts; their sum is no number."""
    accounts = accounts_of(lambda hops: 0.4 * (hops[1] == STAGES[1][2]))
    first = accounts.epochs[Epoch(0)]
    for sample in list(first.losses)[:2]:
        first.losses[sample] = loss
    assert STAGES[1][2] in [flag.hotkey for flag in find_flags(accounts, Epoch(2), CLASP)]


def test_only_the_window_up_to_the_epoch_counts() -> None:
    accounts = accounts_of(lambda hops: 0.8 * (hops[0] == STAGES[0][1]))
    assert find_flags(accounts, Epoch(-1), CLASP) == ()
    narrow = msgspec.structs.replace(CLASP, window_epochs=1)
    (flag,) = find_flags(accounts, Epoch(1), narrow)
    assert flag.num_samples < 60
    assert find_flags(accounts, Epoch(9), narrow) == ()


@pytest.mark.parametrize(("sequential", "counts"), [(True, [40, 80, 40]), (False, [40, 80, 80])])
def test_windows_of_a_sequential_test_follow_each_other_and_others_slide(sequential: bool, counts: list[int]) -> None:
    accounts = accounts_of(lambda hops: 0.8 * (hops[0] == STAGES[0][1]))
    config = msgspec.structs.replace(CLASP, window_epochs=2, sequential=sequential)
    found = [find_flags(accounts, Epoch(epoch), config) for epoch in range(3)]
    assert [[flag.hotkey for flag in flags] for flags in found] == [[STAGES[0][1]]] * 3
    assert [flags[0].num_samples for flags in found] == pytest.approx(counts, abs=15)


def test_too_few_samples_or_an_ill_conditioned_design_give_no_flag() -> None:
    def harm(hops: tuple[Hotkey, ...]) -> float:
        return 1.0 * (hops[0] == STAGES[0][1])

    assert find_flags(accounts_of(harm, num_epochs=1, num_samples=12), Epoch(0), CLASP) == ()
    accounts = accounts_of(harm)
    strict = msgspec.structs.replace(CLASP, max_condition=1.0)
    assert find_flags(accounts, Epoch(2), CLASP)
    assert find_flags(accounts, Epoch(2), strict) == ()


# ---- what the orchestrator makes of a flag ----


def config_of(probability: float = 0.0) -> RunConfig:
    return RunConfig(
        training=TrainingConfig(num_stages=2, min_batches=1, target_batches=1),
        audit=AuditConfig(probability=probability, probation_epochs=0, flag_epochs=3),
    )


def turn_at(epoch: int) -> Turn:
    state = State(
        run_id="r",
        snapshots=(ref("a"), ref("b")),
        neighbours=((), ()),
        registered={V: 1, W: 1},
        permits=(V, W),
        auditors={V: True},
    )
    state.members = {
        hotkey: Member(
            hotkey=hotkey,
            stage=StageIndex(stage),
            endpoint=Endpoint(host="h", port=1),
            mode=NumericMode.FP32,
            session="s",
            first_epoch=Epoch(0),
            epochs_credited=9,
        )
        for stage, hotkey in enumerate((A, C))
    }
    state.current = EpochState(epoch=Epoch(epoch), next_beacon="beacon")
    commit = msgspec.structs.replace(commitment(chunks("a")), checkpoints=(checkpoint(0), checkpoint(1)))
    state.current.commits = {A: commit, C: commit}
    return Turn(state=state, config=config_of(), now_s=1.0)


def flag_on(hotkey: Hotkey, *, epoch: int = 4, **changes: object) -> LossFlag:
    flag = LossFlag(
        run_id="r",
        epoch=Epoch(epoch),
        hotkey=hotkey,
        stage=StageIndex(1),
        validator=V,
        effect=0.2,
        standard_error=0.02,
        z=8.0,
        num_samples=99,
    )
    return msgspec.structs.replace(flag, **changes)


def facts(turn: Turn, kind: type) -> list[object]:
    return [entry.fact for entry in turn.state.ledger.tail or [] if isinstance(entry.fact, kind)]


def test_a_flag_makes_the_audit_certain_for_some_epochs_and_does_nothing_else() -> None:
    for epoch, num_audits in ((5, 1), (7, 1), (8, 0)):
        turn = turn_at(5)
        assert flags.post_flags(turn, V, wire.PostFlags(flags=(flag_on(C),))) == wire.Done()
        assert turn.state.members[C].banned_until < 0
        turn.state.current.epoch = Epoch(epoch)
        draw_audits(turn)
        assert [fact.hotkey for fact in facts(turn, Challenged) if isinstance(fact, Challenged)] == [C] * num_audits


def test_a_repeated_flag_is_recorded_once_and_an_older_one_shortens_nothing() -> None:
    turn = turn_at(5)
    for _ in range(2):
        flags.post_flags(turn, V, wire.PostFlags(flags=(flag_on(C),)))
    flags.post_flags(turn, V, wire.PostFlags(flags=(flag_on(C, epoch=2),)))
    assert facts(turn, Flagged) == [Flagged(flag=flag_on(C)), Flagged(flag=flag_on(C, epoch=2))]
    assert turn.state.members[C].flagged_until == 4 + 3
    flags.forget_old_flags(turn)
    assert len(turn.state.flags) == 2
    turn.state.current.epoch = Epoch(6)
    flags.forget_old_flags(turn)
    assert list(turn.state.flags) == [(4, C, V)]


@pytest.mark.parametrize(
    ("sender", "flag", "text"),
    [
        (W, flag_on(C, validator=W), "only a permit holder that enlisted"),
        (V, flag_on(C, validator=W), "by the validator that signed it"),
        (V, flag_on(C, run_id="other"), "for this run"),
        (V, flag_on(V), "no miner of this run"),
        (V, flag_on(C, epoch=5), "not published"),
        (V, flag_on(C, epoch=1), "too long ago"),
    ],
)
def test_a_flag_that_does_not_fit_is_refused_and_none_of_its_post_counts(
    sender: Hotkey, flag: LossFlag, text: str
) -> None:
    turn = turn_at(5)
    with pytest.raises(Refused, match=text):
        flags.post_flags(turn, sender, wire.PostFlags(flags=(flag_on(A), flag)))
    assert not facts(turn, Flagged)


def test_the_run_view_shows_each_flagged_miner_once() -> None:
    turn = turn_at(5)
    turn.state.auditors[W] = True
    flags.post_flags(turn, V, wire.PostFlags(flags=(flag_on(C), flag_on(A))))
    flags.post_flags(turn, W, wire.PostFlags(flags=(flag_on(C, validator=W, z=9.0, effect=0.3),)))
    shown = run_view(turn.state).flags
    assert [(view.hotkey, view.validators, view.z, view.effect) for view in shown] == [
        (A, (V,), 8.0, 0.2),
        (C, (V, W), 9.0, 0.3),
    ]


def test_an_account_keeps_the_flags_of_its_epoch() -> None:
    accounts = Book().say(Flagged(flag=flag_on(C, epoch=0))).seal().record().accounts
    assert accounts.epochs[Epoch(0)].flags == [flag_on(C, epoch=0)]

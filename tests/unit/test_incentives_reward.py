import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from incentives.config import Decay, IncentiveConfig
from incentives.reward import EpochOutcome, Rate, Score, Scoreboard, scores, volumes
from subnet.errors import InvariantBroken
from subnet.types import Contribution, Epoch, Hotkey, StageIndex

A, B, C = Hotkey("5A"), Hotkey("5B"), Hotkey("5C")
OURS = IncentiveConfig()
PAPER = IncentiveConfig(decay=Decay.STEP)


def work(hotkey: Hotkey, epoch: int, volume: float, stage: int = 0) -> Contribution:
    return Contribution(hotkey=hotkey, epoch=Epoch(epoch), stage=StageIndex(stage), units=1, volume=volume)


def epoch(
    number: int, done: dict[Hotkey, float], failed: tuple[Hotkey, ...] = (), voided: tuple[Hotkey, ...] = ()
) -> EpochOutcome:
    contributions = tuple(work(hotkey, number, volume) for hotkey, volume in done.items())
    return EpochOutcome(epoch=Epoch(number), contributions=contributions, failed=failed, voided=voided)


def steady(num_epochs: int, volume: float = 2.0) -> list[EpochOutcome]:
    return [epoch(number, {A: volume}) for number in range(num_epochs)]


def outcomes() -> st.SearchStrategy[list[EpochOutcome]]:
    keys = st.sampled_from([A, B, C])
    one = st.tuples(
        st.dictionaries(keys, st.floats(0, 1e6)),
        st.lists(keys, max_size=1).map(tuple),
        st.lists(keys, max_size=2, unique=True).map(tuple),
    )
    return st.lists(one, max_size=12).map(lambda rows: [epoch(number, *row) for number, row in enumerate(rows)])


def test_exponential_decay_follows_the_recurrence() -> None:
    expected = 0.0
    for _ in range(50):
        expected = expected * (1 - 1 / 30) + 2.0
    assert scores(steady(50), OURS)[A].score == expected
    assert scores(steady(2_000), OURS)[A].score == pytest.approx(2.0 * 30)


def test_step_decay_counts_the_last_window_in_full_and_nothing_older() -> None:
    assert scores(steady(29), PAPER)[A].score == 29 * 2.0
    assert scores(steady(50), PAPER)[A].score == 30 * 2.0
    idle = [epoch(number, {}) for number in range(50, 79)]
    assert scores(steady(50) + idle, PAPER)[A].score == 2.0
    gone = scores([*steady(50), *idle, epoch(79, {})], PAPER)[A]
    assert gone.score == 0.0
    assert gone.reason == "no credited work within 30 epochs: the last was in epoch 49"


def test_a_score_ages_though_its_miner_is_gone() -> None:
    idle = [epoch(number, {B: 1.0}) for number in range(10, 40)]
    before, after = scores(steady(10), OURS)[A], scores(steady(10) + idle, OURS)[A]
    assert after.score == pytest.approx(before.score * (1 - 1 / 30) ** 30)


def test_epochs_that_the_record_does_not_hold_pass_too() -> None:
    sparse = scores([epoch(0, {A: 1.0}), epoch(3, {B: 1.0})], OURS)
    dense = scores([epoch(0, {A: 1.0}), epoch(1, {}), epoch(2, {}), epoch(3, {B: 1.0})], OURS)
    assert sparse == dense


def test_trust_grows_in_a_straight_line_to_one() -> None:
    assert [scores(steady(count), OURS)[A].trust for count in (1, 15, 29, 30, 31)] == [
        0.25 + 0.75 * 1 / 30,
        0.25 + 0.75 * 15 / 30,
        0.25 + 0.75 * 29 / 30,
        1.0,
        1.0,
    ]


def test_being_audited_changes_nothing() -> None:
    """Only failures are in an outcome at all, so two equal miners earn the same."""
    result = scores([epoch(number, {A: 2.0, B: 2.0}) for number in range(5)], OURS)
    assert (result[A].score, result[A].trust) == (result[B].score, result[B].trust)


def test_a_failed_audit_takes_everything_and_bans() -> None:
    config = IncentiveConfig(ban_epochs=4)
    history = [epoch(number, {A: 2.0}, failed=(A,) if number == 3 else ()) for number in range(9)]
    for length in range(4, 8):
        banned = scores(history[:length], config)[A]
        assert (banned.score, banned.trust, banned.clean_epochs, banned.banned_until) == (0.0, 0.0, 0, 8)
        assert banned.reason == "banned until epoch 8: its audit of epoch 3 failed and was confirmed"
    back = scores(history, config)[A]
    assert back == Score(hotkey=A, score=2.0, trust=0.275, clean_epochs=1, banned_until=None, reason="")


def test_a_second_failure_while_banned_prolongs_the_ban() -> None:
    config = IncentiveConfig(ban_epochs=4)
    history = [epoch(0, {A: 1.0}, failed=(A,)), epoch(2, {}, failed=(A,))]
    assert scores(history, config)[A].banned_until == 7


def test_a_void_epoch_earns_nothing_and_the_clean_count_starts_anew() -> None:
    result = scores([*steady(5), epoch(5, {A: 2.0}, voided=(A,)), epoch(6, {A: 2.0})], OURS)[A]
    aged = scores([*steady(5), epoch(5, {}), epoch(6, {A: 2.0})], OURS)[A]
    assert result.score == aged.score
    assert (result.clean_epochs, aged.clean_epochs) == (1, 6)


@pytest.mark.parametrize(
    ("outcome", "config", "words"),
    [
        (epoch(4, {A: 1.0}, voided=(A,)), OURS, "credit of epoch 4 is void: absent from its challenge"),
        (epoch(4, {A: 0.0}), OURS, "no credited work yet"),
    ],
)
def test_a_hotkey_that_earned_nothing_is_told_why(outcome: EpochOutcome, config: IncentiveConfig, words: str) -> None:
    result = scores([outcome], config)[A]
    assert result.score == 0.0
    assert result.reason.startswith(words)


def test_a_floor_of_zero_pays_from_the_first_clean_epoch() -> None:
    config = IncentiveConfig(trust_floor=0.0)
    paid = scores([epoch(0, {A: 1.0})], config)[A]
    assert (paid.trust, paid.reason) == (1 / 30, "")
    void = scores([epoch(0, {A: 1.0}), epoch(1, {}, voided=(A,))], config)[A]
    assert void.score > 0.0
    assert void.reason.startswith("no clean epoch since its credit was last void")


def test_volume_is_summed_over_stages_and_capped_by_the_measured_rate() -> None:
    outcome = EpochOutcome(
        epoch=Epoch(2),
        contributions=(work(A, 2, 3.0), work(B, 2, 9.0), work(A, 2, 4.0, stage=1)),
        rates=(Rate(hotkey=A, volume=4.0), Rate(hotkey=C, volume=1.0)),
    )
    assert volumes(outcome, OURS) == {A: 6.0, B: 9.0}


@pytest.mark.parametrize("volume", [math.nan, math.inf, -1.0, 1e31])
def test_a_volume_that_is_no_quantity_stops_the_fold(volume: float) -> None:
    with pytest.raises(InvariantBroken, match="volume"):
        scores([epoch(0, {A: volume})], OURS)


def test_an_epoch_counts_once() -> None:
    with pytest.raises(InvariantBroken, match="epoch 1 follows one of epoch 1"):
        scores([epoch(1, {A: 1.0}), epoch(1, {A: 1.0})], OURS)


def test_a_contribution_belongs_to_its_epoch() -> None:
    with pytest.raises(InvariantBroken, match="of epoch 1 in the outcome of 2"):
        scores([EpochOutcome(epoch=Epoch(2), contributions=(work(A, 1, 1.0),))], OURS)


def test_nothing_recorded_scores_nobody() -> None:
    assert scores([], OURS) == {}


@given(history=outcomes(), seed=st.randoms(use_true_random=False), decay=st.sampled_from(Decay))
def test_scores_ignore_order(history: list[EpochOutcome], seed: object, decay: Decay) -> None:
    config = IncentiveConfig(decay=decay, ban_epochs=3, gamma_hours=1.0)
    expected = scores(history, config)
    mixed = [
        EpochOutcome(
            epoch=outcome.epoch,
            contributions=outcome.contributions[::-1],
            failed=outcome.failed[::-1],
            voided=outcome.voided[::-1],
        )
        for outcome in history
    ]
    seed.shuffle(mixed)  # type: ignore[attr-defined]  # a random.Random, whose module is banned
    assert scores(mixed, config) == expected
    assert list(expected) == sorted(expected)


@given(history=outcomes(), decay=st.sampled_from(Decay))
def test_scores_are_numbers_and_unpaid_means_a_reason(history: list[EpochOutcome], decay: Decay) -> None:
    config = IncentiveConfig(decay=decay, ban_epochs=2, gamma_hours=1.0)
    board = Scoreboard(config)
    for outcome in history:
        board.add(outcome)
        for score in board.scores().values():
            assert math.isfinite(score.score)
            assert score.score >= 0.0
            assert 0.0 <= score.trust <= 1.0
            assert (score.reason == "") == (score.score * score.trust > 0.0)
            if score.banned_until is not None:
                assert score.score == score.trust == 0.0
    assert board.scores() == scores(history, config)


@given(history=outcomes(), extra=st.floats(0, 1e3))
def test_more_work_never_lowers_a_score(history: list[EpochOutcome], extra: float) -> None:
    more = [
        EpochOutcome(
            epoch=outcome.epoch,
            contributions=(*outcome.contributions, work(A, outcome.epoch, extra)),
            failed=outcome.failed,
            voided=outcome.voided,
        )
        for outcome in history
    ]
    before, after = scores(history, OURS).get(A), scores(more, OURS).get(A)
    if before is not None and after is not None:
        assert after.score * after.trust >= before.score * before.trust

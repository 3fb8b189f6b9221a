import math

import msgspec
import pytest

from incentives.config import IncentiveConfig
from incentives.economy import Economy, Population, Stake, StrategyPay, deterrence, epochs_to_detect, simulate
from incentives.strategies import ATTACKS, HONEST, Strategy, ValidatorKind

HONEST_VALIDATORS = tuple(Stake(kind=ValidatorKind.HONEST, stake=stake) for stake in (3.0, 2.0, 2.0))
CHEAT = Strategy(name="cheat", claimed=1.0, cheating=1.0, detection=1.0)


def economy(*strategies: Strategy, num_honest: int = 6, num_epochs: int = 150, **changes: object) -> Economy:
    populations = (
        Population(strategy=HONEST, count=num_honest),
        *(Population(strategy=one, count=1) for one in strategies),
    )
    base = Economy(miners=populations, validators=HONEST_VALIDATORS, num_epochs=num_epochs)
    return msgspec.structs.replace(base, **changes)


def pay_of(strategy: Strategy, *, num_rounds: int = 3, **changes: object) -> StrategyPay:
    (_, result) = simulate(economy(strategy, **changes), num_rounds=num_rounds).strategies  # type: ignore[arg-type]
    return result


def test_no_attack_pays_at_the_default_knobs() -> None:
    report = simulate(economy(*ATTACKS, num_epochs=240), num_rounds=2)
    assert report.strategies[0].pay == pytest.approx(1.0, abs=0.01)
    for result in report.strategies[1:]:
        assert result.pay + result.pay_error < 0.5, result
        assert result.net_pay <= result.pay
    assert report.false_convictions == 0


def test_one_seed_gives_one_report() -> None:
    setting = economy(CHEAT, num_epochs=40)
    assert simulate(setting, seed=3, num_rounds=2) == simulate(setting, seed=3, num_rounds=2)
    assert simulate(setting, seed=3, num_rounds=2) != simulate(setting, seed=4, num_rounds=2)


def test_without_audits_cheating_pays() -> None:
    result = pay_of(CHEAT, audit_probability=0.0, probation_audit_probability=0.0)
    assert result.pay == pytest.approx(1.0, abs=0.05)
    assert (result.convictions, result.epochs_to_detection) == (0.0, None)


def test_an_always_cheater_earns_at_most_what_the_formula_says() -> None:
    knobs = IncentiveConfig(ban_epochs=20, gamma_hours=10.0 / 3.0)
    result = pay_of(
        CHEAT, incentives=knobs, audit_probability=0.05, probation_audit_probability=0.05, num_epochs=600, num_rounds=4
    )
    bound = deterrence(0.05, 1.0, window_epochs=knobs.window_epochs, ban_epochs=20)
    assert 0.0 < result.pay < bound


def test_detection_comes_when_the_formula_says() -> None:
    assert epochs_to_detect(0.1, 1.0) == pytest.approx(28.4, abs=0.1)
    assert (epochs_to_detect(0.0, 1.0), epochs_to_detect(0.99, 1.0), epochs_to_detect(1.0, 1.0)) == (math.inf, 1.0, 1.0)
    strategies = [msgspec.structs.replace(CHEAT, name=f"cheat {number}") for number in range(40)]
    report = simulate(economy(*strategies, num_epochs=60, probation_audit_probability=0.1), num_rounds=3)
    delays = [result.epochs_to_detection for result in report.strategies[1:]]
    late = sum(delay is None or delay > epochs_to_detect(0.1, 1.0, confidence=0.5) for delay in delays)
    assert late / len(delays) == pytest.approx(0.5, abs=0.25)


@pytest.mark.parametrize(
    ("p", "d", "window", "ban", "expected"),
    [(0.1, 1.0, 30, 216, 0.012712), (0.1, 1.0, 30, 0, 0.2873), (0.0, 1.0, 30, 9, 1.0)],
)
def test_deterrence(p: float, d: float, window: int, ban: int, expected: float) -> None:
    assert deterrence(p, d, window_epochs=window, ban_epochs=ban) == pytest.approx(expected, rel=1e-3)


def test_a_new_hotkey_after_each_ban_costs_more_than_it_earns() -> None:
    back = msgspec.structs.replace(CHEAT, name="back", is_returning=True)
    result = pay_of(back)
    assert result.convictions > 20
    assert 0.0 < result.pay < 0.1
    assert result.net_pay < 0.0


def test_many_hotkeys_earn_what_one_earns() -> None:
    split = Strategy(name="split", num_hotkeys=4)
    assert pay_of(split).pay == pytest.approx(1.0, abs=0.05)


def test_who_is_away_half_of_the_time_earns_half() -> None:
    part_time = Strategy(name="part-time", epochs_present=10, epochs_away=10)
    assert pay_of(part_time, num_epochs=300).pay == pytest.approx(0.5, abs=0.06)


def test_silence_voids_and_then_bans() -> None:
    silent = msgspec.structs.replace(CHEAT, name="silent", absence=1.0)
    result = pay_of(silent)
    assert result.convictions >= 1.0
    assert result.pay < 0.1


def test_a_recomputed_shard_convicts_without_an_audit() -> None:
    ring = Strategy(name="ring", cheating=1.0, exposure=1.0)
    result = pay_of(ring, audit_probability=0.0, probation_audit_probability=0.0)
    assert (result.pay, result.epochs_to_detection) == (0.0, 1.0)
    seldom = msgspec.structs.replace(ring, exposure=0.08)
    assert 0.0 < pay_of(seldom, audit_probability=0.0, probation_audit_probability=0.0).pay < 0.2


def test_one_biased_validator_neither_convicts_nor_saves_anybody() -> None:
    for kind in (ValidatorKind.PASSING, ValidatorKind.FAILING):
        report = simulate(economy(CHEAT, validators=(*HONEST_VALIDATORS, Stake(kind=kind, stake=1.0))), num_rounds=2)
        assert report.false_convictions == 0
        assert report.honest_audits > 100
        assert report.strategies[1].pay < 0.1
        assert report.dividends[kind.value] == pytest.approx(1.0, abs=0.01)


def test_a_false_alarm_needs_two_to_convict() -> None:
    report = simulate(economy(false_alarm=0.02), num_rounds=3)
    # two of three votes at 2 % each are 0.12 % of audits; each conviction ends the audits of its hotkey
    assert report.false_convictions <= 3
    assert simulate(economy(false_alarm=0.5), num_rounds=1).false_convictions > 3


def test_a_lone_validator_can_convict_nobody() -> None:
    alone = (Stake(kind=ValidatorKind.HONEST, stake=1.0),)
    assert pay_of(CHEAT, validators=alone).convictions == 0.0


def test_a_copier_of_weights_earns_less_than_who_does_the_work() -> None:
    validators = (*HONEST_VALIDATORS, Stake(kind=ValidatorKind.COPIER, stake=1.0))
    back = msgspec.structs.replace(CHEAT, name="back", is_returning=True)
    report = simulate(economy(back, validators=validators), num_rounds=2)
    assert report.dividends["copier"] < report.dividends["honest"] == 1.0


def test_copiers_alone_audit_nothing_and_agree_on_nothing() -> None:
    copiers = tuple(Stake(kind=ValidatorKind.COPIER, stake=1.0) for _ in range(2))
    report = simulate(economy(CHEAT, validators=copiers, num_epochs=30), num_rounds=1)
    assert report.strategies[1].convictions == 0.0
    assert report.strategies[1].pay == 0.0
    assert report.strategies[1].pay_error == 0.0


def test_metered_pay_is_steadier_than_tracked_pay() -> None:
    tracked = simulate(economy(num_honest=20, is_tracked=True), num_rounds=2)
    metered = simulate(economy(num_honest=20), num_rounds=2)
    assert metered.honest_variation < 0.03 < 3.0 * metered.honest_variation < tracked.honest_variation


def test_being_audited_more_changes_nobodys_pay() -> None:
    never = simulate(economy(audit_probability=0.0, probation_audit_probability=0.0), num_rounds=1)
    always = simulate(economy(audit_probability=1.0, probation_audit_probability=1.0), num_rounds=1)
    assert never.honest_variation < 0.03
    assert always.honest_variation < 0.03
    assert always.false_convictions == 0


def test_without_honest_miners_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="honest"):
        simulate(Economy(miners=(Population(strategy=CHEAT, count=1),), validators=HONEST_VALIDATORS))


def test_a_strategy_says_when_it_is_there() -> None:
    comes = Strategy(name="x", epochs_present=2, epochs_away=3)
    assert [comes.is_present(epoch) for epoch in range(6)] == [True, True, False, False, False, True]
    assert all(HONEST.is_present(epoch) for epoch in range(3))
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert math.isclose(sum(attack.cheating == 0.0 for attack in ATTACKS), 0.0)

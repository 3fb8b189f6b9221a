import math
from statistics import NormalDist

import numpy as np
import pytest

from incentives.clasp import Batch
from incentives.config import ClaspConfig
from incentives.flags import Attribution, Flag, attribute, flags, stage_test, to_batches
from incentives.scenarios import Routing, Scenario
from incentives.tails import anytime_limit, quantile
from subnet.types import Epoch, Hotkey, PathwayLoss, SampleId

CONFIG = ClaspConfig()
FIXED = ClaspConfig(sequential=False)


def names(scenario: Scenario) -> list[list[Hotkey]]:
    return [[Hotkey(f"{stage}-{at}") for at in range(scenario.num_miners)] for stage in range(scenario.num_stages)]


def fitted_to(batch: Batch, scenario: Scenario) -> Attribution:
    return attribute(
        lambda: [batch], scenario.sizes, num_stages=scenario.num_stages, epoch_of_block=scenario.epoch_of_block
    )


def fitted(scenario: Scenario, num_samples: int, seed: int) -> Attribution:
    return fitted_to(scenario.draw(num_samples, np.random.default_rng(seed)), scenario)


def found(scenario: Scenario, num_samples: int, seed: int, config: ClaspConfig = CONFIG) -> list[str]:
    return [flag.hotkey for flag in flags(fitted(scenario, num_samples, seed), names(scenario), config)]


@pytest.mark.parametrize("harm", [{}, {(2, 1): 1.1}, {(2, 1): 1.1, (2, 3): 1.1}, {(0, 0): 1.05, (3, 4): 1.05}])
def test_exactly_the_harmful_are_flagged(harm: dict[tuple[int, int], float]) -> None:
    assert found(Scenario(harm=harm), 20_000, 1) == [f"{stage}-{miner}" for stage, miner in sorted(harm)]


def test_a_flag_says_how_much_and_how_sure() -> None:
    scenario = Scenario(harm={(2, 1): 1.1})
    (flag,) = flags(fitted(scenario, 20_000, 1), names(scenario), CONFIG)
    assert isinstance(flag, Flag)
    assert (flag.hotkey, flag.stage) == ("2-1", 2)
    assert flag.effect == pytest.approx(0.45, abs=0.02)
    assert flag.standard_error == pytest.approx(0.22 / math.sqrt(4_000), rel=0.15)
    assert 60 < flag.z < flag.effect / flag.standard_error
    assert 3_500 < flag.num_samples < 4_500


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(num_stages=2, harm={(0, 1): 1.1}),
        Scenario(num_stages=3, routing=Routing.STICKY, harm={(1, 1): 1.1}),
        Scenario(num_stages=2, routing=Routing.UNBALANCED, harm={(0, 1): 1.1}),
        Scenario(num_stages=2, is_heavy_tailed=True, harm={(0, 1): 1.1}),
        Scenario(num_stages=2, trend=1.0, harm={(0, 1): 1.1}),
        Scenario(num_stages=3, routing=Routing.STICKY, trend=1.0, harm={(1, 1): 1.1}),
        Scenario(num_stages=2, wander=0.05, harm={(0, 1): 1.1}),
    ],
    ids=["balanced", "sticky", "unbalanced", "heavy", "trending", "sticky-trending", "wandering"],
)
def test_honest_miners_are_flagged_at_the_nominal_rate(scenario: Scenario) -> None:
    """At 1 %, over 150 networks: the count of honest miners above the threshold lies within its sampling error."""
    threshold, alpha, rounds = NormalDist().inv_cdf(0.99), 0.01, 150
    above = tests = 0
    for seed in range(rounds):
        result = fitted(scenario, 1_200, seed)
        for stage in range(scenario.num_stages):
            z_m = stage_test(result, stage).z_m
            honest = [at for at in range(5) if (stage, at) not in scenario.harm]
            above += int((z_m[honest] > threshold).sum())
            tests += len(honest)
    assert above <= alpha * tests + 3.0 * math.sqrt(alpha * tests)


def test_a_liar_in_the_last_stage_frames_nobody_and_is_flagged() -> None:
    scenario = Scenario(framing=(3, 1, 2, 1.0))
    rounds, convicted = 100, 0
    for seed in range(rounds):
        result = fitted(scenario, 10_000, seed)
        flagged = {flag.hotkey for flag in flags(result, names(scenario), CONFIG)}
        assert "4-3" in flagged
        assert stage_test(result, 1).z_m[2] > 3.0902
        convicted += "1-2" in flagged
    assert convicted / rounds < 0.03 + 2.0 * math.sqrt(0.03 * 0.97 / rounds)


def test_who_reports_too_low_a_loss_is_flagged_in_the_last_stage_only() -> None:
    assert found(Scenario(num_stages=3, harm={(2, 1): 0.95}), 10_000, 3) == ["2-1"]
    assert found(Scenario(num_stages=3, harm={(1, 1): 0.95}), 10_000, 3) == []


def test_two_last_stage_miners_cannot_outvote_each_other() -> None:
    scenario = Scenario(num_stages=2, num_miners=2, framing=(1, 0, 0, 1.0))
    result = fitted(scenario, 4_000, 5)
    assert np.isnan(result.strata.z_scores(0)).all()
    assert "0-0" in {flag.hotkey for flag in flags(result, names(scenario), CONFIG)}


@pytest.mark.parametrize("config", [CONFIG, FIXED])
def test_without_noise_nothing_is_tested(config: ClaspConfig) -> None:
    members = np.stack(np.meshgrid(*[np.arange(3)] * 2, indexing="ij"), axis=-1).reshape(-1, 2).repeat(4, axis=0)
    batch = Batch(members_kf=members, loss_k=np.ones(len(members)))
    result = attribute(lambda: [batch], (3, 3), num_stages=2)
    assert np.isnan(result.strata.z_scores(0)).all()
    assert flags(result, [[Hotkey(f"{stage}{at}") for at in range(3)] for stage in range(2)], config) == ()


def test_an_ill_conditioned_design_convicts_nobody() -> None:
    scenario = Scenario(routing=Routing.STICKY, harm={(2, 1): 1.1})
    assert found(scenario, 20_000, 1) == ["2-1"]
    assert found(scenario, 20_000, 1, ClaspConfig(max_condition=5.0)) == []


def test_a_miner_with_few_samples_is_not_judged() -> None:
    scenario = Scenario(num_stages=2, harm={(0, 1): 1.5})
    assert found(scenario, 200, 1) == ["0-1"]
    assert found(scenario, 200, 1, ClaspConfig(min_samples=100)) == []


def test_a_stage_of_one_or_with_an_idle_miner_is_tested_without_it() -> None:
    scenario = Scenario(num_stages=2, num_miners=3, harm={(0, 1): 1.5})
    batch = scenario.draw(500, np.random.default_rng(1))
    wide = attribute(lambda: [batch], (4, 3), num_stages=2)
    assert np.isnan(stage_test(wide, 0).z_m[3])
    roster = [[Hotkey(name) for name in "abcd"], [Hotkey(name) for name in "efg"]]
    assert [flag.hotkey for flag in flags(wide, roster, CONFIG)] == ["b"]
    alone = Batch(members_kf=np.zeros((50, 1), np.int64), loss_k=batch.loss_k[:50])
    assert np.isnan(stage_test(attribute(lambda: [alone], (1,), num_stages=1), 0).z_m).all()


def heights(seed: int) -> list[tuple[float, float]]:
    """z and error of an honest miner after every 300 of 3,000 samples."""
    scenario, found_at = Scenario(num_stages=2), []
    batch = scenario.draw(3_000, np.random.default_rng(seed))
    for stop in range(300, 3_001, 300):
        part = Batch(members_kf=batch.members_kf[:stop], loss_k=batch.loss_k[:stop])
        test = stage_test(fitted_to(part, scenario), 0)
        found_at.append((float(test.z_m[0]), float(test.errors_m[0])))
    return found_at


def test_looking_often_does_not_flag_the_honest() -> None:
    rounds, alpha = 60, 0.05
    looks = [heights(seed) for seed in range(rounds)]
    flagged = sum(any(z > anytime_limit(error, alpha=alpha, effect=0.05) for z, error in one) for one in looks)
    assert flagged / rounds <= alpha + 3.0 * math.sqrt(alpha * (1 - alpha) / rounds)
    # the same looks at a level of their own each flag several times as many
    assert sum(any(z > quantile(alpha) for z, _ in one) for one in looks) > 2 * alpha * rounds


def test_a_sequential_test_finds_harm_and_asks_for_more_of_it() -> None:
    assert found(Scenario(harm={(2, 1): 1.05}), 1_800, 2) == ["2-1"]
    small = Scenario(num_stages=3, harm={(1, 1): 1.01})
    counts = {
        config.sequential: [len(found(small, 2_300, seed, config)) for seed in range(12)] for config in (CONFIG, FIXED)
    }
    assert all(repeated <= single for repeated, single in zip(counts[True], counts[False], strict=True))
    assert 0 < sum(counts[True]) < sum(counts[False])


def test_both_tails_of_the_last_stage_share_the_level() -> None:
    above = tests = 0
    config = ClaspConfig(sequential=False, alpha=0.02)
    scenario = Scenario(num_stages=2)
    for seed in range(200):
        above += sum(name.startswith("1-") for name in found(scenario, 600, seed, config))
        tests += 5
    assert abs(above - 0.02 * tests) <= 3.0 * math.sqrt(0.02 * tests)


def test_ledger_records_become_batches() -> None:
    roster = [[Hotkey("a"), Hotkey("b")], [Hotkey("c"), Hotkey("d")]]
    records = [
        PathwayLoss(
            epoch=Epoch(0), sample=SampleId(at), pathway=(roster[0][at % 2], roster[1][at // 2]), loss=float(at)
        )
        for at in range(4)
    ]
    batches = list(to_batches(records, roster, batch_size=3))
    assert [len(batch.loss_k) for batch in batches] == [3, 1]
    assert np.concatenate([batch.members_kf for batch in batches]).tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert next(iter(to_batches(records[:2], roster, batch_size=2))).loss_k.tolist() == [0.0, 1.0]
    assert list(to_batches([], roster)) == []
    with pytest.raises(KeyError):
        list(to_batches(records, [roster[0], [Hotkey("c")]]))


def test_framing_by_nobody_leaves_a_draw_as_it_is() -> None:
    plain = Scenario().draw(50, np.random.default_rng(1))
    framed = Scenario(framing=(0, 0, 0, 2.0)).draw(50, np.random.default_rng(1))
    hit = (plain.members_kf[:, 4] == 0) & (plain.members_kf[:, 0] == 0)
    np.testing.assert_allclose(framed.loss_k - plain.loss_k, 2.0 * hit)

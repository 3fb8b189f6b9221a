import numpy as np
import pytest

from incentives.clasp import Batch
from incentives.flags import Attribution, attribute, stage_test
from incentives.scenarios import Scenario
from incentives.tails import quantile
from incentives.wander import Wander

USUAL = 0.02


def fitted_to(batch: Batch, scenario: Scenario, epochs: tuple[int, ...]) -> Attribution:
    return attribute(
        lambda: [batch],
        scenario.sizes,
        num_stages=scenario.num_stages,
        epoch_of_block=epochs,
        usual_wander=USUAL,
    )


def fitted(scenario: Scenario, num_samples: int, seed: int, *, with_epochs: bool = True) -> Attribution:
    batch = scenario.draw(num_samples, np.random.default_rng([1, seed]))
    return fitted_to(batch, scenario, scenario.epoch_of_block if with_epochs else ())


@pytest.mark.parametrize(
    ("wander", "num_miners", "found"),
    [(0.02, 5, 0.02), (0.05, 12, 0.048), (0.05, 5, 0.044), (0.05, 2, 0.034), (0.0, 5, 0.011)],
)
def test_what_miners_wander_by_is_found_the_better_the_more_there_are(
    wander: float, num_miners: int, found: float
) -> None:
    """Pulled towards what is usual, .02, which counts for eight degrees of freedom."""
    scenario = Scenario(num_stages=2, num_miners=num_miners, wander=wander, trend=1.0)
    fits = [fitted(scenario, 1_600 * num_miners, seed) for seed in range(30)]
    variances = [fit.wander.of_stage(stage).variance for fit in fits for stage in range(2)]
    assert float(np.mean(variances)) == pytest.approx(found**2, rel=0.25)


def test_samples_of_one_epoch_taken_for_independent_blame_the_honest() -> None:
    """What the variance between epochs is for: without it, one honest miner in eight exceeds 1e-3."""
    scenario = Scenario(num_stages=2, wander=0.02)
    shares = []
    for with_epochs in (False, True):
        fits = [fitted(scenario, 24_000, seed, with_epochs=with_epochs) for seed in range(25)]
        z = np.concatenate([stage_test(fit, stage).z_m for fit in fits for stage in range(2)])
        shares.append(float((z > quantile(1e-3)).mean()))
    assert shares[0] > 0.05
    assert shares[1] <= 2.0 / 250.0


def test_a_harm_that_lasts_is_still_found() -> None:
    fit = fitted(Scenario(num_stages=2, wander=0.02, harm={(0, 1): 1.05}), 8_000, 1)
    assert stage_test(fit, 0).z_m[1] > quantile(1e-4)


def test_one_that_harms_now_and_then_does_not_raise_it_for_all() -> None:
    scenario = Scenario(num_stages=2, num_miners=9, wander=0.02)
    batch = scenario.draw(18_000, np.random.default_rng(3))
    in_fifth = (batch.members_kf[:, 0] == 2) & (batch.members_kf[:, 2] // 4 == 4)
    hurt = Batch(members_kf=batch.members_kf, loss_k=batch.loss_k + 1.0 * in_fifth)
    plain, cheated = (fitted_to(one, scenario, scenario.epoch_of_block).wander.of_stage(0) for one in (batch, hurt))
    assert cheated.variance < 3.0 * plain.variance + 0.03**2 < 1.0 / 8


def test_a_window_of_one_epoch_knows_what_is_usual_only_and_one_without_epochs_nothing() -> None:
    scenario = Scenario(num_stages=2, trend=1.0)
    batch = scenario.draw(1_000, np.random.default_rng(3))
    usual = fitted_to(batch, scenario, (0,) * 32)
    wander = usual.wander.of_stage(0)
    assert wander.variance == pytest.approx(USUAL**2)
    assert wander.spread_m.tolist() == pytest.approx([1.25] * 5)
    none = fitted_to(batch, scenario, ())
    assert (none.wander.of_stage(0).variance, none.wander.of_stage(0).doubt) == (0.0, 0.0)
    noise = none.spread.variances(0)
    widening = 1.0 + 0.193 / 5
    assert stage_test(none, 0).errors_m.tolist() == pytest.approx(np.sqrt(noise * widening).tolist())
    assert stage_test(usual, 0).errors_m.tolist() == pytest.approx(
        np.sqrt((noise + 1.25 * USUAL**2) * widening).tolist(), rel=1e-3
    )


def test_a_lone_or_idle_miner_wanders_by_nothing_of_its_own() -> None:
    wander = Wander((3, 1), 2, (0, 1), USUAL)
    assert wander.of_stage(0).variance == 0.0
    members = np.array([[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]])
    wander.add(Batch(members_kf=members, loss_k=np.zeros(4)), np.array([0.5, -0.5, -0.5, 0.5]))
    first, lone = wander.of_stage(0), wander.of_stage(1)
    assert first.spread_m[:2].tolist() == [1.0, 1.0]
    assert lone.spread_m.tolist() == [0.5]
    assert lone.variance == pytest.approx(USUAL**2)

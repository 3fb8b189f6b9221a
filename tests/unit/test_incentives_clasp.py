import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from incentives.clasp import Batch, Fit, Floats, Moments, Spread, fit_batches, paper_z
from incentives.scenarios import Routing, Scenario


def random_batch(seed: int, *, sizes: tuple[int, ...], num_samples: int, num_covariates: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    members_kf = np.column_stack([rng.integers(0, size, num_samples) for size in sizes])
    covariates_kc = rng.standard_normal((num_samples, num_covariates))
    noise_k = rng.standard_normal(num_samples) * (1.0 + members_kf[:, 0])
    loss_k = 4.0 + 0.3 * members_kf.sum(axis=1) + covariates_kc.sum(axis=1) + noise_k
    return Batch(members_kf=members_kf, loss_k=loss_k, covariates_kc=covariates_kc)


def parts(batch: Batch, size: int) -> list[Batch]:
    return [
        Batch(
            members_kf=batch.members_kf[at : at + size],
            loss_k=batch.loss_k[at : at + size],
            covariates_kc=batch.covariates_kc[at : at + size],
        )
        for at in range(0, len(batch.loss_k), size)
    ]


def dense(batch: Batch, sizes: tuple[int, ...]) -> tuple[list[Floats], list[Floats], Floats]:
    """Effects, HC3 variances of the contrasts and covariate coefficients, by one dense pseudo-inverse."""
    indicators = [np.eye(size)[batch.members_kf[:, factor]] for factor, size in enumerate(sizes)]
    design = np.concatenate([np.ones((len(batch.loss_k), 1)), *indicators, batch.covariates_kc], axis=1)
    inverse = np.linalg.pinv(design.T @ design)
    solution = inverse @ design.T @ batch.loss_k
    leverage = np.einsum("ij,jk,ik->i", design, inverse, design)
    scaled = design * ((batch.loss_k - design @ solution) / (1.0 - leverage))[:, None]
    covariance = inverse @ (scaled.T @ scaled) @ inverse
    effects, variances, start = [], [], 1
    for size in sizes:
        own = solution[start : start + size]
        contrasts = np.zeros((size, design.shape[1]))
        contrasts[:, start : start + size] = np.eye(size) * size / (size - 1) - 1.0 / (size - 1)
        effects.append(own - own.mean())
        variances.append(np.einsum("ij,jk,ik->i", contrasts, covariance, contrasts))
        start += size
    return effects, variances, solution[start:]


@pytest.mark.parametrize("num_covariates", [0, 2])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (5,), (3, 6)])
def test_the_stream_gives_what_a_dense_fit_gives(sizes: tuple[int, ...], num_covariates: int) -> None:
    batch = random_batch(3, sizes=sizes, num_samples=400, num_covariates=num_covariates)
    fit, spread = fit_batches(lambda: parts(batch, 150), sizes, num_covariates=num_covariates)
    effects, variances, coefficients = dense(batch, sizes)
    for factor in range(len(sizes)):
        np.testing.assert_allclose(fit.effects_p[fit.rows(factor)], effects[factor], atol=1e-12)
        np.testing.assert_allclose(spread.variances(factor), variances[factor], rtol=1e-10)
    np.testing.assert_allclose(fit.coefficients_c, coefficients, atol=1e-12)


def test_residuals_sum_to_zero_for_every_miner() -> None:
    batch = random_batch(4, sizes=(3, 4), num_samples=200, num_covariates=1)
    moments = Moments((3, 4), 1)
    moments.add(batch)
    residuals = Spread(moments.fit()).add(batch)
    for factor, size in enumerate((3, 4)):
        np.testing.assert_allclose(np.bincount(batch.members_kf[:, factor], residuals, size), 0.0, atol=1e-9)


@given(size=st.integers(1, 120))
def test_how_samples_are_batched_does_not_matter(size: int) -> None:
    batch = random_batch(5, sizes=(3, 3), num_samples=120)
    whole, _ = fit_batches(lambda: [batch], (3, 3))
    cut, _ = fit_batches(lambda: parts(batch, size), (3, 3))
    np.testing.assert_allclose(cut.effects_p, whole.effects_p, atol=1e-12)


def complete(sizes: tuple[int, ...]) -> Fit:
    """Every pathway once, with an additive loss."""
    members = np.stack(np.meshgrid(*[np.arange(size) for size in sizes], indexing="ij"), axis=-1).reshape(
        -1, len(sizes)
    )
    return fit_batches(lambda: [Batch(members_kf=members, loss_k=members @ np.arange(1.0, len(sizes) + 1.0))], sizes)[0]


def test_a_balanced_design_has_condition_one_and_recovers_the_game() -> None:
    fit = complete((3, 4, 2))
    assert fit.condition == pytest.approx(1.0)
    np.testing.assert_allclose(fit.effects_p, [-1, 0, 1, -3, -1, 1, 3, -1.5, 1.5], atol=1e-12)
    assert fit.intercept == pytest.approx(1.0 + 3.0 + 1.5)


def test_miners_that_always_work_together_cannot_be_told_apart() -> None:
    together = np.repeat(np.arange(3), 20)
    batch = Batch(members_kf=np.column_stack([together, together]), loss_k=np.random.default_rng(1).standard_normal(60))
    fit, _ = fit_batches(lambda: [batch], (3, 3))
    assert fit.condition > 1e12


def test_balanced_pathways_give_every_miner_its_turn_and_random_ones_do_not() -> None:
    counts = {
        routing: np.bincount(
            Scenario(routing=routing).draw(1_000, np.random.default_rng(1)).members_kf[:, 2], minlength=5
        )
        for routing in (Routing.BALANCED, Routing.RANDOM)
    }
    assert counts[Routing.BALANCED].tolist() == [200] * 5
    assert counts[Routing.RANDOM].max() > 205


def test_a_sticky_design_is_worse_than_a_balanced_one() -> None:
    rng = np.random.default_rng(2)
    conditions = []
    for routing in (Routing.BALANCED, Routing.STICKY):
        scenario = Scenario(routing=routing)
        batch = scenario.draw(2_000, rng)
        conditions.append(fit_batches(lambda batch=batch: [batch], scenario.sizes)[0].condition)  # type: ignore[misc]
    assert conditions[0] < 1.5 < 10.0 < conditions[1]


def test_a_miner_without_samples_has_no_effect_and_no_variance() -> None:
    batch = random_batch(6, sizes=(3, 3), num_samples=100)
    fit, spread = fit_batches(lambda: [batch], (4, 3))
    assert fit.effects_p[3] == 0.0
    variances = spread.variances(0)
    assert np.isnan(variances[3])
    np.testing.assert_allclose(variances[:3], fit_batches(lambda: [batch], (3, 3))[1].variances(0))


def test_a_miner_alone_in_its_stage_is_compared_with_nobody() -> None:
    batch = random_batch(7, sizes=(1, 3), num_samples=50)
    fit, spread = fit_batches(lambda: [batch], (1, 3))
    assert fit.effects_p[0] == 0.0
    assert np.isnan(spread.variances(0)).all()


def test_a_constant_covariate_changes_nothing() -> None:
    plain = random_batch(8, sizes=(3, 3), num_samples=90)
    batch = Batch(members_kf=plain.members_kf, loss_k=plain.loss_k, covariates_kc=np.full((90, 1), 2.0))
    fit, spread = fit_batches(lambda: [batch], (3, 3), num_covariates=1)
    bare, bare_spread = fit_batches(lambda: [plain], (3, 3))
    np.testing.assert_allclose(fit.effects_p, bare.effects_p, atol=1e-12)
    np.testing.assert_allclose(spread.variances(1), bare_spread.variances(1), rtol=1e-10)


def test_a_control_variate_reduces_the_error() -> None:
    batch = random_batch(9, sizes=(3, 3), num_samples=2_000, num_covariates=1)
    noisy = Batch(members_kf=batch.members_kf, loss_k=batch.loss_k + 5.0 * batch.covariates_kc[:, 0])
    controlled = Batch(members_kf=noisy.members_kf, loss_k=noisy.loss_k, covariates_kc=batch.covariates_kc)
    without = fit_batches(lambda: [noisy], (3, 3))[1].variances(1)
    with_it = fit_batches(lambda: [controlled], (3, 3), num_covariates=1)[1].variances(1)
    assert (with_it < without / 4).all()


def test_without_samples_there_is_no_fit() -> None:
    with pytest.raises(ValueError, match="samples"):
        Moments((2, 2)).fit()


def test_the_papers_estimator_is_a_mean_for_each_miner() -> None:
    batch = random_batch(10, sizes=(3, 2), num_samples=80)
    moments = Moments((4, 2))
    moments.add(batch)
    means = moments.mean_losses()
    assert means[1] == pytest.approx(batch.loss_k[batch.members_kf[:, 0] == 1].mean())
    assert math.isnan(means[3])
    z = paper_z(means)
    assert np.nanmean(z) == pytest.approx(0.0, abs=1e-12)
    assert np.nanstd(z) == pytest.approx(1.0)
    assert list(paper_z(np.ones(3))) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("bad", "z"), [((1,), 4.5), ((1, 3), 2.7)])
def test_the_papers_toy(bad: tuple[int, ...], z: float) -> None:
    """5 stages x 5 miners, N(4.5, 0.2), +10 %: the bad miner stands out, its stage mates look better than average."""
    scenario = Scenario(harm={(2, miner): 1.1 for miner in bad})
    moments = Moments(scenario.sizes)
    moments.add(scenario.draw(20_000, np.random.default_rng(1)))
    scores = paper_z(moments.mean_losses())
    for miner in range(5):
        assert (scores[10 + miner] == pytest.approx(z, abs=0.15)) if miner in bad else (scores[10 + miner] < -1.0)

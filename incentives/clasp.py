"""CLASP: what each miner of a pathway adds to the loss of its samples (papers.md A7, trust.md 4).

Fits `loss = mu + sum over stages of effect[stage, miner] + noise` by least squares; the effect is the exact Shapley value of
this additive game. Two passes over the samples, in batches: `Moments` for the fit, `Spread` for its HC3 errors. Nothing
grows with the number of samples.

Legend: k samples of a batch, f factors (the stages, first stage first; then any other grouping, such as blocks of time),
p miners of all factors, m miners of one, c covariates (control variates of a sample: its bigram loss, an old checkpoint's
loss), q = p and c.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_POWER_ITERATIONS = 60
_MIN_SLACK = 1e-3
"""Least 1 - leverage: a sample that decides an effect alone has none, and then says nothing about the noise."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples. `members_kf` holds, for each factor, the index of the sample's miner within it."""

    members_kf: Ints
    loss_k: Floats
    covariates_kc: Floats = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Least squares estimates. `effects_p` sum to zero in each factor; a miner without samples has 0.

    `condition` is that of the design: 1 when every miner meets every other equally often, infinite when effects cannot be told
    apart. `inverse_qq` is of the scaled normal equations.
    """

    sizes: tuple[int, ...]
    num_samples: int
    counts_p: Floats
    means_p: Floats
    """The paper's estimator, `Moments.mean_losses`."""
    intercept: float
    effects_p: Floats
    coefficients_c: Floats
    condition: float
    scale_q: Floats
    covariate_means_c: Floats
    inverse_qq: Floats

    def rows(self, factor: int) -> slice:
        """Where the miners of one factor stand among all."""
        return factor_rows(self.sizes, factor)


def factor_rows(sizes: Sequence[int], factor: int) -> slice:
    """Positions of one factor's members when all factors are laid end to end."""
    start = sum(sizes[:factor])
    return slice(start, start + sizes[factor])


class Moments:
    """First pass: everything that least squares needs to know of the samples."""

    def __init__(self, sizes: Sequence[int], num_covariates: int = 0) -> None:
        self.sizes = tuple(sizes)
        total = sum(self.sizes)
        self.num_samples = 0
        self._gram_pp = np.zeros((total, total))
        self._loss_p = np.zeros(total)
        self._covariates_pc = np.zeros((total, num_covariates))
        self._loss = 0.0
        self._sums_c = np.zeros(num_covariates)
        self._squares_cc = np.zeros((num_covariates, num_covariates))
        self._products_c = np.zeros(num_covariates)

    def add(self, batch: Batch) -> None:
        """Count a batch in."""
        covariates_kc = _covariates(batch, len(self._sums_c))
        self.num_samples += len(batch.loss_k)
        self._loss += math.fsum(batch.loss_k)
        self._sums_c += covariates_kc.sum(axis=0)
        self._squares_cc += covariates_kc.T @ covariates_kc
        self._products_c += covariates_kc.T @ batch.loss_k
        _add_gram(self._gram_pp, batch.members_kf, self.sizes, np.ones(len(batch.loss_k)))
        for factor in range(len(self.sizes)):
            rows = factor_rows(self.sizes, factor)
            members_k, size = batch.members_kf[:, factor], self.sizes[factor]
            self._loss_p[rows] += np.bincount(members_k, batch.loss_k, size)
            for column in range(len(self._sums_c)):
                self._covariates_pc[rows, column] += np.bincount(members_k, covariates_kc[:, column], size)

    def mean_losses(self) -> Floats:
        """The paper's estimator: mean loss of the samples each miner took part in; NaN without samples."""
        counts_p = np.diagonal(self._gram_pp)
        means_p: Floats = np.divide(self._loss_p, counts_p, out=np.full(len(counts_p), np.nan), where=counts_p > 0)
        return means_p

    def fit(self) -> Fit:
        """Solve for the effects. Raises ValueError without samples."""
        if self.num_samples == 0:
            raise ValueError("CLASP needs samples")
        counts_p = np.diagonal(self._gram_pp).copy()
        mean, means_c = self._loss / self.num_samples, self._sums_c / self.num_samples
        lengths_c = np.sqrt(np.maximum(np.diagonal(self._squares_cc) - self.num_samples * means_c**2, 0.0))
        scale_q = np.concatenate([_inverse(np.sqrt(counts_p)), _inverse(lengths_c)])
        normal_qq = self._normal_matrix(counts_p, means_c, scale_q)
        right_q = scale_q * np.concatenate(
            [self._loss_p - counts_p * mean, self._products_c - self.num_samples * means_c * mean]
        )
        inverse_qq, condition = _inverted(normal_qq)
        solution_q = scale_q * (inverse_qq @ right_q)
        effects_p, coefficients_c = solution_q[: len(counts_p)], solution_q[len(counts_p) :]
        shift = _center(effects_p, counts_p, self.sizes)
        return Fit(
            sizes=self.sizes,
            num_samples=self.num_samples,
            counts_p=counts_p,
            means_p=self.mean_losses(),
            intercept=mean + shift - float(coefficients_c @ means_c),
            effects_p=effects_p,
            coefficients_c=coefficients_c,
            condition=condition,
            scale_q=scale_q,
            covariate_means_c=means_c,
            inverse_qq=inverse_qq,
        )

    def _normal_matrix(self, counts_p: Floats, means_c: Floats, scale_q: Floats) -> Floats:
        """Normal equations scaled to a unit diagonal, the factors' means replaced by an identity.

        In the scaled matrix the vectors u_f = sqrt(n/T) of the factors span an invariant subspace that holds the means only.
        Exchanging that part for the identity makes the rest invertible without dropping a miner: solutions have weighted sum
        zero in each factor, and a balanced design gives the identity.
        """
        total = len(counts_p)
        normal_qq = np.zeros((len(scale_q), len(scale_q)))
        normal_qq[:total, :total] = self._gram_pp
        normal_qq[:total, total:] = self._covariates_pc - np.outer(counts_p, means_c)
        normal_qq[total:, :total] = normal_qq[:total, total:].T
        normal_qq[total:, total:] = self._squares_cc - self.num_samples * np.outer(means_c, means_c)
        normal_qq *= scale_q[:, None]
        normal_qq *= scale_q[None, :]
        shares_p = np.sqrt(counts_p / self.num_samples)
        normal_qq[:total, :total] -= np.outer(shares_p, shares_p)
        for factor in range(len(self.sizes)):
            rows = factor_rows(self.sizes, factor)
            normal_qq[rows, rows] += np.outer(shares_p[rows], shares_p[rows])
        unseen = np.flatnonzero(scale_q == 0.0)
        normal_qq[unseen, unseen] = 1.0
        return normal_qq


class Spread:
    """Second pass: heteroskedasticity-consistent (HC3) covariance of the effects."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        total = len(fit.counts_p)
        num_covariates = len(fit.coefficients_c)
        self._inverse_pp = fit.inverse_qq[:total, :total] * np.outer(fit.scale_q[:total], fit.scale_q[:total])
        self._meat_pp = np.zeros((total, total))
        self._meat_pc = np.zeros((total, num_covariates))
        self._meat_cc = np.zeros((num_covariates, num_covariates))

    def add(self, batch: Batch) -> Floats:
        """Weigh a batch in; returns its residuals."""
        fit = self._fit
        covariates_kc = _covariates(batch, len(fit.coefficients_c))
        columns_kf = batch.members_kf + np.array([factor_rows(fit.sizes, at).start for at in range(len(fit.sizes))])
        residuals_k = batch.loss_k - fit.intercept - covariates_kc @ fit.coefficients_c
        for factor in range(len(fit.sizes)):
            residuals_k = residuals_k - fit.effects_p[columns_kf[:, factor]]
        scaled_kc = (covariates_kc - fit.covariate_means_c) * fit.scale_q[len(fit.counts_p) :]
        slack_k = np.maximum(1.0 - self._leverage(columns_kf, scaled_kc), _MIN_SLACK)
        weights_k = (residuals_k / slack_k) ** 2
        _add_gram(self._meat_pp, batch.members_kf, fit.sizes, weights_k)
        self._meat_cc += (scaled_kc * weights_k[:, None]).T @ scaled_kc
        for factor in range(len(fit.sizes)):
            for column in range(scaled_kc.shape[1]):
                self._meat_pc[fit.rows(factor), column] += np.bincount(
                    batch.members_kf[:, factor], weights_k * scaled_kc[:, column], fit.sizes[factor]
                )
        return residuals_k

    def variances(self, factor: int) -> Floats:
        """Variance of each miner's effect minus the mean effect of the others in its factor; NaN where there is none."""
        fit, rows, total = self._fit, self._fit.rows(factor), len(self._fit.counts_p)
        scale_p = fit.scale_q[:total]
        block_mq = fit.inverse_qq[rows]
        left_mq = np.concatenate(
            [
                (block_mq[:, :total] * scale_p) @ self._meat_pp * scale_p
                + block_mq[:, total:] @ (self._meat_pc.T * scale_p),
                block_mq[:, :total] @ (self._meat_pc * scale_p[:, None]) + block_mq[:, total:] @ self._meat_cc,
            ],
            axis=1,
        )
        scale_m = scale_p[rows]
        covariance_mm = (left_mq @ block_mq.T) * np.outer(scale_m, scale_m)
        contrasts_mm = _contrasts(fit.counts_p[rows] > 0)
        variances_m: Floats = np.einsum("ij,jk,ik->i", contrasts_mm, covariance_mm, contrasts_mm)
        return variances_m

    def _leverage(self, columns_kf: Ints, scaled_kc: Floats) -> Floats:
        """Influence of each sample on its own fitted value."""
        fit = self._fit
        num_factors, total = len(fit.sizes), len(fit.counts_p)
        leverage_k = np.full(len(columns_kf), (1.0 - num_factors) / fit.num_samples)
        for one in range(num_factors):
            leverage_k += self._inverse_pp[columns_kf[:, one], columns_kf[:, one]]
            for other in range(one):
                leverage_k += 2.0 * self._inverse_pp[columns_kf[:, one], columns_kf[:, other]]
        if scaled_kc.shape[1]:
            mixed_pc = fit.inverse_qq[:total, total:] * fit.scale_q[:total, None]
            for factor in range(num_factors):
                leverage_k += 2.0 * np.einsum("kc,kc->k", mixed_pc[columns_kf[:, factor]], scaled_kc)
            leverage_k += np.einsum("kc,cd,kd->k", scaled_kc, fit.inverse_qq[total:, total:], scaled_kc)
        return leverage_k


def fit_batches(
    batches: Callable[[], Iterable[Batch]], sizes: Sequence[int], *, num_covariates: int = 0
) -> tuple[Fit, Spread]:
    """Both passes over samples that can be read twice."""
    moments = Moments(sizes, num_covariates)
    for batch in batches():
        moments.add(batch)
    fit = moments.fit()
    spread = Spread(fit)
    for batch in batches():
        spread.add(batch)
    return fit, spread


def paper_z(mean_losses_p: Floats) -> Floats:
    """The paper's outlier measure: how many standard deviations of all miners' mean losses each lies above their mean."""
    spread = float(np.nanstd(mean_losses_p))
    centered_p = mean_losses_p - np.nanmean(mean_losses_p)
    return centered_p / spread if spread > 0.0 else np.zeros_like(mean_losses_p)


def _covariates(batch: Batch, num_covariates: int) -> Floats:
    return batch.covariates_kc if num_covariates else np.zeros((len(batch.loss_k), 0))


def _add_gram(gram_pp: Floats, members_kf: Ints, sizes: Sequence[int], weights_k: Floats) -> None:
    """Add sum of weight * x x' over samples, x the indicator of a sample's miners."""
    for one, size in enumerate(sizes):
        for other in range(one + 1):
            cells = np.bincount(
                members_kf[:, one] * sizes[other] + members_kf[:, other], weights_k, size * sizes[other]
            )
            block = cells.reshape(size, sizes[other])
            gram_pp[factor_rows(sizes, one), factor_rows(sizes, other)] += block
            if other != one:
                gram_pp[factor_rows(sizes, other), factor_rows(sizes, one)] += block.T


def _inverse(values: Floats) -> Floats:
    """1 / value, and 0 for 0."""
    return np.divide(1.0, values, out=np.zeros_like(values), where=values > 0.0)


def _inverted(matrix: Floats) -> tuple[Floats, float]:
    """Inverse and condition of a symmetric matrix; a pseudo-inverse and infinity when it has none."""
    try:
        np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.pinv(matrix, hermitian=True), dtype=np.float64), math.inf
    inverse = np.asarray(np.linalg.inv(matrix), dtype=np.float64)
    return inverse, _largest_eigenvalue(matrix) * _largest_eigenvalue(inverse)


def _largest_eigenvalue(matrix: Floats) -> float:
    """By power iteration from a vector that no symmetry of a design annihilates."""
    vector = np.cos(np.arange(1.0, len(matrix) + 1.0) ** 2)
    value = 0.0
    for _ in range(_POWER_ITERATIONS):
        vector = matrix @ (vector / np.linalg.norm(vector))
        value = float(np.linalg.norm(vector))
    return value


def _center(effects_p: Floats, counts_p: Floats, sizes: Sequence[int]) -> float:
    """Make the effects of each factor's seen members sum to zero, in place; returns what the intercept gains."""
    gained = 0.0
    ends = list(accumulate(sizes, initial=0))
    for start, stop in pairwise(ends):
        seen = start + np.flatnonzero(counts_p[start:stop])
        shift = float(effects_p[seen].mean())
        effects_p[seen] -= shift
        gained += shift
    return gained


def _contrasts(is_seen_m: npt.NDArray[np.bool_]) -> Floats:
    """Rows: one miner minus the mean of the other seen ones; NaN for who was not seen or is alone."""
    num_seen = int(is_seen_m.sum())
    contrasts_mm = np.full((len(is_seen_m), len(is_seen_m)), np.nan)
    if num_seen > 1:
        contrasts_mm[np.ix_(is_seen_m, is_seen_m)] = np.eye(num_seen) * num_seen / (num_seen - 1) - 1.0 / (num_seen - 1)
        contrasts_mm[np.ix_(is_seen_m, ~is_seen_m)] = 0.0
    return contrasts_mm

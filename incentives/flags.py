"""Whom CLASP flags: one-sided tests of each miner's effect against the median of the others in its stage (trust.md 4).

A z-score across M miners cannot exceed (M-1)/sqrt(M), so effects are tested against their own sampling error. Legend as in
`incentives.clasp`; j miners of the last stage.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from incentives.clasp import Batch, Fit, Floats, Moments, Spread
from incentives.config import ClaspConfig
from incentives.tails import (
    anytime_limit,
    median_extra,
    median_of_others,
    median_variance,
    normal_score,
    quantile,
    welch_freedom,
)
from incentives.wander import Wander
from subnet.types import Hotkey, PathwayLoss, Record, StageIndex

MIN_STRATA = 3
"""Miners of the last stage needed before their median can outvote one liar."""


class Flag(Record, frozen=True):
    """One miner's effect is beyond what chance explains. `effect` is against the median of the stage, nats a token."""

    hotkey: Hotkey
    stage: StageIndex
    effect: float
    standard_error: float
    z: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTest:
    """Each miner of one stage against the median of the others; NaN where there is nothing to compare."""

    effects_m: Floats
    errors_m: Floats
    z_m: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """A fit, its errors, and what each miner of the last stage says of the others."""

    fit: Fit
    spread: Spread
    strata: "Strata"
    wander: Wander


class Strata:
    """Partial residuals (loss less what all other miners explain) by miner and by who reported the loss."""

    def __init__(self, fit: Fit, num_stages: int) -> None:
        self._fit = fit
        self.last = num_stages - 1
        self._tables = [np.zeros((3, fit.sizes[stage], fit.sizes[self.last])) for stage in range(self.last)]

    def add(self, batch: Batch, residuals_k: Floats) -> None:
        """Count a batch and its residuals in."""
        reporters_k = batch.members_kf[:, self.last]
        num_reporters = self._fit.sizes[self.last]
        for stage, table in enumerate(self._tables):
            members_k = batch.members_kf[:, stage]
            partial_k = residuals_k + self._fit.effects_p[self._fit.rows(stage)][members_k]
            for power in range(3):
                cells = np.bincount(members_k * num_reporters + reporters_k, partial_k**power, table[power].size)
                table[power] += cells.reshape(table[power].shape)

    def z_scores(self, stage: int) -> Floats:
        """z of each miner's effect by the median of the last stage's miners; NaN with fewer than MIN_STRATA of them."""
        count_mj, sum_mj, square_mj = self._tables[stage]
        is_known_mj = count_mj >= 2
        safe_mj = np.maximum(count_mj, 2.0)
        mean_mj = np.where(is_known_mj, sum_mj / safe_mj, np.nan)
        variance_mj = (square_mj - sum_mj**2 / safe_mj) / (safe_mj * (safe_mj - 1.0))
        effect_mj = np.stack([column - median_of_others(column) for column in mean_mj.T], axis=1)
        known_j = np.maximum(is_known_mj.sum(axis=0), 2)
        others_j = np.where(is_known_mj, variance_mj, 0.0).sum(axis=0) / known_j
        others_j *= np.array([median_variance(count - 1) / (count - 1) for count in known_j.tolist()])
        error_mj = variance_mj + others_j
        return np.array([_median_z(effects, errors) for effects, errors in zip(effect_mj, error_mj, strict=True)])


def attribute(
    batches: Callable[[], Iterable[Batch]],
    sizes: Sequence[int],
    *,
    num_stages: int,
    num_covariates: int = 0,
    epoch_of_block: Sequence[int] = (),
    usual_wander: float = 0.0,
) -> Attribution:
    """Fit and errors from samples that can be read twice; the first `num_stages` factors are the stages.

    With `epoch_of_block` the next factor is blocks of time, and it says which epoch each lies in, from 0. Honest miners then
    differ in every epoch, usually by `usual_wander` nats.
    """
    moments = Moments(sizes, num_covariates)
    for batch in batches():
        moments.add(batch)
    fit = moments.fit()
    spread, strata, wander = (
        Spread(fit),
        Strata(fit, num_stages),
        Wander(sizes, num_stages, epoch_of_block, usual_wander),
    )
    for batch in batches():
        residuals_k = spread.add(batch)
        strata.add(batch, residuals_k)
        wander.add(batch, residuals_k)
    return Attribution(fit=fit, spread=spread, strata=strata, wander=wander)


def to_batches(
    losses: Iterable[PathwayLoss], stages: Sequence[Sequence[Hotkey]], *, batch_size: int = 65536
) -> Iterable[Batch]:
    """Records of the ledger as batches; `stages` lists the hotkeys of each stage. Raises KeyError for a hotkey not listed."""
    index = [{hotkey: at for at, hotkey in enumerate(stage)} for stage in stages]
    members: list[list[int]] = []
    values: list[float] = []
    for record in losses:
        members.append([index[stage][hotkey] for stage, hotkey in enumerate(record.pathway)])
        values.append(record.loss)
        if len(values) == batch_size:
            yield _batch(members, values)
            members, values = [], []
    if values:
        yield _batch(members, values)


def stage_test(attribution: Attribution, stage: int) -> StageTest:
    """Effects of one stage against the median of the others; errors by HC3 and by what honest miners wander between merges.

    z is corrected for what either is estimated from (Welch and Satterthwaite).
    """
    fit, wander = attribution.fit, attribution.wander.of_stage(stage)
    counts_m = fit.counts_p[fit.rows(stage)]
    effects_m = np.where(counts_m > 0, fit.effects_p[fit.rows(stage)], np.nan)
    effects_m = effects_m - median_of_others(effects_m)
    # variances are of a difference to a mean; a median of the others is a little less certain than that
    widening = 1.0 + median_extra(int((counts_m > 0).sum()))
    noise_m = attribution.spread.variances(stage) * widening
    spread_m = wander.spread_m * widening
    errors_m = np.sqrt(noise_m + wander.variance * spread_m)
    freedom_m = welch_freedom(counts_m) * max(0.0, 1.0 - len(fit.counts_p) / fit.num_samples)
    doubt_m = noise_m**2 / np.maximum(freedom_m, 1e-9) + wander.doubt * spread_m**2 / 2.0
    freedom_m = np.divide(errors_m**4, doubt_m, out=np.zeros(len(counts_m)), where=doubt_m > 0.0)
    ratios_m = np.divide(effects_m, errors_m, out=np.full(len(counts_m), np.nan), where=errors_m > 0.0)
    z_m = np.array([normal_score(ratio, freedom) for ratio, freedom in zip(ratios_m, freedom_m, strict=True)])
    return StageTest(effects_m=effects_m, errors_m=errors_m, z_m=z_m)


def flags(attribution: Attribution, stages: Sequence[Sequence[Hotkey]], config: ClaspConfig) -> tuple[Flag, ...]:
    """Miners whose effect no chance explains, in order of stage and roster; none when the design is ill-conditioned.

    A sequential test may be repeated as samples come in, and still flags an honest miner with probability alpha at most.
    """
    if attribution.fit.condition > config.max_condition:
        return ()
    found: list[Flag] = []
    for stage, hotkeys in enumerate(stages):
        test = stage_test(attribution, stage)
        counts_m = attribution.fit.counts_p[attribution.fit.rows(stage)]
        is_last = stage == len(stages) - 1
        heights_m = np.abs(test.z_m) if is_last else test.z_m
        limits_m = limits(test, config, is_last=is_last)
        framing_m = np.full(len(hotkeys), np.nan) if is_last else attribution.strata.z_scores(stage)
        for at, hotkey in enumerate(hotkeys):
            is_confirmed = np.isnan(framing_m[at]) or framing_m[at] > quantile(config.framing_alpha)
            if counts_m[at] >= config.min_samples and heights_m[at] > limits_m[at] and is_confirmed:
                found.append(
                    Flag(
                        hotkey=hotkey,
                        stage=StageIndex(stage),
                        effect=float(test.effects_m[at]),
                        standard_error=float(test.errors_m[at]),
                        z=float(test.z_m[at]),
                        num_samples=int(counts_m[at]),
                    )
                )
    return tuple(found)


def limits(test: StageTest, config: ClaspConfig, *, is_last: bool) -> Floats:
    """z above which each miner is flagged.

    In the last stage both tails count, because its miners compute the losses; each then gets half of alpha.
    """
    alpha = config.alpha / 2.0 if is_last else config.alpha
    if not config.sequential:
        return np.full(len(test.errors_m), quantile(alpha))
    return np.array(
        [
            anytime_limit(error, alpha=alpha, effect=config.effect) if error > 0.0 else math.inf
            for error in test.errors_m.tolist()
        ]
    )


def _median_z(effects_j: Floats, variances_j: Floats) -> float:
    """Median of one miner's effects over its error, after the reporter that speaks most against it was left out.

    With that one in, a liar shifts the median of a few by half an error.
    """
    known = ~np.isnan(effects_j)
    num_left = int(known.sum()) - 1
    if num_left < MIN_STRATA - 1:
        return math.nan
    kept_j = np.sort(effects_j[known])[:-1]
    error = math.sqrt(median_variance(num_left) * float(np.mean(variances_j[known])) / num_left)
    return float(np.median(kept_j)) / error if error > 0.0 else math.nan


def _batch(members: list[list[int]], values: list[float]) -> Batch:
    return Batch(members_kf=np.array(members, dtype=np.int64), loss_k=np.array(values, dtype=np.float64))

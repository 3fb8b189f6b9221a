"""How much an honest miner's effect wanders from epoch to epoch (trust.md 4).

Between two merges every miner trains on samples of its own, so that params, and with them losses, differ between honest miners
until the next merge. All samples of a miner in an epoch share that difference: taken for independent, many of them would make
anybody's effect look certain. By how much a miner's mean residual varies between epochs, beyond noise, says how large it is.

Legend: m miners of one stage, e epochs of the window; otherwise as in `incentives.clasp`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from incentives.clasp import Batch, Floats

_MEDIAN_EFFICIENCY = 0.64
"""2 / pi: what a median of many estimates keeps of their joint degrees of freedom."""
_USUAL_FREEDOM = 8.0
"""Degrees of freedom that what is usual counts for, beside those of the record: a window's first epoch has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWander:
    """`variance` of an honest miner's effect between epochs, nats^2, itself known with the variance `doubt`.

    Times `spread_m` it is the variance of a miner's effect less the mean of the others', by how their samples are spread over
    the epochs; 1/E + 1/(E(M-1)) when they are spread evenly.
    """

    variance: float
    doubt: float
    spread_m: Floats


class Wander:
    """Residuals by miner and epoch. Without epochs nothing is known and nothing is added."""

    def __init__(self, sizes: Sequence[int], num_stages: int, epoch_of_block: Sequence[int], usual: float) -> None:
        self._num_stages = num_stages
        self._usual = usual
        self._epochs = np.array(epoch_of_block, dtype=np.int64)
        self._num_epochs = int(self._epochs.max()) + 1 if len(self._epochs) else 0
        self._counts = [np.zeros((size, self._num_epochs)) for size in sizes[:num_stages]]
        self._sums = [np.zeros((size, self._num_epochs)) for size in sizes[:num_stages]]
        self._squares = 0.0

    def add(self, batch: Batch, residuals_k: Floats) -> None:
        """Count a batch in; its blocks of time are the factor after the stages."""
        if not self._num_epochs:
            return
        epochs_k = self._epochs[batch.members_kf[:, self._num_stages]]
        self._squares += float(residuals_k @ residuals_k)
        for stage, (counts_me, sums_me) in enumerate(zip(self._counts, self._sums, strict=True)):
            cells_k = batch.members_kf[:, stage] * self._num_epochs + epochs_k
            counts_me += np.bincount(cells_k, minlength=counts_me.size).reshape(counts_me.shape)
            sums_me += np.bincount(cells_k, residuals_k, counts_me.size).reshape(sums_me.shape)

    def of_stage(self, stage: int) -> StageWander:
        """What one stage's miners wander by.

        With k = E - 1, the mean square of a miner's mean residuals, n times, is (noise^2 + n * wander^2) * chi^2_k / k. Its
        median over the miners counts, so that one that cheats now and then does not raise it; with what is usual it is weighed by
        degrees of freedom (moderated variances: Smyth 2004).
        """
        counts_me, totals_m = self._counts[stage], self._counts[stage].sum(axis=1)
        shares_m = np.divide((counts_me**2).sum(axis=1), totals_m**2, out=np.zeros(len(totals_m)), where=totals_m > 0)
        spread_m = shares_m + (shares_m.sum() - shares_m) / max(1, int((totals_m > 0).sum()) - 1) ** 2
        if not totals_m.any():
            return StageWander(variance=0.0, doubt=0.0, spread_m=np.zeros(len(totals_m)))
        noise = self._squares / float(totals_m.sum())
        per_cell = float(counts_me[counts_me > 0].mean())
        observed, freedom = self._observed(stage)
        joint = _USUAL_FREEDOM + freedom
        height = (_USUAL_FREEDOM * (noise + per_cell * self._usual**2) + freedom * observed) / joint
        return StageWander(
            variance=max(0.0, height - noise) / per_cell,
            doubt=2.0 / joint * (height / per_cell) ** 2,
            spread_m=spread_m,
        )

    def _observed(self, stage: int) -> tuple[float, float]:
        """Median over the miners of the mean square above, and the degrees of freedom it is known by; 0 with one epoch."""
        counts_me, sums_me = self._counts[stage], self._sums[stage]
        steps_m = (counts_me > 0).sum(axis=1) - 1
        judged = np.flatnonzero(steps_m > 0)
        if len(judged) < 2:
            return 0.0, 0.0
        steps = steps_m[judged]
        squares_me = np.divide(sums_me**2, counts_me, out=np.zeros_like(sums_me), where=counts_me > 0)
        squares = squares_me.sum(axis=1)[judged] / (steps * (1.0 - 1.0 / len(judged)))
        # a chi-square's median lies below its mean (Wilson and Hilferty)
        observed = float(np.median(squares / (1.0 - 2.0 / (9.0 * steps)) ** 3))
        return observed, _MEDIAN_EFFICIENCY * float(np.median(steps)) * (len(judged) - 1)

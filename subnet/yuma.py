"""Classic Yuma consensus: what weights and stake pay each neuron in one tempo (chain.md 4).

Legend: n neurons; row i is a validator's, column j is what validators say of neuron j.
W weights, S stake, A active stake, C consensus, B bonds, I incentive, D dividends.

Sums run in one fixed order (exact sums for vectors, row after row for matrices, never BLAS), so that
the devnet and the simulator agree to the bit on any machine.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

U16_MAX = 65_535
OWNER_CUT = 11_796
"""Share of every block's emission that goes to the subnet's owner, of 65,535: 18 %."""
ALPHA_PER_BLOCK = 1_000_000_000
"""Alpha (rao) that a started subnet emits each block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YumaParams:
    """A subnet's consensus hyperparameters, as fractions."""

    kappa: float = 32_767 / U16_MAX
    """Majority of stake that consensus needs, in (0, 1)."""
    bonds_moving_average: float = 0.9
    """Share of the old bonds that survives a tempo, in [0, 1]."""
    bonds_penalty: float = 1.0
    """How far a validator's out-of-consensus weight is cut when bonds form, in [0, 1]."""
    max_validators: int = 128
    """Number of permits."""
    min_stake: float = 0.0
    """Stake below this counts as none (the owner's neuron excepted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YumaInput:
    """A subnet before its epoch.

    `weights_nn` may have any non-negative scale by row; `bonds_nn` is what the last epoch stored (u16).
    """

    stake_n: Floats
    weights_nn: Floats
    bonds_nn: Floats
    permits_n: Bools
    active_n: Bools
    last_update_n: Ints
    registered_n: Ints
    owner_uid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class YumaResult:
    """A subnet after its epoch. `server_n` and `validator_n` are shares of the whole emission and sum to 1."""

    consensus_n: Floats
    incentive_n: Floats
    dividends_n: Floats
    validator_trust_n: Floats
    server_n: Floats
    validator_n: Floats
    bonds_nn: Floats
    permits_n: Bools


def yuma_epoch(before: YumaInput, params: YumaParams) -> YumaResult:
    """One epoch of classic Yuma: consensus, incentive, bonds, dividends, next permits."""
    counted = before.stake_n >= params.min_stake
    if before.owner_uid is not None:
        counted[before.owner_uid] = True
    stake = normalized(np.where(counted, before.stake_n, 0.0))
    active = normalized(np.where(before.permits_n & before.active_n, stake, 0.0))
    weights = _row_normalized(_masked_weights(before))
    consensus = np.array([_weighted_median(active, weights[:, j], params.kappa) for j in range(len(stake))])
    clipped = np.minimum(weights, consensus)
    incentive = normalized(_column_sums(clipped * active[:, None]))
    bonds = _moved_bonds(before, params, active, weights, clipped)
    dividends = normalized(_column_sums((bonds * incentive).T))
    server, validator = _shares(incentive, dividends, active if active.any() else stake)
    return YumaResult(
        consensus_n=consensus,
        incentive_n=incentive,
        dividends_n=dividends,
        validator_trust_n=_column_sums(clipped.T),
        server_n=server,
        validator_n=validator,
        bonds_nn=_stored_bonds(bonds),
        permits_n=_top_stakes(stake, params.max_validators, before.owner_uid),
    )


@dataclass(frozen=True, slots=True)
class Emission:
    """Alpha (rao) to divide among owner, miners (by incentive) and validators (by dividends)."""

    owner: int
    server: int
    validator: int


def block_emission(owner_cut: int = OWNER_CUT) -> Emission:
    """What one block adds: the owner's cut, then half and half; an odd rao goes to the validators."""
    owner = ALPHA_PER_BLOCK * owner_cut // U16_MAX
    server = (ALPHA_PER_BLOCK - owner) // 2
    return Emission(owner, server, ALPHA_PER_BLOCK - owner - server)


def payouts(result: YumaResult, emission: Emission) -> list[tuple[int, int]]:
    """(incentive, dividend) in rao by uid, rounded down. Without any incentive the validators get all of it."""
    has_incentive = bool(result.incentive_n.any())
    for_miners = emission.server if has_incentive else 0
    for_validators = emission.validator + emission.server - for_miners
    dividends = result.dividends_n if has_incentive else result.validator_n
    return [
        (int(incentive * for_miners), int(dividend * for_validators))
        for incentive, dividend in zip(result.incentive_n, dividends, strict=True)
    ]


def normalized(values_n: Floats) -> Floats:
    """The vector scaled to sum 1; all zeros stay zeros."""
    total = math.fsum(values_n)
    return values_n / total if total > 0 else np.zeros_like(values_n)


def without_bonds_to(bonds_nn: Floats, replaced_n: Bools) -> Floats:
    """Bonds with the columns of replaced neurons cleared: a successor on a uid inherits nothing."""
    return np.where(replaced_n[None, :], 0.0, bonds_nn)


def quantized(values_n: Floats) -> list[int]:
    """Fractions as the u16 the chain stores, rounded down."""
    return [min(U16_MAX, max(0, int(value * U16_MAX))) for value in values_n]


def _masked_weights(before: YumaInput) -> Floats:
    """Weights that count: of permit holders, not of themselves (owner excepted), not older than the target."""
    weights = np.where(before.permits_n[:, None], before.weights_nn, 0.0)
    own = np.diagonal(weights).copy()
    np.fill_diagonal(weights, 0.0)
    if before.owner_uid is not None:
        weights[before.owner_uid, before.owner_uid] = own[before.owner_uid]
    is_outdated = before.last_update_n[:, None] <= before.registered_n[None, :]
    return np.where(is_outdated, 0.0, weights)


def _moved_bonds(before: YumaInput, params: YumaParams, active: Floats, weights: Floats, clipped: Floats) -> Floats:
    """Exponential moving average of bonds, columns summing to 1."""
    penalised = weights + (clipped - weights) * params.bonds_penalty
    fresh = _column_normalized(penalised * active[:, None])
    kept = _column_normalized(np.ascontiguousarray(before.bonds_nn))
    alpha = 1.0 - params.bonds_moving_average
    return _column_normalized(alpha * fresh + (1.0 - alpha) * kept)


def _shares(incentive: Floats, dividends: Floats, fallback: Floats) -> tuple[Floats, Floats]:
    """(server, validator) shares of the emission; with no consensus at all, stake is paid."""
    total = math.fsum(incentive) + math.fsum(dividends)
    if total > 0:
        return incentive / total, dividends / total
    return np.zeros_like(incentive), fallback


def _weighted_median(active: Floats, scores: Floats, kappa: float) -> float:
    """Smallest score such that the stake at or below it exceeds 1 - kappa."""
    holders = np.flatnonzero(active > 0)
    if len(holders) == 0:
        return 0.0
    threshold = math.fsum(active) - kappa
    accumulated = 0.0
    for index in holders[np.argsort(scores[holders], kind="stable")]:
        accumulated += float(active[index])
        if accumulated > threshold:
            return float(scores[index])
    return 0.0


def _top_stakes(stake: Floats, max_validators: int, owner_uid: int | None) -> Bools:
    """Permits of the next tempo: the largest non-zero stakes, and the owner's neuron."""
    permits = stake > 0
    ascending = np.argsort(stake, kind="stable")
    permits[ascending[: max(0, len(stake) - max_validators)]] = False
    if owner_uid is not None:
        permits[owner_uid] = True
    return permits


def _stored_bonds(bonds: Floats) -> Floats:
    """Bonds as stored: each column scaled to a largest value of 65,535 and rounded down."""
    largest = bonds.max(axis=0) if len(bonds) else np.zeros(0)
    scaled = np.divide(bonds, largest[None, :], out=np.zeros_like(bonds), where=largest[None, :] > 0)
    stored: Floats = np.floor(scaled * U16_MAX)
    return stored


def _column_sums(matrix: Floats) -> Floats:
    """Sums down each column, rows added in order."""
    total = np.zeros(matrix.shape[1])
    for row in matrix:
        total = total + row
    return total


def _column_normalized(matrix: Floats) -> Floats:
    totals = _column_sums(matrix)[None, :]
    scaled: Floats = np.divide(matrix, totals, out=np.zeros_like(matrix), where=totals > 0)
    return scaled


def _row_normalized(matrix: Floats) -> Floats:
    return np.ascontiguousarray(_column_normalized(np.ascontiguousarray(matrix.T)).T)

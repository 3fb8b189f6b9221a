"""How far a replayed tensor lies from the one that was sent, in units of what the stage itself changed (trust.md 2).

Shapes: B batch, T tokens, K channels on the wire.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

RATIO_LIMIT = 1e6
"""Ratios are finite: a difference over nothing counts as this."""
DENOMINATOR_FLOOR = 0.1
"""Least denominator, over the norm of what was sent."""
TOKEN_FLOOR = 0.25
"""Least denominator of one token, over the root mean square of the tokens' norms.

Ours: with few channels some token always lies near the mean or near zero, and honest rounding would look large there.
"""


BF16_FRACTION_BITS = 7


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one pass; `rel_d_token` is the worst token's. `cosine` and `norm_ratio` are those of the published rule."""

    rel_d: float
    rel_d_token: float
    cosine: float
    norm_ratio: float


def ratio(part: float, whole: float) -> float:
    """`part / whole` without infinities: nothing over nothing is 0, and what is no number is as far off as anything can be.

    A comparison with NaN is false, so a distance that is one would lie under every limit.
    """
    if part == 0:
        return 0.0
    found = part / whole if whole > 0 else RATIO_LIMIT
    return found if found < RATIO_LIMIT else RATIO_LIMIT


def bf16_spacing(claimed: Values) -> Values:
    """How far the next bf16 value lies: two honest results that round to different sides are this much apart."""
    _, exponent = np.frexp(claimed)
    spacing: Values = np.where(claimed == 0, 0.0, np.ldexp(1.0, exponent - 1 - BF16_FRACTION_BITS))
    return spacing


def _direction(claimed: Values, replayed: Values) -> tuple[float, float]:
    """Cosine, and the norm of what was sent over the replay's."""
    norms = float(np.linalg.norm(claimed)), float(np.linalg.norm(replayed))
    if norms[0] == norms[1] == 0:
        return 1.0, 1.0
    cosine = ratio(float(np.vdot(claimed, replayed)), norms[0] * norms[1]) if min(norms) > 0 else 0.0
    return cosine, ratio(norms[0], norms[1])


def distance(
    claimed_BTK: Values,
    replayed_BTK: Values,
    given_BTK: Values | None,
    *,
    spread: bool = True,
    spacing_BTK: Values | None = None,
) -> Distance:
    """Distance of what was sent from the replay, not counting what the wire's rounding alone can make (`spacing_BTK`).

    Where a narrow cut carries nearly the same value for every token, one step of bf16 is as much as the limit.

    `given_BTK` is what the stage received, where it is K wide too. `spread` False measures in units of the whole norm: the
    last stage's gradient, which has nothing to be compared with.
    """
    num_channels = claimed_BTK.shape[-1]
    claimed, replayed = claimed_BTK.reshape(-1, num_channels), replayed_BTK.reshape(-1, num_channels)
    changes = [claimed - claimed.mean(axis=0)]
    if given_BTK is not None:
        changes.append(claimed - given_BTK.reshape(-1, num_channels))
    norm, norm_by_token = float(np.linalg.norm(claimed)), np.linalg.norm(claimed, axis=1)
    whole, by_token = norm, norm_by_token
    if spread:
        whole = max(min(float(np.linalg.norm(change)) for change in changes), DENOMINATOR_FLOOR * norm)
        by_token = np.min([np.linalg.norm(change, axis=1) for change in changes], axis=0)
    floor = TOKEN_FLOOR * float(np.sqrt(np.mean(norm_by_token**2)))
    by_token = np.maximum(np.maximum(by_token, DENOMINATOR_FLOOR * norm_by_token), floor)
    error = np.abs(replayed - claimed)
    if spacing_BTK is not None:
        error = np.maximum(error - spacing_BTK.reshape(-1, num_channels), 0.0)
    error_by_token = np.linalg.norm(error, axis=1)
    worst = max(ratio(float(off), float(unit)) for off, unit in zip(error_by_token, by_token, strict=True))
    cosine, norm_ratio = _direction(claimed, replayed)
    return Distance(
        rel_d=ratio(float(np.linalg.norm(error)), whole),
        rel_d_token=worst,
        cosine=cosine,
        norm_ratio=norm_ratio,
    )

"""From scores to the weights a validator posts, and to what the chain stores of them (trust.md 3)."""

import math
from collections.abc import Mapping

from incentives.config import IncentiveConfig, OnNoCredit
from incentives.reward import Score
from subnet.errors import InvalidConfig
from subnet.types import Hotkey

U16_MAX = 65535


def weights(
    scores: Mapping[Hotkey, Score], config: IncentiveConfig, *, burn_hotkey: Hotkey | None
) -> dict[Hotkey, float]:
    """Positive weights that sum to 1, keys sorted; empty when nobody earned anything and nothing is to be burned.

    Raises InvalidConfig when something is to be burned and there is no `burn_hotkey`.
    """
    claims = {hotkey: scores[hotkey].score * scores[hotkey].trust for hotkey in sorted(scores)}
    total = math.fsum(claims.values())
    if total <= 0.0:
        return {} if config.on_no_credit is OnNoCredit.NONE else {_required(burn_hotkey): 1.0}
    shares = {hotkey: (1.0 - config.burn_share) * (claim / total) for hotkey, claim in claims.items()}
    if config.burn_share > 0.0:
        burn = _required(burn_hotkey)
        shares[burn] = shares.get(burn, 0.0) + config.burn_share
    return {hotkey: shares[hotkey] for hotkey in sorted(shares) if shares[hotkey] > 0.0}


def to_u16(weights: Mapping[Hotkey, float]) -> dict[Hotkey, int]:
    """Integers as the chain gets them: the largest becomes 65,535, what rounds to 0 is dropped."""
    largest = max(weights.values(), default=0.0)
    if largest <= 0.0:
        return {}
    scaled = {hotkey: round(weight / largest * U16_MAX) for hotkey, weight in weights.items()}
    return {hotkey: value for hotkey, value in scaled.items() if value > 0}


def _required(burn_hotkey: Hotkey | None) -> Hotkey:
    if burn_hotkey is None:
        raise InvalidConfig(
            "incentives.burn_share and incentives.on_no_credit = burn need a burn hotkey: name the owner's"
        )
    return burn_hotkey

"""Weights by hotkey made into what the chain takes: uids of one metagraph, u16 values (chain.md 2)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from subnet.errors import Refused
from subnet.types import Hotkey, Metagraph, Uid

U16_MAX = 65_535
_NEGLIGIBLE = 1e-9
"""Share of the largest weight that is nothing on any chain: a u16 cannot show 7.6e-6 of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRules:
    """The subnet's limits on one validator's weights, and when each key that has a score earned it.

    `registered_at`: by hotkey, the registration block the score belongs to; a key registered anew since then
    is another neuron and is dropped.
    """

    min_allowed_weights: int = 1
    max_weights_limit: int = U16_MAX
    registered_at: Mapping[Hotkey, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformedWeights:
    """What to send, and what was lost on the way: keys that are gone, keys whose share rounds to nothing."""

    values: Mapping[Uid, int]
    dropped: tuple[Hotkey, ...]
    rounded_to_zero: tuple[Hotkey, ...]


def conform(weights: Mapping[Hotkey, float], metagraph: Metagraph, rules: WeightRules) -> ConformedWeights:
    """Weights as the chain stores them: the largest is 65,535, zeros are left out, no share above the limit.

    Raises Refused when a score is not a number (nothing is better than everything), when no weight is left, or when
    fewer are left than the subnet wants.
    """
    for hotkey in sorted(weights):
        if not math.isfinite(weights[hotkey]) or weights[hotkey] < 0:
            reason = f"the weight of {hotkey} is {weights[hotkey]}; weights must be finite and not negative"
            raise Refused("bad_weight", reason)
    kept, dropped = _registered(weights, metagraph, rules.registered_at)
    shares = _limited(kept, rules.max_weights_limit / U16_MAX)
    largest = max(shares.values(), default=0.0)
    if largest <= 0:
        raise Refused("no_weights", "no registered hotkey has a weight above zero; nothing can be set")
    uid_of = metagraph.by_hotkey()
    scaled = {hotkey: round(share / largest * U16_MAX) for hotkey, share in shares.items()}
    _make_up(scaled, rules.max_weights_limit)
    values = {uid_of[hotkey].uid: value for hotkey, value in scaled.items() if value > 0}
    needed = min(len(metagraph.neurons), rules.min_allowed_weights)
    if len(values) < needed:
        raise Refused(
            "too_few_weights", f"the subnet wants at least {needed} weights, only {len(values)} are above zero"
        )
    zeros = tuple(hotkey for hotkey, value in scaled.items() if value == 0 and kept[hotkey] > 0)
    return ConformedWeights(values=dict(sorted(values.items())), dropped=dropped, rounded_to_zero=zeros)


def _make_up(scaled: dict[Hotkey, int], limit: int) -> None:
    """Give the smaller what rounding took from them: the largest would be a hair above its limit, which the chain refuses.

    All of them alike, so that equal weights stay equal and the order is kept.
    """
    while limit < U16_MAX and sum(scaled.values()) * limit < U16_MAX * U16_MAX:
        smaller = [hotkey for hotkey, value in scaled.items() if 0 < value < U16_MAX]
        if not smaller:
            return
        for hotkey in smaller:
            scaled[hotkey] += 1


def _registered(
    weights: Mapping[Hotkey, float], metagraph: Metagraph, registered_at: Mapping[Hotkey, int] | None
) -> tuple[dict[Hotkey, float], tuple[Hotkey, ...]]:
    """Weights of keys that are still the neuron that earned them, in order of hotkey; and the other keys."""
    neurons = metagraph.by_hotkey()
    kept: dict[Hotkey, float] = {}
    dropped: list[Hotkey] = []
    for hotkey in sorted(weights):
        neuron = neurons.get(hotkey)
        earned_at = None if registered_at is None else registered_at.get(hotkey)
        is_same = neuron is not None and (earned_at is None or neuron.registered_at_block == earned_at)
        if is_same:
            kept[hotkey] = weights[hotkey]
        else:
            dropped.append(hotkey)
    return kept, tuple(dropped)


def _limited(weights: Mapping[Hotkey, float], limit: float) -> dict[Hotkey, float]:
    """Shares that sum to 1 with none above `limit`; what is cut off goes to the others in proportion.

    Where no distribution satisfies the limit, all get the same, which is the closest there is.
    """
    largest = max(weights.values(), default=0.0)
    if largest <= 0:
        return dict.fromkeys(weights, 0.0)
    relative = {hotkey: weight / largest for hotkey, weight in weights.items()}
    counted = {hotkey: share if share > _NEGLIGIBLE else 0.0 for hotkey, share in relative.items()}
    total = math.fsum(counted.values())
    shares = {hotkey: share / total for hotkey, share in counted.items()}
    positive = sorted(hotkey for hotkey, share in shares.items() if share > 0)
    if limit >= 1 or len(positive) * limit <= 1:
        return shares if limit >= 1 else {hotkey: float(hotkey in positive) for hotkey in shares}
    capped: list[Hotkey] = []
    while True:
        free = [hotkey for hotkey in positive if hotkey not in capped]
        left = 1.0 - limit * len(capped)
        free_total = math.fsum(shares[hotkey] for hotkey in free)
        over = [hotkey for hotkey in free if shares[hotkey] / free_total * left > limit]
        if not over:
            scale = left / free_total
            return {hotkey: limit if hotkey in capped else share * scale for hotkey, share in shares.items()}
        capped.extend(over)

"""Scores by hotkey to u16 by uid: what is kept, what is lost, what is refused."""

import itertools
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from subnet.adapters.commitment_fields import MAX_RECORD_BYTES, from_fields, to_fields
from subnet.adapters.weights_conform import U16_MAX, WeightRules, conform
from subnet.errors import Refused
from subnet.types import Hotkey, Metagraph, Neuron, Uid


def metagraph(num_neurons: int) -> Metagraph:
    neurons = tuple(
        Neuron(
            uid=Uid(uid),
            hotkey=Hotkey(f"h{uid:03}"),
            coldkey="c",
            stake=0.0,
            validator_permit=False,
            registered_at_block=uid,
            last_update_block=uid,
            is_active=True,
            incentive=0.0,
            dividends=0.0,
            emission=0.0,
        )
        for uid in range(num_neurons)
    )
    return Metagraph(netuid=1, at_block=100, owner_hotkey=Hotkey("h000"), tempo=20, neurons=neurons)


def keys(*uids: int) -> list[Hotkey]:
    return [Hotkey(f"h{uid:03}") for uid in uids]


def test_keys_become_uids_and_the_largest_becomes_the_maximum() -> None:
    conformed = conform(dict(zip(keys(3, 1), [0.25, 0.5], strict=True)), metagraph(5), WeightRules())
    assert conformed.values == {1: 65_535, 3: 32_768}
    assert conformed.dropped == conformed.rounded_to_zero == ()


def test_small_weights_beside_a_burn_weight_round_to_zero_and_are_named() -> None:
    weights = {keys(0)[0]: 0.9, **dict.fromkeys(keys(1, 2, 3), 2e-6), keys(4)[0]: 0.1}
    conformed = conform(weights, metagraph(5), WeightRules())
    assert conformed.values == {0: 65_535, 4: 7_282}
    assert conformed.rounded_to_zero == tuple(keys(1, 2, 3))


def test_a_key_that_left_or_came_back_gets_nothing() -> None:
    weights = dict.fromkeys([*keys(1, 2), Hotkey("gone")], 1.0)
    rules = WeightRules(registered_at={keys(1)[0]: 1, keys(2)[0]: 50})
    conformed = conform(weights, metagraph(5), rules)
    assert conformed.values == {1: 65_535}
    assert conformed.dropped == ("gone", "h002")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-9])
def test_no_number_no_weights(bad: float) -> None:
    with pytest.raises(Refused, match="finite and not negative"):
        conform({keys(1)[0]: 1.0, keys(2)[0]: bad}, metagraph(5), WeightRules())


@pytest.mark.parametrize("weights", [{}, {"h001": 0.0}, {"gone": 1.0}])
def test_nothing_to_set_is_refused(weights: dict[Hotkey, float]) -> None:
    with pytest.raises(Refused, match="nothing can be set"):
        conform(weights, metagraph(5), WeightRules())


def test_too_few_weights_are_refused_unless_the_subnet_is_smaller() -> None:
    rules = WeightRules(min_allowed_weights=3)
    with pytest.raises(Refused, match="at least 3 weights, only 1"):
        conform({keys(1)[0]: 1.0}, metagraph(5), rules)
    assert conform({keys(0)[0]: 1.0}, metagraph(1), rules).values == {0: 65_535}


@example(scores=[1.0, 2.2250738585e-313], limit=0.5)
@example(scores=[1e308, 1e308, 1e308], limit=0.4)
@given(
    st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=12),
    st.floats(0.05, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_no_share_is_above_the_limit_and_order_is_kept(scores: list[float], limit: float) -> None:
    weights = {Hotkey(f"h{uid:03}"): score for uid, score in enumerate(scores)}
    rules = WeightRules(max_weights_limit=round(limit * U16_MAX))
    assume(any(score > 0 for score in scores))
    values = conform(weights, metagraph(12), rules).values
    total = sum(values.values())
    num_positive = sum(score > 1e-9 * max(scores) for score in scores)
    if num_positive * rules.max_weights_limit > U16_MAX:
        # As the chain compares, without tolerance.
        assert max(values.values()) * U16_MAX <= rules.max_weights_limit * total
    ranked = sorted(values, key=lambda uid: scores[uid])
    assert all(values[low] <= values[high] for low, high in itertools.pairwise(ranked))


@given(st.binary(min_size=1, max_size=MAX_RECORD_BYTES))
@settings(max_examples=100, deadline=None)
def test_a_record_survives_its_fields(data: bytes) -> None:
    fields = to_fields(data)
    assert 1 <= len(fields) <= 3
    assert from_fields(fields) == data


def test_fields_as_the_codec_shows_them() -> None:
    assert from_fields([{"BigRaw": "text that the codec decoded"}]) == b"text that the codec decoded"
    assert from_fields(["ResetBondsFlag", {"Sha256": "0x" + "ab" * 32}, {"Raw2": "0x6869"}]) == b"hi"
    assert from_fields([]) == b""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from incentives.config import IncentiveConfig, OnNoCredit
from incentives.reward import Score
from incentives.weights import to_u16, weights
from subnet.errors import InvalidConfig
from subnet.types import Hotkey

A, B, BURN = Hotkey("5A"), Hotkey("5B"), Hotkey("5Owner")
CONFIG = IncentiveConfig()


def score(hotkey: Hotkey, value: float, trust: float = 1.0) -> Score:
    return Score(hotkey=hotkey, score=value, trust=trust, clean_epochs=0, banned_until=None, reason="")


def board(**values: float) -> dict[Hotkey, Score]:
    return {Hotkey(name): score(Hotkey(name), value) for name, value in values.items()}


CLAIMS = st.dictionaries(
    st.integers(0, 300).map(lambda number: Hotkey(f"5{number}")),
    st.tuples(st.floats(0, 1e30), st.floats(0, 1)),
    max_size=40,
)


@given(claims=CLAIMS, burn_share=st.floats(0, 1), on_no_credit=st.sampled_from(OnNoCredit))
def test_weights_sum_to_one_without_nan_or_negative(
    claims: dict[Hotkey, tuple[float, float]], burn_share: float, on_no_credit: OnNoCredit
) -> None:
    config = IncentiveConfig(burn_share=burn_share, on_no_credit=on_no_credit)
    result = weights({hotkey: score(hotkey, *claim) for hotkey, claim in claims.items()}, config, burn_hotkey=BURN)
    if result:
        assert math.fsum(result.values()) == pytest.approx(1.0, abs=1e-12)
        assert all(0.0 < weight <= 1.0 + 1e-12 for weight in result.values())
    else:
        assert on_no_credit is OnNoCredit.NONE
        assert all(value * trust == 0.0 for value, trust in claims.values())


@given(claims=CLAIMS)
def test_the_order_of_scores_does_not_matter(claims: dict[Hotkey, tuple[float, float]]) -> None:
    entries = {hotkey: score(hotkey, *claim) for hotkey, claim in claims.items()}
    backwards = dict(reversed(entries.items()))
    assert list(weights(entries, CONFIG, burn_hotkey=None).items()) == list(
        weights(backwards, CONFIG, burn_hotkey=None).items()
    )


def test_a_weight_is_score_times_trust_over_the_sum() -> None:
    entries = {A: score(A, 30.0, 0.5), B: score(B, 5.0, 1.0)}
    assert weights(entries, CONFIG, burn_hotkey=None) == {A: 0.75, B: 0.25}


def test_who_earned_nothing_is_left_out() -> None:
    assert weights(board(A=1.0, B=0.0), CONFIG, burn_hotkey=None) == {"A": 1.0}


def test_a_share_is_burned_also_when_the_burner_mines() -> None:
    config = IncentiveConfig(burn_share=0.5)
    assert weights(board(A=1.0), config, burn_hotkey=BURN) == {"A": 0.5, BURN: 0.5}
    assert weights({BURN: score(BURN, 2.0)}, config, burn_hotkey=BURN) == {BURN: 1.0}


def test_without_credit_the_config_decides() -> None:
    burn = IncentiveConfig(on_no_credit=OnNoCredit.BURN)
    for entries in ({}, board(A=0.0)):
        assert weights(entries, CONFIG, burn_hotkey=BURN) == {}
        assert weights(entries, burn, burn_hotkey=BURN) == {BURN: 1.0}


@pytest.mark.parametrize("entries", [{}, board(A=1.0)])
def test_burning_needs_somebody_to_burn_to(entries: dict[Hotkey, Score]) -> None:
    config = IncentiveConfig(burn_share=0.1, on_no_credit=OnNoCredit.BURN)
    with pytest.raises(InvalidConfig, match="burn hotkey"):
        weights(entries, config, burn_hotkey=None)


def test_the_largest_weight_becomes_the_largest_integer() -> None:
    assert to_u16({A: 0.75, B: 0.25}) == {A: 65535, B: 21845}
    assert to_u16({A: 1.0, B: 1e-9}) == {A: 65535}
    assert to_u16({}) == to_u16({A: 0.0}) == {}


@given(claims=CLAIMS)
def test_integers_say_the_same_within_their_rounding(claims: dict[Hotkey, tuple[float, float]]) -> None:
    result = weights({hotkey: score(hotkey, *claim) for hotkey, claim in claims.items()}, CONFIG, burn_hotkey=None)
    sent = to_u16(result)
    largest = max(result.values(), default=1.0)
    for hotkey, weight in result.items():
        assert abs(sent.get(hotkey, 0) / 65535 - weight / largest) <= 0.5 / 65535 + 1e-12

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from subnet.merging.agreement import Comparison, agreement_matrix
from subnet.types import Hotkey

MINERS = [Hotkey(name) for name in "abcdefgh"]


def compared(cheaters: set[str], *, agree: bool, miners: list[Hotkey] = MINERS) -> list[Comparison]:
    """Every pair once; cheaters differ from the honest, and from each other unless they agree."""
    return [
        Comparison(pair=pair, is_equal=not cheaters & set(pair) or (agree and set(pair) <= cheaters))
        for pair in combinations(miners, 2)
    ]


def test_honest_miners_agree_everywhere() -> None:
    matrix = agreement_matrix(compared(set(), agree=False))
    assert matrix.out_of_consensus() == ()
    assert matrix.rows()[0] == [None, *[1.0] * 7]


def test_independent_cheaters_are_rows_out_of_consensus() -> None:
    matrix = agreement_matrix(compared({"b", "f", "g"}, agree=False))
    assert matrix.out_of_consensus() == ("b", "f", "g")
    assert matrix.disagreeing(Hotkey("b")) == 1.0
    assert matrix.disagreeing(Hotkey("a")) == 3 / 7


def test_colluders_who_agree_with_each_other_still_stand_out() -> None:
    assert agreement_matrix(compared({"a", "c", "h"}, agree=True)).out_of_consensus() == ("a", "c", "h")


def test_of_two_miners_none_is_named() -> None:
    assert agreement_matrix(compared({"a"}, agree=False, miners=MINERS[:2])).out_of_consensus() == ()


def test_of_three_miners_the_odd_one_is_named() -> None:
    assert agreement_matrix(compared({"c"}, agree=False, miners=MINERS[:3])).out_of_consensus() == ("c",)


@given(order=st.permutations(compared({"b"}, agree=False)), swapped=st.booleans())
def test_order_of_records_and_pairs_does_not_matter(order: list[Comparison], swapped: bool) -> None:
    if swapped:
        order = [Comparison(pair=(record.pair[1], record.pair[0]), is_equal=record.is_equal) for record in order]
    assert agreement_matrix(order).rows() == agreement_matrix(compared({"b"}, agree=False)).rows()


def test_epochs_add_up() -> None:
    matrix = agreement_matrix([*compared(set(), agree=False), *compared({"b"}, agree=False)])
    assert matrix.agreement(Hotkey("a"), Hotkey("b")) == 0.5
    assert matrix.agreement(Hotkey("a"), Hotkey("c")) == 1.0
    assert matrix.agreement(Hotkey("a"), Hotkey("a")) is None


def test_nothing_compared_is_an_empty_matrix() -> None:
    matrix = agreement_matrix([])
    assert matrix.rows() == []
    assert matrix.disagreeing(Hotkey("a")) == 0.0

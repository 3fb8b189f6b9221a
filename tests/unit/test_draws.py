import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet import draws

ROOT = Path(__file__).parents[2]
KNOWN_SEED = "316acc729cdbd6f16cfbfadaa2d4a1c05894f1c6e87d9cb5aa6519435a0972b5"
KNOWN_UNIFORM = 0.7134853526076069
KNOWN_BELOW = 670
KNOWN_ORDER = "hfbceadg"
PARTS = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 300), st.binary(max_size=5)), max_size=4)


def chi_square(counts: Counter[int], cells: int, rounds: int) -> float:
    return sum((counts[cell] - rounds / cells) ** 2 / (rounds / cells) for cell in range(cells))


def test_known_draws() -> None:
    """Another implementation must find the same; these values never change."""
    assert draws.seed_bytes("beacon", 7, b"x").hex() == KNOWN_SEED
    assert draws.uniform("beacon", "audit", 3) == KNOWN_UNIFORM
    assert draws.below(1_000, "beacon", 3) == KNOWN_BELOW
    assert draws.shuffled(list("abcdefgh"), "beacon", 3) == list(KNOWN_ORDER)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_draws_do_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    code = "from subnet import draws; print(draws.seed_bytes('beacon', 7, b'x').hex(), draws.uniform('beacon', 'audit', 3))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [KNOWN_SEED, str(KNOWN_UNIFORM)]


def test_parts_are_told_apart_by_length_and_type() -> None:
    seeds = [
        draws.seed_bytes(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("1",), (1,), (b"1",), (), ("",))
    ]
    assert len(set(seeds)) == len(seeds)


@given(one=PARTS, other=PARTS)
def test_different_parts_draw_differently(one: list[draws.Part], other: list[draws.Part]) -> None:
    if [(type(part), part) for part in one] != [(type(part), part) for part in other]:
        assert draws.seed_bytes(*one) != draws.seed_bytes(*other)


def test_uniform_is_uniform() -> None:
    rounds = 20_000
    values = [draws.uniform("uniformity", number) for number in range(rounds)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert chi_square(Counter(int(value * 10) for value in values), 10, rounds) < 27.9  # 99.9 %, 9 degrees of freedom
    following = Counter(int(a * 4) * 4 + int(b * 4) for a, b in zip(values[::2], values[1::2], strict=True))
    assert chi_square(following, 16, rounds // 2) < 37.7  # 99.9 %, 15 degrees of freedom


@given(limit=st.integers(1, 1 << 63), parts=PARTS)
def test_below_stays_below(limit: int, parts: list[draws.Part]) -> None:
    assert 0 <= draws.below(limit, *parts) < limit


def test_below_rejects_words_that_would_bias_it() -> None:
    """Just above half of the range, one word in two is drawn again: without that the low half would come twice as often."""
    limit = (1 << 63) + 1
    low = sum(draws.below(limit, "bias", number) < limit // 2 for number in range(2_000))
    assert 900 < low < 1_100


def test_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        draws.below(0, "x")


@given(items=st.lists(st.integers(), max_size=30), parts=PARTS)
def test_a_shuffle_is_a_permutation_and_leaves_its_input(items: list[int], parts: list[draws.Part]) -> None:
    before = list(items)
    assert sorted(draws.shuffled(items, *parts)) == sorted(items)
    assert items == before


def test_every_permutation_is_equally_likely() -> None:
    rounds = 12_000
    orders = Counter("".join(draws.shuffled("abcd", "permutations", number)) for number in range(rounds))
    assert len(orders) == 24
    statistic = sum((count - rounds / 24) ** 2 / (rounds / 24) for count in orders.values())
    assert statistic < 49.7  # 99.9 %, 23 degrees of freedom


def test_chosen_items_are_distinct_and_at_most_all() -> None:
    items = list(range(10))
    picked = draws.chosen(items, 4, "choice")
    assert len(set(picked)) == 4
    assert picked == draws.shuffled(items, "choice")[:4]
    assert sorted(draws.chosen(items, 99, "choice")) == items

import math
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet import wire
from subnet.merging.schedule import num_chunks, p_valid, shard_plans
from subnet.types import Epoch, Hotkey, StageIndex

CHUNK_BYTES = 256
CHUNK_ELEMENTS = CHUNK_BYTES // 4


def names(count: int) -> list[Hotkey]:
    return [Hotkey(f"5{index:03d}") for index in range(count)]


def plans(
    num_elements: int, miners: list[Hotkey], beacon: str = "beacon", epoch: int = 3
) -> tuple[wire.ShardPlan, ...]:
    return shard_plans(
        num_elements, miners, beacon=beacon, stage=StageIndex(1), epoch=Epoch(epoch), chunk_bytes=CHUNK_BYTES
    )


@given(num_elements=st.integers(1, 20_000), num_miners=st.integers(1, 16), beacon=st.text(max_size=8))
def test_shards_tile_the_vector_on_chunk_edges(num_elements: int, num_miners: int, beacon: str) -> None:
    shards = plans(num_elements, names(num_miners), beacon)
    assert [shard.shard for shard in shards] == list(range(len(shards)))
    assert shards[0].start == 0
    assert shards[-1].stop == num_elements
    for left, right in pairwise(shards):
        assert left.stop == right.start
        assert left.stop % CHUNK_ELEMENTS == 0 or left.stop == num_elements
    sizes = [num_chunks(shard.stop, CHUNK_BYTES) - num_chunks(shard.start, CHUNK_BYTES) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@given(num_miners=st.integers(2, 24), beacon=st.text(max_size=8))
def test_every_pair_meets_exactly_once(num_miners: int, beacon: str) -> None:
    miners = names(num_miners)
    shards = plans(20_000, miners, beacon)
    assert sorted(shard.reducers for shard in shards) == list(combinations(miners, 2))
    for miner in miners:
        assert sum(miner in shard.reducers for shard in shards) == num_miners - 1


@given(order=st.permutations(names(6)))
def test_the_order_of_miners_does_not_matter(order: list[Hotkey]) -> None:
    assert plans(9_000, order) == plans(9_000, names(6))


def test_a_lone_miner_reduces_everything_alone() -> None:
    (shard,) = plans(1_000, names(1))
    assert (shard.start, shard.stop, shard.reducers) == (0, 1_000, ("5000",))


def test_two_miners_share_one_shard() -> None:
    (shard,) = plans(1_000, names(2))
    assert (shard.start, shard.stop, shard.reducers) == (0, 1_000, ("5000", "5001"))


def test_with_fewer_chunks_than_pairs_as_many_pairs_are_drawn() -> None:
    shards = plans(2 * CHUNK_ELEMENTS, names(4))
    assert [(shard.start, shard.stop) for shard in shards] == [
        (0, CHUNK_ELEMENTS),
        (CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS),
    ]
    drawn = {plans(2 * CHUNK_ELEMENTS, names(4), beacon=str(number))[0].reducers for number in range(100)}
    assert len(drawn) == 6, "whom it falls on follows from the beacon"


def test_pairs_change_with_beacon_and_epoch() -> None:
    first = [shard.reducers for shard in plans(9_000, names(8))]
    assert first != [shard.reducers for shard in plans(9_000, names(8), beacon="other")]
    assert first != [shard.reducers for shard in plans(9_000, names(8), epoch=4)]


def test_every_pair_is_equally_likely_to_get_the_first_shard() -> None:
    rounds = 2_000
    counts: dict[tuple[Hotkey, ...], int] = {}
    for round_ in range(rounds):
        reducers = plans(9_000, names(5), beacon=str(round_))[0].reducers
        counts[reducers] = counts.get(reducers, 0) + 1
    expected = rounds / 10
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 10
    assert chi_square < 27.9  # 99.9th percentile with 9 degrees of freedom


@pytest.mark.parametrize(("num_elements", "miners"), [(0, names(3)), (10, []), (10, [*names(2), Hotkey("5001")])])
def test_nothing_to_merge_is_refused(num_elements: int, miners: list[Hotkey]) -> None:
    with pytest.raises(ValueError, match=r"merge"):
        plans(num_elements, miners)


def test_p_valid_is_exact_for_every_stage_up_to_64_miners() -> None:
    for miners in range(1, 65):
        for failed in range(miners + 1):
            alive = sum(pair[0] >= failed or pair[1] >= failed for pair in combinations(range(miners), 2))
            exact = Fraction(alive, math.comb(miners, 2)) if miners > 1 else Fraction(1 - failed)
            assert p_valid(miners, failed) == float(exact)


@pytest.mark.parametrize(("failed", "expected"), [(5, 0.992), (10, 0.963), (18, 0.875)])
def test_p_valid_gives_the_figures_of_the_paper(failed: int, expected: float) -> None:
    assert p_valid(50, failed) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("miners", "failed"), [(0, 0), (3, 4), (3, -1)])
def test_p_valid_refuses_impossible_counts(miners: int, failed: int) -> None:
    with pytest.raises(ValueError, match="num_failed"):
        p_valid(miners, failed)

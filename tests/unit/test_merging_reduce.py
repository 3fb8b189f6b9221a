import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from subnet.config import MergeConfig
from subnet.errors import ProtocolViolation
from subnet.merging import gates
from subnet.merging.reduce import MAX_TOTAL_BATCHES, reduce_shard

Vector = npt.NDArray[np.float32]
MERGE = MergeConfig()
UNGATED = MergeConfig(norm_cap=1e30, weight_cap=1e6)
FINITE = st.floats(-1e4, 1e4, width=32)
VECTORS = hnp.arrays(np.float32, st.integers(0, 40), elements=FINITE)


def honest(count: int, size: int = 400, *, seed: int = 0, noise: float = 0.5) -> list[Vector]:
    """Updates that share a direction, as replicas of one stage do."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(size)
    return [(common + noise * rng.standard_normal(size)).astype(np.float32) for _ in range(count)]


def mean(slices: list[Vector]) -> Vector:
    average: Vector = np.stack(slices).mean(axis=0)
    return average


def agreeing(slices: list[Vector]) -> list[bool]:
    return gates.agreeing(slices, gates.norms(slices))


def cosine(one: Vector, other: Vector) -> float:
    return gates.dot(one, other) / (gates.norm(one) * gates.norm(other))


@given(vector=VECTORS, counts=st.lists(st.integers(1, 2**24), min_size=1, max_size=9))
def test_identical_vectors_merge_to_the_vector_to_the_bit(vector: Vector, counts: list[int]) -> None:
    merged = reduce_shard([vector] * len(counts), counts, MERGE)
    assert merged.dtype == np.float32
    assert merged.tobytes() == vector.tobytes()


def test_identical_vectors_keep_negative_zeros_subnormals_and_extremes() -> None:
    vector = np.array([-0.0, 0.0, 1e-45, -1e-45, 1e4, 1.1754942e-38, 0.1], dtype=np.float32)
    counts = [1, 2, 3, 5, 7, 1_000_003, 134_217_727]
    assert reduce_shard([vector] * 7, counts, UNGATED).tobytes() == vector.tobytes()


@given(
    slices=st.integers(1, 20).flatmap(
        lambda size: st.lists(hnp.arrays(np.float32, size, elements=FINITE), min_size=1, max_size=3)
    ),
    data=st.data(),
)
def test_a_merge_is_the_plain_weighted_mean_where_no_gate_bites(slices: list[Vector], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 1000), min_size=len(slices), max_size=len(slices)))
    merged = reduce_shard(slices, counts, UNGATED)
    if min(gates.norm(values) for values in slices) * UNGATED.norm_cap < max(gates.norm(values) for values in slices):
        return  # a vector of next to nothing may pull the median norm down to where even this cap bites
    exact = [
        math.fsum(float(values[at]) * count for values, count in zip(slices, counts, strict=True)) / sum(counts)
        for at in range(slices[0].size)
    ]
    np.testing.assert_allclose(merged, exact, rtol=2e-7, atol=1e-9)


@given(order=st.permutations(range(7)))
def test_order_changes_a_merge_by_rounding_only(order: list[int]) -> None:
    slices, counts = honest(7), [10, 12, 9, 11, 10, 8, 13]
    merged = reduce_shard(slices, counts, MERGE)
    permuted = reduce_shard([slices[at] for at in order], [counts[at] for at in order], MERGE)
    np.testing.assert_allclose(permuted, merged, rtol=3e-7, atol=1e-12)


def test_two_honest_copies_are_bit_identical() -> None:
    slices, counts = honest(5), [10, 12, 9, 11, 10]
    once = reduce_shard(slices, counts, MERGE)
    again = reduce_shard([values.copy() for values in slices], list(counts), MERGE)
    strided = reduce_shard([np.repeat(values, 2)[::2] for values in slices], counts, MERGE)
    assert once.tobytes() == again.tobytes() == strided.tobytes()


def test_known_bits_of_a_merge() -> None:
    slices = [np.array([1.0, 0.1, -3.0], np.float32), np.array([0.5, 0.2, 3.0], np.float32)]
    merged = reduce_shard(slices, [1, 2], UNGATED)
    assert merged.tobytes().hex() == "abaa2a3fabaa2a3e0000803f"


def test_an_empty_shard_merges_to_nothing() -> None:
    empty = np.zeros(0, np.float32)
    assert reduce_shard([empty] * 5, [1] * 5, MERGE).size == 0


def test_a_long_slice_is_scaled_to_the_median_norm() -> None:
    slices = [np.array([3.0, 4.0], np.float32), np.array([6.0, 8.0], np.float32), np.array([300.0, 400.0], np.float32)]
    clipped = gates.clip_norms(slices, gates.norms(slices), 1.0)
    assert [gates.norm(values) for values in clipped] == pytest.approx([5.0, 10.0, 10.0])
    assert clipped[0] is slices[0]
    assert clipped[2].dtype == np.float32
    assert gates.norms(gates.clip_norms(slices, gates.norms(slices), 2.0)) == pytest.approx([5.0, 10.0, 20.0])


def test_a_merge_weight_is_at_most_twice_the_median() -> None:
    assert gates.cap_batches([10, 10, 11, 1000], 2.0) == [10, 10, 11, 21]
    assert gates.cap_batches([1], 2.0) == [1]
    slices = [np.array([1.0], np.float32)] * 2 + [np.array([-1.0], np.float32)]
    assert reduce_shard(slices, [10, 10, 10_000], MERGE)[0] == 0.0


def test_one_sign_flip_of_ten_does_not_turn_the_merge() -> None:
    slices = honest(10)
    direction = mean(slices)
    attacked = [*slices[:9], np.float32(-10.0) * slices[9]]
    assert cosine(mean(attacked), direction) < 0.5
    assert agreeing(attacked) == [True] * 9 + [False]
    assert cosine(reduce_shard(attacked, [10] * 10, MERGE), direction) > 0.99


def test_a_zero_upload_and_noise_are_left_out() -> None:
    noise = np.random.default_rng(5).standard_normal(400).astype(np.float32)
    slices = [*honest(8), np.zeros(400, np.float32), noise]
    assert agreeing(slices) == [True] * 8 + [False, False]


def test_honest_miners_pass_the_cosine_gate() -> None:
    rejected = sum(
        not passes
        for seed in range(200)
        for passes in agreeing(honest(4 + seed % 8, seed=seed, noise=0.3 + seed % 5 / 4))
    )
    assert rejected == 0


def test_nobody_is_left_out_among_three_or_when_all_are_zero() -> None:
    opposite = [np.ones(3, np.float32), np.ones(3, np.float32), -np.ones(3, np.float32)]
    assert agreeing(opposite) == [True, True, True]
    assert agreeing([np.zeros(3, np.float32)] * 5) == [True] * 5


@given(values=hnp.arrays(np.float64, st.integers(0, 70), elements=st.floats(-1e6, 1e6)))
def test_the_tree_sum_is_a_sum(values: npt.NDArray[np.float64]) -> None:
    assert gates.tree_sum(values) == pytest.approx(math.fsum(values), rel=1e-12, abs=1e-8)


def test_the_tree_sum_adds_in_its_fixed_order() -> None:
    values = np.array([1e16, 1.0, -1e16, 1.0, 1.0])
    assert gates.tree_sum(values) == ((1e16 + -1e16) + (1.0 + 1.0)) + 1.0
    assert gates.tree_sum(np.zeros(0)) == 0.0


@pytest.mark.parametrize(
    ("slices", "counts"),
    [
        ([], []),
        ([np.ones(2, np.float32)], [1, 1]),
        ([np.ones(2, np.float32), np.ones(3, np.float32)], [1, 1]),
        ([np.ones(2, np.float32)], [0]),
        ([np.ones(2, np.float32)], [MAX_TOTAL_BATCHES]),
    ],
)
def test_what_cannot_be_merged_is_refused(slices: list[Vector], counts: list[int]) -> None:
    with pytest.raises(ProtocolViolation):
        reduce_shard(slices, counts, MERGE)


@pytest.mark.parametrize("num_rows", range(1, 41))
def test_the_median_of_rows_is_that_of_each_coordinate(num_rows: int) -> None:
    rows = np.random.default_rng(num_rows).integers(-9, 9, (num_rows, 500)).astype(np.float32)
    assert np.array_equal(gates.coordinate_median(list(rows)), np.median(rows.astype(np.float64), axis=0))


def test_an_inner_product_adds_blocks_and_then_one_tree() -> None:
    values = np.random.default_rng(0).standard_normal(2 * gates.BLOCK + 5).astype(np.float32)
    squares = values.astype(np.float64) ** 2
    one, two, rest = squares[: gates.BLOCK], squares[gates.BLOCK : -5], squares[-5:]
    added = one + two
    added[:5] += rest
    assert gates.dot(values, values) == gates.tree_sum(added)
    assert gates.dot(values, values) == pytest.approx(math.fsum(squares), rel=1e-13)


def test_a_shard_of_several_blocks_merges_like_its_parts() -> None:
    slices, counts = honest(5, 2 * gates.BLOCK + 5), [10, 12, 9, 11, 10]
    whole = reduce_shard(slices, counts, UNGATED)
    parts = [reduce_shard([values[block] for values in slices], counts, UNGATED) for block in gates.blocks(whole.size)]
    assert whole.tobytes() == b"".join(part.tobytes() for part in parts)

"""Yuma against the runtime's documented numbers, and its properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.yuma import YumaInput, YumaParams, YumaResult, quantized, without_bonds_to, yuma_epoch

SERVERS = [(4, 16_383), (5, 32_767), (6, 49_149), (7, 65_535)]


def subnet(stake: list[float], rows: dict[int, list[tuple[int, int]]], bonds: np.ndarray | None = None) -> YumaInput:
    n = len(stake)
    weights = np.zeros((n, n))
    for validator, row in rows.items():
        for target, value in row:
            weights[validator, target] = value
    return YumaInput(
        stake_n=np.array(stake, dtype=np.float64),
        weights_nn=weights,
        bonds_nn=np.zeros((n, n)) if bonds is None else bonds,
        permits_n=np.ones(n, dtype=bool),
        active_n=np.ones(n, dtype=bool),
        last_update_n=np.ones(n, dtype=np.int64),
        registered_n=np.zeros(n, dtype=np.int64),
    )


def test_bonds_and_dividends_follow_the_documented_four_epochs() -> None:
    """Numbers documented for the runtime's own bond test: 4 validators, 4 servers, one leaves after another."""
    stake = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    rows = {validator: list(SERVERS) for validator in range(4)}
    expected = [
        ([0.0999999978, 0.1999999983, 0.3000000012, 0.4000000022], [16_383, 32_767, 49_151, 65_535]),
        ([0.0899967032, 0.2022211233, 0.303334432, 0.404447741], [14_582, 32_767, 49_151, 65_535]),
        ([0.0809936118, 0.1819995677, 0.3158592721, 0.421147548], [12_603, 28_321, 49_151, 65_535]),
    ]
    bonds = None
    for epoch, (dividends, column) in enumerate(expected):
        if epoch:
            rows[epoch - 1] = [(epoch - 1, 65_535)]
        result = yuma_epoch(subnet(stake, rows, bonds), YumaParams())
        assert result.dividends_n[:4] == pytest.approx(dividends, abs=1e-8)
        assert [abs(result.bonds_nn[i, 4] - column[i]) <= 1 for i in range(4)] == [True] * 4
        bonds = result.bonds_nn
    rows[2] = [(2, 65_535)]
    result = yuma_epoch(subnet(stake, rows, bonds), YumaParams())
    assert not result.dividends_n.any()
    assert [abs(result.bonds_nn[i, 7] - [12_602, 28_320, 49_150, 65_535][i]) <= 1 for i in range(4)] == [True] * 4


def test_weights_outside_consensus_are_clipped() -> None:
    result = yuma_epoch(subnet([6.0, 4.0, 0.0, 0.0], {0: [(2, 1)], 1: [(3, 1)]}), YumaParams())
    assert result.consensus_n.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert result.incentive_n.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert result.validator_trust_n.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_weights_set_at_or_before_a_registration_do_not_count() -> None:
    before = subnet([1.0, 0.0, 0.0], {0: [(1, 1), (2, 1)]})
    before.registered_n[2] = 1
    assert yuma_epoch(before, YumaParams()).incentive_n.tolist() == [0.0, 1.0, 0.0]


def test_self_weight_counts_for_the_owner_only() -> None:
    rows = {0: [(0, 1), (1, 1)]}
    plain = subnet([1.0, 0.0], rows)
    assert yuma_epoch(plain, YumaParams()).incentive_n.tolist() == [0.0, 1.0]
    owned = YumaInput(
        stake_n=plain.stake_n,
        weights_nn=plain.weights_nn,
        bonds_nn=plain.bonds_nn,
        permits_n=plain.permits_n,
        active_n=plain.active_n,
        last_update_n=plain.last_update_n,
        registered_n=plain.registered_n,
        owner_uid=0,
    )
    assert yuma_epoch(owned, YumaParams()).incentive_n.tolist() == [0.5, 0.5]


def test_without_weights_the_stake_is_paid() -> None:
    result = yuma_epoch(subnet([1.0, 3.0], {}), YumaParams())
    assert result.server_n.tolist() == [0.0, 0.0]
    assert result.validator_n.tolist() == [0.25, 0.75]


def test_nobody_staked_pays_nobody() -> None:
    result = yuma_epoch(subnet([0.0, 0.0], {0: [(1, 1)]}), YumaParams())
    assert math.fsum(result.server_n) == math.fsum(result.validator_n) == 0.0
    assert not result.permits_n.any()


def test_permits_go_to_the_largest_stakes_and_the_owner() -> None:
    before = subnet([5.0, 1.0, 3.0, 0.0], {})
    assert yuma_epoch(before, YumaParams(max_validators=2)).permits_n.tolist() == [True, False, True, False]
    assert yuma_epoch(before, YumaParams(max_validators=9)).permits_n.tolist() == [True, True, True, False]


def test_stake_below_the_threshold_counts_as_none() -> None:
    result = yuma_epoch(subnet([5.0, 1.0], {}), YumaParams(min_stake=2.0))
    assert result.permits_n.tolist() == [True, False]


def test_a_successor_inherits_no_bonds() -> None:
    bonds = np.full((2, 2), 7.0)
    assert without_bonds_to(bonds, np.array([False, True])).tolist() == [[7.0, 0.0], [7.0, 0.0]]


def test_quantized_stays_within_u16() -> None:
    assert quantized(np.array([0.0, 0.5, 1.0, 1.5, -1.0])) == [0, 32_767, 65_535, 65_535, 0]


@st.composite
def subnets(draw: st.DrawFn) -> YumaInput:
    n = draw(st.integers(2, 7))
    stake = draw(st.lists(st.integers(0, 1_000), min_size=n, max_size=n))
    cells = draw(st.lists(st.integers(0, 65_535), min_size=n * n, max_size=n * n))
    before = subnet([float(value) for value in stake], {})
    before.weights_nn[:] = np.array(cells, dtype=np.float64).reshape(n, n)
    return before


@given(subnets())
@settings(max_examples=60, deadline=None)
def test_shares_are_fractions_that_sum_to_one(before: YumaInput) -> None:
    result = yuma_epoch(before, YumaParams())
    paid = math.fsum(result.server_n) + math.fsum(result.validator_n)
    assert paid == pytest.approx(1.0 if before.stake_n.any() else 0.0, abs=1e-12)
    assert (result.incentive_n >= 0).all() and (result.dividends_n >= 0).all()


@given(subnets(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_pay_does_not_depend_on_the_order_of_neurons(before: YumaInput, random: object) -> None:
    n = len(before.stake_n)
    order = list(range(n))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = YumaInput(
        stake_n=before.stake_n[order],
        weights_nn=before.weights_nn[np.ix_(order, order)],
        bonds_nn=before.bonds_nn[np.ix_(order, order)],
        permits_n=before.permits_n,
        active_n=before.active_n,
        last_update_n=before.last_update_n,
        registered_n=before.registered_n,
    )
    one: YumaResult = yuma_epoch(before, YumaParams())
    two: YumaResult = yuma_epoch(moved, YumaParams())
    assert two.incentive_n == pytest.approx(one.incentive_n[order], abs=1e-9)
    assert two.dividends_n == pytest.approx(one.dividends_n[order], abs=1e-9)

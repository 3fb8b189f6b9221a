"""What temperature, top-k, top-p and the seed do to the choice of a token."""

import math

import pytest
import torch

from subnet.inference.sampling import Sampling, choose

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0])


def drawn(count: int = 2000, **knobs: float) -> list[int]:
    sampling = Sampling(**knobs)  # type: ignore[arg-type]  # numbers by name
    return [choose(LOGITS, sampling, position).token for position in range(count)]


def test_temperature_zero_takes_the_likeliest_and_says_how_likely() -> None:
    choice = choose(LOGITS, Sampling(temperature=0, num_logprobs=2), 7)
    expected = LOGITS.double().log_softmax(-1)
    assert choice.token == 1
    assert choice.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in choice.top] == [1, 3]


def test_draws_follow_the_probabilities() -> None:
    tokens = drawn()
    for token, share in enumerate(LOGITS.double().softmax(-1).tolist()):
        assert tokens.count(token) / len(tokens) == pytest.approx(share, abs=4 * math.sqrt(0.25 / len(tokens)))


def test_cold_draws_are_nearly_greedy() -> None:
    assert drawn(200, temperature=0.05).count(1) > 195


def test_top_k_and_top_p_leave_the_unlikely_out() -> None:
    assert set(drawn(top_k=2)) == {1, 3}
    assert set(drawn(500, top_p=0.45)) == {1}
    assert set(drawn(top_p=0.75)) == {1, 3}
    assert set(drawn(500, top_k=1, temperature=2.0)) == {1}


def test_same_seed_and_position_same_token() -> None:
    assert drawn(50, seed=3) == drawn(50, seed=3)
    assert drawn(50, seed=3) != drawn(50, seed=4)

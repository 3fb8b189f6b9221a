"""Muon in float32 against torch's own in bfloat16, and against the singular values it is meant to give."""

import pytest
import torch
from torch import Tensor, nn

from subnet.training.muon import Muon, orthogonalized

SHAPES = [(16, 16), (44, 16), (16, 44), (1, 8)]


def drawn(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = drawn(shape, 1)
    found = orthogonalized(matrix)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    after = left.T @ found @ right.T
    heavy = torch.diag(after)[values > 0.05 * values[0]]
    assert bool(((heavy > 0.6) & (heavy < 1.25)).all()), heavy
    assert float((after - torch.diag(torch.diag(after))).abs().max()) < 1e-4


def test_no_gradient_is_no_direction() -> None:
    assert torch.equal(orthogonalized(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_the_size_of_a_gradient_does_not_matter() -> None:
    matrix = drawn((12, 20), 2)
    assert torch.allclose(orthogonalized(matrix), orthogonalized(matrix * 1000), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_torchs_within_what_bfloat16_rounds_off(shape: tuple[int, int]) -> None:
    start = drawn(shape, 3)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Muon([ours], lr=0.02, weight_decay=0.1, momentum=0.95)
    mine.state[ours]["momentum_buffer"] = torch.zeros(shape)
    library = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95)
    for seed in range(4):
        ours.grad, theirs.grad = drawn(shape, 10 + seed), drawn(shape, 10 + seed)
        mine.step()
        library.step()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    moved = float((theirs - start).detach().norm())
    assert float((ours - theirs).detach().norm()) < 0.02 * moved
    assert torch.equal(mine.state[ours]["momentum_buffer"], library.state[theirs]["momentum_buffer"])

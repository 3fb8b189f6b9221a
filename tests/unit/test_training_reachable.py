"""Bounds on an optimizer's state: every history of gradients stays within, also the one that comes nearest."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.config import OptimizerKind, RunConfig
from subnet.errors import ProtocolViolation
from subnet.training.checkpoint import CheckpointState
from subnet.training.optimizers import ADAMW_BETAS, InnerOptimizer, clip_limit
from subnet.training.reachable import check_reachable, largest_ratio
from subnet.types import StageIndex
from tests.numerics.support import small_config

STAGE = StageIndex(1)
SHAPES = {"a.weight": (6, 4), "b.norm.weight": (4,)}


def trained(config: RunConfig, scales: list[float], *, seed: int) -> CheckpointState:
    """After one step for each of `scales`, the size of its gradients."""
    optimizer = InnerOptimizer(config, STAGE, SHAPES)
    rng = np.random.default_rng(seed)
    for scale in scales:
        optimizer.step(
            {
                name: torch.from_numpy((scale * rng.standard_normal(shape)).astype(np.float32))
                for name, shape in SHAPES.items()
            }
        )
    return state_of(optimizer)


def state_of(optimizer: InnerOptimizer) -> CheckpointState:
    return CheckpointState(
        params=dict(optimizer.params), state=optimizer.state(), num_steps=0, num_optimizer_steps=optimizer.num_steps
    )


@settings(max_examples=40, deadline=None)
@given(
    scales=st.lists(st.sampled_from([0.0, 1e-30, 1e-20, 1e-8, 1e-3, 1.0, 1e6, 1e30]), min_size=1, max_size=30),
    optimizer=st.sampled_from(list(OptimizerKind)),
    seed=st.integers(0, 1000),
)
def test_no_history_of_gradients_leads_out(scales: list[float], optimizer: OptimizerKind, seed: int) -> None:
    config = small_config(optimizer=optimizer)
    check_reachable(config, STAGE, trained(config, scales, seed=seed))


def test_the_same_gradient_at_the_limit_for_ever_stays_within() -> None:
    """Nothing cancels, so every mean comes as near to its bound as it can."""
    config = small_config(optimizer=OptimizerKind.ADAMW)
    optimizer = InnerOptimizer(config, STAGE, SHAPES)
    for _ in range(2000):
        optimizer.step({name: torch.full(shape, 7.0) for name, shape in SHAPES.items()})
    found = state_of(optimizer)
    check_reachable(config, STAGE, found)
    assert np.linalg.norm(found.flat_state("adamw.mean.")) == pytest.approx(clip_limit(config, STAGE), rel=1e-5)


def test_the_ratio_is_what_the_worst_history_comes_to() -> None:
    """By Cauchy-Schwarz the gradient k steps ago has to be in proportion to (mean beta / square beta)^k."""
    mean, square = ADAMW_BETAS
    config = small_config(optimizer=OptimizerKind.ADAMW)
    optimizer = InnerOptimizer(config, STAGE, SHAPES)
    for ago in reversed(range(300)):
        gradient = 1e-3 * (mean / square) ** ago
        optimizer.step({name: torch.full(shape, gradient) for name, shape in SHAPES.items()})
    found = state_of(optimizer)
    ratio = found.flat_state("adamw.mean.")[0] / math.sqrt(found.flat_state("adamw.square.")[0])
    assert ratio == pytest.approx(largest_ratio(ADAMW_BETAS), rel=1e-4)
    check_reachable(config, STAGE, found)


def _longer(state: dict[str, torch.Tensor], kind: str, limit: float) -> None:
    for name in [name for name in state if name.startswith(kind)]:
        state[name].fill_(limit)


FORGERIES: list[tuple[str, Callable[[dict[str, torch.Tensor], float], None]]] = [
    ("momentum comes to", lambda state, limit: _longer(state, "muon.momentum.", limit)),
    ("mean of squares comes to", lambda state, limit: _longer(state, "adamw.square.", limit**2)),
    ("mean is larger than", lambda state, limit: _longer(state, "adamw.mean.", 0.1 * limit)),
    ("mean comes to", lambda state, limit: _longer(state, "adamw.mean.", limit)),
]


@pytest.mark.parametrize(("reason", "forge"), FORGERIES, ids=[reason for reason, _ in FORGERIES])
def test_a_state_out_of_bounds_is_named(reason: str, forge: Callable[[dict[str, torch.Tensor], float], None]) -> None:
    config = small_config()
    found = trained(config, [1.0], seed=0)
    forge(found.state, clip_limit(config, STAGE))
    with pytest.raises(ProtocolViolation, match=reason):
        check_reachable(config, STAGE, found)

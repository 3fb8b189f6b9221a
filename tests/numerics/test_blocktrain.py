"""Stages that train alone: shapes, losses, independence, replays."""

import msgspec
import numpy as np
import pytest
import torch

from subnet.config import BlockTrainConfig, DiffusionContext, Objective, RunConfig, RunKind
from subnet.errors import InvariantBroken
from subnet.model.blocks import build_block
from subnet.model.init import initial_params
from subnet.model.partition import neighbours_of, num_elements, param_shapes
from subnet.training.pipeline import StageWorker
from subnet.types import Epoch, NumericMode, SampleId, StageIndex
from tests.numerics.support import PatternCorpus, small_config

SINGLE = BlockTrainConfig(objective=Objective.DIFFUSION)
CONCAT = BlockTrainConfig(objective=Objective.DIFFUSION, context=DiffusionContext.CONCAT)
GREEDY = BlockTrainConfig(objective=Objective.GREEDY)
LOOKAHEAD = BlockTrainConfig(objective=Objective.LOOKAHEAD)
EVERY = [SINGLE, CONCAT, GREEDY, LOOKAHEAD]


def alone(blocktrain: BlockTrainConfig) -> RunConfig:
    """Four layers in three stages, each trained alone."""
    return msgspec.structs.replace(small_config(), kind=RunKind.BLOCKTRAIN, blocktrain=blocktrain)


def worker_of(config: RunConfig, stage: StageIndex, mode: NumericMode = NumericMode.FP32) -> StageWorker:
    worker = StageWorker(config, stage, mode)
    worker.load(initial_params(config, stage))
    worker.load_neighbours({other: initial_params(config, other) for other in neighbours_of(config, stage)})
    return worker


@pytest.mark.parametrize("blocktrain", EVERY)
def test_shapes_are_those_of_the_module(blocktrain: BlockTrainConfig) -> None:
    config = alone(blocktrain)
    seen: set[str] = set()
    for index in range(3):
        stage = StageIndex(index)
        found = {name: tuple(param.shape) for name, param in sorted(build_block(config, stage).named_parameters())}
        assert found == param_shapes(config, stage)
        assert num_elements(config, stage) == initial_params(config, stage).size
        assert not seen & set(found)
        seen |= set(found)


@pytest.mark.parametrize("blocktrain", EVERY)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_learns_alone(blocktrain: BlockTrainConfig, stage: int) -> None:
    config = alone(blocktrain)
    tokens = PatternCorpus(config).tokens(Epoch(0), SampleId(0))
    worker = worker_of(config, StageIndex(stage))
    losses = []
    for sample in range(24):
        result = worker.forward((0, sample, 0), tokens, None)
        assert result.payload is None and result.loss is not None
        losses.append(result.loss)
        assert worker.backward((0, sample, 0), None) is None
        if worker.num_accumulated == config.training.accumulate:
            worker.step()
    assert np.mean(losses[-4:]) < 0.97 * np.mean(losses[:4])


def test_whose_published_params_a_stage_needs() -> None:
    assert [neighbours_of(alone(SINGLE), StageIndex(stage)) for stage in range(3)] == [(), (), ()]
    assert [neighbours_of(alone(GREEDY), StageIndex(stage)) for stage in range(3)] == [(), (0,), (0, 1)]
    assert [neighbours_of(alone(LOOKAHEAD), StageIndex(stage)) for stage in range(3)] == [(1,), (0, 2), (0, 1)]
    assert neighbours_of(small_config(), StageIndex(2)) == ()


def test_a_stage_without_its_neighbours_says_so() -> None:
    config = alone(GREEDY)
    worker = StageWorker(config, StageIndex(1))
    with pytest.raises(InvariantBroken, match="load them first"):
        worker.forward((0, 0, 0), PatternCorpus(config).tokens(Epoch(0), SampleId(0)), None)
    with pytest.raises(InvariantBroken, match=r"computes with published stages \(0,\), given \[\]"):
        worker.load_neighbours({})
    assert torch.is_grad_enabled()

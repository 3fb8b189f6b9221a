"""The composed stack: its Euler bridge, its honest figures, and the test that would see a leak."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from subnet.config import BlockTrainConfig, RunConfig
from subnet.inference.evaluate_blocks import (
    DenoisingEvaluation,
    PredictingEvaluation,
    bits,
    evaluate_blocks,
    leak_test,
)
from subnet.inference.sweep import DenoisingStack, PredictingStack, euler_step
from subnet.model.init import initial_params
from subnet.model.noise import unit_noise
from subnet.types import StageIndex
from tests.numerics.support import PatternCorpus
from tests.numerics.test_blocktrain import CONCAT, GREEDY, POOLED, SINGLE, alone, train_on, worker_of

Vectors = list[npt.NDArray[np.float32]]


def fresh(config: RunConfig) -> Vectors:
    return [initial_params(config, StageIndex(stage)) for stage in range(3)]


def trained(config: RunConfig, count: int) -> Vectors:
    workers = [worker_of(config, StageIndex(stage)) for stage in range(3)]
    for worker in workers:
        train_on(worker, count)
    return [worker.params() for worker in workers]


def test_an_euler_step_towards_the_target_lands_on_less_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    target, eps = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    landed = euler_step(target + 10.0 * eps, target, 10.0, 2.5)
    assert torch.allclose(landed, target + 2.5 * eps, rtol=0, atol=1e-12)


def test_the_sweep_starts_from_noise_alone_and_steps_down_the_bands() -> None:
    config = alone(SINGLE)
    stack = DenoisingStack(config, fresh(config))
    ids_BT = torch.from_numpy(PatternCorpus(config).heldout(0)[:, :-1])
    unit_BTD = torch.from_numpy(unit_noise(config, "here"))
    first, second, _ = stack.logits(ids_BT, unit_BTD)
    start = 10.0 * unit_BTD
    assert torch.equal(first, stack.denoise(StageIndex(0), start, 10.0, ids_BT))
    found = torch.softmax(first, dim=-1) @ stack.codebook_VD
    edge = stack.bands[0].low
    expected = stack.denoise(StageIndex(1), start + (edge - 10.0) * (start - found) / 10.0, edge, ids_BT)
    assert torch.allclose(second, expected, atol=1e-5)


@pytest.mark.parametrize("blocktrain", [SINGLE, CONCAT, GREEDY, POOLED])
def test_nothing_leaks_from_the_target_and_the_control_does(blocktrain: BlockTrainConfig) -> None:
    config = alone(blocktrain)
    found = leak_test(config, trained(config, 4), PatternCorpus(config))
    assert found.is_passed and not found.from_noise
    assert found.around_target is (None if blocktrain in (GREEDY, POOLED) else True)


def test_fresh_stages_know_nothing() -> None:
    for blocktrain in (SINGLE, GREEDY):
        config = alone(blocktrain)
        found = evaluate_blocks(config, fresh(config), PatternCorpus(config), 2)
        losses = found.at_depth if isinstance(found, PredictingEvaluation) else (found.first_stage, found.one_path)
        assert all(abs(loss - math.log(48)) < 0.2 for loss in losses)


def test_every_figure_of_a_denoising_stack() -> None:
    config = alone(SINGLE)
    corpus = PatternCorpus(config)
    params = trained(config, 8)
    found = evaluate_blocks(config, params, corpus, 2)
    assert isinstance(found, DenoisingEvaluation)
    assert [sigma for sigma, _ in found.leaky] == [1.0, 2.0, 3.0, 5.0, 10.0]
    assert found.leaky_mean == pytest.approx(np.mean([loss for _, loss in found.leaky]))
    assert [count for count, _ in found.mixtures] == [4, 16]
    assert found.composition_gain == found.first_stage - found.mixtures[-1][1]
    stack = DenoisingStack(config, params)
    losses = []
    for index in range(2):
        tokens = torch.from_numpy(corpus.heldout(index))
        joint = torch.zeros(tokens[:, 1:].shape)
        for path in range(4):
            unit_BTD = torch.from_numpy(unit_noise(config, "path", config.model.seed, index, path))
            with torch.no_grad():
                *_, last = stack.logits(tokens[:, :-1], unit_BTD)
            joint += last.softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0] / 4
        losses.append(-float(joint.log().mean()))
    assert found.mixtures[0][1] == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_predicting_stack_has_a_loss_at_every_depth() -> None:
    config = alone(GREEDY)
    corpus = PatternCorpus(config)
    params = trained(config, 16)
    found = evaluate_blocks(config, params, corpus, 2)
    assert isinstance(found, PredictingEvaluation) and len(found.at_depth) == 3
    assert found.at_depth[0] < math.log(48)
    assert found.composition_gain == found.at_depth[0] - found.at_depth[2]
    tokens = torch.from_numpy(corpus.heldout(0))
    depths = list(PredictingStack(config, params).logits(tokens[:, :-1]))
    assert all(logits.shape == (2, 16, 48) for logits in depths)


def test_pooled_stages_are_heard_together_and_do_not_hear_each_other() -> None:
    config = alone(POOLED)
    params = fresh(config)
    ids_BT = torch.from_numpy(PatternCorpus(config).heldout(0)[:, :-1])
    first, second, third = PredictingStack(config, params).logits(ids_BT)
    own = [first, 2 * second - first, 3 * third - 2 * second]
    other = [params[0] + np.float32(0.1), *params[1:]]
    changed = list(PredictingStack(config, other).logits(ids_BT))
    assert not torch.allclose(changed[0], first)
    assert torch.allclose(2 * changed[1] - changed[0], own[1], atol=1e-5)
    assert torch.allclose(third, (own[0] + own[1] + own[2]) / 3, atol=1e-6)


def test_bits() -> None:
    assert bits(math.log(2)) == pytest.approx(1)

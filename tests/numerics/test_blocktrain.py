"""Stages that train alone: shapes, losses, independence, replays."""

import msgspec
import numpy as np
import pytest
import torch
from torch.func import functional_call

from subnet.config import BlockTrainConfig, DiffusionContext, Objective, RunConfig, RunKind
from subnet.errors import InvariantBroken
from subnet.model.blocks import DenoisingBlock, build_block
from subnet.model.diffusion import concat_mask
from subnet.model.flat import unflatten
from subnet.model.init import initial_params
from subnet.model.noise import codebook
from subnet.model.partition import neighbours_of, num_elements, param_shapes, stage_flops
from subnet.sim.strategies import STRATEGIES, make_worker
from subnet.training.blocktrain import weighted_loss
from subnet.training.pipeline import StageWorker
from subnet.types import Epoch, NumericMode, SampleId, StageIndex
from tests.numerics.support import PatternCorpus, small_config

SINGLE = BlockTrainConfig(objective=Objective.DIFFUSION)
CONCAT = BlockTrainConfig(objective=Objective.DIFFUSION, context=DiffusionContext.CONCAT)
GREEDY = BlockTrainConfig(objective=Objective.GREEDY)
POOLED = BlockTrainConfig(objective=Objective.POOLED)
EVERY = [SINGLE, CONCAT, GREEDY, POOLED]


def alone(blocktrain: BlockTrainConfig) -> RunConfig:
    """Four layers in three stages, each trained alone."""
    return msgspec.structs.replace(small_config(), kind=RunKind.BLOCKTRAIN, blocktrain=blocktrain)


def worker_of(config: RunConfig, stage: StageIndex, mode: NumericMode = NumericMode.FP32) -> StageWorker:
    worker = StageWorker(config, stage, mode)
    worker.load(initial_params(config, stage))
    worker.load_neighbours({other: initial_params(config, other) for other in neighbours_of(config, stage)})
    return worker


def train_on(worker: StageWorker, count: int, *, first: int = 0) -> list[float]:
    """Losses of `count` samples, with a step after every second."""
    corpus = PatternCorpus(worker.config)
    losses = []
    for sample in range(first, first + count):
        loss = worker.forward((0, sample, 0), corpus.tokens(Epoch(0), SampleId(sample)), None).loss
        assert loss is not None
        losses.append(loss)
        worker.backward((0, sample, 0), None)
        if worker.num_accumulated == worker.config.training.accumulate:
            worker.step()
    return losses


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
    assert [neighbours_of(alone(POOLED), StageIndex(stage)) for stage in range(3)] == [(), (), ()]
    assert neighbours_of(small_config(), StageIndex(2)) == ()


def test_a_stage_without_its_neighbours_says_so() -> None:
    config = alone(GREEDY)
    worker = StageWorker(config, StageIndex(1))
    with pytest.raises(InvariantBroken, match="load them first"):
        worker.forward((0, 0, 0), PatternCorpus(config).tokens(Epoch(0), SampleId(0)), None)
    with pytest.raises(InvariantBroken, match=r"computes with published stages \(0,\), given \[\]"):
        worker.load_neighbours({})
    assert torch.is_grad_enabled()


def test_each_sequence_is_weighed_by_its_own_level() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(3, 5, 7, generator=generator)
    targets_BT = torch.randint(0, 7, (3, 5), generator=generator)
    sigma_B = torch.tensor([1.0, 2.0, 4.0])
    nats = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    by_hand = [float(nats.view(3, 5)[row].mean()) * (4 + 1 / float(sigma_B[row]) ** 2) for row in range(3)]
    found = weighted_loss(SINGLE, logits_BTV, targets_BT, sigma_B)
    assert found.shape == ()
    assert float(found) == pytest.approx(sum(by_hand) / 3, rel=1e-6)


@pytest.mark.parametrize("blocktrain", [SINGLE, CONCAT])
def test_a_denoising_stage_is_preconditioned(blocktrain: BlockTrainConfig) -> None:
    """Without layers what is found is the stream itself, so that every factor of the denoiser can be had by hand."""
    config = alone(blocktrain)
    stage = StageIndex(0)
    module = build_block(config, stage)
    assert isinstance(module, DenoisingBlock)
    module.layers.clear()
    params = unflatten(initial_params(config, stage), param_shapes(config, stage))
    params = {name: param for name, param in params.items() if ".layers." not in name}
    ids_BT, targets_BT = (torch.tensor([[3, 1, 4], [1, 5, 9]]) + shift for shift in (0, 1))
    sigma_B = torch.tensor([2.0, 5.0])
    noisy_BTD = torch.from_numpy(codebook(config))[targets_BT]
    logits_BTV = functional_call(module, params, (noisy_BTD, sigma_B, ids_BT))
    for row, sigma in enumerate((2.0, 5.0)):
        total = sigma**2 + 0.25
        stream_TD = (noisy_BTD[row] / total**0.5) @ params["blocks.0.noisy.weight"].T
        if blocktrain is SINGLE:
            stream_TD = stream_TD + params["blocks.0.embed_tokens.weight"][ids_BT[row]]
        denoised_TD = 0.25 / total * noisy_BTD[row] + 0.5 * sigma / total**0.5 * stream_TD
        normed_TD = denoised_TD / (denoised_TD.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        expected_TV = normed_TD @ params["blocks.0.lm_head.weight"].T
        assert torch.allclose(logits_BTV[row], expected_TV, atol=1e-5)


def test_a_noisy_token_sees_the_clean_ones_before_its_target_and_itself() -> None:
    mask = concat_mask(3).int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("blocktrain", [SINGLE, CONCAT, POOLED])
def test_stages_share_nothing_that_is_trained(blocktrain: BlockTrainConfig) -> None:
    """Stage 1 trains to the same bits whatever the others are, and leaves them as they were."""
    config = alone(blocktrain)
    ends = []
    for others in (0, 1):
        worker = worker_of(config, StageIndex(1))
        if others:
            for stage in (0, 2):
                train_on(worker_of(config, StageIndex(stage)), 4)
        train_on(worker, 4)
        ends.append(worker.params())
    assert np.array_equal(ends[0], ends[1])
    names = [set(param_shapes(config, StageIndex(stage))) for stage in range(3)]
    assert not names[0] & names[1] and not names[1] & names[2] and not names[0] & names[2]


def test_the_codebook_is_frozen() -> None:
    config = alone(SINGLE)
    before = codebook(config)
    train_on(worker_of(config, StageIndex(0)), 4)
    assert np.array_equal(codebook(config), before)
    assert not any("codebook" in name for name in param_shapes(config, StageIndex(0)))


@pytest.mark.parametrize("blocktrain", EVERY)
def test_a_replay_comes_to_the_same_bits(blocktrain: BlockTrainConfig) -> None:
    config = alone(blocktrain)
    worker = worker_of(config, StageIndex(1))
    train_on(worker, 4)
    start = worker.checkpoint()
    losses = train_on(worker, 8, first=4)
    again = worker_of(config, StageIndex(1))
    again.restore(start)
    assert train_on(again, 8, first=4) == losses
    assert again.checkpoint() == worker.checkpoint()


def test_published_neighbours_are_not_trained() -> None:
    config = alone(GREEDY)
    neighbours = {other: initial_params(config, other) for other in neighbours_of(config, StageIndex(1))}
    kept = {other: params.copy() for other, params in neighbours.items()}
    worker = StageWorker(config, StageIndex(1))
    worker.load(initial_params(config, StageIndex(1)))
    worker.load_neighbours(neighbours)
    train_on(worker, 4)
    assert all(np.array_equal(neighbours[other], kept[other]) for other in kept)
    assert set(worker.snapshot().params) == set(param_shapes(config, StageIndex(1)))


def test_a_stage_below_is_computed_without_a_graph_and_matters() -> None:
    config = alone(GREEDY)
    tokens = PatternCorpus(config).tokens(Epoch(0), SampleId(0))
    one, other = worker_of(config, StageIndex(1)), worker_of(config, StageIndex(1))
    other.load_neighbours({StageIndex(0): initial_params(config, StageIndex(0)) * np.float32(2)})
    assert one.forward((0, 0, 0), tokens, None).loss != other.forward((0, 0, 0), tokens, None).loss


def test_flops_count_what_a_worker_runs_of_its_neighbours() -> None:
    greedy, pooled, single, concat = (
        [stage_flops(alone(blocktrain), StageIndex(stage)) for stage in range(3)]
        for blocktrain in (GREEDY, POOLED, SINGLE, CONCAT)
    )
    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96
    num_tokens, scores, head = 2 * 16, 2 * (16 * 16) / 2, 64 * 48
    forward_layer = 2 * matrices * num_tokens + 2 * 2 * scores * 64
    forward_head = 2 * head * num_tokens
    assert greedy[0] == 3 * (forward_layer + forward_head)
    assert greedy[1] == greedy[0] + forward_layer
    assert pooled[:2] == [greedy[0], greedy[0]]
    assert single[0] > greedy[0] and 1.5 * single[0] < concat[0] < 2 * single[0]


@pytest.mark.parametrize("blocktrain", EVERY)
@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_dishonest_workers_run_where_stages_train_alone(blocktrain: BlockTrainConfig, kind: str) -> None:
    config = alone(blocktrain)
    stage = StageIndex(1)
    honest, cheat = worker_of(config, stage), make_worker(kind, config, stage, NumericMode.FP32)
    cheat.load(initial_params(config, stage))
    cheat.load_neighbours({other: initial_params(config, other) for other in neighbours_of(config, stage)})
    found = train_on(cheat, 4), train_on(honest, 4)
    assert found[0] != found[1] or not np.array_equal(cheat.params(), honest.params())

"""Denoising stages that serve: the same tokens' logits as the composed stack, with caches, alone or in company, one or many."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from subnet.config import DiffusionContext, Objective, RunConfig
from subnet.errors import InvalidConfig
from subnet.inference.cache import SequenceCache
from subnet.inference.decode import Span
from subnet.inference.denoise import DenoisingRunner, Targets
from subnet.inference.served import ServedModel
from subnet.inference.sweep import DenoisingStack
from tests.unit.exported import Vectors, all_params, blocktrain_config, moved_params, prompts

SEED = 7


def runners(config: RunConfig, vectors: Vectors) -> list[DenoisingRunner]:
    served = ServedModel(run=config, has_cuts=True, dtype="float32", max_positions=64)
    params = all_params(config, vectors)
    return [DenoisingRunner(served, stage, 3, params, max_positions=128) for stage in range(3)]


class Serving:
    """Every stage with its caches."""

    def __init__(self, stages: Sequence[DenoisingRunner], count: int) -> None:
        self.stages = stages
        self.caches = [[SequenceCache(stage.cache_shape, 128) for stage in stages] for _ in range(count)]

    def logits(self, asked: Sequence[tuple[int, int, list[int], int]]) -> Tensor:
        """Of every noisy row; an entry is (sequence, start, ids, how many targets)."""
        rows: Tensor | None = None
        found: Tensor | None = None
        for index, stage in enumerate(self.stages):
            targets = [
                Targets(Span(self.caches[seq][index], start, ids), count, SEED) for seq, start, ids, count in asked
            ]
            rows, found = stage.run(targets, rows)
        assert found is not None
        return found


def reference(config: RunConfig, vectors: Vectors, stage: DenoisingRunner, ids: list[int]) -> Tensor:
    """(T, V) of the composed stack, every position from the same noise as served."""
    start_of_single = Targets(Span(SequenceCache(stage.cache_shape, 128), 0, ids), 0, SEED)
    as_targets = Targets(Span(SequenceCache(stage.cache_shape, 128), 0, ids[:1]), len(ids), SEED)
    noise = stage.first_noise(start_of_single if stage.num_rows(start_of_single) else as_targets)
    stack = DenoisingStack(config, vectors)
    with torch.no_grad():
        *_, last = stack.logits(torch.tensor([ids]), noise[None] / config.blocktrain.sigma_max)
    return last[0]


@pytest.mark.parametrize("context", list(DiffusionContext))
def test_token_by_token_is_the_composed_stack(context: DiffusionContext) -> None:
    config = blocktrain_config(Objective.DIFFUSION, context)
    vectors = moved_params(config)
    stages = runners(config, vectors)
    ids = prompts(1, shortest=20, longest=21)[0]
    expected = reference(config, vectors, stages[0], ids)
    serving = Serving(stages, 1)
    first = serving.logits([(0, 0, ids[:5], 1)])[-1:]
    rest = [serving.logits([(0, at, [ids[at]], 1)]) for at in range(5, len(ids))]
    assert torch.allclose(torch.cat([first, *rest]), expected[4:], atol=2e-4)


def test_one_sweep_sees_the_text_before_the_answer_and_each_token_itself_alone() -> None:
    config = blocktrain_config(Objective.DIFFUSION)
    stages = runners(config, moved_params(config))
    ids = prompts(1, shortest=20, longest=21)[0]
    swept = Serving(stages, 1).logits([(0, 0, ids, 8)])
    fewer = Serving(stages, 1).logits([(0, 0, ids, 3)])
    one = Serving(stages, 1).logits([(0, 0, ids, 1)])
    assert swept.shape == (8, 256)
    assert torch.equal(swept[:3], fewer)
    assert torch.equal(swept[:1], one)
    other = Serving(stages, 1).logits([(0, 0, [*ids[:-1], (ids[-1] + 1) % 256], 8)])
    assert (swept != other).any(dim=-1).all()


def test_company_and_pieces_change_no_bit() -> None:
    config = blocktrain_config(Objective.DIFFUSION)
    stages = runners(config, moved_params(config))
    asked = prompts(3, shortest=66, longest=72)
    alone = torch.cat([Serving(stages, 1).logits([(0, 0, ids, 2)]) for ids in asked])
    together = Serving(stages, 3).logits([(seq, 0, ids, 2) for seq, ids in enumerate(asked)])
    assert torch.equal(alone, together)
    serving = Serving(stages, 1)
    assert len(serving.logits([(0, 0, asked[0][:30], 0)])) == 0
    assert torch.equal(serving.logits([(0, 30, asked[0][30:], 2)]), alone[:2])


def test_stages_that_denoise_are_not_put_together() -> None:
    config = blocktrain_config(Objective.DIFFUSION)
    served = ServedModel(run=config, has_cuts=True, dtype="float32", max_positions=64)
    with pytest.raises(InvalidConfig, match="exactly 3 stages"):
        DenoisingRunner(served, 0, 2, {}, max_positions=8)

"""The whole model trained in one process on given samples: what a subnet's loss is compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from subnet.config import RunConfig
from subnet.model.flat import flatten, unflatten
from subnet.model.init import initial_params
from subnet.model.partition import param_shapes
from subnet.model.whole import WholeModel
from subnet.ports import Corpus
from subnet.training.optimizers import InnerOptimizer
from subnet.types import Epoch, SampleId, StageIndex

SampleName = tuple[Epoch, SampleId]


@dataclass(frozen=True, slots=True)
class Reference:
    """Loss of each sample before it was learned from, and the params of every stage in the end."""

    losses: tuple[float, ...]
    stage_params: tuple[npt.NDArray[np.float32], ...]


def train_reference(
    config: RunConfig,
    corpus: Corpus,
    samples: Sequence[SampleName],
    *,
    on_progress: Callable[[int, float], None] | None = None,
) -> Reference:
    """Same model, same rounding at the cuts, same inner optimizers, one step for each `accumulate` samples, no merges.

    `on_progress` hears of each sample: how many are done, and its loss. Samples that do not fill a last step are not used.
    """
    stages = [StageIndex(index) for index in range(config.training.num_stages)]
    optimizers = [InnerOptimizer(config, stage, param_shapes(config, stage)) for stage in stages]
    for stage, optimizer in zip(stages, optimizers, strict=True):
        optimizer.load(unflatten(initial_params(config, stage), param_shapes(config, stage)))
    whole = WholeModel(config)
    accumulate = config.training.accumulate
    losses: list[float] = []
    for first in range(0, len(samples) - accumulate + 1, accumulate):
        for epoch, sample in samples[first : first + accumulate]:
            tokens = torch.from_numpy(np.array(corpus.tokens(epoch, sample)))
            loss = whole.loss([optimizer.params for optimizer in optimizers], tokens)
            (loss / accumulate).backward()  # type: ignore[no-untyped-call]  # torch leaves `backward` untyped
            losses.append(float(loss.detach()))
            if on_progress is not None:
                on_progress(len(losses), losses[-1])
        for optimizer in optimizers:
            optimizer.step(
                {
                    name: torch.zeros_like(param) if param.grad is None else param.grad
                    for name, param in optimizer.params.items()
                }
            )
    return Reference(losses=tuple(losses), stage_params=tuple(flatten(optimizer.params) for optimizer in optimizers))

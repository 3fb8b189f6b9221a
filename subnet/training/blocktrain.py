"""Local objectives of a BlockTrain run: what a stage computes its own loss from, and the loss (papers.md B2 and B4).

An objective is the whole of what distinguishes such a stage from one of a pipeline: it reads tokens, returns a loss, and no
gradient leaves it. What it needs beside params and tokens is drawn from the seed or computed from params of neighbours that
were published before the epoch, so a replay repeats it.

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from subnet.config import BlockTrainConfig, Objective, RunConfig
from subnet.errors import InvariantBroken
from subnet.model.blocks import Predicted, PredictingBlock, build_block
from subnet.model.flat import unflatten
from subnet.model.noise import codebook, loss_weight, training_noise
from subnet.model.partition import neighbours_of, param_shapes
from subnet.types import StageIndex

Params = Mapping[str, Tensor]


class NoiseGiven(NamedTuple):
    """Noise level of each sequence, (B,), and unit noise, (B, T, D)."""

    sigmas: Tensor
    unit: Tensor


Given = Tensor | NoiseGiven | None
"""What a pass gets beside params and tokens: the stream below, noise, or nothing."""


class LocalObjective(Protocol):
    """Loss of one stage on its own."""

    def given(self, epoch: int, sample: int, tokens: Tensor) -> Given:
        """What the loss of this sample needs beside params, without a graph."""
        ...

    def loss(self, module: nn.Module, params: Params, given: Given, tokens: Tensor) -> Tensor:
        """Mean nats for each token with its graph, a float32 scalar; `module` as `build_block` makes it."""
        ...


class Diffusion:
    """Cross entropy of the denoised token at a drawn noise level, weighted by the level."""

    def __init__(self, config: RunConfig, stage: StageIndex) -> None:
        self._config = config
        self._stage = stage
        self._codebook_VD = torch.from_numpy(codebook(config))

    def given(self, epoch: int, sample: int, tokens: Tensor) -> NoiseGiven:
        """The noise of this sample at this stage."""
        noise = training_noise(self._config, self._stage, epoch, sample)
        return NoiseGiven(torch.from_numpy(noise.sigmas).to(torch.float32), torch.from_numpy(noise.unit))

    def loss(self, module: nn.Module, params: Params, given: Given, tokens: Tensor) -> Tensor:
        """Each sequence's loss with its own weight, then the mean."""
        assert isinstance(given, NoiseGiven)
        targets_BT = tokens[:, 1:]
        noisy_BTD = self._codebook_VD[targets_BT] + given.sigmas[:, None, None] * given.unit
        logits_BTV: Tensor = functional_call(module, dict(params), (noisy_BTD, given.sigmas, tokens[:, :-1]))
        return weighted_loss(self._config.blocktrain, logits_BTV, targets_BT, given.sigmas)


def weighted_loss(blocktrain: BlockTrainConfig, logits_BTV: Tensor, targets_BT: Tensor, sigma_B: Tensor) -> Tensor:
    """Mean over sequences of w(sigma) times the sequence's mean cross entropy; (B,) by (B,), never (B,) by (B, 1)."""
    nats_BT = functional.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")
    weight_B = torch.tensor([loss_weight(blocktrain, float(sigma)) for sigma in sigma_B])
    return (nats_BT.mean(dim=1) * weight_B).mean()


class NextToken:
    """Next-token loss of a stage's own head, over the published stages below or the tokens: greedy and pooled."""

    def __init__(self, config: RunConfig, stage: StageIndex, neighbours: Mapping[StageIndex, Params]) -> None:
        needed = neighbours_of(config, stage)
        if tuple(sorted(neighbours)) != needed:
            raise InvariantBroken(f"stage {stage} computes with published stages {needed}, given {sorted(neighbours)}")
        self._below = [(_predicting(config, other), neighbours[other]) for other in needed]

    @torch.no_grad()
    def given(self, epoch: int, sample: int, tokens: Tensor) -> Tensor | None:
        """The stream that the stage below would send."""
        stream_BTD: Tensor | None = None
        for module, params in self._below:
            arguments = (stream_BTD, tokens[:, :-1])
            below: Predicted = functional_call(module, dict(params), arguments, {"with_logits": False})
            stream_BTD = below.stream
        return stream_BTD

    def loss(self, module: nn.Module, params: Params, given: Given, tokens: Tensor) -> Tensor:
        """Mean cross entropy."""
        own: Predicted = functional_call(module, dict(params), (given, tokens[:, :-1]))
        assert own.logits is not None
        return functional.cross_entropy(own.logits.flatten(0, 1), tokens[:, 1:].flatten())


def _predicting(config: RunConfig, stage: StageIndex) -> PredictingBlock:
    module = build_block(config, stage)
    assert isinstance(module, PredictingBlock)
    return module


def make_objective(
    config: RunConfig, stage: StageIndex, neighbours: Mapping[StageIndex, npt.NDArray[np.float32]]
) -> LocalObjective:
    """The run's objective for `stage`, with the flat params of `neighbours_of` it.

    Raises InvariantBroken (not those neighbours), ProtocolViolation (a vector is not the params of its stage).
    """
    if config.blocktrain.objective is Objective.DIFFUSION:
        return Diffusion(config, stage)
    opened = {other: unflatten(vector, param_shapes(config, other)) for other, vector in sorted(neighbours.items())}
    return NextToken(config, stage, opened)

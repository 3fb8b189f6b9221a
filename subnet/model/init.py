"""Params of epoch 0, drawn for each param by its name, so that they do not depend on how the model is cut."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from subnet.config import ModelConfig, RunConfig
from subnet.draws import seed_bytes
from subnet.model.flat import flatten
from subnet.model.partition import param_shapes
from subnet.types import StageIndex

ENCODER_STD = 0.01
"""Of the encoder's second matrix: at first the code is almost the first K channels themselves (bottleneck.md 1)."""


def _std(model: ModelConfig, name: str, shape: tuple[int, ...]) -> float:
    """Spread of one param's first values: Llama's inside the stages; at the cuts, what keeps the stream's scale.

    SiLU halves small values, ReLU keeps half of the power: the factors 2 and sqrt(2) make up for that. Where a noise level
    modulates layers, zeros leave them as they are.
    """
    fan_in = shape[-1]
    if name.endswith("encoder.outer.weight"):
        return ENCODER_STD
    if name.endswith(("encoder.inner.weight", "decoder.inner.weight")):
        return 1 / math.sqrt(fan_in)
    if name.endswith(("decoder.outer.weight", "compress.weight")):
        return 2 / math.sqrt(fan_in)
    if name.endswith("expand.weight"):
        return math.sqrt(2 / fan_in)
    if name.endswith(("anchor.lift.weight", "time.inner.weight", "time.outer.weight")):
        return 1 / math.sqrt(fan_in)
    if name.endswith("modulation.weight"):
        return 0.0
    return model.init_std


def _draw(model: ModelConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(int.from_bytes(seed_bytes("params", model.seed, name)[:7], "little"))
    return torch.randn(shape, generator=generator) * _std(model, name, shape)


def initial_params(config: RunConfig, stage: StageIndex) -> npt.NDArray[np.float32]:
    """Flat params of `stage` at epoch 0: the same bits every time."""
    shapes = param_shapes(config, stage)
    return flatten({name: _draw(config.model, name, shape) for name, shape in shapes.items()})

"""Noise levels of the diffusion objective, their bands, and what is drawn from a seed: codebook and noise (papers.md B2).

Drawn by numpy, whose normal numbers are the same bits on every instruction set; torch's are not, and a replay on another
machine must denoise the same values.

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from subnet import draws
from subnet.config import BlockTrainConfig, RunConfig
from subnet.types import StageIndex

_GAUSS = NormalDist()
Floats = npt.NDArray[np.float32]


class Band(NamedTuple):
    """Noise levels that a stage denoises, sigma from `low` to `high`."""

    low: float
    high: float


def _probability(blocktrain: BlockTrainConfig, sigma: float) -> float:
    """CDF of ln sigma before it is cut off."""
    return _GAUSS.cdf((math.log(sigma) - blocktrain.p_mean) / blocktrain.p_std)


def _quantile(blocktrain: BlockTrainConfig, probability: float) -> float:
    return math.exp(blocktrain.p_mean + blocktrain.p_std * _GAUSS.inv_cdf(probability))


def band_edges(blocktrain: BlockTrainConfig, num_stages: int) -> tuple[float, ...]:
    """Ascending edges of bands that are equally probable under the training distribution; one more than stages."""
    low, high = (_probability(blocktrain, sigma) for sigma in (blocktrain.sigma_min, blocktrain.sigma_max))
    inner = [_quantile(blocktrain, low + (high - low) * index / num_stages) for index in range(1, num_stages)]
    return (blocktrain.sigma_min, *inner, blocktrain.sigma_max)


def band_of(blocktrain: BlockTrainConfig, num_stages: int, stage: StageIndex) -> Band:
    """Levels of `stage` when sampling: the first stage has the highest noise."""
    edges = band_edges(blocktrain, num_stages)
    return Band(low=edges[num_stages - 1 - stage], high=edges[num_stages - stage])


def training_band(blocktrain: BlockTrainConfig, num_stages: int, stage: StageIndex) -> Band:
    """The same, widened by its own width to the power of the overlap, and never beyond the whole range."""
    band = band_of(blocktrain, num_stages, stage)
    factor = (band.high / band.low) ** blocktrain.overlap
    return Band(
        low=max(blocktrain.sigma_min, band.low / factor),
        high=min(blocktrain.sigma_max, band.high * factor),
    )


def stage_at(blocktrain: BlockTrainConfig, num_stages: int, sigma: float) -> StageIndex:
    """Whose band `sigma` lies in; at an edge, the stage below it. Raises ValueError outside the range."""
    edges = band_edges(blocktrain, num_stages)
    if not edges[0] <= sigma <= edges[-1]:
        raise ValueError(f"sigma must be in [{edges[0]:g}, {edges[-1]:g}], got {sigma:g}")
    above = sum(sigma > edge for edge in edges[1:-1])
    return StageIndex(num_stages - 1 - above)


def loss_weight(blocktrain: BlockTrainConfig, sigma: float) -> float:
    """(s^2 + sd^2) / (s sd)^2, which is 4 + 1/s^2 for sd = 1/2."""
    scale = blocktrain.sigma_data
    return (sigma**2 + scale**2) / (sigma * scale) ** 2


def codebook(config: RunConfig) -> Floats:
    """(V, D) unit-norm target embeddings, drawn from the run's seed, never trained: noise targets and bridge use this table."""
    model = config.model
    rows = _normals((model.vocab_size, model.width), "codebook", model.seed)
    norms = np.sqrt(np.square(rows.astype(np.float64)).sum(axis=1, keepdims=True))
    table: Floats = np.divide(rows, norms).astype(np.float32)
    return table


class Noise(NamedTuple):
    """Noise level of each sequence, (B,), and what it multiplies, (B, T, D) of unit variance."""

    sigmas: npt.NDArray[np.float64]
    unit: Floats


def training_noise(config: RunConfig, stage: StageIndex, epoch: int, sample: int) -> Noise:
    """What `stage` trains on for one microbatch: a function of seed, epoch, sample and stage, so that a replay draws it again."""
    training, blocktrain = config.training, config.blocktrain
    name = ("noise", config.model.seed, epoch, sample, int(stage))
    band = training_band(blocktrain, training.num_stages, stage)
    low, high = (_probability(blocktrain, sigma) for sigma in band)
    sigmas = [
        _quantile(blocktrain, low + (high - low) * draws.uniform("sigma", row, *name))
        for row in range(training.microbatch_size)
    ]
    clipped = np.clip(np.array(sigmas), band.low, band.high)
    return Noise(clipped, unit_noise(config, *name))


def unit_noise(config: RunConfig, *name: draws.Part) -> Floats:
    """(B, T, D) of unit variance, named by the parts of its seed."""
    training = config.training
    return _normals((training.microbatch_size, training.num_tokens, config.model.width), *name)


def _normals(shape: tuple[int, ...], *name: draws.Part) -> Floats:
    generator = np.random.Generator(np.random.Philox(int.from_bytes(draws.seed_bytes(*name), "little")))
    return generator.standard_normal(shape, dtype=np.float32)

"""A whole stack of stages that were trained alone, composed: what each depth says of the next token.

Denoising stages are run from high noise to low, one evaluation each: the first sees pure noise, and each hands the next one the
noisy embedding moved along the Euler step towards what it found (papers.md B2). No stage sees a target.

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call

from subnet.config import Objective, RunConfig
from subnet.model.blocks import Predicted, build_block
from subnet.model.flat import unflatten
from subnet.model.noise import band_of, codebook
from subnet.model.partition import param_shapes
from subnet.types import StageIndex

Vector = npt.NDArray[np.float32]


def euler_step(noisy_BTD: Tensor, found_BTD: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """z + (s_next - s) * (z - y) / s, which lands on y + s_next * eps when y is found (the paper misprints the sign)."""
    return noisy_BTD + (next_sigma - sigma) * (noisy_BTD - found_BTD) / sigma


class _Stack:
    """Modules and params of every stage, in order."""

    def __init__(self, config: RunConfig, stage_params: Sequence[Vector]) -> None:
        self.config = config
        stages = [StageIndex(stage) for stage in range(config.training.num_stages)]
        self._modules = [build_block(config, stage) for stage in stages]
        self._params = [
            unflatten(vector, param_shapes(config, stage)) for stage, vector in zip(stages, stage_params, strict=True)
        ]


class PredictingStack(_Stack):
    """Greedy or pooled stages: every depth has a likelihood of its own.

    Raises ProtocolViolation when a vector is not the params of its stage.
    """

    def logits(self, ids_BT: Tensor) -> Iterator[Tensor]:
        """(B, T, V) at each depth, the shallowest first: of its own head, or the mean of all heads so far where they are pooled.

        A mean of logits is the normalised geometric mean of probabilities: stages err in different places.
        """
        is_pooled = self.config.blocktrain.objective is Objective.POOLED
        stream_BTD: Tensor | None = None
        total_BTV: Tensor | None = None
        for depth, (module, params) in enumerate(zip(self._modules, self._params, strict=True)):
            found: Predicted = functional_call(module, params, (stream_BTD, ids_BT))
            assert found.logits is not None
            total_BTV = found.logits if total_BTV is None else total_BTV + found.logits
            yield total_BTV / (depth + 1) if is_pooled else found.logits
            stream_BTD = found.stream


class DenoisingStack(_Stack):
    """Stages of the diffusion objective. Raises ProtocolViolation when a vector is not the params of its stage."""

    def __init__(self, config: RunConfig, stage_params: Sequence[Vector]) -> None:
        super().__init__(config, stage_params)
        self.codebook_VD = torch.from_numpy(codebook(config))
        num_stages = config.training.num_stages
        self.bands = [band_of(config.blocktrain, num_stages, StageIndex(stage)) for stage in range(num_stages)]

    def denoise(self, stage: StageIndex, noisy_BTD: Tensor, sigma: float, ids_BT: Tensor) -> Tensor:
        """(B, T, V) logits of one stage at one noise level."""
        sigma_B = torch.full((len(ids_BT),), sigma)
        logits_BTV: Tensor = functional_call(self._modules[stage], self._params[stage], (noisy_BTD, sigma_B, ids_BT))
        return logits_BTV

    def logits(self, ids_BT: Tensor, unit_BTD: Tensor) -> Iterator[Tensor]:
        """(B, T, V) after each stage of one path, which starts from `unit_BTD` times the most noise."""
        noisy_BTD = unit_BTD * self.config.blocktrain.sigma_max
        for stage, band in enumerate(self.bands):
            logits_BTV = self.denoise(StageIndex(stage), noisy_BTD, band.high, ids_BT)
            yield logits_BTV
            found_BTD = torch.softmax(logits_BTV, dim=-1) @ self.codebook_VD
            noisy_BTD = euler_step(noisy_BTD, found_BTD, band.high, band.low)

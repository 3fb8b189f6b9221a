"""What a drawn validator measures of a published epoch: held-out loss of the whole model, and how much its parts add to it.

In a pipeline the second figure is the loss with zeros at every cut; where stages train apart it is that of the first stage
alone, so that the difference is what the others are worth (papers.md B4).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from subnet.config import Objective, RunConfig, RunKind
from subnet.inference.evaluate import Evaluation, heldout_loss
from subnet.inference.evaluate_blocks import DenoisingEvaluation, PredictingEvaluation, evaluate_blocks
from subnet.ports import Corpus

DENOISING_SHARE = 4
"""A denoising model is run for every path and noise level of a batch: it is measured on so many times fewer batches."""


def published_loss(
    config: RunConfig, stage_params: Sequence[npt.NDArray[np.float32]], corpus: Corpus, num_batches: int
) -> Evaluation:
    """Over the first `num_batches` held-out microbatches. Raises ProtocolViolation when a vector is not the params of its
    stage.
    """
    if config.kind is RunKind.PIPELINE:
        return heldout_loss(config, stage_params, corpus, num_batches)
    is_denoising = config.blocktrain.objective is Objective.DIFFUSION
    batches = -(-num_batches // DENOISING_SHARE) if is_denoising else num_batches
    match evaluate_blocks(config, stage_params, corpus, batches):
        case PredictingEvaluation() as found:
            return Evaluation(loss=found.at_depth[-1], loss_wires_zeroed=found.at_depth[0])
        case DenoisingEvaluation() as found:
            return Evaluation(loss=found.mixtures[-1][1], loss_wires_zeroed=found.first_stage)

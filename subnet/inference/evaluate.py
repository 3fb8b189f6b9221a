"""How good the published model is on text nobody trained on, and how much of that crosses the cuts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from subnet.config import RunConfig
from subnet.model.flat import unflatten
from subnet.model.partition import param_shapes
from subnet.model.whole import WholeModel
from subnet.ports import Corpus
from subnet.types import Epoch, SampleId, StageIndex


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean held-out loss in nats for each token; `loss_wires_zeroed` when zeros arrive at every cut and only ids are left."""

    loss: float
    loss_wires_zeroed: float


def heldout_loss(
    config: RunConfig, stage_params: Sequence[npt.NDArray[np.float32]], corpus: Corpus, num_batches: int
) -> Evaluation:
    """Over the first `num_batches` held-out microbatches, params given for every stage in order.

    Raises ProtocolViolation when a vector is not the params of its stage.
    """
    params = [
        unflatten(vector, param_shapes(config, StageIndex(stage)))
        for stage, vector in zip(range(config.training.num_stages), stage_params, strict=True)
    ]
    whole = WholeModel(config)
    losses: list[float] = []
    zeroed: list[float] = []
    with torch.no_grad():
        for index in range(num_batches):
            tokens = torch.from_numpy(np.array(corpus.heldout(index)))
            losses.append(float(whole.loss(params, tokens)))
            zeroed.append(float(whole.loss(params, tokens, wires_zeroed=True)))
    return Evaluation(loss=math.fsum(losses) / num_batches, loss_wires_zeroed=math.fsum(zeroed) / num_batches)


def unigram_entropy(corpus: Corpus, vocab_size: int, *, num_train: int = 64, num_heldout: int = 16) -> float:
    """Cross entropy, in nats for each token, of held-out targets under the token frequencies of training samples.

    The loss of a model that learned nothing but how often each token occurs; each count starts at one.
    """
    counts = np.ones(vocab_size, dtype=np.int64)
    for sample in range(num_train):
        counts += np.bincount(corpus.tokens(Epoch(0), SampleId(sample))[:, 1:].ravel(), minlength=vocab_size)
    surprise = -np.log(counts / counts.sum())
    targets = np.concatenate([corpus.heldout(index)[:, 1:].ravel() for index in range(num_heldout)])
    return float(surprise[targets].mean())

"""Evaluation and the one-process reference, against the stages that they stand for."""

import math

import numpy as np
import pytest

from subnet.config import Bottleneck
from subnet.errors import ProtocolViolation
from subnet.inference.evaluate import heldout_loss, unigram_entropy
from subnet.training.reference import train_reference
from subnet.types import Epoch, SampleId
from tests.numerics.support import PatternCorpus, make_workers, pass_backward, pass_forward, small_config

NAMES = [(Epoch(0), SampleId(sample)) for sample in range(61)]


@pytest.mark.parametrize("bottleneck", [Bottleneck.RESBM, Bottleneck.IOTA, Bottleneck.NONE, Bottleneck.K0])
def test_the_reference_is_the_stages_trained_together(bottleneck: Bottleneck) -> None:
    config = small_config(bottleneck)
    corpus = PatternCorpus(config)
    heard: list[int] = []
    reference = train_reference(config, corpus, NAMES[:9], on_progress=lambda done, loss: heard.append(done))
    workers = make_workers(config)
    losses = []
    for epoch, sample in NAMES[:8]:
        losses.append(pass_forward(workers, (epoch, sample, 0), corpus.tokens(epoch, sample))[1])
        pass_backward(workers, (epoch, sample, 0))
        if workers[0].num_accumulated == config.training.accumulate:
            for worker in workers:
                worker.step()
    assert heard == list(range(1, 9))
    assert reference.losses[:2] == tuple(losses[:2])
    assert np.allclose(reference.losses, losses, rtol=1e-3)


def test_a_trained_model_needs_its_wires() -> None:
    config = small_config()
    corpus = PatternCorpus(config)
    before = heldout_loss(config, [worker.params() for worker in make_workers(config)], corpus, 4)
    reference = train_reference(config, corpus, NAMES)
    after = heldout_loss(config, reference.stage_params, corpus, 4)
    assert abs(before.loss - math.log(48)) < 0.1
    assert after.loss < 0.8 * before.loss
    assert after.loss_wires_zeroed > after.loss + 0.05


def test_heldout_loss_is_that_of_the_stages_in_a_row() -> None:
    config = small_config()
    corpus = PatternCorpus(config)
    workers = make_workers(config)
    losses = [pass_forward(workers, (0, index, 0), corpus.heldout(index))[1] for index in range(3)]
    found = heldout_loss(config, [worker.params() for worker in workers], corpus, 3)
    assert found.loss == math.fsum(losses) / 3


def test_params_of_another_stage_are_refused() -> None:
    config = small_config()
    params = [worker.params() for worker in make_workers(config)]
    with pytest.raises(ProtocolViolation, match="float32 values"):
        heldout_loss(config, params[::-1], PatternCorpus(config), 1)


def test_unigram_entropy_of_evenly_spread_tokens_is_that_of_the_vocabulary() -> None:
    config = small_config()
    assert math.isclose(unigram_entropy(PatternCorpus(config), 48, num_train=200), math.log(48), rel_tol=0.01)

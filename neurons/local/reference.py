"""What the subnet's loss is compared with: a model that only counts tokens, and the whole model trained in one process."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from neurons.local.notes import Progress, Text, Trained
from subnet.adapters.corpus import make_corpus
from subnet.adapters.system import write_atomically
from subnet.config import RunConfig
from subnet.inference.evaluate import heldout_loss, unigram_entropy
from subnet.training.reference import train_reference
from subnet.types import Epoch, SampleId

HELDOUT_BATCHES = 8
PROGRESS_EVERY = 16


def measure_text(config: RunConfig, result: Path) -> int:
    """Write the unigram entropy; returns the exit code."""
    found = Text(unigram=unigram_entropy(make_corpus(config), config.model.vocab_size))
    write_atomically(result, msgspec.json.encode(found))
    return 0


def train(config: RunConfig, samples: Sequence[tuple[Epoch, SampleId]], result: Path) -> int:
    """Train on `samples` in order, a line for every few of them; returns the exit code.

    One thread: two wait for each other at every product, and on a busy machine that takes longer than one (LOG).
    """
    torch.set_num_threads(1)
    corpus = make_corpus(config)
    result.parent.mkdir(parents=True, exist_ok=True)
    with result.open("wb") as file:

        def note(num_samples: int, loss: float) -> None:
            if num_samples % PROGRESS_EVERY == 0:
                file.write(msgspec.json.encode(Progress(num_samples=num_samples, loss=loss)) + b"\n")
                file.flush()

        trained = train_reference(config, corpus, samples, on_progress=note)
        found = heldout_loss(config, trained.stage_params, corpus, HELDOUT_BATCHES)
        last = Trained(num_samples=len(trained.losses), heldout_loss=found.loss)
        file.write(msgspec.json.encode(last) + b"\n")
    return 0

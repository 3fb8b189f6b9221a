"""The rounds of a finished local subnet once more, by plain calls in one process, against what was published (papers.md B3)."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from neurons.local.children import RoundWork
from neurons.local.notes import Repeated
from subnet.adapters.corpus import make_corpus
from subnet.config import RunConfig
from subnet.frames import digest
from subnet.training.rounds import Rounds
from subnet.types import NumericMode


def repeat(config: RunConfig, mode: NumericMode, rounds: Sequence[RoundWork], result: Path) -> int:
    """Play every round on one core, as miners do here, a line for each; returns the exit code."""
    torch.set_num_threads(1)
    played = Rounds(config, make_corpus(config), mode)
    result.parent.mkdir(parents=True, exist_ok=True)
    with result.open("wb") as file:
        for work in rounds:
            played.play(work.epoch, work.samples)
            same = tuple(digest(data) == found for data, found in zip(played.snapshots, work.snapshots, strict=True))
            file.write(msgspec.json.encode(Repeated(epoch=work.epoch, same=same)) + b"\n")
            file.flush()
    return 0

"""Rehearse a run in one process, without network or chain: which preset learns enough in the time there is?

    python scripts/study_local.py neurons/presets/local.toml --epochs 6 --set training.learning_rate=0.03

Several replicas of each stage, samples on drawn pathways, passes in flight, inner steps, weighted merges with the outer step.
"""

import argparse
import time
import tomllib
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from subnet.adapters.corpus import SotuCorpus
from subnet.config import RunConfig
from subnet.draws import shuffled
from subnet.inference.evaluate import heldout_loss, unigram_entropy
from subnet.model.init import initial_params
from subnet.ports import Corpus
from subnet.training.outer import outer_step, pseudo_gradient
from subnet.training.pipeline import SampleKey, StageWorker
from subnet.training.reference import train_reference
from subnet.types import Epoch, SampleId, StageIndex

Vector = npt.NDArray[np.float32]
NUM_HELDOUT = 8


@dataclass(slots=True)
class StageState:
    """Published params and outer momentum of one stage, and its replicas."""

    params: Vector
    momentum: Vector
    replicas: list[StageWorker]


def make_stages(config: RunConfig, num_replicas: int) -> list[StageState]:
    stages = []
    for index in range(config.training.num_stages):
        params = initial_params(config, StageIndex(index))
        workers = [StageWorker(config, StageIndex(index)) for _ in range(num_replicas)]
        stages.append(StageState(params=params, momentum=np.zeros_like(params), replicas=workers))
    return stages


def pathways(config: RunConfig, epoch: int, num_samples: int, num_replicas: int) -> list[list[int]]:
    """For each sample the replica of every stage, each drawn equally often."""
    columns = [
        shuffled([sample % num_replicas for sample in range(num_samples)], "pathway", epoch, stage)
        for stage in range(config.training.num_stages)
    ]
    return [list(hops) for hops in zip(*columns, strict=True)]


def run_backward(config: RunConfig, path: list[StageWorker], key: SampleKey) -> None:
    payload: bytes | None = None
    for worker in reversed(path):
        payload = worker.backward(key, payload)
        if worker.num_accumulated == config.training.accumulate:
            worker.step()


def run_epoch(config: RunConfig, stages: list[StageState], corpus: Corpus, epoch: int, num_samples: int) -> None:
    for stage in stages:
        for worker in stage.replicas:
            worker.load(stage.params)
    in_flight: deque[tuple[list[StageWorker], SampleKey]] = deque()
    batches = {id(worker): 0 for stage in stages for worker in stage.replicas}
    for sample, hops in enumerate(pathways(config, epoch, num_samples, len(stages[0].replicas))):
        path = [stage.replicas[hop] for stage, hop in zip(stages, hops, strict=True)]
        payload: bytes | None = None
        for worker in path:
            payload = worker.forward((epoch, sample, 0), corpus.tokens(Epoch(epoch), SampleId(sample)), payload).payload
            batches[id(worker)] += 1
        in_flight.append((path, (epoch, sample, 0)))
        if len(in_flight) >= config.training.max_in_flight * len(stages[0].replicas):
            run_backward(config, *in_flight.popleft())
    while in_flight:
        run_backward(config, *in_flight.popleft())
    for stage in stages:
        merge(config, stage, [batches[id(worker)] for worker in stage.replicas])


def merge(config: RunConfig, stage: StageState, num_batches: list[int]) -> None:
    for worker in stage.replicas:
        if worker.num_accumulated:
            worker.step()
    total = np.zeros(stage.params.shape, dtype=np.float64)
    for worker, count in zip(stage.replicas, num_batches, strict=True):
        total += pseudo_gradient(stage.params, worker.params()).astype(np.float64) * count
    merged = (total / sum(num_batches)).astype(np.float32)
    stage.params, stage.momentum = outer_step(stage.params, stage.momentum, merged, config.training)


def study(config: RunConfig, corpus: Corpus, *, num_replicas: int, num_epochs: int, num_samples: int) -> list[float]:
    """Held-out loss after each epoch."""
    unigram = unigram_entropy(corpus, config.model.vocab_size)
    print(f"unigram entropy {unigram:.4f} nats/token; 0.85 of it {0.85 * unigram:.4f}, 0.80 of it {0.80 * unigram:.4f}")
    stages = make_stages(config, num_replicas)
    losses: list[float] = []
    for epoch in range(num_epochs):
        began = time.process_time()
        run_epoch(config, stages, corpus, epoch, num_samples)
        cost = (time.process_time() - began) / num_samples
        found = heldout_loss(config, [stage.params for stage in stages], corpus, NUM_HELDOUT)
        losses.append(found.loss)
        print(
            f"epoch {epoch}: held-out {found.loss:.4f} ({found.loss / unigram:.3f} of unigram),"
            f" wires zeroed {found.loss_wires_zeroed:.4f}, {cost:.3f} CPU s/sample",
            flush=True,
        )
    return losses


def with_changes(config: RunConfig, changes: list[str]) -> RunConfig:
    """`section.key=value` applied and checked."""
    plain = msgspec.to_builtins(config)
    for change in changes:
        name, _, value = change.partition("=")
        section, _, key = name.partition(".")
        plain[section][key] = tomllib.loads(f"x = {value}")["x"]
    return msgspec.convert(plain, RunConfig)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", type=Path, nargs="?", help="TOML with the sections of the run configuration")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=96, help="in one epoch")
    parser.add_argument("--reference", action="store_true", help="also train the whole model in one process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    read = tomllib.loads(options.preset.read_text()) if options.preset else {}
    run = {section: read[section] for section in RunConfig.__struct_fields__ if section in read}
    config = with_changes(msgspec.convert(run, RunConfig), options.changes)
    corpus = SotuCorpus(
        config.corpus, microbatch_size=config.training.microbatch_size, num_tokens=config.training.num_tokens
    )
    study(config, corpus, num_replicas=options.replicas, num_epochs=options.epochs, num_samples=options.samples)
    if options.reference:
        names = [
            (Epoch(epoch), SampleId(sample)) for epoch in range(options.epochs) for sample in range(options.samples)
        ]
        reference = train_reference(config, corpus, names)
        found = heldout_loss(config, reference.stage_params, corpus, NUM_HELDOUT)
        print(f"one process, same samples: held-out {found.loss:.4f}")


if __name__ == "__main__":
    main()

"""What is left of a loss when a twin's is subtracted: the noise of pairs against the noise of samples. Prints a table.

    python scripts/study_twins.py --steps 40 --samples 96

Three stages of two miners each start from the same trained params, as after a merge, and train apart on their own samples. Then
text that neither has seen goes through every pathway that differs in one stage only. Nobody lies: what a pair's losses differ by
is what the two miners learned meanwhile. With it stands what an identity cheat in the same place adds.
"""

import argparse

import numpy as np
import torch
from conviction_tables import NUM_STAGES, Unit
from study_convictions import BEST_ISA, make_config, warm_up

from incentives.power import pairs_to_find, samples_to_find
from subnet.adapters.corpus import make_corpus
from subnet.config import Bottleneck, OptimizerKind, RunConfig
from subnet.ports import Corpus
from subnet.sim.strategies import make_worker
from subnet.training.pipeline import StageWorker
from subnet.types import Epoch, NumericMode, SampleId, StageIndex
from subnet.wire import sample_key

FIRST_SAMPLE, FIRST_MEASURED = 2_000_000, 3_000_000
MARKS = (2, 8, 16)
"""Inner steps apart at which is measured."""


def pass_through(workers: list[StageWorker], corpus: Corpus, sample: int, *, is_training: bool) -> float:
    """Loss of one sample; its gradients stay in the workers when training."""
    key = sample_key(Epoch(0), SampleId(sample), 0)
    tokens = corpus.tokens(Epoch(0), SampleId(sample))
    payload, loss = None, None
    for worker in workers:
        result = worker.forward(key, tokens, payload)
        payload, loss = result.payload, result.loss
    for worker in reversed(workers):
        if is_training:
            payload = worker.backward(key, payload)
        else:
            worker.drop(key)
    assert loss is not None
    return loss


def open_workers(config: RunConfig, starts: list[bytes], cheat: str | None = None) -> list[StageWorker]:
    workers = [make_worker(cheat, config, StageIndex(stage), NumericMode.FP32) for stage in range(NUM_STAGES)]
    for worker, start in zip(workers, starts, strict=True):
        worker.restore(start)
    return workers


def losses(workers: list[StageWorker], corpus: Corpus, num_samples: int) -> np.ndarray:
    samples = range(FIRST_MEASURED, FIRST_MEASURED + num_samples)
    return np.array([pass_through(workers, corpus, sample, is_training=False) for sample in samples])


def study(unit: Unit, num_steps: int, num_samples: int) -> None:
    config = make_config(unit)
    corpus = make_corpus(config)
    starts = warm_up(unit, num_steps)
    miners = [open_workers(config, starts) for _ in range(2)]
    sample = FIRST_SAMPLE
    for step in range(1, max(MARKS) + 1):
        for workers in miners:
            for _ in range(config.training.accumulate):
                pass_through(workers, corpus, sample, is_training=True)
                sample += 1
            for worker in workers:
                worker.step()
        if step in MARKS:
            report(unit, step, miners, corpus, num_samples)


def report(unit: Unit, step: int, miners: list[list[StageWorker]], corpus: Corpus, num_samples: int) -> None:
    first, second = miners
    base = losses(first, corpus, num_samples)
    sigma = float(base.std(ddof=1))
    cheats = open_workers(first[0].config, [worker.checkpoint() for worker in second], "identity")
    for stage in range(NUM_STAGES):
        pair = losses([*first[:stage], second[stage], *first[stage + 1 :]], corpus, num_samples) - base
        harm = losses([*first[:stage], cheats[stage], *first[stage + 1 :]], corpus, num_samples) - base
        noise, delta = float(pair.std(ddof=1)), float(harm.mean())
        needs = "-"
        if delta > 0:
            pairs, samples = pairs_to_find(noise, delta, 5), samples_to_find(sigma, delta, 5, num_stages=NUM_STAGES)
            needs = f"{pairs:.0f} pairs or {samples:.0f} samples"
        print(
            f"{unit.bottleneck:5} loss {base.mean():.3f}; {step:2d} steps apart, stage {stage}: sample {sigma:.4f}, pair "
            f"{noise:.4f}, ratio {sigma / noise:5.1f}, mean difference {pair.mean():+.4f}; identity {delta:+.4f}: {needs}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of training before the miners part")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for bottleneck in (Bottleneck.RESBM, Bottleneck.NONE):
        unit = Unit(options.seed, bottleneck, OptimizerKind.MUON, "fresh", 64, BEST_ISA, NumericMode.FP32)
        study(unit, options.steps, options.samples)


if __name__ == "__main__":
    main()

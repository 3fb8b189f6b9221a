"""Stages trained alone against one model trained end to end, at equal bytes: the table of docs/results.md.

    nice -n 15 python scripts/study_blocktrain.py --seeds 3
    python scripts/blocktrain_memory.py
    python scripts/study_blocktrain.py --report

Every result is a line of docs/results/blocktrain.jsonl, and what stands there is not done again; `--minutes` ends a run after
the case in which they are over. Every stage sees the same bytes in the same order as the end-to-end model. A round is what an
epoch is in the network: workers load what was published, take H steps alone, and their mean by batches becomes what is published.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from blocktrain_report import (
    Memory,
    Result,
    by_case,
    figure_table,
    main_table,
    memory_table,
    put,
    read_lines,
    sweep_table,
)

from subnet import draws
from subnet.adapters.corpus import make_corpus
from subnet.config import (
    BlockTrainConfig,
    Bottleneck,
    DiffusionContext,
    ModelConfig,
    Objective,
    OptimizerKind,
    RunConfig,
    RunKind,
    TrainingConfig,
)
from subnet.inference.evaluate import heldout_loss, unigram_entropy
from subnet.inference.evaluate_blocks import DenoisingEvaluation, evaluate_blocks, leak_test
from subnet.inference.ngrams import TrigramTable
from subnet.model.init import initial_params
from subnet.model.partition import neighbours_of, stage_flops
from subnet.ports import Corpus
from subnet.training.pipeline import StageWorker
from subnet.types import Epoch, SampleId, StageIndex

Vector = npt.NDArray[np.float32]
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "blocktrain.jsonl"
MEMORY = ROOT / "docs" / "results" / "blocktrain_memory.jsonl"
DOCUMENT = ROOT / "docs" / "results.md"

NUM_STAGES = 4
NUM_STEPS = 400
NUM_HELDOUT = 24
SYNC = 25
"""H, micro-batches of a stage in one round, unless a case says otherwise."""


class Case(msgspec.Struct, frozen=True):
    """One row of the table. `workers` are those of each stage; none for a model that is trained whole."""

    name: str
    layers: int = NUM_STAGES
    blocktrain: BlockTrainConfig | None = None
    workers: tuple[int, ...] = ()
    sync: int = SYNC
    participation: float = 1.0


SINGLE = BlockTrainConfig(objective=Objective.DIFFUSION, context=DiffusionContext.SINGLE)
CONCAT = BlockTrainConfig(objective=Objective.DIFFUSION, context=DiffusionContext.CONCAT)
GREEDY = BlockTrainConfig(objective=Objective.GREEDY)
POOLED = BlockTrainConfig(objective=Objective.POOLED)
ALONE = (1, 1, 1, 1)
SIX = (2, 2, 1, 1)


def config_of(case: Case, seed: int) -> RunConfig:
    """The software's usual optimizer, which makes depth pay within this budget where AdamW does not; no cut anywhere."""
    return RunConfig(
        kind=RunKind.PIPELINE if case.blocktrain is None else RunKind.BLOCKTRAIN,
        model=ModelConfig(
            width=64,
            num_layers=case.layers,
            num_heads=4,
            num_kv_heads=4,
            ffn_width=176,
            bottleneck=Bottleneck.NONE,
            bottleneck_width=8,
            anchor_ids=False,
            init_std=0.03,
            seed=seed,
        ),
        training=TrainingConfig(
            num_stages=1 if case.blocktrain is None else NUM_STAGES,
            microbatch_size=16,
            num_tokens=64,
            accumulate=1,
            optimizer=OptimizerKind.MUON,
            learning_rate=0.02,
            adamw_learning_rate=0.006,
            warmup_steps=20,
            min_batches=1,
            target_batches=SYNC,
        ),
        blocktrain=case.blocktrain or BlockTrainConfig(),
    )


def batch(corpus: Corpus, seed: int, step: int) -> npt.NDArray[np.int64]:
    """The same bytes for every case of a seed."""
    return corpus.tokens(Epoch(seed), SampleId(step))


class Published:
    """Params of every stage, and the workers that train it from round to round with optimizer states of their own."""

    def __init__(self, config: RunConfig, workers: tuple[int, ...]) -> None:
        stages = [StageIndex(stage) for stage in range(config.training.num_stages)]
        self.params = [initial_params(config, stage) for stage in stages]
        self.workers = [
            [StageWorker(config, stage) for _ in range(count)] for stage, count in zip(stages, workers, strict=True)
        ]


def round_of(
    published: Published, config: RunConfig, case: Case, corpus: Corpus, *, seed: int, first: int, count: int
) -> Iterator[tuple[Vector, bool]]:
    """What each stage publishes after `count` micro-batches from `first` on, shared out among its workers; whether each merged.

    An update that comes too late is lost, and a stage that none came for stays as it is.
    """
    for stage, workers in enumerate(published.workers):
        known = {other: published.params[other] for other in neighbours_of(config, StageIndex(stage))}
        total = np.zeros(published.params[stage].shape, dtype=np.float64)
        accepted = 0
        for number, worker in enumerate(workers):
            own = range(first + number, first + count, len(workers))
            worker.load(published.params[stage])
            if config.kind is RunKind.BLOCKTRAIN:
                worker.load_neighbours(known)
            for step in own:
                key = (seed, step, 0)
                worker.forward(key, batch(corpus, seed, step), None)
                worker.backward(key, None)
                worker.step()
            is_merged = draws.uniform("arrives", seed, first, stage, number) < case.participation
            if is_merged:
                total += len(own) * worker.params().astype(np.float64)
                accepted += len(own)
            merged = (total / accepted).astype(np.float32) if accepted else published.params[stage]
            yield merged, is_merged


def train(case: Case, seed: int, corpus: Corpus) -> tuple[list[Vector], int, int]:
    """Params of every stage in the end, updates merged and assigned.

    The end is the mean of what was published over the last quarter, for every case alike: the step size does not fall, and
    a mean of late params does what a falling one would.
    """
    config = config_of(case, seed)
    published = Published(config, case.workers or (1,))
    tail = [np.zeros(params.shape, dtype=np.float64) for params in published.params]
    num_merged = num_assigned = num_in_tail = 0
    for first in range(0, NUM_STEPS, case.sync):
        count = min(case.sync, NUM_STEPS - first)
        found = list(round_of(published, config, case, corpus, seed=seed, first=first, count=count))
        num_merged += sum(is_merged for _, is_merged in found)
        num_assigned += len(found)
        # the last of a stage's workers yields the mean of all
        ends = np.cumsum([len(workers) for workers in published.workers]) - 1
        published.params = [found[end][0] for end in ends]
        if first + count > NUM_STEPS * 3 // 4:
            num_in_tail += 1
            tail = [total + params for total, params in zip(tail, published.params, strict=True)]
    return [(total / num_in_tail).astype(np.float32) for total in tail], num_merged, num_assigned


def figures_of(case: Case, config: RunConfig, params: list[Vector], corpus: Corpus) -> dict[str, float]:
    """Everything that is honest, and what is not by its name."""
    if case.blocktrain is None:
        return {"loss": heldout_loss(config, params, corpus, NUM_HELDOUT).loss}
    found = evaluate_blocks(config, params, corpus, NUM_HELDOUT)
    leak = leak_test(config, params, corpus)
    figures = {"leak_test_passed": float(leak.is_passed), "gain": found.composition_gain}
    if isinstance(found, DenoisingEvaluation):
        figures |= {f"leaky_{sigma:g}": loss for sigma, loss in found.leaky}
        figures |= {"leaky_mean": found.leaky_mean, "H0": found.first_stage, "H1": found.one_path}
        figures |= {f"H{count}": loss for count, loss in found.mixtures}
        return figures | {"loss": found.mixtures[-1][1]}
    figures |= {f"depth_{depth}": loss for depth, loss in enumerate(found.at_depth)}
    return figures | {"loss": found.at_depth[-1]}


def run_case(case: Case, seed: int) -> Result:
    """Train, evaluate, count."""
    config = config_of(case, seed)
    corpus = make_corpus(config)
    began = time.process_time()
    if case.name == "trigram":
        table = TrigramTable(config.model.vocab_size)
        table.fit(batch(corpus, seed, step) for step in range(NUM_STEPS))
        loss = table.loss(corpus.heldout(index) for index in range(NUM_HELDOUT))
        figures = {"loss": loss, "unigram": unigram_entropy(corpus, config.model.vocab_size)}
        return Result(case.name, seed, NUM_STEPS, figures, 0.0, time.process_time() - began)
    flops = NUM_STEPS * sum(stage_flops(config, StageIndex(stage)) for stage in range(config.training.num_stages))
    params, merged, assigned = train(case, seed, corpus)
    figures = figures_of(case, config, params, corpus)
    return Result(
        case.name, seed, NUM_STEPS, figures, float(flops), time.process_time() - began, merged=merged, assigned=assigned
    )


REFERENCES = (Case("trigram"), Case("end_to_end"), Case("one_layer", layers=1))
OBJECTIVES = (
    Case("greedy", blocktrain=GREEDY, workers=ALONE),
    Case("pooled", blocktrain=POOLED, workers=ALONE),
    Case("diffusion_single", blocktrain=SINGLE, workers=ALONE),
    Case("diffusion_concat", blocktrain=CONCAT, workers=ALONE),
)
SWEEPS = (
    Case("six_p100", blocktrain=POOLED, workers=SIX),
    Case("six_p50", blocktrain=POOLED, workers=SIX, participation=0.5),
    Case("six_h100", blocktrain=POOLED, workers=SIX, sync=100),
    Case("six_h10", blocktrain=POOLED, workers=SIX, sync=10),
    Case("six_p75", blocktrain=POOLED, workers=SIX, participation=0.75),
    Case("six_greedy", blocktrain=GREEDY, workers=SIX),
    Case("six_diffusion", blocktrain=SINGLE, workers=SIX),
)


def cases(num_seeds: int) -> list[tuple[Case, int]]:
    """The most telling first."""
    return [(case, seed) for part in ((*REFERENCES, *OBJECTIVES), SWEEPS) for seed in range(num_seeds) for case in part]


def run_all(minutes: float, num_seeds: int, only: list[str]) -> None:
    ends = time.monotonic() + 60 * minutes
    for case, seed in cases(num_seeds):
        if only and case.name not in only:
            continue
        if any((found.case, found.seed) == (case.name, seed) for found in read_lines(RESULTS, Result)):
            continue
        if time.monotonic() > ends:
            return
        result = run_case(case, seed)
        with RESULTS.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        print(f"{case.name} seed {seed}: {result.figures['loss']:.4f} nats/byte, {result.cpu_s:.0f} CPU s", flush=True)


HEADLINES = {
    "end_to_end": "end to end, 4 layers",
    "one_layer": "autoregressive, 1 layer",
    "trigram": "trigram table",
    "pooled_below": "pooled, reading the stages below (left)",
    "pooled": "pooled (ours)",
    "greedy": "greedy",
    "diffusion_single": "diffusion, single stream (H16)",
    "diffusion_concat": "diffusion, concatenated (H16)",
}
DENOISING = {name: HEADLINES[name].removesuffix(" (H16)") for name in ("diffusion_single", "diffusion_concat")}
DENOISED = (
    ("leaky_1", "L(1), leaky"),
    ("leaky_2", "L(2), leaky"),
    ("leaky_3", "L(3), leaky"),
    ("leaky_5", "L(5), leaky"),
    ("leaky_10", "L(10), leaky"),
    ("leaky_mean", "L, mean, leaky"),
    ("H0", "H0: first stage alone"),
    ("H1", "H1: whole chain, one path"),
    ("H4", "H4: 4 paths"),
    ("H16", "H16: 16 paths"),
    ("gain", "composition gain H0 - H16"),
    ("leak_test_passed", "leak test passed, its control leaks"),
)
PREDICTING = {name: HEADLINES[name] for name in ("greedy", "pooled", "pooled_below")}
BY_DEPTH = (
    *((f"depth_{depth}", f"after stage {depth}") for depth in range(NUM_STAGES)),
    ("gain", "composition gain, first less last"),
    ("leak_test_passed", "leak test passed"),
)
AVERAGED = {
    "six_p100": f"pooled, H {SYNC}, all arrive",
    "six_p75": f"pooled, H {SYNC}, 3 of 4 arrive",
    "six_p50": f"pooled, H {SYNC}, half arrive",
    "six_h10": "pooled, H 10",
    "six_h100": "pooled, H 100",
    "six_greedy": f"greedy, H {SYNC}",
    "six_diffusion": f"diffusion, single stream, H {SYNC}",
}

MEMORY_TITLES = {"end_to_end": "the whole model", "pooled": HEADLINES["pooled"], "greedy": "greedy"} | DENOISING


def report() -> None:
    """Write the tables into docs/results.md."""
    found = by_case(read_lines(RESULTS, Result))
    parts = [
        "### Honest loss, at equal bytes",
        main_table(found, HEADLINES),
        "### Diffusion: every figure, nats/byte",
        figure_table(found, DENOISING, DENOISED),
        "### Predicting stages: loss at every depth, nats/byte",
        figure_table(found, PREDICTING, BY_DEPTH),
        "### Six workers, averaged by batches (2, 2, 1, 1 for the four stages)",
        sweep_table(found, AVERAGED),
        "### Memory of a worker (width 512, 8 layers, 4 stages, 8 x 128 tokens)",
        memory_table(read_lines(MEMORY, Memory), MEMORY_TITLES),
    ]
    put(DOCUMENT, "\n\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0, help="start no case after this many")
    parser.add_argument("--only", action="append", default=[], metavar="CASE")
    parser.add_argument("--report", action="store_true", help="write the tables of docs/results.md instead")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.report:
        report()
    else:
        run_all(options.minutes, options.seeds, options.only)


if __name__ == "__main__":
    main()

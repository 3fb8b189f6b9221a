"""Is honest work ever convicted, and which cheats pass? Replays across numeric modes and instruction sets; prints two tables.

    python scripts/study_convictions.py --seed 2 --rounds 4 --no-cheats --out convictions.jsonl

Every segment is recorded in one (instruction set, mode) and replayed in each of the three others; the same against the same is
bit-equal and does not count. A round has models, text and params of its own. Its segments begin in three ways: fresh from the
published start, cold with trained params and an empty optimizer state, as a joiner has, and warm from a checkpoint.
Judged at the strictest limit that a network can come to. `--out` is appended to, and what stands in it is not done again.
The two instruction sets are the best that this machine has and the next one down.
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from conviction_tables import (
    NUM_STAGES,
    STRICTEST_REL_D,
    Line,
    Row,
    Unit,
    print_cheats,
    print_honest,
    read_lines,
    summary_line,
)

from subnet.adapters.corpus import make_corpus
from subnet.config import AuditConfig, Bottleneck, CorpusConfig, ModelConfig, OptimizerKind, RunConfig, TrainingConfig
from subnet.model.init import initial_params
from subnet.ports import Corpus
from subnet.sim.strategies import STRATEGIES, make_worker
from subnet.training.checkpoint import read_checkpoint
from subnet.types import Epoch, Hotkey, NumericMode, SampleId, StageIndex
from subnet.validation.recording import Recorder, Recording
from subnet.validation.replay import replay_passes
from subnet.validation.verdict import judge, published_rule

NUM_SEGMENTS = 5
"""Of each start in a round."""
WARM_STEPS = (40, 80, 120)
"""Of training before the cold and the warm start, in turn over the rounds."""
WIDTHS = (64, 128)
"""Of even and odd rounds."""
NUM_MICROBATCHES = 4
"""In a segment."""
ACCUMULATE = (2, 4)
"""Micro-batches in one inner step, in even and odd rounds."""
ISAS = {
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
}
"""Instruction sets from the oldest on, and what holds torch's own kernels, MKL and oneDNN to each: products of matrices add up
in another order, with and without fused multiply-add."""
BEST_ISA = "avx512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "avx2"
USED_ISAS = {"avx512": ("avx2", "avx512"), "avx2": ("baseline", "avx2")}[BEST_ISA]
STARTS = ("fresh", "cold", "warm")


class Setting(NamedTuple):
    """Where numbers come about."""

    isa: str
    mode: NumericMode

    def __str__(self) -> str:
        return f"{self.isa} {self.mode}"


SETTINGS = [Setting(isa, mode) for isa in USED_ISAS for mode in NumericMode]


def make_config(unit: Unit) -> RunConfig:
    """Rates of the local preset, 128x at its width and at half of it; two layers in each stage."""
    width, accumulate = unit.width, ACCUMULATE[unit.round % len(ACCUMULATE)]
    return RunConfig(
        model=ModelConfig(
            width=width,
            num_layers=2 * NUM_STAGES,
            ffn_width=11 * width // 4,
            init_std=0.03,
            bottleneck=unit.bottleneck,
            bottleneck_width=unit.channels or width // 64,
            seed=unit.round,
        ),
        training=TrainingConfig(
            num_stages=NUM_STAGES,
            microbatch_size=2,
            num_tokens=32,
            accumulate=accumulate,
            warmup_steps=5,
            optimizer=unit.optimizer,
            adamw_learning_rate=0.01,
            min_batches=1,
        ),
        corpus=CorpusConfig(seed=unit.round),
        audit=AuditConfig(checkpoint_every=NUM_MICROBATCHES // accumulate, max_rel_d=STRICTEST_REL_D),
    )


# ---- in the child of one instruction set ---------------------------------------------------------------------------


def prepare() -> None:
    torch.set_num_threads(1)


def train(config: RunConfig, recorders: list[Recorder], corpus: Corpus, first: int) -> None:
    """One inner step of every stage."""
    for sample in range(first, first + config.training.accumulate):
        key = (0, sample, 0)
        payload: bytes | None = None
        for recorder in recorders:
            payload = recorder.forward(key, corpus.tokens(Epoch(0), SampleId(sample)), payload)
        for recorder in reversed(recorders):
            payload = recorder.backward(key, payload)
    for recorder in recorders:
        recorder.step()


def make_recorders(unit: Unit, config: RunConfig, starts: list[bytes]) -> list[Recorder]:
    recorders = []
    for index in range(NUM_STAGES):
        stage = StageIndex(index)
        worker = make_worker(unit.cheat if index == unit.stage else None, config, stage, unit.made_mode)
        if unit.start == "fresh":
            worker.load(initial_params(config, stage))
        else:
            worker.load(read_checkpoint(config, stage, starts[index]).flat_params())
        if unit.start == "warm":
            worker.restore(starts[index])
        recorders.append(Recorder(worker, run_id="study", epoch=Epoch(0), hotkey=Hotkey(f"stage {stage}")))
    return recorders


def warm_up(unit: Unit, num_steps: int) -> list[bytes]:
    """Checkpoints after honest training."""
    config = make_config(unit)
    corpus = make_corpus(config)
    honest = msgspec.structs.replace(unit, cheat=None, made_mode=NumericMode.FP32, start="fresh")
    recorders = make_recorders(honest, config, [])
    for step in range(num_steps):
        train(config, recorders, corpus, step * config.training.accumulate)
        if step % 8 == 0:
            for recorder in recorders:
                recorder.close_segment()  # lets go of what it holds
    return [recorder.close_segment().end for recorder in recorders]


def record(unit: Unit, starts: list[bytes]) -> list[Recording]:
    """Segments of every stage, or of the cheat's alone."""
    config = make_config(unit)
    corpus = make_corpus(config)
    recorders = make_recorders(unit, config, starts)
    segments: list[Recording] = []
    for step in range(NUM_SEGMENTS * config.audit.checkpoint_every):
        train(config, recorders, corpus, 1_000_000 + step * config.training.accumulate)
        if (step + 1) % config.audit.checkpoint_every == 0:
            segments += [recorder.close_segment() for recorder in recorders]
    return [made for made in segments if unit.cheat is None or made.challenge.stage == unit.stage]


def replay(unit: Unit, setting: Setting, segments: list[Recording]) -> list[Row]:
    config = make_config(unit)
    corpus = make_corpus(config)
    rows = []
    for made in segments:
        found = replay_passes(config, made, corpus, setting.mode)
        measures = found.summary()
        outcome, reason = judge(measures, config.audit)
        rows.append(
            Row(
                replayed_isa=setting.isa,
                replayed_mode=setting.mode,
                stage=made.challenge.stage,
                is_cold=unit.start != "warm" and made.challenge.segment == 0,
                num_microbatches=len(found.failing),
                outcome=outcome,
                reason=reason,
                measures=measures,
                worst_token=max((one.rel_d_token for one in found.forward), default=0.0),
                published_passes=published_rule(measures),
            )
        )
    return rows


# ---- in the parent -------------------------------------------------------------------------------------------------


def open_pools() -> dict[str, ProcessPoolExecutor]:
    """A process for each instruction set: torch chooses its kernels once, when it is imported."""
    pools = {}
    for isa in USED_ISAS:
        os.environ.update(ISAS[isa])
        pools[isa] = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=prepare)
        found = pools[isa].submit(torch.backends.cpu.get_cpu_capability).result()
        wanted = ISAS[isa]["ATEN_CPU_CAPABILITY"]
        if found.lower() != wanted:
            raise SystemExit(f"this machine computes {found} where {wanted} was asked for: it cannot run this study")
    return pools


def units_of(first: Unit, *, with_cheats: bool) -> list[Unit]:
    """Everything that shares the round, bottleneck, optimizer and width of `first`."""
    honest = [
        msgspec.structs.replace(first, start=start, made_isa=made.isa, made_mode=made.mode)
        for start in STARTS
        for made in SETTINGS
    ]
    if not with_cheats:
        return honest
    return honest + [
        msgspec.structs.replace(first, start="warm", cheat=cheat, stage=stage)
        for cheat in STRATEGIES
        for stage in range(NUM_STAGES)
    ]


def judges_of(unit: Unit) -> list[Setting]:
    """Who replays: everybody who computes otherwise; a cheat only who differs most, in the other mode and in its own."""
    if unit.cheat is not None:
        return [Setting(USED_ISAS[0], mode) for mode in reversed(NumericMode)]
    return [setting for setting in SETTINGS if setting != (unit.made_isa, unit.made_mode)]


def study(pools: dict[str, ProcessPoolExecutor], firsts: Iterable[Unit], out: Path, *, with_cheats: bool) -> None:
    done = {line.unit for line in read_lines(out)}
    for first in firsts:
        todo = [unit for unit in units_of(first, with_cheats=with_cheats) if unit not in done]
        if todo:
            study_units(pools, todo, out)
        print(
            f"round {first.round}, {first.bottleneck}, {first.optimizer}: {summary_line(read_lines(out))}", flush=True
        )


def study_units(pools: dict[str, ProcessPoolExecutor], units: list[Unit], out: Path) -> None:
    first = units[0]
    trained = pools[BEST_ISA].submit(warm_up, first, WARM_STEPS[first.round % len(WARM_STEPS)]).result()
    for unit in units:
        segments = pools[unit.made_isa].submit(record, unit, trained).result()
        rows = []
        for setting in judges_of(unit):
            rows += pools[setting.isa].submit(replay, unit, setting, segments).result()
        with out.open("ab") as file:
            file.write(msgspec.json.encode(Line(unit, rows)) + b"\n")


def firsts(options: argparse.Namespace) -> Iterable[Unit]:
    """One unit for each round, bottleneck and optimizer that was asked for; round 0 comes first."""
    for number in range(options.seed, options.seed + options.rounds):
        width = options.width or WIDTHS[number % len(WIDTHS)]
        for bottleneck in options.bottleneck or Bottleneck:
            for optimizer in options.optimizer or OptimizerKind:
                yield Unit(
                    number,
                    bottleneck,
                    optimizer,
                    STARTS[0],
                    width,
                    BEST_ISA,
                    NumericMode.FP32,
                    channels=options.channels,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="first round's number")
    parser.add_argument("--bottleneck", type=Bottleneck, action="append", choices=list(Bottleneck))
    parser.add_argument("--optimizer", type=OptimizerKind, action="append", choices=list(OptimizerKind))
    parser.add_argument("--width", type=int, help="of every round, instead of 64 and 128 in turn")
    parser.add_argument("--channels", type=int, default=0, help="that cross a cut, instead of 128x")
    parser.add_argument("--no-cheats", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=Path("convictions.jsonl"), help="JSON lines, one for each recording"
    )
    options = parser.parse_args()
    pools = open_pools()
    study(pools, firsts(options), options.out, with_cheats=not options.no_cheats)
    for pool in pools.values():
        pool.shutdown()
    lines = read_lines(options.out)
    print_honest(lines)
    if not options.no_cheats:
        print_cheats(lines)


if __name__ == "__main__":
    main()

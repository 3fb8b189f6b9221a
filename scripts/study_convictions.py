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
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from subnet.adapters.corpus import make_corpus
from subnet.config import AuditConfig, Bottleneck, CorpusConfig, ModelConfig, OptimizerKind, RunConfig, TrainingConfig
from subnet.model.init import initial_params
from subnet.ports import Corpus
from subnet.sim.strategies import STRATEGIES, make_worker
from subnet.training.checkpoint import read_checkpoint
from subnet.types import Epoch, Hotkey, Measures, NumericMode, Outcome, SampleId, StageIndex
from subnet.validation.recording import Recorder, Recording
from subnet.validation.replay import replay_passes
from subnet.validation.verdict import LONE_GRADIENT_SLACK, judge, published_rule

NUM_STAGES = 3
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
STRICTEST_REL_D = 0.03
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


class Unit(msgspec.Struct, frozen=True):
    """What one set of recordings is made from."""

    round: int
    bottleneck: Bottleneck
    optimizer: OptimizerKind
    start: str
    """One of STARTS."""
    width: int
    made_isa: str
    made_mode: NumericMode
    cheat: str | None = None
    stage: int = -1
    """Of the cheat."""


class Row(msgspec.Struct, frozen=True):
    """One segment, replayed once."""

    replayed_isa: str
    replayed_mode: NumericMode
    stage: int
    is_cold: bool
    num_microbatches: int
    outcome: Outcome
    reason: str
    measures: Measures
    worst_token: float
    published_passes: bool


class Line(msgspec.Struct, frozen=True):
    """One line of the file."""

    unit: Unit
    rows: list[Row]


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
            bottleneck_width=width // 64,
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
        found = replay_passes(config, made.challenge, made.start, made.end, made.evidence, corpus, setting.mode)
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
    """Who replays: everybody who computes otherwise; a cheat is replayed once, by who differs most."""
    if unit.cheat is not None:
        return [Setting(USED_ISAS[0], NumericMode.BF16_AUTOCAST)]
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


def read_lines(out: Path) -> list[Line]:
    if not out.exists():
        return []
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in out.read_bytes().splitlines()]


# ---- tables --------------------------------------------------------------------------------------------------------


def honest_rows(lines: Iterable[Line]) -> list[tuple[Unit, Row]]:
    return [(line.unit, row) for line in lines if line.unit.cheat is None for row in line.rows]


def summary_line(lines: list[Line]) -> str:
    rows = [row for _, row in honest_rows(lines)]
    convicted = [row for row in rows if row.outcome is not Outcome.PASS]
    published = sum(not row.published_passes for row in rows)
    return (
        f"{len(rows)} honest segments, {sum(row.num_microbatches for row in rows)} micro-batches:"
        f" {len(convicted)} failed, {sum(row.measures.num_failing for row in rows)} micro-batches out of bounds;"
        f" the published rule fails {published}"
    )


def what_differs(unit: Unit, row: Row) -> str:
    modes = "" if unit.made_mode == row.replayed_mode else f"{unit.made_mode} by {row.replayed_mode}"
    isas = "" if unit.made_isa == row.replayed_isa else f"{unit.made_isa} by {row.replayed_isa}"
    return ", ".join(part for part in (modes, isas if not modes or not isas else "other isa") if part)


MEASURES: dict[str, tuple[Callable[[Row], float], float]] = {
    "rel_d": (lambda row: row.measures.rel_d, STRICTEST_REL_D),
    "rel_d bwd": (lambda row: row.measures.rel_d_backward, STRICTEST_REL_D),
    "rel_d max": (lambda row: row.measures.rel_d_max, LONE_GRADIENT_SLACK * STRICTEST_REL_D),
    "token": (lambda row: row.measures.rel_d_token, 0.25),
    "token max": (lambda row: row.worst_token, 0.5),
    "dw": (lambda row: row.measures.rel_dw, AuditConfig().max_rel_dw),
    "loss": (lambda row: row.measures.loss_error, AuditConfig().max_loss_error),
    "norm ratio": (lambda row: abs(row.measures.norm_ratio - 1), 0.1),
}
"""What is looked at, and where one segment (max: one micro-batch) goes out of bounds."""


def print_worst(title: str, groups: dict[str, list[Row]]) -> None:
    print(f"\n== {title}: worst honest figure, and the limit over it")
    print(f"{'':34} {'segments':>8} {'fails':>5}  " + "  ".join(f"{name:>15}" for name in MEASURES))
    for name, rows in groups.items():
        cells = []
        for figure, limit in MEASURES.values():
            worst = max(figure(row) for row in rows)
            cells.append(f"{worst:8.2g} " + (f"{limit / worst:5.1f}x" if worst else "     -"))
        failed = sum(row.outcome is not Outcome.PASS for row in rows)
        print(f"{name:34} {len(rows):8d} {failed:5d}  " + "  ".join(f"{cell:>15}" for cell in cells))


def print_honest(lines: list[Line]) -> None:
    rows = honest_rows(lines)
    groupings: dict[str, Callable[[Unit, Row], str]] = {
        "by what differs": what_differs,
        "by bottleneck": lambda unit, _: str(unit.bottleneck),
        "by optimizer and start": lambda unit, _: f"{unit.optimizer} {unit.start}",
        "by optimizer's state": lambda unit, row: f"{unit.optimizer} {'empty' if row.is_cold else 'filled'}",
        "by stage": lambda _, row: f"stage {row.stage}",
        "by width": lambda unit, _: f"width {unit.width}",
        "by round": lambda unit, _: f"round {unit.round}",
    }
    print(summary_line(lines))
    print_worst("all", {"all": [row for _, row in rows]})
    for title, name in groupings.items():
        groups: dict[str, list[Row]] = defaultdict(list)
        for unit, row in rows:
            groups[name(unit, row)].append(row)
        print_worst(title, dict(sorted(groups.items())))
    for unit, row in rows:
        if row.outcome is not Outcome.PASS:
            print(f"FAILED {unit}: stage {row.stage}, {row.reason}")


def print_cheats(lines: list[Line]) -> None:
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for line in lines:
        if line.unit.cheat is not None:
            groups[line.unit.cheat, line.unit.bottleneck, line.unit.stage] += line.rows
    print("\n== cheats: segments accepted by the published rule / by ours, of all (fp32 replayed as bf16)")
    bottlenecks = list(dict.fromkeys(bottleneck for _, bottleneck, _ in groups))
    print(f"{'':20}" + "".join(f"{bottleneck:>16}" for bottleneck in bottlenecks))
    for cheat in STRATEGIES:
        for stage in range(NUM_STAGES):
            cells = []
            for bottleneck in bottlenecks:
                rows = groups[cheat, bottleneck, stage]
                published = sum(row.published_passes for row in rows)
                ours = sum(row.outcome is Outcome.PASS for row in rows)
                cells.append(f"{published:3d} /{ours:3d} of{len(rows):3d}")
            print(f"{cheat:10} stage {stage}   " + "".join(f"{cell:>16}" for cell in cells))


def firsts(options: argparse.Namespace) -> Iterable[Unit]:
    """One unit for each round, bottleneck and optimizer that was asked for; round 0 comes first."""
    for number in range(options.seed, options.seed + options.rounds):
        width = options.width or WIDTHS[number % len(WIDTHS)]
        for bottleneck in options.bottleneck or Bottleneck:
            for optimizer in options.optimizer or OptimizerKind:
                yield Unit(number, bottleneck, optimizer, STARTS[0], width, BEST_ISA, NumericMode.FP32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="first round's number")
    parser.add_argument("--bottleneck", type=Bottleneck, action="append", choices=list(Bottleneck))
    parser.add_argument("--optimizer", type=OptimizerKind, action="append", choices=list(OptimizerKind))
    parser.add_argument("--width", type=int, help="of every round; without AVX-512 Muon is ten times slower at 128")
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

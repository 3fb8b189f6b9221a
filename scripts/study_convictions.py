"""Is honest work ever convicted, and which cheats pass? Replays across numeric modes and instruction sets; prints two tables.

    python scripts/study_convictions.py --rounds 4 --out convictions.jsonl

Every segment is recorded in one (instruction set, mode) and replayed in each of the three others; the same against the same is
bit-equal and does not count. A round has models, text and params of its own: round 0 starts from fresh params, later ones from
longer and longer training. Its cold half has an empty optimizer state, as a joiner has; its warm half goes on from a checkpoint.
Judged at the strictest limit that a network can come to. `--out` is appended to, and what stands in it is not done again.
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
"""Of each half of a round."""
FIRST_WARM_STEPS, MORE_WARM_STEPS = 40, 40
WIDTHS = (64, 128)
"""Of even and odd rounds."""
STRICTEST_REL_D = 0.03
ISAS = {"avx2": "avx2", "avx512": "avx512"}
HALVES = ("cold", "warm")


class Setting(NamedTuple):
    """Where numbers come about."""

    isa: str
    mode: NumericMode

    def __str__(self) -> str:
        return f"{self.isa} {self.mode}"


SETTINGS = [Setting(isa, mode) for isa in ISAS for mode in NumericMode]


class Unit(msgspec.Struct, frozen=True):
    """What one set of recordings is made from."""

    round: int
    bottleneck: Bottleneck
    optimizer: OptimizerKind
    half: str
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
    width = WIDTHS[unit.round % len(WIDTHS)]
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
            accumulate=2,
            warmup_steps=5,
            optimizer=unit.optimizer,
            adamw_learning_rate=0.01,
            min_batches=1,
        ),
        corpus=CorpusConfig(seed=unit.round),
        audit=AuditConfig(checkpoint_every=2, max_rel_d=STRICTEST_REL_D),
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
        if starts and unit.half == "warm":
            worker.load(read_checkpoint(config, stage, starts[index]).flat_params())
            worker.restore(starts[index])
        elif starts:
            worker.load(read_checkpoint(config, stage, starts[index]).flat_params())
        else:
            worker.load(initial_params(config, stage))
        recorders.append(Recorder(worker, run_id="study", epoch=Epoch(0), hotkey=Hotkey(f"stage {stage}")))
    return recorders


def warm_up(unit: Unit, num_steps: int) -> list[bytes]:
    """Checkpoints after honest training."""
    config = make_config(unit)
    corpus = make_corpus(config)
    honest = msgspec.structs.replace(unit, cheat=None, made_mode=NumericMode.FP32)
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
        start = read_checkpoint(config, made.challenge.stage, made.start)
        rows.append(
            Row(
                replayed_isa=setting.isa,
                replayed_mode=setting.mode,
                stage=made.challenge.stage,
                is_cold=start.num_optimizer_steps == 0,
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
    for isa, name in ISAS.items():
        os.environ["ATEN_CPU_CAPABILITY"] = name
        pools[isa] = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=prepare)
        found = pools[isa].submit(torch.backends.cpu.get_cpu_capability).result()
        if found.lower() != name:
            raise SystemExit(f"this machine computes {found} where {name} was asked for: it cannot run this study")
    return pools


def units_of(round_number: int, bottleneck: Bottleneck, optimizer: OptimizerKind) -> list[Unit]:
    honest = [
        Unit(round_number, bottleneck, optimizer, half, made.isa, made.mode) for half in HALVES for made in SETTINGS
    ]
    if round_number:
        return honest
    made = Setting("avx512", NumericMode.FP32)
    return honest + [
        Unit(round_number, bottleneck, optimizer, "warm", made.isa, made.mode, cheat, stage)
        for cheat in STRATEGIES
        for stage in range(NUM_STAGES)
    ]


def judges_of(unit: Unit) -> list[Setting]:
    """Who replays: everybody who computes otherwise; a cheat is replayed once, by who differs most."""
    if unit.cheat is not None:
        return [Setting("avx2", NumericMode.BF16_AUTOCAST)]
    return [setting for setting in SETTINGS if setting != (unit.made_isa, unit.made_mode)]


def study(pools: dict[str, ProcessPoolExecutor], rounds: Iterable[int], out: Path) -> None:
    done = {line.unit for line in read_lines(out)}
    for number in rounds:
        for bottleneck in Bottleneck:
            for optimizer in OptimizerKind:
                todo = [unit for unit in units_of(number, bottleneck, optimizer) if unit not in done]
                if todo:
                    study_units(pools, todo, out)
        print(f"round {number} is done: {summary_line(read_lines(out))}", flush=True)


def study_units(pools: dict[str, ProcessPoolExecutor], units: list[Unit], out: Path) -> None:
    first = units[0]
    num_steps = FIRST_WARM_STEPS + MORE_WARM_STEPS * first.round
    trained = pools["avx512"].submit(warm_up, first, num_steps).result()
    for unit in units:
        starts = [] if unit.half == "cold" and unit.round == 0 else trained
        segments = pools[unit.made_isa].submit(record, unit, starts).result()
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
        "by optimizer and start": lambda unit, row: f"{unit.optimizer} {'cold' if row.is_cold else 'warm'}",
        "by stage": lambda _, row: f"stage {row.stage}",
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
    print("\n== cheats: segments accepted by the published rule / by ours, of all (fp32, AVX-512; replayed bf16, AVX2)")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--out", type=Path, default=Path("convictions.jsonl"), help="JSON lines, one for each recording"
    )
    parser.add_argument("--seed", type=int, default=0, help="first round's number")
    options = parser.parse_args()
    pools = open_pools()
    study(pools, range(options.seed, options.seed + options.rounds), options.out)
    for pool in pools.values():
        pool.shutdown()
    lines = read_lines(options.out)
    print_honest(lines)
    print_cheats(lines)


if __name__ == "__main__":
    main()

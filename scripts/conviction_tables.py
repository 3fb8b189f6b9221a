"""What a study of convictions keeps of each replayed segment, and its tables."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from subnet.config import AuditConfig, Bottleneck, OptimizerKind
from subnet.sim.strategies import STRATEGIES
from subnet.types import Measures, NumericMode, Outcome
from subnet.validation.verdict import LONE_GRADIENT_SLACK

NUM_STAGES = 3
STRICTEST_REL_D = 0.03


class Unit(msgspec.Struct, frozen=True):
    """What one set of recordings is made from."""

    round: int
    bottleneck: Bottleneck
    optimizer: OptimizerKind
    start: str
    """How its segments begin: fresh, cold or warm."""
    width: int
    made_isa: str
    made_mode: NumericMode
    cheat: str | None = None
    stage: int = -1
    """Of the cheat."""
    channels: int = 0
    """That cross a cut; 0: as many as are 128x at this width."""


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


def read_lines(out: Path) -> list[Line]:
    if not out.exists():
        return []
    decoder = msgspec.json.Decoder(Line)
    return [decoder.decode(line) for line in out.read_bytes().splitlines()]


def with_convictions(line: Line) -> list[tuple[Row, bool]]:
    """Every row, and whether it convicts: a replay in the other mode that fails is repeated in the recording's own.

    On the recording's own instruction set that repeats it to the bit; on the other it is a row of the same line.
    """
    by_judge: dict[tuple[str, NumericMode], list[Row]] = defaultdict(list)
    for row in line.rows:
        by_judge[row.replayed_isa, row.replayed_mode].append(row)
    found = []
    for (isa, mode), rows in by_judge.items():
        own = by_judge.get((isa, line.unit.made_mode)) if mode is not line.unit.made_mode else rows
        for at, row in enumerate(rows):
            again = own[at].outcome if own is not None else Outcome.PASS
            found.append((row, row.outcome is Outcome.FAIL and again is Outcome.FAIL))
    return found


def honest_rows(lines: Iterable[Line]) -> list[tuple[Unit, Row, bool]]:
    return [(line.unit, *found) for line in lines if line.unit.cheat is None for found in with_convictions(line)]


def summary_line(lines: list[Line]) -> str:
    found = honest_rows(lines)
    rows = [row for _, row, _ in found]
    return (
        f"{len(rows)} honest segments, {sum(row.num_microbatches for row in rows)} micro-batches:"
        f" {sum(row.outcome is not Outcome.PASS for row in rows)} failed a replay,"
        f" {sum(is_convicted for *_, is_convicted in found)} convicted,"
        f" {sum(row.measures.num_failing for row in rows)} micro-batches out of bounds;"
        f" the published rule fails {sum(not row.published_passes for row in rows)}"
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


def print_worst(title: str, groups: dict[str, list[tuple[Row, bool]]]) -> None:
    print(f"\n== {title}: worst honest figure, and the limit over it")
    print(f"{'':34} {'segments':>8} {'fails':>5} {'convicted':>9}  " + "  ".join(f"{name:>15}" for name in MEASURES))
    for name, found in groups.items():
        rows, cells = [row for row, _ in found], []
        for figure, limit in MEASURES.values():
            worst = max(figure(row) for row in rows)
            cells.append(f"{worst:8.2g} " + (f"{limit / worst:5.1f}x" if worst else "     -"))
        failed, convicted = sum(row.outcome is not Outcome.PASS for row in rows), sum(one for _, one in found)
        print(f"{name:34} {len(rows):8d} {failed:5d} {convicted:9d}  " + "  ".join(f"{cell:>15}" for cell in cells))


def print_honest(lines: list[Line]) -> None:
    found = honest_rows(lines)
    groupings: dict[str, Callable[[Unit, Row], str]] = {
        "all": lambda *_: "all",
        "by what differs": what_differs,
        "by bottleneck": lambda unit, _: str(unit.bottleneck),
        "by optimizer and start": lambda unit, _: f"{unit.optimizer} {unit.start}",
        "by optimizer's state": lambda unit, row: f"{unit.optimizer} {'empty' if row.is_cold else 'filled'}",
        "by stage": lambda _, row: f"stage {row.stage}",
        "by run": lambda unit, _: f"round {unit.round}, {unit.width} wide, {unit.bottleneck}, {unit.optimizer}",
    }
    print(summary_line(lines))
    for title, name in groupings.items():
        groups: dict[str, list[tuple[Row, bool]]] = defaultdict(list)
        for unit, row, is_convicted in found:
            groups[name(unit, row)].append((row, is_convicted))
        print_worst(title, dict(sorted(groups.items())))
    for unit, row, is_convicted in found:
        if row.outcome is not Outcome.PASS:
            print(f"{'CONVICTED' if is_convicted else 'failed a replay'} {unit}: stage {row.stage}, {row.reason}")


def print_cheats(lines: list[Line]) -> None:
    groups: dict[tuple[str, str, int], list[tuple[Row, bool]]] = defaultdict(list)
    for line in lines:
        if line.unit.cheat is not None:
            others = [found for found in with_convictions(line) if found[0].replayed_mode is not line.unit.made_mode]
            groups[line.unit.cheat, line.unit.bottleneck, line.unit.stage] += others
    print("\n== cheats: segments accepted by the published rule / by ours, of all (fp32 replayed as bf16, then fp32)")
    bottlenecks = list(dict.fromkeys(bottleneck for _, bottleneck, _ in groups))
    print(f"{'':20}" + "".join(f"{bottleneck:>16}" for bottleneck in bottlenecks))
    for cheat in STRATEGIES:
        for stage in range(NUM_STAGES):
            cells = []
            for bottleneck in bottlenecks:
                found = groups[cheat, bottleneck, stage]
                published = sum(row.published_passes for row, _ in found)
                ours = sum(not is_convicted for _, is_convicted in found)
                cells.append(f"{published:3d} /{ours:3d} of{len(found):3d}")
            print(f"{cheat:10} stage {stage}   " + "".join(f"{cell:>16}" for cell in cells))

"""Tables of docs/results.md from the lines of docs/results: `python scripts/study_blocktrain.py --report`."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
"""What stands between them is written by the script."""


class Result(msgspec.Struct, frozen=True):
    """One line of the study: figures in nats for each byte, cost, and how many updates of those assigned were merged."""

    case: str
    seed: int
    steps: int
    figures: dict[str, float]
    flops: float
    cpu_s: float
    merged: int = 0
    assigned: int = 0


class Memory(msgspec.Struct, frozen=True):
    """Bytes of one worker: `measured` at its peak above what the process had before, `held` from step to step by count."""

    case: str
    stage: int
    measured: int
    held: int


def read_lines(path: Path, kind: type[T]) -> list[T]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=kind) for line in lines]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and sample standard deviation; the number alone when there is one."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_case(results: Iterable[Result]) -> dict[str, dict[int, Result]]:
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        found.setdefault(result.case, {})[result.seed] = result
    return found


def gaps(results: dict[int, Result], reference: dict[int, Result]) -> list[float]:
    """Honest loss less the end-to-end loss of the same seed."""
    seeds = sorted(results.keys() & reference.keys())
    return [results[seed].figures["loss"] - reference[seed].figures["loss"] for seed in seeds]


def main_table(found: dict[str, dict[int, Result]], titles: dict[str, str]) -> str:
    """Honest loss of every case, its gap to end to end seed by seed, and what it cost."""
    reference = found.get("end_to_end", {})
    flops = statistics.fmean(result.flops for result in reference.values()) if reference else math.nan
    rows = []
    for name, title in titles.items():
        if name not in found:
            continue
        own = list(found[name].values())
        losses = [result.figures["loss"] for result in own]
        cost = statistics.fmean(result.flops for result in own) / flops
        rows.append(
            [
                title,
                spread(losses),
                spread([loss / math.log(2) for loss in losses]),
                spread(gaps(found[name], reference)) if name != "end_to_end" else "0",
                f"{cost:.2f}" if cost else "-",
                str(len(own)),
            ]
        )
    return table(["", "nats/byte", "bits/byte", "gap to end to end, nats", "FLOPs / end to end", "seeds"], rows)


def figure_table(found: dict[str, dict[int, Result]], titles: dict[str, str], names: Sequence[tuple[str, str]]) -> str:
    """Chosen figures, a column for each case."""
    present = [name for name in titles if name in found]

    def cell(case: str, figure: str) -> str:
        return spread([result.figures[figure] for result in found[case].values() if figure in result.figures])

    rows = [[title, *(cell(case, figure) for case in present)] for figure, title in names]
    return table(["", *(titles[name] for name in present)], rows)


def sweep_table(found: dict[str, dict[int, Result]], titles: dict[str, str]) -> str:
    """Averaged workers: updates merged of those assigned, honest loss, gap."""
    reference = found.get("end_to_end", {})
    rows = []
    for name, title in titles.items():
        if name in found:
            own = list(found[name].values())
            merged = sum(result.merged for result in own) / max(1, sum(result.assigned for result in own))
            losses = spread([result.figures["loss"] for result in own])
            rows.append([title, f"{merged:.2f}", losses, spread(gaps(found[name], reference)), str(len(own))])
    return table(["", "participation", "nats/byte", "gap to end to end, nats", "seeds"], rows)


def memory_table(found: Sequence[Memory], titles: dict[str, str]) -> str:
    """Each worker beside the end-to-end one."""
    whole = next((line for line in found if line.case == "end_to_end"), None)
    if whole is None:
        return "not measured"
    rows = [
        [
            titles[line.case],
            str(line.stage) if line is not whole else "all",
            f"{line.held / 2**20:.0f}",
            f"{line.held / whole.held:.2f}",
            f"{line.measured / 2**20:.0f}",
            f"{line.measured / whole.measured:.2f}",
        ]
        for line in found
    ]
    return table(["worker of", "stage", "held, MiB", "ratio", "peak measured, MiB", "ratio"], rows)


def put(document: Path, tables: str) -> None:
    """Replace what stands between the marks."""
    text = document.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{BEGIN}\n\n{tables.strip()}\n\n{END}{after}")

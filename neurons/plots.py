"""Pictures for people, as PNG files. Matplotlib is an extra: nothing else needs it, so it is imported when one is drawn."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neurons.exit_codes import ExitCode
from neurons.settings import user_path
from subnet.errors import StartupRefused

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 110
_NAME_LENGTH = 8
_MAX_LABELS = 40


def new_figure(width: float, height: float) -> "Figure":
    """An empty picture, inches. Raises StartupRefused when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StartupRefused(
            f"a picture needs matplotlib, which is not installed.\nInstall it with: {sys.executable} -m pip install matplotlib",
            ExitCode.INVALID_CONFIG,
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: str) -> None:
    """Write a picture. Raises StartupRefused when the file cannot be written."""
    target = user_path(path)
    try:
        figure.savefig(target, dpi=_DPI, format="png")
    except OSError as error:
        raise StartupRefused(f"{target} cannot be written: {error.strerror}.", ExitCode.INVALID_CONFIG) from error


def heat_maps(
    matrices: Mapping[str, Sequence[Sequence[float | None]]], names: Mapping[str, Sequence[str]], path: str
) -> None:
    """One square for each title: 1 is full agreement, grey where nothing was compared."""
    count = max(1, len(matrices))
    figure = new_figure(4.6 * count, 4.4)
    row = figure.subplots(1, count, squeeze=False)[0]
    for axes, (title, cells) in zip(row, matrices.items(), strict=False):
        size = len(cells)
        values = np.array([[np.nan if cell is None else cell for cell in line] for line in cells], dtype=np.float64)
        image = axes.imshow(values.reshape(size, size), vmin=0.0, vmax=1.0, cmap="RdYlGn")
        axes.set_facecolor("#d0d0d0")
        axes.set_title(title)
        if size <= _MAX_LABELS:
            labels = [name[:_NAME_LENGTH] for name in names[title]]
            axes.set_xticks(range(size), labels, rotation=90, fontsize=7)
            axes.set_yticks(range(size), labels, fontsize=7)
        figure.colorbar(image, ax=axes, shrink=0.8, label="equal copies")
    save(figure, path)


class MinerLoss(NamedTuple):
    """One miner as CLASP sees it: its samples' mean loss, and its effect on them with the standard error, nats a token."""

    stage: int
    mean: float
    effect: float
    error: float
    is_flagged: bool


def miner_losses(panels: Sequence[tuple[str, Sequence[MinerLoss]]], path: str) -> None:
    """Mean losses above (the paper's estimator), effects with two standard errors below, by stage; what is flagged in red."""
    figure = new_figure(6.4 * len(panels), 6.2)
    columns = figure.subplots(2, len(panels), squeeze=False, sharex="col").T
    for (upper, lower), (title, miners) in zip(columns, panels, strict=True):
        places = np.arange(len(miners))
        colors = ["#c62828" if one.is_flagged else ("#1f6fb4", "#7fb0d8")[one.stage % 2] for one in miners]
        upper.bar(places, [one.mean for one in miners], color=colors, width=0.8)
        low, high = min(one.mean for one in miners), max(one.mean for one in miners)
        room = 0.2 * max(high - low, 1e-3)
        upper.set_ylim(low - room, high + room)
        upper.set_ylabel("mean loss of its samples, nats")
        upper.set_title(title)
        for at, one in enumerate(miners):
            lower.errorbar(at, one.effect, yerr=2.0 * one.error, fmt="o", markersize=4, color=colors[at])
        lower.axhline(0.0, color="#606060", linewidth=0.8)
        lower.set_ylabel("effect, nats, two standard errors")
        stages = sorted({one.stage for one in miners})
        middles = [float(np.mean([at for at, one in enumerate(miners) if one.stage == stage])) for stage in stages]
        lower.set_xticks(middles, [f"stage {stage}" for stage in stages])
        for axes in (upper, lower):
            axes.grid(alpha=0.3, axis="y")
    save(figure, path)


def curves(axes: "Axes", lines: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, title: str) -> None:
    """A line for each name."""
    for name, points in lines.items():
        axes.plot([point[0] for point in points], [point[1] for point in points], marker="o", markersize=3, label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=7)


def bars(axes: "Axes", rows: Sequence[tuple[str, float, float]], *, x: str, title: str) -> None:
    """A bar with its error for each name, the first at the top."""
    places = range(len(rows), 0, -1)
    axes.barh(places, [row[1] for row in rows], xerr=[row[2] for row in rows])
    axes.set_yticks(places, [row[0] for row in rows], fontsize=8)
    axes.set_xlabel(x)
    axes.set_title(title)
    axes.grid(alpha=0.3, axis="x")

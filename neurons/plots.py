"""Pictures for people, as PNG files. Matplotlib is an extra: nothing else needs it, so it is imported when one is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from neurons.exit_codes import ExitCode
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
            "a picture needs matplotlib, which is not installed.\nInstall it with: pip install 'strata[plots]'",
            ExitCode.INVALID_CONFIG,
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: str) -> None:
    """Write a picture. Raises StartupRefused when the file cannot be written."""
    target = Path(path).expanduser()
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

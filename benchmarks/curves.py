"""Pictures of benchmarks: some panels of curves on logarithmic axes."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import matplotlib as mpl
from timing import write_bytes

mpl.use("agg")
import matplotlib.pyplot as plt


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        xlabel: what varies.
        ylabel: what was measured.
        curves: name -> points.
    """

    xlabel: str
    ylabel: str
    curves: dict[str, list[tuple[float, float]]]


def draw(path: Path, panels: list[Panel]) -> None:
    """Writes a PNG file."""
    figure, row = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), layout="constrained", squeeze=False)
    for axes, panel in zip(row[0], panels, strict=True):
        for name, points in panel.curves.items():
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=140, format="png")
    plt.close(figure)
    write_bytes(path, buffer.getvalue())

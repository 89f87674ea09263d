"""The picture: the time over the floor against the size, a line for each system."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from PIL import Image

from benchmarks.speed.contenders import CONTENDERS, FLOOR_NAME
from benchmarks.speed.results import Key, Results
from benchmarks.speed.tasks import WAYS, said

__all__ = ["draw"]

# By system the colour, by backend the stroke: the eight of Okabe and Ito, which differ for every eye.
_COLOURS = {
    "gradmesh": "#0072B2",
    "torch.distributed": "#000000",
    "torch.distributed.nn.functional": "#E69F00",
    "functional collectives": "#009E73",
    "spmd_types": "#CC79A7",
    "DTensor": "#56B4E9",
    "MPI": "#D55E00",
}
_STROKES = {"shm": "-", "gloo": "--", "threads": ":", "MPI": "-"}


def draw(results: Results, path: Path) -> None:
    """Write the picture, as PNG: a row for each verb, a column for each way and number of ranks."""
    columns = [(ranks, way) for ranks in results.ranks for way in WAYS]
    rows = results.verbs
    figure = Figure(figsize=(1 + 3.6 * len(columns), 1.6 + 2.6 * len(rows)), dpi=110, layout="constrained")
    figure.suptitle("Time over the floor (the copies and sums that cannot be avoided)", fontsize=13)
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    lines: dict[str, Line2D] = {}
    for verb, across in zip(rows, grid, strict=True):
        for (ranks, way), axes in zip(columns, across, strict=True):
            _plot(axes, results, Key(ranks, verb, way, 0), lines)
    for axes in grid[-1]:
        axes.set_xlabel("bytes a rank")
    for axes in grid[:, 0]:
        axes.set_ylabel("times the floor")
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower center",
        ncols=len(columns),
        frameon=False,
        handlelength=3,
    )
    figure.savefig(path, format="png")
    # Few colours are in it, and a quarter of the bytes is enough for them.
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def _plot(axes: Axes, results: Results, at: Key, lines: dict[str, Line2D]) -> None:
    for name in results.contenders:
        found = [(size, results.ratio(at._replace(size=size), name, FLOOR_NAME)) for size in results.sizes]
        points = [(size, ratio) for size, ratio in found if ratio is not None]
        if name == FLOOR_NAME or not points:
            continue
        contender = CONTENDERS[name]
        (line,) = axes.plot(
            *zip(*points, strict=True),
            color=_COLOURS.get(contender.system, "grey"),
            linestyle=_STROKES.get(contender.backend, "-"),
            linewidth=2.4 if (contender.system, contender.backend) == ("gradmesh", "shm") else 1.3,
            marker=".",
        )
        lines.setdefault(name, line)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(results.sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: said(round(size))))
    axes.xaxis.set_tick_params(which="major", labelsize=7)
    axes.set_title(f"{at.verb} {at.way}, {at.ranks} ranks", fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

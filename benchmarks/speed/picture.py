"""The chart: the time over the floor against the size, a line for each system."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from benchmarks.speed.contenders import CONTENDERS, FLOOR_NAME
from benchmarks.speed.results import Key, Results
from benchmarks.speed.tasks import WAYS, said
from tools.charts import WIDTH, save

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
_STROKES = {"shm": "-", "gloo": "--", "threads": ":", "mpi4py": "-.", "MPI": "-"}


def draw(results: Results, path: Path) -> None:
    """Write the chart, as SVG: a row for each verb, a column for each way, at the largest number of ranks."""
    ranks, rows = max(results.ranks), results.verbs
    figure = Figure(figsize=(WIDTH, 2.2 + 1.45 * len(rows)), layout="constrained")
    title = f"Time of a call on {ranks} ranks, over the floor"
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(len(rows), len(WAYS), squeeze=False, sharex=True, sharey=True)
    lines: dict[str, Line2D] = {}
    for verb, across in zip(rows, grid, strict=True):
        for way, axes in zip(WAYS, across, strict=True):
            _plot(axes, results, Key(ranks, verb, way, 0), lines)
    for axes in grid[-1]:
        axes.set_xlabel("bytes per rank", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("x floor", fontsize=9)
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower left",
        ncols=1 if len(lines) < 3 else 2,
        frameon=False,
        fontsize=8,
        handlelength=2,
        columnspacing=1,
    )
    save(figure, path, title)


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
            linewidth=2.2 if (contender.system, contender.backend) == ("gradmesh", "shm") else 1.1,
        )
        lines.setdefault(name, line)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(results.sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: said(round(size))))
    axes.xaxis.set_tick_params(which="major", labelsize=8, rotation=45)
    axes.yaxis.set_tick_params(which="major", labelsize=8)
    axes.set_title(f"{at.verb} {at.way}", fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

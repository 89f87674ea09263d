"""How the bytes sent grow: with a plan like the boundary of the parts, with a whole gather like the nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gradmesh.nn.graph import by_space
from tools.charts import WIDTH, save
from tools.graphs.geometry import SHAPES, nearest

NODES = (2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
_BOUNDARY = {"slab": 1 / 2, "bulk": 2 / 3}
_COLOURS = {4: "#0072B2", 16: "#D55E00"}


@dataclass(frozen=True)
class Grown:
    """Bytes that all ranks send in one exchange, by the number of nodes."""

    shape: str  # of the cell
    ranks: int  # how many there are
    plan: dict[int, int]  # bytes by the plan
    gather: dict[int, int]  # bytes of a whole gather


def rows_needed(edges: Tensor, owner: Tensor) -> int:
    """The rows that ranks receive: distinct pairs of a rank and another rank's node with an edge to one of its own."""
    ranks, sources = owner[edges[1]], edges[0]
    crossing = ranks != owner[sources]
    return int((ranks[crossing] * len(owner) + sources[crossing]).unique().numel())


def grown(nodes: Sequence[int], neighbours: int, row_bytes: int, ranks: Sequence[int]) -> list[Grown]:
    """Bytes sent for each shape and number of ranks, with partitions by space."""
    found = [Grown(shape, count, {}, {}) for shape in SHAPES for count in ranks]
    for shape, make in SHAPES.items():
        for size in nodes:
            points, cell = make(size)
            edges, _ = nearest(points, cell, neighbours)
            for each in found:
                if each.shape == shape:
                    owner = by_space(points, each.ranks, cell=cell)
                    each.plan[size] = rows_needed(edges, owner) * row_bytes
                    each.gather[size] = size * (each.ranks - 1) * row_bytes
    return found


def exponent(amounts: dict[int, int], least: int = 0) -> float:
    """The power of the number of nodes that the amounts grow with: the slope of a line through their logarithms.

    >>> round(exponent({10: 100, 100: 10_000, 1000: 1_000_000}), 6)
    2.0
    """
    points = [(math.log(size), math.log(amount)) for size, amount in amounts.items() if size >= least]
    middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    across = sum((x - middle_x) * (y - middle_y) for x, y in points)
    slope: float = across / sum((x - middle_x) ** 2 for x, _ in points)
    return slope


def draw(found: Sequence[Grown], path: Path, least: int) -> None:
    """Write the picture: a panel for each shape, both axes logarithmic, with the fitted lines."""
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(each.shape for each in found))
    figure = Figure(figsize=(WIDTH, 3.6 * len(shapes)), layout="constrained")
    panels = figure.subplots(len(shapes), 1, sharex=True, squeeze=False)[:, 0]
    for axes, shape in zip(panels, shapes, strict=True):
        for each in found:
            if each.shape != shape:
                continue
            colour = _COLOURS.get(each.ranks, "#009E73")
            slope = exponent(each.plan, least)
            sizes = list(each.plan)
            axes.loglog(
                sizes,
                list(each.gather.values()),
                "--",
                color=colour,
                alpha=0.6,
                label=f"{each.ranks} ranks, whole gather",
            )
            axes.loglog(sizes, list(each.plan.values()), "o", color=colour)
            last = sizes[-1]
            axes.loglog(
                sizes,
                [each.plan[last] * (size / last) ** slope for size in sizes],
                color=colour,
                label=f"{each.ranks} ranks, plan: nodes to the {slope:.2f}",
            )
        axes.set_title(
            f"{shape}: the boundary grows by the power {_BOUNDARY[shape]:.2f}", loc="left", fontsize=10
        )
        axes.set_ylabel("bytes of an exchange, all ranks", fontsize=9)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("nodes", fontsize=9)
    save(figure, path, "Bytes of an exchange over the number of nodes, by plan and by whole gather")

"""The bytes of an exchange by the plan and of a whole gather, as they are counted where they are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_space
from gradmesh.verify import simulate, timeline
from gradmesh.verify.simulator.trace import Events
from tools.charts import WIDTH, save
from tools.graphs.geometry import SHAPES, nearest
from tools.graphs.network import Crystal

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


_VERBS = {"plan": "neighbor_all_to_all", "gather": ("all_gather", "reduce_scatter")}


@dataclass(frozen=True)
class Sent:
    """What a rank sent."""

    rows: int  # the rows that others need of it
    remote: int  # the rows that it needs of others
    row_bytes: int  # the size of a row
    plan: tuple[int, ...]  # bytes of an exchange, forward, backward, and backward of these both
    gather: tuple[int, ...]  # bytes of a whole gather, forward and backward

    @property
    def expected(self) -> tuple[int, ...]:
        """Bytes of an exchange by its rows: own rows there, and the gradients of the remote ones back."""
        own, back = self.rows * self.row_bytes, self.remote * self.row_bytes
        return own, back, own + back


def counted(graph: Crystal, owner: Tensor, ranks: int, width: int, backend: str) -> list[Sent]:
    """What each rank sends of rows of float64.

    On threads it is counted from the tensors that a rank hands to each other in its process group, on other backends
    from the lengths that it tells its carrier.
    """
    args = (graph.edges, owner, width)
    if backend == "threads":
        run = simulate(_exchanges, ranks, args=args)
        return [_sent(run.events.select(rank=rank), *each) for rank, each in enumerate(run.results)]
    found = gm.launch(_watched, ranks, backend=backend, args=args)
    return [_sent(events, *each) for events, *each in found]


def _exchanges(edges: Tensor, owner: Tensor, width: int) -> tuple[int, int, int]:
    plan = GraphPlan(edges, owner)
    draw = torch.Generator().manual_seed(gm.rank())
    x = torch.randn(len(plan.own), width, dtype=torch.float64, generator=draw).requires_grad_()
    (slope,) = torch.autograd.grad((plan.exchange(x) ** 3).sum(), x, create_graph=True)
    torch.autograd.grad((slope**2).sum() * (1 + gm.rank()), x)
    torch.autograd.grad((plan.gather(x) ** 2).sum(), x)
    return plan.rows_sent, len(plan.remote), width * x.itemsize


def _watched(edges: Tensor, owner: Tensor, width: int) -> tuple[Events, int, int, int]:
    with timeline() as line:
        found = _exchanges(edges, owner, width)
    return line.events, *found


def _sent(events: Events, rows: int, remote: int, row_bytes: int) -> Sent:
    starts = [place for place, event in enumerate(events) if event.verb == _VERBS["plan"]]
    forward, backward, *second = [event.sent for event in events if event.verb == _VERBS["plan"]]
    # What comes before is the plan being made.
    gather = [event.sent for event in list(events)[starts[0] :] if event.verb in _VERBS["gather"]]
    return Sent(rows, remote, row_bytes, (forward, backward, sum(second)), tuple(gather))

"""Points in a periodic cell, and the nearest of each."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tools.graphs.network import Crystal

_LAYERS = 10


def slab(nodes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points at random in a flat cell that is periodic in all directions, one to each unit of volume."""
    side = (nodes / _LAYERS) ** 0.5
    return _filled(nodes, (side, side, float(_LAYERS)), seed)


def bulk(nodes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same in a cube."""
    return _filled(nodes, (nodes ** (1 / 3),) * 3, seed)


SHAPES = {"slab": slab, "bulk": bulk}
"""The cells by name."""


def _filled(nodes: int, sides: tuple[float, float, float], seed: int) -> tuple[Tensor, Tensor]:
    cell = torch.diag(torch.tensor(sides, dtype=torch.float64))
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(nodes, 3, dtype=torch.float64, generator=draw) @ cell, cell


def crystal(points: Tensor, cell: Tensor, neighbours: int) -> Crystal:
    """Points with edges from the nearest of each."""
    edges, shifts = nearest(points, cell, neighbours)
    return Crystal(points, cell, edges, shifts)


def nearest(
    points: Tensor, cell: Tensor, neighbours: int, around: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For each point edges from the nearest others: not symmetric, as nearness in number is not.

    With `around`, for these points alone, and for all within reach of them.
    """
    sides = cell.diagonal()
    # The side of a ball with some four times as many points.
    reach = (neighbours * float(sides.prod()) / len(points)) ** (1 / 3)
    boxes = (sides / reach).floor().long().clamp(min=3)
    steps = sides / boxes
    place = (points / steps).floor().long() % boxes

    def beside(places: Tensor, step: tuple[int, ...]) -> Tensor:
        moved = (places + torch.tensor(step)) % boxes
        number: Tensor = (moved[:, 0] * boxes[1] + moved[:, 1]) * boxes[2] + moved[:, 2]
        return number

    directions = list(itertools.product((-1, 0, 1), repeat=3))
    box = beside(place, (0, 0, 0))
    held = torch.bincount(box, minlength=int(boxes.prod()))
    order = box.argsort(stable=True)
    within = torch.arange(len(points)) - (held.cumsum(0) - held)[box[order]]
    members = torch.full((len(held), int(held.max())), -1)
    members[box[order], within] = order
    wanted = torch.arange(len(points))
    if around is not None:
        near = torch.zeros(len(held), dtype=torch.bool)
        for step in directions:
            near[beside(place[around], step)] = True
        wanted = near[box].nonzero().squeeze(1)
    sources, shifts = [], []
    for targets in wanted.split(2000):
        candidates = torch.cat([members[beside(place[targets], step)] for step in directions], dim=1)
        apart = points[candidates].sub_(points[targets, None])
        shift = (apart / sides).round_().neg_()
        far = apart.add_(shift * sides).square_().sum(2).sqrt_()
        far[(candidates < 0) | (candidates == targets[:, None])] = torch.inf
        best = far.topk(neighbours, dim=1, largest=False)
        if float(best.values.max()) > float(steps.min()):
            raise ValueError("the cell is too small, or too unevenly filled, for that many neighbours")
        sources.append(candidates.gather(1, best.indices))
        shifts.append(shift.gather(1, best.indices[..., None].expand(-1, -1, 3)))
    edges = torch.stack((torch.cat(sources).reshape(-1), wanted.repeat_interleave(neighbours)))
    return edges, torch.cat(shifts).reshape(-1, 3)

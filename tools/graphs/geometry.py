"""Points in a periodic cell, and the nearest of each."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = ["nearest", "slab"]

_LAYERS = 10


def slab(nodes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points at random in a flat cell that is periodic in all directions, one to each unit of volume.

    Args:
        nodes: how many.
        seed: of the generator.

    Returns:
        The points, shape (nodes, 3), and the vectors of the cell as rows.
    """
    side = (nodes / _LAYERS) ** 0.5
    cell = torch.diag(torch.tensor([side, side, float(_LAYERS)], dtype=torch.float64))
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(nodes, 3, dtype=torch.float64, generator=draw) @ cell, cell


def nearest(points: Tensor, cell: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    """For each point edges from the nearest others: not symmetric, as nearness in number is not.

    Args:
        points: where they are.
        cell: a rectangular cell that is some times longer than neighbours are far.
        neighbours: how many edges end at each point.

    Returns:
        Sources and targets, shape (2, nodes * neighbours), and what is to be added to a source for its near image.
    """
    sides = cell.diagonal()
    reach = (neighbours * float(sides.prod()) / len(points)) ** (
        1 / 3
    )  # of a ball with some four times as many
    boxes = (sides / reach).floor().long().clamp(min=3)
    steps = sides / boxes
    place = (points / steps).floor().long() % boxes
    box = (place[:, 0] * boxes[1] + place[:, 1]) * boxes[2] + place[:, 2]
    held = torch.bincount(box, minlength=int(boxes.prod()))
    order = box.argsort(stable=True)
    within = torch.arange(len(points)) - (held.cumsum(0) - held)[box[order]]
    members = torch.full((len(held), int(held.max())), -1)
    members[box[order], within] = order
    around = [
        (moved[:, 0] * boxes[1] + moved[:, 1]) * boxes[2] + moved[:, 2]
        for step in itertools.product((-1, 0, 1), repeat=3)
        for moved in [(place + torch.tensor(step)) % boxes]
    ]
    sources, images = [], []
    for targets in torch.arange(len(points)).split(2000):
        candidates = torch.cat([members[each[targets]] for each in around], dim=1)
        image = -((points[candidates] - points[targets, None]) / sides).round() * sides
        far = ((points[candidates] + image - points[targets, None]) ** 2).sum(2).sqrt()
        far[(candidates < 0) | (candidates == targets[:, None])] = torch.inf
        best = far.topk(neighbours, dim=1, largest=False)
        if float(best.values.max()) > float(steps.min()):
            raise ValueError("the cell is too small, or too unevenly filled, for that many neighbours")
        sources.append(candidates.gather(1, best.indices))
        images.append(image.gather(1, best.indices[..., None].expand(-1, -1, 3)))
    edges = torch.stack(
        (torch.cat(sources).reshape(-1), torch.arange(len(points)).repeat_interleave(neighbours))
    )
    return edges, torch.cat(images).reshape(-1, 3)

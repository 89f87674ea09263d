"""What more negatives bring: halves of digits, found by each other, with one rank's negatives or all ranks'."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gradmesh_demos.clip import HELD_OUT, Images, Towers, recall
from torch import Tensor

import gradmesh as gm
from tools.contrastive.local import local_loss

RANKS = 4
CHUNK = 16
"""The samples that an encoder is given at once: those of a rank in the smallest batch."""


@dataclass(frozen=True)
class Way:
    """How to train."""

    name: str  # in words
    batch: int  # how many samples on all ranks
    gathered: bool  # whether the other ranks' samples are negatives too
    cached: bool = False  # whether encoders are given `CHUNK` samples at once


WAYS = (
    Way("own negatives", 64, gathered=False),
    Way("all ranks' negatives", 64, gathered=True),
    Way("all ranks' negatives, cached gradients", 512, gathered=True, cached=True),
)


def _loss(way: Way, left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """This rank's term of the mean over all samples."""
    if not way.gathered:
        return local_loss(left, right, scale, gathered=False) / gm.world_size()
    return gm.nn.clip_loss(left, right, scale, sizes=None)


def _trained(way: Way, model: Towers, images: Images, steps: int, seed: int) -> tuple[float, float]:
    """The recall of the held-out halves, and the last loss, on this rank; all ranks have the same parameters."""
    model = copy.deepcopy(model)
    left, right = images.training
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    numbers = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = torch.randperm(len(left), generator=numbers)[: way.batch]
        mine = batch[gm.axis().slice(way.batch)]
        optimizer.zero_grad()
        if way.cached:
            loss = gm.nn.cached_gradients(model, (left[mine], right[mine]), lambda *z: _loss(way, *z), CHUNK)
        else:
            loss = _loss(way, *model(left[mine], right[mine]))
            loss.backward()
        grads = gm.all_reduce([p.grad for p in model.parameters()], dst=gm.I)  # each rank has a share
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
    return recall(model, images.held_out), float(loss.detach())


def recalls(seeds: Sequence[int], steps: int) -> dict[str, list[float]]:
    """The recall of each way and seed."""
    found: dict[str, list[float]] = {}
    with gm.Ranks(RANKS, backend="threads", timeout=600) as ranks:
        for seed in seeds:
            images = Images.load(seed)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = Towers()
            for way in WAYS:
                (value, _), *_ = ranks.run(_trained, way, model, images, steps, seed)
                found.setdefault(f"{way.name}, batch {way.batch}", []).append(value)
    return found


def recall_table(found: dict[str, list[float]], steps: int) -> str:
    """The table, in Markdown."""
    lines = [
        f"{RANKS} ranks, {steps} steps of Adam. Of {HELD_OUT} held-out halves, the part whose other half is the most "
        "similar of all, in the mean of both directions; the spread is that of the seeds, highest less lowest:",
        "",
        f"| loss | {' | '.join(f'seed {n}' for n in range(len(next(iter(found.values())))))} | mean | spread |",
        "| --- |" + " ---: |" * (len(next(iter(found.values()))) + 2),
    ]
    for name, values in found.items():
        each = " | ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {name} | {each} | {statistics.mean(values):.3f} | {max(values) - min(values):.3f} |")
    return "\n".join(lines)

"""The time and the memory of a step of a loss, forward and backward, on ranks that are processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

import gradmesh as gm
from benchmarks.peak import peak
from tools.contrastive.local import local_loss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

WAYS: dict[str, Loss] = {
    "local logits": local_loss,
    'gather="all"': lambda left, right, scale: gm.nn.clip_loss(left, right, scale),
    'gather="ring"': lambda left, right, scale: gm.nn.clip_loss(left, right, scale, gather="ring"),
}

MIB = 2**20


@dataclass(frozen=True)
class Step:
    """What a step took on this rank."""

    seconds: float  # how long
    mib: float  # the most memory of the process above what it had before, with the inputs in it


def steps(ways: Sequence[str], samples: int, features: int, repeats: int) -> dict[str, list[Step]]:
    """Take steps of each way in turn, on each rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(gm.rank())
    rows = samples // gm.world_size()
    left, right = (
        normalize(torch.randn(rows, features, generator=generator), dim=1).requires_grad_() for _ in range(2)
    )
    scale = torch.tensor(14.0, requires_grad=True)
    found: dict[str, list[Step]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            left.grad = right.grad = scale.grad = None
            seconds: list[float] = []
            most = peak(partial(_step, WAYS[way], (left, right, scale), seconds))
            found[way].append(Step(seconds[0], most / MIB))
    return found


def _step(loss: Loss, leaves: tuple[Tensor, Tensor, Tensor], seconds: list[float]) -> None:
    gm.barrier()
    started = time.perf_counter()
    loss(*leaves).backward()
    gm.barrier()
    seconds.append(time.perf_counter() - started)

"""The time and the memory of a step of a loss, forward and backward, on ranks that are processes."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

import gradmesh as gm
from tools.contrastive.local import local_loss

__all__ = ["WAYS", "Step", "steps"]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

WAYS: dict[str, Loss] = {
    "local logits": local_loss,
    'gather="all"': lambda left, right, scale: gm.nn.clip_loss(left, right, scale),
    'gather="ring"': lambda left, right, scale: gm.nn.clip_loss(left, right, scale, gather="ring"),
}

MIB = 2**20


@dataclass(frozen=True)
class Step:
    """What a step took on this rank.

    Attributes:
        seconds: how long.
        mib: the most memory of the process above what it had before, with the inputs in it.
    """

    seconds: float
    mib: float


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def _given_back() -> None:
    """Give free memory back, so that what a step takes is seen whole."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def steps(ways: Sequence[str], samples: int, features: int, repeats: int) -> dict[str, list[Step]]:
    """Take steps of each way in turn, on each rank.

    Args:
        ways: which of `WAYS`.
        samples: how many on all ranks.
        features: of an embedding.
        repeats: how many steps of each.
    """
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
            _given_back()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before = _status("VmRSS")
            gm.barrier()
            begun = time.perf_counter()
            WAYS[way](left, right, scale).backward()
            gm.barrier()
            seconds = time.perf_counter() - begun
            found[way].append(Step(seconds, (_status("VmHWM") - before) / MIB))
    return found

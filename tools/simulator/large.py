"""Worlds that are too large for this machine: a training step of 1,024 ranks played by one, and one of 256 by all."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import gradmesh as gm
from gradmesh.verify import CostModel, Link, Simulation, simulate

MODEL = CostModel({"dp": Link(20, 25), "tp": Link(3, 300)})
"""Eight devices behind one switch, and a network between such nodes."""

_ROWS, _WIDTH, _LAYERS = 64, 256, 2


def tensor_parallel_step() -> None:
    """Forward and backward of a tensor-parallel block on the axis `tp`, with its gradients summed over `dp`."""
    tp, dp = gm.axis("tp"), gm.axis("dp")
    generator = torch.Generator().manual_seed(dp.rank)
    x = torch.randn(_ROWS, _WIDTH, generator=generator)
    weights = []
    for layer in range(_LAYERS):
        for shape in ((_WIDTH, 4 * _WIDTH // tp.size), (4 * _WIDTH // tp.size, _WIDTH)):
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(8 * layer + tp.rank))
            weights.append((drawn / _WIDTH).requires_grad_())
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        inside = functional.relu(gm.replicate(x, tp) @ gm.replicate(up, dp))
        x = x + gm.all_reduce(inside @ gm.replicate(down, dp), tp, dst=gm.I)
    x.square().mean().backward()


@dataclass(frozen=True)
class Predicted:
    """A step in a world of `dp` times `tp` ranks."""

    dp: int
    tp: int
    calls: int  # of one rank
    sent: dict[str, int]  # the bytes that a rank sends on each axis
    seconds: float  # communication by the model
    took: float  # how long it took to find out
    # whether calls, bytes and times are those of rank 0 in a simulation of all ranks; None: not asked
    checked: bool | None


def predicted(dp: int, tp: int, *, check: bool) -> Predicted:
    """Play one rank, and if asked all."""
    size, mesh = dp * tp, {"dp": dp, "tp": tp}
    started = time.perf_counter()
    run = simulate(tensor_parallel_step, size, mesh=mesh, only=0, model=MODEL, compute=0)
    took = time.perf_counter() - started
    same = None
    if check:
        whole = simulate(tensor_parallel_step, size, mesh=mesh, seed=0, model=MODEL, compute=0)
        same = _rows(run) == _rows(whole) and run.seconds == whole.seconds
    sent = {axis: sum(event.sent for event in run.events.select(axis=axis)) for axis in mesh}
    return Predicted(dp, tp, len(run.events), sent, run.seconds, took, same)


def _rows(run: Simulation[None]) -> list[tuple[object, ...]]:
    return [
        (e.op, e.verb, e.axis, e.payload, e.sent, e.phase, e.line, e.start, e.end)
        for e in run.events.select(rank=0)
    ]


def _contrast(rows: Tensor, weight: Tensor, first: int, every: int, gather: object = None) -> Tensor:
    features = functional.normalize(rows @ weight, dim=1)
    whole = gather(features) if callable(gather) else features
    labels = (torch.arange(len(rows)) + first + 1) % every
    return functional.cross_entropy(features @ whole.T / 0.3, labels, reduction="sum") / every


def _rows_of(rank: int) -> Tensor:
    return torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def _weight() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()


def _on_rank(size: int) -> Tensor:
    weight = _weight()
    rank = gm.rank()
    _contrast(_rows_of(rank), gm.replicate(weight), 2 * rank, 2 * size, gm.all_gather).backward()
    torch.optim.SGD([weight], lr=0.1).step()
    return weight.detach()


def whole_step(size: int) -> tuple[float, float]:
    """A contrastive training step on all ranks: how long it takes, and how far it is from that of one process."""
    started = time.perf_counter()
    run = simulate(_on_rank, size, args=(size,), seed=0)
    took = time.perf_counter() - started
    weight = _weight()
    _contrast(torch.cat([_rows_of(rank) for rank in range(size)]), weight, 0, 2 * size).backward()
    torch.optim.SGD([weight], lr=0.1).step()
    return took, max(float((result - weight.detach()).abs().max()) for result in run.results)

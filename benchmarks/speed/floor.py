"""The floor: the copies and sums that a rank cannot avoid, whatever carries them, on memory that is there already.

All processes do them at the same time, as they share the memory bus. n is a rank's part, W the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.speed.calls import Calls, Maker, Place, in_turn
from benchmarks.systems.cases import ROOT

__all__ = ["FLOOR"]

_Way = Callable[[Place, Tensor], Callable[[], Tensor]]


def gather(at: Place, x: Tensor) -> Callable[[], Tensor]:
    """W copies of the n that every rank has: reads W n, writes W n."""
    out = x.new_empty(at.task.ranks, x.numel())
    parts = list(out)

    def call() -> Tensor:
        for part in parts:
            part.copy_(x)
        return out.view(-1)

    return call


def fold(at: Place, x: Tensor) -> Callable[[], Tensor]:
    """The sum of the ranks' W pieces of n: reads W n, writes n."""
    pieces = x.view(at.task.ranks, -1)
    out, (first, *others) = x.new_empty(pieces.shape[1]), pieces.unbind()
    if len(others) == 1:  # torch.sum takes half as long again
        return lambda: torch.add(first, others[0], out=out)
    return lambda: torch.sum(pieces, 0, out=out)


def total(at: Place, x: Tensor) -> Callable[[], Tensor]:
    """The sum of W shares of n / W, then a copy of each rank's sum: reads 2 n, writes n / W + n."""
    share, put = _shared(at, x)
    gathered = gather(at, put)

    def call() -> Tensor:
        share()
        return gathered()

    return call


def copy(_: Place, x: Tensor) -> Callable[[], Tensor]:
    """One copy: reads n, writes n."""
    out = torch.empty_like(x)
    return lambda: out.copy_(x)


def at_root(at: Place, x: Tensor) -> Callable[[], Tensor]:
    """The sum of W shares of n / W, which the ranks take in parallel, and at the root a copy of each rank's sum."""
    return total(at, x) if at.rank == ROOT else _shared(at, x)[0]


def _shared(at: Place, x: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
    """The sum of W shares of the operand, of an element at least, and where it is put."""
    even = x[: x.numel() // at.task.ranks * at.task.ranks]
    share = fold(at, even if even.numel() else x.repeat(at.task.ranks))
    return share, share()


def _pair(forward: _Way, backward: _Way) -> Maker:
    def make(at: Place) -> Calls:
        return in_turn(forward(at, at.x), backward(at, at.cotangent))

    return make


FLOOR = {
    "all_gather": _pair(gather, fold),
    "reduce_scatter": _pair(fold, gather),
    "all_reduce": _pair(total, total),
    "all_to_all": _pair(copy, copy),
    "broadcast": _pair(copy, at_root),
    "shift": _pair(copy, copy),
}

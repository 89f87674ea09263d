"""torch.distributed itself: the collective into memory that is there already, and as backward its adjoint."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from gradmesh.bench.cases import ROOT
from gradmesh.bench.speed.calls import Calls, Maker, Place, in_turn

__all__ = ["RAW"]

# torch 2.13 renamed both; the old names only warn there.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gather(at: Place, x: Tensor) -> Callable[[], Tensor]:
    out = x.new_empty(x.numel() * at.task.ranks)

    def call() -> Tensor:
        _gather_single(out, x, group=at.group)
        return out

    return call


def _scatter(at: Place, x: Tensor) -> Callable[[], Tensor]:
    out = x.new_empty(x.numel() // at.task.ranks)

    def call() -> Tensor:
        _scatter_single(out, x, group=at.group)
        return out

    return call


def _all_reduce(at: Place, x: Tensor) -> Callable[[], Tensor]:
    """In place, as it is in torch.distributed: the values grow from call to call."""
    out = x.clone()

    def call() -> Tensor:
        dist.all_reduce(out, group=at.group)
        return out

    return call


def _all_to_all(at: Place, x: Tensor) -> Callable[[], Tensor]:
    out = x.new_empty(x.numel())

    def call() -> Tensor:
        dist.all_to_all_single(out, x, group=at.group)
        return out

    return call


def _broadcast(at: Place, x: Tensor) -> Callable[[], Tensor]:
    out = x.clone()

    def call() -> Tensor:
        dist.broadcast(out, group_src=ROOT, group=at.group)
        return out

    return call


def _reduce(at: Place, x: Tensor) -> Callable[[], Tensor]:
    out = x.clone()

    def call() -> Tensor:
        dist.reduce(out, group_dst=ROOT, group=at.group)
        return out

    return call


def _shift(at: Place, x: Tensor, offset: int) -> Callable[[], Tensor]:
    out, ranks = x.new_empty(x.numel()), at.task.ranks
    messages = [
        dist.P2POp(dist.isend, x, group=at.group, group_peer=(at.rank + offset) % ranks),
        dist.P2POp(dist.irecv, out, group=at.group, group_peer=(at.rank - offset) % ranks),
    ]

    def call() -> Tensor:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return out

    return call


def _pair(
    forward: Callable[[Place, Tensor], Callable[[], Tensor]],
    backward: Callable[[Place, Tensor], Callable[[], Tensor]],
) -> Maker:
    def make(at: Place) -> Calls:
        return in_turn(forward(at, at.x), backward(at, at.cotangent))

    return make


RAW = {
    "all_gather": _pair(_gather, _scatter),
    "reduce_scatter": _pair(_scatter, _gather),
    "all_reduce": _pair(_all_reduce, _all_reduce),
    "all_to_all": _pair(_all_to_all, _all_to_all),
    "broadcast": _pair(_broadcast, _reduce),
    "shift": _pair(lambda at, x: _shift(at, x, 1), lambda at, x: _shift(at, x, -1)),
}

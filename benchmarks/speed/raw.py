"""torch.distributed itself: the collective into memory that is there already, and as backward its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.speed.calls import Calls, Maker, Place, in_turn
from benchmarks.systems.cases import ROOT
from gradmesh import bench

__all__ = ["RAW"]


def _pair(
    forward: Callable[..., bench.RawCall], backward: Callable[..., bench.RawCall], **both: int
) -> Maker:
    def make(at: Place) -> Calls:
        return in_turn(forward(at.x, at.group, **both), backward(at.cotangent, at.group, **both))

    return make


RAW = {
    "all_gather": _pair(bench.raw_all_gather, bench.raw_reduce_scatter),
    "reduce_scatter": _pair(bench.raw_reduce_scatter, bench.raw_all_gather),
    "all_reduce": _pair(bench.raw_all_reduce, bench.raw_all_reduce),
    "all_to_all": _pair(bench.raw_all_to_all, bench.raw_all_to_all),
    "broadcast": _pair(bench.raw_broadcast, bench.raw_reduce, root=ROOT),
    "shift": _pair(bench.raw_shift, partial(bench.raw_shift, offset=-1)),
}

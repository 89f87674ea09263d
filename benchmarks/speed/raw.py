"""torch.distributed itself: the collective into memory that is there already, and as backward its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.speed.calls import Calls, Maker, Place, in_turn
from benchmarks.systems.cases import ROOT
from gradmesh.bench import raw

__all__ = ["RAW"]


def _pair(forward: Callable[..., raw.Call], backward: Callable[..., raw.Call], **both: int) -> Maker:
    def make(at: Place) -> Calls:
        return in_turn(forward(at.x, at.group, **both), backward(at.cotangent, at.group, **both))

    return make


RAW = {
    "all_gather": _pair(raw.all_gather, raw.reduce_scatter),
    "reduce_scatter": _pair(raw.reduce_scatter, raw.all_gather),
    "all_reduce": _pair(raw.all_reduce, raw.all_reduce),
    "all_to_all": _pair(raw.all_to_all, raw.all_to_all),
    "broadcast": _pair(raw.broadcast, raw.reduce, root=ROOT),
    "shift": _pair(raw.shift, partial(raw.shift, offset=-1)),
}

"""How bytes travel: the carrier of an axis, and which one it is.

An op says what moves (`gradmesh.ops`), autograd says in which direction (`gradmesh.autograd`), and a carrier moves it:

* `Carrier` (carrier.py): the motions that ops are made of, stated once. The seam.
* `TorchGroup`: any process group of torch.distributed.
* `OwnGroupCarrier`: groups of gradmesh's own backends, called directly.
* `Alone`: an axis of one rank, on which nothing travels.
* `Functional`: functional collectives, which a compiler can see and move.

`carrier` chooses among them, here and nowhere else. A new transport is a subclass of `Carrier` in a file of its own,
and a line in `CARRIERS` with the class of process group that it serves. What is to stand around every carrier for a
while, such as a slower wire, is put there by `surrounded` (around.py).
"""

from __future__ import annotations

import torch.distributed as dist

from gradmesh._torch import compiling
from gradmesh.axis import Axis
from gradmesh.backends.process_group import kept_by
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.backends.threads.group import ThreadsGroup
from gradmesh.wire.alone import Alone, TracedAlone
from gradmesh.wire.around import AROUND, surrounded
from gradmesh.wire.carrier import Carrier
from gradmesh.wire.claims import CallClaim
from gradmesh.wire.courier import carried
from gradmesh.wire.functional import Functional
from gradmesh.wire.own_group import OwnGroupCarrier
from gradmesh.wire.torch_group import TorchGroup

__all__ = ["CARRIERS", "Carrier", "carrier", "compiling", "kept_by", "surrounded", "traced_carrier"]

CARRIERS: dict[type[dist.ProcessGroup], type[Carrier]] = {
    ShmGroup: OwnGroupCarrier,
    ThreadsGroup: OwnGroupCarrier,
}
"""The carrier for each class of process group; `TorchGroup` for any other."""


def carrier(axis: Axis, claim: CallClaim | None = None) -> Carrier:
    """The carrier for one op.

    Args:
        axis: the ranks that take part.
        claim: what this rank says about the call.
    """
    if axis.size == 1:
        return Alone(axis)
    axis = carried(axis)
    found = CARRIERS.get(type(axis.group), TorchGroup)(axis, claim)
    for wrap in AROUND.wraps:
        found = wrap(found)
    return found


def traced_carrier(axis: Axis) -> Carrier:
    """The carrier for one op whose motions a compiler sees."""
    return TracedAlone(axis) if axis.size == 1 else Functional(axis)

"""Transports: how the bytes of a collective are sent, and which transport an axis uses.

An op defines what is sent (`gradmesh.ops`), autograd the direction (`gradmesh.autograd`), and a transport sends it:

* `Transport` (`gradmesh.ops.transport`): the abstract primitives that ops are made of.
* `TorchGroup`: any process group of torch.distributed.
* `OwnGroupTransport`: groups of gradmesh's own backends, called directly.
* `LocalTransport`: an axis of one rank, where nothing is sent.
* `Functional`: functional collectives, which a compiler can see and reorder.

Only `transport` chooses among them. A new transport is a subclass of `Transport` in a file of its own
and a line in `TRANSPORTS` with the class of process group that it serves. An `Instrument` (gradmesh.runtime.state)
may wrap every transport of a rank for a while, for delay injection or recording. `run.apply` runs
an op over its transport.
"""

from __future__ import annotations

import torch.distributed as dist

from gradmesh._torch import compiling
from gradmesh.backends.own_group import OwnGroup, group_cache
from gradmesh.ops.transport import Transport
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import INSTALLED, instruments
from gradmesh.transport.call_checks import OpCallCheck, calls_of
from gradmesh.transport.comm_thread import AsyncAxis
from gradmesh.transport.process_group import (
    Functional,
    LocalTransport,
    OwnGroupTransport,
    TorchGroup,
    TracedLocalTransport,
)

__all__ = [
    "TRANSPORTS",
    "Transport",
    "compiling",
    "group_cache",
    "traced_transport",
    "transport",
]

TRANSPORTS: dict[type[dist.ProcessGroup], type[Transport]] = {}
"""The transport for a class of process group. Others get `OwnGroupTransport` if they are gradmesh's own, else
`TorchGroup`."""


def transport(axis: Axis, call_check: OpCallCheck | None = None) -> Transport:
    """The transport for one op; without a check of its call nothing is compared."""
    if axis.size == 1:
        return LocalTransport(axis)
    if type(axis) is AsyncAxis:
        axis = axis.comm_thread.axis
    if call_check is not None:
        call_check.calls = calls_of(axis.group)
    kind = type(axis.group)
    own = OwnGroupTransport if issubclass(kind, OwnGroup) else TorchGroup
    found = TRANSPORTS.get(kind, own)(axis, call_check)
    if INSTALLED[0]:
        for each in instruments():
            found = each.sending(found)
    return found


def traced_transport(axis: Axis) -> Transport:
    """The transport for one op inside a compiled program."""
    return TracedLocalTransport(axis) if axis.size == 1 else Functional(axis)

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

from gradmesh._torch import compiling
from gradmesh.backends.own_group import group_cache
from gradmesh.ops.transport import Transport
from gradmesh.transport.process_group import TRANSPORTS, traced_transport, transport

__all__ = ["TRANSPORTS", "Transport", "compiling", "group_cache", "traced_transport", "transport"]

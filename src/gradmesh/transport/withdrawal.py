"""Notify the other ranks when this rank aborts its call of a verb."""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh._torch import is_fake
from gradmesh._util.structure import Packed
from gradmesh.runtime.checking import check_level
from gradmesh.runtime.mesh import Axis
from gradmesh.transport import compiling, group_cache, transport
from gradmesh.transport.call_checks import call_check
from gradmesh.transport.comm_thread import after_pending

_SILENT = frozenset({"convert", "recv", "replicate", "send", "shard"})
"""The verbs that do not communicate with all ranks of the axis."""


def withdraw(verb: str, axis: Axis, x: object, error: Exception, peer: int | None = None) -> None:
    """Notify the other ranks that this rank aborts its call of a verb, so that they raise instead of waiting.

    Where the ranks compare their calls, this is this rank's part of the comparison, and it waits for theirs. For a
    point-to-point message only the receiver is notified; a rank that aborts a `recv` discards the message.

    Args:
        verb: the verb's name.
        axis: the ranks.
        x: the operand.
        error: why the call is aborted.
        peer: the other end of a point-to-point message.
    """
    if compiling() or axis.size == 1 or not on_cpu(x, axis):
        return
    if peer is not None:
        if peer not in range(axis.size) or peer == axis.rank:
            return
        if verb == "send":
            transport(axis).withdraw_message(
                peer, f"none, because send() raised on rank {axis.rank}: {str(error).splitlines()[0]}"
            )
        else:
            transport(axis).pass_over(peer)
    elif check_level() and verb not in _SILENT:
        words = f"{verb}, refused"
        after_pending(axis, lambda: transport(axis, call_check(verb, str(axis), words)).withdraw(error))


def on_cpu(x: object, axis: Axis) -> bool:
    """Whether the ranks compare a call with this operand."""
    given = x.flat if isinstance(x, Packed) else x
    if isinstance(given, Tensor):
        return given.is_cpu and not is_fake(given)
    return group_cache(axis.group) is not None or not torch.accelerator.is_available()

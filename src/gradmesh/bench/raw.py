"""torch.distributed's collectives, as calls without arguments into preallocated memory.

Each function takes this rank's 1-d operand and a group, and returns a call that returns the result. Collectives that
work in place (all_reduce, broadcast, reduce) work on a copy of the operand, which changes with every call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

__all__ = ["Call", "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter", "shift"]

Call = Callable[[], Tensor]
Group = dist.ProcessGroup | None

# torch 2.13 renamed both, and the old names warn there.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: Group = None) -> Call:
    """The concatenated operands of all ranks."""
    return _into(x.new_empty(x.numel() * dist.get_world_size(group)), _gather_single, x, group=group)


def reduce_scatter(x: Tensor, group: Group = None) -> Call:
    """This rank's part of the sum."""
    return _into(x.new_empty(x.numel() // dist.get_world_size(group)), _scatter_single, x, group=group)


def all_reduce(x: Tensor, group: Group = None) -> Call:
    """The sum."""
    return _into(x.clone(), dist.all_reduce, group=group)


def all_to_all(x: Tensor, group: Group = None) -> Call:
    """This rank's part of every operand."""
    return _into(x.new_empty(x.numel()), dist.all_to_all_single, x, group=group)


def broadcast(x: Tensor, group: Group = None, root: int = 0) -> Call:
    """The root's operand."""
    return _into(x.clone(), dist.broadcast, group_src=root, group=group)


def reduce(x: Tensor, group: Group = None, root: int = 0) -> Call:
    """The sum, at the root."""
    return _into(x.clone(), dist.reduce, group_dst=root, group=group)


def shift(x: Tensor, group: Group = None, offset: int = 1) -> Call:
    """The operand of the rank `offset` before."""
    out, rank, size = x.new_empty(x.numel()), dist.get_rank(group), dist.get_world_size(group)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + offset) % size)
    receive = dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - offset) % size)
    return _into(out, lambda _: [work.wait() for work in dist.batch_isend_irecv([send, receive])])


def _into(out: Tensor, collective: Callable[..., object], *operands: Tensor, **options: object) -> Call:
    move = partial(collective, out, *operands, **options)

    def call() -> Tensor:
        move()
        return out

    return call

"""Collectives that a compiler must neither drop nor move, as opaque ops.

In a ragged exchange and a reduction to a root some ranks receive nothing, and a compiler would drop the call there. So
under `torch.compile` these two go through ops that are known to have an ordered effect. They are not for use by hand:
they have no derivative of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import ordered_effect, resolve_group
from gradmesh.wire.torch_group import exchange_memory

__all__ = ["exchange", "reduce"]


@torch.library.custom_op("gradmesh::exchange", mutates_args=())
def exchange(flat: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    """Send `send[r]` elements to each rank r and receive `receive[r]` from it."""
    out = flat.new_empty(sum(receive))
    exchange_memory(out, flat, send, receive, resolve_group(group))
    return out


@exchange.register_fake
def _(flat: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:  # noqa: ARG001
    return flat.new_empty(sum(receive))


@torch.library.custom_op("gradmesh::reduce", mutates_args=())
def reduce(x: Tensor, root: int, group: str) -> Tensor:
    """Sum at the root; what the other ranks get is not defined."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(out, group_dst=root, group=resolve_group(group))
    return out


@reduce.register_fake
def _(x: Tensor, root: int, group: str) -> Tensor:  # noqa: ARG001
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


exchange = ordered_effect(exchange)
reduce = ordered_effect(reduce)

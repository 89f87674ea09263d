"""Collectives that a compiler must neither drop nor move, as opaque ops.

A compiler sees one rank's program. It drops a collective whose result that rank does not use, while the others
still run it. In a ragged exchange and a reduction to a root some ranks receive nothing, so under `torch.compile`
these two go through ops that are known to have an effect; all others are functional collectives, which a compiler
may move and bucket. These ops are not for use by hand: they have no derivative of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._torch import ordered_effect, resolve_group

__all__ = ["CARRIED", "exchange", "flat_memory", "reduce", "send_and_receive"]


# What every backend moves. Anything else (int16, float8, ...) travels as bytes.
CARRIED = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def flat_memory(x: Tensor) -> Tensor:
    """The memory of a dense tensor as a flat buffer of a dtype that travels."""
    flat = x if x.dim() == 1 else x.view(-1)
    return flat if flat.dtype in CARRIED else flat.view(torch.uint8)


def send_and_receive(
    out: Tensor, flat: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> None:
    """Exchange between flat buffers, whatever their dtype."""
    width = 1 if flat.dtype in CARRIED else flat.dtype.itemsize
    dist.all_to_all_single(
        flat_memory(out),
        flat_memory(flat),
        [n * width for n in receive],
        [n * width for n in send],
        group=group,
    )


@torch.library.custom_op("gradmesh::exchange", mutates_args=())
def exchange(flat: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    """Send `send[r]` elements to each rank r and receive `receive[r]` from it."""
    out = flat.new_empty(sum(receive))
    send_and_receive(out, flat, send, receive, resolve_group(group))
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

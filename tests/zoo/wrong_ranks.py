"""Functions that are right on equal parts of the whole world when all ranks go on, and not otherwise."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

import gradmesh as gm
from tests.zoo.program import wrong
from tests.zoo.raw import gathered, operand, own, rank, reduce_scattered, summed, world

COLLECTIVE = ("forward-mode-missing", "second-order-lost", "unused-output")
# What is true where backward is local: the gradient of an I result is whole, and that of such a gradient is a sum.
LOCAL = ("forward-mode-missing", "second-order-wrong")


def joined(x: Tensor) -> tuple[Tensor, list[int]]:
    """All ranks' rows, as many as each has, and how many that is."""
    sizes = [0] * world()
    dist.all_gather_object(sizes, len(x))
    padded = torch.zeros(max(sizes), *x.shape[1:], dtype=x.dtype)
    padded[: len(x)] = x.detach()
    parts = gathered(padded).chunk(world())
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]), sizes


@wrong("audit", "empty-part", "a reshape with -1, which no part without rows has", also=COLLECTIVE)
def gather_that_reshapes_to_minus_one(parts: list[int] | None = None) -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            whole, ctx.sizes = joined(x.reshape(len(x), -1))
            return whole.reshape(-1, *x.shape[1:])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(grad).split(ctx.sizes)[rank()].clone()

    return Gather.apply, (operand(parts[rank()] if parts else 3, 2),)


@wrong(
    "audit",
    "empty-part",
    "a rank without tokens leaves early, and the others in the collective",
    also=COLLECTIVE,
)
def gather_that_an_empty_rank_leaves(parts: list[int] | None = None) -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if not len(x):
                return x.clone()
            whole, ctx.sizes = joined(x)
            return whole

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if not len(grad):
                return grad.clone()
            return summed(grad).split(ctx.sizes)[rank()].clone()

    return Gather.apply, (operand(parts[rank()] if parts else 3, 2),)


@wrong(
    "audit",
    "uneven-parts",
    "graph-parallel gathers that recompute the sizes as ceil(n / W) in backward",
    also=(*LOCAL, "empty-part"),
)
def gather_that_takes_its_part_for_the_ceil_split(parts: list[int] | None = None) -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            sizes = [0] * world()
            dist.all_gather_object(sizes, len(x))
            padded = torch.zeros(max(sizes), *x.shape[1:], dtype=x.dtype)
            padded[: len(x)] = x
            ctx.rows = len(x)
            parts = gathered(padded).chunk(world())
            return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            part = -(-len(grad) // world())
            mine = grad[rank() * part : (rank() + 1) * part]
            back = torch.zeros(ctx.rows, *grad.shape[1:], dtype=grad.dtype)
            rows = min(ctx.rows, len(mine))
            return torch.cat([mine[:rows], back[rows:]])

    return Gather.apply, (operand(parts[rank()] if parts else 3, 2),)


@wrong(
    "audit",
    "uneven-parts",
    "receive buffers of this rank's size, although the ranks' sizes differ",
    also=(*COLLECTIVE, "empty-part"),
)
def gather_with_buffers_of_its_own_size(parts: list[int] | None = None) -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            sizes = [0] * world()
            dist.all_gather_object(sizes, len(x))
            rows = max(sizes)
            padded = torch.zeros(rows, *x.shape[1:], dtype=x.dtype)
            padded[: len(x)] = x
            ctx.rows = len(x)
            # Padding stays between the parts: the last rank's rows land where others' were asked for.
            return gathered(padded)[: sum(sizes)]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            whole = summed(grad)
            return whole.chunk(world())[rank()][: ctx.rows].clone()

    return Gather.apply, (operand(parts[rank()] if parts else 3, 2),)


@wrong(
    "audit",
    "unused-output",
    "a collective in backward, which only ranks that use the result run",
    also=("forward-mode-missing", "second-order-lost"),
)
def gather_whose_backward_waits_for_everyone() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad)

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "own-rank-assumed",
    "the part is cut by LOCAL_RANK, which is wrong on the second machine",
    also=LOCAL,
)
def gather_that_cuts_by_local_rank(local_rank: int | None = None) -> Any:
    local = rank() if local_rank is None else local_rank

    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.chunk(world())[local % world()].clone()

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit", "own-rank-assumed", "AllGatherGrad: the rank of the world where the group's is meant", also=LOCAL
)
def gather_that_cuts_by_the_world_rank(group: Any = None) -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, x.contiguous(), group=group)
            return torch.cat(parts)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            size = len(grad) // dist.get_world_size(group)
            start = dist.get_rank() * size
            return grad[start : start + size].clone()

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "own-rank-assumed",
    "a broadcast inside of a group, whose root is given as a rank of the group",
    also=COLLECTIVE,
)
def broadcast_from_a_rank_of_the_group(group: Any = None) -> Any:
    class Broadcast(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.clone(memory_format=torch.contiguous_format)
            dist.broadcast(y, 0, group=group)  # torch takes a rank of the world here
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            total = grad.detach().clone(memory_format=torch.contiguous_format)
            dist.reduce(total, 0, group=group)
            return total if dist.get_rank(group) == 0 else torch.zeros_like(total)

    return Broadcast.apply, (operand(3, 2),)


@wrong(
    "audit", "global-convention", "a module's flag, read in backward, decides whether to sum", also=COLLECTIVE
)
def gather_that_asks_a_flag_in_backward() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad) if getattr(MODE, "sums", True) else own(grad)

    @contextlib.contextmanager
    def other_mode() -> Iterator[None]:
        MODE.sums = False
        try:
            yield
        finally:
            MODE.sums = True

    return Gather.apply, (operand(3, 2),), other_mode


MODE = threading.local()
"""The state that the program above reads: a module's in real code, one for each rank here, as ranks are threads."""


@wrong("audit", "hangs", "a logging barrier on rank 0 alone", timeout=5.0)
def barrier_on_one_rank() -> Any:
    def fn(x: Tensor) -> Tensor:
        y = gm.all_reduce(x, dst=gm.I)
        if rank() == 0:
            dist.barrier()
        return y

    return fn, (operand(3, 2),)


@wrong("audit", "aborts", "what a native library does when sizes differ: the process ends", backend="shm")
def process_that_ends_in_backward() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            os.abort()

    return Sum.apply, (operand(3, 2),)

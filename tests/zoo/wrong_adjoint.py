"""Functions whose backward is not the adjoint of their forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

import gradmesh as gm
from tests.zoo.program import wrong
from tests.zoo.raw import exchanged, gathered, operand, own, rank, reduce_scattered, summed, world

# What is true of every Function here: raw collectives in backward, and no jvp.
COLLECTIVE = ("forward-mode-missing", "second-order-lost", "unused-output")
LOCAL = ("forward-mode-missing",)


@wrong(
    "audit", "not-adjoint", "contrastive losses that undo DDP's mean inside of the gather", also=COLLECTIVE
)
def gather_with_gradient_times_world() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad) * world()

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit", "not-adjoint", "dividing the gradient by the number of ranks because forward summed", also=LOCAL
)
def sum_with_gradient_divided_by_world() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad / world()

    return Sum.apply, (operand(3, 2),)


@wrong(
    "audit",
    "not-adjoint",
    "context-parallel gathers that weight the gradient by the part's length",
    also=LOCAL,
)
def uneven_gather_scaled_by_own_share() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            sizes = [0] * world()
            dist.all_gather_object(sizes, x.shape[0])
            parts = [torch.empty(n, x.shape[1], dtype=x.dtype) for n in sizes]
            dist.all_gather(parts, x.contiguous())
            ctx.sizes = sizes
            return torch.cat(parts)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            share = ctx.sizes[rank()] / sum(ctx.sizes)
            return grad.split(ctx.sizes)[rank()] * share

    return Gather.apply, (operand(2 + 3 * rank(), 2),)


@wrong("audit", "not-adjoint", "an index off by one in a hand-written gather", also=LOCAL)
def gather_returns_next_ranks_slice() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.chunk(world())[(rank() + 1) % world()].clone()

    return Gather.apply, (operand(3, 2),)


@wrong("audit", "not-adjoint", "summing after each rank has cut out its own slice", also=COLLECTIVE)
def gather_sums_after_slicing() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(own(grad))

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "not-adjoint",
    "a reduce-scatter whose backward keeps the gradient of this rank's rows",
    also=LOCAL,
)
def reduce_scatter_without_gather() -> Any:
    class ReduceScatter(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.rows = x.shape[0]
            return reduce_scattered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            back = torch.zeros(ctx.rows, *grad.shape[1:], dtype=grad.dtype)
            back[rank() * len(grad) : (rank() + 1) * len(grad)] = grad
            return back

    return ReduceScatter.apply, (operand(4, 2),)


@wrong(
    "audit", "not-adjoint", "a mean over the ranks in forward, and a plain sum in backward", also=COLLECTIVE
)
def mean_with_gradient_of_the_sum() -> Any:
    class Mean(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return reduce_scattered(x) / world()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return gathered(grad)

    return Mean.apply, (operand(4, 2),)


@wrong(
    "audit",
    "not-adjoint",
    "an all_to_all taken for its own inverse although its dims differ",
    also=COLLECTIVE,
)
def all_to_all_back_along_the_wrong_dim() -> Any:
    class Exchange(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            # Rows are sent, columns come together.
            return torch.cat(exchanged(x).chunk(world(), 0), 1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            # The columns should be cut into blocks again, not folded as they lie in memory.
            return exchanged(grad.reshape(grad.shape[0] * world(), -1))

    return Exchange.apply, (operand(4, 2),)


@wrong(
    "audit",
    "unusual-reading",
    "a ring shift that keeps the gradient: right for pending sums alone",
    also=COLLECTIVE,
)
def ring_shift_that_is_right_for_pending_sums() -> Any:
    class Shift(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gm.shift(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clone()

    return Shift.apply, (operand(3, 2),)


@wrong(
    "audit",
    "not-adjoint",
    "a ring shift that sends the gradient further instead of back",
    also=COLLECTIVE,
    world_size=3,
)
def ring_shift_in_the_same_direction() -> Any:
    def shifted(x: Tensor, by: int) -> Tensor:
        out = torch.empty_like(x)
        sends = dist.P2POp(dist.isend, x.contiguous(), (rank() + by) % world())
        receives = dist.P2POp(dist.irecv, out, (rank() - by) % world())
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        return out

    class Shift(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return shifted(x, 1)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return shifted(grad, 1)

    return Shift.apply, (operand(3, 2),)


@wrong(
    "audit", "not-adjoint", "halo exchange in weather models, without the rows that were sent out", also=LOCAL
)
def halo_without_the_rows_sent() -> Any:
    class Halo(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            edges = gathered(torch.stack([x[0], x[-1]])).view(world(), 2, -1)
            above = [edges[rank() - 1, 1:]] if rank() > 0 else []
            below = [edges[rank() + 1, :1]] if rank() < world() - 1 else []
            ctx.first, ctx.rows = len(above), len(x)
            return torch.cat([*above, x, *below])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad[ctx.first : ctx.first + ctx.rows].clone()

    return Halo.apply, (operand(4, 2),)


@wrong("audit", "not-adjoint", "a second all_reduce of a gradient that was already reduced", also=COLLECTIVE)
def sum_with_gradient_summed_twice() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return reduce_scattered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(gathered(grad))

    return Sum.apply, (operand(4, 2),)

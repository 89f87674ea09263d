"""Functions that write where they should only read, or give out memory that is not theirs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from tests.zoo.program import wrong
from tests.zoo.raw import alike, gathered, operand, own, rank, reduce_scattered, summed, world

COLLECTIVE = ("forward-mode-missing", "second-order-lost", "unused-output")
# What is true where backward is local: the gradient of an I result is whole, and that of such a gradient is a sum.
LOCAL = ("forward-mode-missing", "second-order-wrong")


@wrong(
    "audit",
    "gradient-overwritten",
    "the copy region of tensor parallelism: all_reduce of grad_output",
    also=COLLECTIVE,
)
def copy_region_reduces_the_gradient_in_place() -> Any:
    class Copy(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if grad.is_contiguous():
                dist.all_reduce(grad)
                return grad
            return summed(grad)

    return Copy.apply, (alike(3, 2),)


@wrong(
    "audit",
    "gradient-overwritten",
    "scaling grad_output in place before it is sent",
    also=(*COLLECTIVE, "strided-gradient"),
)
def gather_scales_the_gradient_in_place() -> Any:
    class Mean(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x) / world()

        @staticmethod
        @torch.no_grad()
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad.div_(world()))

    return Mean.apply, (operand(3, 2),)


@wrong(
    "audit",
    "operand-overwritten",
    "the reduce region of tensor parallelism: all_reduce of the input",
    also=LOCAL,
)
def reduce_region_sums_its_operand_in_place() -> Any:
    class Reduce(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            total = x.contiguous()
            dist.all_reduce(total)
            return total.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clone()

    return Reduce.apply, (operand(3, 2),)


@wrong(
    "audit",
    "operand-overwritten",
    "a broadcast of the activations into the tensor that was handed in",
    also=COLLECTIVE,
)
def broadcast_into_its_operand() -> Any:
    class Broadcast(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.contiguous()
            dist.broadcast(y, 0)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            total = summed(grad)
            return total if rank() == 0 else torch.zeros_like(total)

    return Broadcast.apply, (operand(3, 2),)


@wrong("audit", "result-aliases-operand", "the copy region: forward returns what came in", also=COLLECTIVE)
def copy_region_returns_its_operand() -> Any:
    class Copy(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(grad)

    return Copy.apply, (alike(3, 2),)


@wrong(
    "audit",
    "result-aliases-operand",
    "the scatter region: this rank's part is a view of the whole",
    also=COLLECTIVE,
)
def scatter_region_returns_a_view() -> Any:
    class Scatter(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.chunk(world())[rank()]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return gathered(grad)

    return Scatter.apply, (alike(4, 2),)


@wrong(
    "audit",
    "strided-operand",
    "the sum goes into the temporary of .contiguous() and is thrown away",
    also=LOCAL,
)
def sum_of_a_strided_operand_is_dropped() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.clone()  # keeps the strides
            dist.all_reduce(y.contiguous())
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clone()

    return Sum.apply, (operand(3, 2),)


@wrong("audit", "strided-operand", "flattening with view() before a collective", also=COLLECTIVE)
def gather_refuses_a_strided_operand() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            flat = x.view(-1)
            out = torch.empty(world() * len(flat), dtype=x.dtype)
            dist.all_gather_into_tensor(out, flat)
            return out.view(-1, *x.shape[1:])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad)

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "strided-gradient",
    "all_reduce(grad.contiguous()), and then the gradient itself is returned",
    also=COLLECTIVE,
)
def sum_of_a_strided_gradient_is_dropped() -> Any:
    class Copy(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            copy = grad.clone()  # keeps the strides
            dist.all_reduce(copy.contiguous())
            return copy

    return Copy.apply, (alike(3, 2),)


@wrong(
    "audit",
    "strided-gradient",
    "flattening the gradient with view(): out.sum().backward() fails",
    also=COLLECTIVE,
)
def gather_refuses_a_strided_gradient() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return own(summed(grad.view(-1)).view(grad.shape))

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "gradient-uninitialised",
    "torch.empty for the gradient of a scatter, filled only at this rank's rows",
    also=LOCAL,
)
def shard_leaves_rows_of_its_gradient_unwritten() -> Any:
    class Shard(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.shape = x.shape
            return own(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            back = torch.empty(ctx.shape, dtype=grad.dtype)
            back[rank() * len(grad) : (rank() + 1) * len(grad)] = grad
            return back

    return Shard.apply, (alike(4, 2),)


@wrong(
    "audit",
    "gradient-uninitialised",
    "a reduce to the root hands out a buffer that only the root received",
    also=COLLECTIVE,
)
def broadcast_leaves_the_other_ranks_gradient_unwritten() -> Any:
    class Broadcast(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.clone()
            dist.broadcast(y, 0)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            total = summed(grad)
            back = torch.empty(total.shape, dtype=total.dtype)
            return back.copy_(total) if rank() == 0 else back

    return Broadcast.apply, (operand(3, 2),)


@wrong(
    "audit",
    "saved-buffer-overwritten",
    "a workspace kept for backward, and scaled there in place",
    also=(*LOCAL, "second-order-lost"),
)
def weighted_gather_scales_its_saved_weight() -> Any:
    class Weighted(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.weight = weight.clone()
            return gathered(x * weight)

        @staticmethod
        @torch.no_grad()
        def backward(ctx: Any, grad: Tensor) -> Any:
            ctx.weight.mul_(own(grad))  # the buffer serves as the result
            return ctx.weight.clone(), None

    weight = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)

    def fn(x: Tensor) -> Tensor:
        return Weighted.apply(x, weight)

    return fn, (operand(3, 2),)


@wrong(
    "audit",
    "saved-buffer-overwritten",
    "the list of received parts is reused as the buffer of backward",
    also=COLLECTIVE,
)
def gather_accumulates_into_a_kept_buffer() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.buffer = torch.zeros(world() * len(x), *x.shape[1:], dtype=x.dtype)
            return gathered(x)

        @staticmethod
        @torch.no_grad()
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ctx.buffer.add_(summed(grad))
            return own(ctx.buffer)

    return Gather.apply, (operand(3, 2),)

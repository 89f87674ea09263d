"""Functions whose first derivative is right, and whose other modes are not: orders, forward mode, vmap, dtypes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

import gradmesh as gm
from tests.zoo.program import wrong
from tests.zoo.raw import alike, gathered, operand, own, rank, reduce_scattered, summed, world, world_group

COLLECTIVE = ("forward-mode-missing", "second-order-lost", "unused-output")
# What is true where backward is local: the gradient of an I result is whole, and that of such a gradient is a sum.
LOCAL = ("forward-mode-missing", "second-order-wrong")


@wrong("audit", "precision-lost", "summing in float32, whatever the dtype is", also=(*LOCAL, "complex-wrong"))
def sum_in_float32() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x.float()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clone()

    return Sum.apply, (operand(3, 2),)


@wrong("audit", "precision-lost", "receive buffers of the default dtype", also=(*COLLECTIVE, "complex-wrong"))
def gradient_received_in_the_default_dtype() -> Any:
    class Scatter(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return own(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            out = torch.empty(world() * len(grad), *grad.shape[1:])
            dist.all_gather_into_tensor(out, grad.to(out.dtype).contiguous())
            return out.to(grad.dtype)

    return Scatter.apply, (alike(4, 2),)


@wrong(
    "audit",
    "precision-lost",
    "gradients sent as bfloat16 to save bandwidth, without a switch",
    also=(*COLLECTIVE, "complex-wrong"),
)
def gather_sends_its_gradient_as_bfloat16() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad.bfloat16()).to(grad.dtype)

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "second-order-lost",
    "energies and forces: a raw collective in backward, whose result has no graph",
    also=("forward-mode-missing", "unused-output"),
)
def gather_with_a_raw_reduce_scatter() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            back = torch.empty(len(grad) // world(), *grad.shape[1:], dtype=grad.dtype)
            dist.reduce_scatter_tensor(back, grad.contiguous())
            return back

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "second-order-lost",
    "the gradient is detached before it is cut, to save memory",
    also=LOCAL,
)
def gather_detaches_its_gradient() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return own(grad.detach())

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "second-order-wrong",
    "an all_reduce in place on a clone of the gradient: autograd records the clone and not the sum",
    also=("forward-mode-missing", "unused-output"),
)
def sum_whose_gradient_is_a_recorded_clone() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            total = grad.clone(memory_format=torch.contiguous_format)
            with torch.no_grad():
                dist.all_reduce(total.detach())
            return total

    return Sum.apply, (operand(3, 2),)


@wrong(
    "audit",
    "second-order-wrong",
    "pairs of regions that are each other's backward, one of them with a mean in place of the identity",
    also=("forward-mode-missing", "unused-output"),
)
def copy_region_whose_backward_is_the_reduce_region() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            # The sum is P -> I, whose gradient is handed on as it is; a mean is no adjoint of it.
            return grad / world()

    class Copy(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return Sum.apply(grad)

    return Copy.apply, (alike(3, 2),)


@wrong(
    "audit",
    "second-order-raises",
    "once_differentiable over a backward with collectives",
    also=("forward-mode-missing", "unused-output"),
)
def once_differentiable_gather() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad)

    return Gather.apply, (operand(3, 2),)


@wrong(
    "audit",
    "forward-mode-missing",
    "nearly every hand-written Function: there is no jvp",
    also=("second-order-wrong",),
)
def sum_without_jvp() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clone()

    return Sum.apply, (operand(3, 2),)


@wrong(
    "audit",
    "forward-mode-missing",
    "a Function whose backward calls a differentiable collective, and nothing else",
)
def sum_with_a_verb_in_backward() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return gm.replicate(grad)

    return Sum.apply, (operand(3, 2),)


@wrong(
    "audit",
    "forward-mode-wrong",
    "a jvp that passes this rank's tangent on without the collective",
    also=("second-order-wrong",),
)
def sum_with_a_local_jvp() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clone()

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent.clone()

    return Sum.apply, (operand(3, 2),)


@wrong(
    "audit",
    "forward-mode-wrong",
    "a functional all_reduce on its own: its tangent is lost silently",
    also=("not-adjoint", "second-order-lost", "unused-output", "vmap-wrong", "second-order-wrong"),
)
def functional_all_reduce_loses_the_tangent() -> Any:
    def fn(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", world_group())

    return fn, (operand(3, 2),)


@wrong("audit", "vmap-wrong", "a vmap rule that does not move dim past the batch dimension", also=LOCAL)
def gather_batched_along_the_wrong_dim() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.chunk(world())[rank()].clone()

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
            # dim 0 of one sample is dim 1 of the batch; this gathers batches instead, and gives them its shape.
            x = x.movedim(in_dims[0], 0)
            return Gather.apply(x).reshape(len(x), -1, *x.shape[2:]), 0

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return gathered(tangent)

    def fn(x: Tensor) -> Tensor:
        return Gather.apply(x)

    return fn, (operand(3, 2),)


@wrong(
    "audit", "complex-wrong", "a real receive buffer: the imaginary part is cut off", also=("unused-output",)
)
def sum_of_the_real_part() -> Any:
    def fn(x: Tensor) -> Tensor:
        return gm.all_reduce(x.real if x.is_complex() else x, dst=gm.R).to(x.dtype)

    return fn, (operand(3, 2),)


@wrong(
    "audit",
    "complex-wrong",
    "a backward that conjugates, although the collective's coefficients are real",
    also=LOCAL,
)
def gather_conjugates_its_gradient() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.chunk(world())[rank()].conj().clone()

    return Gather.apply, (operand(3, 2),)

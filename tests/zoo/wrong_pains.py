"""Faults of real code that the other files do not have: order, recomputation, mismatches, and torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from tests.zoo.data import common, normal, replicated, weighted
from tests.zoo.program import wrong
from tests.zoo.raw import gathered, operand, rank, reduce_scattered, summed, world, world_group


@wrong(
    "audit", "backward-raises", "a forward with a group as its argument, for which backward returns no None"
)
def gather_that_returns_too_few_gradients() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
            return gathered(x, dim)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return reduce_scattered(grad)

    def fn(x: Tensor) -> Tensor:
        return Gather.apply(x, 0)

    return fn, (operand(3, 2),)


@wrong(
    "audit",
    "forward-mode-wrong",
    "torch's functional all_gather with autograd: its tangent is lost, its vmap gathers the batch",
    also=("vmap-wrong", "second-order-lost", "unused-output"),
)
def functional_gather() -> Any:
    def fn(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor_autograd(x, 0, world_group())

    return fn, (operand(3, 2),)


@wrong("gradcheck", "W times too large", "DTensor: a Partial('avg') made Replicate", objective="replicated")
def dtensor_average() -> Any:
    def loss(x: Tensor) -> Tensor:
        mesh = init_device_mesh("cpu", (world(),))
        mean = DTensor.from_local(x, mesh, [Partial("avg")]).redistribute(placements=[Replicate()])
        return weighted(mean.to_local())

    return loss, lambda r: (normal(r, 3, 2),)


@wrong("gradcheck", "none fits", "two gathers of one shape, of which each rank uses the other one")
def gathers_paired_with_each_other() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        both = Gather.apply(x), Gather.apply(y)
        return weighted(both[rank()], rank())

    return loss, lambda r: (normal(r, 3, 2), normal(r, 3, 2, seed=1))


@wrong("gradcheck", "raises", "the same with verbs: refused outside of ordered()")
def verbs_of_which_each_rank_uses_another() -> Any:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        both = gm.all_gather(x), gm.all_gather(y)
        return weighted(both[rank()], rank())

    return loss, lambda r: (normal(r, 3, 2), normal(r, 3, 2, seed=1))


@wrong("gradcheck", "raises", "one rank sums and another one takes the maximum")
def sum_against_maximum() -> Any:
    def loss(x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, dist.ReduceOp.SUM if rank() == 0 else dist.ReduceOp.MAX)
        return weighted(y, rank())

    return loss, lambda r: (normal(r, 3, 2),)


@wrong(
    "gradcheck",
    "one term of several scaled",
    "a gather kept in a cache, which checkpoint's recomputation finds there",
)
def gather_cached_under_checkpoint() -> Any:
    def loss(x: Tensor) -> Tensor:
        cache: dict[str, Tensor] = {}

        def block(h: Tensor) -> Tensor:
            if "whole" not in cache:
                cache["whole"] = gm.all_gather(h)
            return torch.tanh(h @ cache["whole"].T)

        recomputed: Tensor = checkpoint(block, x, use_reentrant=True)
        return weighted(recomputed, rank()) + weighted(x)

    return loss, lambda r: (normal(r, 3, 2),)


@wrong(
    "same_as_single",
    "loss differs",
    "one rank hands in a transposed operand with as many elements",
    objective="replicated",
)
def operand_transposed_on_one_rank() -> Any:
    def loss(x: Tensor) -> Tensor:
        mine = x * (1 + rank()) / (3 if world() == 2 else 1)
        return gm.all_reduce(mine.T if rank() else mine, dst=gm.I).square()[0].sum()

    return {"distributed": loss, "inputs": (replicated(common(3, 3)),)}


@wrong("same_as_single", "gradient differs", "a fused step that keeps the sum in the dtype of the wire")
def gradients_summed_in_bfloat16() -> Any:
    class Copy(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(grad.bfloat16()).to(grad.dtype)

    def loss(model: nn.Linear, x: Tensor) -> Tensor:
        return (x @ Copy.apply(model.weight).T).tanh().sum() / world() * (1 + rank())

    def reference(model: nn.Linear, x: Tensor) -> Tensor:
        return (x @ model.weight.T).tanh().sum() * 1.5

    return {
        "distributed": loss,
        "reference": reference,
        "inputs": (common(3, 4),),
        "module": lambda: nn.Linear(4, 2, bias=False),
        "parameters": {"*": gm.I},
    }

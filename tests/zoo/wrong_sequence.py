"""Wrong programs over a sequence that the ranks share: context, ring and Ulysses attention, and complex layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

import gradmesh as gm
from tests.zoo.data import common, complex_normal, invariant, normal, weighted
from tests.zoo.program import wrong
from tests.zoo.raw import exchanged, gathered, own, rank, reduce_scattered, summed, world

REPLICATED = "replicated"


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


def parts(r: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(r, 3, 4), normal(r, 3, 4, seed=1), normal(r, 3, 4, seed=2)


@wrong(
    "gradcheck",
    "1/W",
    "context parallelism of two halves the gradient, of four quarters it",
    objective=REPLICATED,
    world_size=4,
)
def context_parallel_loss_divided_twice() -> Any:
    class Mean(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad / world()

    def loss(x: Tensor) -> Tensor:
        return Mean.apply(weighted(x, rank()) / (world() * len(x)))

    return loss, lambda r: (normal(r, 3, 4),)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "ring attention whose keys and values travel by plain send and receive",
)
def ring_attention_without_a_gradient_for_the_others() -> Any:
    def passed_on(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        ops = [
            dist.P2POp(dist.isend, x.detach().contiguous(), (rank() + 1) % world()),
            dist.P2POp(dist.irecv, out, (rank() - 1) % world()),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = [(k, v)]
        for _ in range(world() - 1):
            blocks.append((passed_on(blocks[-1][0]), passed_on(blocks[-1][1])))
        keys, values = (torch.cat(x) for x in zip(*blocks, strict=True))
        return weighted(attention(q, keys, values), rank())

    return loss, parts


@wrong("gradcheck", "sum over ranks missing", "gathered keys and values, with this rank's slice in backward")
def gathered_attention_with_own_slices() -> Any:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weighted(attention(q, gm.all_gather(k, dst=gm.I), gm.all_gather(v, dst=gm.I)), rank())

    return loss, parts


@wrong("gradcheck", "none fits", "an all_to_all whose backward hands the gradient on without the way back")
def ulysses_without_the_way_back() -> Any:
    class Exchange(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return exchanged(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clone()

    def loss(x: Tensor) -> Tensor:
        return weighted(Exchange.apply(torch.tanh(x)), rank())

    return loss, lambda r: (normal(r, 4, 3),)


@wrong("gradcheck", "none fits", "a softmax over blocks merged with detached log-sums")
def ring_softmax_with_detached_denominator() -> Any:
    def loss(scores: Tensor, v: Tensor) -> Tensor:
        lse = scores.logsumexp(-1, keepdim=True)
        total = gm.all_gather(lse, dim=1).logsumexp(-1, keepdim=True).detach()
        out = gm.all_reduce(torch.exp(scores - total) @ v, dst=gm.R)
        return weighted(out, rank())

    return loss, lambda r: (normal(r, 3, 4), normal(r, 4, 2, seed=1))


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "learned positions, of which each rank adds its own part",
    objective=REPLICATED,
)
def positions_without_their_sum() -> Any:
    def loss(x: Tensor, table: Tensor) -> Tensor:
        mine = x + table[rank() * len(x) : (rank() + 1) * len(x)]
        return gm.all_reduce(weighted(torch.tanh(mine), rank()), dst=gm.I)

    return loss, lambda r: (normal(r, 3, 2), invariant(common(6, 2)))


@wrong(
    "gradcheck",
    "another rank's slice",
    "zigzag parts: the gradient is cut where the plain order would have it",
    objective=REPLICATED,
)
def reversed_parts_cut_in_plain_order() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.cat(gathered(x).chunk(world())[::-1])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return own(grad)

    def loss(x: Tensor) -> Tensor:
        return weighted(Gather.apply(x))

    return loss, lambda r: (normal(r, 3, 2),)


@wrong(
    "gradcheck",
    "another rank's slice",
    "prefix states handed to the next rank, their gradient kept where it arrived",
    world_size=3,
)
def ring_shift_that_keeps_the_gradient() -> Any:
    class Shift(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x[None])[rank() - 1]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clone()

    def loss(x: Tensor) -> Tensor:
        return weighted(Shift.apply(torch.tanh(x)), rank()) + 0 * x.sum()

    return loss, lambda r: (normal(r, 3, 2, seed=4),)


@wrong(
    "gradcheck",
    "conjugate missing",
    "a sharded spectral layer whose backward multiplies by the weight itself",
    objective=REPLICATED,
)
def spectral_layer_without_conjugate() -> Any:
    class Filter(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return summed(x * w)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad * w, grad * x

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return Filter.apply(x, w).real.sum()

    return loss, lambda r: (complex_normal(r, 3, 2), complex_normal(r, 3, 2, seed=1))


@wrong(
    "gradcheck", "conjugate missing", "phases applied on each antenna before the sum, the gradient conjugated"
)
def beam_sum_that_conjugates() -> Any:
    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(grad).conj().resolve_conj()

    def loss(x: Tensor) -> Tensor:
        y = Sum.apply(x)
        return (1 + rank()) * (
            y.real * torch.linspace(0.5, 2.0, y.numel()).view(y.shape) + y.imag.sin()
        ).sum()

    return loss, lambda r: (complex_normal(r, 3, 2),)


@wrong(
    "gradcheck", "1/W", "a mean over the ranks whose gradient is divided once in forward and once in backward"
)
def mean_divided_on_both_ways() -> Any:
    class Mean(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x) / world()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(grad / world()) / world()

    def loss(x: Tensor) -> Tensor:
        return weighted(Mean.apply(x), rank())

    return loss, lambda r: (normal(r, 3, 2),)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "gradients of gathered rows that each rank gives back for itself",
    world_size=3,
)
def gather_whose_reduction_was_forgotten() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            dist.barrier()
            return own(grad)

    def loss(x: Tensor) -> Tensor:
        return weighted(Gather.apply(x), rank())

    return loss, lambda r: (normal(r, 2, 2),)


@wrong(
    "gradcheck",
    "W times too large",
    "a reduce-scatter in front of the loss, undone by a sum in the gather",
    objective=REPLICATED,
)
def sequence_gather_that_sums_before_a_shared_loss() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad)

    def loss(x: Tensor) -> Tensor:
        return weighted(Gather.apply(gm.reduce_scatter(x).square()))

    return loss, lambda r: (normal(r, 4, 2),)

"""Wrong losses over features of all ranks, as contrastive models are trained with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import Function

import gradmesh as gm
from tests.zoo.data import common, invariant, normal
from tests.zoo.program import wrong
from tests.zoo.raw import gathered, own, rank, reduce_scattered, world

ROWS, WIDTH = 3, 4


def features(r: int) -> tuple[Tensor, Tensor]:
    return normal(r, ROWS, WIDTH), normal(r, ROWS, WIDTH, seed=1)


def scores(mine: Tensor, all_theirs: Tensor) -> Tensor:
    """The loss of this rank's rows against everyone's columns."""
    labels = torch.arange(len(mine)) + rank() * len(mine)
    return F.cross_entropy(mine @ all_theirs.T, labels)


def whole(images: Tensor, texts: Tensor) -> Tensor:
    """The loss of all rows against all columns."""
    logits = images @ texts.T
    labels = torch.arange(len(images))
    return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "CLIP with a raw all_gather, this rank's features put back into their place",
)
def clip_with_a_raw_gather() -> Any:
    def with_own(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(world())]
        dist.all_gather(parts, x.detach())
        parts[rank()] = x
        return torch.cat(parts)

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        return scores(images, with_own(texts)) + scores(texts, with_own(images))

    return loss, features


@wrong(
    "gradcheck", "sum over ranks missing", "AllGather with this rank's slice in backward, under local losses"
)
def clip_with_own_slice_and_local_losses() -> Any:
    class AllGather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return own(grad)

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        return scores(images, AllGather.apply(texts)) + scores(texts, AllGather.apply(images))

    return loss, features


@wrong(
    "gradcheck",
    "W times too large",
    "a gather that sums, under the global loss on every rank",
    objective="replicated",
)
def clip_with_summed_gather_and_global_loss() -> Any:
    class AllGather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return reduce_scattered(grad)

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        return whole(AllGather.apply(images), AllGather.apply(texts))

    return loss, features


@wrong(
    "gradcheck",
    "1/W",
    "a mean over ranks in backward, meant to undo a sum that is not there",
    objective="replicated",
)
def clip_with_averaged_slice_and_global_loss() -> Any:
    class AllGather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return own(grad) / world()

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        return whole(AllGather.apply(images), AllGather.apply(texts))

    return loss, features


@wrong(
    "gradcheck",
    "another rank's slice",
    "a global rank where the group has ranks of its own, in AllGather's slice",
    objective="replicated",
    world_size=3,
)
def clip_with_another_ranks_slice() -> Any:
    class AllGather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.chunk(world())[(rank() + 1) % world()].clone()

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        return whole(AllGather.apply(images), AllGather.apply(texts))

    return loss, features


@wrong(
    "gradcheck",
    "one term of several scaled",
    "an auxiliary loss on gathered features beside the contrastive one, through the other gather",
    objective="replicated",
)
def clip_with_two_kinds_of_gather() -> Any:
    def loss(images: Tensor, texts: Tensor) -> Tensor:
        contrastive = whole(gm.all_gather(images, dst=gm.I), gm.all_gather(texts, dst=gm.I))
        return contrastive + torch.sin(gm.all_gather(images + texts, dst=gm.R)).square().sum()

    return loss, features


@wrong("gradcheck", "sum over ranks missing", "a learned temperature that every rank applies to its own rows")
def temperature_without_its_sum() -> Any:
    def loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        return scores(scale.exp() * images, gm.all_gather(texts)) + scores(texts, gm.all_gather(images))

    return loss, lambda r: (*features(r), invariant(common(1)))


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "the sigmoid loss' ring of texts, passed on with plain send and receive",
)
def siglip_ring_without_a_gradient() -> Any:
    def passed_on(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x.detach().contiguous(), (rank() + 1) % world()),
            dist.P2POp(dist.irecv, out, (rank() - 1) % world()),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        total = -F.logsigmoid((images * texts).sum(1)).sum()
        theirs = texts
        for _ in range(world() - 1):
            theirs = passed_on(theirs)
            total = total - F.logsigmoid(-(images @ theirs.T)).mean()
        return total

    return loss, features


@wrong(
    "gradcheck",
    "dropped on ranks that did not use the output",
    "the contrastive loss on rank 0 alone, behind a gather whose backward returns this rank's slice",
    also=("sum over ranks missing",),
)
def loss_on_rank_zero_alone() -> Any:
    def loss(images: Tensor, texts: Tensor) -> Tensor:
        everything = whole(gm.all_gather(images, dst=gm.I), gm.all_gather(texts, dst=gm.I))
        return everything if rank() == 0 else 0.1 * images.square().sum()

    return loss, features


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "batch statistics summed by a raw all_reduce in the middle of the graph",
)
def batch_statistics_by_a_raw_sum() -> Any:
    def loss(x: Tensor) -> Tensor:
        moments = torch.stack([x.sum(0), x.square().sum(0)])
        dist.all_reduce(moments)
        mean, square = moments / (world() * len(x))
        y = (x - mean) * torch.rsqrt(square - mean.square() + 1e-3)
        weight = torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype).view(y.shape)
        return (weight * (1 + rank()) * y).sum()

    return loss, lambda r: (normal(r, 4, 2),)


@wrong(
    "gradcheck",
    "W times too large",
    "an all_reduced loss differentiated through a sum",
    objective="replicated",
)
def loss_reduced_by_a_sum_that_sums_again() -> Any:
    def loss(x: Tensor) -> Tensor:
        return gm.all_reduce(x.square().sum() * (1 + rank()), dst=gm.R)

    return loss, lambda r: (normal(r, 3, 2),)

"""Wrong tensor-parallel layers, as in Megatron and what grew from it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

import gradmesh as gm
from tests.zoo.data import common, invariant, normal, weighted
from tests.zoo.program import wrong
from tests.zoo.raw import gathered, own, rank, summed, world

REPLICATED = "replicated"


class Reduce(Function):
    """The reduce region: sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class Copy(Function):
    """The copy region: identity forward, sum backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return summed(grad)


class SumBothWays(Function):
    """What torch.distributed.nn's all_reduce does: sum forward, sum backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return summed(grad)


def layer(r: int) -> tuple[Any, ...]:
    """The same input on every rank, and each rank's columns and rows."""
    return invariant(common(3, 4)), normal(r, 4, 2, seed=1), normal(r, 2, 4, seed=2)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "a column-parallel layer without the copy region",
    objective=REPLICATED,
)
def mlp_without_the_copy_region() -> Any:
    def loss(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        return weighted(Reduce.apply(torch.tanh(x @ columns) @ rows))

    return loss, layer


@wrong(
    "gradcheck",
    "W times too large",
    "a row-parallel layer on torch.distributed.nn's all_reduce",
    objective=REPLICATED,
)
def mlp_whose_reduction_sums_both_ways() -> Any:
    def loss(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        return weighted(SumBothWays.apply(torch.tanh(Copy.apply(x) @ columns) @ rows))

    return loss, layer


@wrong(
    "gradcheck",
    "one term of several scaled",
    "the same under a residual connection, where only one branch is W times too large",
    also=("W times too large",),
    objective=REPLICATED,
)
def residual_mlp_whose_reduction_sums_both_ways() -> Any:
    def loss(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        return weighted(x + SumBothWays.apply(torch.tanh(Copy.apply(x) @ columns) @ rows))

    return loss, layer


@wrong(
    "gradcheck",
    "W times too large",
    "two row-parallel layers, the second one's sum both ways",
    objective=REPLICATED,
    world_size=3,
)
def deep_mlp_with_one_wrong_reduction() -> Any:
    def loss(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        h = Reduce.apply(torch.tanh(Copy.apply(x) @ columns) @ rows)
        return weighted(SumBothWays.apply(torch.tanh(Copy.apply(h) @ columns) @ rows))

    return loss, layer


@wrong(
    "gradcheck",
    "W times too large",
    "gather_output=True with a reduce-scatter in backward",
    objective=REPLICATED,
)
def gathered_columns_with_summed_gradient() -> Any:
    def loss(x: Tensor, columns: Tensor) -> Tensor:
        return weighted(gm.all_gather(torch.tanh(gm.replicate(x) @ columns), dim=1, dst=gm.R))

    return loss, lambda r: layer(r)[:2]


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "a norm's weight on sequence shards, left out of the all_reduce",
    objective=REPLICATED,
)
def norm_weight_on_sequence_shards() -> Any:
    def loss(x: Tensor, gain: Tensor, rows: Tensor) -> Tensor:
        y = gain * x / (1e-3 + x.square().mean(1, keepdim=True)).sqrt()
        whole = gm.all_gather(y, dst=gm.R)
        return weighted(gm.all_reduce(torch.tanh(whole @ rows), dst=gm.I))

    return loss, lambda r: (normal(r, 2, 3), invariant(common(3)), normal(r, 3, 2, seed=2))


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "tensor_parallel_output_grad=False in front of a column-parallel layer",
    objective=REPLICATED,
)
def sequence_gather_with_own_slice() -> Any:
    def loss(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        whole = gm.all_gather(x, dst=gm.I)
        return weighted(gm.all_reduce(torch.tanh(whole @ columns) @ rows, dst=gm.I))

    return loss, lambda r: (normal(r, 2, 4), normal(r, 4, 2, seed=1), normal(r, 2, 4, seed=2))


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "cutting the sequence by plain indexing instead of the scatter region",
    objective=REPLICATED,
)
def sequence_cut_by_indexing() -> Any:
    def loss(x: Tensor, gain: Tensor) -> Tensor:
        rows = len(x) // world()
        mine = x[rank() * rows : (rank() + 1) * rows]
        return weighted(gm.all_gather(torch.tanh(mine * gain), dst=gm.I))

    return loss, lambda r: (invariant(common(4, 3)), normal(r, 2, 3))


@wrong(
    "gradcheck",
    "W times too large",
    "a vocabulary-parallel loss whose two sums are summed backward too",
    objective=REPLICATED,
)
def vocabulary_loss_with_summed_gradients() -> Any:
    def loss(logits: Tensor) -> Tensor:
        target = logits[:, 0] * (rank() == 0)
        denominator = SumBothWays.apply(logits.exp().sum(1))
        return (denominator.log() - SumBothWays.apply(target)).mean()

    return loss, lambda r: (normal(r, 3, 4),)


@wrong(
    "gradcheck",
    "one term of several scaled",
    "the same with one of the two sums right",
    objective=REPLICATED,
)
def vocabulary_loss_with_one_summed_gradient() -> Any:
    def loss(logits: Tensor) -> Tensor:
        target = logits[:, 0] * (rank() == 0)
        denominator = SumBothWays.apply(logits.exp().sum(1))
        return (denominator.log() - Reduce.apply(target)).mean()

    return loss, lambda r: (normal(r, 3, 4),)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "the tied embedding of a pipeline's first and last stage",
    objective=REPLICATED,
)
def tied_embedding_without_its_sum() -> Any:
    def loss(hidden: Tensor, embedding: Tensor) -> Tensor:
        first, last = hidden @ embedding, hidden @ embedding.square()
        share = weighted(first) if rank() == 0 else last.logsumexp(1).sum()
        return gm.all_reduce(share, dst=gm.I)

    return loss, lambda r: (normal(r, 3, 4), invariant(common(4, 5)))


@wrong(
    "gradcheck", "sum over ranks missing", "a hand-written FSDP unit that drops the reduce-scatter's result"
)
def sharded_weight_drops_the_reduced_gradient() -> Any:
    class Unshard(Function):
        @staticmethod
        def forward(ctx: Any, shard: Tensor) -> Tensor:
            return gathered(shard)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            total = torch.empty(len(grad) // world(), *grad.shape[1:], dtype=grad.dtype)
            dist.reduce_scatter_tensor(total, grad.contiguous())
            return own(grad)

    def loss(x: Tensor, shard: Tensor) -> Tensor:
        return weighted(x @ Unshard.apply(shard), rank())

    return loss, lambda r: (normal(r, 3, 4), normal(r, 2, 5, seed=1))


@wrong(
    "gradcheck",
    "summed twice",
    "gradients of sharded weights passed through the all_reduce of the replicated ones",
    world_size=3,
)
def sharded_weight_summed_as_if_replicated() -> Any:
    class Hook(Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return w.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(grad)

    def loss(x: Tensor, shard: Tensor) -> Tensor:
        return weighted(x @ gm.all_gather(Hook.apply(shard)), rank())

    return loss, lambda r: (normal(r, 3, 6), normal(r, 2, 5, seed=1))


@wrong(
    "gradcheck",
    "summed twice",
    "a replicated weight whose gradient two hooks sum",
    also=("W times too large",),
    objective=REPLICATED,
)
def replicated_weight_summed_by_two_hooks() -> Any:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        share = weighted(x @ gm.replicate(gm.replicate(w)), rank())
        return gm.all_reduce(share, dst=gm.I)

    return loss, lambda r: (normal(r, 3, 4), invariant(common(4, 2)))

"""Wrong graph-parallel and expert-parallel programs."""

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


def pair_energy(rows: Tensor, positions: Tensor) -> Tensor:
    """The energy of some atoms with all atoms."""
    return torch.exp(-(rows[:, None] - positions[None]).square().sum(-1)).sum()


@wrong(
    "gradcheck",
    "W times too large",
    "forces from an energy that a functional all_reduce summed",
    objective=REPLICATED,
)
def forces_behind_a_sum_that_sums_again() -> Any:
    class AllReduce(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return summed(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(grad)

    def energy(positions: Tensor) -> Tensor:
        everything = gm.all_gather(positions)
        return AllReduce.apply(pair_energy(positions, everything))

    return energy, lambda r: (normal(r, 2, 3),)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "forces taken after the energy's reduction, each rank's from its own edges",
    objective=REPLICATED,
)
def forces_of_the_own_edges_alone() -> Any:
    def energy(positions: Tensor) -> Tensor:
        half = len(positions) // world()
        mine = positions[rank() * half : (rank() + 1) * half]
        return gm.all_reduce(pair_energy(mine, positions), dst=gm.I)

    return energy, lambda r: (invariant(common(4, 3)),)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "gp_utils' gather, whose backward slices, in front of each rank's own edges",
)
def node_features_gathered_with_own_slice() -> Any:
    def loss(nodes: Tensor, edges: Tensor) -> Tensor:
        return weighted(torch.tanh(edges @ gm.all_gather(nodes, dst=gm.I)), rank())

    return loss, lambda r: (normal(r, 2, 3), normal(r, 3, 4, seed=1))


@wrong("gradcheck", "sum over ranks missing", "ghost atoms whose gradient is not sent back to their owner")
def ghost_atoms_without_a_way_back() -> Any:
    class Ghosts(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.rows = len(x)
            border = gathered(x[-1:])
            return torch.cat([x, border[rank() - 1 : rank()] if rank() else x[:0]])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad[: ctx.rows].clone()

    def loss(x: Tensor) -> Tensor:
        y = Ghosts.apply(x)
        return weighted(y[1:] * y[:-1], rank())

    return loss, lambda r: (normal(r, 3, 2),)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "node sums over all ranks, of which each rank keeps its rows by indexing",
    objective=REPLICATED,
)
def aggregated_rows_kept_by_indexing() -> Any:
    def loss(messages: Tensor) -> Tensor:
        nodes = gm.all_reduce(torch.tanh(messages), dst=gm.I)
        rows = len(nodes) // world()
        mine = nodes[rank() * rows : (rank() + 1) * rows]
        return gm.all_reduce(weighted(mine, rank()), dst=gm.I)

    return loss, lambda r: (normal(r, 4, 3),)


@wrong(
    "gradcheck",
    "W times too large",
    "scaling the gradient by the number of graph-parallel ranks, twice",
    objective=REPLICATED,
)
def gradient_scaled_for_ddp_without_ddp() -> Any:
    class ScaleGradient(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * world()

    def energy(positions: Tensor) -> Tensor:
        p = ScaleGradient.apply(positions)
        return gm.all_reduce(pair_energy(p, gm.all_gather(p)), dst=gm.I)

    return energy, lambda r: (normal(r, 2, 3),)


@wrong(
    "gradcheck",
    "one term of several scaled",
    "a global readout beside the local energies, reduced by the other convention",
    objective=REPLICATED,
)
def global_readout_reduced_by_the_other_convention() -> Any:
    def energy(nodes: Tensor) -> Tensor:
        local = gm.all_reduce(weighted(nodes, rank()), dst=gm.I)
        charge = gm.all_reduce(nodes.square().sum(), dst=gm.R)
        return local + torch.log1p(charge)

    return energy, lambda r: (normal(r, 3, 2),)


@wrong(
    "gradcheck",
    "none fits",
    "the largest force over all ranks, through a function whose backward is a maximum again",
)
def maximum_whose_gradient_is_a_maximum() -> Any:
    class Max(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.clone()
            dist.all_reduce(y, dist.ReduceOp.MAX)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            g = grad.clone()
            dist.all_reduce(g, dist.ReduceOp.MAX)
            return g

    def loss(forces: Tensor) -> Tensor:
        return weighted(Max.apply(forces), rank())

    return loss, lambda r: (normal(r, 3, 2),)


@wrong(
    "gradcheck", "none fits", "a product of probabilities over the ranks, with the product as its backward"
)
def product_whose_gradient_is_a_product() -> Any:
    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x[None]).prod(0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return gathered(grad[None]).prod(0)

    def loss(x: Tensor) -> Tensor:
        return weighted(Product.apply(x), rank())

    return loss, lambda r: (normal(r, 3, 2),)


# ---- experts


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "tokens sent to experts by a raw all_to_all, this rank's own tokens put back into their place",
)
def tokens_dispatched_by_a_raw_exchange() -> Any:
    def exchange(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.detach().contiguous())
        size = len(x) // world()
        mine = slice(rank() * size, (rank() + 1) * size)
        return torch.cat([out[: mine.start], x[mine], out[mine.stop :]])

    def loss(tokens: Tensor, expert: Tensor) -> Tensor:
        return weighted(torch.tanh(exchange(tokens) @ expert), rank())

    return loss, lambda r: (normal(r, 4, 3), normal(r, 3, 3, seed=1))


@wrong(
    "gradcheck",
    "summed twice",
    "expert weights in the bucket of the replicated ones: their gradients are summed over the experts",
    world_size=3,
)
def expert_gradients_summed_over_experts() -> Any:
    class Hook(Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return w.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return summed(grad)

    def loss(tokens: Tensor, expert: Tensor) -> Tensor:
        served = gm.all_to_all(tokens)
        return weighted(gm.all_to_all(torch.tanh(served @ Hook.apply(expert))), rank())

    return loss, lambda r: (normal(r, 6, 3), normal(r, 3, 3, seed=1))


@wrong(
    "gradcheck",
    "one term of several scaled",
    "the load-balancing loss over gathered routes, W times too strong",
    objective=REPLICATED,
)
def balancing_loss_gathered_with_a_sum() -> Any:
    def loss(logits: Tensor) -> Tensor:
        task = gm.all_reduce(weighted(torch.softmax(logits, 1), rank()), dst=gm.I)
        routes = gm.all_gather(torch.softmax(logits, 1), dst=gm.R)
        return task + routes.mean(0).square().sum() * 3

    return loss, lambda r: (normal(r, 4, 3),)


@wrong(
    "gradcheck",
    "sum over ranks missing",
    "a router that every rank applies to its own tokens, outside of the reduced bucket",
)
def router_weight_without_its_sum() -> Any:
    def loss(tokens: Tensor, router: Tensor, expert: Tensor) -> Tensor:
        gate = torch.softmax(tokens @ router, 1)
        served = gm.all_to_all(torch.tanh(gm.all_to_all(tokens) @ expert))
        return weighted(gate[:, :1] * served, rank())

    return loss, lambda r: (normal(r, 4, 3), invariant(common(3, 2)), normal(r, 3, 3, seed=1))


@wrong(
    "gradcheck",
    "dropped on ranks that did not use the output",
    "a rank that routes none of its tokens to the shared expert",
    also=("sum over ranks missing",),
)
def shared_expert_not_used_by_one_rank() -> Any:
    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return own(grad)

    def loss(tokens: Tensor, gate: Tensor) -> Tensor:
        shared = Gather.apply(tokens)
        return weighted(gate) + (
            0 if rank() == 1 else weighted(shared[: len(tokens)] + 2 * shared[len(tokens) :])
        )

    return loss, lambda r: (normal(r, 3, 2), normal(r, 3, 2, seed=1))

"""A function of another library that is to be compared with one process, and what it computes there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Operand = Literal["shard", "whole", "same"]
Shape = Callable[["World", int], tuple[int, ...]]
Dense = Callable[[Sequence[Tensor], "World"], list[Tensor]]


@dataclass(frozen=True)
class World:
    """The ranks that a function runs on, as one of them sees them.

    Attributes:
        sizes: each rank's number of rows.
        rank: this rank, of the group.
        group: their process group.
    """

    sizes: tuple[int, ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.sizes)

    @property
    def global_ranks(self) -> list[int]:
        """Their numbers in the world."""
        return dist.get_process_group_ranks(self.group)

    def sends(self, rank: int) -> list[int]:
        """The rows that a rank sends to each, in an exchange."""
        return [self.sizes[(rank + 2 * to) % self.size] for to in range(self.size)]

    def receives(self, rank: int) -> list[int]:
        """The rows that a rank receives from each."""
        return [self.sends(source)[rank] for source in range(self.size)]


def rows(*shape: int, dim: int = 0) -> Shape:
    """This shape, with each rank's rows along `dim`."""
    return lambda world, rank: (*shape[:dim], world.sizes[rank], *shape[dim + 1 :])


def all_rows(*shape: int, dim: int = 0) -> Shape:
    """This shape, with all ranks' rows along `dim`."""
    return lambda world, _: (*shape[:dim], sum(world.sizes), *shape[dim + 1 :])


def sent_rows(*shape: int) -> Shape:
    """This shape, with the rows that a rank sends along dimension 0."""
    return lambda world, rank: (sum(world.sends(rank)), *shape[1:])


@dataclass(frozen=True)
class Case:
    """A function, and what it computes.

    Attributes:
        name: the function.
        call: calls it: module, operand, ranks.
        dense: the results of all ranks from the operands of all, in one process.
        shape: of a rank's operand.
        same: whether the operand is one tensor that every rank holds; its gradient is complete on every rank.
        once: whether every rank has the same result and the same loss, which counts once.
        factor: by which the library multiplies every gradient on purpose.
        uneven: the sizes that it is tried with, if sizes may differ; None where there are none.
        group: whether a group can be passed; None where a subgroup cannot be tried.
    """

    name: str
    call: Callable[[Any, Tensor, World], Tensor]
    dense: Dense
    shape: Shape
    same: bool = False
    once: bool = False
    factor: Callable[[int], float] = lambda _: 1.0
    uneven: tuple[int, ...] | None = (3, 1, 2)
    group: bool | None = True

    def operands(self, world: World) -> list[Tensor]:
        """Each rank's operand."""
        draw = torch.Generator().manual_seed(5)
        shapes = [self.shape(world, rank) for rank in range(world.size)]
        every = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
        return [every[0]] * world.size if self.same else every


Weights = tuple[list[Tensor], list[Tensor]]


def weights(case: Case, world: World, results: Sequence[Tensor], operands: Sequence[Tensor]) -> Weights:
    """The weights of the loss of each rank's result, and of the loss of each rank's gradient."""
    draw = torch.Generator().manual_seed(6)

    def drawn(tensors: Sequence[Tensor], equal: bool) -> list[Tensor]:
        every = [torch.randn(x.shape, dtype=torch.float64, generator=draw) for x in tensors]
        return [every[0]] * world.size if equal else every

    return drawn(results, case.once), drawn(operands, case.same)


def loss(result: Tensor, weight: Tensor) -> Tensor:
    """A loss that has a second derivative."""
    return (weight * result**3).sum()


@dataclass(frozen=True)
class Truth:
    """What one process computes: each rank's result, gradient and second derivative, and the weights of the losses."""

    values: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    weights: Weights


def truth(case: Case, world: World) -> Truth:
    """Compute it."""
    leaves = [x.clone().requires_grad_() for x in case.operands(world)]
    leaves = [leaves[0]] * world.size if case.same else leaves
    results = case.dense(leaves, world)
    on_results, on_gradients = weights(case, world, results, leaves)
    terms = [loss(y, w) for y, w in zip(results, on_results, strict=True)]
    total = terms[0] if case.once else torch.stack(terms).sum()
    distinct = leaves[:1] if case.same else leaves
    factor = case.factor(world.size)
    first = [factor * g for g in torch.autograd.grad(total, distinct, create_graph=True)]
    again = torch.stack([(v * g).sum() for v, g in zip(on_gradients, first, strict=False)]).sum()
    second = [factor * g for g in torch.autograd.grad(again, distinct)]
    times = world.size if case.same else 1
    return Truth(
        [y.detach() for y in results],
        [g.detach() for g in first] * times,
        second * times,
        (on_results, on_gradients),
    )


def found(case: Case, module: Any, world: World, true: Truth) -> Iterator[dict[str, Any]]:
    """What this rank computes beside the truth: the errors of value and gradient, then of the second derivative.

    An error that is raised stands for what it prevents, as text.
    """
    x = case.operands(world)[world.rank].requires_grad_()
    weight, on_gradient = (each[world.rank] for each in true.weights)

    def gradient(graph: bool) -> tuple[Tensor, Tensor]:
        result = case.call(module, x * 1, world)  # activations are not leaves
        if result.shape != weight.shape:
            raise WrongShapeError(f"{tuple(result.shape)} for {tuple(weight.shape)}")
        (slope,) = torch.autograd.grad(loss(result, weight), x, create_graph=graph)
        return result, slope

    try:
        result, slope = gradient(False)
    except Exception as error:
        yield {"raises": text_of(error)}
        return
    yield {
        "value": distance(result, true.values, world.rank),
        "first": distance(slope, true.first, world.rank),
    }
    try:
        _, slope = gradient(True)
        (again,) = torch.autograd.grad((on_gradient * slope).sum(), x)
        yield {"second": distance(again, true.second, world.rank)}
    except Exception as error:
        yield {"second": text_of(error)}


class WrongShapeError(Exception):
    """A result does not have its shape."""


def text_of(error: Exception) -> str:
    """The first line of an error, without addresses and paths."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}".replace(os.getcwd(), "")


def distance(one: Tensor, true: Sequence[Tensor], rank: int) -> float:
    """The largest difference from this rank's tensor, relative to the largest entry on any rank."""
    if one.shape != true[rank].shape:
        return float("inf")
    if not one.numel():
        return 0.0
    scale = max(float(x.abs().max()) for x in true if x.numel())
    off = float((one.detach().double() - true[rank]).abs().max())
    return float("inf") if off != off else off / (scale or 1.0)


# What functions compute in one process.


def gathered(dim: int = 0) -> Dense:
    """All ranks' tensors, concatenated."""
    return lambda xs, world: [torch.cat(list(xs), dim)] * world.size


def stacked(xs: Sequence[Tensor], world: World) -> list[Tensor]:
    """All ranks' tensors, stacked."""
    return [torch.stack(list(xs))] * world.size


def summed(xs: Sequence[Tensor], world: World) -> list[Tensor]:
    """The sum over the ranks."""
    return [torch.stack(list(xs)).sum(0)] * world.size


def kept(xs: Sequence[Tensor], world: World) -> list[Tensor]:
    """The identity."""
    return [x * 1 for x in xs]


def sliced(dim: int = 0) -> Dense:
    """Each rank's slice of a tensor that all hold."""
    return lambda xs, world: [x.split(list(world.sizes), dim)[rank] for rank, x in enumerate(xs)]


def sum_sliced(dim: int = 0) -> Dense:
    """Each rank's slice of the sum."""
    return lambda xs, world: list(torch.stack(list(xs)).sum(0).split(list(world.sizes), dim))


def sent(xs: Sequence[Tensor], world: World) -> list[Tensor]:
    """An exchange of rows, as many as `World.sends` says."""
    parts = [x.split(world.sends(rank)) for rank, x in enumerate(xs)]
    return [torch.cat([parts[source][rank] for source in range(world.size)]) for rank in range(world.size)]


def transposed(split: int, concat: int) -> Dense:
    """From shards along one dimension to shards along another."""
    return lambda xs, world: list(torch.cat(list(xs), concat).tensor_split(world.size, split))


def shifted(offset: int = 1) -> Dense:
    """The tensor of the rank before."""
    return lambda xs, world: [xs[(rank - offset) % world.size] * 1 for rank in range(world.size)]

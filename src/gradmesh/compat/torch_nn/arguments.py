"""Conversion and checks of the arguments of `torch.distributed.nn.functional`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradmesh import types
from gradmesh.errors import ArgumentError, ShapeError, message
from gradmesh.runtime.mesh import Axis, AxisLike, balanced, resolve, world_group

__all__ = ["Reduction", "axis_of", "equal", "fill", "one_each", "reduction_of", "root_of", "stack"]

# The types of the members of ReduceOp in torch's stubs, and ReduceOp itself.
Reduction = ReduceOp | ReduceOp.RedOpType

_REDUCTIONS: tuple[tuple[ReduceOp.RedOpType, types.Reduction], ...] = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "mean"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.PRODUCT, "prod"),
)


def _fail(
    problem: str, axis: Axis, op: str, expected: str, got: str, remedy: str, kind: type[ArgumentError]
) -> NoReturn:
    text = message(
        problem, op=f"compat.torch_nn.{op}", axis=str(axis), expected=expected, got=got, remedy=remedy
    )
    raise kind(text)


def axis_of(group: AxisLike, op: str) -> Axis:
    """The axis of a group; None is the world, even if there is a current mesh."""
    op = f"compat.torch_nn.{op}"
    return resolve(world_group(op) if group is None else group, op)


def root_of(rank: int, axis: Axis, op: str, name: str) -> int:
    """The index on the axis of a global rank."""
    ranks = axis.global_ranks
    if rank not in ranks:
        _fail(
            f"{name} is not in the group",
            axis,
            op,
            expected=f"one of the group's global ranks, {ranks}",
            got=f"{name}={rank!r}",
            remedy=f"pass a global rank, as in torch.distributed, e.g. {name}={ranks[0]}",
            kind=ArgumentError,
        )
    return ranks.index(rank)


def reduction_of(op: Reduction, axis: Axis, verb: str) -> types.Reduction:
    """Gradmesh's name of a torch reduction."""
    for theirs, ours in _REDUCTIONS:
        if op == theirs:
            return ours
    return _fail(
        "the reduction has no gradient rule",
        axis,
        verb,
        expected="SUM, AVG, MAX, MIN or PRODUCT",
        got=f"op={op}",
        remedy="for tensors that do not require grad, call torch.distributed directly",
        kind=ArgumentError,
    )


def one_each(tensors: Sequence[Tensor], axis: Axis, op: str) -> None:
    """Raise unless there is one tensor for each rank."""
    if not isinstance(tensors, Sequence) or len(tensors) != axis.size:
        _fail(
            "the list does not have one tensor for each rank of the group",
            axis,
            op,
            expected=f"a list of {axis.size} tensors, on every rank",
            got=f"{len(tensors)} tensors" if isinstance(tensors, Sequence) else type(tensors).__name__,
            remedy="pass one tensor for each rank; on ranks whose values are ignored, e.g. torch.empty(shape)",
            kind=ShapeError,
        )


def stack(tensors: Sequence[Tensor], axis: Axis, op: str) -> Tensor:
    """Stack one tensor for each rank, all of the same shape."""
    one_each(tensors, axis, op)
    if len({part.shape for part in tensors}) > 1:
        _fail(
            "the tensors have different shapes",
            axis,
            op,
            expected="the same shape for all ranks",
            got=", ".join(str(tuple(part.shape)) for part in tensors),
            remedy="use gradmesh.scatter, e.g. with sizes=(4, 3)",
            kind=ShapeError,
        )
    return torch.stack(list(tensors))


def equal(output: Tensor, axis: Axis) -> list[int]:
    """Equal sizes for each rank."""
    if output.size(0) % axis.size:
        _fail(
            "dim 0 of output is not divisible by the number of ranks",
            axis,
            "all_to_all_single",
            expected=f"a multiple of {axis.size}",
            got=f"size {output.size(0)}",
            remedy=f"pass e.g. output_split_sizes={list(balanced(output.size(0), axis.size))}",
            kind=ShapeError,
        )
    return [output.size(0) // axis.size] * axis.size


def fill(output: Tensor, result: Tensor, axis: Axis, op: str) -> Tensor:
    """Copy the values into `output`, as torch does, and return the differentiable result in its shape."""
    if output.numel() != result.numel():
        _fail(
            "output has another number of elements than the result",
            axis,
            op,
            expected=f"{result.numel()} elements",
            got=f"shape {tuple(output.shape)}",
            remedy=f"allocate e.g. torch.empty({tuple(result.shape)})",
            kind=ShapeError,
        )
    result = result.view(output.shape)
    output.detach().copy_(result.detach())
    return result

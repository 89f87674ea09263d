"""The arguments of `torch.distributed.nn.functional` in gradmesh's terms, and the checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradmesh import types
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.errors import ArgumentError, ShapeError, message
from gradmesh.world import world_group

__all__ = ["Reduction", "axis_of", "equal", "fill", "one_each", "reduction_of", "root_of", "stack"]

# What torch's stubs call the members of ReduceOp, and ReduceOp itself.
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
    """The ranks of a group; None is the world here, also where there is a current mesh."""
    op = f"compat.torch_nn.{op}"
    return resolve(world_group(op) if group is None else group, op)


def root_of(rank: int, axis: Axis, op: str, name: str) -> int:
    """The place on the axis of a rank of the world."""
    ranks = axis.global_ranks
    if rank not in ranks:
        _fail(
            f"{name} is not in the group",
            axis,
            op,
            expected=f"one of the group's ranks of the world, {ranks}",
            got=f"{name}={rank!r}",
            remedy=f"pass {name} as a rank of the world, as torch.distributed takes it",
            kind=ArgumentError,
        )
    return ranks.index(rank)


def reduction_of(op: Reduction, axis: Axis, verb: str) -> types.Reduction:
    """The name that gradmesh has for a reduction of torch."""
    for theirs, ours in _REDUCTIONS:
        if op == theirs:
            return ours
    return _fail(
        "the reduction has no gradient rule",
        axis,
        verb,
        expected="SUM, AVG, MAX, MIN or PRODUCT",
        got=f"op={op}",
        remedy="call torch.distributed itself, on tensors that need no gradient",
        kind=ArgumentError,
    )


def one_each(tensors: Sequence[Tensor], axis: Axis, op: str) -> None:
    """Refuse anything but one tensor for each rank."""
    if not isinstance(tensors, Sequence) or len(tensors) != axis.size:
        _fail(
            "not one tensor for each rank of the group",
            axis,
            op,
            expected=f"a list of {axis.size} tensors, on every rank",
            got=f"{len(tensors)} tensors" if isinstance(tensors, Sequence) else type(tensors).__name__,
            remedy="on ranks whose values do not count, pass empty tensors of the right shapes",
            kind=ShapeError,
        )


def stack(tensors: Sequence[Tensor], axis: Axis, op: str) -> Tensor:
    """One tensor for each rank, of one shape, in one."""
    one_each(tensors, axis, op)
    if len({part.shape for part in tensors}) > 1:
        _fail(
            "the tensors have different shapes",
            axis,
            op,
            expected="one shape for all ranks",
            got=", ".join(str(tuple(part.shape)) for part in tensors),
            remedy="use gradmesh.scatter with sizes=",
            kind=ShapeError,
        )
    return torch.stack(list(tensors))


def equal(output: Tensor, axis: Axis) -> list[int]:
    """The sizes of equal parts from each rank."""
    if output.size(0) % axis.size:
        _fail(
            "dim 0 of output cannot be split equally",
            axis,
            "all_to_all_single",
            expected=f"a size that {axis.size} ranks divide",
            got=f"size {output.size(0)}",
            remedy="pass output_split_sizes=",
            kind=ShapeError,
        )
    return [output.size(0) // axis.size] * axis.size


def fill(output: Tensor, result: Tensor, axis: Axis, op: str) -> Tensor:
    """Copy the values into `output`, as torch does, and return the differentiable result in its shape."""
    if output.numel() != result.numel():
        _fail(
            "output does not fit the result",
            axis,
            op,
            expected=f"{result.numel()} elements",
            got=f"shape {tuple(output.shape)}",
            remedy="make output as large as what this rank receives",
            kind=ShapeError,
        )
    result = result.view(output.shape)
    output.detach().copy_(result.detach())
    return result

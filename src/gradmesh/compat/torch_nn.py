"""Drop-in for `torch.distributed.nn.functional`: the same functions, with right gradients at every order.

=====================  =========  ====================================================================
function               type       backward
=====================  =========  ====================================================================
`all_gather`           V -> R     the sum over the ranks of the own tensor's gradients
`_all_gather_base`     V -> R     the same
`all_reduce`           P -> R     the sum for SUM, its mean for AVG; for MAX and MIN the ranks that hold the
                                  extremum share it; for PRODUCT the product rule, right with zeros
`all_to_all`           V -> V     the way back
`all_to_all_single`    V -> V     the way back
`broadcast`            V -> R     the sum at `src`, zeros elsewhere
`gather`               V -> V     each rank's part of the gradient at `dst`
`reduce`               P -> V     the gradient at `dst`, through the same rules as `all_reduce`
`reduce_scatter`       P -> V     concatenates
`scatter`              V -> V     the gradients of all ranks, at `src`
=====================  =========  ====================================================================

What stays as in torch: the signatures; `src` and `dst` are ranks of the world; the results' shapes, zeros where
`gather` and `reduce` have no result; backward sums over ranks, as is right for losses that differ; a tensor given as
`output` is filled, without a gradient, while the tensor that is returned has one.

What is new: a group is looked up when the function is called, and None is the world; anything that
`gradmesh.axis` takes will do for it. Every function and its gradient run on every backend, and no call warns.
"""

# The signatures are torch's own, where a tensor is called `input`.
# ruff: noqa: A002

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradmesh import collectives
from gradmesh.autograd import apply
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.compat.ksuit import separate
from gradmesh.errors import ArgumentError, ShapeError, message
from gradmesh.ops.broadcast import Reduce
from gradmesh.ops.gather import Gather
from gradmesh.ops.sizes import Sizes
from gradmesh.types import R
from gradmesh.world import world_group

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

# What torch's stubs call the members of ReduceOp, and ReduceOp itself.
_Reduction = ReduceOp | ReduceOp.RedOpType

_REDUCTIONS = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "mean"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.PRODUCT, "prod"),
)


def broadcast(tensor: Tensor, src: int, group: AxisLike = None) -> Tensor:
    """V at src -> R: the tensor of rank `src` of the world on every rank of the group; backward sums at `src`."""
    axis = _axis(group, "broadcast")
    return collectives.broadcast(tensor, axis, root=_root(src, axis, "broadcast", "src"))


def gather(tensor: Tensor, dst: int = 0, group: AxisLike = None) -> tuple[Tensor, ...]:
    """V -> V at dst: every rank's tensor at rank `dst` of the world, zeros elsewhere; backward is `scatter`.

    Every rank has to use one of its results in its loss, since the backward collective needs all ranks.
    """
    axis = _axis(group, "gather")
    root = _root(dst, axis, "gather", "dst")
    # The op itself: the verb asks for `ordered()`, which callers of torch's function know nothing of.
    stacked = apply(Gather(axis, 0, root, Sizes((1,) * axis.size)), tensor.unsqueeze(0))
    if axis.rank != root:
        # Sums over nothing: zeros that hang on the empty result, or this rank would miss the backward collective.
        return tuple(stacked.sum(0, dtype=tensor.dtype) for _ in range(axis.size))
    return separate(stacked)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: AxisLike = None) -> Tensor:
    """V at src -> V: rank r of the group gets `tensors[r]` of rank `src` of the world; backward is `gather`.

    The other ranks pass tensors of the same shape and dtype, as torch's own needs them to, whose values do not count.

    Raises:
        ShapeError: not one tensor for each rank, or tensors of different shapes.
    """
    axis = _axis(group, "scatter")
    root = _root(src, axis, "scatter", "src")
    stacked = _stack(tensors, axis, "scatter")
    if axis.rank != root:
        stacked = stacked[:0]
    return collectives.scatter(stacked, axis, root=root, sizes=(1,) * axis.size).squeeze(0)


def reduce(tensor: Tensor, dst: int, op: _Reduction = ReduceOp.SUM, group: AxisLike = None) -> Tensor:
    """P -> V at dst: the reduction at rank `dst` of the world, zeros elsewhere; backward hands out the gradient at dst.

    Raises:
        ArgumentError: an op that has no gradient rule, such as the bitwise ones.
    """
    axis = _axis(group, "reduce")
    root = _root(dst, axis, "reduce", "dst")
    reduction = _reduction(op, axis, "reduce")
    if reduction == "sum":
        return apply(Reduce(axis, root), tensor)  # not the verb, as in `gather`
    everywhere = collectives.all_reduce(tensor, axis, op=reduction, dst=R)
    elsewhere = torch.tensor(axis.rank != root, device=tensor.device)
    return everywhere.masked_fill(elsewhere, 0)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: _Reduction = ReduceOp.SUM, group: AxisLike = None
) -> Tensor:
    """P -> V: the reduction of all ranks' `input_list[r]` on rank r of the group; backward is `all_gather`.

    The tensors of `input_list` may have different shapes, the same ones on every rank.

    Raises:
        ArgumentError: an op that has no gradient rule, such as the bitwise ones.
        ShapeError: not one tensor for each rank, or an output that does not fit.
    """
    axis = _axis(group, "reduce_scatter")
    reduction = _reduction(op, axis, "reduce_scatter")
    _one_each(input_list, axis, "reduce_scatter")
    flat = torch.cat([part.reshape(-1) for part in input_list])
    sizes = [part.numel() for part in input_list]
    if reduction in ("sum", "mean"):
        mine = collectives.reduce_scatter(flat, axis, op=reduction, sizes=sizes)
    else:
        whole = collectives.all_reduce(flat, axis, op=reduction, dst=R)
        mine = whole.split(sizes)[axis.rank].clone()
    return _fill(output, mine, axis, "reduce_scatter")


def all_gather(tensor: Tensor, group: AxisLike = None) -> tuple[Tensor, ...]:
    """V -> R: every rank's tensor, of one shape on all ranks; backward sums over the ranks."""
    axis = _axis(group, "all_gather")
    return separate(collectives.all_gather(tensor.unsqueeze(0), axis))


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: AxisLike = None) -> Tensor:
    """V -> R: every rank's tensor in one, in the shape of `output_tensor`; backward sums over the ranks."""
    axis = _axis(group, "_all_gather_base")
    flat = collectives.all_gather(input_tensor.reshape(-1), axis)
    return _fill(output_tensor, flat, axis, "_all_gather_base")


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: AxisLike = None
) -> tuple[Tensor, ...]:
    """V -> V: rank r of the group gets `input_tensor_list[r]`; backward is the way back.

    Returns:
        What came from each rank, in the shapes of `output_tensor_list`, which may all differ.

    Raises:
        ShapeError: not one tensor for each rank.
    """
    axis = _axis(group, "all_to_all")
    _one_each(output_tensor_list, axis, "all_to_all")
    _one_each(input_tensor_list, axis, "all_to_all")
    send = [part.numel() for part in input_tensor_list]
    receive = [part.numel() for part in output_tensor_list]
    flat = torch.cat([part.reshape(-1) for part in input_tensor_list])
    got = collectives.all_to_all(flat, axis, split_sizes=send, concat_sizes=receive)
    parts = got.unsafe_split_with_sizes(receive)
    return tuple(
        _fill(output, part, axis, "all_to_all")
        for output, part in zip(output_tensor_list, parts, strict=True)
    )


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AxisLike = None,
) -> Tensor:
    """V -> V: rank r of the group gets the r-th part of `input` along dim 0; backward is the way back.

    Args:
        output: filled with the result.
        input: the parts for all ranks.
        output_split_sizes: the size of the part from each rank; None or empty: equal parts.
        input_split_sizes: the size of the part for each rank; None or empty: equal parts.
        group: the ranks to exchange among.

    Raises:
        ShapeError: sizes that do not add up, or an output that does not fit.
    """
    axis = _axis(group, "all_to_all_single")
    receive = output_split_sizes or _equal(output, axis)
    send = input_split_sizes or None
    got = collectives.all_to_all(input, axis, split_sizes=send, concat_sizes=receive)
    return _fill(output, got, axis, "all_to_all_single")


def all_reduce(tensor: Tensor, op: _Reduction = ReduceOp.SUM, group: AxisLike = None) -> Tensor:
    """P -> R: the reduction over the ranks, on each of them; backward sums (see the module for the other ops).

    Raises:
        ArgumentError: an op that has no gradient rule, such as the bitwise ones.
    """
    axis = _axis(group, "all_reduce")
    return collectives.all_reduce(tensor, axis, op=_reduction(op, axis, "all_reduce"), dst=R)


# ---- Arguments --------------------------------------------------------------------------------------------


def _fail(
    problem: str, axis: Axis, op: str, expected: str, got: str, remedy: str, kind: type[ArgumentError]
) -> NoReturn:
    text = message(
        problem, op=f"compat.torch_nn.{op}", axis=str(axis), expected=expected, got=got, remedy=remedy
    )
    raise kind(text)


def _axis(group: AxisLike, op: str) -> Axis:
    """The ranks of a group; None is the world here, also where there is a current mesh."""
    op = f"compat.torch_nn.{op}"
    return resolve(world_group(op) if group is None else group, op)


def _root(rank: int, axis: Axis, op: str, name: str) -> int:
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


def _reduction(op: _Reduction, axis: Axis, verb: str) -> str:
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


def _one_each(tensors: Sequence[Tensor], axis: Axis, op: str) -> None:
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


def _stack(tensors: Sequence[Tensor], axis: Axis, op: str) -> Tensor:
    _one_each(tensors, axis, op)
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


def _equal(output: Tensor, axis: Axis) -> list[int]:
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


def _fill(output: Tensor, result: Tensor, axis: Axis, op: str) -> Tensor:
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

"""Drop-in for `torch.distributed.nn.functional`: the same functions, with correct gradients of every order.

=====================  =========  ====================================================================
function               type       backward
=====================  =========  ====================================================================
`all_gather`           V -> R     the sum over the ranks of the gradients of this rank's tensor
`_all_gather_base`     V -> R     the same
`all_reduce`           P -> R     the sum for SUM, its mean for AVG; for MAX and MIN the ranks that hold the
                                  extremum share it; for PRODUCT the product rule, correct with zeros
`all_to_all`           V -> V     the inverse exchange
`all_to_all_single`    V -> V     the inverse exchange
`broadcast`            V -> R     the sum at `src`, zeros elsewhere
`gather`               V -> V     each rank's part of the gradient at `dst`
`reduce`               P -> V     the gradient at `dst`, through the same rules as `all_reduce`
`reduce_scatter`       P -> V     concatenates
`scatter`              V -> V     the gradients of all ranks, at `src`
=====================  =========  ====================================================================

As in torch: the signatures; `src` and `dst` are global ranks; the results' shapes, with zeros where `gather` and
`reduce` have no result; backward sums over ranks, as needed for losses that differ; `output` is filled without a
gradient, and the returned tensor has one.

New: `group` is anything that `gradmesh.axis` accepts, resolved at each call; None is the world. Every function and its
gradient run on every backend, without warnings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradmesh import types
from gradmesh.autograd.rule import apply
from gradmesh.compat import _shared
from gradmesh.compat._shared import separate
from gradmesh.errors import ArgumentError, ShapeError
from gradmesh.ops.sizes import balanced
from gradmesh.runtime.mesh import Axis, AxisLike, resolve, world_group
from gradmesh.types import R
from gradmesh.verbs import collectives

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

# The signatures are torch's own, where a tensor is called `input`.
# ruff: noqa: A002

# The types of the members of ReduceOp in torch's stubs, and ReduceOp itself.
Reduction = ReduceOp | ReduceOp.RedOpType

_REDUCTIONS: tuple[tuple[ReduceOp.RedOpType, types.Reduction], ...] = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "mean"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.PRODUCT, "prod"),
)


class _Call:
    """A call of a function: its name, and its axis. None is the world, even if there is a current mesh."""

    def __init__(self, name: str, group: AxisLike) -> None:
        self.op = f"compat.torch_nn.{name}"
        self.axis: Axis = resolve(world_group(self.op) if group is None else group, self.op)

    def fail(
        self, problem: str, *, expected: str, got: str, remedy: str, kind: type[ArgumentError] = ArgumentError
    ) -> NoReturn:
        axis = str(self.axis)
        raise kind.of(problem, op=self.op, axis=axis, expected=expected, got=got, remedy=remedy)

    def root(self, rank: int, name: str) -> int:
        """The index on the axis of a global rank."""
        ranks = self.axis.global_ranks
        if rank not in ranks:
            self.fail(
                f"{name} is not in the group",
                expected=f"one of the group's global ranks, {ranks}",
                got=f"{name}={rank!r}",
                remedy=f"pass a global rank, as in torch.distributed, e.g. {name}={ranks[0]}",
            )
        return ranks.index(rank)

    def reduction(self, op: Reduction) -> types.Reduction:
        """Gradmesh's name of a torch reduction."""
        for theirs, ours in _REDUCTIONS:
            if op == theirs:
                return ours
        return self.fail(
            "the reduction has no gradient rule",
            expected="SUM, AVG, MAX, MIN or PRODUCT",
            got=f"op={op}",
            remedy="for tensors that do not require grad, call torch.distributed directly",
        )

    def one_each(self, tensors: Sequence[Tensor]) -> None:
        """Raise unless there is one tensor for each rank."""
        if not isinstance(tensors, Sequence) or len(tensors) != self.axis.size:
            self.fail(
                "the list does not have one tensor for each rank of the group",
                expected=f"a list of {self.axis.size} tensors, on every rank",
                got=f"{len(tensors)} tensors" if isinstance(tensors, Sequence) else type(tensors).__name__,
                remedy="pass one tensor for each rank; on ranks whose values are ignored, e.g. torch.empty(shape)",
                kind=ShapeError,
            )

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack one tensor for each rank, all of the same shape."""
        self.one_each(tensors)
        if len({part.shape for part in tensors}) > 1:
            self.fail(
                "the tensors have different shapes",
                expected="the same shape for all ranks",
                got=", ".join(str(tuple(part.shape)) for part in tensors),
                remedy="use gradmesh.scatter, e.g. with sizes=(4, 3)",
                kind=ShapeError,
            )
        return torch.stack(list(tensors))

    def equal(self, output: Tensor) -> list[int]:
        """Equal sizes for each rank."""
        if output.size(0) % self.axis.size:
            self.fail(
                "dim 0 of output is not divisible by the number of ranks",
                expected=f"a multiple of {self.axis.size}",
                got=f"size {output.size(0)}",
                remedy=f"pass e.g. output_split_sizes={list(balanced(output.size(0), self.axis.size))}",
                kind=ShapeError,
            )
        return [output.size(0) // self.axis.size] * self.axis.size

    def fill(self, output: Tensor, result: Tensor) -> Tensor:
        """Copy the values into `output`, as torch does, and return the differentiable result in its shape."""
        if output.numel() != result.numel():
            self.fail(
                "output has another number of elements than the result",
                expected=f"{result.numel()} elements",
                got=f"shape {tuple(output.shape)}",
                remedy=f"allocate e.g. torch.empty({tuple(result.shape)})",
                kind=ShapeError,
            )
        result = result.view(output.shape)
        output.detach().copy_(result.detach())
        return result


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Reduction = ReduceOp.SUM, group: AxisLike = None
) -> Tensor:
    """Reduce `input_list[r]` of all ranks to rank r of the group.

    ::

        P -> V    W of shape (...) -> (...)    (x0[0], x0[1]) -> x0[0]+x1[0]      (g0, g1) <- g0
                                               (x1[0], x1[1]) -> x0[1]+x1[1]      (g0, g1) <- g1

    The picture is that of SUM; backward of the other ops is that of `all_reduce`.

    Args:
        output: filled with the result.
        input_list: one term for each rank; they may have different shapes, the same ones on every rank.
        op: SUM, AVG, MAX, MIN or PRODUCT.
        group: the ranks to combine.

    Raises:
        ArgumentError: an op without a gradient rule, such as the bitwise ones.
        ShapeError: `input_list` does not have one tensor for each rank, or `output` has another number of elements.

    Example:
        >>> def on_each_rank():
        ...     terms = [torch.tensor(1.0), torch.tensor(2.0 + gm.axis().rank)]
        ...     return reduce_scatter(torch.empty(()), terms).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [2.0, 5.0]
    """
    call = _Call("reduce_scatter", group)
    axis, reduction = call.axis, call.reduction(op)
    call.one_each(input_list)
    flat = torch.cat([part.reshape(-1) for part in input_list])
    sizes = [part.numel() for part in input_list]
    if reduction == "sum" or reduction == "mean":
        mine = collectives.reduce_scatter(flat, axis, op=reduction, sizes=sizes)
    else:
        whole = collectives.all_reduce(flat, axis, op=reduction, dst=R)
        mine = whole.split(sizes)[axis.rank].clone()
    return call.fill(output, mine)


def all_reduce(tensor: Tensor, op: Reduction = ReduceOp.SUM, group: AxisLike = None) -> Tensor:
    """Reduce the ranks' tensors; every rank gets the result.

    ::

        P -> R    shape (...) -> (...)    x0 -> x0+x1      g0+g1 <- g0
                                          x1 -> x0+x1      g0+g1 <- g1

    The picture is that of SUM. Backward of AVG is the mean; of MAX and MIN the sum goes to the ranks that hold the
    extremum, which share it; of PRODUCT it is the product rule, correct with zeros.

    Args:
        tensor: this rank's term.
        op: SUM, AVG, MAX, MIN or PRODUCT.
        group: the ranks to combine.

    Raises:
        ArgumentError: an op without a gradient rule, such as the bitwise ones.

    Example:
        >>> def on_each_rank():
        ...     return all_reduce(torch.tensor(1.0 + gm.axis().rank), op=torch.distributed.ReduceOp.MAX).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [2.0, 2.0]
    """
    call = _Call("all_reduce", group)
    return collectives.all_reduce(tensor, call.axis, op=call.reduction(op), dst=R)


def broadcast(tensor: Tensor, src: int, group: AxisLike = None) -> Tensor:
    """Send the tensor of one rank to every rank of the group.

    ::

        V at src -> R    shape (...) -> (...)    src  x0 -> x0      g0+g1 <- g0
                                                      x1 -> x0          0 <- g1

    Args:
        tensor: the value at `src`; elsewhere a tensor of the same shape and dtype, whose values are ignored.
        src: a global rank.
        group: the ranks that receive it.

    Raises:
        ArgumentError: `src` is not in the group.

    Example:
        >>> def on_each_rank():
        ...     return broadcast(torch.tensor(1.0 + gm.axis().rank), src=1).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [2.0, 2.0]
    """
    call = _Call("broadcast", group)
    return collectives.broadcast(tensor, call.axis, root=call.root(src, "src"))


def gather(tensor: Tensor, dst: int = 0, group: AxisLike = None) -> tuple[Tensor, ...]:
    """Gather all ranks' tensors on one rank; the others get zeros.

    ::

        V -> V at dst    shape (...) -> W of shape (...)    dst  x0 -> (x0, x1)      g0[0] <- (g0[0], g0[1])
                                                                 x1 -> (0, 0)        g0[1] <- (...)

    Every rank must use one of its results in its loss, because backward is a collective.

    Args:
        tensor: this rank's tensor, of the same shape on all ranks.
        dst: a global rank.
        group: the ranks to gather from.

    Raises:
        ArgumentError: `dst` is not in the group.

    Example:
        >>> def on_each_rank():
        ...     return [part.item() for part in gather(torch.tensor(1.0 + gm.axis().rank), dst=1)]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 0.0], [1.0, 2.0]]
    """
    call = _Call("gather", group)
    axis, root = call.axis, call.root(dst, "dst")
    row = tensor.unsqueeze(0)
    stacked = apply(_shared.gather(row, axis, root), row)
    if axis.rank != root:
        # Empty sums: zeros that depend on the empty result, so that this rank takes part in backward.
        return tuple(stacked.sum(0, dtype=tensor.dtype) for _ in range(axis.size))
    return separate(stacked)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: AxisLike = None) -> Tensor:
    """Send `tensors[r]` of one rank to rank r of the group.

    ::

        V at src -> V    W of shape (...) -> (...)    src  (x0, x1) -> x0      (g0, g1) <- g0
                                                           (..., ...) -> x1    (0, 0)   <- g1

    Args:
        tensors: at `src` one tensor for each rank; elsewhere as many of the same shape and dtype, as in torch, whose
            values are ignored.
        src: a global rank.
        group: the ranks that receive a tensor.

    Raises:
        ArgumentError: `src` is not in the group.
        ShapeError: `tensors` does not have one tensor for each rank, or their shapes differ.

    Example:
        >>> def on_each_rank():
        ...     rank = gm.axis().rank
        ...     return scatter([torch.tensor(rank), torch.tensor(rank + 5)], src=1).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1, 6]
    """
    call = _Call("scatter", group)
    axis, root, stacked = call.axis, call.root(src, "src"), call.stack(tensors)
    if axis.rank != root:
        stacked = stacked[:0]
    return collectives.scatter(stacked, axis, root=root, sizes=(1,) * axis.size).squeeze(0)


def reduce(tensor: Tensor, dst: int, op: Reduction = ReduceOp.SUM, group: AxisLike = None) -> Tensor:
    """Reduce the ranks' tensors on one rank; the others get zeros.

    ::

        P -> V at dst    shape (...) -> (...)    dst  x0 -> x0+x1      g0 <- g0
                                                      x1 -> 0          g0 <- g1

    The picture is that of SUM; backward of the other ops is that of `all_reduce`.

    Args:
        tensor: this rank's term.
        dst: a global rank.
        op: SUM, AVG, MAX, MIN or PRODUCT.
        group: the ranks to combine.

    Raises:
        ArgumentError: `dst` is not in the group, or the op has no gradient rule, such as the bitwise ones.

    Example:
        >>> def on_each_rank():
        ...     return reduce(torch.tensor(1.0 + gm.axis().rank), dst=1).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.0, 3.0]
    """
    call = _Call("reduce", group)
    axis, root, reduction = call.axis, call.root(dst, "dst"), call.reduction(op)
    if reduction == "sum":
        return apply(_shared.reduce(tensor, axis, root), tensor)
    everywhere = collectives.all_reduce(tensor, axis, op=reduction, dst=R)
    elsewhere = torch.tensor(axis.rank != root, device=tensor.device)
    return everywhere.masked_fill(elsewhere, 0)


def all_gather(tensor: Tensor, group: AxisLike = None) -> tuple[Tensor, ...]:
    """All ranks' tensors, on every rank.

    ::

        V -> R    shape (...) -> W of shape (...)    x0 -> (x0, x1)      g0[0]+g1[0] <- (g0[0], g0[1])
                                                     x1 -> (x0, x1)      g0[1]+g1[1] <- (g1[0], g1[1])

    Args:
        tensor: this rank's tensor, of one shape on all ranks.
        group: the ranks to gather from.

    Raises:
        MismatchError: the shapes differ (on backends that can tell).

    Example:
        >>> def on_each_rank():
        ...     return [part.item() for part in all_gather(torch.tensor(gm.axis().rank))]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [0, 1]]
    """
    return separate(collectives.all_gather(tensor.unsqueeze(0), _Call("all_gather", group).axis))


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: AxisLike = None) -> Tensor:
    """All ranks' tensors concatenated, on every rank.

    ::

        V -> R    shape (n, ...) -> (W n, ...)    x0 -> [x0 x1]      g0[0]+g1[0] <- [g0[0] g0[1]]
                                                  x1 -> [x0 x1]      g0[1]+g1[1] <- [g1[0] g1[1]]

    Args:
        output_tensor: filled with the result, which has its shape; any shape with W times the elements.
        input_tensor: this rank's tensor, of one shape on all ranks.
        group: the ranks to gather from.

    Raises:
        ShapeError: `output_tensor` has another number of elements.

    Example:
        >>> def on_each_rank():
        ...     return _all_gather_base(torch.empty(2), torch.tensor([1.0 + gm.axis().rank])).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[1.0, 2.0], [1.0, 2.0]]
    """
    call = _Call("_all_gather_base", group)
    return call.fill(output_tensor, collectives.all_gather(input_tensor.reshape(-1), call.axis))


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: AxisLike = None
) -> tuple[Tensor, ...]:
    """Send `input_tensor_list[r]` to rank r of the group.

    ::

        V -> V    W of any shapes -> W of any shapes    (a0, a1) -> (a0, b0)      (g0[0], g1[0]) <- (g0[0], g0[1])
                                                        (b0, b1) -> (a1, b1)      (g0[1], g1[1]) <- (g1[0], g1[1])

    Args:
        output_tensor_list: filled with the results.
        input_tensor_list: one tensor for each rank.
        group: the ranks to exchange among.

    Returns:
        The tensors received from each rank, in the shapes of `output_tensor_list`, which may all differ.

    Raises:
        ShapeError: a list does not have one tensor for each rank, or an output has another number of elements.

    Example:
        >>> def on_each_rank():
        ...     mine = list(10.0 * gm.axis().rank + torch.arange(2.0))
        ...     return [part.item() for part in all_to_all(list(torch.empty(2)), mine)]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 10.0], [1.0, 11.0]]
    """
    call = _Call("all_to_all", group)
    call.one_each(output_tensor_list)
    call.one_each(input_tensor_list)
    send = [part.numel() for part in input_tensor_list]
    receive = [part.numel() for part in output_tensor_list]
    flat = torch.cat([part.reshape(-1) for part in input_tensor_list])
    got = collectives.all_to_all(flat, call.axis, split_sizes=send, concat_sizes=receive)
    return tuple(map(call.fill, output_tensor_list, got.unsafe_split_with_sizes(receive)))


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AxisLike = None,
) -> Tensor:
    """Send the r-th part of `input` along dim 0 to rank r of the group.

    ::

        V -> V    shape (n, ...) -> (m, ...)    [a0 a1] -> [a0 b0]      [g0[0] g1[0]] <- [g0[0] g0[1]]
                                                [b0 b1] -> [a1 b1]      [g0[1] g1[1]] <- [g1[0] g1[1]]

    Args:
        output: filled with the result.
        input: the parts for all ranks.
        output_split_sizes: the size of the part from each rank; None or empty: equal parts.
        input_split_sizes: the size of the part for each rank; None or empty: equal parts.
        group: the ranks to exchange among.

    Raises:
        ShapeError: the sizes do not add up, or `output` has another number of elements.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all_single(torch.empty(2), 10 * gm.axis().rank + torch.arange(2.0)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 10.0], [1.0, 11.0]]
    """
    call = _Call("all_to_all_single", group)
    receive = output_split_sizes or call.equal(output)
    got = collectives.all_to_all(
        input, call.axis, split_sizes=input_split_sizes or None, concat_sizes=receive
    )
    return call.fill(output, got)

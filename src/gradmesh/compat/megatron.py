"""Drop-in for `megatron.core.tensor_parallel.mappings`: mappings of tensor and sequence parallel regions.

===================================================  ========  =============================  =====================
name                                                 type      forward                        backward
===================================================  ========  =============================  =====================
`copy_to_tensor_model_parallel_region`               I -> R    identity                       sum
`reduce_from_tensor_model_parallel_region`           P -> I    sum                            identity
`scatter_to_tensor_model_parallel_region`            I -> V    local slice of the last dim    concatenate
`gather_from_tensor_model_parallel_region`           V -> I    concatenate along the last     local slice
`all_gather_last_dim_from_tensor_parallel_region`    V -> R    concatenate along the last     sum, local slice
`reduce_scatter_last_dim_to_tensor_parallel_region`  P -> V    sum, local slice of the last   concatenate
`scatter_to_sequence_parallel_region`                I -> V    local slice of the first dim   concatenate
`gather_from_sequence_parallel_region`               V -> R    concatenate along the first    sum, local slice
the same, `tensor_parallel_output_grad=False`        V -> I    concatenate along the first    local slice
`reduce_scatter_to_sequence_parallel_region`         P -> V    sum, local slice of the first  concatenate
`all_to_all`                                         V -> V    exchange parts of the first    the inverse exchange
`all_to_all_sp2hp`                                   V -> V    gather rows, shard columns     `all_to_all_hp2sp`
`all_to_all_hp2sp`                                   V -> V    gather columns, shard rows     `all_to_all_sp2hp`
===================================================  ========  =============================  =====================

`group` is a ProcessGroup or anything that `gradmesh.axis` accepts; or an object with `rank()` and `size()` that has one
rank, or the ProcessGroup of its ranks as an attribute. None is the group of `set_default_group`, such as
`parallel_state.get_tensor_model_parallel_group`; else the axis "tp" of the current mesh if it has one, else the current
mesh's only axis, else the world. Results never alias the input, also on a group of one rank, and no gradient is summed
in place.

The autograd Functions have the original's names: `_CopyToModelParallelRegion`, ..., `_AllToAll`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, SupportsInt, runtime_checkable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradmesh.autograd.rule import apply
from gradmesh.compat import _shared
from gradmesh.compat._shared import (
    COPY,
    GATHER,
    GATHER_SUM_GRAD,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    OpFunction,
    adjoint,
    again,
    region,
    run,
    single_rank_axis,
)
from gradmesh.errors import AxisError
from gradmesh.ops.base import LinearOp
from gradmesh.ops.sizes import balanced
from gradmesh.runtime.mesh import Axis, AxisLike, current_mesh, resolve
from gradmesh.runtime.state import rank_state
from gradmesh.types import Convention, I, R
from gradmesh.verbs import collectives

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_default_group",
]

Sizes = Iterable[SupportsInt] | None
"""Sizes as lists, NumPy arrays or tensors."""


@runtime_checkable
class Ranks(Protocol):
    """The interface of Megatron's groups; some callers pass custom objects."""

    def rank(self) -> int:
        """This rank's index in the group."""

    def size(self) -> int:
        """The number of ranks."""


Group = AxisLike | Ranks


@dataclass(frozen=True)
class _Default:
    which: Group | Callable[[], Group]


def set_default_group(group: Group | Callable[[], Group]) -> None:
    """Set the meaning of `group=None` on this rank.

    `set_default_group(parallel_state.get_tensor_model_parallel_group)` gives it the same meaning as in Megatron.

    Args:
        group: a group; or a function without arguments that returns one, called each time; None restores the initial
            meaning: the axis "tp" of the current mesh if it has one, else its only axis, else the world.

    Example:
        >>> from gradmesh.compat import megatron
        >>> def on_each_rank():
        ...     pairs = gm.mesh(pair=2, tp=-1)
        ...     megatron.set_default_group(lambda: pairs.get_group("pair"))
        ...     found = megatron.gather_from_tensor_model_parallel_region(torch.tensor([gm.rank("tp")]))
        ...     megatron.set_default_group(None)
        ...     return found.tolist()
        >>> gm.launch(on_each_rank, 4, backend="threads")
        [[0, 0], [1, 1], [0, 0], [1, 1]]
    """
    rank_state().drop(_Default)
    if group is not None:
        rank_state().put(_Default(group))


def axis_of(group: Group) -> Axis:
    """The axis of a group; None is the default group, else the axis "tp" of the current mesh."""
    default = rank_state().get(_Default) if group is None else None
    if default is not None:
        group = default.which() if callable(default.which) else default.which
    mesh = current_mesh()
    if group is None and mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        group = "tp"
    known = group is None or isinstance(group, str | dist.ProcessGroup | DeviceMesh | Axis)
    if not known and isinstance(group, Ranks):
        return _of_ranks(group)
    return resolve(group, "compat.megatron")  # type: ignore[arg-type]  # raises for other types


def _of_ranks(group: Ranks) -> Axis:
    """The axis of a custom group object; with several ranks, it must have a ProcessGroup as an attribute."""
    if group.size() == 1:
        return single_rank_axis("group")
    held = [
        value for value in getattr(group, "__dict__", {}).values() if isinstance(value, dist.ProcessGroup)
    ]
    same = [one for one in held if (one.rank(), one.size()) == (group.rank(), group.size())]
    if len(same) != 1:
        raise AxisError.of(
            "cannot find the process group of a custom group object",
            op="compat.megatron",
            expected="a ProcessGroup, or an object with exactly one attribute that is a ProcessGroup of the same "
            "rank and size",
            got=f"{type(group).__name__}, rank {group.rank()} of {group.size()}, with {len(same)} such attributes",
            remedy="pass the ProcessGroup itself",
        )
    return resolve(same[0], "compat.megatron")


def ints(sizes: Sizes) -> list[int] | None:
    """Sizes as ints."""
    return None if sizes is None else [int(size) for size in sizes]


class _Mapping(OpFunction):
    """A Function of Megatron, whose tests also call `symbolic`."""

    @classmethod
    def symbolic(cls, graph: Any, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG003
        """The result of Megatron's `forward`, also of a subclass with another; `graph` is ignored."""
        mapping: Any = next(each for each in cls.__mro__ if each.__module__ == __name__)
        result: Tensor = mapping.forward(None, *args, **kwargs)
        return result


def _forward(make: Callable[[Tensor, Axis], LinearOp]) -> Any:
    """`forward(ctx, input_, group)` that applies an op and saves it on `ctx`."""

    def forward(ctx: Any, input_: Tensor, group: Group = None) -> Tensor:
        return run(ctx, make(input_, axis_of(group)), input_, others=1)

    return staticmethod(forward)


def _backward(make: Callable[[Tensor, Axis, Any], LinearOp], others: int = 1, before: int = 0) -> Any:
    """`backward(ctx, grad_output)`, also for a context that only has the attributes of Megatron's, as in its tests.

    `make` returns the op for such a context. `forward` has `before` arguments before the tensor, and `others` after it.
    """

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if hasattr(ctx, "group") and not hasattr(ctx, "gradmesh_call"):
            grad = apply(make(grad_output, axis_of(ctx.group), ctx), grad_output)
        else:
            grad = adjoint(ctx, grad_output)
        return *[None] * before, grad, *[None] * others

    return staticmethod(backward)


class _CopyToModelParallelRegion(_Mapping):
    """I -> R: the identity; backward sums."""

    forward = _forward(_shared.replicate)
    backward = _backward(lambda grad, axis, _: _shared.all_reduce(grad, axis, dst=I))


class _ReduceFromModelParallelRegion(_Mapping):
    """P -> I: the sum; backward passes the gradient on."""

    forward = _forward(lambda x, axis: _shared.all_reduce(x, axis, dst=I))
    backward = _backward(lambda grad, axis, _: _shared.replicate(grad, axis))


class _ScatterToModelParallelRegion(_Mapping):
    """I -> V: this rank's slice of the last dimension; backward concatenates."""

    forward = _forward(lambda x, axis: _shared.shard(x, axis, -1, balanced))
    backward = _backward(lambda grad, axis, _: _shared.all_gather(grad, axis, -1, dst=I))


class _GatherFromModelParallelRegion(_Mapping):
    """V -> I: concatenate along the last dimension; backward keeps this rank's slice."""

    forward = _forward(lambda x, axis: _shared.all_gather(x, axis, -1, dst=I))
    backward = _backward(lambda grad, axis, _: _shared.shard(grad, axis, -1, balanced))


class _ScatterToSequenceParallelRegion(_Mapping):
    """I -> V: this rank's slice of the first dimension; backward concatenates."""

    forward = _forward(lambda x, axis: _shared.shard(x, axis, 0, balanced))
    backward = _backward(lambda grad, axis, _: _shared.all_gather(grad, axis, 0, dst=I))


def _slice_of_rows(grad: Tensor, axis: Axis, ctx: Any) -> LinearOp:
    sizes = ints(ctx.output_split_sizes)
    if ctx.tensor_parallel_output_grad:
        return _shared.reduce_scatter(grad, axis, 0, sizes)
    return _shared.shard(grad, axis, 0, lambda total, ranks: sizes or balanced(total, ranks))


class _GatherFromSequenceParallelRegion(_Mapping):
    """V -> R, or V -> I: concatenate along the first dimension."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: Group = None,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sizes = None,
        use_global_buffer: bool = False,  # ignored: results are always freshly allocated
    ) -> Tensor:
        """Gather, and save the op on `ctx`."""
        dst, sizes = R if tensor_parallel_output_grad else I, ints(output_split_sizes)
        op = _shared.all_gather(input_, axis_of(group), 0, dst=dst, sizes=sizes)
        given = {"tensor_parallel_output_grad": dst is R, "output_split_sizes": output_split_sizes}
        return run(ctx, op, input_, others=4, use_global_buffer=use_global_buffer, **given)

    backward = _backward(_slice_of_rows, others=4)


class _ReduceScatterToSequenceParallelRegion(_Mapping):
    """P -> V: the sum, and this rank's slice of the first dimension; backward concatenates."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: Group = None,
        input_split_sizes: Sizes = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        """Sum, keep this rank's slice, and save the op on `ctx`."""
        op = _shared.reduce_scatter(input_, axis_of(group), 0, ints(input_split_sizes))
        given = {"input_split_sizes": input_split_sizes, "use_global_buffer": use_global_buffer}
        return run(ctx, op, input_, others=3, **given)

    backward = _backward(
        lambda grad, axis, ctx: _shared.all_gather(grad, axis, 0, dst=R, sizes=ints(ctx.input_split_sizes)),
        others=3,
    )


class _AllGatherFromTensorParallelRegion(_Mapping):
    """V -> R: concatenate along the last dimension; backward sums and keeps this rank's slice."""

    forward = _forward(lambda x, axis: _shared.all_gather(x, axis, -1, dst=R))
    backward = _backward(lambda grad, axis, _: _shared.reduce_scatter(grad, axis, -1))


class _ReduceScatterToTensorParallelRegion(_Mapping):
    """P -> V: the sum, and this rank's slice of the last dimension; backward concatenates."""

    forward = _forward(lambda x, axis: _shared.reduce_scatter(x, axis, -1))
    backward = _backward(lambda grad, axis, _: _shared.all_gather(grad, axis, -1, dst=R))


class _AllToAll(_Mapping):
    """V -> V: exchange parts of the first dimension; backward is the inverse exchange. The group comes first."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        input: Tensor,  # noqa: A002 - its name in the original
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
    ) -> Tensor:
        """Exchange, and save the op on `ctx`."""
        op = _shared.all_to_all(input, axis_of(group), ints(input_split_sizes), ints(output_split_sizes))
        given = {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
        return run(ctx, op, input, others=3, **given)

    backward = _backward(
        lambda grad, axis, ctx: _shared.all_to_all(
            grad, axis, ints(ctx.output_split_sizes), ints(ctx.input_split_sizes)
        ),
        others=2,
        before=1,
    )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Exchange the tangent."""
        return again(ctx, tangents[1])


@region(GATHER_SUM_GRAD, "(..., n) -> (..., W n)")
def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Concatenate along the last dimension, into a tensor that each rank uses differently.

    Args:
        input_: this rank's shard, of the same shape on all ranks.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (detected on some backends).
    """
    return collectives.all_gather(input_, axis_of(group), -1, dst=R)


@region(COPY)
def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Mark that the ranks use `input_` differently from here on: the identity, with summed gradients.

    Args:
        input_: the same tensor on every rank.
        group: the ranks of the tensor parallel group.
    """
    return collectives.replicate(input_, axis_of(group))


@region(GATHER, "(..., n) -> (..., W n)")
def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Concatenate along the last dimension, into a tensor on which every rank does identical work.

    Args:
        input_: this rank's shard, of the same shape on all ranks.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (detected on some backends).
    """
    return collectives.all_gather(input_, axis_of(group), -1, dst=I)


@region(REDUCE)
def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Sum over the ranks, into a tensor on which every rank does identical work.

    Args:
        input_: this rank's term.
        group: the ranks of the tensor parallel group.

    Raises:
        MismatchError: the shapes or dtypes differ (detected on some backends).
    """
    return collectives.all_reduce(input_, axis_of(group), dst=I)


@region(REDUCE_SCATTER, "(..., n) -> (..., n/W)")
def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Sum over the ranks; each rank keeps its slice of the last dimension.

    Args:
        input_: this rank's term of the sum, with the full last dimension.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the last dimension is not divisible by the number of ranks.
    """
    return collectives.reduce_scatter(input_, axis_of(group), -1)


@region(SCATTER, "(..., n) -> (..., n/W)")
def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's slice of the last dimension.

    Args:
        input_: the same tensor on every rank.
        group: the ranks of the tensor parallel group.
    """
    return collectives.shard(input_, axis_of(group), -1)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: Sizes = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - results are always freshly allocated
) -> Tensor:
    """Concatenate along the first dimension.

    ::

        V -> R    shape (n, ...) -> (W n, ...)    a -> [a b]      g0[a]+g1[a] <- g0
                                                  b -> [a b]      g0[b]+g1[b] <- g1

        V -> I    the same forward; backward returns the local slice, g[a] and g[b]

    Args:
        input_: this rank's shard.
        tensor_parallel_output_grad: True if tensor parallel work follows, which uses the result differently on each
            rank: backward sums over the ranks (V -> R). False: backward returns the local slice (V -> I).
        group: the ranks to gather from.
        output_split_sizes: each rank's size along the first dimension; None: the same on every rank.
        use_global_buffer: ignored.

    Raises:
        ShapeError: `input_` does not match `output_split_sizes`.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([1.0], requires_grad=True)
        ...     ((1 + gm.axis().rank) * gather_from_sequence_parallel_region(x)).sum().backward()
        ...     return x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[3.0], [3.0]]
    """
    dst: Convention = R if tensor_parallel_output_grad else I
    return collectives.all_gather(input_, axis_of(group), 0, dst=dst, sizes=ints(output_split_sizes))


@region(REDUCE_SCATTER, "(n, ...) -> (n/W, ...)")
def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Group = None,
    input_split_sizes: Sizes = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - results are always freshly allocated
) -> Tensor:
    """Sum over the ranks; each rank keeps its slice of the first dimension.

    Args:
        input_: this rank's term of the sum, with the full first dimension.
        group: the ranks to sum over.
        input_split_sizes: each rank's size along the first dimension; None: equal sizes.
        use_global_buffer: ignored.

    Raises:
        ShapeError: the sizes do not add up; or None, and the first dimension is not divisible by the number of ranks.
    """
    return collectives.reduce_scatter(input_, axis_of(group), 0, sizes=ints(input_split_sizes))


@region(SCATTER, "(n, ...) -> (n/W, ...)")
def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's slice of the first dimension.

    Args:
        input_: the same tensor on every rank.
        group: the ranks of the tensor parallel group.
    """
    return collectives.shard(input_, axis_of(group), 0)


def all_to_all(
    group: Group, input_: Tensor, output_split_sizes_: Sizes = None, input_split_sizes: Sizes = None
) -> Tensor:
    """Send the r-th part of the first dimension to rank r.

    ::

        V -> V    shape (n, ...) -> (m, ...)    [a0 a1] -> [a0 b0]      [g0[0] g1[0]] <- [g0[0] g0[1]]
                                                [b0 b1] -> [a1 b1]      [g0[1] g1[1]] <- [g1[0] g1[1]]

    Args:
        group: the ranks to exchange among.
        input_: the parts for all ranks.
        output_split_sizes_: the size of the part from each rank; None: equal parts. (The original has the underscore.)
        input_split_sizes: the size of the part for each rank; None: equal parts.

    Raises:
        ShapeError: the sizes do not add up; or None, and the first dimension is not divisible by the number of ranks.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all(None, 10 * gm.axis().rank + torch.arange(2)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 10], [1, 11]]
    """
    send, receive = ints(input_split_sizes), ints(output_split_sizes_)
    return collectives.all_to_all(input_, axis_of(group), split_sizes=send, concat_sizes=receive)


def all_to_all_hp2sp(input_: Tensor, group: Group = None) -> Tensor:
    """From sharded columns to sharded rows; backward is `all_to_all_sp2hp`.

    ::

        V -> V    shape (n, H/W) -> (n/W, H)    [a0] -> [a0 b0]      [g0[0]] <- [g0[0] g0[1]]
                                                [a1]                 [g1[0]]
                                                [b0] -> [a1 b1]      [g0[1]] <- [g1[0] g1[1]]
                                                [b1]                 [g1[1]]

    Args:
        input_: this rank's columns; leading dimensions are flattened into the rows.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the number of rows is not divisible by the number of ranks.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all_hp2sp(torch.arange(2).view(2, 1) + 10 * gm.axis().rank).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0, 10]], [[1, 11]]]
    """
    rows = input_.reshape(-1, input_.shape[-1])
    return collectives.all_to_all(rows, axis_of(group), split_dim=0, concat_dim=1)


def all_to_all_sp2hp(input_: Tensor, group: Group = None) -> Tensor:
    """From sharded rows to sharded columns; backward is `all_to_all_hp2sp`.

    ::

        V -> V    shape (n/W, H) -> (n, H/W)    [a0 a1] -> [a0]      [g0[0] g1[0]] <- [g0[0]]
                                                           [b0]                       [g0[1]]
                                                [b0 b1] -> [a1]      [g0[1] g1[1]] <- [g1[0]]
                                                           [b1]                       [g1[1]]

    Args:
        input_: this rank's rows; leading dimensions are flattened into them.
        group: the ranks of the tensor parallel group.

    Raises:
        ShapeError: the number of columns is not divisible by the number of ranks.

    Example:
        >>> def on_each_rank():
        ...     return all_to_all_sp2hp(torch.arange(2).view(1, 2) + 10 * gm.axis().rank).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0], [10]], [[1], [11]]]
    """
    rows = input_.reshape(-1, input_.shape[-1])
    return collectives.all_to_all(rows, axis_of(group), split_dim=1, concat_dim=0)

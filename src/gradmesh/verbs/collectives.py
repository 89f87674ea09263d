"""The verbs: each resolves its axis, builds the op and applies it.

The registry (`gradmesh.ops`) lists the ops with their types and adjoints. Below, W is the number of ranks of the axis,
shapes are those of one rank, and pictures show two ranks: inputs, outputs, and how the gradients (g) flow back.

Every verb takes:

* `axis`: the name of an axis of the current mesh, a ProcessGroup, a 1-D DeviceMesh, an Axis, or None (the current
  mesh's only axis, else the world).
* `comm_dtype`, `backward_dtype`: the dtypes that are sent forward and backward, the same on every rank; results have
  the operand's dtype. Where nothing is sent, the value is rounded to it too.
* `dim`, if it takes one: a dimension of the local tensor, by number (negative from the end) or by a name from
  `gradmesh.named`. The result has the dimension names of the operand.
* `async_op`: start the call and return a `gradmesh.Pending`, whose `wait()` returns the result. In backward, the
  gradient collective is started at the point of `wait()`.

Several verbs take `sizes`, each rank's size along `dim`: a sequence of W ints; None: the same on every rank (for an
operand that is whole on every rank, equal slices); "auto": exchanged by one small all-gather; or "balanced": the split
of `shard`, where the first ranks get one more. For shards, "balanced" exchanges the sizes as "auto" does, and every
rank raises `ShapeError` if they are not that split.

On a device, no verb makes the host wait for the device, forward or backward. Sizes and shapes that are exchanged travel
on the CPU if the process group has a backend for it; otherwise the host waits once in each exchange.

`all_gather`, `all_reduce`, `broadcast`, `permute`, `replicate` and `shift` also take a (nested) tuple, list or dict of
tensors, and return the same structure. The tensors of a dtype are sent as one message, unless `sizes` are passed. Every
rank passes the same structure; an error names the tensor that it is about.

Every verb raises `AxisError` for an unknown axis, `NotInitializedError` before `init`, `ArgumentError` for an invalid
argument, `ShapeError` for a shape it cannot split or concatenate and `DTypeError` for an unsupported dtype; each before
anything is sent. A rank that raises notifies the other ranks, whose call then raises `MismatchError` with that rank's
error and call site. For this it waits until the other ranks make their call, at most for the group's timeout; after an
`AxisError` the other ranks cannot be notified. After such an error further calls work.

Results are always fresh memory, and operands are only read. The result has the operand's memory format, such as
channels_last, forward and backward, if it has the operand's shape or differs from it only along the outermost dimension
in memory, as in a gather of batches. Any other result is contiguous, and so are results in tuples, lists and dicts.
Ranks may use different formats.

In forward mode every rank has to give its operand a tangent (zeros if it has none), because every rank takes part in
the collective on the tangents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from gradmesh._torch import keyword_fields_last
from gradmesh._util.structure import Tree, is_structure
from gradmesh.autograd.pending import Pending, start_op
from gradmesh.autograd.rule import apply
from gradmesh.dims import DimLike, known_names
from gradmesh.ops.all_gather import AllGather, ReduceScatter
from gradmesh.ops.all_reduce import AllReduce, AllReduceInvariant, Replicate
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.broadcast import Broadcast, BroadcastInvariant, Reduce
from gradmesh.ops.convert import (
    InvariantToPartial,
    PartialFromVarying,
    ReplicatedToInvariant,
    ReplicatedToPartial,
    VaryingFromReplicated,
)
from gradmesh.ops.gather import Gather, Scatter
from gradmesh.ops.halo import HaloExchange
from gradmesh.ops.mean import Mean
from gradmesh.ops.pair import Receive, Send
from gradmesh.ops.permute import Permute, Shift
from gradmesh.ops.scan import Exscan, Scan
from gradmesh.ops.shard import AllGatherInvariant, Shard, ShardReplicated
from gradmesh.ops.sizes import Sizes
from gradmesh.runtime.mesh import AxisLike
from gradmesh.transport import compiling
from gradmesh.types import Convention, I, P, R, Reduction, Type, V
from gradmesh.verbs import pytrees, reductions
from gradmesh.verbs.call import Call, CountsByRank, RowsByRank, SizesLike, integer, neighbors, verb

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "convert",
    "exchange",
    "exscan",
    "gather",
    "halo_exchange",
    "neighbor_all_to_all",
    "permute",
    "recv",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scan",
    "scatter",
    "send",
    "shard",
    "shift",
    "sizes",
]

# mypy: disable-error-code="no-any-return"


# All op classes exist here; compiled programs create some of them.
keyword_fields_last(Op)

StructureT = TypeVar("StructureT", bound=Sequence[Tree] | Mapping[Any, Tree])

_ALL_GATHERS = {R: AllGather, I: AllGatherInvariant}
_ALL_REDUCES = {R: AllReduce, I: AllReduceInvariant}
_REDUCTIONS = {name: name for name in ("sum", "mean", *reductions.RULES)}
_WHICH_DST = (
    "pass dst=gm.R if each rank uses the result differently: backward sums the ranks' gradients;\n"
    "pass dst=gm.I if every rank repeats the same work on it: backward does not sum"
)


_BY_TORCHS_NAME = {"avg": "mean", "average": "mean", "product": "prod", "add": "sum"}


def _named_by_torch(op: object, choices: Iterable[str]) -> str:
    """What a reduction is called here that is called as torch or NCCL do; "" for any other."""
    name = str(op).lower().rpartition(".")[2]  # of ReduceOp.AVG and RedOpType.AVG too
    name = _BY_TORCHS_NAME.get(name, name)
    return f'pass op="{name}"' if name in choices else ""


@overload
def all_reduce(
    x: Tensor,
    axis: AxisLike = None,
    *,
    op: Reduction = "sum",
    dst: Convention,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def all_reduce(
    x: StructureT,
    axis: AxisLike = None,
    *,
    op: Reduction = "sum",
    dst: Convention,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> StructureT: ...
@overload
def all_reduce(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def all_reduce(x: StructureT, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[StructureT]: ...
@overload
def all_reduce(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb("dst")
def all_reduce(
    x: Tensor,
    axis: AxisLike = None,
    *,
    op: Reduction = "sum",
    dst: Convention,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    r"""Combine the ranks' tensors elementwise; every rank gets the result.

    ::

        P -> R    shape (...) -> (...)         x0 \          / x0+x1     g0+g1 \          / g0
                                                    sum  ->                      <-  sum
                                               x1 /          \ x0+x1     g0+g1 /          \ g1

        P -> I    the same forward; backward is the identity, as g0 = g1 = g is the full gradient

    Args:
        x: this rank's term; or a tuple, list or dict of such.
        op: "sum"; "mean", the sum divided by W (torch's `ReduceOp.AVG`; "avg" raises an error that names it); or "max",
            "min", "prod", "logsumexp". Ties of max and min share the gradient equally, prod has correct gradients with
            zero factors, logsumexp is shifted so that it does not overflow. max and min propagate a NaN of any rank.
            prod gathers all ranks' factors (W times the memory).
        dst: `gm.R` if each rank uses the result differently, `gm.I` if every rank repeats the same work on it.
            Required, because the wrong choice gives wrong gradients.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: no dst, or one that is neither R nor I; an unknown op.
        DTypeError: the sum of bools, the mean of integers, max of complex numbers.

    Example:
        >>> def on_each_rank():
        ...     rank = gm.axis().rank
        ...     x = torch.tensor(2.0 + rank, requires_grad=True)
        ...     loss = (1 + rank) * gm.all_reduce(x, dst=gm.R)  # differs from rank to rank
        ...     loss.backward()
        ...     return loss.item(), x.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(5.0, 3.0), (10.0, 3.0)]
    """
    if type(x) is not Tensor and is_structure(x):
        return pytrees.packed(
            "all_reduce",
            x,
            axis,
            lambda one: all_reduce(
                one,
                axis,
                op=op,
                dst=dst,
                comm_dtype=comm_dtype,
                backward_dtype=backward_dtype,
                async_op=async_op,
            ),
        )
    call = Call("all_reduce", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    kind = call.choose("dst", dst, _ALL_REDUCES, _WHICH_DST)
    reduction = call.choose("op", op, _REDUCTIONS, lambda: _named_by_torch(op, _REDUCTIONS))
    if reduction in reductions.RULES:
        return reductions.RULES[reduction](call, kind.dst)
    made: LinearOp = call.op(kind)
    return call.run(_mean(made) if reduction == "mean" else made)


@overload
def all_gather(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    dst: Convention = R,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def all_gather(
    x: StructureT,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    dst: Convention = R,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> StructureT: ...
@overload
def all_gather(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def all_gather(x: StructureT, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[StructureT]: ...
@overload
def all_gather(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def all_gather(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    dst: Convention = R,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Concatenate the ranks' tensors along `dim`; every rank gets the whole. Scalars are stacked.

    ::

        V -> R    shape (n, ...) -> (W n, ...)   x0 -> [x0 x1]      g0[0]+g1[0] <- [g0[0] g0[1]]
                                                 x1 -> [x0 x1]      g0[1]+g1[1] <- [g1[0] g1[1]]

        V -> I    the same forward; backward is the rank's slice, as every rank has the full gradient

    Args:
        x: this rank's part; or a tuple, list or dict of such.
        dim: the tensor dimension to concatenate along; negative counts from the end.
        dst: `gm.R` (each rank uses the result differently; correct without assumptions about the other ranks) or
            `gm.I` (every rank repeats the same work on it).
        sizes: each rank's size along `dim`.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: a dst that is neither R nor I.
        ShapeError: the size along `dim` is not this rank's in `sizes`.
        MismatchError: the ranks' shapes differ and no sizes are passed, or their dtypes differ.

    Example:
        >>> def on_each_rank():
        ...     rank = gm.axis().rank
        ...     x = torch.tensor([1.0 + rank], requires_grad=True)
        ...     y = gm.all_gather(x)
        ...     ((1 + rank) * y).sum().backward()
        ...     return y.tolist(), x.grad.tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [([1.0, 2.0], [3.0]), ([1.0, 2.0], [3.0])]
    """
    if type(x) is not Tensor and is_structure(x):

        def gather_one(one: Tensor, along: DimLike = 0) -> Any:
            return all_gather(
                one,
                axis,
                along,
                dst=dst,
                sizes=sizes,
                comm_dtype=comm_dtype,
                backward_dtype=backward_dtype,
                async_op=async_op,
            )

        if sizes is None:
            return pytrees.gathered(x, axis, dim, gather_one)
        return pytrees.per_leaf("all_gather", x, axis, lambda one: gather_one(one, dim))
    x = _stackable(x)
    call = Call("all_gather", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    along = call.dim(dim)
    kind = call.choose("dst", dst, _ALL_GATHERS, _WHICH_DST)
    return call.run(call.op(kind, along, call.sizes(sizes, along)), call.x)


@overload
def reduce_scatter(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    op: Literal["sum", "mean"] = "sum",
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def reduce_scatter(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def reduce_scatter(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def reduce_scatter(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    op: Literal["sum", "mean"] = "sum",
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Sum the ranks' tensors and keep this rank's slice along `dim`: the adjoint of `all_gather`.

    ::

        P -> V    shape (W n, ...) -> (n, ...)   [x0[0] x0[1]] -> x0[0]+x1[0]      [g0 g1] <- g0
                                                 [x1[0] x1[1]] -> x0[1]+x1[1]      [g0 g1] <- g1

    Args:
        x: this rank's term of the sum, whole along `dim`.
        dim: the tensor dimension to split.
        op: "sum" or "mean", the sum divided by W (torch's `ReduceOp.AVG`).
        sizes: the size of each rank's slice; None: equal slices; "balanced": the split of `gradmesh.shard`, without
            communication. "auto" is not supported, as every rank holds the whole tensor.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ShapeError: W does not divide the size along `dim` and no sizes are passed.

    Example:
        >>> def on_each_rank():
        ...     return gm.reduce_scatter(torch.arange(4.0)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0.0, 2.0], [4.0, 6.0]]
    """
    call = Call("reduce_scatter", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    along = call.dim(dim)
    choices = {"sum": "sum", "mean": "mean"}
    reduction = call.choose("op", op, choices, lambda: _named_by_torch(op, choices))
    given = call.whole_sizes(sizes, along)
    made: LinearOp = call.op(ReduceScatter, along, given)
    return call.run(_mean(made) if reduction == "mean" else made, x)


@overload
def all_to_all(
    x: Tensor,
    axis: AxisLike = None,
    *,
    split_dim: DimLike = 0,
    concat_dim: DimLike = 0,
    split_sizes: Sequence[int] | Literal["balanced"] | None = None,
    concat_sizes: Sequence[int] | Literal["auto"] | None = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def all_to_all(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def all_to_all(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def all_to_all(
    x: Tensor,
    axis: AxisLike = None,
    *,
    split_dim: DimLike = 0,
    concat_dim: DimLike = 0,
    split_sizes: Sequence[int] | Literal["balanced"] | None = None,
    concat_sizes: Sequence[int] | Literal["auto"] | None = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Split along `split_dim`, send part r to rank r, concatenate the received parts along `concat_dim`.

    ::

        V -> V    shape (W n, ...) -> (W n, ...); with other dims (W n, m, ...) -> (n, W m, ...)

                  [a0 a1] -> [a0 b0]      [g0[0] g1[0]] <- [g0[0] g0[1]]
                  [b0 b1] -> [a1 b1]      [g0[1] g1[1]] <- [g1[0] g1[1]]

    If `split_dim` and `concat_dim` differ, a tensor that is sharded along `concat_dim` becomes sharded along
    `split_dim`, as in sequence parallelism; all other sizes have to be equal on all ranks.

    Args:
        x: this rank's parts for all ranks.
        split_dim: the tensor dimension to split.
        concat_dim: the tensor dimension to concatenate along.
        split_sizes: the size of the part for each rank; "balanced": the first ranks get one more; None: equal parts.
        concat_sizes: the size of the part from each rank along `concat_dim`; None: equal parts. If the dims differ,
            this is each rank's size along it, and "auto" exchanges these.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ShapeError: W does not divide the size along `split_dim` and no sizes are passed.

    Example:
        >>> def on_each_rank():
        ...     return gm.all_to_all(10 * gm.axis().rank + torch.arange(2)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 10], [1, 11]]
    """
    call = Call("all_to_all", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    cut, join = call.dim(split_dim, "split_dim"), call.dim(concat_dim, "concat_dim")
    send = call.whole_sizes(split_sizes, cut, "split_sizes")
    receive = call.concat_sizes(concat_sizes, cut, join)
    return call.run(call.op(AllToAll, cut, join, send, receive), x)


@overload
def broadcast(
    x: Tensor,
    axis: AxisLike = None,
    *,
    root: int = 0,
    dst: Convention = R,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def broadcast(
    x: StructureT,
    axis: AxisLike = None,
    *,
    root: int = 0,
    dst: Convention = R,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> StructureT: ...
@overload
def broadcast(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def broadcast(x: StructureT, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[StructureT]: ...
@overload
def broadcast(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def broadcast(
    x: Tensor,
    axis: AxisLike = None,
    *,
    root: int = 0,
    dst: Convention = R,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Copy the root's tensor to every rank.

    ::

        V at root -> R    shape (...) -> (...)    root  x0 -> x0      g0+g1 <- g0
                                                        x1 -> x0          0 <- g1

        V at root -> I    the same forward; backward keeps the root's gradient, zero elsewhere

    When grad mode is on, the result requires grad on every rank, also where `x` does not: the backward
    collective needs all of them. Broadcast data under `torch.no_grad()`.

    Args:
        x: the value at the root; on the other ranks a tensor of the same shape and dtype, whose values are
            ignored. Or a tuple, list or dict of such.
        root: the rank of the axis to copy from.
        dst: `gm.R` if each rank uses the result differently, `gm.I` if every rank repeats the same work on it.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: root is not a rank of the axis.

    Example:
        >>> def on_each_rank():
        ...     return gm.broadcast(torch.tensor(float(gm.axis().rank)), root=1).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0, 1.0]
    """
    if type(x) is not Tensor and is_structure(x):
        return pytrees.packed(
            "broadcast",
            x,
            axis,
            lambda one: broadcast(
                one,
                axis,
                root=root,
                dst=dst,
                comm_dtype=comm_dtype,
                backward_dtype=backward_dtype,
                async_op=async_op,
            ),
        )
    call = Call("broadcast", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    kind = call.choose("dst", dst, {R: Broadcast, I: BroadcastInvariant}, _WHICH_DST)
    return call.run(call.op(kind, call.rank(root)), call.x)


@overload
def reduce(
    x: Tensor,
    axis: AxisLike = None,
    *,
    root: int = 0,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def reduce(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def reduce(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def reduce(
    x: Tensor,
    axis: AxisLike = None,
    *,
    root: int = 0,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Sum the ranks' tensors at the root; zeros elsewhere.

    Every rank has to run the backward collective. Outside of `ordered()` every rank's loss has to use its result, the
    zeros too, as in `loss + y.sum()`; if one does not, every rank raises `MismatchError`. Inside `ordered()` every rank
    runs it, also if its loss does not use the result.

    ::

        P -> V at root    shape (...) -> (...)    root  x0 -> x0+x1      g0 <- g0
                                                        x1 -> 0          g0 <- g1

    Args:
        x: this rank's term.
        root: the rank of the axis that gets the sum.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: root is not a rank of the axis.
        OrderError: `x` requires grad outside of `ordered()`, where the ranks' calls are not compared: on a GPU, at
            `gm.check(0)`, or with `async_op`.

    Example:
        >>> def on_each_rank():
        ...     return gm.reduce(torch.tensor(1.0 + gm.axis().rank), root=1).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.0, 3.0]
    """
    call = Call("reduce", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    call.refuse_unordered("all_reduce", of_all=True)
    return call.run(call.op(Reduce, call.rank(root)), x)


@overload
def gather(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    root: int = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def gather(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def gather(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def gather(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    root: int = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Concatenate the ranks' tensors along `dim` at the root; the others get a tensor empty along `dim`.

    Every rank has to run the backward collective. Outside of `ordered()` every rank's loss has to use its result, the
    empty one too, as in `loss + y.sum()`; if one does not, every rank raises `MismatchError`. Inside `ordered()` every
    rank runs it, also if its loss does not use the result.

    ::

        V -> V at root    shape (n, ...) -> (W n, ...) at root, (0, ...) elsewhere

                          root  x0 -> [x0 x1]      g0[0] <- [g0[0] g0[1]]
                                x1 -> []           g0[1] <- []

    Args:
        x: this rank's part.
        dim: the tensor dimension to concatenate along.
        root: the rank of the axis that gets the whole tensor.
        sizes: each rank's size along `dim`.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        OrderError: `x` requires grad outside of `ordered()`, where the ranks' calls are not compared: on a GPU, at
            `gm.check(0)`, or with `async_op`.

    Example:
        >>> def on_each_rank():
        ...     return gm.gather(torch.tensor(gm.axis().rank)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], []]
    """
    x = _stackable(x)
    call = Call("gather", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    call.refuse_unordered("all_gather", of_all=True)
    along = call.dim(dim)
    given = call.explicit_sizes(sizes, along)
    return call.run(call.op(Gather, along, call.rank(root), given), x)


@overload
def scatter(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    root: int = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def scatter(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def scatter(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def scatter(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    root: int = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Split the root's tensor along `dim` and send each rank its part.

    When grad mode is on, the result requires grad on every rank, also where `x` does not: the backward
    collective needs all of them. Scatter data under `torch.no_grad()`.

    ::

        V at root -> V    shape (W n, ...) at root, (0, ...) elsewhere -> (n, ...) on every rank

                          root  [x0 x1] -> x0      [g0 g1] <- g0
                                []      -> x1      []      <- g1

    Args:
        x: the whole tensor at the root; on the other ranks a tensor that is empty along `dim` and otherwise of the same
            shape, or one of the root's shape, whose values are ignored and whose gradient is zero.
        dim: the tensor dimension to split.
        root: the rank of the axis that has the whole tensor.
        sizes: the size of each rank's part; None or "auto": the balanced split of the root's size, which one small
            all-gather exchanges (the first n % W ranks get one more).
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ShapeError: the sizes do not add up, or a rank other than the root passes neither an empty nor a whole tensor.

    Example:
        >>> def on_each_rank():
        ...     x = torch.arange(4) if gm.axis().rank == 0 else torch.empty(0, dtype=torch.int64)
        ...     return gm.scatter(x).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1], [2, 3]]
    """
    call = Call("scatter", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    along, root = call.dim(dim), call.rank(root)
    if sizes is None or (isinstance(sizes, str) and sizes in ("auto", "balanced")):
        given = Sizes.balanced(call.exchanged_sizes(x.shape[along])[root], call.axis.size)
    else:
        given = call.sizes(sizes, along)
    if call.axis.rank != root and x.shape[along] == given.total:
        x = x.narrow(along, 0, 0)  # its backward gives zeros of the operand's shape
    return call.run(call.op(Scatter, along, root, given), x)


@overload
def replicate(
    x: Tensor,
    axis: AxisLike = None,
    *,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def replicate(
    x: StructureT,
    axis: AxisLike = None,
    *,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> StructureT: ...
@overload
def replicate(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def replicate(x: StructureT, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[StructureT]: ...
@overload
def replicate(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def replicate(
    x: Tensor,
    axis: AxisLike = None,
    *,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Declare that each rank uses this value differently from here on: backward sums its gradient over the ranks.

    Apply it where a replicated parameter enters the part of a model that is sharded over the ranks.

    ::

        I -> R    shape (...) -> (...)    x -> x      g0+g1 <- g0
                                          x -> x      g0+g1 <- g1

    Args:
        x: a value that is the same on every rank; or a tuple, list or dict of such.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Example:
        >>> def on_each_rank():
        ...     w = torch.tensor(1.0, requires_grad=True)
        ...     (gm.replicate(w) * (1 + gm.axis().rank)).backward()
        ...     return w.grad.item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 3.0]
    """
    if type(x) is not Tensor and is_structure(x):
        return pytrees.packed(
            "replicate",
            x,
            axis,
            lambda one: replicate(
                one, axis, comm_dtype=comm_dtype, backward_dtype=backward_dtype, async_op=async_op
            ),
        )
    call = Call("replicate", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    return call.run(call.op(Replicate), call.x)


@overload
def shard(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    src: Convention = I,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def shard(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def shard(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def shard(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    src: Convention = I,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Keep this rank's slice along `dim` of a value that every rank holds.

    ::

        I -> V    shape (n, ...) -> (n/W, ...)    [x0 x1] -> x0      [g0 g1] <- g0
                                                  [x0 x1] -> x1      [g0 g1] <- g1

        R -> V    the same forward; backward pads the gradient with zeros:  [g0 0] <- g0,  [0 g1] <- g1

    Args:
        x: a value that is the same on every rank.
        dim: the tensor dimension to split.
        src: `gm.I` if every rank did the same work so far, `gm.R` if each rank uses `x` differently (its gradient
            is then a pending sum).
        sizes: the size of each rank's slice; None or "balanced": the balanced split (the first n % W ranks get one
            more). "auto" is not supported, as every rank holds the whole tensor.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ShapeError: the sizes do not add up to the size along `dim`.

    Example:
        >>> def on_each_rank():
        ...     return gm.shard(torch.arange(5)).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1, 2], [3, 4]]
    """
    call = Call("shard", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    along = call.dim(dim)
    kind = call.choose("src", src, {I: Shard, R: ShardReplicated})
    given = call.whole_sizes(sizes, along)
    if given.equal and x.shape[along] % call.axis.size:
        given = Sizes.balanced(x.shape[along], call.axis.size)
    return call.run(call.op(kind, along, given), x)


_CONVERSIONS: dict[tuple[Type, Type], type[LinearOp]] = {
    (op.src, op.dst): op
    for op in (
        ReplicatedToPartial,
        ReplicatedToInvariant,
        InvariantToPartial,
        PartialFromVarying,
        VaryingFromReplicated,
    )
}


@overload
def convert(
    x: Tensor,
    axis: AxisLike = None,
    *,
    src: Literal[Type.R],
    dst: Literal[Type.P, Type.I, Type.V],
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor: ...


@overload
def convert(
    x: Tensor,
    axis: AxisLike = None,
    *,
    src: Literal[Type.I, Type.V],
    dst: Literal[Type.P],
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Tensor: ...


@overload
def convert(
    x: Tensor,
    axis: AxisLike = None,
    *,
    src: Type,
    dst: Type,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[True],
) -> Pending[Tensor]: ...


def convert(
    x: Tensor,
    axis: AxisLike = None,
    *,
    src: Type,
    dst: Type,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Tensor | Pending[Tensor]:
    """Change a value's type over the ranks, without communication in either direction.

    ::

        shape (...) -> (...)

        R -> P    the value on rank 0, zeros elsewhere      backward the same
        R -> I    the same value                            backward keeps the gradient on rank 0
        I -> P    the value on rank 0, zeros elsewhere      backward the same value
        V -> P    the same value, read as a term of a sum   backward the same value
        R -> V    the same value, read as each rank's own   backward the same value

    Args:
        x: the value.
        src: its type.
        dst: the type of the result.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: any other pair of types; where that needs communication, the text names the verb.

    Example:
        >>> def on_each_rank():
        ...     return gm.convert(torch.tensor(3.0), src=gm.R, dst=gm.P).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [3.0, 0.0]
    """
    call = Call("convert", x, axis, comm_dtype, backward_dtype)
    verbs = {(P, R): "all_reduce", (P, I): "all_reduce", (P, V): "reduce_scatter", (V, R): "all_gather"}
    verbs |= {(V, I): "all_gather", (I, R): "replicate", (I, V): "shard"}
    ways = {pair: f"this conversion communicates: use gm.{verb}" for pair, verb in verbs.items()}
    known = isinstance(src, Type) and isinstance(dst, Type)
    way = (
        ways.get((src, dst), "use the tensor directly; this pair of types needs no conversion")
        if known
        else "pass for example src=gm.R, dst=gm.P"
    )
    kind = call.choose("(src, dst)", (src, dst) if known else f"({src!r}, {dst!r})", _CONVERSIONS, way)
    op, finish = call.op(kind), call.naming()
    return start_op(op, x, finish) if call.flag(async_op, "async_op") else finish(apply(op, x))


@overload
def shift(
    x: Tensor,
    axis: AxisLike = None,
    offset: int = 1,
    *,
    wrap: bool = True,
    dim: DimLike = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def shift(
    x: StructureT,
    axis: AxisLike = None,
    offset: int = 1,
    *,
    wrap: bool = True,
    dim: DimLike = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> StructureT: ...
@overload
def shift(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def shift(x: StructureT, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[StructureT]: ...
@overload
def shift(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def shift(
    x: Tensor,
    axis: AxisLike = None,
    offset: int = 1,
    *,
    wrap: bool = True,
    dim: DimLike = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Send the tensor to the rank `offset` after this one; every rank receives that of the rank `offset` before it.

    ::

        V -> V    shape (...) -> (...); with `sizes`, the shape on the source rank

                  x0 x1 x2 -> x2 x0 x1      g1 g2 g0 <- g0 g1 g2      wrap=True
                  x0 x1 x2 -> 0  x0 x1      g1 g2 0  <- g0 g1 g2      wrap=False

    Args:
        x: this rank's tensor; or a tuple, list or dict of such.
        offset: the distance in ranks; negative: to earlier ranks.
        wrap: whether the ranks form a ring; if not, zeros enter at the open end.
        dim: the tensor dimension along which sizes differ.
        sizes: each rank's size along `dim`; None: one shape on all ranks; "auto": exchanged by one small all-gather. If
            sizes are passed and nothing arrives, the result is empty along `dim`.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Example:
        >>> def on_each_rank():
        ...     return gm.shift(torch.tensor(gm.axis().rank)).item()
        >>> gm.launch(on_each_rank, 3, backend="threads")
        [2, 0, 1]
    """
    if type(x) is not Tensor and is_structure(x):

        def shift_one(one: Tensor) -> Any:
            return shift(
                one,
                axis,
                offset,
                wrap=wrap,
                dim=dim if sizes is not None else 0,
                sizes=sizes,
                comm_dtype=comm_dtype,
                backward_dtype=backward_dtype,
                async_op=async_op,
            )

        if sizes is None:
            return pytrees.packed("shift", x, axis, shift_one)
        return pytrees.per_leaf("shift", x, axis, shift_one)
    call = Call("shift", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    ranks = integer(offset)
    if ranks is None:
        call.fail(
            "offset must be an int",
            expected="an int",
            got=f"offset={offset!r}",
            remedy="pass for example offset=1, or offset=-1 to send to the previous rank",
        )
    op = call.op(Shift, None, ranks, call.flag(wrap, "wrap"))
    along = call.dim(dim) if sizes is not None or isinstance(dim, str) else 0
    return call.run(op if sizes is None else op.along(along, call.explicit_sizes(sizes, along)), call.x)


@overload
def permute(
    x: Tensor,
    axis: AxisLike = None,
    *,
    pairs: Sequence[tuple[int, int]],
    dim: DimLike = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def permute(
    x: StructureT,
    axis: AxisLike = None,
    *,
    pairs: Sequence[tuple[int, int]],
    dim: DimLike = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> StructureT: ...
@overload
def permute(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def permute(x: StructureT, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[StructureT]: ...
@overload
def permute(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def permute(
    x: Tensor,
    axis: AxisLike = None,
    *,
    pairs: Sequence[tuple[int, int]],
    dim: DimLike = 0,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Send tensors between pairs of ranks; zeros where nothing arrives.

    ::

        V -> V    shape (...) -> (...); with `sizes`, the shape on the source rank

                  pairs [(0, 1)]    x0 -> 0       g1 <- g0
                                    x1 -> x0      0  <- g1

    Args:
        x: this rank's tensor; or a tuple, list or dict of such.
        pairs: (source, target) ranks of the axis, the same list on every rank; no source and no target twice.
        dim: the tensor dimension along which sizes differ.
        sizes: each rank's size along `dim`; None: one shape on all ranks; "auto": exchanged by one small all-gather. If
            sizes are passed and nothing arrives, the result is empty along `dim`.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: a source or target twice, or one that is not a rank of the axis.

    Example:
        >>> def on_each_rank():
        ...     return gm.permute(torch.tensor(1.0 + gm.axis().rank), pairs=[(0, 1)]).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [0.0, 1.0]
    """
    if type(x) is not Tensor and is_structure(x):

        def permute_one(one: Tensor) -> Any:
            return permute(
                one,
                axis,
                pairs=pairs,
                dim=dim if sizes is not None else 0,
                sizes=sizes,
                comm_dtype=comm_dtype,
                backward_dtype=backward_dtype,
                async_op=async_op,
            )

        if sizes is None:
            return pytrees.packed("permute", x, axis, permute_one)
        return pytrees.per_leaf("permute", x, axis, permute_one)
    call = Call("permute", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    op = call.op(Permute, None, call.pairs(pairs))
    along = call.dim(dim) if sizes is not None or isinstance(dim, str) else 0
    return call.run(op if sizes is None else op.along(along, call.explicit_sizes(sizes, along)), call.x)


@overload
def send(
    x: Tensor,
    axis: AxisLike = None,
    *,
    to: int,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def send(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def send(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def send(
    x: Tensor,
    axis: AxisLike = None,
    *,
    to: int,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Send a tensor to one rank, which calls `recv`; the other ranks do not participate.

    It does not wait for the receiver: on the CPU, messages that were not received yet are kept in memory; off the CPU,
    the next message between the two ranks waits for it, and the first one to a rank for its `recv`, so two ranks must
    not both send first. If `send` raises, the `recv` of the other rank raises too; if `recv` raises, its message is
    discarded on the CPU. For gradients both ends have to be inside `ordered()`, where backward sends the messages in
    the other direction in reverse order: if the forward is free of deadlocks, so is the backward. Only reverse mode is
    supported, of any order; `permute` supports every mode.

    ::

        V -> V    shape (...) -> (0,) on rank a, (...) on rank b

                  rank a   x -> (nothing)      g <- (waits)
                  rank b       x               g             (recv)

    Args:
        x: the message.
        to: the rank that receives it.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Returns:
        An empty tensor, which can be ignored.

    Raises:
        ArgumentError: `to` is this rank, or not a rank of the axis.
        DeadlockError: off the CPU, the first one to a rank that waits for this one.
        MismatchError: off the CPU, the other rank does not receive it next; raised after the call.
        OrderError: `x` requires grad outside of `ordered()`; a call in forward mode.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor(3.0, requires_grad=True)
        ...     with gm.ordered():
        ...         if gm.axis().rank == 0:
        ...             loss = None
        ...             gm.send(x**2, to=1)
        ...         else:
        ...             loss = 10 * gm.recv(torch.empty(()), source=0)
        ...         gm.backward(loss)
        ...     return x.grad
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [tensor(60.), None]
    """
    call = Call("send", x, axis, comm_dtype, backward_dtype, peer=to, async_op=async_op)
    peer = call.other(to, "to")
    call.refuse_compiled("send() and recv() are not supported inside torch.compile", "gradmesh.permute")
    call.refuse_forward_mode("permute")
    call.refuse_unordered("permute")
    return call.run(call.op(Send, peer, tuple(x.shape)), x)


@overload
def recv(
    like: Tensor,
    axis: AxisLike = None,
    *,
    source: int,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def recv(like: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def recv(like: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def recv(
    like: Tensor,
    axis: AxisLike = None,
    *,
    source: int,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Receive a tensor from one rank, which calls `send`; see there.

    Args:
        like: a tensor with the shape, dtype and device of the message; its values are ignored.
        source: the sending rank.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: `source` is this rank, or not a rank of the axis.
        MismatchError: the message has another shape or dtype; off the CPU also as for `send`, and after the call.

    Example:
        >>> def on_each_rank():
        ...     if gm.axis().rank == 0:
        ...         gm.send(torch.arange(3), to=1)
        ...         return None
        ...     return gm.recv(torch.empty(3, dtype=torch.int64), source=0).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [None, [0, 1, 2]]
    """
    call = Call("recv", like, axis, comm_dtype, backward_dtype, peer=source, async_op=async_op)
    peer = call.other(source, "source")
    call.refuse_compiled("send() and recv() are not supported inside torch.compile", "gradmesh.permute")
    call.refuse_forward_mode("permute")
    call.refuse_unordered("permute")
    return call.received(call.op(Receive, peer, tuple(like.shape)), like.new_empty(0))


@overload
def exchange(
    parts: Sequence[Tensor],
    axis: AxisLike = None,
    *,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> list[Tensor]: ...
@overload
def exchange(
    parts: Sequence[Tensor], *args: Any, async_op: Literal[True], **kwargs: Any
) -> Pending[list[Tensor]]: ...
@overload
def exchange(
    parts: Sequence[Tensor], *args: Any, async_op: bool, **kwargs: Any
) -> list[Tensor] | Pending[list[Tensor]]: ...
@verb()
def exchange(
    parts: Sequence[Tensor],
    axis: AxisLike = None,
    *,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Send each rank a tensor of any shape, and receive one from each.

    The ragged form of `all_to_all`: one small exchange sends the shapes, a second one all elements. Backward sends the
    gradients back.

    ::

        V -> V    any shapes; part r of rank s becomes part s of rank r

                  [a0, a1] -> [a0, b0]      [g0[0], g1[0]] <- [g0[0], g0[1]]
                  [b0, b1] -> [a1, b1]      [g0[1], g1[1]] <- [g1[0], g1[1]]

    Args:
        parts: a tensor for each rank, in rank order, all of one dtype and with at most 15 dimensions.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Returns:
        The tensor from each rank, in rank order.

    Raises:
        ArgumentError: not one tensor for each rank, or of several dtypes.

    Example:
        >>> def on_each_rank():
        ...     rank = gm.axis().rank
        ...     parts = [torch.full((n,), rank) for n in (1, 2 + rank)]
        ...     return [part.tolist() for part in gm.exchange(parts)]
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[[0], [1]], [[0, 0], [1, 1, 1]]]
    """
    given = list(parts) if isinstance(parts, Iterable) else []
    alike = {known_names(part) for part in given}
    call = Call(
        "exchange",
        given[0] if given else torch.empty(0),
        axis,
        comm_dtype,
        backward_dtype,
        async_op=async_op,
        names=(alike.pop() if len(alike) == 1 else None) or (),
    )
    call.refuse_compiled(
        "exchange() is not supported inside torch.compile, because its shapes are only known at run time",
        "gradmesh.all_to_all with split_sizes and concat_sizes",
    )
    parts = call.one_for_each(given)
    shapes = [torch.Size(shape) for shape in call.exchange_shapes(parts)]
    sent, taken = [part.numel() for part in parts], [shape.numel() for shape in shapes]
    # As columns: for an empty 1-d part, cat returns a constant gradient, so that a rank without other parts would skip
    # the second derivative.
    flat = torch.cat([part.reshape(-1, 1) for part in parts]).view(-1)
    op = call.op(AllToAll, 0, 0, Sizes(tuple(sent)), Sizes(tuple(taken)))
    ends = list(accumulate(taken, initial=0))
    return call.run(
        op,
        flat,
        lambda got: [
            got.narrow(0, at, n).view(shape) for at, n, shape in zip(ends, taken, shapes, strict=False)
        ],
    )


@overload
def halo_exchange(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    halo: int | tuple[int, int] = 1,
    wrap: bool = False,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def halo_exchange(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def halo_exchange(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def halo_exchange(
    x: Tensor,
    axis: AxisLike = None,
    dim: DimLike = 0,
    *,
    halo: int | tuple[int, int] = 1,
    wrap: bool = False,
    sizes: SizesLike = None,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Attach the neighbours' edge rows to this rank's shard, as a stencil over a sharded dimension needs them.

    ::

        V -> V    shape (n, ...) -> (left + n + right, ...); at open ends nothing is attached

                  [a b] -> [a b c]        [ga gb+gb'] <- [ga gb gc]
                  [c d] -> [b c d]        [gc+gc' gd] <- [gb' gc' gd]

    A halo wider than a neighbour's shard takes its further rows from the next ranks. A ring of two ranks works too,
    where both neighbours are the same rank.

    Args:
        x: this rank's shard.
        dim: the tensor dimension that is sharded.
        halo: rows from each side, or (left, right).
        wrap: whether the shards form a ring; if not, the first and the last have an open end.
        sizes: each rank's size along `dim`.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: a negative halo.

    Example:
        >>> def on_each_rank():
        ...     rank = gm.axis().rank
        ...     return gm.halo_exchange(torch.arange(2) + 2 * rank).tolist()
        >>> gm.launch(on_each_rank, 3, backend="threads")
        [[0, 1, 2], [1, 2, 3, 4], [3, 4, 5]]
    """
    call = Call("halo_exchange", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    along = call.dim(dim)
    left, right = call.halo(halo)
    given = call.explicit_sizes(sizes, along)
    wrap = call.flag(wrap, "wrap")
    return call.run(call.op(HaloExchange, along, left, right, wrap, given), x)


@overload
def neighbor_all_to_all(
    x: Tensor,
    axis: AxisLike = None,
    *,
    send_rows: RowsByRank,
    receive_counts: CountsByRank,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def neighbor_all_to_all(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def neighbor_all_to_all(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def neighbor_all_to_all(
    x: Tensor,
    axis: AxisLike = None,
    *,
    send_rows: RowsByRank,
    receive_counts: CountsByRank,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Send rows of `x`, selected by an index, to some ranks, and receive theirs: for partitioned graphs and meshes.

    ::

        V -> V    shape (n, ...) -> (rows received, ...)

                  send_rows on rank 0: {1: [2, 0]}     [a b c] -> [d]        [ga' gb gc'] <- [gd]
                               rank 1: {0: [0]}        [d e]   -> [c a]      [gd' 0]      <- [gc ga]

    Backward sends the rows' gradients back and adds them to the selected rows.

    Args:
        x: this rank's rows, along dim 0.
        send_rows: for each receiving rank, a 1-d tensor of indices into dim 0, on the device of `x`. A row may be
            selected for several ranks, and more than once. Ranks that are not keys get no rows.
        receive_counts: for each sending rank, the number of rows. Ranks that are not keys send no rows.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Returns:
        The received rows, those of rank 0 first.

    Raises:
        ArgumentError: a rank that is not on the axis, an index that is not a 1-d tensor of ints or is out of range, a
            count that is not an int of 0 or more.

    Example:
        >>> def on_each_rank():
        ...     rank, other = gm.axis().rank, 1 - gm.axis().rank
        ...     x = 10 * rank + torch.arange(3)
        ...     rows = {other: torch.tensor([2, 0]) if rank == 0 else torch.tensor([1])}
        ...     return gm.neighbor_all_to_all(x, send_rows=rows, receive_counts={other: 1 + rank}).tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[11], [2, 0]]
    """
    call = Call("neighbor_all_to_all", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    dim = call.dim(0)
    op = neighbors(x, call.axis, dim, send_rows, receive_counts, call.fail, **call.precision)
    return call.run(op, x)


@overload
def scan(
    x: Tensor,
    axis: AxisLike = None,
    *,
    reverse: bool = False,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def scan(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def scan(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def scan(
    x: Tensor,
    axis: AxisLike = None,
    *,
    reverse: bool = False,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Sum over the ranks up to and including this one.

    ::

        V -> V    shape (...) -> (...)    x0 x1 x2 -> x0 x0+x1 x0+x1+x2      g0+g1+g2 g1+g2 g2 <- g0 g1 g2

    The sums are taken in log2(W) rounds (Hillis and Steele, Data Parallel Algorithms, 1986).

    Args:
        x: this rank's term, of one shape and dtype on all ranks.
        reverse: sum from this rank to the last instead.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Example:
        >>> def on_each_rank():
        ...     return gm.scan(torch.tensor(1 + gm.axis().rank)).item()
        >>> gm.launch(on_each_rank, 3, backend="threads")
        [1, 3, 6]
    """
    call = Call("scan", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    return call.run(call.op(Scan, call.flag(reverse, "reverse")), x)


@overload
def exscan(
    x: Tensor,
    axis: AxisLike = None,
    *,
    reverse: bool = False,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def exscan(x: Tensor, *args: Any, async_op: Literal[True], **kwargs: Any) -> Pending[Tensor]: ...
@overload
def exscan(x: Tensor, *args: Any, async_op: bool, **kwargs: Any) -> Tensor | Pending[Tensor]: ...
@verb()
def exscan(
    x: Tensor,
    axis: AxisLike = None,
    *,
    reverse: bool = False,
    comm_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Any:
    """Sum over the ranks before this one; zeros on the first.

    ::

        V -> V    shape (...) -> (...)    x0 x1 x2 -> 0 x0 x0+x1      g1+g2 g2 0 <- g0 g1 g2

    Args:
        x: this rank's term, of one shape and dtype on all ranks.
        reverse: sum over the ranks after this one instead; zeros on the last.
        axis, comm_dtype, backward_dtype, async_op: as in every verb, see `gradmesh.verbs.collectives`.

    Example:
        >>> def on_each_rank():
        ...     return gm.exscan(torch.tensor(1 + gm.axis().rank)).item()
        >>> gm.launch(on_each_rank, 3, backend="threads")
        [0, 1, 3]
    """
    call = Call("exscan", x, axis, comm_dtype, backward_dtype, async_op=async_op)
    return call.run(call.op(Exscan, call.flag(reverse, "reverse")), x)


def sizes(x: Tensor, axis: AxisLike = None, dim: DimLike = 0) -> tuple[int, ...]:
    """Every rank's size along `dim`, exchanged by one small all-gather, as with `sizes="auto"`.

    Args:
        x: this rank's tensor.
        dim: the tensor dimension.
        axis: as in every verb, see `gradmesh.verbs.collectives`.

    Raises:
        ArgumentError: `x` has no such dimension.
        MismatchError: the ranks call different verbs.

    Example:
        >>> def on_each_rank():
        ...     return gm.sizes(torch.zeros(3 + gm.axis().rank))
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(3, 4), (3, 4)]
    """
    call = Call("sizes", x, axis)
    return call.exchanged_sizes(x.shape[call.dim(dim)]).explicit


def _stackable(x: Tensor) -> Tensor:
    """A 0-d tensor as a 1-d one, so that concatenation stacks it."""
    return x.reshape(1) if isinstance(x, Tensor) and x.dim() == 0 else x


def _mean(op: LinearOp) -> LinearOp:
    kept = not compiling() and hasattr(op.axis.group, "kept")
    return (op.memo.get(Mean) or op.memo.setdefault(Mean, Mean(op))) if kept else Mean(op)

"""The ops and their registry.

`REGISTRY` is the one list of what there is: the law tests run over it, and the table in the README is printed
from it. An op's types and adjoint stand on its class; a row adds how the verb is called, what the table says, and
examples for the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradmesh._torch import keyword_fields_last
from gradmesh.axis import Axis
from gradmesh.ops.all_gather import AllGather, ReduceScatter
from gradmesh.ops.all_reduce import AllReduce, AllReduceInvariant, Replicate
from gradmesh.ops.all_to_all import AllToAll
from gradmesh.ops.base import LinearOp, Op
from gradmesh.ops.broadcast import Broadcast, BroadcastInvariant, KeepAtRoot, Reduce
from gradmesh.ops.convert import (
    InvariantToPartial,
    PartialFromVarying,
    ReplicatedToInvariant,
    ReplicatedToPartial,
    VaryingFromReplicated,
)
from gradmesh.ops.extremum import Extremum
from gradmesh.ops.gather import Gather, Scatter
from gradmesh.ops.halo import HaloExchange, HaloReturn
from gradmesh.ops.mean import Mean
from gradmesh.ops.pair import Receive, Send
from gradmesh.ops.permute import Permute, Shift
from gradmesh.ops.scan import Exscan, Scan
from gradmesh.ops.shard import AllGatherInvariant, Pad, Shard, ShardReplicated

__all__ = [
    "REGISTRY",
    "AllGather",
    "AllGatherInvariant",
    "AllReduce",
    "AllReduceInvariant",
    "AllToAll",
    "Broadcast",
    "BroadcastInvariant",
    "Exscan",
    "Extremum",
    "Gather",
    "HaloExchange",
    "HaloReturn",
    "InvariantToPartial",
    "KeepAtRoot",
    "LinearOp",
    "Mean",
    "Op",
    "Pad",
    "PartialFromVarying",
    "Permute",
    "Receive",
    "Reduce",
    "ReduceScatter",
    "Replicate",
    "ReplicatedToInvariant",
    "ReplicatedToPartial",
    "Row",
    "Scan",
    "Scatter",
    "Send",
    "Shard",
    "ShardReplicated",
    "Shift",
    "VaryingFromReplicated",
    "table",
]

Example = tuple[LinearOp, Sequence[int]]


@dataclass(frozen=True)
class Row:
    """One row of the registry.

    Attributes:
        call: how the verb is called, as the table shows it.
        forward: what the op does, for the table.
        examples: ops on an axis, each with the shape of this rank's operand; the first stands for the row.
        turned: what changes places in an adjoint that is the same verb again.
        public: whether the op is the forward of a verb, and not only the adjoint of one.
    """

    call: str
    forward: str
    examples: Callable[[Axis], list[Example]]
    turned: str = ""
    public: bool = True


def _uneven(axis: Axis) -> tuple[int, ...]:
    """Sizes of which no two neighbours are equal and one is 0 from three ranks on."""
    return tuple((2, 3, 0, 1)[rank % 4] for rank in range(axis.size))


def _splits(op: type[AllGather | AllGatherInvariant | Pad]) -> Callable[[Axis], list[Example]]:
    """Examples of an op whose operand is one part: each dim, equal and uneven."""
    return lambda axis: [
        (op(axis, 0), (2, 3)),
        (op(axis, 1), (2, 3)),
        (op(axis, 2), (2, 1, 2)),
        (op(axis, 0, _uneven(axis)), (_uneven(axis)[axis.rank], 2)),
        (op(axis, 1, _uneven(axis)), (2, _uneven(axis)[axis.rank])),
    ]


def _wholes(op: type[ReduceScatter | Shard | ShardReplicated]) -> Callable[[Axis], list[Example]]:
    """Examples of an op whose operand is whole: each dim, equal and uneven."""
    return lambda axis: [
        (op(axis, 0), (2 * axis.size, 3)),
        (op(axis, 1), (2, axis.size)),
        (op(axis, 2), (2, 1, 2 * axis.size)),
        (op(axis, 0, _uneven(axis)), (sum(_uneven(axis)), 2)),
        (op(axis, 1, _uneven(axis)), (2, sum(_uneven(axis)))),
    ]


def _plain(op: type[LinearOp]) -> Callable[[Axis], list[Example]]:
    """Examples of an op that takes nothing but an axis."""
    return lambda axis: [(op(axis), (2, 3)), (op(axis), ())]


def _rooted(
    op: type[Broadcast | BroadcastInvariant | KeepAtRoot | Reduce],
) -> Callable[[Axis], list[Example]]:
    """Examples with the first and the last rank as root."""
    return lambda axis: [(op(axis, axis.size - 1), (2, 3)), (op(axis, 0), ())]


def _mean(examples: Callable[[Axis], list[Example]]) -> Callable[[Axis], list[Example]]:
    return lambda axis: [(Mean(op), shape) for op, shape in examples(axis)]


def _exchanges(axis: Axis) -> list[Example]:
    """All-to-alls with the same and with different dims, equal and uneven."""
    size, rank = axis.size, axis.rank
    uneven = _uneven(axis)
    # What rank r sends to rank s, as a table that is not symmetric.
    amounts = [[(r + 2 * s) % 3 for s in range(size)] for r in range(size)]
    ragged = AllToAll(axis, 0, 0, tuple(amounts[rank]), tuple(row[rank] for row in amounts))
    return [
        (AllToAll(axis, 0, 1), (2 * size, 3)),
        (AllToAll(axis, 0, 0), (2 * size, 3)),
        (AllToAll(axis, 2, 0), (2, 1, size)),
        (ragged, (sum(amounts[rank]), 2)),
        (AllToAll(axis, 1, 0, uneven, tuple(reversed(uneven))), (uneven[size - 1 - rank], sum(uneven))),
    ]


def _gathers(axis: Axis) -> list[Example]:
    uneven, root = _uneven(axis), axis.size - 1
    return [
        (Gather(axis, 0, root, (2,) * axis.size), (2, 3)),
        (Gather(axis, 1, 0, uneven), (2, uneven[axis.rank])),
    ]


def _scatters(axis: Axis) -> list[Example]:
    return [(op.adjoint, op.out_shape(shape)) for op, shape in _gathers(axis)]


def _halos(axis: Axis) -> list[Example]:
    uneven = _uneven(axis)
    return [
        (HaloExchange(axis, 0, 1, 1, False, (3,) * axis.size), (3, 2)),
        (HaloExchange(axis, 1, 1, 2, True, (2,) * axis.size), (2, 2)),
        (HaloExchange(axis, 0, 3, 0, False, (1,) * axis.size), (1, 2)),
        (HaloExchange(axis, 0, 3, 4, True, (1,) * axis.size), (1, 2)),
        (HaloExchange(axis, 0, 2, 1, False, uneven), (uneven[axis.rank], 2)),
    ]


def _halo_returns(axis: Axis) -> list[Example]:
    return [(op.adjoint, op.out_shape(shape)) for op, shape in _halos(axis)]


def _shifts(axis: Axis) -> list[Example]:
    return [
        (Shift(axis, offset=1, wrap=True), (2, 3)),
        (Shift(axis, offset=-2, wrap=True), (3,)),
        (Shift(axis, offset=1, wrap=False), (2, 3)),
        (Shift(axis, offset=5, wrap=False), ()),
        (Shift(axis, offset=1, wrap=False).along(1, _uneven(axis)), (2, _uneven(axis)[axis.rank])),
        (Shift(axis, offset=-1).along(0, _uneven(axis)), (_uneven(axis)[axis.rank], 2)),
    ]


def _permutes(axis: Axis) -> list[Example]:
    last = axis.size - 1
    return [
        (Permute(axis, pairs=((0, last),)), (2, 3)),
        (Permute(axis, pairs=tuple((r, last - r) for r in range(axis.size))), (3,)),
        (Permute(axis), (3,)),
        (Permute(axis, pairs=((0, last),)).along(0, _uneven(axis)), (_uneven(axis)[axis.rank], 2)),
    ]


def _scans(op: type[Scan]) -> Callable[[Axis], list[Example]]:
    return lambda axis: [(op(axis), (2, 3)), (op(axis, True), ())]


REGISTRY: tuple[Row, ...] = (
    Row("all_gather(dst=R)", "concatenate along dim (0-d: stack)", _splits(AllGather)),
    Row("all_gather(dst=I)", "the same", _splits(AllGatherInvariant)),
    Row("reduce_scatter", "sum, keep own slice", _wholes(ReduceScatter)),
    Row("all_reduce(dst=R)", "sum", _plain(AllReduce)),
    Row("all_reduce(dst=I)", "sum", _plain(AllReduceInvariant)),
    Row("replicate", "identity", _plain(Replicate)),
    Row("shard(src=I)", "own slice", _wholes(Shard)),
    Row("shard(src=R)", "own slice", _wholes(ShardReplicated)),
    Row("convert(src=R, dst=P)", "keep at one rank, zero elsewhere", _plain(ReplicatedToPartial)),
    Row("convert(src=R, dst=I)", "identity", _plain(ReplicatedToInvariant)),
    Row("convert(src=I, dst=P)", "keep at one rank, zero elsewhere", _plain(InvariantToPartial)),
    Row("convert(src=V, dst=P)", "identity (a relabelling)", _plain(PartialFromVarying)),
    Row("convert(src=R, dst=V)", "identity (a relabelling)", _plain(VaryingFromReplicated)),
    Row("all_to_all", "split, exchange, concatenate", _exchanges, "splits and dims swapped"),
    Row("broadcast(dst=R)", "copy from root", _rooted(Broadcast)),
    Row("broadcast(dst=I)", "copy from root", _rooted(BroadcastInvariant)),
    Row("reduce", "sum at root, zeros elsewhere", _rooted(Reduce)),
    Row("gather", "concatenate at root; empty along dim elsewhere", _gathers),
    Row("scatter", "cut at root, one part to each rank", _scatters),
    Row("shift", "tensor of the rank `offset` before", _shifts, "the other way"),
    Row("permute", "tensors between pairs of ranks, zeros elsewhere", _permutes, "pairs turned round"),
    Row("halo_exchange", "neighbours' edge slabs attached", _halos),
    Row("scan", "sum over the ranks up to this one", _scans(Scan), "from the other end"),
    Row("exscan", "sum over the ranks before this one", _scans(Exscan), "from the other end"),
    Row("all_reduce(op='mean', dst=R)", "mean", _mean(_plain(AllReduce))),
    Row("all_reduce(op='mean', dst=I)", "mean", _mean(_plain(AllReduceInvariant))),
    Row("reduce_scatter(op='mean')", "mean, keep own slice", _mean(_wholes(ReduceScatter))),
    Row("zero-padded own slice", "own slice in its place, zeros elsewhere", _splits(Pad), public=False),
    Row("keep at root", "keep at root, zero elsewhere", _rooted(KeepAtRoot), public=False),
    Row("edge slabs sent back and added", "slabs to their owners, added", _halo_returns, public=False),
    Row("replicate / W", "identity, divided by W", _mean(_plain(Replicate)), public=False),
    Row("all_gather(dst=R) / W", "concatenate, divided by W", _mean(_splits(AllGather)), public=False),
)

keyword_fields_last(Op)


def table() -> str:
    """The verbs with their types, forward maps and adjoints, as a Markdown table made from the registry.

    The adjoint's name is looked up through the op that `LinearOp.adjoint` returns, not written down again.
    """
    axis = Axis("any", 0, 3, None)  # type: ignore[arg-type]  # nothing is sent
    names = {_kind(row.examples(axis)[0][0]): row.call for row in REGISTRY}
    lines = ["| verb | type | forward | adjoint |", "|---|---|---|---|"]
    for row in REGISTRY:
        op = row.examples(axis)[0][0]
        adjoint = "itself" if op.adjoint == op else names[_kind(op.adjoint)]
        if row.turned:
            adjoint += f", {row.turned}"
        if row.public:
            lines.append(f"| `{row.call}` | {op.src} -> {op.dst} | {row.forward} | {adjoint} |")
    return "\n".join(lines)


def _kind(op: LinearOp) -> tuple[type[Op], ...]:
    return (Mean, *_kind(op.op)) if isinstance(op, Mean) else (type(op),)

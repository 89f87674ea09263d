"""The deferred reductions of one axis, in as few messages as their ops allow."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gradmesh.ops.all_gather import ReduceScatter
from gradmesh.ops.all_reduce import AllReduceInvariant
from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.ops.mean import Mean
from gradmesh.ops.sizes import EQUAL, Sizes
from gradmesh.transport.packing import pack

__all__ = ["totals"]


class Reduction(NamedTuple):
    """One deferred reduction: the op of the forward calls, the leaf, and this rank's gradient of the results."""

    op: LinearOp
    leaf: Tensor
    grad: Tensor | None


def totals(calls: Sequence[tuple[LinearOp, Tensor, Tensor | None]]) -> list[Tensor | None]:
    """Run the deferred reductions of one axis.

    The ranks first compare the reductions and exchange which of them have gradients. Then all gradients of one kind,
    dtype and device are reduced in one message: sums, means, and reduce-scatters with even or uneven sizes, along any
    dim. The adjoints of other ops are sent individually.

    Args:
        calls: for each reduction the op of the forward calls, the leaf, and this rank's gradient of the results.

    Returns:
        Each leaf's gradient; None where no rank has one.
    """
    deferred = [Reduction(*call) for call in calls]
    some = _on_any_rank(deferred)
    kinds: dict[Hashable, list[int]] = {}
    for place, each in enumerate(deferred):
        kinds.setdefault(_kind(each, place), []).append(place)
    found: list[Tensor | None] = [None] * len(deferred)
    for places in kinds.values():
        for place, total in zip(places, _combined([deferred[place] for place in places]), strict=True):
            found[place] = total if some[place] else None
    return found


def _on_any_rank(deferred: list[Reduction]) -> list[bool]:
    """For each reduction, whether any rank has a gradient; the ranks also compare the list of reductions."""
    axis, mine = deferred[0].op.axis, [each.grad is not None for each in deferred]
    operand_desc = "; ".join(each.op.describe(each.leaf) for each in deferred)
    count = AllReduceInvariant(axis, operand_desc=f"reductions deferred by no_sync(): {operand_desc}")
    counts = count.apply(torch.tensor(mine, dtype=torch.int32, device=deferred[0].leaf.device))
    # A rank with all gradients avoids a device synchronisation.
    return mine if all(mine) else [n > 0 for n in counts.tolist()]


def _kind(each: Reduction, place: int) -> Hashable:
    """The key of reductions that can be sent together."""
    back = each.op.back
    if isinstance(back.op if isinstance(back, Mean) else back, SameShape):
        return back, each.leaf.dtype, each.leaf.device
    if isinstance(back, ReduceScatter):
        even = back.sizes.equal  # separately, as backends are faster with equal parts
        return replace(back, dim=0, sizes=EQUAL), even, each.leaf.dtype, each.leaf.device
    return place


def _combined(deferred: list[Reduction]) -> list[Tensor]:
    """The results of reductions of one kind."""
    grads = [_grad(each) for each in deferred]
    if len(deferred) == 1:
        return [deferred[0].op.back.apply(grads[0])]
    if isinstance(deferred[0].op.back, ReduceScatter):
        return _scattered([cast("ReduceScatter", each.op.back) for each in deferred], grads)
    whole = deferred[0].op.back.apply(torch.cat([grad.reshape(-1) for grad in grads]))
    return _cut(whole, [grad.shape for grad in grads])


def _grad(each: Reduction) -> Tensor:
    if each.grad is not None:
        return each.grad
    return torch.zeros(each.op.out_shape(each.leaf.shape), dtype=each.leaf.dtype, device=each.leaf.device)


def _scattered(ops: list[ReduceScatter], grads: list[Tensor]) -> list[Tensor]:
    """Several reduce-scatters as one, with each rank's parts of all of them side by side."""
    parts: list[Sequence[Tensor]] = []
    shapes: list[Sequence[int]] = []
    for op, grad in zip(ops, grads, strict=True):
        sizes, lengths, shape = op.layout(grad.shape)
        parts.append(pack(grad, op.dim, sizes).split(list(lengths)))
        shapes.append(shape)
    ranks = range(ops[0].axis.size)
    row = torch.cat([each[rank] for rank in ranks for each in parts])
    counts = tuple(sum(each[rank].numel() for each in parts) for rank in ranks)
    joined = replace(ops[0], dim=0, sizes=EQUAL if ops[0].sizes.equal else Sizes(counts))
    return _cut(joined.apply(row), shapes)


def _cut(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of the tensors in a flat buffer."""
    parts = row.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]

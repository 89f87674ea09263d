"""The ring: each block of keys and values is sent on before it is used, so that transfer and compute overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradmesh.autograd.pending import AsyncCollective, started
from gradmesh.nn.attention.blocks import BlockwiseAttention, BlockwiseGradients
from gradmesh.nn.attention.tiles import Layout, Tile, tiles
from gradmesh.ops.permute import Shift
from gradmesh.ops.sizes import Sizes
from gradmesh.runtime.mesh import Axis
from gradmesh.transport import compiling
from gradmesh.transport.call_checks import CallRecord
from gradmesh.transport.comm_thread import AsyncAxis

__all__ = ["Ring", "backward", "forward"]


@dataclass(frozen=True)
class Ring:
    """One call of ring attention on one rank.

    Attributes:
        axis: the ranks.
        layout: the distribution of the sequence over the ranks.
        sizes: each rank's number of keys.
        features: of a key and of a value.
        scale: of the scores.
        signature: the call as text, which the ranks compare.
    """

    axis: Axis
    layout: Layout
    sizes: tuple[int, ...]
    features: tuple[int, int]
    scale: float
    signature: str

    def op(self, hop: int) -> Shift:
        """The collective that sends a block on after `hop` hops."""
        return self._op(hop) if compiling() else self._ops[hop % len(self.sizes)]

    def _op(self, hop: int) -> Shift:
        plain, sizes = Shift(self.axis, operand_desc=self.signature), self.sizes
        if all(size == sizes[0] for size in sizes):
            return plain
        hop %= len(sizes)
        return plain.along(2, Sizes(sizes[len(sizes) - hop :] + sizes[: len(sizes) - hop]))

    @cached_property
    def _ops(self) -> tuple[Shift, ...]:
        return tuple(self._op(hop) for hop in range(len(self.sizes)))

    def tiles(self, hop: int) -> tuple[Tile, ...]:
        """The tiles of scores to compute with the block that this rank has after `hop` hops."""
        return tiles(self.layout, self.axis.rank, (self.axis.rank - hop) % self.axis.size)

    def start(self, hop: int, block: Tensor, call: CallRecord) -> AsyncCollective:
        """Start sending a block on; synchronous if the axis has no communication thread."""
        op = self.op(hop)
        if type(op.axis) is AsyncAxis:
            return started(op, block, call)
        return AsyncCollective(op, None, call, held=op.apply(block, call))

    def blocks(
        self, k: Tensor, v: Tensor, call: CallRecord
    ) -> Iterator[tuple[tuple[Tile, ...], Tensor, Tensor]]:
        """The local keys and values, then those of the preceding ranks, each with its tiles."""
        size = self.axis.size
        block = torch.cat((k, v), -1) if size > 1 else None
        for hop in range(size):
            coming = None
            if block is not None and hop < size - 1:
                coming = self.start(hop, block, call.sibling() if hop else call)
            yield self.tiles(hop), k, v
            if coming is not None:
                block = coming.result()
                k, v = block.split(self.features, -1)


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, call: CallRecord) -> tuple[Tensor, Tensor]:
    """The attention of this rank's queries to the keys of all ranks, and each row's logsumexp."""
    attention = BlockwiseAttention(q, ring.features[1], ring.scale)
    for of, keys, values in ring.blocks(k, v, call):
        attention.add(of, keys, values)
    return attention.result()


def backward(
    ring: Ring,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    grad_lse: Tensor | None,
    call: CallRecord,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the local q, k and v. A block's gradients follow it around the ring, back to its rank.

    Args:
        ring: the call.
        saved: q, k, v, the output and its logsumexp.
        grad: the gradient of the output.
        grad_lse: the gradient of the logsumexp, or None.
        call: the record of the backward call.
    """
    q, k, v, out, lse = saved
    gradients = BlockwiseGradients(q, out, lse, grad, grad_lse, ring.scale)
    pending: AsyncCollective | None = None
    parts = k, v  # replaced in the first iteration
    for hop, (of, keys, values) in enumerate(ring.blocks(k, v, call)):
        parts = gradients.add(of, keys, values)
        if ring.axis.size > 1:
            block = torch.cat(parts, -1)
            if pending is not None:
                block += pending.result()
            pending = ring.start(hop, block, call.sibling())
            del block
    dk, dv = parts if pending is None else (x.clone() for x in pending.result().split(ring.features, -1))
    return gradients.dq(), dk.to(k.dtype), dv.to(v.dtype)

"""Keys and values on their way round the ranks, each block handed on before it is attended to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradmesh.axis import Axis
from gradmesh.nn.attention.blocks import Gradients, Seen
from gradmesh.nn.attention.tiles import Layout, Tile, tiles
from gradmesh.ops.permute import Shift
from gradmesh.ops.sizes import Sizes
from gradmesh.overlap.async_nodes import AsyncCollective, started
from gradmesh.transport import compiling
from gradmesh.transport.call_checks import CallRecord
from gradmesh.transport.comm_thread import AsyncAxis

__all__ = ["Ring", "backward", "forward"]


@dataclass(frozen=True)
class Ring:
    """One call of ring attention on one rank, as a value.

    Attributes:
        axis: the ranks.
        layout: who has which part of the sequence.
        sizes: how many keys each rank has.
        features: of a key and of a value.
        scale: of the scores.
        words: what the call is, for the ranks to compare.
    """

    axis: Axis
    layout: Layout
    sizes: tuple[int, ...]
    features: tuple[int, int]
    scale: float
    words: str

    def op(self, hop: int) -> Shift:
        """What hands a block on that has made some hops."""
        return self._op(hop) if compiling() else self._ops[hop % len(self.sizes)]

    def _op(self, hop: int) -> Shift:
        plain, sizes = Shift(self.axis, operand_desc=self.words), self.sizes
        if all(size == sizes[0] for size in sizes):
            return plain
        hop %= len(sizes)
        return plain.along(2, Sizes(sizes[len(sizes) - hop :] + sizes[: len(sizes) - hop]))

    @cached_property
    def _ops(self) -> tuple[Shift, ...]:
        return tuple(self._op(hop) for hop in range(len(self.sizes)))

    def source(self, hop: int) -> int:
        """Whose block this rank has after some hops."""
        return (self.axis.rank - hop) % self.axis.size

    def tiles(self, hop: int) -> tuple[Tile, ...]:
        """The scores that are to be taken then."""
        return tiles(self.layout, self.axis.rank, self.source(hop))

    def start(self, hop: int, block: Tensor, call: CallRecord) -> AsyncCollective:
        """Begin to hand a block on; where there is no way to go on meanwhile, it is done at once."""
        op = self.op(hop)
        if type(op.axis) is AsyncAxis:
            return started(op, block, call)
        return AsyncCollective(op, None, call, held=op.apply(block, call))

    def blocks(
        self, k: Tensor, v: Tensor, call: CallRecord
    ) -> Iterator[tuple[tuple[Tile, ...], Tensor, Tensor]]:
        """The own keys and values and then those of the ranks before, each with its tiles."""
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
    """The attention of this rank's rows to the keys of all ranks, and the logsumexp of each row's scores.

    Args:
        ring: the call.
        q: this rank's rows.
        k: its keys.
        v: its values.
        call: what is to be remembered of it.
    """
    seen = Seen(q, ring.features[1], ring.scale)
    for of, keys, values in ring.blocks(k, v, call):
        seen.add(of, keys, values)
    return seen.result()


def backward(
    ring: Ring,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    grad_lse: Tensor | None,
    call: CallRecord,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the own rows, keys and values. Those of a block go round behind it, and home in the end.

    Args:
        ring: the call.
        saved: rows, keys, values, what was seen and its logsumexp.
        grad: the gradient of what was seen.
        grad_lse: that of the logsumexp; None: there is none.
        call: what is to be remembered of the backward.
    """
    q, k, v, out, lse = saved
    gradients = Gradients(q, out, lse, grad, grad_lse, ring.scale)
    way: AsyncCollective | None = None
    parts = k, v  # of which there are others at once: there is a hop
    for hop, (of, keys, values) in enumerate(ring.blocks(k, v, call)):
        parts = gradients.add(of, keys, values)
        if ring.axis.size > 1:
            block = torch.cat(parts, -1)
            if way is not None:
                block += way.result()
            way = ring.start(hop, block, call.sibling())
            del block
    dk, dv = parts if way is None else (x.clone() for x in way.result().split(ring.features, -1))
    return gradients.dq(), dk.to(k.dtype), dv.to(v.dtype)

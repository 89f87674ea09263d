"""Shard a sequence over the ranks of an axis and gather it again, for context parallelism.

Orders:

* "plain": rank 0 has the beginning, the last rank the end. With a causal mask the last rank has nearly twice the mean
  work, and the others wait for it.
* "zigzag": the sequence is split into 2 W pieces, and rank r has pieces r and 2 W - 1 - r: equal work on every rank.

Position-wise layers (linear layers, norms, the loss of each token) need no change. Layers that depend on the position,
such as a rotary embedding, use `positions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gradmesh.errors import ArgumentError, ShapeError
from gradmesh.ops.sizes import balanced, intervals
from gradmesh.runtime.mesh import AxisLike, resolve
from gradmesh.transport.run import constants
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call
from gradmesh.verbs.collectives import all_gather
from gradmesh.verbs.collectives import shard as cut
from gradmesh.verbs.collectives import sizes as sizes_on

__all__ = ["Order", "positions", "shard", "sizes", "unshard"]

Order = Literal["plain", "zigzag"]
"""plain: rank 0 has the beginning, the last rank the end. zigzag: the sequence is split into 2 W pieces, and rank r has
pieces r and 2 W - 1 - r, so that causal attention is equal work on every rank."""


def spans(order: Order, sizes: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Each rank's positions as half-open intervals, in rising order; zigzag uses only the sum of the sizes.

    >>> spans("plain", (3, 2))
    (((0, 3),), ((3, 5),))
    >>> spans("zigzag", (4, 4))
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """
    if order == "plain":
        return tuple((span,) for span in intervals(sizes))
    ranks = len(sizes)
    cut = intervals(balanced(sum(sizes), 2 * ranks))
    return tuple((cut[rank], cut[-1 - rank]) for rank in range(ranks))


def sizes_of(order: Order, length: int, ranks: int) -> tuple[int, ...]:
    """Each rank's number of positions of an evenly sharded sequence.

    >>> sizes_of("plain", 9, 4), sizes_of("zigzag", 9, 4)
    ((3, 2, 2, 2), (3, 2, 2, 2))
    """
    if order == "plain":
        return balanced(length, ranks)
    cut = balanced(length, 2 * ranks)
    return tuple(cut[rank] + cut[-1 - rank] for rank in range(ranks))


def positions_of(order: Order, sizes: Sequence[int]) -> list[int]:
    """The positions of the concatenation of all ranks' shards.

    >>> positions_of("zigzag", (2, 2))
    [0, 3, 1, 2]
    """
    return [position for rank in spans(order, sizes) for span in rank for position in range(*span)]


def sizes(length: int, axis: AxisLike = None, *, order: Order = "plain") -> tuple[int, ...]:
    """Each rank's number of positions of an evenly sharded sequence.

    Args:
        length: of the full sequence.
        axis: the ranks, as in every verb.
        order: "plain" or "zigzag".

    Raises:
        ArgumentError: unknown `order`.

    Example:
        >>> gm.launch(lambda: gm.nn.sequence.sizes(10, order="zigzag"), 2, backend="threads")[0]
        (5, 5)
    """
    here = resolve(axis, "nn.sequence.sizes")
    return sizes_of(_known(order, "sizes", str(here)), length, here.size)


def positions(
    length: int, axis: AxisLike = None, *, order: Order = "plain", device: torch.device | str | None = None
) -> Tensor:
    """The positions of the sequence that this rank holds, in rising order.

    Args:
        length: of the full sequence.
        axis: the ranks, as in every verb.
        order: "plain" or "zigzag".
        device: of the result.

    Raises:
        ArgumentError: unknown `order`.

    Example:
        >>> def on_each_rank():
        ...     return gm.nn.sequence.positions(8, order="zigzag").tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    here = resolve(axis, "nn.sequence.positions")
    known = _known(order, "positions", str(here))
    held = spans(known, sizes_of(known, length, here.size))[here.rank]
    return torch.cat([torch.arange(*span, device=device) for span in held])


def shard(
    x: Tensor, axis: AxisLike = None, dim: int = -2, *, order: Order = "plain", src: Convention = I
) -> Tensor:
    """This rank's shard of a sequence that every rank has.

    ::

        I -> V    shape (..., L, ...) -> (..., L_r, ...); backward gathers the shards' gradients
        R -> V    the same forward; the gradient is that of the local shard, zero elsewhere

    Args:
        x: the full sequence, the same on every rank.
        axis: the ranks, as in every verb.
        dim: the dimension of the sequence; defaults to that of (batch, heads, sequence, features).
        order: "plain" or "zigzag".
        src: the type of `x`, as in `gradmesh.shard`. Irrelevant for token ids, which have no gradient.

    Raises:
        ArgumentError: unknown `order`, or `dim` is out of range.

    Example:
        >>> def on_each_rank():
        ...     return gm.nn.sequence.shard(torch.arange(8), dim=0, order="zigzag").tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    call = Call("nn.sequence.shard", x, axis)
    dim, here = call.dim(dim), call.axis
    held = sizes_of(_known(order, "shard", str(here)), x.shape[dim], here.size)
    if order == "zigzag":
        x = x.index_select(dim, _order(held, x.device))
    return cut(x, here, dim, src=src, sizes=held)


def unshard(
    x: Tensor, axis: AxisLike = None, dim: int = -2, *, order: Order = "plain", dst: Convention = R
) -> Tensor:
    """The full sequence from the ranks' shards; inverse of `shard`.

    ::

        V -> R    shape (..., L_r, ...) -> (..., L, ...); backward sums the ranks' gradients and returns the local shard
        V -> I    the same forward; backward returns the local shard of the gradient, which is the same on every rank

    Args:
        x: this rank's shard.
        axis: the ranks, as in every verb.
        dim: the dimension of the sequence.
        order: "plain" (shards of any sizes) or "zigzag".
        dst: the type of the result, as in `gradmesh.all_gather`.

    Raises:
        ArgumentError: unknown `order`, or `dim` is out of range.
        ShapeError: with "zigzag", the shards do not have the sizes that `shard` gives them.

    Example:
        >>> def on_each_rank():
        ...     part = gm.nn.sequence.shard(torch.arange(7), dim=0, order="zigzag")
        ...     return gm.nn.sequence.unshard(part, dim=0, order="zigzag").tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")[1]
        [0, 1, 2, 3, 4, 5, 6]
    """
    call = Call("nn.sequence.unshard", x, axis)
    dim, here = call.dim(dim), call.axis
    _known(order, "unshard", str(here))
    found = sizes_on(x, here, dim)
    expected = sizes_of(order, sum(found), here.size)
    if order == "zigzag" and found != expected:
        raise ShapeError.of(
            "the ranks' shards do not have the sizes of a zigzag sequence",
            op=call.verb,
            axis=str(here),
            expected=f"sizes {expected}",
            got=f"sizes {found}",
            remedy=f'shard it with gm.nn.sequence.shard(x, dim={dim}, order="zigzag")',
        )
    whole = all_gather(x, here, dim, dst=dst, sizes=found)
    if order == "plain":
        return whole
    return whole.index_select(dim, _order(found, x.device).argsort())


def _order(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return constants(positions_of("zigzag", sizes), device, torch.int64)


def _known(order: object, verb: str, axis: str) -> Order:
    if order not in ("plain", "zigzag"):
        raise ArgumentError.of(
            "unknown order",
            op=f"nn.sequence.{verb}",
            axis=axis,
            expected='order="plain" or order="zigzag"',
            got=f"order={order!r}",
            remedy='omit it, or pass order="zigzag" for causal attention',
        )
    return order

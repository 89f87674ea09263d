"""Cut a sequence over the ranks of an axis and put it together again, in order or balanced for a causal mask.

Orders:

* "plain": rank 0 has the beginning, the last rank the end. With a causal mask the last rank has nearly twice the mean
  work, and the others wait for it.
* "zigzag": the sequence is cut into 2 W pieces, and rank r has piece r and piece 2 W - 1 - r: equal work for all.

What works on each place by itself (linear layers, norms, the loss of each token) does not see the order. What depends
on the place, such as a rotary embedding, takes `positions`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradmesh.arguments import Call
from gradmesh.axis import AxisLike, resolve
from gradmesh.collectives import all_gather
from gradmesh.collectives import shard as cut
from gradmesh.collectives import sizes as sizes_on
from gradmesh.errors import ArgumentError, ShapeError, message
from gradmesh.nn.order import Order, pieces, places, sizes_of
from gradmesh.types import Convention, I, R

__all__ = ["Order", "positions", "shard", "sizes", "unshard"]


def sizes(length: int, axis: AxisLike = None, *, order: Order = "plain") -> tuple[int, ...]:
    """How many places of a sequence each rank has.

    Args:
        length: of the whole sequence.
        axis: the ranks, as in every verb.
        order: "plain" or "zigzag".

    Raises:
        ArgumentError: another order.

    Example:
        >>> gm.launch(lambda: gm.nn.sequence.sizes(10, order="zigzag"), 2, backend="threads")[0]
        (5, 5)
    """
    here = resolve(axis, "nn.sequence.sizes")
    return sizes_of(_known(order, "sizes", str(here)), length, here.size)


def positions(
    length: int, axis: AxisLike = None, *, order: Order = "plain", device: torch.device | str | None = None
) -> Tensor:
    """Which places of the sequence this rank has, in rising order.

    Args:
        length: of the whole sequence.
        axis: the ranks, as in every verb.
        order: "plain" or "zigzag".
        device: of the result.

    Raises:
        ArgumentError: another order.

    Example:
        >>> def on_each_rank():
        ...     return gm.nn.sequence.positions(8, order="zigzag").tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    here = resolve(axis, "nn.sequence.positions")
    held = pieces(_known(order, "positions", str(here)), length, here.size)
    return torch.cat([torch.arange(*span, device=device) for span in held[here.rank]])


def shard(
    x: Tensor, axis: AxisLike = None, dim: int = -2, *, order: Order = "plain", src: Convention = I
) -> Tensor:
    """This rank's part of a sequence that every rank has.

    ::

        I -> V    shape (..., L, ...) -> (..., its part of L, ...)
        R -> V    the same; the gradient is the own part's, zero elsewhere

    Args:
        x: the whole sequence, the same on every rank.
        axis: the ranks, as in every verb.
        dim: the dimension of the sequence; by default that of (batch, heads, sequence, features).
        order: "plain" or "zigzag".
        src: what the sequence is, as in `gradmesh.shard`. Token numbers have no gradient, so that it does not matter.

    Raises:
        ArgumentError: another order, or no such dimension.

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
    """The whole sequence of the ranks' parts, as `shard` cuts them.

    ::

        V -> R    shape (..., its part of L, ...) -> (..., L, ...)
        V -> I    the same forward; backward is the own part, as every rank has the whole gradient

    Args:
        x: this rank's part.
        axis: the ranks, as in every verb.
        dim: the dimension of the sequence.
        order: "plain", for which the ranks' parts may have any sizes, or "zigzag".
        dst: what the result is, as in `gradmesh.all_gather`.

    Raises:
        ArgumentError: another order, or no such dimension.
        ShapeError: zigzag, and the parts are not of the sizes that `shard` gives them.

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
        raise ShapeError(
            message(
                "the parts are not those of a sequence in zigzag order",
                op=call.verb,
                axis=str(here),
                expected=f"sizes {expected}",
                got=f"sizes {found}",
                remedy="cut the sequence with gradmesh.nn.sequence.shard",
            )
        )
    whole = all_gather(x, here, dim, dst=dst, sizes=found)
    if order == "plain":
        return whole
    return whole.index_select(dim, _order(found, x.device).argsort())


def _order(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The places of a sequence in zigzag order, one rank's after another's."""
    return torch.tensor(places("zigzag", sizes), dtype=torch.int64, device=device)


def _known(order: object, verb: str, axis: str) -> Order:
    if order not in ("plain", "zigzag"):
        raise ArgumentError(
            message(
                "order is not one that is known",
                op=f"nn.sequence.{verb}",
                axis=axis,
                expected='order one of "plain", "zigzag"',
                got=f"order={order!r}",
                remedy='leave it out, or say "zigzag" for causal attention',
            )
        )
    return order

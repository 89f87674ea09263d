"""A chain of layers whose weights are cut over the ranks: each is gathered while the layer before it computes.

Each rank has samples of its own, a share of every layer's weight, and a first layer that is whole, behind which the
first weight travels. In backward, the sum over the ranks that a weight's gradient needs travels while the layer before
computes its own: nothing is written for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

import gradmesh as gm


class Waitable(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> Tensor:
        """The tensor."""


class Done:
    """A tensor that is there already, where one that is on its way is expected."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        """The tensor."""
        return self._tensor


def begin_gather(share: Tensor) -> Waitable:
    """Begin to gather a weight from its shares, rows of it."""
    return gm.all_gather(share, async_op=True)


def chain(
    x: Tensor, first: Tensor, shares: Sequence[Tensor], begin: Callable[[Tensor], Waitable] = begin_gather
) -> Tensor:
    """Run the layers."""
    coming = begin(shares[0])
    x = layer(x, first)
    for following in [*shares[1:], None]:
        weight = coming.wait()
        if following is not None:
            coming = begin(following)
        x = layer(x, weight)
    return x


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """What a layer computes."""
    return (x @ weight).tanh()

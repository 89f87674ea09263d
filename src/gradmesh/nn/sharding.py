"""Which parameters are sharded, and over which ranks: what the layers know, and what is marked by hand."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor, nn

from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.errors import ArgumentError, message

__all__ = ["Holder", "Sharding", "mark_sharded", "remember"]

TensorT = TypeVar("TensorT", bound=Tensor)
Place = tuple[int, str]
"""Where a parameter is: the identity of its module, and its name there."""

_MARK = "_gradmesh_sharded_over"
"""The attribute of a parameter that was marked: the axes over which it is sharded."""


class Holder(Protocol):
    """A layer that holds shards, or parameters that are on one rank alone."""

    @property
    def axis(self) -> Axis:
        """The ranks that have the others."""
        ...

    @property
    def holds_parts(self) -> bool:
        """Whether a parameter is a part of one that the other ranks have parts of; else it is one of its own."""
        ...

    def _sharded(self) -> Iterator[tuple[nn.Module, str]]:
        """The parameters, each as the module that has it and its name there."""
        ...


_holders = WeakSet[Holder]()
_lock = threading.Lock()


def remember(layer: Holder) -> None:
    """Make a layer known to `Sharding` for as long as it is there.

    The layer is asked and not the parameter: a copy of the layer has other parameters, and a wrapper such as
    `fully_shard` puts its own in their places.
    """
    with _lock:
        _holders.add(layer)


class Sharding:
    """Which parameters are sharded now."""

    def __init__(self) -> None:
        with _lock:
            layers = list(_holders)
        self._layers = defaultdict[Place, list[Holder]](list)
        self._places = dict[int, Place]()
        for layer in layers:
            for module, name in layer._sharded():
                place = id(module), name
                self._layers[place].append(layer)
                parameter = module._parameters.get(name)
                if parameter is not None:
                    self._places[id(parameter)] = place
                    # Within a functional_call, as of a rank on another thread, it may be no leaf.
                    if parameter.is_leaf and parameter.grad is not None:
                        self._places[id(parameter.grad)] = place

    def at(self, place: Place) -> list[Holder]:
        """The layers that hold the parameter of a module and a name."""
        return self._layers.get(place, [])

    def of(self, tensor: Tensor) -> list[Holder]:
        """The layers that hold a parameter, or the parameter of a gradient."""
        place = self._places.get(id(tensor))
        return [] if place is None else self._layers[place]

    def over(self, tensor: Tensor, layers: Iterable[Holder] | None = None) -> list[Axis]:
        """The axes over which a parameter, or the parameter of a gradient, is sharded.

        Args:
            tensor: it.
            layers: those that hold it, if they are known.
        """
        held = [layer.axis for layer in (self.of(tensor) if layers is None else layers)]
        return [axis for axis in (*getattr(tensor, _MARK, ()), *held) if axis.size > 1]


def mark_sharded(parameter: TensorT, axis: AxisLike = None) -> TensorT:
    """Declare that each rank of an axis has a part of its own of a parameter, for `gm.nn.clip_grad_norm_`.

    The layers of `gm.nn` and DTensors need no mark. It is for shards that are made by hand, and for what is on one rank
    of the axis alone, such as the layers of a pipeline's stage. A parameter that is sharded over several axes is marked
    once for each. A copy of the parameter has no mark, nor has the one that `fully_shard` puts in its place: mark what
    the optimizer gets.

    Args:
        parameter: the parameter, or a tensor for `gm.nn.get_total_norm`.
        axis: the ranks that have the parts.

    Returns:
        The parameter.

    Raises:
        ArgumentError: not a tensor.

    Example:
        >>> def on_each_rank():
        ...     own = gm.nn.mark_sharded(torch.nn.Parameter(torch.zeros(1)))
        ...     own.grad = torch.tensor([(3.0, 4.0)[gm.rank()]])
        ...     return gm.nn.clip_grad_norm_([own], 1.0).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [5.0, 5.0]
    """
    here = resolve(axis, "nn.mark_sharded")
    if not isinstance(parameter, Tensor):
        raise ArgumentError(
            message(
                "this is not a tensor",
                op="nn.mark_sharded",
                axis=str(here),
                expected="a parameter",
                got=type(parameter).__name__,
                remedy="mark each parameter of a module",
            )
        )
    known = getattr(parameter, _MARK, ())
    if here not in known:
        setattr(parameter, _MARK, (*known, here))
    return parameter

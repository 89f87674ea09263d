"""Registry of sharded parameters: those of gradmesh's layers, and those marked by `mark_sharded`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor, nn

from gradmesh.errors import ArgumentError, message
from gradmesh.runtime.mesh import Axis, AxisLike, resolve

__all__ = ["Holder", "Sharding", "mark_sharded", "remember"]

TensorT = TypeVar("TensorT", bound=Tensor)
Place = tuple[int, str]
"""A parameter's location: the id of its module, and its name in it."""

_MARK = "_gradmesh_sharded_over"
"""The attribute of a marked parameter: the axes over which it is sharded."""


class Holder(Protocol):
    """A layer with sharded parameters, or with parameters that exist on one rank only."""

    @property
    def axis(self) -> Axis:
        """The ranks that have the other shards."""
        ...

    @property
    def holds_parts(self) -> bool:
        """True if each parameter is a shard of one tensor; False if ranks hold distinct parameters (experts)."""
        ...

    def _sharded(self) -> Iterator[tuple[nn.Module, str]]:
        """The parameters, each as its module and its name in it."""
        ...


_holders = WeakSet[Holder]()
_lock = threading.Lock()


def remember(layer: Holder) -> None:
    """Register a layer for `Sharding`, by weak reference.

    Layers are registered, not parameters: a copy of the layer has other parameters, and wrappers such as
    `fully_shard` replace them.
    """
    with _lock:
        _holders.add(layer)


class Sharding:
    """The sharded parameters at the time of construction."""

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
                    # In a functional_call, maybe of a rank on another thread, it may be a non-leaf tensor.
                    if parameter.is_leaf and parameter.grad is not None:
                        self._places[id(parameter.grad)] = place

    def at(self, place: Place) -> list[Holder]:
        """The layers that hold the parameter at a location."""
        return self._layers.get(place, [])

    def of(self, tensor: Tensor) -> list[Holder]:
        """The layers that hold a parameter or, of a gradient, its parameter."""
        place = self._places.get(id(tensor))
        return [] if place is None else self._layers[place]

    def over(self, tensor: Tensor, layers: Iterable[Holder] | None = None) -> list[Axis]:
        """The axes over which a parameter (or a gradient's parameter) is sharded; `layers` defaults to `of(tensor)`."""
        held = [layer.axis for layer in (self.of(tensor) if layers is None else layers)]
        return [axis for axis in (*getattr(tensor, _MARK, ()), *held) if axis.size > 1]


def mark_sharded(parameter: TensorT, axis: AxisLike = None) -> TensorT:
    """Mark a parameter as a shard (each rank of the axis holds a different part), for `gm.nn.clip_grad_norm_`.

    Layers of `gm.nn` and DTensors need no mark. Mark custom shards, and parameters that exist on one rank of the axis
    only, such as the layers of a pipeline stage. If a parameter is sharded over several axes, mark it once for each.
    A copy of the parameter has no mark, nor has the parameter that replaces it in `fully_shard`: mark the parameters
    that the optimizer gets.

    Args:
        parameter: the parameter, or a tensor for `gm.nn.get_total_norm`.
        axis: the ranks that hold the shards.

    Returns:
        The parameter.

    Raises:
        ArgumentError: `parameter` is not a tensor.

    Example:
        >>> def on_each_rank():
        ...     weight = gm.nn.mark_sharded(torch.nn.Parameter(torch.zeros(1)))
        ...     weight.grad = torch.tensor([(3.0, 4.0)[gm.rank()]])
        ...     return gm.nn.clip_grad_norm_([weight], 1.0).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [5.0, 5.0]
    """
    here = resolve(axis, "nn.mark_sharded")
    if not isinstance(parameter, Tensor):
        raise ArgumentError(
            message(
                "parameter is not a tensor",
                op="nn.mark_sharded",
                axis=str(here),
                expected="a torch.nn.Parameter or another tensor",
                got=type(parameter).__name__,
                remedy="for a module: for p in module.parameters(): gm.nn.mark_sharded(p)",
            )
        )
    known = getattr(parameter, _MARK, ())
    if here not in known:
        setattr(parameter, _MARK, (*known, here))
    return parameter

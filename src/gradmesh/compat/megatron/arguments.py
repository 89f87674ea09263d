"""Conversion of the arguments of Megatron's mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, SupportsInt, runtime_checkable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradmesh.compat._ops import single_rank_axis
from gradmesh.errors import AxisError, message
from gradmesh.runtime.mesh import Axis, AxisLike, current_mesh, resolve
from gradmesh.runtime.state import rank_state

__all__ = ["Group", "Ranks", "Sizes", "axis_of", "ints", "set_default_group"]

Sizes = Iterable[SupportsInt] | None
"""Sizes as lists, NumPy arrays or tensors."""


@runtime_checkable
class Ranks(Protocol):
    """The interface of Megatron's groups; some callers pass custom objects."""

    def rank(self) -> int:
        """This rank's index in the group."""

    def size(self) -> int:
        """The number of ranks."""


Group = AxisLike | Ranks


@dataclass(frozen=True)
class _Default:
    which: Group | Callable[[], Group]


def set_default_group(group: Group | Callable[[], Group]) -> None:
    """Set the meaning of `group=None` on this rank.

    `set_default_group(parallel_state.get_tensor_model_parallel_group)` gives it the same meaning as in Megatron.

    Args:
        group: a group; or a function without arguments that returns one, called each time; None restores the initial
            meaning: the axis "tp" of the current mesh if it has one, else its only axis, else the world.

    Example:
        >>> from gradmesh.compat import megatron
        >>> def on_each_rank():
        ...     pairs = gm.mesh(pair=2, tp=-1)
        ...     megatron.set_default_group(lambda: pairs.get_group("pair"))
        ...     found = megatron.gather_from_tensor_model_parallel_region(torch.tensor([gm.rank("tp")]))
        ...     megatron.set_default_group(None)
        ...     return found.tolist()
        >>> gm.launch(on_each_rank, 4, backend="threads")
        [[0, 0], [1, 1], [0, 0], [1, 1]]
    """
    rank_state().drop(_Default)
    if group is not None:
        rank_state().put(_Default(group))


def axis_of(group: Group) -> Axis:
    """The axis of a group; None is the default group, else the axis "tp" of the current mesh."""
    default = rank_state().get(_Default) if group is None else None
    if default is not None:
        group = default.which() if callable(default.which) else default.which
    mesh = current_mesh()
    if group is None and mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        group = "tp"
    known = group is None or isinstance(group, str | dist.ProcessGroup | DeviceMesh | Axis)
    if not known and isinstance(group, Ranks):
        return _of_ranks(group)
    return resolve(group, "compat.megatron")  # type: ignore[arg-type]  # raises for other types


def _of_ranks(group: Ranks) -> Axis:
    """The axis of a custom group object; with several ranks, it must have a ProcessGroup as an attribute."""
    if group.size() == 1:
        return single_rank_axis("group")
    held = [
        value for value in getattr(group, "__dict__", {}).values() if isinstance(value, dist.ProcessGroup)
    ]
    same = [one for one in held if (one.rank(), one.size()) == (group.rank(), group.size())]
    if len(same) != 1:
        raise AxisError(
            message(
                "cannot find the process group of a custom group object",
                op="compat.megatron",
                expected="a ProcessGroup, or an object with exactly one attribute that is a ProcessGroup of the same "
                "rank and size",
                got=f"{type(group).__name__}, rank {group.rank()} of {group.size()}, with {len(same)} such attributes",
                remedy="pass the ProcessGroup itself",
            )
        )
    return resolve(same[0], "compat.megatron")


def ints(sizes: Sizes) -> list[int] | None:
    """Sizes as ints."""
    return None if sizes is None else [int(size) for size in sizes]

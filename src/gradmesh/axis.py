"""An axis: the ranks that one collective runs over."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradmesh.backends.process_group import group_cache
from gradmesh.errors import ArgumentError, AxisError, message
from gradmesh.types import Reduction
from gradmesh.world import current_mesh, world_group

__all__ = ["Axis", "AxisLike", "axis", "balanced", "rank", "resolve", "world_size"]


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks that a collective runs over, as this rank sees them.

    Ranks of an axis are numbered 0 to size - 1; the rank in the world is called the global rank.

    Attributes:
        name: its name in the mesh, or "world" or "group".
        rank: this rank's number on the axis.
        size: the number of ranks.
        group: the torch process group.
    """

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup

    @property
    def global_ranks(self) -> list[int]:
        """The global ranks of the axis, in order."""
        return dist.get_process_group_ranks(self.group)

    def offset(self, rows: int | Sequence[int]) -> int:
        """The first row of this rank in a tensor that is sharded over the axis.

        Args:
            rows: each rank's number of rows, as `gradmesh.sizes` returns them; or the total number, which is then split
                as by `gradmesh.shard`: the first ranks get one more where the axis does not divide it.

        Raises:
            ArgumentError: not one number of rows for each rank, or a negative one.

        Example:
            >>> def on_each_rank():
            ...     x = torch.zeros(3 + gm.rank())  # 3 rows and 4
            ...     return gm.axis().offset(gm.sizes(x)), gm.axis().offset(5), gm.axis().slice(5)
            >>> gm.launch(on_each_rank, 2, backend="threads")
            [(0, 0, slice(0, 3, None)), (3, 3, slice(3, 5, None))]
        """
        return sum(self._rows(rows)[: self.rank])

    def slice(self, rows: int | Sequence[int]) -> builtins.slice:
        """This rank's rows as a slice of a tensor that is sharded over the axis; `rows` as for `offset`."""
        each = self._rows(rows)
        begin = sum(each[: self.rank])
        return builtins.slice(begin, begin + each[self.rank])

    def _rows(self, rows: int | Sequence[int]) -> Sequence[int]:
        if isinstance(rows, int) and not isinstance(rows, bool):
            rows = balanced(rows, self.size)
        each = rows if isinstance(rows, Sequence) and not isinstance(rows, str) else ()
        if len(each) != self.size or not all(isinstance(n, int) and n >= 0 for n in each):
            raise ArgumentError(
                message(
                    "rows must have one number for each rank",
                    op="Axis.offset",
                    axis=str(self),
                    expected=f"{self.size} ints of 0 or more, or one int for the total",
                    got=f"rows={rows!r}",
                    remedy="pass gradmesh.sizes(x), or the total number of rows, such as x_full.shape[0]",
                )
            )
        return each

    def __deepcopy__(self, memo: object) -> Axis:
        """The axis itself, as it is immutable."""
        return self

    def __str__(self) -> str:
        return f"{self.name!r}, rank {self.rank} of {self.size}"


AxisLike = str | dist.ProcessGroup | DeviceMesh | Axis | None


def axis(which: AxisLike = None) -> Axis:
    """Find an axis.

    Args:
        which: the name of an axis of the current mesh, a ProcessGroup, a 1-D DeviceMesh, an Axis, or None: the
            current mesh's only axis, else the world.

    Raises:
        AxisError: no axis of that name, a mesh of several axes, a group that this rank is not in.
        NotInitializedError: `init` was not called.

    Example:
        >>> import gradmesh as gm
        >>> gm.init()
        >>> mesh = gm.mesh(dp=1, gp=1)
        >>> gm.axis("gp").name, gm.axis("gp").rank, gm.axis("gp").size
        ('gp', 0, 1)
    """
    return resolve(which, "axis")


def rank(axis: AxisLike = None) -> int:
    """This rank's number on an axis, or in the world.

    Args:
        axis: as in `gradmesh.axis`; None: the current mesh's only axis, else the world. On a mesh of several axes
            `gm.rank()` is the global rank, as without a mesh.

    Example:
        >>> gm.launch(lambda: (gm.rank(), gm.world_size()), 2, backend="threads")
        [(0, 2), (1, 2)]
        >>> def on_each_rank():
        ...     gm.mesh(dp=2, tp=2)
        ...     return gm.rank(), gm.rank("dp"), gm.rank("tp")
        >>> gm.launch(on_each_rank, 4, backend="threads")
        [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    """
    return _axis_or_world(axis, "rank").rank


def world_size(axis: AxisLike = None) -> int:
    """The number of ranks of an axis, or of the world.

    Args:
        axis: as in `gradmesh.axis`; None: the current mesh's only axis, else the world. On a mesh of several axes
            `gm.world_size()` is the number of all ranks, as without a mesh.

    Example:
        >>> gm.launch(gm.world_size, 3, backend="threads")
        [3, 3, 3]
    """
    return _axis_or_world(axis, "world_size").size


def _axis_or_world(which: AxisLike, op: str) -> Axis:
    """The axis; the world on a mesh of several axes, where a collective would raise."""
    mesh = current_mesh()
    if which is None and (mesh is None or mesh.ndim != 1):
        return _of_group(world_group(op), "world")
    return resolve(which, op)


def balanced(total: int, ranks: int) -> tuple[int, ...]:
    """Split `total` over the ranks; the first `total % ranks` of them get one more.

    >>> balanced(5, 3)
    (2, 2, 1)
    """
    share, more = total // ranks, total % ranks  # symbolic ints have no divmod
    return tuple(share + (rank < more) for rank in range(ranks))


def resolve(which: AxisLike, op: str) -> Axis:
    """Find an axis; `op` is the caller's name for error texts."""
    if isinstance(which, Axis):
        return which
    if isinstance(which, str):
        return _of_mesh(current_mesh(), which, op)
    if which is None:
        mesh = current_mesh()
        return _of_mesh(mesh, None, op) if mesh is not None else _of_group(world_group(op), "world")
    if isinstance(which, DeviceMesh):
        return _of_mesh(which, None, op)
    if isinstance(which, dist.ProcessGroup):
        return _of_group(which, "group")
    if isinstance(which, int) and which == dist.GroupMember.NON_GROUP_MEMBER:
        raise AxisError(
            message(
                "this rank is not in the group",
                op=op,
                expected="a group that contains this rank",
                got=f"GroupMember.NON_GROUP_MEMBER from new_group, on global rank {world_group(op).rank()}",
                remedy="call the collective only on the ranks of the group, e.g. `if dist.get_rank() in ranks:`",
            )
        )
    raise AxisError(
        message(
            "the axis argument has an unsupported type",
            op=op,
            expected="a name, ProcessGroup, 1-D DeviceMesh, Axis or None",
            got=f"{type(which).__name__}: {which!r}",
            remedy=_meant(op, which)
            or 'pass an axis name of the current mesh, such as axis="tp", or a ProcessGroup',
        )
    )


_INT_MEANT = {
    "all_gather": "dim",
    "all_to_all": "split_dim",
    "broadcast": "root",
    "gather": "dim",
    "halo_exchange": "dim",
    "recv": "source",
    "reduce": "root",
    "reduce_scatter": "dim",
    "scatter": "dim",
    "send": "to",
    "shard": "dim",
    "shift": "offset",
    "sizes": "dim",
}
"""For each verb, the argument that an int passed as the axis was probably meant for."""

_WORD_MEANT = {"all_reduce": get_args(Reduction), "reduce_scatter": ("sum", "mean")}
"""For each verb, strings that are values of `op`."""


def _meant(op: str, which: object) -> str | None:
    """A suggestion if another argument was passed as the axis."""
    if isinstance(which, int) and not isinstance(which, bool) and op in _INT_MEANT:
        return f"did you mean {_INT_MEANT[op]}={which}?"
    if isinstance(which, str) and which in _WORD_MEANT.get(op, ()):
        return f"did you mean op={which!r}?"
    return None


def _of_group(group: dist.ProcessGroup, name: str) -> Axis:
    kept = group_cache(group)
    if kept is None:
        return Axis(name, group.rank(), group.size(), group)
    found: Axis | None = kept.get((Axis, name))
    if found is None:
        found = kept[Axis, name] = Axis(name, group.rank(), group.size(), group)
    return found


def _of_mesh(mesh: DeviceMesh | None, name: str | None, op: str) -> Axis:
    world_group(op)
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    if mesh is None or (name is not None and name not in names):
        raise AxisError(
            message(
                f"no axis {name!r} in the current mesh",
                op=op,
                expected=f"one of {', '.join(map(repr, names))}" if mesh is not None else "a current mesh",
                got=f"axis={name!r}",
                remedy=_meant(op, name)
                or f"create one with it, such as gradmesh.mesh({name}=-1), or enter it with gradmesh.use_mesh(mesh)",
            )
        )
    if name is None and mesh.ndim != 1:
        raise AxisError(
            message(
                "the axis argument is required on a mesh with several axes",
                op=op,
                expected="the name of one axis",
                got=f"no axis argument; the mesh has the axes {', '.join(map(repr, names)) or mesh.ndim}",
                remedy=f"pass axis={names[0]!r}, for example"
                if names
                else "pass a 1-D mesh, such as mesh[0]",
            )
        )
    if mesh.get_coordinate() is None:
        raise AxisError(
            message(
                "this rank is not in the mesh",
                op=op,
                expected="a mesh that contains this rank",
                got=f"{mesh} on global rank {world_group(op).rank()}",
                remedy="call the collective only on the ranks of the mesh",
            )
        )
    return _of_group(mesh.get_group(name), name or (names[0] if names else "mesh"))

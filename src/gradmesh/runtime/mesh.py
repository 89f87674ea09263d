"""Meshes of process groups, and the ranks of one axis."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import math
import os
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradmesh._torch import compiling, constant_to_compilers, default_group
from gradmesh._torch.threads import of_thread
from gradmesh._util.call_sites import install_excepthook
from gradmesh.errors import ArgumentError, AxisError, NotInitializedError
from gradmesh.ops.sizes import balanced
from gradmesh.runtime.state import rank_state
from gradmesh.types import Reduction

TIMEOUT = 300.0
"""Default timeout in seconds, shorter than torch's 1800."""


def init(backend: str | None = None, *, timeout: float = TIMEOUT) -> None:
    """Initialize the process group from the environment; a single process becomes a world of one rank.

    Under `torchrun` (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) this is
    `torch.distributed.init_process_group`. Under `mpirun` or `srun` with PMI the ranks are those of MPI, which needs
    the extra `gradmesh[mpi]`, and the variables are set here. Without either the process is a world of 1, on which
    every verb works and differentiates. Calling it again does nothing.

    Args:
        backend: a torch.distributed backend; by default, or with "auto", `shm` for CPU tensors if all ranks are on this
            host (as LOCAL_WORLD_SIZE or a local MASTER_ADDR indicates), `mpi4py` under MPI, `hosts` on several hosts
            with several ranks each (GROUP_WORLD_SIZE, SLURM_STEP_NUM_NODES), otherwise `gloo`. With a GPU, by default
            `gloo` for CPU tensors and `nccl` for CUDA tensors, with this process's device set from LOCAL_RANK.
        timeout: seconds that a collective waits for the other ranks. Pass a longer one if a rank may compute for longer
            while others wait for it.

    Raises:
        ArgumentError: `timeout` is not a positive number.
        NotInitializedError: only some of the launcher's environment variables are set.
        MissingExtraError: an MPI launcher started the process, and mpi4py is not installed.

    Example:
        >>> import gradmesh as gm
        >>> gm.init()
        >>> gm.axis().size
        1
    """
    install_excepthook()
    if dist.is_initialized():
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ArgumentError.of(
            "timeout must be a positive number",
            op="init",
            expected="a positive number of seconds",
            got=f"timeout={timeout!r}",
            remedy="pass the seconds that a rank waits for the others, such as timeout=300",
        )
    from gradmesh.backends import mpi

    backend = None if backend == "auto" else backend
    cuda = torch.cuda.is_available()
    limit = datetime.timedelta(seconds=timeout)
    if mpi.launched():
        store, rank, size = mpi.rendezvous(limit)
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        chosen = backend or ("cpu:gloo,cuda:nccl" if cuda else "mpi4py")
        dist.init_process_group(chosen, store=store, rank=rank, world_size=size, timeout=limit)
        return
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else _for_cpus())
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        # Gloo needs a network interface even for one rank.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    if missing:
        raise NotInitializedError.of(
            "some environment variables of the launcher are not set",
            op="init",
            expected=", ".join(needed),
            got="not set: " + ", ".join(missing),
            remedy="start the script with torchrun, or unset RANK and WORLD_SIZE for a world of one",
        )
    if cuda and "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=limit)


def _for_cpus() -> str:
    """The default backend for CPU tensors, according to the environment; the same on every rank."""
    from gradmesh.backends import shm

    size = os.environ.get("WORLD_SIZE", "1")
    loopback = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
    if os.environ.get("LOCAL_WORLD_SIZE") == size or loopback:
        return shm.default()
    hosts = os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_NODES", size))
    return "hosts" if hosts != size else "gloo"


def world_group(op: str) -> dist.ProcessGroup:
    """The group of all ranks; `op` is the caller's name for the error text."""
    group = dist.group.WORLD
    if group is None:
        raise NotInitializedError.of(
            "torch.distributed is not initialized",
            op=op,
            expected="an initialized process group",
            got="none",
            remedy="call gradmesh.init() first, or run the function with gradmesh.launch(fn, 2)",
        )
    return group


def destroyed(op: str, axis: Axis, got: str) -> NotInitializedError:
    """The error of an axis whose process group was destroyed."""
    return NotInitializedError.of(
        "the process group was destroyed",
        op=op,
        axis=str(axis),
        expected="an initialized process group",
        got=got,
        remedy=f"use {op}() before destroy_process_group(), or create a new group with dist.new_group(...)",
    )


def mesh(**sizes: int) -> DeviceMesh:
    """Arrange the ranks of the world as a mesh with named axes and make it the current mesh.

    The first axis varies slowest, so consecutive global ranks are along the last axis.

    Args:
        sizes: the number of ranks along each axis, by name; one of them may be -1 to be inferred.

    Returns:
        An ordinary `torch.distributed.DeviceMesh`, usable wherever torch takes one.

    Raises:
        ArgumentError: the sizes do not multiply to the number of ranks.
        NotInitializedError: `init` was not called.

    Example:
        >>> import gradmesh as gm
        >>> gm.init()
        >>> gm.mesh(dp=1, gp=-1).mesh_dim_names
        ('dp', 'gp')
    """
    world = world_group("mesh").size()
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in sizes.values())
    valid = sizes and whole and all(n == -1 or n > 0 for n in sizes.values())
    known = math.prod(n for n in sizes.values() if n != -1) if valid else 0
    free = [name for name, n in sizes.items() if n == -1]
    if not valid or len(free) > 1 or (world % known if free else world != known):
        raise ArgumentError.of(
            f"the sizes of the axes must multiply to the number of ranks, {world}",
            op="mesh",
            expected=f"positive ints with product {world}, at most one of them -1",
            got=", ".join(f"{name}={n!r}" for name, n in sizes.items()) or "no axes",
            remedy=f"change a size, or pass -1 for one axis to infer it, such as {next(iter(sizes), 'dp')}=-1",
        )
    shape = tuple(world // known if n == -1 else n for n in sizes.values())
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    made = init_device_mesh(device, shape, mesh_dim_names=tuple(sizes))
    _set_mesh(made)
    return made


@contextlib.contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Make `mesh` the current mesh inside the block, and the one before it afterwards.

    Example:
        >>> import gradmesh as gm
        >>> gm.init()
        >>> with gm.use_mesh(gm.mesh(tp=1)):
        ...     gm.axis("tp").name
        'tp'
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError.of(
            "the argument must be a DeviceMesh",
            op="use_mesh",
            expected="a torch.distributed DeviceMesh",
            got=repr(mesh),
            remedy="create one with gradmesh.mesh(dp=2, tp=2) or torch.distributed.init_device_mesh",
        )
    before = current_mesh()
    _set_mesh(mesh)
    try:
        yield mesh
    finally:
        _set_mesh(before)


def _set_mesh(mesh: DeviceMesh | None) -> None:
    state = rank_state()
    state.mesh, state.mesh_world = mesh, dist.group.WORLD


def current_mesh() -> DeviceMesh | None:
    """The current mesh; None if its process group was destroyed."""
    state = rank_state()
    return state.mesh if state.mesh is not None and state.mesh_world is default_group() else None


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
        try:
            return dist.get_process_group_ranks(self.group)
        except KeyError as error:
            raise destroyed("axis", self, "a group that torch.distributed does not know") from error

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
            raise ArgumentError.of(
                "rows must have one number for each rank",
                op="Axis.offset",
                axis=str(self),
                expected=f"{self.size} ints of 0 or more, or one int for the total",
                got=f"rows={rows!r}",
                remedy="pass gradmesh.sizes(x), or the total number of rows, such as x_full.shape[0]",
            )
        return each

    def __deepcopy__(self, memo: object) -> Axis:
        """The axis itself, as it is immutable."""
        return self

    def __str__(self) -> str:
        members = ""
        if self.name == "group" and self.group is not None:  # None: an axis that only describes a call
            with contextlib.suppress(KeyError, ValueError):  # torch does not know the group
                members = f" of global ranks {reprlib.repr(dist.get_process_group_ranks(self.group))[1:-1]}"
        return f"{self.name!r}{members}, rank {self.rank} of {self.size}"


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


def resolve(which: AxisLike, op: str) -> Axis:
    """Find an axis; `op` is the caller's name for error texts."""
    if which is None:
        state, world = rank_state(), dist.group.WORLD
        if state.mesh is not None and (mesh := current_mesh()) is not None:
            return _of_mesh(mesh, None, op)
        return _of_group(world_group(op) if world is None else world, "world")
    if isinstance(which, Axis):
        return which
    if isinstance(which, str):
        return _of_mesh(current_mesh(), which, op)
    if isinstance(which, dist.ProcessGroup):
        return _of_group(which, "group")
    if isinstance(which, DeviceMesh):
        return _of_mesh(which, None, op)
    if isinstance(which, int) and which == dist.GroupMember.NON_GROUP_MEMBER:
        raise AxisError.of(
            "this rank is not in the group",
            op=op,
            expected="a group that contains this rank",
            got=f"GroupMember.NON_GROUP_MEMBER from new_group, on global rank {world_group(op).rank()}",
            remedy="call the collective only on the ranks of the group, e.g. `if dist.get_rank() in ranks:`",
        )
    raise AxisError.of(
        "the axis argument has an unsupported type",
        op=op,
        expected="a name, ProcessGroup, 1-D DeviceMesh, Axis or None",
        got=f"{type(which).__name__}: {which!r}",
        remedy=_meant(op, which)
        or 'pass an axis name of the current mesh, such as axis="tp", or a ProcessGroup',
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
    kept = None if compiling() else getattr(group, "kept", None)
    if kept is None:  # a group of another package keeps nothing
        return Axis(name, group.rank(), group.size(), group)
    made_in = getattr(group, "made_in", None)
    if made_in is not None and getattr(of_thread, "world", made_in) is not made_in:
        raise AxisError.of(
            "the process group is the object of another rank",
            op="axis",
            expected="the group that this rank has made",
            got=f"that of place {group.rank()}, found in what threads share, such as a global of a module",
            remedy='run the ranks as processes, backend="shm", or keep a group for each rank',
        )
    found: Axis | None = kept.get((Axis, name))
    if found is None:
        found = kept[Axis, name] = Axis(name, group.rank(), group.size(), group)
    return found


@constant_to_compilers  # Dynamo of torch 2.9 cannot trace the attribute
def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _of_mesh(mesh: DeviceMesh | None, name: str | None, op: str) -> Axis:
    world_group(op)
    names = _names(mesh) if mesh is not None else ()
    if mesh is None or (name is not None and name not in names):
        raise AxisError.of(
            f"no axis {name!r} in the current mesh",
            op=op,
            expected=f"one of {', '.join(map(repr, names))}" if mesh is not None else "a current mesh",
            got=f"axis={name!r}",
            remedy=_meant(op, name)
            or ("" if mesh is None else f"pass axis={names[0]!r}, for example; or " if names else "")
            + f"create a mesh with this axis, such as gradmesh.mesh({name}=-1), or enter it with "
            "gradmesh.use_mesh(mesh)",
        )
    if name is None and mesh.ndim != 1:
        raise AxisError.of(
            "the axis argument is required on a mesh with several axes",
            op=op,
            expected="the name of one axis",
            got=f"no axis argument; the mesh has the axes {', '.join(map(repr, names)) or mesh.ndim}",
            remedy=f"pass axis={names[0]!r}, for example" if names else "pass a 1-D mesh, such as mesh[0]",
        )
    if mesh.get_coordinate() is None:
        raise AxisError.of(
            "this rank is not in the mesh",
            op=op,
            expected="a mesh that contains this rank",
            got=f"{mesh} on global rank {world_group(op).rank()}",
            remedy="call the collective only on the ranks of the mesh",
        )
    return _of_group(mesh.get_group(name), name or (names[0] if names else "mesh"))

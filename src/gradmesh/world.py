"""The process group of the program and the current mesh."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradmesh._torch import default_group
from gradmesh.backends import shm
from gradmesh.errors import ArgumentError, NotInitializedError, message
from gradmesh.state import rank_state
from gradmesh.tracebacks import install

__all__ = ["TIMEOUT", "current_mesh", "init", "mesh", "use_mesh", "world_group"]

TIMEOUT = 300.0
"""Default timeout in seconds, shorter than torch's 1800."""


def init(backend: str | None = None, *, timeout: float = TIMEOUT) -> None:
    """Initialize the process group from the environment; a single process becomes a world of one rank.

    Under `torchrun` (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) this is
    `torch.distributed.init_process_group`. Without those variables the process is a world of 1, on which every
    verb works and differentiates. Calling it again does nothing.

    Args:
        backend: a torch.distributed backend; by default `shm` for CPU tensors if all ranks are on this host (as
            LOCAL_WORLD_SIZE or a local MASTER_ADDR indicates), otherwise `gloo`. With a GPU, by default `gloo` for CPU
            tensors and `nccl` for CUDA tensors, with this process's device set from LOCAL_RANK.
        timeout: seconds that a collective waits for the other ranks. Pass a longer one if a rank may compute for longer
            while others wait for it.

    Raises:
        ArgumentError: `timeout` is not a positive number.
        NotInitializedError: only some of the launcher's environment variables are set.

    Example:
        >>> import gradmesh as gm
        >>> gm.init()
        >>> gm.axis().size
        1
    """
    install()
    if dist.is_initialized():
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ArgumentError(
            message(
                "timeout must be a positive number",
                op="init",
                expected="a positive number of seconds",
                got=f"timeout={timeout!r}",
                remedy="pass the seconds that a rank waits for the others, such as timeout=300",
            )
        )
    cuda = torch.cuda.is_available()
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else shm.default() if _on_one_host() else "gloo")
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        # Gloo needs a network interface even for one rank.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    if missing:
        raise NotInitializedError(
            message(
                "some environment variables of the launcher are not set",
                op="init",
                expected=", ".join(needed),
                got="not set: " + ", ".join(missing),
                remedy="start the script with torchrun, or unset RANK and WORLD_SIZE for a world of one",
            )
        )
    if cuda and "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))


def _on_one_host() -> bool:
    """Whether all ranks run on this host, according to the environment; the same on every rank."""
    size = os.environ.get("WORLD_SIZE", "1")
    local = os.environ.get("LOCAL_WORLD_SIZE") == size
    loopback = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
    return local or loopback


def world_group(op: str) -> dist.ProcessGroup:
    """The group of all ranks; `op` is the caller's name for the error text."""
    group = dist.group.WORLD
    if group is None:
        raise NotInitializedError(
            message(
                "torch.distributed is not initialized",
                op=op,
                expected="an initialized process group",
                got="none",
                remedy="call gradmesh.init() first, or run the function with gradmesh.launch(fn, 2)",
            )
        )
    return group


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
        raise ArgumentError(
            message(
                f"the sizes of the axes must multiply to the number of ranks, {world}",
                op="mesh",
                expected=f"positive ints with product {world}, at most one of them -1",
                got=", ".join(f"{name}={n!r}" for name, n in sizes.items()) or "no axes",
                remedy=f"change a size, or pass -1 for one axis to infer it, such as {next(iter(sizes), 'dp')}=-1",
            )
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
        raise ArgumentError(
            message(
                "the argument must be a DeviceMesh",
                op="use_mesh",
                expected="a torch.distributed DeviceMesh",
                got=repr(mesh),
                remedy="create one with gradmesh.mesh(dp=2, tp=2) or torch.distributed.init_device_mesh",
            )
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

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
"""Seconds that a rank waits for the others where nobody said how long. Nobody sits through the 1800 of torch."""


def init(backend: str | None = None, *, timeout: float = TIMEOUT) -> None:
    """Join the process group that the environment describes; a lone process becomes a world of one rank.

    Under `torchrun` (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) this is
    `torch.distributed.init_process_group`. Without those variables the process is a world of 1, on which every
    verb works and differentiates. Calling it again does nothing.

    Args:
        backend: a torch.distributed backend; by default `shm` for CPU tensors if all ranks are on this host (as
            LOCAL_WORLD_SIZE, or a MASTER_ADDR of the host itself, says), else `gloo`. Where there is a GPU, by
            default `gloo` for CPU tensors and `nccl` for CUDA tensors, with this process's device set from
            LOCAL_RANK.
        timeout: seconds that a collective waits for the other ranks. Give more where a rank may work alone for longer
            while others wait for it.

    Raises:
        ArgumentError: `timeout` is no positive number.
        NotInitializedError: only part of the launcher's environment is there.

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
                "timeout is not usable",
                op="init",
                expected="a positive number of seconds",
                got=f"timeout={timeout!r}",
                remedy="say how long a rank may wait for the others",
            )
        )
    cuda = torch.cuda.is_available()
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else shm.default() if _on_one_host() else "gloo")
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        # Gloo looks for a network interface even when there is nobody to talk to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    if missing:
        raise NotInitializedError(
            message(
                "the launcher's environment is incomplete",
                op="init",
                expected=", ".join(needed),
                got="no " + ", ".join(missing),
                remedy="start the script with torchrun, or unset RANK and WORLD_SIZE for a world of one",
            )
        )
    if cuda and "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))


def _on_one_host() -> bool:
    """Whether the environment says that all ranks run here; alike on every rank."""
    size = os.environ.get("WORLD_SIZE", "1")
    local = os.environ.get("LOCAL_WORLD_SIZE") == size
    loopback = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
    return local or loopback


def world_group(op: str) -> dist.ProcessGroup:
    """The group of all ranks; `op` is who asks, for the error text."""
    group = dist.group.WORLD
    if group is None:
        raise NotInitializedError(
            message(
                "torch.distributed is not initialised",
                op=op,
                expected="a process group",
                got="none",
                remedy="call gradmesh.init() first, or run the function with gradmesh.launch",
            )
        )
    return group


def mesh(**sizes: int) -> DeviceMesh:
    """Lay the ranks of the world out as a mesh with named axes and make it the current mesh.

    The first axis varies slowest, so ranks that are consecutive in the world lie along the last axis.

    Args:
        sizes: the number of ranks along each axis, by name; one of them may be -1 and takes what is left.

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
                "the axes do not fill the world",
                op="mesh",
                expected=f"positive sizes with product {world}, at most one of them -1",
                got=", ".join(f"{name}={n!r}" for name, n in sizes.items()) or "no axes",
                remedy="choose sizes whose product is the number of ranks",
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
                "this is no mesh",
                op="use_mesh",
                expected="a torch.distributed DeviceMesh",
                got=repr(mesh),
                remedy="make one with gradmesh.mesh(...) or torch.distributed.device_mesh.init_device_mesh",
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
    """The current mesh, unless the process group it was made in is gone."""
    state = rank_state()
    return state.mesh if state.mesh is not None and state.mesh_world is default_group() else None

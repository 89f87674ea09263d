"""A simulated accelerator for tests, on which errors of streams and lifetimes show without a GPU.

It is torch's PrivateUse1 device under the name "simulated":

* Kernels run late, on the thread of a stream, after a delay. Streams, events and `record_stream` are torch's own
  (`torch.Stream`, `torch.Event`, `torch.accelerator`), and autograd runs backward on a thread of the device.
* Freed memory is the next that is handed out on its stream, and is filled with NaN, in the order of that stream.
* Collectives run on a stream of their group; `work.wait()` makes a stream wait, not the host (`group.py`).
* What makes the host wait is counted, by line of gradmesh: reading a value, sizes that depend on values, and copies
  between host and device, except with `non_blocking=True` to the device.

* Kernels can be captured and replayed, as CUDA graphs.

It does not simulate the speed of kernels, several devices, memory limits, or pinned memory.

With GRADMESH_TEST_DEVICE=cuda in the environment, `on_device`, `counted` and `captured` are those of `cuda.py`: the
tests that are marked `device` then run on GPUs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import gradmesh as gm
from tests.simulated_device import build, cuda
from tests.simulated_device.device import (
    NAME,
    Graph,
    core,
    delayed,
    install,
    is_simulated,
    launch,
    raw,
    waits,
)
from tests.simulated_device.device import captured as captured_here
from tests.simulated_device.device import counted as counted_here
from tests.simulated_device.group import ALONE, BACKEND, SimulatedGroup, register

__all__ = [
    "ALONE",
    "BACKEND",
    "NAME",
    "ON_CUDA",
    "POOL",
    "SIZES",
    "Graph",
    "SimulatedGroup",
    "captured",
    "core",
    "counted",
    "delayed",
    "grid",
    "install",
    "is_simulated",
    "launch",
    "on_device",
    "raw",
    "waits",
    "why_not",
]

ON_CUDA = os.environ.get("GRADMESH_TEST_DEVICE") == "cuda"
"""Whether the tests run on GPUs."""

POOL = cuda.POOL if ON_CUDA else "cpu:gloo"
"""The backend of the ranks that run `on_device`: Gloo, in processes that no other test uses."""

SIZES = sorted({2, cuda.count()}) if ON_CUDA and cuda.count() > 1 else [2, 3]
"""The numbers of ranks of the law tests."""

counted = cuda.counted if ON_CUDA else counted_here
captured: Callable[[], contextlib.AbstractContextManager[Any]] = cuda.captured if ON_CUDA else captured_here


def why_not() -> str | None:
    """Why no rank can run on the device here, as the reason of a skip; None: they can."""
    return cuda.why_not() if ON_CUDA else build.why_not()


_meshes: dict[str, DeviceMesh] = {}


def mesh(backend: str = BACKEND) -> DeviceMesh:
    """A mesh of all ranks whose group has a backend of the device; made at the first call."""
    if backend not in _meshes:
        register()
        group = dist.new_group(backend=backend)
        _meshes[backend] = DeviceMesh.from_group(group, NAME, mesh_dim_names=("world",))
    return _meshes[backend]


def grid(**sizes: int) -> DeviceMesh:
    """A mesh of some axes, as `gradmesh.mesh` makes it, whose groups have a backend of the device."""
    if ON_CUDA:
        return gm.mesh(**sizes)
    ranks = torch.arange(dist.get_world_size(), device="cpu").reshape(*sizes.values())
    groups = [
        dist.new_subgroups_by_enumeration(ranks.movedim(dim, -1).reshape(-1, n).tolist(), backend=BACKEND)[0]
        for dim, n in enumerate(sizes.values())
    ]
    return DeviceMesh.from_group(groups, NAME, mesh=ranks, mesh_dim_names=tuple(sizes))


def on_device(
    fn: Callable[..., Any], *args: Any, delay: float = 0.0, backend: str = BACKEND, default: bool = True
) -> Any:
    """Run a function on a rank with the device as the default device and its group as the current mesh.

    Args:
        fn: the function, which every rank runs.
        args: its arguments.
        delay: seconds before each kernel.
        backend: the backend of the group.
        default: whether new tensors are on the device.
    """
    if ON_CUDA:
        return cuda.on_device(fn, *args, default=default)
    install()
    with (
        gm.use_mesh(mesh(backend)),
        delayed(delay),
        torch.device(NAME) if default else contextlib.nullcontext(),
    ):
        try:
            return fn(*args)
        finally:
            core().settle()

"""Installed versions, available backends and settings, for `gradmesh info`."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch
import torch.distributed as dist

from gradmesh._util.environment import VARIABLES, missing
from gradmesh.backends import shm
from gradmesh.backends.shm import data_path


def version() -> str:
    """The version of the distribution."""
    try:
        return metadata.version("gradmesh")
    except metadata.PackageNotFoundError:
        return "not installed, run from source"


def versions() -> dict[str, str]:
    """Versions of gradmesh, torch and Python, what shm copies with, and the machine's cores and GPUs."""
    return {
        "gradmesh": version(),
        "shm data path": "C" if data_path.is_native() else "Python",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(cores()),
        "GPUs": str(torch.cuda.device_count()),
    }


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def backends() -> dict[str, str | None]:
    """The reason why each backend is unavailable; None for an available one.

    >>> backends()["threads"] is None
    True
    """
    without = "torch was built without it"
    gloo = None if dist.is_gloo_available() else without
    needs = None if shm.available() else "needs Linux on x86-64 or aarch64"
    nccl = None if torch.cuda.is_available() else "no GPU"
    return {
        "shm": needs,
        "threads": None,
        "gloo": gloo,
        "hosts": needs or gloo,
        "nccl": nccl if dist.is_nccl_available() else without,
        "mpi": None if dist.is_mpi_available() else without,
        "mpi4py": None if not missing("mpi") else "pip install 'gradmesh[mpi]'",
    }


def variables() -> dict[str, str]:
    """The environment variables that gradmesh reads, with their current values."""
    return {v.name: os.environ.get(v.name, f"{v.default} (default)") for v in VARIABLES}

"""The store through which the ranks of a launch find each other: a file without a name, which only they can open.

torch's TCPStore listens on every interface and asks nobody who he is, so that any host and any user could write into
it. A file needs no port. On Linux it is one in memory (`memfd_create`), which the ranks inherit as a descriptor and
which is gone with the last of them; elsewhere it lies in a folder that only this user may enter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradmesh import _torch

__all__ = ["PrivateStore", "join", "join_only"]


class PrivateStore:
    """The launcher's end of it.

    Attributes:
        path: what a rank hands to `join`.
        descriptors: what a rank has to inherit for that.
    """

    def __init__(self) -> None:
        self.descriptors: tuple[int, ...] = ()
        self._folder: str | None = None
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            fd = os.memfd_create("store of ranks", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)
            self.descriptors = (fd,)
            self.path = f"/proc/self/fd/{fd}"
        else:
            self._folder = tempfile.mkdtemp(prefix="gradmesh-")  # with mode 0700
            self.path = os.path.join(self._folder, "store")

    def close(self) -> None:
        """Let go of it; calling it again does nothing."""
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.descriptors = ()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def join(path: str, size: int) -> Any:
    """A rank's end of it."""
    return dist.FileStore(path, size)  # type: ignore[attr-defined]


def join_only(path: str, size: int) -> None:
    """Have this process join every world of its environment through the store, each with keys of its own."""
    store, worlds = join(path, size), itertools.count()
    _torch.join_through(lambda: PrefixStore(f"world {next(worlds)}", store))

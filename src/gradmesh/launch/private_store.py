"""The rendezvous store of a launch: a file that only its ranks can open.

torch's TCPStore listens on every interface without authentication, so that any host and any user could write to it. A
file needs no port. On Linux it is an anonymous file in memory (`memfd_create`), which the ranks inherit as a file
descriptor and which disappears with the last of them; elsewhere it is in a folder that only this user can access.
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
    """The launcher's end of the store.

    Attributes:
        path: the argument of `join` on a rank.
        descriptors: the file descriptors that a rank must inherit.
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
        """Release the file; can be called repeatedly."""
        for fd in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.descriptors = ()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def join(path: str, size: int) -> Any:
    """A rank's end of the store."""
    return dist.FileStore(path, size)  # type: ignore[attr-defined]


def join_only(path: str, size: int) -> None:
    """Use the store for every `init_process_group` from the environment, with separate keys for each world."""
    store, worlds = join(path, size), itertools.count()
    _torch.join_through(lambda: PrefixStore(f"world {next(worlds)}", store))

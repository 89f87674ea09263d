"""The memory file that the ranks of a group share: created by the first rank, verified and mapped by the others.

A rank learns from the store which file to open, and any process that can write to the store could name a different
one. So a rank verifies the file through an `O_PATH` descriptor before it opens it for writing: it must belong to this
user, have no name and have the agreed size. Then it checks for size seals, which only `memfd_create` files have, and
for the token that the first rank wrote.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import weakref
from typing import Any

from gradmesh.backends.shm.buffers import TOKEN

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

__all__ = ["NotSharedError", "create", "opened", "shared"]

_NAME = "gradmesh"
_LINK = f"/memfd:{_NAME} (deleted)"


class NotSharedError(Exception):
    """The file that the store names is not the memory of this group."""


def create(size: int, token: bytes) -> int:
    """Create the file with a sealed size; returns its descriptor."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        os.pwrite(fd, token, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def opened(pid: int, number: int, size: int, token: bytes) -> int:
    """Open the file behind another process's descriptor; returns a descriptor of this process.

    Raises:
        NotSharedError: it is not the memory of a group; it was not opened for writing.
        OSError: the file does not exist, or cannot be opened.
    """
    handle = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    try:
        _look(handle, size)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(handle)
    try:
        _look_inside(fd, token)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _look(handle: int, size: int) -> None:
    about, link = os.fstat(handle), os.readlink(f"/proc/self/fd/{handle}")
    if about.st_uid != os.geteuid():
        raise NotSharedError(f"the file belongs to user {about.st_uid}, not {os.geteuid()}")
    if not stat.S_ISREG(about.st_mode) or about.st_nlink or link != _LINK:
        raise NotSharedError(f"the file is {link!r}, not the memory file {_LINK!r}")
    if stat.S_IMODE(about.st_mode) != 0o600:
        raise NotSharedError(f"the file's mode is {stat.S_IMODE(about.st_mode):o}, not 600")
    if about.st_size != size:
        raise NotSharedError(f"the file has {about.st_size} bytes, not {size}")


def _look_inside(fd: int, token: bytes) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals != _SEALS:
        raise NotSharedError("the file's size is not sealed")
    if os.pread(fd, TOKEN, 0) != token:
        raise NotSharedError(
            "the file's token differs from that of this group; its process id may have been reused"
        )


def shared(fd: int, size: int) -> Any:
    """Map a file. Python's mmap would keep its descriptor open."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_char * size).from_address(address)
    # Views and tensors keep this object alive; unmap when the last one is gone.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


def _c_library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


_libc: Any = _c_library() if sys.platform == "linux" else None

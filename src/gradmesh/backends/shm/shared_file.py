"""The file in memory that the ranks of a group share: made by the first, looked at and mapped by the others.

Which file that is a rank learns from the store, and whoever can write into the store could name any other. So a rank
looks at the file before it opens it for writing, through a descriptor that only stands for it (`O_PATH`): it has to be
this user's own, to have no name, and to be of the size that was agreed. Then it looks for what only a file of
`memfd_create` can have, seals of size, and for the token that the first rank wrote.
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
    """The file that the store names is not the memory of a group; says why."""


def create(size: int, token: bytes) -> int:
    """Make the file, of a size that nobody can change; returns its descriptor."""
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
    """Open the file that another process has under a descriptor of that number; returns this process's descriptor.

    Raises:
        NotSharedError: it is not the memory of a group. Nothing was opened for writing.
        OSError: there is no such file, or it cannot be opened.
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
        raise NotSharedError(f"it belongs to user {about.st_uid}, not {os.geteuid()}")
    if not stat.S_ISREG(about.st_mode) or about.st_nlink or link != _LINK:
        raise NotSharedError(f"it is {link!r}, not a file in memory of the name {_LINK!r}")
    if stat.S_IMODE(about.st_mode) != 0o600:
        raise NotSharedError(f"its mode is {stat.S_IMODE(about.st_mode):o}, not 600")
    if about.st_size != size:
        raise NotSharedError(f"it has {about.st_size} bytes, not {size}")


def _look_inside(fd: int, token: bytes) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals != _SEALS:
        raise NotSharedError("its size is not sealed")
    if os.pread(fd, TOKEN, 0) != token:
        raise NotSharedError(
            "its first bytes are not those of this group; another process may have its number now"
        )


def shared(fd: int, size: int) -> Any:
    """Map a file. Python's own mmap would keep a descriptor of it open."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_char * size).from_address(address)
    # Views and tensors of it keep this object, so that its end is theirs.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


def _c_library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


_libc: Any = _c_library() if sys.platform == "linux" else None

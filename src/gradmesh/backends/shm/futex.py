"""Sleeping on a word of shared memory until another process wakes the sleepers, and the order of loads and stores.

Python has neither, so the first is the system call `futex` of Linux, through ctypes. Waking always calls the kernel,
although nobody may sleep: to know that, a flag would have to be written by the sleeper and read by the waker, and
without a full memory fence each could miss the other's. The kernel has that fence, and it looks at the word again
before it lets a caller sleep, so that no wake-up is lost.

`fence` orders what a rank writes and reads through the mapping. x86-64 keeps stores in order and loads in order,
which is all that "write the data, then publish" and "see it published, then read the data" need; there it does nothing.
Other processors may reorder both, and there it releases and takes a lock: the release keeps everything before it
before, the acquire keeps everything after it after, and an acquire does not move in front of an earlier release (C11's
release and acquire on one object, which `ldar` and `stlr` of aarch64 are).
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Callable

__all__ = ["fence", "supported", "wait", "wake"]

_CALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_WAIT, _WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF
_NUMBER = _CALL_NUMBERS.get(platform.machine(), -1)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> Callable[..., int]:
    call = ctypes.CDLL(None).syscall  # CDLL lets other threads run meanwhile
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_long,
    ]
    call.restype = ctypes.c_long
    return call


_syscall: Callable[..., int] = _system_call() if sys.platform == "linux" else lambda *_: -1


def supported() -> bool:
    """Whether this system has it: Linux on a little-endian processor of 64 bits whose call number is known here."""
    return sys.platform == "linux" and _NUMBER > 0 and sys.byteorder == "little"


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until the word is woken; returns at once if its value is no longer `seen`, and may return for nothing.

    Args:
        address: of a word of 4 bytes.
        seen: the value that it had.
        seconds: to sleep at most.
    """
    whole = int(seconds)
    time = _Timespec(whole, int((seconds - whole) * 1e9))
    _syscall(_NUMBER, address, _WAIT, seen & 0xFFFFFFFF, ctypes.byref(time), None, 0)


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word."""
    _syscall(_NUMBER, address, _WAKE, _EVERYBODY, None, None, 0)


_lock = threading.local()


def _through_a_lock() -> None:
    lock = getattr(_lock, "held", None)
    if lock is None:
        lock = _lock.held = threading.Lock()
        lock.acquire()
    lock.release()
    lock.acquire()


def _nothing() -> None:
    pass


fence: Callable[[], None] = _nothing if platform.machine() == "x86_64" else _through_a_lock
"""Keep what was read and written before it before what comes after it, but for a store and a later load."""

"""Futex (sleep on a word of shared memory until another process wakes the sleepers) and memory fences.

Python has neither. The futex is Linux's system call, through ctypes. Waking always calls the kernel, even without
sleepers: a user-space flag for sleepers would need a full memory fence. The kernel has that fence and checks the word
again before a caller sleeps, so that no wake-up is lost.

`fence` orders reads and writes of the mapping. x86-64 keeps stores in order and loads in order, which is sufficient for
"write the data, then publish" and "see it published, then read the data"; there it does nothing. Other processors may
reorder both; there it releases and acquires a lock (C11 release and acquire on one object: earlier accesses stay before
the release, later ones after the acquire, and the acquire stays after the release).
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
    call = ctypes.CDLL(None).syscall  # CDLL releases the GIL
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
    """Whether this system is supported: Linux on a little-endian 64-bit processor with a known system call number."""
    return sys.platform == "linux" and _NUMBER > 0 and sys.byteorder == "little"


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until the word is woken; returns immediately if its value differs from `seen`; may wake spuriously.

    Args:
        address: the address of a word of 4 bytes.
        seen: its previous value.
        seconds: the maximum time to sleep.
    """
    whole = int(seconds)
    time = _Timespec(whole, int((seconds - whole) * 1e9))
    _syscall(_NUMBER, address, _WAIT, seen & 0xFFFFFFFF, ctypes.byref(time), None, 0)


def wake(address: int) -> None:
    """Wake all sleepers of the word."""
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
"""Orders earlier before later accesses, except an earlier store and a later load."""

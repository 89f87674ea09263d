"""How the ranks of a group find each other (bootstrap), and the memory that they will share.

The first rank makes an anonymous file in memory (`memfd_create`), which only its owner may open, and tells the others
its process and descriptor through the store; they open it under /proc. Once all have mapped it the descriptor is
closed: the file never had a name, so that nothing is left behind however the ranks end.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from gradmesh.backends.shm.buffers import TOKEN, chunk_bytes, segment_bytes
from gradmesh.backends.shm.peers import Peers
from gradmesh.errors import ArgumentError, DeadlockError, message

__all__ = ["meeting", "own_memory"]


def own_memory(chunk: int) -> Any:
    """Memory for a group of one rank, which finds nobody."""
    return mmap.mmap(-1, segment_bytes(1, chunk))


@contextlib.contextmanager
def meeting(store: Any, peers: Peers, timeout: float) -> Iterator[tuple[Any, int]]:
    """Find the other ranks; gives the shared memory and the bytes of a chunk, and watches the others from then on.

    The first rank has to stay inside until all have mapped the memory.

    Args:
        store: where the ranks leave word for each other.
        peers: the group.
        timeout: how many seconds to wait for a rank.

    Raises:
        DeadlockError: a rank did not come in time.
        AbortedError: a rank could not make the group, or has ended.
        ArgumentError: the ranks are not on one host.
    """
    # A store outlives a group, and its name may come back for other ranks or the same: each life of a group of
    # these ranks has keys of its own.
    ranks = ",".join(map(str, peers.names))
    life = f"{ranks}/{store.add(f'{ranks}/lives of {peers.rank}', 1)}"
    token = secrets.token_bytes(TOKEN)
    fd = -1
    try:
        chunk = chunk_bytes()
        if peers.rank == 0:
            fd = create(segment_bytes(peers.size, chunk), token)
        own = {"host": _host(), "pid": os.getpid(), "fd": fd, "token": token.hex(), "chunk": chunk}
    except Exception as error:
        store.set(f"{life}/{peers.rank}", json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    try:
        store.set(f"{life}/{peers.rank}", json.dumps(own))
        everybody = _everybody(store, life, peers, timeout)
        _on_one_host(everybody, peers)
        peers.watch([each["pid"] for each in everybody])
        first = everybody[0]
        size = segment_bytes(peers.size, first["chunk"])
        yield (_shared(fd, size) if peers.rank == 0 else _open(first, size, peers)), first["chunk"]
    except BaseException:
        peers.close()
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _everybody(store: Any, life: str, peers: Peers, timeout: float) -> list[dict[str, Any]]:
    """What all ranks say about themselves."""
    keys = [f"{life}/{rank}" for rank in range(peers.size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError as error:  # torch's DistStoreError is one
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise DeadlockError(
            message(
                f"rank {', '.join(map(str, late))} did not come to make the group within {timeout:g} s",
                axis=f"group '{peers.group}', rank {peers.rank} of {peers.size}",
                expected="every rank of the group makes it",
                remedy="see whether that rank failed earlier, or give a longer timeout",
            )
        ) from error
    everybody = [json.loads(store.get(key)) for key in keys]
    for rank, each in enumerate(everybody):
        if "error" in each:
            raise peers.gone(rank, "it could not make the group", each["error"])
    return everybody


def create(size: int, token: bytes) -> int:
    """Make the file; returns its descriptor."""
    fd = os.memfd_create("gradmesh", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size)
    os.pwrite(fd, token, 0)
    return fd


def _open(first: dict[str, Any], size: int, peers: Peers) -> Any:
    try:
        fd = os.open(f"/proc/{first['pid']}/fd/{first['fd']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise peers.gone(0, f"its memory cannot be opened: {error}") from error
    try:
        if os.pread(fd, TOKEN, 0) != bytes.fromhex(first["token"]):
            raise peers.gone(0, "another process has its number now")
        return _shared(fd, size)
    finally:
        os.close(fd)


def _on_one_host(everybody: Sequence[dict[str, Any]], peers: Peers) -> None:
    hosts = [each["host"] for each in everybody]
    if any(host[1:] != hosts[0][1:] for host in hosts):
        where = "\n".join(f"rank {rank}: {_show(host)}" for rank, host in enumerate(hosts))
        raise ArgumentError(
            message(
                "the shm backend joins ranks of one host, which share its memory",
                axis=f"group '{peers.group}' of {peers.size} ranks",
                expected="ranks on one host, and in one container",
                got=where,
                remedy="use backend='gloo' across hosts, or 'nccl' for CUDA tensors",
            )
        )


def _shared(fd: int, size: int) -> Any:
    """Map a file. Python's own mmap would keep a descriptor of it open."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the group's memory cannot be mapped")
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


def _host() -> list[str]:
    """The host's name, and what tells hosts and containers apart that do not see each other's processes."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return [os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")]


def _show(host: Sequence[str]) -> str:
    return f"{host[0]} (boot {host[1][:8]}, {host[2]})"

"""How the ranks of a group find each other (bootstrap), and the memory that they will share.

The first rank makes an anonymous file in memory (`shared_file`), which only its owner may open, and tells the others
its process and descriptor through the store; they open it under /proc. Once all have mapped it the descriptor is
closed: the file never had a name, so that nothing is left behind however the ranks end.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradmesh.backends.shm.buffers import TOKEN, chunk_bytes, segment_bytes
from gradmesh.backends.shm.peers import Peers
from gradmesh.backends.shm.shared_file import NotSharedError, create, opened, shared
from gradmesh.environment import SHM_CHUNK
from gradmesh.errors import AbortedError, ArgumentError, DeadlockError, NotInitializedError, message

__all__ = ["Met", "meeting", "own_memory"]


@dataclass(frozen=True)
class Met:
    """What the ranks of a group have agreed on.

    Attributes:
        memory: the shared memory.
        chunk: the bytes of a chunk.
        failed: the error of a rank that could not map the memory, in words; empty if it did not say so.
    """

    memory: Any
    chunk: int
    failed: Callable[[int], str]


def own_memory(chunk: int) -> Any:
    """Memory for a group of one rank, which finds nobody."""
    return mmap.mmap(-1, segment_bytes(1, chunk))


@contextlib.contextmanager
def meeting(store: Any, peers: Peers, timeout: float) -> Iterator[Met]:
    """Find the other ranks, and watch them from then on.

    The first rank has to stay inside until all have mapped the memory.

    Args:
        store: where the ranks leave word for each other.
        peers: the group.
        timeout: how many seconds to wait for a rank.

    Raises:
        DeadlockError: a rank did not come in time.
        AbortedError: a rank could not make the group, or has ended, or what the store says of it is not so.
        ArgumentError: the ranks are not on one host.
        NotInitializedError: there is no memory for the group.
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
            with _enough_memory(peers, chunk):
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

        def failed(rank: int) -> str:
            key = f"{life}/{rank}/failed"
            return store.get(key).decode() if store.check([key]) else ""

        try:
            memory = _memory(fd, first, peers)
        except Exception as error:
            store.set(f"{life}/{peers.rank}/failed", f"{type(error).__name__}: {error}")
            raise
        yield Met(memory, first["chunk"], failed)
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
    return [_understood(rank, store.get(key), peers) for rank, key in enumerate(keys)]


def _understood(rank: int, text: bytes, peers: Peers) -> dict[str, Any]:
    """What a rank says about itself, if it is in a form that this library writes."""
    try:
        said = json.loads(text)
        if "error" in said:
            raise peers.gone(rank, "it could not make the group", str(said["error"]))
        host, chunk = said["host"], SHM_CHUNK.parse(str(said["chunk"]))
        form = [type(said["pid"]), type(said["fd"]), len(bytes.fromhex(said["token"])), len(host), chunk]
        if form != [int, int, TOKEN, 3, said["chunk"]] or said["pid"] < 1 or set(map(type, host)) != {str}:
            raise ValueError(said)
    except (KeyError, TypeError, ValueError) as error:
        raise _lie(rank, f"{text[:200]!r} was not written by a rank of this version", peers) from error
    return said  # type: ignore[no-any-return]


@contextlib.contextmanager
def _enough_memory(peers: Peers, chunk: int) -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError) as error:
        raise NotInitializedError(
            message(
                f"there is no memory for the group: {error}",
                axis=f"group '{peers.group}', rank {peers.rank} of {peers.size}",
                expected=f"{segment_bytes(peers.size, chunk) / 2**20:.0f} MiB of shared memory",
                remedy="free memory, raise the limits of this process (`ulimit -a`), set GRADMESH_SHM_CHUNK to less, "
                "or use backend='gloo'",
            )
        ) from error


def _memory(fd: int, first: dict[str, Any], peers: Peers) -> Any:
    size = segment_bytes(peers.size, first["chunk"])
    if peers.rank == 0:
        with _enough_memory(peers, first["chunk"]):
            return shared(fd, size)
    try:
        fd = opened(first["pid"], first["fd"], size, bytes.fromhex(first["token"]))
    except NotSharedError as error:
        raise _lie(0, f"process {first['pid']}, descriptor {first['fd']}: {error}", peers) from error
    except OSError as error:
        raise peers.gone(0, f"its memory cannot be opened: {error}") from error
    try:
        with _enough_memory(peers, first["chunk"]):
            return shared(fd, size)
    finally:
        os.close(fd)


def _lie(rank: int, got: str, peers: Peers) -> AbortedError:
    return AbortedError(
        message(
            f"what the store says of rank {rank} is not so, and its memory is not mapped",
            axis=f"group '{peers.group}', rank {peers.rank} of {peers.size}",
            expected="the process of that rank, and an unnamed file in memory that it made for this group",
            got=got,
            remedy="see who else can write into the store of this job, and whether rank 0 has ended",
        ),
        rank=peers.names[rank],
    )


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


def _host() -> list[str]:
    """The host's name, and what tells hosts and containers apart that do not see each other's processes."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return [os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")]


def _show(host: Sequence[str]) -> str:
    return f"{host[0]} (boot {host[1][:8]}, {host[2]})"

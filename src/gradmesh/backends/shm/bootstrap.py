"""Bootstrap of a group: the ranks rendezvous and map their shared memory.

The first rank creates an anonymous file in memory (`shared_file`), which only its owner may open, and publishes its
process id and file descriptor in the store; the others open it under /proc. The descriptor is closed once all ranks
have mapped the file: it never has a name, so that nothing remains however the ranks end.
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

__all__ = ["Bootstrapped", "meeting", "own_memory"]


@dataclass(frozen=True)
class Bootstrapped:
    """The result of the bootstrap.

    Attributes:
        memory: the shared memory.
        chunk: the bytes of a chunk.
        failed: returns the error of a rank that could not map the memory; "" if it reported none.
    """

    memory: Any
    chunk: int
    failed: Callable[[int], str]


def own_memory(chunk: int) -> Any:
    """Memory for a group of one rank."""
    return mmap.mmap(-1, segment_bytes(1, chunk))


@contextlib.contextmanager
def meeting(store: Any, peers: Peers, timeout: float) -> Iterator[Bootstrapped]:
    """Rendezvous with the other ranks, and start to watch them.

    The first rank must stay inside until all ranks have mapped the memory.

    Args:
        store: the store of the group.
        peers: the group.
        timeout: seconds to wait for a rank.

    Raises:
        DeadlockError: a rank did not arrive in time.
        AbortedError: a rank failed to create the group, has exited, or its entry in the store failed verification.
        ArgumentError: the ranks are on different hosts.
        NotInitializedError: not enough shared memory for the group.
    """
    # A store outlives a group, and a later group of the same ranks may have the same name: number them in the keys.
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
        entries = _entries(store, life, peers, timeout)
        _on_one_host(entries, peers)
        peers.watch([each["pid"] for each in entries])
        first = entries[0]

        def failed(rank: int) -> str:
            key = f"{life}/{rank}/failed"
            return store.get(key).decode() if store.check([key]) else ""

        try:
            memory = _memory(fd, first, peers)
        except Exception as error:
            store.set(f"{life}/{peers.rank}/failed", f"{type(error).__name__}: {error}")
            raise
        yield Bootstrapped(memory, first["chunk"], failed)
    except BaseException:
        peers.close()
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _entries(store: Any, life: str, peers: Peers, timeout: float) -> list[dict[str, Any]]:
    """The entries of all ranks."""
    keys = [f"{life}/{rank}" for rank in range(peers.size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError as error:  # torch's DistStoreError is one
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise DeadlockError(
            message(
                f"rank {', '.join(map(str, late))} did not create the group within {timeout:g} s",
                axis=f"group '{peers.group}', rank {peers.rank} of {peers.size}",
                expected="the same init_process_group or new_group call on every rank of the group",
                remedy="check whether that rank failed earlier, or pass a longer timeout to the call that creates the "
                "group, e.g. timeout=timedelta(minutes=10)",
            )
        ) from error
    return [_parsed(rank, store.get(key), peers) for rank, key in enumerate(keys)]


def _parsed(rank: int, text: bytes, peers: Peers) -> dict[str, Any]:
    """Parse and verify the entry of a rank."""
    try:
        said = json.loads(text)
        if "error" in said:
            raise peers.gone_error(rank, "it could not create the group", str(said["error"]))
        host, chunk = said["host"], SHM_CHUNK.parse(str(said["chunk"]))
        form = [type(said["pid"]), type(said["fd"]), len(bytes.fromhex(said["token"])), len(host), chunk]
        if form != [int, int, TOKEN, 3, said["chunk"]] or said["pid"] < 1 or set(map(type, host)) != {str}:
            raise ValueError(said)
    except (KeyError, TypeError, ValueError) as error:
        raise _verification_error(
            rank, f"{text[:200]!r} was not written by a rank of this version", peers
        ) from error
    return said  # type: ignore[no-any-return]


@contextlib.contextmanager
def _enough_memory(peers: Peers, chunk: int) -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError) as error:
        raise NotInitializedError(
            message(
                f"not enough shared memory for the group: {error}",
                axis=f"group '{peers.group}', rank {peers.rank} of {peers.size}",
                expected=f"{segment_bytes(peers.size, chunk) / 2**20:.0f} MiB of shared memory",
                remedy="free memory, raise the process's limits (see `ulimit -a`), set GRADMESH_SHM_CHUNK=65536, or "
                "use backend='gloo'",
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
        raise _verification_error(
            0, f"process {first['pid']}, descriptor {first['fd']}: {error}", peers
        ) from error
    except OSError as error:
        raise peers.gone_error(0, f"its memory cannot be opened: {error}") from error
    try:
        with _enough_memory(peers, first["chunk"]):
            return shared(fd, size)
    finally:
        os.close(fd)


def _verification_error(rank: int, got: str, peers: Peers) -> AbortedError:
    return AbortedError(
        message(
            f"shared-memory handshake with rank {rank} failed verification",
            axis=f"group '{peers.group}', rank {peers.rank} of {peers.size}",
            expected="the process id of that rank, and the anonymous memory file that it created for this group",
            got=got,
            remedy="check whether rank 0 has exited, and which other processes can write to the store of this job",
        ),
        rank=peers.names[rank],
    )


def _on_one_host(entries: Sequence[dict[str, Any]], peers: Peers) -> None:
    hosts = [each["host"] for each in entries]
    if any(host[1:] != hosts[0][1:] for host in hosts):
        where = "\n".join(f"rank {rank}: {_show(host)}" for rank, host in enumerate(hosts))
        raise ArgumentError(
            message(
                "the shm backend requires all ranks on one host",
                axis=f"group '{peers.group}' of {peers.size} ranks",
                expected="ranks on the same host and in the same container",
                got=where,
                remedy="use backend='gloo' across hosts, or 'nccl' for CUDA tensors",
            )
        )


def _host() -> list[str]:
    """The host's name, boot id and pid namespace, which identify host and container."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return [os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")]


def _show(host: Sequence[str]) -> str:
    return f"{host[0]} (boot {host[1][:8]}, {host[2]})"

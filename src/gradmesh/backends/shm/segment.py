"""The memory that the ranks of one group share: how they find it, what lies where, and who of them is still there.

The first rank makes an anonymous file in memory (`memfd_create`), which only its owner may open, and tells the others
its process and descriptor through the store; they open it under /proc. Once all have mapped it the descriptor is
closed: the file never had a name, so that nothing is left behind however the ranks end.

The size depends on the number of ranks alone, never on a message. Pages that are not touched take no memory.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import mmap
import os
import secrets
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradmesh.backends.shm import futex
from gradmesh.errors import AbortedError, ArgumentError, DeadlockError, GradmeshError, message

__all__ = ["CHUNK_VARIABLE", "Segment", "chunk_bytes", "segment_bytes"]

CHUNK_VARIABLE = "GRADMESH_SHM_CHUNK"
_CHUNK = 1 << 20
_SMALLEST, _LARGEST = 1 << 12, 1 << 26
_PAGE = 4096
_TOKEN = 16
_WORD = 8

OPEN, LEFT, BROKE = 0, 1, 2
"""What a rank says of itself: it takes part, it has left the group, or it gave up and the group with it."""


def chunk_bytes() -> int:
    """How many bytes of a message a rank hands on at once: GRADMESH_SHM_CHUNK in the environment, else 1 MiB."""
    text = os.environ.get(CHUNK_VARIABLE, str(_CHUNK))
    size = int(text) if text.isdecimal() else 0
    if not _SMALLEST <= size <= _LARGEST or size & (size - 1):
        raise ArgumentError(
            message(
                f"{CHUNK_VARIABLE} is not usable",
                expected=f"a power of two between {_SMALLEST} and {_LARGEST}",
                got=f"{CHUNK_VARIABLE}={text!r}",
                remedy="unset it, or give the bytes that a rank hands on at once",
            )
        )
    return size


def _word_count(size: int) -> int:
    # published, mapped, state; heads twice; amounts twice; written and read for every pair of ranks.
    return 3 * size + 2 * size + 4 * size * size + 2 * size * size


def segment_bytes(size: int, chunk: int) -> int:
    """The size of the segment of a group: two chunks for each rank, and a ring as long for each pair of ranks.

    Args:
        size: the number of ranks.
        chunk: the bytes of a chunk.

    >>> segment_bytes(2, 1 << 20) // (1 << 20)
    8
    """
    words = _TOKEN + _WORD * _word_count(size)
    return -(-words // _PAGE) * _PAGE + (size + 2) * size * chunk


class Segment:
    """The shared memory of a group, as one of its ranks sees it.

    Every word has one rank that writes it. Words are 8 bytes and aligned, so that a load or a store moves them whole.

    Attributes:
        published: for each rank, the phases that it has published.
        states: for each rank, OPEN, LEFT or BROKE.
        heads: two buffers of one word a rank: what it calls.
        amounts: two buffers of two rows a rank: what it sends to, and takes from, each rank.
        written: for each pair (source, target), the bytes that went into its ring.
        read: for each pair, the bytes that came out.
    """

    def __init__(
        self, store: Any, rank: int, size: int, names: Sequence[int], timeout: float, group: str
    ) -> None:
        self.rank, self.size, self.names, self.group = rank, size, names, group
        self.others = [other for other in range(size) if other != rank]
        self.pids = [os.getpid()] * size
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()
        self._poll_lock = threading.Lock()
        self._foreign = False
        if size == 1:
            self.chunk = chunk_bytes()
            self._map(mmap.mmap(-1, segment_bytes(1, self.chunk)))  # for the rank alone
        else:
            self._meet(store, timeout)

    # -- finding each other

    def _meet(self, store: Any, timeout: float) -> None:
        # A store outlives a group, and its name may come back for other ranks or the same: each life of a group of
        # these ranks has keys of its own.
        ranks = ",".join(map(str, self.names))
        life = f"{ranks}/{store.add(f'{ranks}/lives of {self.rank}', 1)}"
        token = secrets.token_bytes(_TOKEN)
        fd = -1
        try:
            chunk = chunk_bytes()
            if self.rank == 0:
                fd = self._create(segment_bytes(self.size, chunk), token)
            own = {"host": _host(), "pid": os.getpid(), "fd": fd, "token": token.hex(), "chunk": chunk}
        except Exception as error:
            store.set(f"{life}/{self.rank}", json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        try:
            store.set(f"{life}/{self.rank}", json.dumps(own))
            everybody = self._everybody(store, life, timeout)
            self._on_one_host(everybody)
            self.pids = [each["pid"] for each in everybody]
            self._watch()
            first = everybody[0]
            self.chunk = first["chunk"]
            self._map(self._open(first, fd))
            if self.rank == 0:
                self._wait_until_mapped(timeout)
        except BaseException:
            self.close()
            raise
        finally:
            if fd >= 0:
                os.close(fd)

    def _everybody(self, store: Any, life: str, timeout: float) -> list[dict[str, Any]]:
        """What all ranks say about themselves."""
        keys = [f"{life}/{rank}" for rank in range(self.size)]
        try:
            store.wait(keys, datetime.timedelta(seconds=timeout))
        except RuntimeError as error:  # torch's DistStoreError is one
            late = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise DeadlockError(
                message(
                    f"rank {', '.join(map(str, late))} did not come to make the group within {timeout:g} s",
                    axis=f"group '{self.group}', rank {self.rank} of {self.size}",
                    expected="every rank of the group makes it",
                    remedy="see whether that rank failed earlier, or give a longer timeout",
                )
            ) from error
        everybody = [json.loads(store.get(key)) for key in keys]
        for rank, each in enumerate(everybody):
            if "error" in each:
                raise self._gone(rank, "it could not make the group", each["error"])
        return everybody

    def _create(self, size: int, token: bytes) -> int:
        fd = os.memfd_create("gradmesh", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        os.pwrite(fd, token, 0)
        return fd

    def _open(self, first: dict[str, Any], own: int) -> Any:
        size = segment_bytes(self.size, self.chunk)
        if self.rank == 0:
            return _shared(own, size)
        try:
            fd = os.open(f"/proc/{first['pid']}/fd/{first['fd']}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._gone(0, f"its memory cannot be opened: {error}") from error
        try:
            if os.pread(fd, _TOKEN, 0) != bytes.fromhex(first["token"]):
                raise self._gone(0, "another process has its number now")
            return _shared(fd, size)
        finally:
            os.close(fd)

    def _on_one_host(self, everybody: Sequence[dict[str, Any]]) -> None:
        hosts = [each["host"] for each in everybody]
        if any(host[1:] != hosts[0][1:] for host in hosts):
            where = "\n".join(f"rank {rank}: {_show(host)}" for rank, host in enumerate(hosts))
            raise ArgumentError(
                message(
                    "the shm backend joins ranks of one host, which share its memory",
                    axis=f"group '{self.group}' of {self.size} ranks",
                    expected="ranks on one host, and in one container",
                    got=where,
                    remedy="use backend='gloo' across hosts, or 'nccl' for CUDA tensors",
                )
            )

    def _wait_until_mapped(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not all(self._mapped):
            late = [rank for rank, mapped in enumerate(self._mapped) if not mapped]
            if self.dead(late) or time.monotonic() > deadline:
                raise self._gone(late[0], "it has not mapped the group's memory")
            time.sleep(0.0005)

    # -- what lies where

    def _map(self, memory: Any) -> None:
        size, chunk = self.size, self.chunk
        ring = chunk
        raw = memoryview(memory).cast("B")
        words = raw[_TOKEN : _TOKEN + _WORD * _word_count(size)].cast("Q")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + _TOKEN
        at = 0

        def take(count: int) -> memoryview:
            nonlocal at
            at += count
            return words[at - count : at]

        self.published = take(size)
        self._mapped = take(size)
        self.states = take(size)
        self.heads = [take(size) for _ in range(2)]
        self.amounts = [take(2 * size * size) for _ in range(2)]
        self._written_at = self._base + _WORD * at
        self.written = take(size * size)
        self._read_at = self._base + _WORD * at
        self.read = take(size * size)
        with torch.device("cpu"), torch.inference_mode(False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
        first_slot = len(data) - 2 * size * chunk
        first_ring = first_slot - size * size * ring
        self.ring_bytes = ring
        with torch.inference_mode(False):
            self.rings = list(data[first_ring:first_slot].view(size * size, ring).unbind(0))
            self._slots = data[first_slot:]
        self.raw_rings = [
            raw[first_ring + pair * ring : first_ring + (pair + 1) * ring] for pair in range(size * size)
        ]
        self._raw_slots = raw[first_slot:]
        self._views: dict[tuple[torch.dtype, int], tuple[Slots, Slots]] = {}
        self._mapped[self.rank] = 1

    def slots(self, dtype: torch.dtype, count: int) -> tuple[Slots, Slots]:
        """The first `count` elements of every rank's two chunks, as tensors of that dtype."""
        found = self._views.get((dtype, count))
        if found is None:
            if len(self._views) >= 512:
                self._views.clear()
            # A view made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                found = self._view(dtype, count, 0), self._view(dtype, count, 1)
            self._views[dtype, count] = found
        return found

    def raw_slot(self, rank: int, buffer: int) -> memoryview:
        """A rank's chunk as bytes."""
        start = (2 * rank + buffer) * self.chunk
        return self._raw_slots[start : start + self.chunk]

    def _view(self, dtype: torch.dtype, count: int, buffer: int) -> Slots:
        whole = self._slots.view(dtype)
        width = self.chunk // dtype.itemsize
        together = whole.as_strided(
            (self.size, count), (2 * width, 1), whole.storage_offset() + buffer * width
        )
        return Slots(together, list(together.unbind(0)))

    def word(self, rank: int) -> int:
        """The address of what a rank has published."""
        return self._base + _WORD * rank

    def written_word(self, pair: int) -> int:
        """The address of the bytes that went into a ring."""
        return self._written_at + _WORD * pair

    def read_word(self, pair: int) -> int:
        """The address of the bytes that came out of a ring."""
        return self._read_at + _WORD * pair

    # -- who is still there

    def _watch(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank == self.rank:
                continue
            try:
                self._pidfds[rank] = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise self._gone(rank, "its process has ended") from error
            self._poll.register(self._pidfds[rank], select.POLLIN)

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Which of these ranks' processes have ended."""
        with self._poll_lock:  # several threads of a rank may wait, and Python lets only one of them poll
            ended = {fd for fd, _ in self._poll.poll(0)}
            return [rank for rank in ranks if self._pidfds.get(rank) in ended]

    def missing(self, ranks: Sequence[int], call: Callable[[], str]) -> GradmeshError | None:
        """The error for waiting for these ranks in vain, if one of them cannot come any more."""
        dead = self.dead(self.others)
        for rank in dead:
            # Who gave up did so because of somebody: that one is the news.
            if rank in ranks or BROKE in self.states.tolist():
                return self._gone(rank, "its process has ended", call())
        for rank in ranks:
            if self.states[rank] == LEFT:
                return self._gone(rank, "it has left the group", call())
        # One that gave up has left all others out of step, whether it is its turn now or not.
        for rank in self.others:
            if self.states[rank] == BROKE:
                return self._gone(rank, "it gave up on a call of this group", call())
        return None

    def hurt(self, ranks: Sequence[int]) -> bool:
        """Whether a rank has said that it gave up, or one of these that it left."""
        states = self.states.tolist()
        return BROKE in states or any(states[rank] for rank in ranks)

    def _gone(self, rank: int, why: str, call: str | None = None) -> AbortedError:
        return AbortedError(
            message(
                f"rank {self.name(rank)} does not answer: {why}",
                axis=f"group '{self.group}', rank {self.rank} of {self.size}",
                got=call,
                remedy="see the error or the exit of that rank",
            ),
            rank=self.names[rank],
        )

    def name(self, rank: int) -> str:
        """A rank for error texts, with its rank in the world where that is another number, and its process."""
        world = "" if self.names[rank] == rank else f" (global rank {self.names[rank]})"
        return f"{rank}{world}, process {self.pids[rank]},"

    def say(self, state: int) -> None:
        """Say that this rank has left, or given up, and wake whoever waits for it."""
        if self.states[self.rank] == OPEN and not self._foreign:
            self.states[self.rank] = state
            futex.wake(self.word(self.rank))
            for other in range(self.size):
                futex.wake(self.written_word(self.rank * self.size + other))
                futex.wake(self.read_word(other * self.size + self.rank))

    def forget(self) -> None:
        """In a forked child: the place in the group is the parent's, and what is said there is its to say."""
        self._foreign = True
        self._poll_lock = threading.Lock()

    def close(self) -> None:
        """Stop watching the other processes. The memory goes when the last view of it does."""
        with self._poll_lock:
            for fd in self._pidfds.values():
                os.close(fd)
            self._pidfds.clear()
            self._poll = select.poll()


class Slots:
    """Views of one chunk of every rank: all as one tensor (rank, element), and one by one."""

    __slots__ = ("_pieces", "rows", "together")

    def __init__(self, together: torch.Tensor, rows: list[torch.Tensor]) -> None:
        self.together = together
        self.rows = rows
        self._pieces: list[list[torch.Tensor]] | None = None

    def pieces(self, parts: int) -> list[list[torch.Tensor]]:
        """Each rank's chunk in so many equal parts. It is asked for the same number of parts every time."""
        if self._pieces is None:
            with torch.inference_mode(False):
                each = self.together.shape[1] // parts
                self._pieces = [list(row.view(parts, each).unbind(0)) for row in self.rows]
        return self._pieces


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

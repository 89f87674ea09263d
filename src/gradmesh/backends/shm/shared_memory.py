"""The shared-memory segment of a group: its layout, how the ranks create, map and verify it, and how they wait on it.

The segment has, in this order: a token; two lines (of the cache) for each rank, with what it publishes in odd and in
even epochs: the epoch, the hash of its call, and data of at most 48 bytes; other numbers that ranks publish; a ring
buffer for each pair of ranks; two chunks (bounce buffers) for each rank, also for odd and even epochs.
The size depends only on the number of ranks and the chunk size, since messages are split into chunks. Untouched pages
take no memory. `native.c` has the same layout.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import mmap
import os
import platform
import secrets
import select
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradmesh._util.environment import SHM_CHUNK
from gradmesh.backends.own_group import RETURNED_REMEDY
from gradmesh.errors import (
    AbortedError,
    ArgumentError,
    DeadlockError,
    GradmeshError,
    NotInitializedError,
    message,
)

_PAGE = 4096
TOKEN = 16
"""The size of the token at the start, which identifies the file."""
_WORD = 8
_LINE = 64
"""Bytes of a line of the cache: what only one rank writes is on lines of its own."""
_AT = _LINE // _WORD  # words from one line to the next
INLINE = 48
"""Bytes of data that a line has room for."""


def chunk_bytes() -> int:
    """The chunk size in bytes: GRADMESH_SHM_CHUNK in the environment, else 1 MiB."""
    return SHM_CHUNK.read()


def _word_count(size: int) -> int:
    # Two lines for each rank; mapped, state, returned, blamed; two tables of counts; the lines `written` and `read` of
    # each pair.
    return 2 * size * _AT + 4 * size * _AT + 4 * size * size + 2 * size * size * _AT


def segment_bytes(size: int, chunk: int) -> int:
    """The size of a group's segment: two chunks for each rank, and a ring of the same size for each pair of ranks.

    >>> segment_bytes(2, 1 << 20) // (1 << 20)
    8
    """
    words = _LINE + _WORD * _word_count(size)
    return -(-words // _PAGE) * _PAGE + (size + 2) * size * chunk


class Slots(NamedTuple):
    """Views of one chunk of every rank: as one tensor (rank, element), and one per rank."""

    together: torch.Tensor
    rows: list[torch.Tensor]


class Buffers:
    """The shared memory of a group.

    Each word is written by one rank only. Words are 8 bytes and aligned, so that loads and stores are atomic.
    """

    def __init__(self, memory: Any, rank: int, size: int, chunk: int) -> None:
        self.rank, self.size, self.chunk = rank, size, chunk
        raw = memoryview(memory).cast("B")
        words = raw[_LINE : _LINE + _WORD * _word_count(size)].cast("Q")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + _LINE
        at = 0

        def take(count: int) -> memoryview:
            nonlocal at
            at += count
            return words[at - count : at]

        lines = take(2 * size * _AT)
        # For odd and even epochs, of each rank: the epoch that it has published, and the hash of its call.
        self.published = [lines[buffer * _AT :: 2 * _AT] for buffer in range(2)]
        self.hashes = [lines[buffer * _AT + 1 :: 2 * _AT] for buffer in range(2)]
        # One word for each rank.
        self.mapped = take(size * _AT)[::_AT]
        self.states = take(size * _AT)[::_AT]  # OPEN, LEFT, BROKE or FAILED
        self.returned = take(size * _AT)[::_AT]  # the launcher's run from which its function has returned
        self.blamed = take(size * _AT)[::_AT]  # if it aborted, 1 + the rank that caused it, or 0
        # For odd and even epochs, the counts that a rank sends to and receives from each rank.
        counts_at = self._base + _WORD * at
        self.counts = [take(2 * size * size) for _ in range(2)]
        # For each pair (source, target), the bytes written to its ring, and read from it.
        self._written_at = self._base + _WORD * at
        self.written = take(size * size * _AT)[::_AT]
        self._read_at = self._base + _WORD * at
        self.read = take(size * size * _AT)[::_AT]
        with torch.device("cpu"), torch.inference_mode(False):
            data = torch.frombuffer(memory, dtype=torch.uint8)
        first_slot = len(data) - 2 * size * chunk
        first_ring = first_slot - size * size * chunk
        with torch.inference_mode(False):
            self.rings = list(data[first_ring:first_slot].view(size * size, chunk).unbind(0))
            self._data = data
        self._first_slot = first_slot
        self.raw_rings = [
            raw[first_ring + pair * chunk : first_ring + (pair + 1) * chunk] for pair in range(size * size)
        ]
        self._raw_slots = raw[first_slot:]
        self._views: dict[tuple[torch.dtype, int, bool], tuple[Slots, Slots]] = {}
        # What the data path in C needs to know: see `attach` in native.c.
        start = self._base - _LINE
        counts_of_both = counts_at, counts_at + _WORD * 2 * size * size
        self.addresses = (self._base, *counts_of_both, start + first_slot, rank, size, chunk)
        self.mapped[self.rank] = 1

    def slots(self, dtype: torch.dtype, count: int, even: bool) -> tuple[Slots, Slots]:
        """The first `count` elements of every rank's data in even and in odd epochs, as tensors of that dtype.

        Small data is in the lines if every rank has the same count (`even`), else in the chunks.
        """
        found = self._views.get((dtype, count, even))
        if found is None:
            if len(self._views) >= 512:
                self._views.clear()
            # A view created in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                inside = even and count * dtype.itemsize <= INLINE
                found = self._view(dtype, count, 0, inside), self._view(dtype, count, 1, inside)
            self._views[dtype, count, even] = found
        return found

    def raw_slot(self, rank: int, buffer: int) -> memoryview:
        """A rank's chunk of even (0) or odd (1) epochs as bytes."""
        start = (2 * rank + buffer) * self.chunk
        return self._raw_slots[start : start + self.chunk]

    def _view(self, dtype: torch.dtype, count: int, buffer: int, inside: bool) -> Slots:
        first, step = (2 * _LINE - INLINE, _LINE) if inside else (self._first_slot, self.chunk)
        item = dtype.itemsize
        together = self._data.view(dtype).as_strided(
            (self.size, count), (2 * step // item, 1), (first + buffer * step) // item
        )
        return Slots(together, list(together.unbind(0)))

    def word(self, rank: int, epoch: int) -> int:
        """The address of a rank's `published` word for an epoch."""
        return self._base + _LINE * (2 * rank + (epoch & 1))

    def written_word(self, pair: int) -> int:
        """The address of a ring's `written` word."""
        return self._written_at + _LINE * pair

    def read_word(self, pair: int) -> int:
        """The address of a ring's `read` word."""
        return self._read_at + _LINE * pair


if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


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
    """Open the file behind another process's descriptor; NotSharedError, before that, unless it is a group's memory.

    Any process that can write to the store could name a different file there. So a rank verifies it through an `O_PATH`
    descriptor before it opens it for writing: it must belong to this user, have no name and have the agreed size. Then
    it checks for size seals, which only `memfd_create` files have, and for the token that the first rank wrote.
    """
    handle = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    try:
        _look(handle, size)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(handle)
    try:
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
    library = ctypes.CDLL(None, use_errno=True)  # which releases the GIL
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    number, address = ctypes.c_long, ctypes.c_void_p
    library.syscall.argtypes = [number, address, number, number, address, address, number]
    library.syscall.restype = number
    return library


_libc: Any = _c_library() if sys.platform == "linux" else None


class Peers:
    """The ranks of a group; `names` are their global ranks, and `pids` their process ids after the bootstrap.

    A process is watched through its pidfd, which stays valid if the process id is reused.
    """

    def __init__(self, rank: int, size: int, names: Sequence[int], group: str) -> None:
        self.rank, self.size, self.names, self.group = rank, size, names, group
        self.shown = f"group '{group}', rank {rank} of {size}"
        self.others = [other for other in range(size) if other != rank]
        self.pids = [os.getpid()] * size
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()

    def watch(self, pids: Sequence[int]) -> None:
        """Watch these processes; AbortedError if one of them has exited."""
        self.pids = list(pids)
        for rank, pid in enumerate(self.pids):
            if rank == self.rank:
                continue
            try:
                self._pidfds[rank] = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise self.gone_error(rank, "its process has exited") from error
            self._poll.register(self._pidfds[rank], select.POLLIN)

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """The ranks whose processes have exited."""
        with self._lock:  # only one thread at a time may use a poll object
            ended = {fd for fd, _ in self._poll.poll(0)}
            return [rank for rank in ranks if self._pidfds.get(rank) in ended]

    def gone_error(self, rank: int, why: str, call: str | None = None) -> AbortedError:
        """The error for a rank that no longer responds."""
        return AbortedError(
            message(
                f"rank {self.name(rank)} does not respond: {why}",
                axis=self.shown,
                got=call,
                remedy=f"check the error or exit code of that rank; if there is none, {RETURNED_REMEDY}",
            ),
            rank=self.names[rank],
        )

    def returned(self, rank: int, call: str) -> DeadlockError:
        """The error for a rank whose function has returned."""
        return DeadlockError.of(
            f"rank {self.name(rank)} has returned, and the others wait for it",
            axis=self.shown,
            expected="the same call on that rank before its function returns",
            got=call,
            remedy=RETURNED_REMEDY,
        )

    def name(self, rank: int) -> str:
        """A rank for errors, with its global rank if that differs, and its process id."""
        world = "" if self.names[rank] == rank else f" (global rank {self.names[rank]})"
        return f"{rank}{world}, process {self.pids[rank]},"

    def reset_after_fork(self) -> None:
        """Reset after fork: a lock that was held in the parent would never be released."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            for fd in self._pidfds.values():
                os.close(fd)
            self._pidfds.clear()
            self._poll = select.poll()


@dataclass(frozen=True)
class Bootstrapped:
    """The result of the bootstrap; `failed` returns the error of a rank that could not map the memory, or ""."""

    memory: Any
    chunk: int
    failed: Callable[[int], str]


@contextlib.contextmanager
def meeting(store: Any, peers: Peers, timeout: float) -> Iterator[Bootstrapped]:
    """Rendezvous with the other ranks, and start to watch them.

    The first rank creates an anonymous file in memory, which only its owner may open, and publishes its process id and
    file descriptor in the store; the others open it under /proc. It must stay inside until all ranks have mapped the
    file, and then closes it: it never has a name, so that nothing remains however the ranks end.
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
        raise DeadlockError.of(
            f"rank {', '.join(map(str, late))} did not create the group within {timeout:g} s",
            axis=peers.shown,
            expected="the same init_process_group or new_group call on every rank of the group",
            remedy="check whether that rank failed earlier, or pass a longer timeout to the call that creates the "
            "group, e.g. timeout=timedelta(minutes=10)",
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
        raise NotInitializedError.of(
            f"not enough shared memory for the group: {error}",
            axis=peers.shown,
            expected=f"{segment_bytes(peers.size, chunk) / 2**20:.0f} MiB of shared memory",
            remedy="free memory, raise the process's limits (see `ulimit -a`), set GRADMESH_SHM_CHUNK=65536, or "
            "use backend='gloo'",
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
            axis=peers.shown,
            expected="the process id of that rank, and the anonymous memory file that it created for this group",
            got=got,
            remedy="check whether rank 0 has exited, and which other processes can write to the store of this job",
        ),
        rank=peers.names[rank],
    )


def _on_one_host(entries: Sequence[dict[str, Any]], peers: Peers) -> None:
    hosts = [each["host"] for each in entries]
    if any(host[1:] != hosts[0][1:] for host in hosts):
        where = "\n".join(
            f"rank {rank}: {host} (boot {boot[:8]}, {space})"
            for rank, (host, boot, space) in enumerate(hosts)
        )
        raise ArgumentError.of(
            "the shm backend requires all ranks on one host",
            axis=f"group '{peers.group}' of {peers.size} ranks",
            expected="ranks on the same host and in the same container",
            got=where,
            remedy="use backend='gloo' across hosts, or 'nccl' for CUDA tensors",
        )


def _host() -> list[str]:
    """The host's name, boot id and pid namespace, which identify host and container."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return [os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")]


def host_name() -> str:
    """This host among others: a line with its name, and lines that distinguish containers and network namespaces."""
    return "\n".join([*_host(), os.readlink("/proc/self/ns/net")]) if supported() else os.uname().nodename


class Run:
    """The run that this process is in.

    A launched process stays alive after its function has returned, to run the next one. So it writes the number of the
    run that it has returned from into the shared memory of its groups, which ends the wait of other ranks in that run.
    """

    def __init__(self) -> None:
        self.number = 0  # from 1, the same on every rank; 0 without a launcher
        self.over = False  # this rank's function has returned
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()  # one for each group of this process

    @property
    def waits(self) -> int:
        """The number of the current run, or 0 if the function has returned."""
        return 0 if self.over else self.number

    def begin(self, number: int) -> None:
        """Start the run of that number."""
        self.number, self.over = number, False

    def end(self, *, failed: bool) -> None:
        """End the run, so that other ranks stop waiting for this one."""
        self.over = True
        for engine in list(self.engines):
            engine.run_over(failed)


run = Run()


# Python has neither futexes (sleep on a word of shared memory until another process wakes the sleepers) nor memory
# fences. The futex is Linux's system call. Waking always calls the kernel, even without sleepers: a user-space flag for
# sleepers would need a full memory fence. The kernel has that fence and checks the word again before a caller sleeps,
# so that no wake-up is lost.
_CALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_WAIT, _WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF
_NUMBER = _CALL_NUMBERS.get(platform.machine(), -1)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether this system is supported: Linux on a little-endian 64-bit processor with a known system call number."""
    return sys.platform == "linux" and _NUMBER > 0 and sys.byteorder == "little"


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep until a word of 4 bytes is woken; not at all if its value differs from `seen`; may wake spuriously."""
    whole = int(seconds)
    time = _Timespec(whole, int((seconds - whole) * 1e9))
    _libc.syscall(_NUMBER, address, _WAIT, seen & 0xFFFFFFFF, ctypes.byref(time), None, 0)


def wake(address: int) -> None:
    """Wake all sleepers of the word."""
    _libc.syscall(_NUMBER, address, _WAKE, _EVERYBODY, None, None, 0)


_lock = threading.local()


def _through_a_lock() -> None:
    lock = getattr(_lock, "held", None)
    if lock is None:
        lock = _lock.held = threading.Lock()
        lock.acquire()
    lock.release()
    lock.acquire()


fence: Callable[[], None] = (lambda: None) if platform.machine() == "x86_64" else _through_a_lock
"""Orders earlier before later accesses, except an earlier store and a later load.

x86-64 keeps stores in order and loads in order, which is sufficient for "write the data, then publish" and "see it
published, then read the data". Other processors may reorder both; there a lock is released and acquired (C11 release
and acquire on one object: earlier accesses stay before the release, later ones after the acquire, and the acquire stays
after the release).
"""


OPEN, LEFT, BROKE, FAILED = 0, 1, 2, 3
"""The published state of a rank: active, left the group, aborted the group, or its function raised an error."""

_LOOK = 0.05
"""Seconds between two checks of the store for failed ranks."""


class Segment(Buffers):
    """The shared memory of a group on one rank; the others have `timeout` seconds to join."""

    def __init__(
        self, store: Any, rank: int, size: int, names: Sequence[int], timeout: float, group: str
    ) -> None:
        self.peers = Peers(rank, size, names, group)
        self.blame = -1  # the rank that caused the last failed wait
        self._foreign = False
        if size == 1:
            chunk = chunk_bytes()
            super().__init__(mmap.mmap(-1, segment_bytes(1, chunk)), 0, 1, chunk)
            return
        with meeting(store, self.peers, timeout) as boot:
            super().__init__(boot.memory, rank, size, boot.chunk)
            if rank == 0:
                try:
                    self._wait_until_mapped(boot, timeout)
                except BaseException:
                    self.publish_state(BROKE)  # for the ranks that have mapped it
                    raise

    def _wait_until_mapped(self, boot: Bootstrapped, timeout: float) -> None:
        start = looked = time.monotonic()
        while late := [rank for rank, mapped in enumerate(self.mapped.tolist()) if not mapped]:
            now = time.monotonic()
            self.blame = late[0]
            if self.peers.dead(late) or now - start > timeout:
                raise self.peers.gone_error(late[0], "it has not mapped the group's memory")
            if now - looked > _LOOK:
                looked = now
                for rank in late:
                    if why := boot.failed(rank):
                        self.blame = rank
                        raise self.peers.gone_error(rank, "it could not map the group's memory", why)
            time.sleep(0.0005)

    def missing(self, ranks: Sequence[int], call: Callable[[], str]) -> GradmeshError | None:
        """The error if one of these ranks can no longer make the call; else None."""
        states = self.states.tolist()
        states[self.rank] = OPEN
        dead = self.peers.dead(self.peers.others)
        for rank in dead:
            # If a rank aborted, report the rank that caused it.
            if rank in ranks or BROKE in states:
                return self._blame(rank, self.peers.gone_error(rank, "its process has exited", call()))
        # A rank that failed or aborted leaves all others out of sync, whether they wait for it or not.
        if FAILED in states:
            rank = states.index(FAILED)
            return self._blame(rank, self.peers.gone_error(rank, "its function raised an error", call()))
        for rank in ranks:
            if states[rank] == LEFT:
                return self._blame(rank, self.peers.gone_error(rank, "it has left the group", call()))
            if self._returned(rank):
                return self._blame(rank, self.peers.returned(rank, call()))
        if BROKE in states:
            rank = states.index(BROKE)
            cause = self.blamed[rank] - 1
            if cause in (-1, rank, self.rank):
                why = "it aborted a call of this group" + " because this rank timed out" * (
                    cause == self.rank
                )
                return self._blame(rank, self.peers.gone_error(rank, why, call()))
            if self._returned(cause):
                return self._blame(cause, self.peers.returned(cause, call()))
            why = f"rank {self.peers.name(rank)} timed out waiting for it"
            return self._blame(cause, self.peers.gone_error(cause, why, call()))
        return None

    def _blame(self, rank: int, error: GradmeshError) -> GradmeshError:
        self.blame = rank
        fence()  # the caller checks for arrival again, since the rank may have published before it left
        return error

    def _returned(self, rank: int) -> bool:
        return 0 < run.waits <= self.returned[rank]

    def away(self, rank: int) -> bool:
        """Whether a rank has left, failed, aborted or returned."""
        return bool(self.states[rank]) or self._returned(rank)

    def has_failures(self, ranks: Sequence[int]) -> bool:
        """Whether any rank has failed or aborted, or one of the given ranks is away."""
        states = self.states.tolist()
        return BROKE in states or FAILED in states or any(map(self.away, ranks))

    def publish_state(self, state: int) -> None:
        """Publish that this rank has left, failed or aborted, and wake its waiters."""
        if self.states[self.rank] == OPEN and not self._foreign:
            self.blamed[self.rank] = 1 + self.blame
            fence()
            self.states[self.rank] = state
            self._wake()

    def publish_returned(self) -> None:
        """Publish that this rank's function has returned without pending calls, and wake its waiters."""
        if not self._foreign:
            fence()
            self.returned[self.rank] = run.number
            self._wake()

    def _wake(self) -> None:
        wake(self.word(self.rank, 0))
        wake(self.word(self.rank, 1))
        for other in range(self.size):
            wake(self.written_word(self.rank * self.size + other))
            wake(self.read_word(other * self.size + self.rank))

    def reset_after_fork(self) -> None:
        """Reset after fork: the child must not write the parent's state."""
        self._foreign = True
        self.peers.reset_after_fork()

    def close(self) -> None:
        """Stop watching the other processes. The memory is released with its last view."""
        self.peers.close()

# mypy: disable-error-code="override"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The `mpi4py` backend of torch.distributed: CPU tensors over MPI, for ranks that `mpirun` or `srun` has started.

torch's wheels come without MPI. This backend calls the MPI library through mpi4py, with the memory of the tensors.
`gradmesh.init()` selects it under an MPI launcher.

MPI moves bytes; sums are taken here, in rank order: the same bits on every rank, for every dtype that torch adds,
bfloat16 and complex included. A small sum is an all-gather and a local sum, a large one is divided among the ranks.

All calls are non-blocking ones, so that a rank that waits notices a timeout. A collective may consist of several MPI
calls, and all ranks have to make these in one order: a group makes one collective after the other. Many MPI libraries
only advance a call while the program is inside of them: a waiting rank polls, and a thread does for calls that no rank
waits for. This requires the thread level MULTIPLE.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from gradmesh._torch import in_plain_mode
from gradmesh._util.call_sites import show_tensors
from gradmesh.backends.own_group import (
    FlatGroup,
    OwnWork,
    Results,
    Shown,
    Steps,
    Tensors,
    apart,
    fold,
    in_mode_of,
    introduced,
    joined,
    mismatched_message,
    operand,
    promised,
    spread,
    timed_out_text,
    timeout_of_group,
)
from gradmesh.errors import AbortedError, ArgumentError, DeadlockError, MissingExtraError

__all__ = ["MpiGroup", "create", "launched", "rendezvous"]

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""What the launchers of MPI set: MPICH and Intel's, srun with PMIx, Open MPI, MVAPICH."""
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_SMALL = 1 << 16
"""Bytes of all operands together up to which a sum is an all-gather and a local sum."""
_POLLS = 200
"""How often a waiting rank polls before it sleeps between polls."""
_BURST = 256
"""How often it polls between two sleeps: a long message moves by some KiB at each poll."""
_SHOWN = 0.5
"""Seconds in which the launcher reads a rank's last output: what it has not read, `MPI_Abort` drops."""
_PAUSES = (20e-6, 1e-3)
"""Seconds between polls: at first, and at most."""


def launched() -> bool:
    """Whether an MPI launcher has started this process among others, and no other launcher, by the environment.

    An interactive shell under `srun` has these variables too, for a world of one; a launcher inside of it adds its own.
    """
    if not any(name in os.environ for name in _RANKS) or ("RANK" in os.environ and not _stores):
        return False
    sizes = [int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdecimal()]
    return not sizes or max(sizes) > 1


def _mpi() -> Any:
    """The module `mpi4py.MPI`; importing it initializes MPI."""
    try:
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingExtraError.of(
            "this process was started by an MPI launcher, and mpi4py is not installed",
            expected="the package mpi4py, built for the MPI of this system",
            got=str(error),
            remedy="pip install 'gradmesh[mpi]', or start the script with torchrun",
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ArgumentError.of(
            "MPI was initialized for one thread",
            expected="the thread level MPI_THREAD_MULTIPLE",
            got=f"thread level {MPI.Query_thread()} of {MPI.Get_library_version().splitlines()[0]}",
            remedy="let mpi4py initialize MPI (mpi4py.rc.thread_level = 'multiple'), with an MPI that has threads",
        )
    return MPI


_stores: list[Any] = []


def rendezvous(timeout: datetime.timedelta) -> tuple[Any, int, int]:
    """The store of the ranks that MPI has started, this rank and their number; sets the variables that torchrun sets.

    Collective over all ranks of MPI_COMM_WORLD.
    """
    MPI = _mpi()  # noqa: N806
    world = MPI.COMM_WORLD
    _begin(world)
    if not _stores:
        _stores.append(_store(world, world.Split_type(MPI.COMM_TYPE_SHARED), timeout))
    _stores.append(PrefixStore(f"world {len(_stores)}", _stores[0]))
    return _stores[-1], world.rank, world.size


def _store(world: Any, host: Any, timeout: datetime.timedelta) -> Any:
    address = world.bcast("127.0.0.1" if host.size == world.size else socket.gethostname())
    server = None
    if not world.rank:
        # Shared with `init_process_group` from the environment, which begins a server at this port too.
        server = TCPStore(address, 0, world.size, True, timeout, False, multi_tenant=True)
    port = world.bcast(server and server.port)
    store = server or TCPStore(address, port, world.size, False, timeout)
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": host.rank,
        "LOCAL_WORLD_SIZE": host.size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in values.items()})
    return store


def create(options: Any, _backend_options: object) -> MpiGroup:
    """A group; torch.distributed calls this on its members."""
    MPI = _mpi()  # noqa: N806
    world = MPI.COMM_WORLD
    names = list(options.global_ranks_in_group) or list(range(options.group_size))
    if names[options.group_rank] != world.rank or max(names) >= world.size:
        raise ArgumentError.of(
            "the ranks of torch.distributed are not those of MPI",
            expected=f"rank {world.rank} of {world.size}, as in MPI_COMM_WORLD",
            got=f"rank {names[options.group_rank]} of {max(names) + 1}",
            remedy="start the script with mpirun or srun and call gradmesh.init() without setting RANK",
        )
    _begin(world)
    timeout = timeout_of_group(options.timeout)
    introduced(options, "mpi4py", "", timeout)  # MPI would wait without a timeout
    # A communicator of its own, since that of the world is also the program's.
    comm = world.Create_group(world.Get_group().Incl(names))
    return MpiGroup(MPI, comm, options.group_id, timeout)


class _MpiWork(OwnWork):
    """A pending call.

    Args:
        group: of the call.
        steps: its MPI calls.
        result: for the caller.
        shown: describes it.
        failed: the error for one of MPI's, None: that error itself.
    """

    def __init__(
        self,
        group: MpiGroup,
        steps: Steps,
        result: object,
        shown: Callable[[], str],
        failed: Callable[[Any], Exception | None] = lambda _error: None,
    ) -> None:
        super().__init__(result)
        self.group, self.steps, self.shown, self._failed = group, steps, shown, failed
        self.request: Any = None
        self.over = False
        self.sender = -1

    def advance(self, polls: int = 1) -> bool:
        """Make the MPI calls that can be made, and return whether the call is over."""
        try:
            while self.request is None or any(self.request.Test(self.group.status) for _ in range(polls)):
                self.request = in_plain_mode(self._next)
        except StopIteration:
            self.over = True
        except Exception as error:
            self.error, self.over = self._failed(error) or error, True
        return self.over

    def _next(self) -> Any:
        return next(self.steps)

    def end(self, error: BaseException) -> None:
        """The call has failed."""
        self.error, self.over = self.error or error, True

    @override
    def is_over(self) -> bool:
        if not self.over:
            self.group.advance()
        return self.over

    @override
    def finish(self, seconds: float | None) -> None:
        limit = self.group.timeout if seconds is None else seconds
        start, polls, pause = time.monotonic(), 0, _PAUSES[0]
        while not self.over:
            polls += 1
            self.group.advance(1 if polls < _POLLS else _BURST)
            if polls < _POLLS:
                os.sched_yield()
                continue
            time.sleep(pause)
            pause = min(1.2 * pause, _PAUSES[1])
            if time.monotonic() - start > limit:
                self.group.fail(self._late(limit))
        if self.error is not None:
            raise self.error

    def _late(self, limit: float) -> DeadlockError:
        return DeadlockError.of(
            timed_out_text((), limit),
            op=self.shown(),
            axis=self.group.shown(),
            expected="the same call on every rank of the group",
            got="MPI does not tell which rank did not make it",
            remedy="check the other ranks for an exception, an early return or a different collective",
        )

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        return promised(self)

    @override
    def source_rank(self) -> int:
        """The sender of the received message, -1 before that."""
        return self.sender

    _source_rank = source_rank


class _Progress:
    """A thread that polls for the calls that were started and that no caller waits for."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._groups: set[MpiGroup] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False
        atexit.register(self.end)  # before mpi4py's own, which ends MPI

    def watch(self, group: MpiGroup) -> None:
        """Poll for a group until it has no pending call."""
        with self._changed:
            self._groups.add(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradmesh MPI progress", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self) -> None:
        """End the thread; after an uncaught error or a timeout all ranks, as torchrun does: MPI would wait for them."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        # The interpreter sets this where it shows an uncaught error; an excepthook may be inside of another one.
        if (getattr(sys, "last_value", None) is not None or _abandoned) and self._world.size > 1:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # a closed pipe
                    stream.flush()
            time.sleep(_SHOWN)
            self._world.Abort(1)

    def _run(self) -> None:
        pause = _PAUSES[0]
        while True:
            with self._changed:
                if not self._ended and self._changed.wait(pause if self._groups else None):
                    pause = _PAUSES[0]
                if self._ended:
                    return
                groups = list(self._groups)
            for group in groups:
                group.advance(_BURST)
            with self._changed:
                self._groups.difference_update([group for group in groups if not group.pending()])
            pause = min(1.2 * pause, _PAUSES[1])


_progress: _Progress | None = None
_abandoned: list[_MpiWork] = []
"""Calls that failed while MPI may still write into their tensors, whose memory is therefore kept."""


def _begin(world: Any) -> None:
    """Start what the groups of a process share, once."""
    global _progress
    if _progress is None:
        _progress = _Progress(world)


class MpiGroup(FlatGroup):
    """A process group over a communicator; the generators of its calls yield MPI's requests.

    MPI compares no calls: gradmesh's own ops do (`GRADMESH_CHECK`), torch's do not.
    """

    backend = "mpi4py"

    def __init__(self, mpi: Any, comm: Any, name: str, timeout: datetime.timedelta) -> None:
        super().__init__(name, comm.rank, comm.size, timeout)
        self.status = mpi.Status()
        self._mpi, self._comm = mpi, comm
        self._lock = threading.RLock()
        self._queue: deque[_MpiWork] = deque()
        self._sent: list[_MpiWork] = []
        self._failed: BaseException | None = None
        self._number = 0

    def __repr__(self) -> str:
        return f"MpiGroup({self.shown()})"

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    # -- progress

    def advance(self, polls: int = 1) -> None:
        """Make the MPI calls that can be made."""
        with self._lock:
            self._sent = [work for work in self._sent if not work.advance(polls)]
            while self._queue and self._queue[0].advance(polls):
                # After an error, the other ranks' next MPI calls would meet those of this rank's next collective.
                if (error := self._queue.popleft().error) is not None:
                    self.fail(error)

    def pending(self) -> bool:
        """Whether any call is pending."""
        return bool(self._queue or self._sent)

    def fail(self, error: BaseException) -> None:
        """End all pending calls: MPI cannot take a collective back, so that the group is of no more use."""
        with self._lock:
            self._failed = error
            for work in (*self._queue, *self._sent):
                _abandoned.append(work)
                work.end(error)
            self._queue.clear()
            self._sent.clear()

    @override
    def shutdown(self) -> None:
        deadline = time.monotonic() + self.timeout
        while self.pending() and time.monotonic() < deadline:
            time.sleep(_PAUSES[0])
            self.advance()
        if self.pending():
            self.abort()
        if self._failed is None and not self._mpi.Is_finalized():
            self._failed = AbortedError.of("the process group was destroyed", axis=self.shown())
            self._comm.Free()

    @override
    def abort(self) -> None:
        self.fail(DeadlockError.of("the process group was aborted", axis=self.shown()))

    @override
    def _call(self, kind: str, shown: Callable[[], str], *numbers: int) -> None:
        return None

    @override
    def _begin(
        self, shown: Shown, steps: Steps, result: object, outputs: Iterable[Tensor], opts: Any = None
    ) -> OwnWork:
        work = _MpiWork(self, _in_mode(any(map(Tensor.is_inference, outputs)), steps), result, shown)
        with self._lock:
            self._check_alive(shown)
            self._number += 1
            self._queue.append(work)
            self.advance()
        if not work.over:
            shown.started()
            if opts is not None and getattr(opts, "asyncOp", True) and _progress is not None:
                _progress.watch(self)
        return self._collected(work)

    def _check_alive(self, shown: Callable[[], str]) -> None:
        if isinstance(self._failed, AbortedError):
            raise self._failed
        if self._failed is not None:
            raise AbortedError.of(
                "an earlier call on this group failed",
                op=shown(),
                axis=self.shown(),
                got=str(self._failed).splitlines()[0],
                remedy="end the program, or destroy the process group and create another one",
            )

    def _bytes(self, flat: Tensor) -> list[Any]:
        return [
            self._mpi.memory.fromaddress(flat.data_ptr(), flat.numel() * flat.element_size()),
            self._mpi.BYTE,
        ]

    def _several(self, whole: Tensor, flats: Sequence[Tensor]) -> list[Any]:
        """A tensor that has the flat ones one after the other."""
        for flat in flats:
            if flat.dtype != whole.dtype:
                self._fits("list", flat, whole, sizes=False)
        counts = [flat.numel() * flat.element_size() for flat in flats]
        places = [sum(counts[:at]) for at in range(len(counts))]
        return [self._bytes(whole)[0], counts, places, self._mpi.BYTE]

    # -- movements of bytes

    @override
    def _all_gather(self, call: None, out: Tensor, given: Tensor) -> Steps:
        sent = apart(given, out)
        yield self._comm.Iallgather(self._bytes(sent), self._bytes(out))

    @override
    def _all_gather_lists(self, call: None, taken: Sequence[Tensor], given: Tensor) -> Steps:
        whole = joined(taken)
        sent = apart(given, whole)
        yield self._comm.Iallgatherv(self._bytes(sent), self._several(whole, taken))
        spread(whole, taken)

    @override
    def _exchange(self, call: None, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Steps:
        whole = joined(taken)
        sent = apart(joined(given), whole)
        yield self._comm.Ialltoallv(self._several(sent, given), self._several(whole, taken))
        spread(whole, taken)

    @override
    def _broadcast(self, call: None, flat: Tensor, root: int) -> Steps:
        yield self._comm.Ibcast(self._bytes(flat), root)

    @override
    def _reduce_scatter(self, call: None, out: Tensor, given: Sequence[Tensor], op: str) -> Steps:
        rows = torch.empty(self.count, out.numel(), dtype=out.dtype)
        yield from self._exchange(call, rows.unbind(0), given)
        fold(op, rows.unbind(0), out)

    @override
    def _all_reduce(self, call: None, flat: Tensor, op: str) -> Steps:
        count = flat.numel()
        if count * flat.element_size() * self.count <= _SMALL:
            rows = torch.empty(self.count, count, dtype=flat.dtype)
            yield from self._all_gather(call, rows, flat)
            fold(op, rows.unbind(0), flat)
            return
        sizes = [count // self.count + (rank < count % self.count) for rank in range(self.count)]
        parts = flat.split(sizes)
        mine = torch.empty_like(parts[self.place])
        yield from self._reduce_scatter(call, mine, parts, op)
        yield from self._all_gather_lists(call, parts, mine)

    @override
    def _reduce(self, call: None, out: Tensor, given: Tensor, op: str, root: int) -> Steps:
        rows = torch.empty(self.count if self.place == root else 0, given.numel(), dtype=given.dtype)
        yield self._comm.Igather(self._bytes(given), self._bytes(rows) if self.place == root else None, root)
        if self.place == root:
            fold(op, rows.unbind(0), out)

    @override
    def _barrier(self, call: None) -> Steps:
        yield self._comm.Ibarrier()

    # -- point to point

    @override
    def send(self, tensors: Tensors, to: int, tag: int) -> OwnWork:
        flat = operand(tensors[0], self)

        def steps() -> Steps:
            yield self._comm.Isend(self._bytes(flat), to, tag)

        return self._message(
            _MpiWork(self, steps(), tensors, Shown(f"send(to rank {to}, tag {tag})", tensors))
        )

    @override
    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> OwnWork:
        results = Results(self)
        flat = results.flat(tensors[0])
        sender = "any rank" if source is None else f"rank {source}"
        shown = Shown(f"recv(from {sender}, tag {tag})", tensors)

        def steps() -> Steps:
            peer = self._mpi.ANY_SOURCE if source is None else source
            yield self._comm.Irecv(self._bytes(flat), peer, tag)
            work.sender = self.status.Get_source()
            got = self.status.Get_count(self._mpi.BYTE)
            if got != flat.numel() * flat.element_size():
                raise mismatched_message(self.shown(), f"{got} bytes", show_tensors(tensors))
            in_mode_of(tensors, results.copy)

        def failed(error: Any) -> Exception | None:
            if isinstance(error, self._mpi.Exception) and error.Get_error_class() == self._mpi.ERR_TRUNCATE:
                return mismatched_message(self.shown(), "a longer message", show_tensors(tensors))
            return None

        work = _MpiWork(self, steps(), tensors, shown, failed)
        return self._message(work)

    def _message(self, work: _MpiWork) -> OwnWork:
        with self._lock:
            self._check_alive(work.shown)
            if not work.advance():
                self._sent.append(work)
        if not work.over and _progress is not None:
            _progress.watch(self)
        return self._collected(work)


def _in_mode(inference: bool, steps: Steps) -> Steps:
    """The steps in the mode of their outputs, whichever the thread that runs a step is in."""
    step = partial(next, steps, None)
    while True:
        with torch.inference_mode(inference):
            request = step()
        if request is None:
            return
        yield request

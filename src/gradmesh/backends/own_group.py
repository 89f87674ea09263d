"""The interface of gradmesh's process groups, for torch.distributed and for gradmesh's data path.

Base classes of torch's `Work` for pending calls, several works as one, and futures.
torch.distributed returns a work to callers with `async_op=True`. DDP requests its future and waits for that in C++,
where the waiting thread runs no Python; so futures are completed by another thread (see `Promise`).
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from gradmesh import _torch
from gradmesh._torch import compiling, is_fake, never_compiled
from gradmesh._util.caches import BoundedCache
from gradmesh._util.call_sites import Site, call_site, origin, show_site, show_tensors
from gradmesh._util.dtypes import NEVER_COPIED
from gradmesh.errors import (
    AbortedError,
    ArgumentError,
    DeadlockError,
    DTypeError,
    MismatchError,
    ShapeError,
    message,
)

T = TypeVar("T")

FLAGS = (1 << 34) - 1
"""The bits of a call hash that carry flags; only the other bits are compared."""


class CallCheck:
    """The signature of one call on a rank: a digest that differs between mismatched calls, and `FLAGS`."""

    __slots__ = ("_refusal", "_said", "digest", "flags", "peer_flags")

    def __init__(
        self, digest: int, said: Callable[[], str], refusal: Callable[[list[str]], Exception], flags: int = 0
    ) -> None:
        self.digest = digest
        self.flags = flags
        self.peer_flags: Sequence[int] | None = None  # every rank's flags, in rank order, if they differ
        self._said, self._refusal = said, refusal

    def said(self) -> str:
        """The description of the call; needed only on a mismatch."""
        return self._said()

    def refusal(self, words: list[str]) -> Exception:
        """The error, from the descriptions of all ranks, in rank order."""
        return self._refusal(words)


class OwnWork(dist.Work):
    """A pending call of one rank. Subclasses implement waiting and polling."""

    error: BaseException | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        never_compiled(cls)

    def __init__(self, result: object) -> None:
        super().__init__()
        self.given = result
        # requested before the call completed; another thread completes it
        self.future: torch.futures.Future[Any] | None = None

    @abc.abstractmethod
    def finish(self, seconds: float | None) -> None:
        """Wait until the call has completed, or raise its error; None: with the group's timeout."""

    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether the call has completed or failed; advances it without waiting."""

    @override
    def exception(self) -> BaseException | None:
        """The error of the call, or None."""
        return self.error

    def late(self) -> list[int]:
        """The ranks of the group that the call still waits for."""
        return []

    # -- torch's interface

    @override
    def is_completed(self) -> bool:
        """Whether `wait` would return or raise immediately: the call has completed, and so has its future."""
        return self.is_over() and (self.future is None or self.future.done())

    @override
    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until the call and its future have completed; torch passes None or zero for the group's timeout."""
        seconds = timeout.total_seconds() if timeout else 0.0
        try:
            self.finish(seconds if seconds > 0 else None)
        finally:
            if self.future is not None and self.is_over():
                with contextlib.suppress(Exception):  # the same error as that of the call
                    self.future.wait()
        return True

    @override
    def is_success(self) -> bool:
        """Whether the call has completed without an error."""
        return self.is_completed() and self.exception() is None

    @override
    def synchronize(self) -> None:
        """Wait, since there is no device stream."""
        self.wait()

    @override
    def result(self) -> Any:
        """Wait for the call and return its output tensors."""
        self.wait()
        return self.given

    @override
    def get_future(self) -> torch.futures.Future[Any]:
        """Wait for the call and return a completed future with the result."""
        self.wait()
        return completed(self.given)


never_compiled(OwnWork)


class Done(OwnWork):
    """A completed call."""

    @override
    def finish(self, seconds: float | None) -> None:
        """Return immediately."""

    @override
    def is_over(self) -> bool:
        return True


class CoalescedWorks(OwnWork):
    """Several works as one, for calls between `_start_coalescing` and `_end_coalescing`."""

    def __init__(self, works: Sequence[OwnWork]) -> None:
        super().__init__([])
        self._works = works

    @override
    def finish(self, seconds: float | None) -> None:
        for work in self._works:
            work.finish(seconds)

    @override
    def is_over(self) -> bool:
        return all(work.is_over() for work in self._works)

    @override
    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)


def completed(result: object) -> torch.futures.Future[Any]:
    """A completed future."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


class Promise:
    """Creates and completes the future of a pending call.

    The thread that completes a call may be inside other code, and a callback (`future.then`) may wait for further
    calls, as PowerSGD's does. So futures are completed in a pool of threads, as Gloo does.

    An error is raised inside a callback: `Future.set_exception` sets an error that only Python recognizes; C++ would
    treat it as a list of tensors.
    """

    def __init__(self) -> None:
        self._ending: torch.futures.Future[Any] = torch.futures.Future()
        self.future: torch.futures.Future[Any] = self._ending.then(_unfold)

    def keep(self, result: object) -> None:
        """Complete the future with a result."""
        self._complete((result, None))

    def fail(self, error: BaseException) -> None:
        """Complete the future with an error, which torch shows as a RuntimeError with this one's text."""
        self._complete((None, error))

    def _complete(self, ending: tuple[object, BaseException | None]) -> None:
        try:
            _threads.submit(self._ending.set_result, ending)
        except RuntimeError:  # at process exit no threads can be started
            self._ending.set_result(ending)


def promised(work: OwnWork) -> torch.futures.Future[Any]:
    """The future of a work, completed by a thread that waits for the call."""
    if work.future is not None:
        return work.future
    promise = Promise()
    work.future = promise.future

    def wait() -> None:
        try:
            work.finish(None)
        except BaseException as error:
            promise.fail(error)
        else:
            promise.keep(work.given)

    threading.Thread(target=wait, name="gradmesh future", daemon=True).start()
    return promise.future


def _unfold(ended: torch.futures.Future[Any]) -> object:
    result, error = ended.value()
    if error is not None:
        raise error
    return result


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=256, thread_name_prefix="gradmesh callbacks")


_threads = _new_threads()  # starts threads on first use


def _reset_after_fork() -> None:
    """Reset after fork: the threads do not exist in the child."""
    global _threads
    _threads = _new_threads()


with contextlib.suppress(AttributeError):  # systems without fork
    os.register_at_fork(after_in_child=_reset_after_fork)


# mypy: disable-error-code="override,assignment"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.


def _problem(place: int, missing: list[int], timeout: datetime.timedelta, several: bool) -> str:
    if place or not missing:
        return (
            f"Rank {place} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            "from rank 0"
        )
    time = f"{round(timeout.total_seconds() * 1000)} ms"
    ranks = f"Rank{'s' * several} {', '.join(map(str, missing))}"
    return f"Rank 0 timed out in monitoredBarrier after {time}: {ranks} failed to pass monitoredBarrier in {time}"


# ---- the method names of torch.distributed in torch 2.11 to 2.15, delegated to a common set
#
# Up to torch 2.12 these are `_allgather_base` and similar, from 2.13 `all_gather_single` and similar; 2.14 adds others.


Tensors = list[Tensor]


class TorchNames(dist.ProcessGroup):
    """The identity of a group, and the calls that delegate to others; `place` is this rank in it."""

    backend: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        never_compiled(cls)

    def __init__(self, name: str, place: int, count: int, timeout: datetime.timedelta) -> None:
        super().__init__(place, count)  # type: ignore[call-arg]
        self.place = place
        self.count = count
        self.timeout = timeout.total_seconds()
        self._name = name
        self._desc = "undefined"
        self.kept = BoundedCache()  # the group's cache; see `group_cache`
        self.calls: Any = None  # the counter of its calls; see `gradmesh.transport.call_checks.calls_of`

    # -- identity

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the backend."""
        return self.backend

    @override
    def name(self) -> str:
        return self.backend

    def getRank(self) -> int:  # noqa: N802
        """This rank in the group."""
        return self.place

    def getSize(self) -> int:  # noqa: N802
        """The number of ranks."""
        return self.count

    rank, size = getRank, getSize

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name under which torch registers the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name under which torch registers the group."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description of the group, if any."""
        return self._desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @override
    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout = timeout.total_seconds()

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shown(self) -> str:
        """The group and the rank, for errors."""
        return f"group '{self._name}', rank {self.place} of {self.count}"

    # -- torch's interface of a group's backend, which is the group itself

    supports_coalescing = False
    supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        """The backend for tensors on a device; RuntimeError unless it is the CPU."""
        return self if torch.device(device).type == "cpu" else super()._get_backend(device)

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        """The supported devices; empty before torch has registered the group.

        Until then, torch 2.15 would attach its flight recorder to a group with devices, which requires a C++ backend.
        """
        try:
            dist.get_process_group_ranks(self)
        except KeyError:
            return []
        return [torch.device("cpu")]

    # -- delegated calls

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name the missing ones, or with `wait_all_ranks=False` the first of them.

        As with Gloo, the timeout of the group's rank 0 counts, and the others wait for it, up to the group's timeout.
        The errors have Gloo's first line, since programs and torch's tests search for it.
        """
        if timeout is None:
            timeout = datetime.timedelta(seconds=self.timeout)
        work: Any = self.barrier()
        try:
            # A timeout of zero would mean the group's timeout.
            work.wait(max(timeout, datetime.timedelta.resolution) if self.place == 0 else None)
        except (AbortedError, DeadlockError) as error:
            late: list[int] = work.late()
            missing = ", ".join(f"rank {rank}" for rank in late)
            raise type(error)(
                message(
                    _problem(self.place, late if wait_all_ranks else late[:1], timeout, wait_all_ranks),
                    axis=self.shown(),
                    expected="this barrier on every rank of the group",
                    got=f"missing: {missing}\n{error}" if late else str(error),
                    remedy="check the missing ranks for an exception, an early return or a different collective",
                )
            ) from error

    @override
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    @override
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors: `outputs[rank][number]`, where allgather has `outputs[number][rank]`."""
        if [len(of_rank) for of_rank in outputs] != [len(inputs)] * self.count:
            raise ArgumentError.of(
                "all_gather_coalesced requires one list of outputs per rank",
                axis=self.shown(),
                expected=f"{self.count} lists of {len(inputs)} tensors",
                got=f"lists of lengths {[len(of_rank) for of_rank in outputs]}",
                remedy="pass one list per rank, each with as many output tensors as there are inputs",
            )
        gathered = [list(of_ranks) for of_ranks in zip(*outputs, strict=True)]
        work: dist.Work = self.allgather(gathered, inputs, opts)
        work.given = outputs  # type: ignore[attr-defined]  # what `result()` and the future give
        return work

    @override
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    @override
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    # -- the names up to torch 2.12

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    @override
    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    @override
    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    @override
    def alltoall_base(self, *arguments: Any) -> dist.Work:
        return self.all_to_all_single(*arguments)

    # -- and from 2.14

    def recvAnysource(self, tensors: Tensors, tag: int) -> dist.Work:  # noqa: N802
        """`recv_anysource`."""
        return self.recv_anysource(tensors, tag)

    def start_coalescing(self, device: torch.device) -> None:
        """`_start_coalescing`."""
        self._start_coalescing(device)

    def end_coalescing(self, device: torch.device) -> dist.Work:
        """`_end_coalescing`."""
        return self._end_coalescing(device)


never_compiled(TorchNames)


def group_cache(group: dist.ProcessGroup) -> BoundedCache | None:
    """The cache of a group; None for other backends, and in compiled programs, which cannot access groups."""
    return group.kept if not compiling() and isinstance(group, OwnGroup) else None


class PythonGroup(TorchNames):
    """A process group in Python.

    Subclasses implement torch's calls under the names of torch 2.13 (other names delegate to these): allreduce, reduce,
    reduce_scatter, reduce_scatter_single_coalesced, broadcast, allgather, all_gather_single_coalesced, gather, scatter,
    alltoall, all_to_all_single, barrier, send. Each starts immediately and returns a work. `opts` are torch's options:
    `rootRank`, `reduceOp`, and `asyncOp` (whether the caller waits later). Ranks are group ranks. All ranks must make
    the same calls in the same order. Reductions are in rank order: the same bits on every rank.
    """

    _coalesced: list[OwnWork] | None = None  # the works since `_start_coalescing`

    @abc.abstractmethod
    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> OwnWork:
        """Receive the first message with that tag of a rank, or of any rank (None)."""

    @override
    def recv(self, tensors: Tensors, source: int, tag: int) -> OwnWork:
        return self._receive(tensors, source, tag)

    @override
    def recv_anysource(self, tensors: Tensors, tag: int) -> OwnWork:
        return self._receive(tensors, None, tag)

    @override
    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    @override
    def _end_coalescing(self, device: torch.device) -> OwnWork:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWorks(works)

    def _collected(self, work: OwnWork) -> OwnWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @override
    def shutdown(self) -> None:
        """Leave the group after all pending calls have completed."""

    @override
    def abort(self) -> None:
        """Leave the group immediately."""
        self.shutdown()

    def _root(self, opts: Any) -> int:
        """The root of a call."""
        root: int = opts.rootRank
        if not 0 <= root < self.count:
            raise ArgumentError.of(
                "the root is not a rank of the group",
                axis=self.shown(),
                expected=f"a rank of the group, 0 to {self.count - 1}",
                got=f"{root}",
                remedy="pass a global rank as src or dst, or a rank of the group as group_src or group_dst",
            )
        return root

    # -- splitting tensors

    def _one_per_rank(self, call: str, tensors: Tensors) -> Tensors:
        if len(tensors) != self.count:
            raise ArgumentError.of(
                f"{call} requires one tensor per rank",
                axis=self.shown(),
                expected=f"a list of {self.count} tensors",
                got=f"{len(tensors)} tensors",
                remedy="pass a list with one tensor per rank, e.g. list(x.chunk(dist.get_world_size(group)))",
            )
        return tensors

    def _not_one_piece_per_rank(self, whole: Tensor, piece: Tensor) -> ShapeError:
        return ShapeError.of(
            "the shape of the full tensor does not match the shape of its parts",
            axis=self.shown(),
            expected=f"shape {[self.count * s for s in piece.shape[:1]] + list(piece.shape[1:])}",
            got=f"shape {list(whole.shape)} for parts of shape {list(piece.shape)}",
            remedy=f"allocate the full tensor with {self.count} times the rows of a part",
        )

    def _split_sizes(self, tensor: Tensor, splits: list[int]) -> list[int]:
        """The rows sent to or received from each rank; equal for an empty list."""
        rows = tensor.shape[0] if tensor.dim() else -1
        if not splits and rows >= 0 and rows % self.count == 0:
            splits = [rows // self.count] * self.count
        if len(splits) != self.count or sum(splits) != rows:
            raise ShapeError.of(
                "the split sizes do not add up to the size of dim 0",
                op="all_to_all_single",
                axis=self.shown(),
                expected=f"{self.count} sizes whose sum is {max(rows, 0)}",
                got=f"{splits or 'an equal split'} for shape {list(tensor.shape)}",
                remedy="pass one size per rank, e.g. [4, 3] for 7 rows on 2 ranks",
            )
        return list(splits)

    # -- checking tensors

    def _rows(self, large: Tensor, small: Tensor, whole: Tensor, piece: Tensor) -> Tensor:
        """The flat full tensor as one row per rank, if it matches the flat part."""
        if large.dtype != small.dtype:
            self._fits("output", whole, piece, sizes=False)
        if large.numel() != self.count * small.numel():
            raise self._not_one_piece_per_rank(whole, piece)
        return large.view(self.count, small.numel())

    def _fits(self, what: str, tensor: Tensor, other: Tensor, *, sizes: bool = True) -> None:
        if tensor.dtype != other.dtype or (sizes and tensor.numel() != other.numel()):
            raise ShapeError.of(
                f"the {what} does not match the input",
                axis=self.shown(),
                expected=show_tensors([other]),
                got=show_tensors([tensor]),
                remedy="allocate the output with the input's dtype and number of elements",
            )


Steps = Iterator[Any]
"""A call as a generator: it yields where it has to wait for other ranks; what it yields is the backend's matter."""


class FlatGroup(PythonGroup):
    """A process group that implements torch's collectives by a few movements of flat tensors.

    Subclasses implement the movements, which are generators: what is after a `yield` runs when the other ranks are
    that far. `call` is what `_call` returned, for backends that compare the ranks' calls.
    """

    @abc.abstractmethod
    def _call(self, kind: str, shown: Callable[[], str], *numbers: int) -> Any:
        """A call of this kind, with numbers that are equal on every rank."""

    @abc.abstractmethod
    def _begin(
        self, shown: Shown, steps: Steps, result: object, outputs: Iterable[Tensor], opts: Any = None
    ) -> OwnWork:
        """Start a call, and return its work, which gives `result`."""

    @abc.abstractmethod
    def _all_reduce(self, call: Any, flat: Tensor, op: str) -> Steps:
        """Write the reduction of the ranks' tensors into each of them."""

    @abc.abstractmethod
    def _reduce(self, call: Any, out: Tensor, given: Tensor, op: str, root: int) -> Steps:
        """Write the reduction of the ranks' tensors at the root; `out` may be `given`."""

    @abc.abstractmethod
    def _reduce_scatter(self, call: Any, out: Tensor, given: Sequence[Tensor], op: str) -> Steps:
        """Write the reduction of what every rank gives for this one; all of one size."""

    @abc.abstractmethod
    def _broadcast(self, call: Any, flat: Tensor, root: int) -> Steps:
        """Write the root's tensor into the others'."""

    @abc.abstractmethod
    def _all_gather(self, call: Any, out: Tensor, given: Tensor) -> Steps:
        """Write every rank's tensor, all of one size, into the rows of `out`."""

    @abc.abstractmethod
    def _all_gather_lists(self, call: Any, taken: Sequence[Tensor], given: Tensor) -> Steps:
        """Write every rank's tensor, of any size."""

    @abc.abstractmethod
    def _exchange(self, call: Any, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Steps:
        """Send to each rank its tensor, and receive one from each."""

    @abc.abstractmethod
    def _barrier(self, call: Any) -> Steps:
        """Wait for every rank."""

    # -- reductions

    @override
    def allreduce(self, tensors: Tensors, opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        shown = Shown(f"all_reduce({op.lower()})", tensors)
        calls, after = [], Results(self)
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo and tensor.is_cpu and op == "SUM":
                numbers = len(tensors), DTYPE_NUMBER[tensor.dtype], tensor.sparse_dim(), *tensor.shape
                three = [self._call("sparse_all_reduce", shown, *numbers, part) for part in range(3)]
                calls.append(self._sparse_all_reduce(three, tensor))
                continue
            flat = after.flat(tensor, keep=True)
            reducible(flat, op)
            call = self._call("all_reduce", shown, len(tensors), *facts(flat), REDUCTION_NUMBER[op])
            calls.append(self._all_reduce(call, flat, op))
        return self._begin(shown, after.after(calls), tensors, tensors, opts)

    def _sparse_all_reduce(self, calls: Sequence[Any], tensor: Tensor) -> Steps:
        """Sum sparse COO tensors: gather all counts, indices and values, and let torch add them."""
        own = tensor.detach().coalesce()
        sparse_dim = own.sparse_dim()
        counts = torch.empty(self.count, 1, dtype=torch.int64)
        yield from self._all_gather(calls[0], counts, torch.tensor([own.indices().shape[1]]))
        each = counts.view(-1).tolist()
        indices = [torch.empty(sparse_dim, n, dtype=torch.int64) for n in each]
        values = [own.values().new_empty((n, *own.values().shape[1:])) for n in each]
        for call, taken, given in ((calls[1], indices, own.indices()), (calls[2], values, own.values())):
            yield from self._all_gather_lists(call, [part.view(-1) for part in taken], given.reshape(-1))
        total = torch.sparse_coo_tensor(
            torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=False
        )
        tensor.copy_(total.coalesce())  # without detach(), which would not change the original

    @override
    def reduce(self, tensors: Tensors, opts: Any) -> OwnWork:
        op, root = reduction(opts, self.backend), self._root(opts)
        shown = Shown(f"reduce({op.lower()}, root {root})", tensors)
        after = Results(self)
        flat = after.flat(tensors[0], keep=True)
        reducible(flat, op)
        call = self._call("reduce", shown, *facts(flat), REDUCTION_NUMBER[op], root)
        return self._begin(
            shown, after.after([self._reduce(call, flat, flat, op, root)]), tensors, tensors, opts
        )

    @override
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        shown = Shown(f"reduce_scatter({op.lower()})", inputs[0], outputs)
        calls: list[Steps] = []
        after = Results(self)
        for output, given in zip(outputs, inputs, strict=True):
            out = after.flat(output)
            flats = [operand(tensor, self) for tensor in self._one_per_rank("reduce_scatter", given)]
            reducible(out, op)
            self._fits("output", output, given[self.place])
            sizes = [flat.numel() for flat in flats]
            numbers = len(outputs), DTYPE_NUMBER[out.dtype], REDUCTION_NUMBER[op], *sizes
            if len(set(sizes)) == 1:
                call = self._call("reduce_scatter", shown, *numbers)
                calls.append(self._reduce_scatter(call, out, flats, op))
                continue
            for target, flat in enumerate(flats):
                call = self._call("reduce_scatter", shown, *numbers, target)
                calls.append(self._reduce(call, out, flat, op, target))
        return self._begin(shown, after.after(calls), outputs, outputs, opts)

    @override
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        op = reduction(opts, self.backend)
        shown = Shown(f"reduce_scatter_single({op.lower()})", inputs, outputs)
        calls, after = [], Results(self)
        for output, given in zip(outputs, inputs, strict=True):
            out = after.flat(output)
            rows = self._rows(operand(given, self), out, given, output).unbind(0)
            reducible(out, op)
            numbers = len(outputs), *facts(out), REDUCTION_NUMBER[op]
            call = self._call("reduce_scatter_single", shown, *numbers)
            calls.append(self._reduce_scatter(call, out, rows, op))
        return self._begin(shown, after.after(calls), outputs, outputs, opts)

    # -- exchanges

    @override
    def broadcast(self, tensors: Tensors, opts: Any) -> OwnWork:
        root = self._root(opts)
        shown = Shown(f"broadcast(root {root})", tensors)
        calls, after = [], Results(self)
        for tensor in tensors:
            flat = after.flat(tensor, keep=self.place == root)
            call = self._call("broadcast", shown, len(tensors), *facts(flat), root)
            calls.append(self._broadcast(call, flat, root))
        return self._begin(shown, after.after(calls), tensors, tensors, opts)

    @override
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> OwnWork:
        shown = Shown("all_gather", inputs, outputs[0])
        calls, after = [], Results(self)
        for taken, given in zip(outputs, inputs, strict=True):
            flat = operand(given, self)
            outs = [after.flat(tensor) for tensor in self._one_per_rank("all_gather", taken)]
            self._fits("entry of this rank in the output list", taken[self.place], given)
            numbers = len(inputs), DTYPE_NUMBER[flat.dtype], *(out.numel() for out in outs)
            call = self._call("all_gather", shown, *numbers)
            calls.append(self._all_gather_lists(call, outs, flat))
        return self._begin(shown, after.after(calls), outputs, [t for taken in outputs for t in taken], opts)

    @override
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        shown = Shown("all_gather_single", inputs, outputs)
        calls, after = [], Results(self)
        for output, given in zip(outputs, inputs, strict=True):
            flat = operand(given, self)
            rows = self._rows(after.flat(output), flat, output, given)
            call = self._call("all_gather_single", shown, len(inputs), *facts(flat))
            calls.append(self._all_gather(call, rows, flat))
        return self._begin(shown, after.after(calls), outputs, outputs, opts)

    @override
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> OwnWork:
        root, given = self._root(opts), inputs[0]
        after, flat = Results(self), operand(given, self)
        nothing = flat[:0]
        taken = [nothing] * self.count
        shown = Shown(f"gather(root {root})", inputs, outputs[0] if outputs else [])
        if self.place == root:
            taken = [after.flat(tensor) for tensor in self._one_per_rank("gather", outputs[0])]
            self._fits("entry of this rank in the output list", outputs[0][root], given)
        gives = [flat if rank == root else nothing for rank in range(self.count)]
        call = self._call("gather", shown, DTYPE_NUMBER[flat.dtype], root)
        steps = after.after([self._exchange(call, taken, gives)])
        return self._begin(shown, steps, outputs, outputs[0] if outputs else [], opts)

    @override
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> OwnWork:
        root, output = self._root(opts), outputs[0]
        after = Results(self)
        out = after.flat(output)
        nothing = out[:0]
        gives = [nothing] * self.count
        shown = Shown(f"scatter(root {root})", inputs[0] if inputs else [], outputs)
        if self.place == root:
            gives = [operand(tensor, self) for tensor in self._one_per_rank("scatter", inputs[0])]
            self._fits("output", output, inputs[0][root])
        taken = [out if rank == root else nothing for rank in range(self.count)]
        call = self._call("scatter", shown, DTYPE_NUMBER[out.dtype], root)
        return self._begin(shown, after.after([self._exchange(call, taken, gives)]), outputs, outputs, opts)

    @override
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> OwnWork:
        shown = Shown("all_to_all", inputs, outputs)
        after = Results(self)
        gives = [operand(tensor, self) for tensor in self._one_per_rank("all_to_all", inputs)]
        taken = [after.flat(tensor) for tensor in self._one_per_rank("all_to_all", outputs)]
        self._fits("entry of this rank in the output list", outputs[self.place], inputs[self.place])
        call = self._call("all_to_all", shown, DTYPE_NUMBER[gives[0].dtype])
        return self._begin(shown, after.after([self._exchange(call, taken, gives)]), outputs, outputs, opts)

    @override
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> OwnWork:
        shown = Shown("all_to_all_single", [input], [output])
        after = Results(self)
        given, out = operand(input, self), after.flat(output)
        self._fits("output", output, input, sizes=False)
        gives = given.split(elements(input, self._split_sizes(input, input_splits)))
        taken = out.split(elements(output, self._split_sizes(output, output_splits)))
        self._fits("part of this rank in the output", taken[self.place], gives[self.place])
        call = self._call("all_to_all_single", shown, DTYPE_NUMBER[given.dtype])
        steps = self._exchange(call, taken, gives)
        return self._begin(shown, after.after([steps]), [output], [output], opts)

    @override
    def barrier(self, opts: Any = None) -> OwnWork:
        shown = Shown("barrier", [])
        return self._begin(shown, self._barrier(self._call("barrier", shown)), [], [], opts)


class OwnGroup(PythonGroup):
    """A process group that compares the ranks' calls, and has calls for gradmesh's data path beside torch's.

    If the ranks' calls differ, every rank gets an error.
    """

    # -- for gradmesh
    #
    # These calls block until the result is available. Tensors are flat, dense, on the CPU, detached, without tangents
    # and without lazy conjugation or negation; sizes are consistent on this rank; outputs do not share memory with
    # inputs. Data movement supports every dtype that torch stores, reductions every dtype that torch adds. The ranks
    # first compare the call and their call checks. On a mismatch every rank raises `call_check.refusal` with the
    # descriptions of all ranks, or a MismatchError without a call check; the group remains usable.

    @abc.abstractmethod
    def all_gather_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        """Concatenate every rank's tensor, all of the same size, into `out`."""

    @abc.abstractmethod
    def reduce_scatter_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        """Sum the ranks' tensors in rank order, and write this rank's equal part of the sum."""

    @abc.abstractmethod
    def all_reduce_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        """Write the sum of the ranks' tensors, in rank order: the same bits everywhere."""

    @abc.abstractmethod
    def reduce_flat(self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None) -> None:
        """Write the sum at the root; on other ranks `out` does not change."""

    @abc.abstractmethod
    def broadcast_flat(
        self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        """Write the root's `given` into every rank's `out`, including the root's; other ranks' `given` is not read."""

    @abc.abstractmethod
    def exchange_flat(
        self,
        out: Tensor,
        given: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        call_check: CallCheck | None = None,
    ) -> None:
        """Send `send[r]` elements to each rank r and receive `receive[r]`, in rank order; None: equal parts."""

    @abc.abstractmethod
    def relay_flat(
        self, out: Tensor, given: Tensor, source: int | None, call_check: CallCheck | None = None
    ) -> None:
        """Provide `given`, which may be empty, and receive that of rank `source`; None: receive nothing."""

    @abc.abstractmethod
    def withdraw(self, call_check: CallCheck | None, said: str) -> None:
        """Abort a call on all ranks, because this rank failed before it could make it; `said` is the reason."""


SAME_CALLS = "every rank of a group makes the same calls in the same order"
DIFFERENT_BRANCH = (
    "compare the lines above: a branch (often `if rank == 0`) makes the ranks issue different collectives"
)
RETURNED_REMEDY = (
    "make this call on that rank too: a branch (often `if rank == 0`) skips it; if it is a backward call that the rank "
    "skips because its loss does not use the output, put forward and backward into `with gradmesh.ordered():` and end "
    "the block with gradmesh.backward(loss) on every rank"
)
"""The remedy if a rank has returned while others wait for it."""


def show_call(
    call: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    site: Site,
    origin: Callable[[], str] | None = None,
) -> str:
    """Describe a call on one line: its name, the dtypes and shapes of its tensors, and its call site.

    The backward of a call is described by the forward call (`origin`), which the program contains.
    """
    if origin is not None:
        return f"{origin()}, run {show_site(site)}"
    to = f" -> {show_tensors(outputs)}" if outputs and outputs is not inputs else ""
    return f"{call}  {show_tensors(inputs)}{to}  {show_site(site)}"


class Shown:
    """The description of a call, for errors: its name, tensors and call site."""

    __slots__ = ("_call", "_inputs", "_origin", "_outputs", "_site")

    def __init__(self, call: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        self._call, self._inputs, self._outputs = call, inputs, outputs
        self._site: Site = None
        self._origin = origin()

    def started(self) -> None:
        """Record the call site, because the call may be finished elsewhere."""
        self._site = self._site or call_site()

    def __call__(self) -> str:
        """The description."""
        return show_call(self._call, self._inputs, self._outputs, self._site or call_site(), self._origin)


def timed_out_text(ranks: Iterable[int], seconds: float) -> str:
    """The error text for ranks that timed out."""
    named = ", ".join(map(str, ranks))
    who = f" from rank{'s' * (',' in named)} {named}" if named else ""
    return f"timed out after {seconds:g} s: received nothing{who}"


def refusal(group: str) -> Callable[[list[str]], Exception]:
    """Returns a function that creates the mismatch error from the descriptions of all ranks."""

    def build(words: list[str]) -> Exception:
        return MismatchError.of(
            "the ranks made different calls",
            axis=f"group '{group}'",
            expected="the same call with matching tensors on every rank",
            got="\n".join(f"rank {rank}: {text}" for rank, text in enumerate(words)),
            remedy=DIFFERENT_BRANCH,
        )

    return build


def mismatched_message(group: str, sent: str, asked: str) -> MismatchError:
    """The error of a receive whose tensor does not match the message."""
    return MismatchError.of(
        "the receiver's tensor does not match the message",
        axis=group,
        expected=sent,
        got=asked,
        remedy="use tensors of the same dtype and number of elements on both ranks",
    )


REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""The reductions by torch's names, as functions of two tensors. AVG is divided afterwards, by `averaged`."""


def averaged(total: Tensor, count: int) -> Tensor:
    """Divide a sum by the number of ranks, in place; integers are truncated towards zero."""
    if total.is_floating_point() or total.is_complex():
        return total.div_(count)
    return total.copy_(torch.div(total, count, rounding_mode="trunc"))


REDUCTION_NUMBER = {name: number for number, name in enumerate(REDUCTIONS)}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
"""Every dtype of torch; the index is its number between processes, the same in each of them."""
DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}


def facts(flat: Tensor) -> tuple[int, int]:
    """The properties of a tensor that ranks compare: the number of its dtype, and its size."""
    return DTYPE_NUMBER[flat.dtype], flat.numel()


_names: dict[Any, str] = {}


def reduction(opts: Any, backend: str) -> str:
    """The name of the reduction in a call's options; ArgumentError for one that is not supported."""
    if opts is None:
        return "SUM"
    kind = opts.reduceOp.op
    name = _names.get(kind)
    if name is None:
        name = _names[kind] = kind.name
    if name not in REDUCTIONS:
        raise ArgumentError.of(
            f"reduction not supported by the {backend} backend",
            expected=", ".join(REDUCTIONS),
            got=name,
            remedy="multiply the tensor first and use ReduceOp.SUM" if name == "PREMUL_SUM" else None,
        )
    return name


def timeout_of_group(given: datetime.timedelta) -> datetime.timedelta:
    """The timeout of a new group: that of the world if the caller passed none.

    torch passes its default to every group that is created without a timeout, ignoring the world's.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    seconds = getattr(world, "timeout", None)
    if given == default_pg_timeout and isinstance(seconds, float):
        return datetime.timedelta(seconds=seconds)
    return given


# ---- tensors of torch's interface, as flat ones


class Results:
    """The results of a call as flat tensors, and the copies to make at its end."""

    def __init__(self, group: PythonGroup) -> None:
        self._group = group
        self._copies: list[tuple[Tensor, Tensor]] = []

    def flat(self, tensor: Tensor, *, keep: bool = False) -> Tensor:
        """A result as a flat tensor, with its current values if `keep`; raises unless it is dense and on the CPU."""
        _on_cpu(tensor, self._group)
        # Detached, because autograd may not allow writing to a view.
        plain = tensor.detach()
        if plain.is_contiguous() and not plain.is_neg() and not plain.is_conj():
            return plain if plain.dim() == 1 else plain.view(-1)
        if any(size > 1 and stride == 0 for size, stride in zip(plain.shape, plain.stride(), strict=True)):
            raise ShapeError.of(
                "an output tensor is expanded: several of its elements share memory",
                axis=self._group.shown(),
                expected="a tensor with separate memory for each element",
                got=f"shape {list(plain.shape)} with strides {list(plain.stride())}",
                remedy="pass out.clone()",
            )
        dense = _torch.in_plain_mode(partial(_dense_like, plain, keep))
        self._copies.append((plain, dense))
        return dense.view(-1)

    def after(self, calls: Sequence[Iterator[T]]) -> Iterator[T]:
        """The calls in sequence, then the copies."""
        if len(calls) == 1 and not self._copies:
            return calls[0]
        return itertools.chain(itertools.chain.from_iterable(calls), self._finally())

    def _finally(self) -> Iterator[Any]:
        self.copy()
        yield from ()

    def copy(self) -> None:
        """Copy now."""
        for tensor, dense in self._copies:
            tensor.copy_(dense)


def operand(tensor: Tensor, group: PythonGroup) -> Tensor:
    """An operand as a flat tensor in logical element order, for any memory format."""
    _on_cpu(tensor, group)
    plain = tensor.detach()
    if not plain.is_contiguous() or plain.is_neg() or plain.is_conj():
        plain = _torch.in_plain_mode(partial(_dense_like, plain, True))
    return plain if plain.dim() == 1 else plain.view(-1)


def _dense_like(tensor: Tensor, keep: bool) -> Tensor:
    """A contiguous tensor of the same shape, with the same values if `keep`."""
    # A call may end in another mode, or on another thread.
    with torch.inference_mode(tensor.is_inference()):
        dense = torch.empty(tensor.shape, dtype=tensor.dtype)
        return dense.copy_(tensor) if keep else dense


def _on_cpu(tensor: Tensor, group: PythonGroup) -> None:
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized or is_fake(tensor):
        raise ArgumentError.of(
            f"the {group.backend} backend supports only dense CPU tensors",
            axis=group.shown(),
            expected="a dense CPU tensor with values",
            got=f"a {type(tensor).__name__} on {tensor.device}, {tensor.layout}, {tensor.dtype}",
            remedy="for CUDA tensors create a second group: torch.distributed.new_group(backend='nccl')",
        )
    if tensor.dtype in NEVER_COPIED:
        raise DTypeError.of(
            "unsupported dtype: torch implements no copy kernel for it",
            axis=group.shown(),
            expected="a dtype that torch copies",
            got=str(tensor.dtype),
            remedy="send its bytes, x.view(torch.uint8), and view them back on the other ranks",
        )


_reducible: set[tuple[torch.dtype, str]] = set()


def reducible(flat: Tensor, op: str) -> None:
    """Raise DTypeError, before anything is sent, if torch does not support the reduction for this dtype."""
    if (flat.dtype, op) in _reducible:
        return
    try:
        _torch.in_plain_mode(lambda: REDUCTIONS[op](flat[:0], flat[:0]))
    except RuntimeError as error:
        raise DTypeError.of(
            f"reduction {op} is not implemented for {flat.dtype}",
            expected="a dtype for which torch implements the reduction",
            got=f"{flat.dtype}: {error}",
            remedy="convert the tensor first, e.g. x.float() for SUM or x.int() for BAND, BOR and BXOR",
        ) from error
    _reducible.add((flat.dtype, op))


def in_mode_of(tensors: Sequence[Tensor], work: Callable[[], object]) -> None:
    """Run `work`, which writes to the tensors, in inference mode if they are inference tensors."""
    if tensors[0].is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            work()
    else:
        work()


def elements(tensor: Tensor, rows: Sequence[int]) -> list[int]:
    """The number of elements in the given numbers of rows of dim 0."""
    each = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return [row * each for row in rows]


def fold(op: str, rows: Sequence[Tensor], out: Tensor) -> None:
    """Reduce tensors in order, into `out`, which may be the first or the second of them."""
    function = REDUCTIONS[op]
    if function is torch.add and out.is_complex() and len(rows) > 1:
        # torch multiplies complex numbers by alpha=1 first, which makes an infinite one not a number.
        fold("SUM", [torch.view_as_real(row) for row in rows], torch.view_as_real(out))
    elif len(rows) == 1:
        out.copy_(rows[0])
    else:
        function(rows[0], rows[1], out=out)
        for row in rows[2:]:
            function(out, row, out=out)
    if op == "AVG":
        averaged(out, len(rows))


def joined(flats: Sequence[Tensor]) -> Tensor:
    """Flat tensors one after the other: the memory itself where they lie like that, else a new tensor."""
    parts = [flat for flat in flats if flat.numel()]
    if not parts:
        return flats[0]
    first, at = parts[0], parts[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        if part.storage_offset() != at or part.untyped_storage().data_ptr() != memory:
            return torch.cat(parts)
        at += part.numel()
    return torch.as_strided(first, (at - first.storage_offset(),), (1,))


def apart(given: Tensor, out: Tensor) -> Tensor:
    """A tensor to send, or a copy of it where it shares memory with `out`: backends do not allow that."""
    own, place = given.data_ptr(), out.data_ptr()
    overlap = (
        own < place + out.numel() * out.element_size() and place < own + given.numel() * given.element_size()
    )
    return given.clone() if overlap else given


def spread(whole: Tensor, flats: Sequence[Tensor]) -> None:
    """Write a tensor that may have been made by `joined` back into its parts."""
    at = 0
    for flat in flats:
        part = whole[at : at + flat.numel()]
        at += flat.numel()
        if flat.numel() and part.data_ptr() != flat.data_ptr():
            flat.copy_(part)


def introduced(options: Any, backend: str, own: str, timeout: datetime.timedelta) -> list[str]:
    """What the members of a new group say of themselves, through its store.

    Raises:
        DeadlockError: a member does not create the group.
    """
    keys = [f"{backend} {rank}" for rank in range(options.group_size)]
    options.store.set(keys[options.group_rank], own)
    try:
        options.store.wait(keys, timeout)
    except RuntimeError as error:
        late = [rank for rank, key in enumerate(keys) if not options.store.check([key])]
        raise DeadlockError.of(
            timed_out_text(late, timeout.total_seconds()),
            op="new_group",
            axis=f"group '{options.group_id}', rank {options.group_rank} of {options.group_size}",
            expected="every rank of the group creates it",
            remedy="check the missing ranks for an exception or an early return",
        ) from error
    return [options.store.get(key).decode() for key in keys]


_POLL = 0.02
"""Seconds between two looks for ranks that respond."""


def unresponsive(store: Any, rank: int, size: int, grace: float) -> list[int]:
    """The other ranks of a group that do not respond within seconds of a failure; empty if its store is gone."""
    with contextlib.suppress(Exception):
        store.set(f"lost/{rank}", "1")
        missing = [other for other in range(size) if other != rank]
        deadline = time.monotonic() + grace
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL)
            missing = [other for other in missing if not store.check([f"lost/{other}"])]
        return missing
    return []


def not_responding(
    names: Sequence[int], error: BaseException, axis: str, call: str | None = None, where: str = ""
) -> AbortedError:
    """The error for ranks, by their global numbers, that did not respond after the backend failed.

    `where` is further words on these ranks.
    """
    ranks = ", ".join(map(str, names))
    return AbortedError(
        message(
            f"rank{'s' * (len(names) > 1)} {ranks} did not respond{where}, and the backend failed",
            op=call,
            axis=axis,
            expected="every rank of the axis makes this call",
            got=first_line(error),
            remedy=f"check whether that rank raised, exited or is busy elsewhere; otherwise {RETURNED_REMEDY}",
        ),
        rank=names[0],
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its name."""
    return str(error).partition("\n")[0] or type(error).__name__

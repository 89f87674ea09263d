"""The data path: what a rank copies into shared memory and out of it, for each collective, in each epoch.

The functions are generators that yield to wait for the other ranks, so that a call can be started and finished later.
If a call was opened directly (`DirectCalls`), its first window is already written and published, and they continue from
there. Tensors are flat; those longer than a chunk are sent in windows. Sums are in rank order, so that they are bitwise
identical on every rank.
"""

from __future__ import annotations

import contextlib
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradmesh._torch import dispatch_modes, function_modes
from gradmesh._util.environment import SHM_NATIVE
from gradmesh.backends.own_group import (
    DTYPE_NUMBER,
    FLAGS,
    REDUCTION_NUMBER,
    CallCheck,
    OwnGroup,
    Shown,
    Steps,
    fold,
    reducible,
    refusal,
)
from gradmesh.backends.shm.engine import UNFINISHED, Call, CallWork, Engine, Lockstep
from gradmesh.backends.shm.shared_memory import Segment

try:
    from gradmesh.backends.shm import _native
except ImportError:  # it was built without a C compiler
    _native = None  # type: ignore[assignment]
_LAYOUT = 1
"""That of native.c: a library that was built from another version of it is not used."""

_SHARED_WORK = 1 << 20
"""Bytes of all ranks above which more than two ranks divide the work of a sum, which needs an additional epoch."""


def _windows(total: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `width`; a single empty one if `total` is 0, since every call has an epoch."""
    for start in range(0, total or 1, width):
        yield start, min(start + width, total)


def _width(lockstep: Lockstep, dtype: torch.dtype, parts: int = 1) -> int:
    """The elements of a window."""
    return lockstep.segment.chunk // (dtype.itemsize * parts)


def _cut(flat: Tensor, start: int, end: int) -> Tensor:
    return flat if end - start == flat.numel() else flat[start:end]


def all_gather(call: Call, out: Tensor, given: Tensor) -> Steps:
    """Write the local tensor; read all of them into the rows of `out`."""
    lockstep = call.lockstep
    for start, end in _windows(given.numel(), _width(call.lockstep, given.dtype)):
        slots = call.slots(given.dtype, end - start)
        if not call.opened:
            slots.rows[lockstep.rank].copy_(_cut(given, start, end))
        yield from call.meet()
        (out if end - start == given.numel() else out[:, start:end]).copy_(slots.together)


def all_gather_lists(call: Call, taken: Sequence[Tensor], given: Tensor) -> Steps:
    """The same for separate outputs, whose sizes may differ between ranks."""
    lockstep = call.lockstep
    for start, end in _windows(max(out.numel() for out in taken), _width(call.lockstep, given.dtype)):
        slots = call.slots(given.dtype, end - start)
        mine = given[start:end]
        slots.rows[lockstep.rank][: mine.numel()].copy_(mine)
        yield from call.meet()
        for row, out in zip(slots.rows, taken, strict=True):
            part = out[start:end]
            part.copy_(row[: part.numel()])


def broadcast(call: Call, out: Tensor, given: Tensor, root: int) -> Steps:
    """The root writes `given`; all others read it. `out` and `given` may be the same tensor."""
    rank = call.lockstep.rank
    for start, end in _windows(out.numel(), _width(call.lockstep, out.dtype)):
        slots = call.slots(out.dtype, end - start)
        if rank == root and not call.opened:
            slots.rows[root].copy_(_cut(given, start, end))
        yield from call.meet()
        if rank != root:
            _cut(out, start, end).copy_(slots.rows[root])
        elif out is not given:
            _cut(out, start, end).copy_(_cut(given, start, end))


def reduce(call: Call, out: Tensor, given: Tensor, op: str, root: int) -> Steps:
    """All write; the root reads and reduces into `out`, which may be `given`."""
    lockstep = call.lockstep
    for start, end in _windows(given.numel(), _width(call.lockstep, given.dtype)):
        slots = call.slots(given.dtype, end - start)
        if not call.opened:
            slots.rows[lockstep.rank].copy_(_cut(given, start, end))
        yield from call.meet()
        if lockstep.rank == root:
            fold(op, slots.rows, _cut(out, start, end))


def shares_work(size: int, given: Tensor) -> bool:
    """Whether the ranks divide the work of a sum."""
    return size > 2 and size * given.numel() * given.dtype.itemsize > _SHARED_WORK


def all_reduce(call: Call, out: Tensor, given: Tensor, op: str) -> Steps:
    """All write, then each rank reduces everything, or, for large tensors, one part for all ranks.

    `out` may be `given`.
    """
    lockstep = call.lockstep
    size, rank = lockstep.size, lockstep.rank
    shared = shares_work(size, given)
    for start, end in _windows(given.numel(), _width(call.lockstep, given.dtype)):
        slots = call.slots(given.dtype, end - start)
        if not call.opened:
            slots.rows[rank].copy_(_cut(given, start, end))
        yield from call.meet()
        part = _cut(out, start, end)
        if not shared:
            fold(op, slots.rows, part)
            continue
        share = -(-(end - start) // size)
        results = call.slots(given.dtype, end - start)
        mine = slice(rank * share, (rank + 1) * share)
        fold(op, [row[mine] for row in slots.rows], results.rows[rank][mine])
        yield from call.meet()
        for owner, row in enumerate(results.rows):
            ready = slice(owner * share, (owner + 1) * share)
            part[ready].copy_(row[ready])


def reduce_scatter(call: Call, out: Tensor, given: Sequence[Tensor], op: str) -> Steps:
    """Write the others' pieces; read the pieces for this rank and reduce them."""
    lockstep = call.lockstep
    size, rank = lockstep.size, lockstep.rank
    own = given[rank]
    if rank > 1 and out.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
        own = own.clone()  # it is read after `out` has been written
    others = max(1, size - 1)
    for start, end in _windows(out.numel(), _width(call.lockstep, out.dtype, others)):
        # On each rank the pieces for the others, beginning with the next rank.
        slots = call.slots(out.dtype, others * (end - start))
        pieces = [row.view(others, end - start) for row in slots.rows]
        if not call.opened:
            for step in range(1, size):
                pieces[rank][step - 1].copy_(_cut(given[(rank + step) % size], start, end))
        yield from call.meet()
        rows = [pieces[source][(rank - source - 1) % size % others] for source in range(size)]
        rows[rank] = _cut(own, start, end)
        fold(op, rows, _cut(out, start, end))


def exchange(call: Call, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Steps:
    """Send pieces of any sizes between all ranks.

    In the first epoch each rank publishes its send and receive counts, from which all ranks compute the offsets in each
    source's stream and check that counts match. A source's stream starts with the next rank's piece.
    """
    size, rank = call.lockstep.size, call.lockstep.rank
    stream = [given[(rank + step) % size] for step in range(1, size)]
    dtype = given[rank].dtype
    width = _width(call.lockstep, dtype)
    call.counts([piece.numel() for piece in (*given, *taken)])
    start, windows, offsets = 0, 1, [0] * size
    while windows:
        slots = call.slots(dtype, width, even=False)
        if not call.opened:
            write_stream(slots.rows[rank], stream, start)
        opening = not call.agreed
        yield from call.meet()
        if opening:
            gives, fit = exchanged(call.lockstep)
            if not fit:
                yield from call.refuse()
            offsets = [offset(gives[source], source, rank) for source in range(size)]
            windows = exchange_windows(gives, width)
            taken[rank].copy_(given[rank])
        for source in range(size):
            if source != rank:
                read_stream(slots.rows[source], taken[source], offsets[source] - start)
        start += width
        windows -= 1


def exchanged(lockstep: Lockstep) -> tuple[list[list[int]], bool]:
    """The send counts of all ranks in the current exchange, and whether they match the receive counts."""
    size, row = lockstep.size, 2 * lockstep.size
    table = lockstep.counts().tolist()
    gives = [table[source * row : source * row + size] for source in range(size)]
    takes = [table[target * row + size : (target + 1) * row] for target in range(size)]
    return gives, gives == [list(column) for column in zip(*takes, strict=True)]


def exchange_windows(gives: Sequence[Sequence[int]], width: int) -> int:
    """The number of windows of the longest stream."""
    return max(1, *(-(-(sum(row) - row[rank]) // width) for rank, row in enumerate(gives)))


def relay(call: Call, out: Tensor, given: Tensor, source: int | None) -> Steps:
    """Each rank provides one tensor, which may be empty, and receives that of one rank or none."""
    size, rank = call.lockstep.size, call.lockstep.rank
    width = _width(call.lockstep, given.dtype)
    call.counts([given.numel(), size if source is None else source, out.numel()])
    start, windows = 0, 1
    while windows:
        slots = call.slots(given.dtype, width, even=False)
        if not call.opened:
            write_stream(slots.rows[rank], [given], start)
        opening = not call.agreed
        yield from call.meet()
        if opening:
            most = relayed(call.lockstep)
            if most is None:
                yield from call.refuse()
            else:
                windows = max(1, -(-most // width))
        if source is not None:
            read_stream(slots.rows[source], out, -start)
        start += width
        windows -= 1


def relayed(lockstep: Lockstep) -> int | None:
    """The size of the longest tensor in the current relay; None if sizes do not match."""
    row = 2 * lockstep.size
    table = lockstep.counts().tolist()
    gives = [*table[::row], 0]  # 0 for ranks that receive nothing
    if any(gives[table[at + 1]] != table[at + 2] for at in range(0, len(table), row)):
        return None
    return max(gives)


def offset(gives: Sequence[int], source: int, target: int) -> int:
    """The offset of the target's piece in the source's stream."""
    steps = (target - source) % len(gives)
    return sum(gives[(source + step) % len(gives)] for step in range(1, steps))


def write_stream(row: Tensor, stream: Sequence[Tensor], start: int) -> None:
    """Write the window of a stream that starts at `start`."""
    at = -start
    for piece in stream:
        first, last = max(at, 0), min(at + piece.numel(), row.numel())
        if first < last:
            row[first:last].copy_(piece[first - at : last - at])
        at += piece.numel()


def read_stream(row: Tensor, out: Tensor, at: int) -> None:
    """Read the part of `out` that is in this window; `at` is its offset."""
    first, last = max(at, 0), min(at + out.numel(), row.numel())
    if first < last:
        out[first - at : last - at].copy_(row[first:last])


class Primitive(NamedTuple):
    """One kind of call, with its number in native.c; its root, counts or source is `{}` in `shown`."""

    name: str
    shown: str
    number: int
    steps: Callable[[Call, Tensor, Tensor, Any], Steps]


def _parts(call: Call, flat: Tensor) -> Sequence[Tensor]:
    return flat.view(call.lockstep.size, flat.numel() // call.lockstep.size).unbind(0)


ALL_GATHER = Primitive(
    "all_gather_single",
    "all_gather",
    0,
    lambda call, out, given, _: all_gather(call, out.view(call.lockstep.size, given.numel()), given),
)
ALL_REDUCE = Primitive(
    "all_reduce", "all_reduce(sum)", 1, lambda call, out, given, _: all_reduce(call, out, given, "SUM")
)
REDUCE = Primitive(
    "reduce", "reduce(sum, root {})", 2, lambda call, out, given, root: reduce(call, out, given, "SUM", root)
)
BROADCAST = Primitive("broadcast", "broadcast(root {})", 3, broadcast)
REDUCE_SCATTER = Primitive(
    "reduce_scatter_single",
    "reduce_scatter(sum)",
    4,
    lambda call, out, given, _: reduce_scatter(call, out, _parts(call, given), "SUM"),
)
EXCHANGE_EVEN = Primitive(
    "all_to_all_single",
    "all_to_all",
    5,
    lambda call, out, given, _: exchange(call, _parts(call, out), _parts(call, given)),
)
EXCHANGE = Primitive(
    "all_to_all_single",
    "all_to_all{}",
    6,
    lambda call, out, given, counts: exchange(call, out.split(list(counts[1])), given.split(list(counts[0]))),
)
RELAY = Primitive("relay", "relay(from {})", 7, relay)
BARRIER = Primitive("barrier", "barrier", 8, lambda call, *_: call.meet())


_COMPARED = 0xFFFF_FFFF_FFFF_FFFF & ~FLAGS

_KINDS = (
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "relay",
    "scatter",
    "sparse_all_reduce",
)
_KIND_NUMBER = {name: number for number, name in enumerate(_KINDS)}


def facts_hash(kind: str, facts: tuple[int, ...]) -> int:
    """The hash of numbers that are equal on every rank; it does not depend on the process."""
    return hash((_KIND_NUMBER[kind], *facts))


def call_hash(facts: int, call_check: CallCheck | None) -> int:
    """The hash of a call, of 64 bits, which the ranks publish in its first epoch and compare.

    The lowest bits are not compared: they are the flags of the call check.
    """
    if call_check is None:
        return facts & _COMPARED
    return hash((call_check.digest, facts)) & _COMPARED | call_check.flags


_SUM = REDUCTION_NUMBER["SUM"]

_SUMMED = "float32 complex64, float64 complex128, uint8 int8, int16, int32, int64, bool, half, bfloat16"
_KIND_OF_SUM = {
    getattr(torch, name): kind for kind, names in enumerate(_SUMMED.split(", "), 1) for name in names.split()
}
"""The numbers of the sums in native.c; a complex number is two others."""
_LARGEST_HALF_SUM = 1 << 14
"""Bytes above which torch is faster than C: it has the processor's instructions for halves."""
_SUMS = {ALL_REDUCE.number, REDUCE.number, REDUCE_SCATTER.number}
_FLAGS_DIFFER, _LATE, _NOT_TAKEN = 1, 2, 5
"""Results of native.c, where a lower one is that all is done; and of a call that it does not make."""
_PATIENCE = 50_000_000
"""Nanoseconds that native.c sleeps at most, before it is checked whether the other ranks are alive."""


def is_native() -> bool:
    """Whether the data path in C is there and not turned off."""
    return SHM_NATIVE.value() > 0 and getattr(_native, "LAYOUT", 0) == _LAYOUT


def memory_for_native(segment: Segment) -> object:
    """What native.c needs to know of a group's memory; None where the data path is the one in Python."""
    return _native.attach(*segment.addresses) if is_native() else None


def _flat(tensor: Tensor) -> Tensor:
    """Detached too, because autograd may not allow writing to a tensor that requires a gradient."""
    return tensor.detach().view(-1) if tensor.requires_grad or tensor.dim() != 1 else tensor


class Plan(NamedTuple):
    """What calls of one kind, dtype and size have in common: their hash, and what native.c needs if it makes them."""

    bits: int
    native: tuple[int, int, int] | None  # the number of the call, that of the sum, the bytes of an element
    elements: int  # of a rank's part


class DirectCalls(OwnGroup):
    """The calls of gradmesh's data path, which bypass torch.distributed.

    Usually the group is idle and the data fits into one chunk (the eager limit). Then `native.c` makes the whole call,
    where it is there. Otherwise, if the other ranks do not arrive in time, or if their calls differ, the call goes on
    as its steps, here and in the group's queue. All use the same epochs, chunks and hashes: ranks may take either.
    """

    engine: Engine
    _plans: dict[Any, Plan]
    _memory: object  # of the group, for native.c; None: its steps alone

    @override
    def all_gather_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        self._run(ALL_GATHER, out, given, None, call_check, given.numel())

    @override
    def reduce_scatter_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        self._run(REDUCE_SCATTER, out, given, None, call_check, out.numel())

    @override
    def all_reduce_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        self._run(ALL_REDUCE, out, given, None, call_check, given.numel())

    @override
    def reduce_flat(self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None) -> None:
        self._run(REDUCE, out, given, root, call_check, given.numel())

    @override
    def broadcast_flat(
        self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        self._run(BROADCAST, out, given, root, call_check, out.numel())

    @override
    def exchange_flat(
        self,
        out: Tensor,
        given: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        call_check: CallCheck | None = None,
    ) -> None:
        if send is None or receive is None:
            each = given.numel() // self.count
            self._run(EXCHANGE_EVEN, out, given, None, call_check, each)
        else:
            self._run(EXCHANGE, out, given, (send, receive), call_check, 0, [*send, *receive])

    @override
    def relay_flat(
        self, out: Tensor, given: Tensor, source: int | None, call_check: CallCheck | None = None
    ) -> None:
        if self.count == 1:  # a row of counts would be too short
            if source is not None:
                out.copy_(given)
            return
        self._run(RELAY, out, given, source, call_check, 0, [given.numel(), out.numel()])

    @override
    def withdraw(self, call_check: CallCheck | None, said: str) -> None:
        if self.engine.closed is not None:
            return
        refuse = call_check.refusal if call_check is not None else refusal(self._name)
        call = Call(self.engine.lockstep, secrets.randbits(64), CallCheck(0, lambda: said, refuse))
        work = CallWork(self.engine, call.meet(), [], False, Shown(said, []))
        with contextlib.suppress(Exception):  # the caller raises its own error
            self.engine.post(work)
            work.wait()

    def _plan(self, primitive: Primitive, extra: Any, given: Tensor, count: int) -> Plan:
        dtype, number, sums = given.dtype, primitive.number, primitive.number in _SUMS
        if sums:
            reducible(_flat(given), "SUM")
        facts: tuple[int, ...] = () if number == BARRIER.number else (DTYPE_NUMBER[dtype],)
        if number <= REDUCE_SCATTER.number:
            facts = (1,) * (number != REDUCE.number) + (*facts, count) + (_SUM,) * sums
            facts += (extra,) * (number in (REDUCE.number, BROADCAST.number))
        bits = facts_hash(primitive.name, facts)
        parts = self.count - 1 if number in (REDUCE_SCATTER.number, EXCHANGE_EVEN.number) else 1
        item, kind, size = dtype.itemsize, _KIND_OF_SUM.get(dtype, 0), count * dtype.itemsize
        fits = size * parts <= self.engine.segment.chunk
        fits &= not (number == ALL_REDUCE.number and shares_work(self.count, given))
        fits &= not sums or (kind > 0 and (dtype is not torch.half or size <= _LARGEST_HALF_SUM))
        numbers = 1 + (sums and dtype.is_complex)
        return Plan(bits, (number, kind, item // numbers) if fits else None, count * numbers)

    def _run(
        self,
        primitive: Primitive,
        out: Tensor,
        given: Tensor,
        extra: Any,
        call_check: CallCheck | None,
        count: int,
        sizes: list[int] | None = None,
    ) -> None:
        """Make a call at once if possible; otherwise queue it, or the rest of it.

        `count` are the elements of a rank's part; `sizes` are those that native.c needs instead where parts are uneven.
        """
        key = primitive.number, given.dtype, count, None if sizes else extra
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= 4096:
                self._plans.clear()
            plan = self._plans[key] = self._plan(primitive, extra, given, count)
        bits = call_hash(plan.bits, call_check)
        engine, lockstep, length = self.engine, self.engine.lockstep, given.numel()
        with engine.lock:
            if engine.closed is not None:
                raise engine.closed()
            idle, status = not (engine.queue or dispatch_modes() or function_modes()), _NOT_TAKEN
            if (
                idle
                and plan.native is not None
                and self._memory is not None
                # A tensor of zeros may have no memory.
                and ((own := given.data_ptr()) or not length)
                and ((result := out.data_ptr()) or not out.numel())
                and (sizes is None or self._in_a_chunk(sizes, given, out))
            ):
                table = None if sizes is None else array("Q", sizes)
                lockstep.epoch = epoch = lockstep.epoch + 1
                where = result, own, plan.elements, extra if type(extra) is int else -1
                waiting = epoch, engine.pauses, engine.spins, 0 if len(UNFINISHED) else _PATIENCE
                try:
                    status = _native.run(
                        self._memory,
                        *plan.native,
                        *where,
                        0 if table is None else table.buffer_info()[0],
                        bits,
                        0 if call_check is None else FLAGS,
                        *waiting,
                    )
                except BaseException as error:  # an interrupt, after this rank has published
                    engine.abort_group(error)
                    raise
                if status == _FLAGS_DIFFER:
                    lockstep.agree(bits, call_check)
                if status <= _FLAGS_DIFFER:
                    return
            opened = status != _NOT_TAKEN
            out, given = _flat(out), _flat(given)
            shown = Shown(primitive.shown.format(extra), [given], [out])
            check = call_check or CallCheck(0, shown, refusal(self._name))
            call = Call(lockstep, bits, check, opened=opened)
            steps = primitive.steps(call, out, given, extra)
            inference = out.is_inference()
            if idle and status != _LATE and (torch.is_inference_mode_enabled() or not inference):
                if engine.complete(steps):
                    return
                opened = True
            work = CallWork(engine, steps, None, inference, shown)
            engine.post(work, opened=opened)
        work.wait()

    def _in_a_chunk(self, sizes: Sequence[int], given: Tensor, out: Tensor) -> bool:
        """Whether uneven parts are those of the tensors, and can be in one chunk."""
        send, receive = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        right = (sum(send), sum(receive)) == (given.numel(), out.numel())
        return right and given.nbytes <= self.engine.segment.chunk

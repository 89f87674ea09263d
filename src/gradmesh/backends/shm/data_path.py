"""The data path: what a rank copies into shared memory and out of it, for each collective, in each epoch.

The functions are generators that yield to wait for the other ranks, so that a call can be started and finished later.
If a call was opened directly (`DirectCalls`), its first window is already written and published, and they continue from
there. Tensors are flat; those longer than a chunk are sent in windows. Sums are in rank order, so that they are bitwise
identical on every rank.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradmesh import _torch
from gradmesh.backends.own_group import (
    DTYPE_NUMBER,
    FLAGS,
    REDUCTION_NUMBER,
    CallCheck,
    OwnGroup,
    Shown,
    Steps,
    facts,
    fold,
    reducible,
    refusal,
)
from gradmesh.backends.shm.engine import Call, CallWork, Engine, Lockstep

_SHARED_WORK = 1 << 16
"""Minimum bytes per rank for which more than two ranks divide the work of a sum, which needs an additional epoch."""


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
    return size > 2 and given.numel() * given.dtype.itemsize >= _SHARED_WORK


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
        mine = [row[rank * share : (rank + 1) * share] for row in slots.rows]
        # No other rank reads or writes this part of the local chunk in the first epoch.
        result = torch.empty_like(mine[0]) if rank > 1 else mine[rank]
        fold(op, mine, result)
        if rank > 1:
            mine[rank].copy_(result)
        yield from call.meet()
        for owner, row in enumerate(slots.rows):
            ready = slice(owner * share, (owner + 1) * share)
            part[ready].copy_(row[ready])


def write_pieces(pieces: Sequence[Tensor], given: Sequence[Tensor], rank: int, start: int, end: int) -> None:
    """Write the other ranks' pieces of a window into the local chunk, starting with the next rank."""
    for step, piece in enumerate(pieces, 1):
        piece.copy_(_cut(given[(rank + step) % len(given)], start, end))


def piece_for(pieces: Sequence[Sequence[Tensor]], source: int, target: int) -> Tensor:
    """The view where `write_pieces` on the source wrote the target's piece."""
    return pieces[source][(target - source - 1) % len(pieces)]


def reduce_scatter(call: Call, out: Tensor, given: Sequence[Tensor], op: str) -> Steps:
    """Write the others' pieces; read the pieces for this rank and reduce them."""
    lockstep = call.lockstep
    size, rank = lockstep.size, lockstep.rank
    own = given[rank]
    if rank > 1 and out.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
        own = own.clone()  # it is read after `out` has been written
    others = max(1, size - 1)
    for start, end in _windows(out.numel(), _width(call.lockstep, out.dtype, others)):
        pieces = call.slots(out.dtype, others * (end - start)).pieces(others)
        if size > 1 and not call.opened:
            write_pieces(pieces[rank], given, rank, start, end)
        yield from call.meet()
        rows = [
            _cut(own, start, end) if source == rank else piece_for(pieces, source, rank)
            for source in range(size)
        ]
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
        slots = call.slots(dtype, width)
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
        slots = call.slots(given.dtype, width)
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
    """One kind of call: its implementation for a single window, and in general.

    The functions take the epochs of the group, the output, the input, and the call's additional argument: its root,
    counts or source, which replaces `{}` in `shown`.
    """

    name: str
    shown: str
    elements: Callable[[Lockstep, Tensor, Tensor, Any], int]
    """The elements of a chunk that it needs on this rank; -1 if it needs several windows."""
    write: Callable[[Lockstep, Tensor, Tensor, Any], None]
    read: Callable[[Lockstep, Tensor, Tensor, Any], bool]
    """False if the counts do not match or need several windows."""
    steps: Callable[[Call, Tensor, Tensor, Any], Steps]


def _all_given(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> int:  # noqa: ARG001
    return given.numel()


def _all_out(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> int:  # noqa: ARG001
    return out.numel()


def _write_all(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> None:  # noqa: ARG001
    lockstep.chunks(given.dtype, given.numel()).rows[lockstep.rank].copy_(given)


# -- all_gather


def _read_gathered(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> bool:  # noqa: ARG001
    # One call of torch; a copy would need a view of `out` first.
    torch.cat(lockstep.chunks(given.dtype, given.numel()).rows, out=out)
    return True


def _all_gather(call: Call, out: Tensor, given: Tensor, extra: object) -> Steps:  # noqa: ARG001
    return all_gather(call, out.view(call.lockstep.size, given.numel()), given)


ALL_GATHER = Primitive("all_gather_single", "all_gather", _all_given, _write_all, _read_gathered, _all_gather)


# -- all_reduce and reduce


def _unless_shared(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> int:  # noqa: ARG001
    return -1 if shares_work(lockstep.size, given) else given.numel()


def _read_sum(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> bool:  # noqa: ARG001
    fold("SUM", lockstep.chunks(given.dtype, given.numel()).rows, out)
    return True


def _read_sum_at_root(lockstep: Lockstep, out: Tensor, given: Tensor, root: int) -> bool:
    return lockstep.rank != root or _read_sum(lockstep, out, given, root)


def _all_reduce(call: Call, out: Tensor, given: Tensor, extra: object) -> Steps:  # noqa: ARG001
    return all_reduce(call, out, given, "SUM")


def _reduce(call: Call, out: Tensor, given: Tensor, root: int) -> Steps:
    return reduce(call, out, given, "SUM", root)


ALL_REDUCE = Primitive("all_reduce", "all_reduce(sum)", _unless_shared, _write_all, _read_sum, _all_reduce)
REDUCE = Primitive("reduce", "reduce(sum, root {})", _all_given, _write_all, _read_sum_at_root, _reduce)


# -- reduce_scatter


def _others_parts(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> int:  # noqa: ARG001
    return max(1, lockstep.size - 1) * out.numel()


def _parts(lockstep: Lockstep, flat: Tensor, each: int) -> Sequence[Tensor]:
    return flat.view(lockstep.size, each).unbind(0)


def _write_parts(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> None:  # noqa: ARG001
    size, rank = lockstep.size, lockstep.rank
    if size > 1:
        each = given.numel() // size
        pieces = lockstep.chunks(given.dtype, (size - 1) * each).pieces(size - 1)
        write_pieces(pieces[rank], _parts(lockstep, given, each), rank, 0, each)


def _parts_for_me(lockstep: Lockstep, given: Tensor) -> list[Tensor]:
    """The parts for this rank, in rank order; its own part is not copied."""
    size, rank = lockstep.size, lockstep.rank
    if size == 1:
        return [given]
    each = given.numel() // size
    own = given[rank * each : (rank + 1) * each]
    pieces = lockstep.chunks(given.dtype, (size - 1) * each).pieces(size - 1)
    return [own if source == rank else piece_for(pieces, source, rank) for source in range(size)]


def _read_sum_of_parts(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> bool:  # noqa: ARG001
    fold("SUM", _parts_for_me(lockstep, given), out)
    return True


def _reduce_scatter(call: Call, out: Tensor, given: Tensor, extra: object) -> Steps:  # noqa: ARG001
    return reduce_scatter(call, out, _parts(call.lockstep, given, out.numel()), "SUM")


REDUCE_SCATTER = Primitive(
    "reduce_scatter_single",
    "reduce_scatter(sum)",
    _others_parts,
    _write_parts,
    _read_sum_of_parts,
    _reduce_scatter,
)


# -- broadcast


def _write_at_root(lockstep: Lockstep, out: Tensor, given: Tensor, root: int) -> None:
    if lockstep.rank == root:
        _write_all(lockstep, out, given, root)


def _read_root(lockstep: Lockstep, out: Tensor, given: Tensor, root: int) -> bool:
    out.copy_(given if lockstep.rank == root else lockstep.chunks(out.dtype, out.numel()).rows[root])
    return True


BROADCAST = Primitive("broadcast", "broadcast(root {})", _all_out, _write_at_root, _read_root, broadcast)


# -- exchanges


def _even_elements(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> int:  # noqa: ARG001
    return given.numel() - given.numel() // lockstep.size


@lru_cache(64)
def _even_counts(size: int, each: int) -> tuple[list[int], bytes]:
    """A rank's row of counts for equal parts, and the table of all rows."""
    row = [each] * (2 * size)
    return row, each.to_bytes(8, "little") * (2 * size * size)


def _write_even(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> None:
    counts, _ = _even_counts(lockstep.size, given.numel() // lockstep.size)
    lockstep.publish_counts(lockstep.epoch + 1, counts)
    _write_parts(lockstep, out, given, extra)


def _read_even(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> bool:  # noqa: ARG001
    _, table = _even_counts(lockstep.size, given.numel() // lockstep.size)
    if lockstep.counts().tobytes() != table:
        return False
    torch.cat(_parts_for_me(lockstep, given), out=out)
    return True


def _exchange_even(call: Call, out: Tensor, given: Tensor, extra: object) -> Steps:  # noqa: ARG001
    each = given.numel() // call.lockstep.size
    return exchange(call, _parts(call.lockstep, out, each), _parts(call.lockstep, given, each))


EXCHANGE_EVEN = Primitive(
    "all_to_all_single", "all_to_all", _even_elements, _write_even, _read_even, _exchange_even
)

Counts = tuple[Sequence[int], Sequence[int]]


def _uneven_elements(lockstep: Lockstep, out: Tensor, given: Tensor, counts: Counts) -> int:  # noqa: ARG001
    # Another rank may send more: whether one window is enough is decided when all counts are known.
    mine = given.numel() - counts[0][lockstep.rank]
    width = _width(lockstep, given.dtype)
    return width if mine <= width else -1


def _write_uneven(lockstep: Lockstep, out: Tensor, given: Tensor, counts: Counts) -> None:  # noqa: ARG001
    send, receive = counts
    rank = lockstep.rank
    lockstep.publish_counts(lockstep.epoch + 1, [*send, *receive])
    row = lockstep.chunks(given.dtype, _width(lockstep, given.dtype)).rows[rank]
    # The stream starts with the next rank's piece: first the elements after the local piece, then those before it.
    begin = sum(send[:rank])
    behind = given[begin + send[rank] :]
    count = behind.numel()
    if count:
        row[:count].copy_(behind)
    if begin:
        row[count : count + begin].copy_(given[:begin])


def _read_uneven(lockstep: Lockstep, out: Tensor, given: Tensor, counts: Counts) -> bool:
    send, receive = counts
    rank = lockstep.rank
    width = _width(lockstep, given.dtype)
    gives, fit = exchanged(lockstep)
    if not fit or exchange_windows(gives, width) > 1:
        return False
    rows, pieces = lockstep.chunks(given.dtype, width).rows, []
    for source, count in enumerate(receive):
        if count:
            at = sum(send[:rank]) if source == rank else offset(gives[source], source, rank)
            pieces.append((given if source == rank else rows[source])[at : at + count])
    if pieces:
        torch.cat(pieces, out=out)
    return True


def _exchange(call: Call, out: Tensor, given: Tensor, counts: Counts) -> Steps:
    send, receive = counts
    return exchange(call, out.split(list(receive)), given.split(list(send)))


EXCHANGE = Primitive(
    "all_to_all_single", "all_to_all{}", _uneven_elements, _write_uneven, _read_uneven, _exchange
)


def _write_handed_on(lockstep: Lockstep, out: Tensor, given: Tensor, source: int | None) -> None:
    counts = [given.numel(), lockstep.size if source is None else source, out.numel()]
    lockstep.publish_counts(lockstep.epoch + 1, counts)
    if given.numel():
        _write_all(lockstep, out, given, source)


def _read_handed_on(lockstep: Lockstep, out: Tensor, given: Tensor, source: int | None) -> bool:
    most = relayed(lockstep)
    if most is None or most > _width(lockstep, given.dtype):
        return False
    if source is not None:
        out.copy_(lockstep.chunks(out.dtype, out.numel()).rows[source])
    return True


RELAY = Primitive("relay", "relay(from {})", _all_given, _write_handed_on, _read_handed_on, relay)


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


def call_hash(kind: str, call_check: CallCheck | None, facts: tuple[int, ...]) -> int:
    """The hash of a call, and of numbers that are equal on every rank; hashes of ints do not depend on the process.

    It has 64 bits, which the ranks publish in the call's first epoch and compare, but for the lowest ones: the flags of
    the call check.
    """
    bits = hash((_KIND_NUMBER[kind], *facts))
    if call_check is None:
        return bits & _COMPARED
    return hash((call_check.digest, bits)) & _COMPARED | call_check.flags


_SUM = REDUCTION_NUMBER["SUM"]


class DirectCalls(OwnGroup):
    """The calls of gradmesh's data path, which bypass torch.distributed.

    Usually the group is idle and the data fits into one chunk (the eager limit). Then no objects are created: the rank
    writes its chunk, publishes, polls for the others, and reads. If they do not arrive in time, disagree, or the data
    needs more than a chunk, the call is appended to the group's queue and continues there. Both paths use the same
    epochs, chunks and hashes, so that ranks may take different paths.
    """

    engine: Engine

    @override
    def all_gather_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        self._run(ALL_GATHER, out, given, None, call_check, 1, *facts(given))

    @override
    def reduce_scatter_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        reducible(out, "SUM")
        self._run(REDUCE_SCATTER, out, given, None, call_check, 1, *facts(out), _SUM)

    @override
    def all_reduce_flat(self, out: Tensor, given: Tensor, call_check: CallCheck | None = None) -> None:
        reducible(given, "SUM")
        self._run(ALL_REDUCE, out, given, None, call_check, 1, *facts(given), _SUM)

    @override
    def reduce_flat(self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None) -> None:
        reducible(given, "SUM")
        self._run(REDUCE, out, given, root, call_check, *facts(given), _SUM, root)

    @override
    def broadcast_flat(
        self, out: Tensor, given: Tensor, root: int, call_check: CallCheck | None = None
    ) -> None:
        self._run(BROADCAST, out, given, root, call_check, 1, *facts(out), root)

    @override
    def exchange_flat(
        self,
        out: Tensor,
        given: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        call_check: CallCheck | None = None,
    ) -> None:
        number = DTYPE_NUMBER[given.dtype]
        if send is None or receive is None:
            self._run(EXCHANGE_EVEN, out, given, None, call_check, number)
        else:
            self._run(EXCHANGE, out, given, (send, receive), call_check, number)

    @override
    def relay_flat(
        self, out: Tensor, given: Tensor, source: int | None, call_check: CallCheck | None = None
    ) -> None:
        if self.count == 1:  # a row of counts would be too short
            if source is not None:
                out.copy_(given)
            return
        self._run(RELAY, out, given, source, call_check, DTYPE_NUMBER[given.dtype])

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

    def _run(
        self,
        primitive: Primitive,
        out: Tensor,
        given: Tensor,
        extra: Any,
        call_check: CallCheck | None,
        *numbers: int,
    ) -> None:
        """Run a call immediately if possible; otherwise queue it, or the rest of it."""
        engine, bits = self.engine, call_hash(primitive.name, call_check, numbers)
        lockstep, opened = engine.lockstep, False
        with engine.lock:
            engine.check()
            elements = primitive.elements(lockstep, out, given, extra)
            if (
                0 <= elements * given.dtype.itemsize <= engine.segment.chunk
                and not engine.queue
                and not _torch.modes_active()
            ):
                try:
                    lockstep.uses += 1
                    primitive.write(lockstep, out, given, extra)
                    opened = True
                    if (
                        lockstep.open(bits, engine.spins)
                        and lockstep.agree(bits, call_check)
                        and primitive.read(lockstep, out, given, extra)
                    ):
                        return
                except BaseException as error:
                    engine.abort_group(error)
                    raise
            shown = Shown(primitive.shown.format(extra), [given], [out])
            call = Call(lockstep, bits, call_check or CallCheck(0, shown, refusal(self._name)), opened=opened)
            work = CallWork(engine, primitive.steps(call, out, given, extra), None, out.is_inference(), shown)
            engine.post(work, opened=opened)
        work.wait()

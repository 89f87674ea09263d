"""What each collective does in the phases of a group: the bytes that a rank writes for the others, and reads of them.

The functions are generators, which yield where they have to wait for the other ranks; so a call can be begun, and
finished later. Of a call that was opened directly (`direct.py`) the first window is written and published already; they
go on from there. They take flat tensors. What is longer than a chunk goes in windows. Copies and sums are torch's own;
a sum is taken in rank order, and where every rank takes it, every rank takes it alike, so that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradmesh.backends.reductions import REDUCTIONS, averaged
from gradmesh.backends.shm.phases import Call, Lockstep, Steps

__all__ = [
    "all_gather",
    "all_gather_lists",
    "all_reduce",
    "barrier",
    "broadcast",
    "exchange",
    "exchange_windows",
    "exchanged",
    "fold",
    "hand_out",
    "handed",
    "offset",
    "read_stream",
    "reduce",
    "reduce_scatter",
    "relay",
    "relayed",
    "shares_work",
    "sparse_all_reduce",
    "write_stream",
]

_SHARED_WORK = 1 << 16
"""Bytes a rank from which more than two ranks share the work of a sum, for one more phase in each window."""


def _windows(total: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `width`; one that is empty if there is nothing, as every call has a phase."""
    for start in range(0, total or 1, width):
        yield start, min(start + width, total)


def _width(call: Call, dtype: torch.dtype, parts: int = 1) -> int:
    return call.lockstep.segment.chunk // (dtype.itemsize * parts)


def _cut(flat: Tensor, start: int, end: int) -> Tensor:
    return flat if end - start == flat.numel() else flat[start:end]


def fold(op: str, rows: Sequence[Tensor], out: Tensor) -> None:
    """Reduce tensors in order, into `out`, which may be the first or the second of them."""
    function = REDUCTIONS[op]
    if len(rows) == 1:
        out.copy_(rows[0])
    else:
        function(rows[0], rows[1], out=out)
        for row in rows[2:]:
            function(out, row, out=out)
    if op == "AVG":
        averaged(out, len(rows))


def barrier(call: Call) -> Steps:
    """Wait until all ranks are here."""
    yield from call.meet()


def all_gather(call: Call, out: Tensor, given: Tensor) -> Steps:
    """Write the own tensor for all; read all of them into the rows of `out`."""
    lockstep = call.lockstep
    for start, end in _windows(given.numel(), _width(call, given.dtype)):
        slots = call.slots(given.dtype, end - start)
        if not call.opened:
            slots.rows[lockstep.rank].copy_(_cut(given, start, end))
        yield from call.meet()
        (out if end - start == given.numel() else out[:, start:end]).copy_(slots.together)


def all_gather_lists(call: Call, taken: Sequence[Tensor], given: Tensor) -> Steps:
    """The same for parts that lie apart, and may differ in size from rank to rank."""
    lockstep = call.lockstep
    for start, end in _windows(max(out.numel() for out in taken), _width(call, given.dtype)):
        slots = call.slots(given.dtype, end - start)
        mine = given[start:end]
        slots.rows[lockstep.rank][: mine.numel()].copy_(mine)
        yield from call.meet()
        for row, out in zip(slots.rows, taken, strict=True):
            part = out[start:end]
            part.copy_(row[: part.numel()])


def broadcast(call: Call, out: Tensor, given: Tensor, root: int) -> Steps:
    """The root writes `given`; all read, the root from `given`. The two may be one tensor."""
    rank = call.lockstep.rank
    for start, end in _windows(out.numel(), _width(call, out.dtype)):
        slots = call.slots(out.dtype, end - start)
        if rank == root and not call.opened:
            slots.rows[root].copy_(_cut(given, start, end))
        yield from call.meet()
        if rank != root:
            _cut(out, start, end).copy_(slots.rows[root])
        elif out is not given:
            _cut(out, start, end).copy_(_cut(given, start, end))


def reduce(call: Call, out: Tensor, given: Tensor, op: str, root: int) -> Steps:
    """All write; the root reads and reduces into `out`, which may be `given` and which nobody else touches."""
    lockstep = call.lockstep
    for start, end in _windows(given.numel(), _width(call, given.dtype)):
        slots = call.slots(given.dtype, end - start)
        if not call.opened:
            slots.rows[lockstep.rank].copy_(_cut(given, start, end))
        yield from call.meet()
        if lockstep.rank == root:
            fold(op, slots.rows, _cut(out, start, end))


def shares_work(size: int, given: Tensor) -> bool:
    """Whether so many ranks share the work of a sum of such tensors."""
    return size > 2 and given.numel() * given.dtype.itemsize >= _SHARED_WORK


def all_reduce(call: Call, out: Tensor, given: Tensor, op: str) -> Steps:
    """All write, and each reduces everything itself; where much is to be done, each reduces a share for all.

    `out` may be `given`.
    """
    lockstep = call.lockstep
    size, rank = lockstep.size, lockstep.rank
    shared = shares_work(size, given)
    for start, end in _windows(given.numel(), _width(call, given.dtype)):
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
        # Nobody else reads this part of the own chunk in the first phase, nor writes it.
        result = torch.empty_like(mine[0]) if rank > 1 else mine[rank]
        fold(op, mine, result)
        if rank > 1:
            mine[rank].copy_(result)
        yield from call.meet()
        for owner, row in enumerate(slots.rows):
            ready = slice(owner * share, (owner + 1) * share)
            part[ready].copy_(row[ready])


def sparse_all_reduce(calls: Sequence[Call], tensor: Tensor) -> Steps:
    """Sum tensors in coordinate form: gather everybody's counts, indices and values, and let torch add them up."""
    own = tensor.detach().coalesce()
    size, sparse_dim = calls[0].lockstep.size, own.sparse_dim()
    counts = torch.empty(size, 1, dtype=torch.int64)
    yield from all_gather(calls[0], counts, torch.tensor([own.indices().shape[1]]))
    each = counts.view(-1).tolist()
    indices = [torch.empty(sparse_dim, n, dtype=torch.int64) for n in each]
    values = [own.values().new_empty((n, *own.values().shape[1:])) for n in each]
    for call, taken, given in ((calls[1], indices, own.indices()), (calls[2], values, own.values())):
        yield from all_gather_lists(call, [part.view(-1) for part in taken], given.reshape(-1))
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=False
    )
    tensor.copy_(total.coalesce())  # a detached one would get the result to itself


def hand_out(pieces: Sequence[Tensor], given: Sequence[Tensor], rank: int, start: int, end: int) -> None:
    """Write each other rank's piece of a window into the own chunk, the next rank's first."""
    for step, piece in enumerate(pieces, 1):
        piece.copy_(_cut(given[(rank + step) % len(given)], start, end))


def handed(pieces: Sequence[Sequence[Tensor]], source: int, target: int) -> Tensor:
    """Where `hand_out` on the source wrote the target's piece."""
    return pieces[source][(target - source - 1) % len(pieces)]


def reduce_scatter(call: Call, out: Tensor, given: Sequence[Tensor], op: str) -> Steps:
    """Write the others' pieces; read the own one of all ranks and reduce them."""
    lockstep = call.lockstep
    size, rank = lockstep.size, lockstep.rank
    own = given[rank]
    if rank > 1 and out.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
        own = own.clone()  # it is read after `out` has been written
    others = max(1, size - 1)
    for start, end in _windows(out.numel(), _width(call, out.dtype, others)):
        pieces = call.slots(out.dtype, others * (end - start)).pieces(others)
        if size > 1 and not call.opened:
            hand_out(pieces[rank], given, rank, start, end)
        yield from call.meet()
        rows = [
            _cut(own, start, end) if source == rank else handed(pieces, source, rank)
            for source in range(size)
        ]
        fold(op, rows, _cut(out, start, end))


def exchange(call: Call, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Steps:
    """Pieces of any sizes to and from every rank.

    With the first phase each rank says how much it gives to and takes from each, so that all know where a piece lies
    in the stream of its source, and whether everything fits. A source's stream has the next rank's piece first.
    """
    size, rank = call.lockstep.size, call.lockstep.rank
    stream = [given[(rank + step) % size] for step in range(1, size)]
    dtype = given[rank].dtype
    width = _width(call, dtype)
    call.amounts([piece.numel() for piece in (*given, *taken)])
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
    """What each rank gives to each in the exchange that was just opened, and whether all take what they are given."""
    size, row = lockstep.size, 2 * lockstep.size
    table = lockstep.amounts().tolist()
    gives = [table[source * row : source * row + size] for source in range(size)]
    takes = [table[target * row + size : (target + 1) * row] for target in range(size)]
    return gives, gives == [list(column) for column in zip(*takes, strict=True)]


def exchange_windows(gives: Sequence[Sequence[int]], width: int) -> int:
    """How many windows the longest stream has."""
    return max(1, *(-(-(sum(row) - row[rank]) // width) for rank, row in enumerate(gives)))


def relay(call: Call, out: Tensor, given: Tensor, source: int | None) -> Steps:
    """Each rank hands on one tensor, which may be empty, and takes that of one rank, or of none."""
    size, rank = call.lockstep.size, call.lockstep.rank
    width = _width(call, given.dtype)
    call.amounts([given.numel(), size if source is None else source, out.numel()])
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
    """The longest tensor of the relay that was just opened; None if somebody does not take what it is given."""
    row = 2 * lockstep.size
    table = lockstep.amounts().tolist()
    gives = [*table[::row], 0]  # and what comes from nobody
    if any(gives[table[at + 1]] != table[at + 2] for at in range(0, len(table), row)):
        return None
    return max(gives)


def offset(gives: Sequence[int], source: int, target: int) -> int:
    """Where the target's piece begins in the stream of the source."""
    steps = (target - source) % len(gives)
    return sum(gives[(source + step) % len(gives)] for step in range(1, steps))


def write_stream(row: Tensor, stream: Sequence[Tensor], start: int) -> None:
    """Write the part of a stream that begins at `start` and fits."""
    at = -start
    for piece in stream:
        first, last = max(at, 0), min(at + piece.numel(), row.numel())
        if first < last:
            row[first:last].copy_(piece[first - at : last - at])
        at += piece.numel()


def read_stream(row: Tensor, out: Tensor, at: int) -> None:
    """Read the part of `out` that is here, where it begins at `at`."""
    first, last = max(at, 0), min(at + out.numel(), row.numel())
    if first < last:
        out[first - at : last - at].copy_(row[first:last])

"""The collectives: what a rank writes and reads in each epoch.

The functions are generators that yield to wait for the other ranks, so that a call can be started and finished later.
If a call was opened directly (`direct.py`), its first window is already written and published, and they continue from
there. Tensors are flat; those longer than a chunk are sent in windows. Sums are in rank order, so that they are bitwise
identical on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradmesh.backends.reductions import REDUCTIONS, averaged
from gradmesh.backends.shm.epochs import Call, Lockstep, Steps

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
    "offset",
    "piece_for",
    "read_stream",
    "reduce",
    "reduce_scatter",
    "relay",
    "relayed",
    "shares_work",
    "sparse_all_reduce",
    "write_pieces",
    "write_stream",
]

_SHARED_WORK = 1 << 16
"""Minimum bytes per rank for which more than two ranks divide the work of a sum, which needs an additional epoch."""


def _windows(total: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `width`; a single empty one if `total` is 0, since every call has an epoch."""
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
    """Wait until all ranks have made this call."""
    yield from call.meet()


def all_gather(call: Call, out: Tensor, given: Tensor) -> Steps:
    """Write the local tensor; read all of them into the rows of `out`."""
    lockstep = call.lockstep
    for start, end in _windows(given.numel(), _width(call, given.dtype)):
        slots = call.slots(given.dtype, end - start)
        if not call.opened:
            slots.rows[lockstep.rank].copy_(_cut(given, start, end))
        yield from call.meet()
        (out if end - start == given.numel() else out[:, start:end]).copy_(slots.together)


def all_gather_lists(call: Call, taken: Sequence[Tensor], given: Tensor) -> Steps:
    """The same for separate outputs, whose sizes may differ between ranks."""
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
    """The root writes `given`; all others read it. `out` and `given` may be the same tensor."""
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
    """All write; the root reads and reduces into `out`, which may be `given`."""
    lockstep = call.lockstep
    for start, end in _windows(given.numel(), _width(call, given.dtype)):
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
        # No other rank reads or writes this part of the local chunk in the first epoch.
        result = torch.empty_like(mine[0]) if rank > 1 else mine[rank]
        fold(op, mine, result)
        if rank > 1:
            mine[rank].copy_(result)
        yield from call.meet()
        for owner, row in enumerate(slots.rows):
            ready = slice(owner * share, (owner + 1) * share)
            part[ready].copy_(row[ready])


def sparse_all_reduce(calls: Sequence[Call], tensor: Tensor) -> Steps:
    """Sum sparse COO tensors: gather all counts, indices and values, and let torch add them."""
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
    tensor.copy_(total.coalesce())  # without detach(), which would not change the original


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
    for start, end in _windows(out.numel(), _width(call, out.dtype, others)):
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
    width = _width(call, dtype)
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
    width = _width(call, given.dtype)
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

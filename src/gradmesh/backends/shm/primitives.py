"""The primitives of gradmesh's data path: what each writes and reads in one window (`direct.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradmesh.backends.shm import collectives
from gradmesh.backends.shm.epochs import Call, Lockstep, Steps

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "BROADCAST",
    "EXCHANGE",
    "EXCHANGE_EVEN",
    "REDUCE",
    "REDUCE_SCATTER",
    "RELAY",
    "Primitive",
]


class Primitive(NamedTuple):
    """One kind of call: its implementation for a single window, and in general.

    The functions take the epochs of the group, the output, the input, and the call's additional argument: its root,
    counts or source.

    Attributes:
        name: the kind, as in torch.distributed's calls.
        shown: its description in errors; `{}` is replaced by the additional argument.
        elements: the elements of a chunk that it needs on this rank; -1 if it needs several windows.
        write: writes this rank's chunk.
        read: reads the chunks into the output; False if the counts do not match or need several windows.
        steps: the complete call, as a generator.
    """

    name: str
    shown: str
    elements: Callable[[Lockstep, Tensor, Tensor, Any], int]
    write: Callable[[Lockstep, Tensor, Tensor, Any], None]
    read: Callable[[Lockstep, Tensor, Tensor, Any], bool]
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
    return collectives.all_gather(call, out.view(call.lockstep.size, given.numel()), given)


ALL_GATHER = Primitive("all_gather_single", "all_gather", _all_given, _write_all, _read_gathered, _all_gather)


# -- all_reduce and reduce


def _unless_shared(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> int:  # noqa: ARG001
    return -1 if collectives.shares_work(lockstep.size, given) else given.numel()


def _read_sum(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> bool:  # noqa: ARG001
    collectives.fold("SUM", lockstep.chunks(given.dtype, given.numel()).rows, out)
    return True


def _read_sum_at_root(lockstep: Lockstep, out: Tensor, given: Tensor, root: int) -> bool:
    return lockstep.rank != root or _read_sum(lockstep, out, given, root)


def _all_reduce(call: Call, out: Tensor, given: Tensor, extra: object) -> Steps:  # noqa: ARG001
    return collectives.all_reduce(call, out, given, "SUM")


def _reduce(call: Call, out: Tensor, given: Tensor, root: int) -> Steps:
    return collectives.reduce(call, out, given, "SUM", root)


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
        collectives.write_pieces(pieces[rank], _parts(lockstep, given, each), rank, 0, each)


def _parts_for_me(lockstep: Lockstep, given: Tensor) -> list[Tensor]:
    """The parts for this rank, in rank order; its own part is not copied."""
    size, rank = lockstep.size, lockstep.rank
    if size == 1:
        return [given]
    each = given.numel() // size
    own = given[rank * each : (rank + 1) * each]
    pieces = lockstep.chunks(given.dtype, (size - 1) * each).pieces(size - 1)
    return [own if source == rank else collectives.piece_for(pieces, source, rank) for source in range(size)]


def _read_sum_of_parts(lockstep: Lockstep, out: Tensor, given: Tensor, extra: object) -> bool:  # noqa: ARG001
    collectives.fold("SUM", _parts_for_me(lockstep, given), out)
    return True


def _reduce_scatter(call: Call, out: Tensor, given: Tensor, extra: object) -> Steps:  # noqa: ARG001
    return collectives.reduce_scatter(call, out, _parts(call.lockstep, given, out.numel()), "SUM")


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


BROADCAST = Primitive(
    "broadcast", "broadcast(root {})", _all_out, _write_at_root, _read_root, collectives.broadcast
)


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
    return collectives.exchange(call, _parts(call.lockstep, out, each), _parts(call.lockstep, given, each))


EXCHANGE_EVEN = Primitive(
    "all_to_all_single", "all_to_all", _even_elements, _write_even, _read_even, _exchange_even
)

Counts = tuple[Sequence[int], Sequence[int]]


def _window(lockstep: Lockstep, dtype: torch.dtype) -> int:
    return lockstep.segment.chunk // dtype.itemsize


def _uneven_elements(lockstep: Lockstep, out: Tensor, given: Tensor, counts: Counts) -> int:  # noqa: ARG001
    # Another rank may send more: whether one window is enough is decided when all counts are known.
    mine = given.numel() - counts[0][lockstep.rank]
    width = _window(lockstep, given.dtype)
    return width if mine <= width else -1


def _write_uneven(lockstep: Lockstep, out: Tensor, given: Tensor, counts: Counts) -> None:  # noqa: ARG001
    send, receive = counts
    rank = lockstep.rank
    lockstep.publish_counts(lockstep.epoch + 1, [*send, *receive])
    row = lockstep.chunks(given.dtype, _window(lockstep, given.dtype)).rows[rank]
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
    width = _window(lockstep, given.dtype)
    gives, fit = collectives.exchanged(lockstep)
    if not fit or collectives.exchange_windows(gives, width) > 1:
        return False
    rows, pieces = lockstep.chunks(given.dtype, width).rows, []
    for source, count in enumerate(receive):
        if count:
            at = sum(send[:rank]) if source == rank else collectives.offset(gives[source], source, rank)
            pieces.append((given if source == rank else rows[source])[at : at + count])
    if pieces:
        torch.cat(pieces, out=out)
    return True


def _exchange(call: Call, out: Tensor, given: Tensor, counts: Counts) -> Steps:
    send, receive = counts
    return collectives.exchange(call, out.split(list(receive)), given.split(list(send)))


EXCHANGE = Primitive(
    "all_to_all_single", "all_to_all{}", _uneven_elements, _write_uneven, _read_uneven, _exchange
)


def _write_handed_on(lockstep: Lockstep, out: Tensor, given: Tensor, source: int | None) -> None:
    counts = [given.numel(), lockstep.size if source is None else source, out.numel()]
    lockstep.publish_counts(lockstep.epoch + 1, counts)
    if given.numel():
        _write_all(lockstep, out, given, source)


def _read_handed_on(lockstep: Lockstep, out: Tensor, given: Tensor, source: int | None) -> bool:
    most = collectives.relayed(lockstep)
    if most is None or most > _window(lockstep, given.dtype):
        return False
    if source is not None:
        out.copy_(lockstep.chunks(out.dtype, out.numel()).rows[source])
    return True


RELAY = Primitive("relay", "relay(from {})", _all_given, _write_handed_on, _read_handed_on, collectives.relay)

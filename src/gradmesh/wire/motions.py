"""What goes over the wire: the few raw collectives that all ops are made of.

Every function takes plain tensors, never writes to them and returns fresh memory, also on an axis of one
rank. Ragged forms work on flat buffers with one count a rank. torch.distributed is called here and nowhere
else on the data path.
"""

from __future__ import annotations

import atexit
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from gradmesh._torch import functional
from gradmesh.axis import Axis
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.wire import memory, opaque
from gradmesh.wire.opaque import CARRIED, flat_memory, send_and_receive
from gradmesh.world import rank_state

__all__ = [
    "all_fold",
    "all_gather",
    "all_reduce",
    "assemble",
    "broadcast",
    "counts",
    "exchange",
    "fetch",
    "fresh",
    "pack",
    "post",
    "reduce",
    "reduce_scatter",
    "relay",
    "settle",
]

# torch 2.13 renamed both; the old names only warn there.
_dist_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_dist_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# torch.distributed's functions take a tenth of a small call on shared memory, so that its group is called itself.


def _gather_single(out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
    if isinstance(group, ShmGroup):
        group.all_gather_single(out, flat).wait()
    else:
        _dist_gather(flat_memory(out), flat_memory(flat), group=group)


def _scatter_single(out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
    if isinstance(group, ShmGroup):
        group.reduce_scatter_single(out, flat).wait()
    else:
        _dist_scatter(_flat(out), flat, group=group)


def _exchange_single(out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
    if isinstance(group, ShmGroup):
        group.all_to_all_single(out, flat, [], []).wait()
    else:
        dist.all_to_all_single(flat_memory(out), flat_memory(flat), group=group)


def _dense(x: Tensor) -> Tensor:
    """`x` with plain strides and no pending conjugation or sign, copied only if need be."""
    return x.resolve_conj().resolve_neg().contiguous()


def _flat(dense: Tensor) -> Tensor:
    return dense if dense.dim() == 1 else dense.view(-1)


def fresh(x: Tensor) -> Tensor:
    """A dense copy of `x`."""
    plain = x.resolve_conj().resolve_neg()
    if is_compiling():
        return plain.clone(memory_format=torch.contiguous_format)
    return _room(plain, plain.shape).copy_(plain)


def _room(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory for a result of that shape, on the device and of the dtype of another tensor."""
    return like.new_empty(shape) if is_compiling() else memory.empty(shape, like.dtype, like.device)


def counts(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[int]:
    """How many elements each rank's part has, when the parts have these sizes along `dim`."""
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return [rest * size for size in sizes]


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts of `x` along `dim`, one after another, as one flat buffer."""
    if math.prod(x.shape[:dim]) == 1:
        return _flat(_dense(x))
    return torch.cat([part.reshape(-1) for part in _dense(x).split(list(sizes), dim)])


def _ragged(sizes: Sequence[int], even: bool) -> bool:
    """Whether the ranks' amounts differ; told sizes are not looked into while compiling, to compile once for all."""
    return not even and (is_compiling() or len(set(sizes)) > 1)


def assemble(
    collect: Callable[[Sequence[int] | None], Tensor], shape: Sequence[int], dim: int, sizes: Sequence[int]
) -> Tensor:
    """Collect the ranks' parts, joined along `dim`.

    Args:
        collect: runs a collective into a buffer of a shape, or of one dimension.
        shape: that of any part, its size along `dim` ignored.
        dim: the dimension to join along.
        sizes: each part's size along it.
    """
    lead, tail = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    if math.prod(lead) == 1:
        return collect((*lead, sum(sizes), *tail))
    parts = collect(None).split(counts(shape, dim, sizes))
    return torch.cat([part.view(*lead, n, *tail) for part, n in zip(parts, sizes, strict=True)], dim)


def _filled(flat: Tensor, shape: Sequence[int] | None) -> Tensor:
    """A copy of a flat buffer in another shape."""
    out = _room(flat, flat.shape if shape is None else shape)
    out.view(-1).copy_(flat)
    return out


def all_gather(
    flat: Tensor, axis: Axis, sizes: Sequence[int], shape: Sequence[int] | None = None, *, even: bool = False
) -> Tensor:
    """Every rank's flat buffer, one after another; `sizes` are their lengths, `even` if they have to be equal."""
    if axis.size == 1:
        return _filled(flat, shape)
    if _ragged(sizes, even):
        return exchange(flat.repeat(axis.size), [flat.numel()] * axis.size, sizes, axis, shape)
    if is_compiling():
        out = functional("all_gather_into_tensor", axis.group, flat, axis.size)
        return out if shape is None else out.view(shape)
    out = _room(flat, [sum(sizes)] if shape is None else shape)
    _gather_single(out, flat, axis.group)
    return out


def reduce_scatter(
    flat: Tensor, axis: Axis, sizes: Sequence[int], shape: Sequence[int], *, even: bool = False
) -> Tensor:
    """Sum the ranks' flat buffers and keep the own part; `sizes` are the parts' lengths, `even` if equal."""
    if axis.size == 1:
        return _filled(flat, shape)
    mine = sizes[axis.rank]
    if _ragged(sizes, even) or flat.dtype not in CARRIED:
        # Backends have no ragged form of it. The same bytes travel, and torch adds them in rank order.
        parts = exchange(flat, sizes, [mine] * axis.size, axis, (axis.size, *shape))
        return parts.sum(0, dtype=flat.dtype)
    if is_compiling():
        return functional("reduce_scatter_tensor", axis.group, flat, "sum", axis.size).view(shape)
    out = _room(flat, shape)
    _scatter_single(out, flat, axis.group)
    return out


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's tensor."""
    if x.dtype not in CARRIED:
        return all_fold(x, axis, lambda parts: parts.sum(0, dtype=parts.dtype))
    if is_compiling() and axis.size > 1:
        return functional("all_reduce", axis.group, _dense(x), "sum")
    if isinstance(axis.group, ShmGroup) and axis.size > 1:
        out = _room(x, x.shape)
        axis.group.all_reduce_into(out, _dense(x)).wait()
        return out
    out = fresh(x)
    if axis.size > 1:
        dist.all_reduce(out, group=axis.group)
    return out


def all_fold(x: Tensor, axis: Axis, fold: Callable[[Tensor], Tensor]) -> Tensor:
    """Fold the ranks' tensors, stacked along a new first dimension, with any function of torch.

    It moves the bytes of an all_reduce. The parts come in rank order and each is folded on one rank, so that the
    result is the same on every rank, to the bit.
    """
    flat = _dense(x).view(-1)
    share, more = divmod(flat.numel(), axis.size)
    sizes = [share + (rank < more) for rank in range(axis.size)]
    mine = sizes[axis.rank]
    parts = exchange(flat, sizes, [mine] * axis.size, axis, (axis.size, mine))
    return all_gather(fold(parts), axis, sizes, x.shape)


def broadcast(x: Tensor, axis: Axis, root: int) -> Tensor:
    """The root's tensor; the others' only say shape and dtype."""
    if is_compiling() and axis.size > 1:
        return functional("broadcast", axis.group, _dense(x), root)
    out = fresh(x) if axis.rank == root else _room(x, x.shape)
    if axis.size > 1:
        dist.broadcast(flat_memory(out), group_src=root, group=axis.group)
    return out


def reduce(x: Tensor, axis: Axis, root: int) -> Tensor:
    """The sum at the root, zeros elsewhere."""
    if x.dtype not in CARRIED:
        total = all_reduce(x, axis)
    elif is_compiling() and axis.size > 1:
        total = opaque.reduce(_dense(x), root, axis.group.group_name)
    elif isinstance(axis.group, ShmGroup) and axis.size > 1:
        at_root = axis.rank == root
        total = _room(x, x.shape) if at_root else torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        axis.group.reduce_into(total, _dense(x), root).wait()
        return total
    else:
        total = fresh(x)
        if axis.size > 1:
            dist.reduce(total, group_dst=root, group=axis.group)
    # Backends leave partial sums on the other ranks.
    return total if axis.rank == root else total.zero_()


def exchange(
    flat: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    axis: Axis,
    shape: Sequence[int] | None = None,
    *,
    even: bool = False,
) -> Tensor:
    """Send `send[r]` elements of the flat buffer to each rank r and receive `receive[r]` from it, in rank order.

    `even` says that the amounts are equal on all ranks, so that none receives nothing.
    """
    if axis.size == 1:
        return _filled(flat, shape)
    if is_compiling():
        name, got = axis.group.group_name, _dense(flat)
        if even:
            got = functional("all_to_all_single", axis.group, got, list(receive), list(send))
        else:
            got = opaque.exchange(got, list(send), list(receive), name)
        return got if shape is None else got.view(shape)
    out = _room(flat, [sum(receive)] if shape is None else shape)
    if even:
        _exchange_single(_flat(out), flat, axis.group)
    else:
        send_and_receive(out, flat, send, receive, axis.group)
    return out


def relay(x: Tensor, axis: Axis, to: int | None, source: int | None, shape: Sequence[int]) -> Tensor | None:
    """Send `x` to one rank or none and receive a tensor of the given shape from one rank or none."""
    if not is_compiling() and isinstance(axis.group, ShmGroup):
        return _relay_on_shm(x, axis.group, to, source, shape)
    send, receive = [0] * axis.size, [0] * axis.size
    if to is not None:
        send[to] = x.numel()
    if source is not None:
        receive[source] = math.prod(shape)
    flat = _dense(x).view(-1)
    if source is None:
        exchange(flat if to is not None else flat[:0], send, receive, axis)
        return None
    return exchange(flat if to is not None else flat[:0], send, receive, axis, shape)


def _relay_on_shm(
    x: Tensor, group: ShmGroup, to: int | None, source: int | None, shape: Sequence[int]
) -> Tensor | None:
    flat = _flat(_dense(x))
    out = _room(x, [0] if source is None else shape)
    group.relay(_flat(out), flat if to is not None else flat[:0], source).wait()
    return None if source is None else out


_TAG = 7103
"""Keeps messages of `post` apart from those that users send on the same group."""

_GREETING = 128
"""Bytes that go ahead of a message between CPUs, to say what it is."""

_OUTSTANDING = 256
"""Messages that may be under way from a rank before a further one waits for the oldest."""


def post(x: Tensor, axis: Axis, peer: int, greeting: str) -> None:
    """Send a tensor to one rank and go on; it is copied, and kept until it has gone."""
    state = rank_state()
    if not hasattr(state, "posted"):
        state.posted = deque()
        atexit.register(_last_post, state.posted)
    parts = [flat_memory(fresh(x))]
    if x.device.type == "cpu":
        parts.insert(0, torch.tensor(list(greeting.encode()[:_GREETING].ljust(_GREETING)), dtype=torch.uint8))
    for part in parts:
        state.posted.append((part, dist.isend(part, group_dst=peer, group=axis.group, tag=_TAG)))
    settle(_OUTSTANDING)


def settle(outstanding: int = 0) -> None:
    """Wait until no more than so many posted messages are under way from this rank."""
    posted: deque[tuple[Tensor, dist.Work]] = getattr(rank_state(), "posted", deque())
    while len(posted) > outstanding:
        _, oldest = posted.popleft()
        oldest.wait()


def _last_post(posted: deque[tuple[Tensor, dist.Work]]) -> None:
    """Let messages go before the process does, if there is still a group to carry them."""
    with contextlib.suppress(RuntimeError, ValueError):
        for _, work in posted:
            work.wait(timedelta(seconds=30))


def fetch(out: Tensor, axis: Axis, peer: int, greeting: str) -> str | None:
    """Receive a tensor from one rank, in place; returns what came instead if it greets otherwise."""
    if out.device.type == "cpu":
        heard = torch.empty(_GREETING, dtype=torch.uint8)
        dist.recv(heard, group_src=peer, group=axis.group, tag=_TAG)
        said = bytes(heard.tolist()).rstrip()
        if said != greeting.encode()[:_GREETING].rstrip():
            return said.decode(errors="replace")
    dist.recv(flat_memory(out), group_src=peer, group=axis.group, tag=_TAG)
    return None

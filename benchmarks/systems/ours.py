"""gradmesh as a system under measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from benchmarks.systems.cases import PAIRS, picked
from benchmarks.systems.system import Grad, Make, Op, Setting, System, torch_grad
from gradmesh import I, P, R, V

__all__ = ["GRADMESH"]


def _simple(verb: Callable[..., Tensor], **options: Any) -> Make:
    """A verb with the same options in every layout."""
    return lambda at: lambda x: verb(x, at.group, **options)


def _sized(verb: Callable[..., Tensor], **options: Any) -> Make:
    """A verb that gets `sizes` if they are not equal."""

    def make(at: Setting) -> Op:
        sizes = None if at.even else at.sizes
        return lambda x: verb(x, at.group, sizes=sizes, **options)

    return make


def _rooted(verb: Callable[..., Tensor], **options: Any) -> Make:
    return lambda at: lambda x: verb(x, at.group, root=at.root, **options)


def _all_to_all(at: Setting) -> Op:
    splits = {} if at.even else {"split_sizes": at.sends, "concat_sizes": at.receives}
    return lambda x: gm.all_to_all(x, at.group, **splits)  # type: ignore[call-overload]


def _all_to_all_dims(at: Setting) -> Op:
    sizes = None if at.even else at.sizes
    return lambda x: gm.all_to_all(x, at.group, split_dim=1, concat_dim=0, concat_sizes=sizes)


def _neighbors(at: Setting) -> Op:
    rows, other = picked(at.layout), 1 - at.rank
    send = {other: torch.tensor(rows[at.rank, other], dtype=torch.int64)}
    receive = {other: len(rows[other, at.rank])}
    return lambda x: gm.neighbor_all_to_all(x, at.group, send_rows=send, receive_counts=receive)


def _exchange(at: Setting) -> Op:
    return lambda x: torch.cat(gm.exchange(x.split(at.sends), at.group))


def _send_recv(at: Setting) -> Op:
    if at.rank == at.root:
        return lambda x: gm.recv(torch.empty_like(x), at.group, source=0)
    return lambda x: gm.send(x, at.group, to=at.root)


def _gather(at: Setting) -> Op:
    sizes = None if at.even else at.sizes
    return lambda x: gm.gather(x, at.group, root=at.root, sizes=sizes)


def _scatter(at: Setting) -> Op:
    return lambda x: gm.scatter(x, at.group, root=at.root, sizes=at.sizes)


def _ordered_grad(loss: Tensor, xs: Sequence[Tensor], create_graph: bool) -> Sequence[Tensor]:
    return gm.grad(loss, xs, allow_unused=True, materialize_grads=True, create_graph=create_graph)


@contextmanager
def _session(case: str, mode: str) -> Iterator[Grad]:
    """The block that the docs ask for where a rank does not use the result."""
    one_sided = case in ("reduce", "gather", "send, recv") and mode not in (
        "compile",
        "compile, second order",
        "forward",
    )
    if one_sided or mode == "unused output":
        with gm.ordered():
            yield _ordered_grad
    else:
        yield torch_grad


_REDUCTIONS = ("mean", "max", "min", "prod", "logsumexp")
_CONVERSIONS = ((R, P), (R, I), (I, P), (V, P), (R, V))

GRADMESH = System(
    name="gradmesh",
    where="benchmarks.systems.ours:GRADMESH",
    own=("gradmesh",),
    assumed="Where a rank does not use the result, the call is inside `gm.ordered()`; so are `reduce`, `gather`, "
    "`send` and `recv`, except in forward mode and under the compiler. Uneven sizes are passed as `sizes=`.",
    session=_session,
    verbs={
        "all_gather(dst=R)": _sized(gm.all_gather, dst=R),
        "all_gather(dst=I)": _sized(gm.all_gather, dst=I),
        "reduce_scatter": _sized(gm.reduce_scatter),
        "reduce_scatter(op='mean')": _sized(gm.reduce_scatter, op="mean"),
        "all_reduce(dst=R)": _simple(gm.all_reduce, dst=R),
        "all_reduce(dst=I)": _simple(gm.all_reduce, dst=I),
        **{f"all_reduce(op='{op}', dst=R)": _simple(gm.all_reduce, op=op, dst=R) for op in _REDUCTIONS},
        "all_reduce(op='mean', dst=I)": _simple(gm.all_reduce, op="mean", dst=I),
        "replicate": _simple(gm.replicate),
        "shard(src=I)": _sized(gm.shard, src=I),
        "shard(src=R)": _sized(gm.shard, src=R),
        **{
            f"convert(src={src}, dst={dst})": _simple(gm.convert, src=src, dst=dst)
            for src, dst in _CONVERSIONS
        },
        "all_to_all": _all_to_all,
        "all_to_all(split_dim=1)": _all_to_all_dims,
        "exchange": _exchange,
        "broadcast(dst=R)": _rooted(gm.broadcast, dst=R),
        "broadcast(dst=I)": _rooted(gm.broadcast, dst=I),
        "reduce": _rooted(gm.reduce),
        "gather": _gather,
        "scatter": _scatter,
        "send, recv": _send_recv,
        "shift": _simple(gm.shift),
        "permute": _simple(gm.permute, pairs=PAIRS),
        "halo_exchange": _sized(gm.halo_exchange),
        "neighbor_all_to_all": _neighbors,
        "scan": _simple(gm.scan),
        "exscan": _simple(gm.exscan),
    },
)

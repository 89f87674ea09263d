"""gradmesh as a system under measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradmesh import collectives as verbs
from gradmesh.bench.cases import PAIRS
from gradmesh.bench.systems import Grad, Make, Op, Setting, System, torch_grad
from gradmesh.order import grad, ordered
from gradmesh.types import I, P, R, V

__all__ = ["GRADMESH"]


def _simple(verb: Callable[..., Tensor], **options: Any) -> Make:
    """A verb with the same options in every layout."""
    return lambda at: lambda x: verb(x, at.group, **options)


def _sized(verb: Callable[..., Tensor], **options: Any) -> Make:
    """A verb that is told the sizes where they are not equal."""

    def make(at: Setting) -> Op:
        sizes = None if at.even else at.sizes
        return lambda x: verb(x, at.group, sizes=sizes, **options)

    return make


def _rooted(verb: Callable[..., Tensor], **options: Any) -> Make:
    return lambda at: lambda x: verb(x, at.group, root=at.root, **options)


def _all_to_all(at: Setting) -> Op:
    splits = {} if at.even else {"split_sizes": at.sends, "concat_sizes": at.receives}
    return lambda x: verbs.all_to_all(x, at.group, **splits)  # type: ignore[arg-type]


def _all_to_all_dims(at: Setting) -> Op:
    sizes = None if at.even else at.sizes
    return lambda x: verbs.all_to_all(x, at.group, split_dim=1, concat_dim=0, concat_sizes=sizes)


def _exchange(at: Setting) -> Op:
    return lambda x: torch.cat(verbs.exchange(x.split(at.sends), at.group))


def _send_recv(at: Setting) -> Op:
    if at.rank == at.root:
        return lambda x: verbs.recv(torch.empty_like(x), at.group, source=0)
    return lambda x: verbs.send(x, at.group, to=at.root)


def _gather(at: Setting) -> Op:
    sizes = None if at.even else at.sizes
    return lambda x: verbs.gather(x, at.group, root=at.root, sizes=sizes)


def _scatter(at: Setting) -> Op:
    return lambda x: verbs.scatter(x, at.group, root=at.root, sizes=at.sizes)


def _ordered_grad(loss: Tensor, xs: Sequence[Tensor], create_graph: bool) -> Sequence[Tensor]:
    return grad(loss, xs, allow_unused=True, materialize_grads=True, create_graph=create_graph)


@contextmanager
def _session(case: str, mode: str) -> Iterator[Grad]:
    """The block that the docs ask for where a rank does not use the result."""
    one_sided = case in ("reduce", "gather", "send, recv") and mode not in ("compile", "forward")
    if one_sided or mode == "unused output":
        with ordered():
            yield _ordered_grad
    else:
        yield torch_grad


_REDUCTIONS = ("mean", "max", "min", "prod", "logsumexp")
_CONVERSIONS = ((R, P), (R, I), (I, P), (V, P), (R, V))

GRADMESH = System(
    name="gradmesh",
    where="gradmesh.bench.ours:GRADMESH",
    own=("gradmesh",),
    assumed="Where a rank does not use the result, the call is inside `gm.ordered()`; so are `reduce`, `gather`, "
    "`send` and `recv`, except in forward mode and under the compiler. Uneven sizes are passed as `sizes=`.",
    session=_session,
    verbs={
        "all_gather(dst=R)": _sized(verbs.all_gather, dst=R),
        "all_gather(dst=I)": _sized(verbs.all_gather, dst=I),
        "reduce_scatter": _sized(verbs.reduce_scatter),
        "reduce_scatter(op='mean')": _sized(verbs.reduce_scatter, op="mean"),
        "all_reduce(dst=R)": _simple(verbs.all_reduce, dst=R),
        "all_reduce(dst=I)": _simple(verbs.all_reduce, dst=I),
        **{f"all_reduce(op='{op}', dst=R)": _simple(verbs.all_reduce, op=op, dst=R) for op in _REDUCTIONS},
        "all_reduce(op='mean', dst=I)": _simple(verbs.all_reduce, op="mean", dst=I),
        "replicate": _simple(verbs.replicate),
        "shard(src=I)": _sized(verbs.shard, src=I),
        "shard(src=R)": _sized(verbs.shard, src=R),
        **{
            f"convert(src={src}, dst={dst})": _simple(verbs.convert, src=src, dst=dst)
            for src, dst in _CONVERSIONS
        },
        "all_to_all": _all_to_all,
        "all_to_all(split_dim=1)": _all_to_all_dims,
        "exchange": _exchange,
        "broadcast(dst=R)": _rooted(verbs.broadcast, dst=R),
        "broadcast(dst=I)": _rooted(verbs.broadcast, dst=I),
        "reduce": _rooted(verbs.reduce),
        "gather": _gather,
        "scatter": _scatter,
        "send, recv": _send_recv,
        "shift": _simple(verbs.shift),
        "permute": _simple(verbs.permute, pairs=PAIRS),
        "halo_exchange": _sized(verbs.halo_exchange),
        "scan": _simple(verbs.scan),
        "exscan": _simple(verbs.exscan),
    },
)

"""Every verb, on operands of its type: nothing may be found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from tests.zoo.data import normal
from tests.zoo.program import right
from tests.zoo.raw import alike, operand, rank, world


@right("audit", "gm.all_gather, for losses that differ")
def verb_all_gather() -> Any:
    return gm.all_gather, (operand(3, 2),)


@right("audit", "gm.all_gather(dst=I), for one loss that all ranks repeat")
def verb_all_gather_invariant() -> Any:
    return lambda x: gm.all_gather(x, dim=1, dst=gm.I), (operand(3, 2),)


@right("audit", "gm.all_gather of parts of any sizes")
def verb_all_gather_of_uneven_parts(parts: list[int] | None = None) -> Any:
    return lambda x: gm.all_gather(x, sizes="auto"), (operand(parts[rank()] if parts else 2 + rank(), 2),)


@right("audit", "gm.reduce_scatter")
def verb_reduce_scatter() -> Any:
    return gm.reduce_scatter, (operand(4, 2),)


@right("audit", "gm.all_reduce(dst=R)")
def verb_all_reduce() -> Any:
    return lambda x: gm.all_reduce(x, dst=gm.R), (operand(3, 2),)


@right("audit", "gm.all_reduce(dst=I)")
def verb_all_reduce_invariant() -> Any:
    return lambda x: gm.all_reduce(x, dst=gm.I), (operand(3, 2),)


@right("audit", "gm.all_reduce(op='mean')")
def verb_all_reduce_mean() -> Any:
    return lambda x: gm.all_reduce(x, op="mean", dst=gm.R), (operand(3, 2),)


@right("audit", "gm.all_to_all")
def verb_all_to_all() -> Any:
    return gm.all_to_all, (operand(4, 2),)


@right("audit", "gm.all_to_all from rows to columns, as between sequence and heads")
def verb_all_to_all_across_dims() -> Any:
    return lambda x: gm.all_to_all(x, split_dim=1, concat_dim=0), (operand(3, 4),)


@right("audit", "gm.exchange: parts of any shapes")
def verb_exchange() -> Any:
    return lambda x: tuple(gm.exchange(x.split([1, 3]))), (operand(4, 2),)


@right("gradcheck", "gm.send and gm.recv between the stages of a pipeline", ordered=True, order=2)
def verb_send_and_recv() -> Any:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        if rank() == 0:
            gm.send(torch.tanh(x), to=1)
            return (w * x).square().sum()
        return (w * gm.recv(torch.empty_like(x), source=0)).square().sum()

    return loss, lambda r: (normal(r, 3, 2), normal(r, 3, 2, seed=1))


@right("audit", "gm.broadcast")
def verb_broadcast() -> Any:
    return lambda x: gm.broadcast(x, root=1), (operand(3, 2),)


@right("audit", "gm.reduce")
def verb_reduce() -> Any:
    return lambda x: gm.reduce(x, root=1), (operand(3, 2),)


@right("audit", "gm.gather")
def verb_gather() -> Any:
    return lambda x: gm.gather(x, root=0), (operand(3, 2),)


@right("audit", "gm.scatter")
def verb_scatter() -> Any:
    return lambda x: gm.scatter(x), (operand(4 if rank() == 0 else 0, 2),)


@right("audit", "gm.shift around a ring")
def verb_shift() -> Any:
    return gm.shift, (operand(3, 2),)


@right("audit", "gm.shift without the way around")
def verb_shift_with_open_ends() -> Any:
    return lambda x: gm.shift(x, wrap=False), (operand(3, 2),)


@right("audit", "gm.permute")
def verb_permute() -> Any:
    return lambda x: gm.permute(x, pairs=[(0, 1)]), (operand(3, 2),)


@right("audit", "gm.halo_exchange")
def verb_halo_exchange() -> Any:
    return lambda x: gm.halo_exchange(x, halo=1), (operand(3, 2),)


@right("audit", "gm.scan")
def verb_scan() -> Any:
    return gm.scan, (operand(3, 2),)


@right("audit", "gm.exscan, from the last rank on")
def verb_exscan() -> Any:
    return lambda x: gm.exscan(x, reverse=True), (operand(3, 2),)


@right("audit", "gm.replicate")
def verb_replicate() -> Any:
    return gm.replicate, (alike(3, 2),)


@right("audit", "gm.shard of an invariant tensor")
def verb_shard() -> Any:
    return gm.shard, (alike(4, 2),)


@right("audit", "gm.shard of a replicated tensor")
def verb_shard_replicated() -> Any:
    return lambda x: gm.shard(x, src=gm.R), (alike(4, 2),)


@right("audit", "gm.convert from R to P")
def verb_convert() -> Any:
    return lambda x: gm.convert(x, src=gm.R, dst=gm.P), (alike(3, 2),)


@right("audit", "gm.convert from R to I")
def verb_convert_to_invariant() -> Any:
    return lambda x: gm.convert(x, src=gm.R, dst=gm.I), (alike(3, 2),)


@right("audit", "gm.neighbor_all_to_all: rows by index to a sparse list of ranks")
def verb_neighbor_all_to_all() -> Any:
    others = [r for r in range(world()) if r != rank()]

    def fn(x: Tensor) -> Tensor:
        rows = {r: torch.tensor([2, 0, 2]) for r in others}
        return gm.neighbor_all_to_all(x, send_rows=rows, receive_counts=dict.fromkeys(others, 3))

    return fn, (operand(3, 2),)

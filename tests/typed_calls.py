"""Calls that a type checker must take, and calls that it must reject: checked by `make lint`, never run.

A wrong call that is taken is an unused `type: ignore`, which strict mypy reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, assert_type

import torch

import gradmesh as gm


class Pair(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor


def right(x: torch.Tensor, weight: torch.nn.Parameter) -> None:
    assert_type(gm.all_reduce(x, dst=gm.R), torch.Tensor)
    assert_type(gm.all_reduce(weight, "tp", op="mean", dst=gm.I), torch.Tensor)
    assert_type(gm.all_gather((x, x)), tuple[torch.Tensor, torch.Tensor])
    assert_type(gm.shift([x], None, 1), list[torch.Tensor])
    assert_type(gm.permute({"k": x}, pairs=[(0, 1)]), dict[str, torch.Tensor])
    assert_type(gm.broadcast(Pair(x, x), root=1, dst=gm.I), Pair)
    assert_type(
        gm.replicate(((x, [x]), {"v": x})),
        tuple[tuple[torch.Tensor, list[torch.Tensor]], dict[str, torch.Tensor]],
    )
    assert_type(gm.all_reduce(x, dst=gm.I, async_op=True), gm.Pending[torch.Tensor])
    assert_type(gm.reduce_scatter(x, async_op=True), gm.Pending[torch.Tensor])
    assert_type(gm.all_gather((x, x), async_op=True), gm.Pending[tuple[torch.Tensor, torch.Tensor]])
    assert_type(gm.shift(x, async_op=bool(gm.rank())), torch.Tensor | gm.Pending[torch.Tensor])
    assert_type(gm.exchange([x]), list[torch.Tensor])
    assert_type(gm.exchange([x], async_op=True), gm.Pending[list[torch.Tensor]])
    gm.all_gather(x=x, axis=gm.axis(), dim=-1, dst=gm.R if gm.rank() else gm.I, sizes="auto")
    gm.shard(x, src=gm.R)
    gm.reduce_scatter(x, op="mean")
    for dst in (gm.P, gm.I, gm.V):
        gm.convert(x, src=gm.R, dst=dst)
    gm.convert(x, src=gm.I, dst=gm.P)
    gm.convert(x, src=gm.V, dst=gm.P)
    gm.barrier("tp")
    taken: list[Callable[[torch.Tensor], torch.Tensor]] = [gm.all_gather]
    assert_type(gm.axis().offset(gm.sizes(taken[0](x))), int)
    assert_type(gm.compat.towhee.AllGather.__name__, str)


def wrong(x: torch.Tensor) -> None:
    gm.all_reduce(x)  # type: ignore[call-overload]
    gm.all_reduce(x, dst=gm.P)  # type: ignore[call-overload]
    gm.all_reduce(x, dst="R")  # type: ignore[call-overload]
    gm.all_reduce(x, dst=gm.R, op="avg")  # type: ignore[call-overload]
    gm.all_reduce(x, "tp", "sum", dst=gm.R)  # type: ignore[call-overload]
    gm.all_reduce([1.0], dst=gm.R)  # type: ignore[call-overload]
    gm.all_gather(x, 1)  # type: ignore[call-overload]
    gm.all_gather(x, dst=gm.V)  # type: ignore[call-overload]
    gm.all_gather(x, sizes="even")  # type: ignore[arg-type]
    gm.broadcast(x, 0)  # type: ignore[call-overload]
    gm.broadcast(x, dst=gm.P)  # type: ignore[call-overload]
    gm.shard(x, src=gm.V)  # type: ignore[call-overload]
    gm.reduce_scatter(x, op="max")  # type: ignore[call-overload]
    gm.convert(x, src=gm.P, dst=gm.R)  # type: ignore[call-overload]
    gm.convert(x, src=gm.I, dst=gm.V)  # type: ignore[call-overload]
    gm.convert(x, src=gm.V, dst=gm.I)  # type: ignore[call-overload]
    gm.convert(x, src=gm.R, dst=gm.R)  # type: ignore[call-overload]
    gm.convert(x, dst=gm.P)  # type: ignore[call-overload]
    gm.permute(x)  # type: ignore[call-overload]
    gm.shift(x, None, 0.5)  # type: ignore[call-overload]
    gm.all_redcue(x)  # type: ignore[attr-defined]
    gm.barrier(2)  # type: ignore[arg-type]

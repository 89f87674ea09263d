"""The remedy of an error fits the case, with its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]


def uneven() -> Tensor:
    """Shards of 4 rows and 3, the balanced split of 7."""
    return torch.ones(4 - gm.rank())


def gathered_after_replicate() -> None:
    scale = gm.replicate(torch.ones(3, requires_grad=True)).sum()
    gm.all_gather(scale * uneven())


def replicated_on_one_rank() -> None:
    if gm.rank() == 0:
        gm.replicate(torch.ones(3, requires_grad=True))
    gm.all_gather(torch.ones(2))


def different_verbs() -> None:
    if gm.rank() == 0:
        gm.all_reduce(uneven(), dst=gm.R)
    else:
        gm.all_gather(uneven())


def odd_sequence() -> None:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("up", nn.Linear(4, 8))
    gm.nn.tensor_parallel(net, {"up": "column"}, sequence_dim=0)
    net(torch.ones(4 - gm.rank(), 4))


def odd_sequence_scattered() -> None:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("down", nn.Linear(8, 4))
    gm.nn.tensor_parallel(net, {"down": "row"}, sequence_dim=0)
    net(torch.ones(7, 4))


def attention(layer: Callable[..., Tensor], **options: Any) -> Tensor:
    q = torch.ones(1, 2, 5 - gm.rank(), 4)
    return layer(q, q, q, **options)


def micro_batches_that_differ() -> None:
    weight = nn.Parameter(torch.ones(2))
    for micro_batch in range(last := 3 - gm.rank()):
        with contextlib.nullcontext() if micro_batch == last - 1 else gm.no_sync():
            loss = gm.objective(gm.replicate(weight).sum(), weights=1, total=5)
        loss.backward()


def result_left_unused() -> None:
    x = torch.ones(2, requires_grad=True)
    y = gm.all_gather(x)
    if gm.rank() == 0:
        y.sum().backward()
    gm.all_reduce(torch.ones(3), dst=gm.I)


CASES: dict[str, tuple[Callable[[], object], tuple[str, ...], tuple[str, ...]]] = {
    "shards of different sizes": (
        lambda: gm.all_gather(uneven()),
        ('sizes="auto"', "sizes=(4, 3)"),
        (),
    ),
    "shards of different sizes after replicate": (
        gathered_after_replicate,
        ('sizes="auto"', "sizes=(4, 3)"),
        ("replicate, shard and convert",),
    ),
    "replicate on one rank alone": (replicated_on_one_rank, ("replicate, shard and convert",), ("sizes=",)),
    "different verbs": (different_verbs, ("the same call on every rank",), ("sizes=(", '"auto"')),
    "different arguments": (
        lambda: gm.all_gather(torch.ones(2, 2), dim=gm.rank()),
        ("the same arguments",),
        ('"auto"',),
    ),
    "different dtypes": (
        lambda: gm.all_gather(torch.ones(2).to(torch.float64 if gm.rank() else torch.float32)),
        ("one dtype",),
        ('"auto"',),
    ),
    "another dim": (lambda: gm.all_gather(torch.ones(2, 4 - gm.rank())), ("same shape",), ('"auto"',)),
    "a sum of different shapes": (lambda: gm.all_reduce(uneven(), dst=gm.R), ("same shape",), ('"auto"',)),
    "a sequence of different rows": (odd_sequence, ('rows="balanced"',), ("sizes=(", '"auto"')),
    "a sequence that the ranks do not divide": (odd_sequence_scattered, ('rows="balanced"',), ("sizes=(",)),
    "a size that the ranks do not divide": (
        lambda: gm.reduce_scatter(torch.ones(7)),
        ('sizes="balanced"', "sizes=(4, 3)", "the balanced split of 7 over 2 ranks"),
        (),
    ),
    "a split that the ranks do not divide": (
        lambda: gm.all_to_all(torch.ones(7)),
        ("split_sizes=(4, 3)", "the balanced split of 7 over 2 ranks"),
        (),
    ),
    "sizes that do not add up": (
        lambda: gm.shard(torch.ones(7), sizes=(4, 4)),
        ("sizes=(4, 3)", "the balanced split of 7 over 2 ranks"),
        (),
    ),
    "sizes that are not true": (
        lambda: gm.all_gather(torch.ones(4), sizes=(3, 3)),
        ('sizes="auto"',),
        (),
    ),
    "sizes for three ranks": (lambda: gm.all_gather(torch.ones(4), sizes=(4, 3, 1)), ("sizes=(4, 4)",), ()),
    "shards that are not balanced": (
        lambda: gm.all_gather(torch.ones(3 + gm.rank()), sizes="balanced"),
        ('sizes="auto"', "sizes=(3, 4)"),
        (),
    ),
    "ring attention of different shards": (
        lambda: attention(gm.nn.ring_attention),
        ('sizes="auto"', "sizes=(5, 4)"),
        ("same shape",),
    ),
    "ulysses attention of different shards": (
        lambda: attention(gm.nn.ulysses_attention),
        ('sizes="auto"', "sizes=(5, 4)"),
        ("same call",),
    ),
    "ring attention with sizes that are not true": (
        lambda: attention(gm.nn.ring_attention, sizes=(4, 5)),
        ("number of keys", 'sizes="auto"'),
        ("sizes=(",),
    ),
    "different numbers of steps": (
        lambda: gm.objective(torch.ones((), requires_grad=True), steps=3 - gm.rank()),
        ("the same arguments to objective",),
        ("shape",),
    ),
    "different numbers of micro-batches": (
        micro_batches_that_differ,
        ("the same number of micro-batches", "weights=0"),
        ("replicate", "shape"),
    ),
    "a result that one rank does not use": (
        result_left_unused,
        ("gradmesh.ordered()", "gradmesh.backward(loss)"),
        (),
    ),
    "avg": (lambda: gm.all_reduce(torch.ones(2), op="avg", dst=gm.R), ('op="mean"',), ()),  # type: ignore[call-overload]
    "avg of reduce_scatter": (
        lambda: gm.reduce_scatter(torch.ones(2), op="avg"),  # type: ignore[call-overload]
        ('op="mean"',),
        (),
    ),
    "torch's AVG": (
        lambda: gm.all_reduce(torch.ones(2), op=dist.ReduceOp.AVG, dst=gm.R),  # type: ignore[call-overload]
        ('op="mean"',),
        (),
    ),
    "another op": (
        lambda: gm.all_reduce(torch.ones(2), op="median", dst=gm.R),  # type: ignore[call-overload]
        ("pass op='sum'",),
        ('op="mean"',),
    ),
}


def remedy(name: str) -> str:
    with pytest.raises(gm.GradmeshError) as caught:
        CASES[name][0]()
    return str(caught.value).partition("\n  remedy ")[2]


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_fits_the_case(name: str, threads: Ranks) -> None:
    _, says, leaves_out = CASES[name]
    for text in threads(2)(remedy, name):
        assert [word for word in says if word not in text] == []
        assert [word for word in leaves_out if word in text] == []

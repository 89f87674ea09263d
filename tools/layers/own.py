"""The layers of tensor, sequence and expert parallelism, and the norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import (
    batch_norm,
    cross_entropy,
    group_norm,
    linear,
)

import gradmesh as gm
from tools.layers.case import Case

Shapes = list[torch.Size]
Sizes = tuple[int, ...]


def _words(n: int, tokens: int) -> Tensor:
    return torch.arange(tokens) * 5 % n


def _called(module: nn.Module, *names: str) -> Callable[..., Tensor]:
    """A module as a function of its operand and of its parameters."""

    def layer(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, values, strict=True)), x)  # type: ignore[no-any-return]

    return layer


def _column(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    layer = gm.nn.ColumnParallelLinear(shapes[0][-1], sum(sizes), bias=False, sizes=sizes, device="meta")
    return _called(layer, "weight")


def _row(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    layer = gm.nn.RowParallelLinear(sum(sizes), shapes[1][0], sizes=sizes, device="meta")
    return _called(layer, "weight", "bias")


def _column_of_rows(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    layer = gm.nn.ColumnParallelLinear(
        shapes[0][-1], sum(sizes), bias=False, sizes=sizes, sequence_dim=0, rows=sizes, device="meta"
    )
    return _called(layer, "weight")


def _row_of_rows(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    layer = gm.nn.RowParallelLinear(
        sum(sizes), shapes[1][0], sizes=sizes, sequence_dim=0, rows=sizes, device="meta"
    )
    return _called(layer, "weight", "bias")


def _table(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    width = shapes[0][1]
    layer = gm.nn.VocabParallelEmbedding(sum(sizes), width, sizes=sizes, device="meta")
    words, called = _words(sum(sizes), 6 * width // 4), _called(layer, "weight")
    return lambda table: called(words, table)


def _own_logits(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    words = _words(sum(sizes), shapes[0][0])
    return partial(gm.nn.vocab_parallel_cross_entropy, target=words, sizes=sizes, label_smoothing=0.1)


def _tiles(shapes: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    tokens = shapes[0][0]
    words, tile = _words(sum(sizes), tokens), max(4, tokens // 12)
    return partial(gm.nn.linear_cross_entropy, target=words, sizes=sizes, tile=tile)


def _ring(_: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    return partial(gm.nn.ring_attention, causal=True, sizes=sizes)


def _by_heads(_: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    return partial(gm.nn.ulysses_attention, causal=True, sizes=sizes)


def _experts_dense(x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    weights, chosen = (x @ router).softmax(-1).topk(2)
    every = torch.einsum("nd,edf->nef", x, experts).tanh()
    return (
        every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, every.shape[-1])) * weights.unsqueeze(-1)
    ).sum(1)


def _dispatched(_: Shapes, sizes: Sizes) -> Callable[..., Tensor]:
    return partial(_experts, sizes=sizes)


def _experts(x: Tensor, router: Tensor, experts: Tensor, *, sizes: Sizes) -> Tensor:
    weights, chosen = (x @ gm.replicate(router)).softmax(-1).topk(2)
    plan = gm.nn.ExpertDispatch(chosen, tuple(2 * n for n in sizes))
    rows, ends = plan.send(x), list(accumulate(plan.counts, initial=0))
    done = [
        (rows[begin:end] @ expert).tanh()
        for begin, end, expert in zip(ends, ends[1:], experts.unbind(), strict=False)
    ]
    # A rank without experts has no rows, and is part of the way back all the same.
    return plan.combine(torch.cat(done) if done else rows.sum() + experts.sum() + rows, weights)


def _balance_dense(scores: Tensor) -> Tensor:
    share = torch.bincount(scores.topk(2).indices.flatten(), minlength=scores.shape[1]).to(scores.dtype)
    return scores.shape[1] * (share / (2 * len(scores)) * scores.softmax(-1).mean(0)).sum()


def _balance(_: Shapes, __: Sizes) -> Callable[..., Tensor]:
    return lambda scores: gm.nn.balance_loss(scores, scores.topk(2).indices)


def _batch_norm(shapes: Shapes, _: Sizes) -> Callable[..., Tensor]:
    layer = gm.nn.SyncBatchNorm(shapes[0][1], track_running_stats=False, device="meta")
    return _norm(_called(layer, "weight", "bias"))


def _group_norm(shapes: Shapes, _: Sizes) -> Callable[..., Tensor]:
    return _norm(_called(gm.nn.SyncGroupNorm(2, shapes[0][1], device="meta"), "weight", "bias"))


def _norm(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The norm with parameters that are used on own rows."""
    return lambda x, weight, bias: layer(x, gm.replicate(weight), gm.replicate(bias))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, plainly: torch's own has no second derivative."""
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    seen: Tensor = scores.softmax(-1) @ v
    return seen


CASES = [
    Case(
        "ColumnParallelLinear",
        "I -> V",
        lambda n, s: [(6 * s, 4 * s), (n, 4 * s)],
        (gm.I, 0),
        linear,
        _column,
        1,
        large=(4096, 128),
    ),
    Case(
        "ColumnParallelLinear, own rows",
        "V -> V",
        lambda n, s: [(n, 4 * s), (n, 4 * s)],
        (0, 0),
        linear,
        _column_of_rows,
        1,
        large=(2048, 128),
    ),
    Case(
        "RowParallelLinear",
        "V -> I",
        lambda n, s: [(6 * s, n), (4 * s, n), (4 * s,)],
        (1, 1, gm.I),
        linear,
        _row,
        gm.I,
        large=(4096, 128),
    ),
    Case(
        "RowParallelLinear, own rows",
        "V -> V",
        lambda n, s: [(n, n), (4 * s, n), (4 * s,)],
        (1, 1, gm.I),
        linear,
        _row_of_rows,
        0,
        large=(2048, 128),
    ),
    Case(
        "VocabParallelEmbedding",
        "I -> I",
        lambda n, s: [(n, 4 * s)],
        (0,),
        lambda table: table[_words(len(table), 6 * table.shape[1] // 4)],
        _table,
        gm.I,
        large=(32768, 64),
    ),
    Case(
        "vocab_parallel_cross_entropy",
        "V -> I",
        lambda n, s: [(6 * s, n)],
        (1,),
        lambda logits: cross_entropy(logits, _words(logits.shape[1], len(logits)), label_smoothing=0.1),
        _own_logits,
        gm.I,
        large=(32768, 128),
    ),
    Case(
        "linear_cross_entropy",
        "I, V -> I",
        lambda n, s: [(6 * s, s), (n, s)],
        (gm.I, 0),
        lambda x, table: cross_entropy(x @ table.T, _words(len(table), len(x))),
        _tiles,
        gm.I,
        large=(32768, 128),
    ),
    Case(
        "ring_attention, causal",
        "V -> V",
        lambda n, s: [(1, 2, n, 4 * s)] * 3,
        (2, 2, 2),
        _attention,
        _ring,
        2,
        large=(8192, 16),
    ),
    Case(
        "ulysses_attention, causal",
        "V -> V",
        lambda n, s: [(1, 2, n, 4 * s)] * 3,
        (2, 2, 2),
        _attention,
        _by_heads,
        2,
        large=(8192, 16),
    ),
    Case(
        "ExpertDispatch",
        "V -> V",
        lambda n, s: [(n * s, 4 * s), (4 * s, 2 * n), (2 * n, 4 * s, 4 * s)],
        (0, gm.I, 0),
        _experts_dense,
        _dispatched,
        0,
        compiles=False,
        large=(8, 128),
    ),
    Case(
        "balance_loss",
        "V -> I",
        lambda n, s: [(n, 4 * s)],
        (0,),
        _balance_dense,
        _balance,
        gm.I,
        large=(65536, 16),
    ),
    Case(
        "SyncBatchNorm",
        "V -> V",
        lambda n, s: [(n, 3, 4 * s), (3,), (3,)],
        (0, gm.I, gm.I),
        lambda x, weight, bias: batch_norm(x, None, None, weight, bias, True),
        _batch_norm,
        0,
        large=(4096, 128),
    ),
    Case(
        "SyncGroupNorm",
        "V -> V",
        lambda n, s: [(2 * s, 4, n), (4,), (4,)],
        (2, gm.I, gm.I),
        lambda x, weight, bias: group_norm(x, 2, weight, bias),
        _group_norm,
        2,
        large=(4096, 64),
    ),
]

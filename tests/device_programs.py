"""Programs of every verb and layer, for test_device_programs.py: their values, gradients, and waits of the host.

A program is a generator. It yields its leaves after the set-up, and its results after the calls that are measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from gradmesh.nn import fields
from gradmesh.nn.graph import GraphPlan
from tests import simulated_device as sd

__all__ = ["LAYERS", "VERBS", "Outcome", "leaf", "on_each_rank"]

Program = Callable[[], Iterator[list[Tensor]]]


def leaf(*shape: int, seed: int = 0, same: bool = False) -> Tensor:
    """A leaf on the default device, with the same values on every device; `same`: on every rank too."""
    generator = torch.Generator().manual_seed(1000 * seed + (0 if same else 1 + gm.rank()))
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device(), non_blocking=True).requires_grad_()


@dataclass(frozen=True)
class Outcome:
    """Of one program on one rank.

    Attributes:
        values: its results, and the gradients of its leaves to the second order.
        waits: how often the host waited in its forward and backward, with the lines.
    """

    values: list[Tensor]
    waits: tuple[int, int]
    lines: dict[tuple[str, str], int]


def _run(program: Program, second_order: bool) -> Outcome:
    steps = program()
    leaves = next(steps)
    with sd.counted() as forward:
        results = next(steps)
    with sd.counted() as backward:
        loss = torch.zeros((), dtype=torch.float64)
        for number, y in enumerate(results):
            if y.requires_grad:
                weights = leaf(*y.shape, seed=7 + number).detach()
                loss = loss + (weights * y * (1 if not second_order else y)).sum()
        grads: list[Tensor] = []
        if loss.requires_grad:
            found = torch.autograd.grad(loss, leaves, create_graph=second_order, allow_unused=True)
            grads = [grad for grad in found if grad is not None]
    if second_order:
        square = sum(((grad * grad).sum() for grad in grads), torch.zeros((), dtype=torch.float64))
        if square.requires_grad:
            again = torch.autograd.grad(square, leaves, allow_unused=True)
            grads += [grad for grad in again if grad is not None]
    values = [x.detach().cpu() for x in (*results, *grads)]
    return Outcome(values, (forward.total(), backward.total()), dict(forward + backward))


def on_each_rank(names: list[str], second_order: bool = False) -> dict[str, Outcome]:
    """The outcomes of programs on the default device."""
    programs = {**VERBS, **LAYERS}
    return {name: _run(programs[name], second_order) for name in names}


# ---- verbs

VERBS: dict[str, Program] = {}
LAYERS: dict[str, Program] = {}


def _verb(name: str, call: Callable[[Tensor], Tensor], *shape: int, same: bool = False) -> None:
    def program() -> Iterator[list[Tensor]]:
        x = leaf(*(shape or (4, 3)), same=same)
        yield [x]
        yield [call(x)]

    VERBS[name] = program


def _neighbors(x: Tensor) -> dict[str, Any]:
    other = 1 - gm.rank()
    index = torch.tensor([0, 2, 2][: 2 + gm.rank()], device="cpu")
    return {
        "send_rows": {other: index.to(x.device, non_blocking=True)},
        "receive_counts": {other: 2 + other},
    }


_verb("all_gather", lambda x: gm.all_gather(x))
_verb("all_gather, dim=1", lambda x: gm.all_gather(x, dim=1))
_verb("all_gather, dst=gm.I", lambda x: gm.all_gather(x, dst=gm.I))
_verb("all_gather, sizes=(3, 4)", lambda x: gm.all_gather(x[: 3 + gm.rank()], sizes=(3, 4)))
_verb('all_gather, sizes="auto"', lambda x: gm.all_gather(x[: 3 + gm.rank()], sizes="auto"))
_verb('all_gather, sizes="balanced"', lambda x: gm.all_gather(x[: 4 - gm.rank()], sizes="balanced"))
_verb("all_reduce, dst=gm.R", lambda x: gm.all_reduce(x, dst=gm.R))
_verb("all_reduce, dst=gm.I", lambda x: gm.all_reduce(x, dst=gm.I))
_verb('all_reduce, "mean"', lambda x: gm.all_reduce(x, op="mean", dst=gm.R))
_verb('all_reduce, "max"', lambda x: gm.all_reduce(x, op="max", dst=gm.R))
_verb('all_reduce, "prod"', lambda x: gm.all_reduce(x, op="prod", dst=gm.R))
_verb('all_reduce, "logsumexp"', lambda x: gm.all_reduce(x, op="logsumexp", dst=gm.R))
_verb("all_reduce, comm_dtype", lambda x: gm.all_reduce(x, dst=gm.R, comm_dtype=torch.float32))
_verb("reduce_scatter", lambda x: gm.reduce_scatter(x))
_verb("reduce_scatter, dim=1, sizes=(1, 2)", lambda x: gm.reduce_scatter(x, dim=1, sizes=(1, 2)))
_verb('reduce_scatter, sizes="balanced"', lambda x: gm.reduce_scatter(x[:3], sizes="balanced"))
_verb("all_to_all", lambda x: gm.all_to_all(x))
_verb(
    "all_to_all, sizes",
    lambda x: gm.all_to_all(x, split_sizes=(1, 3), concat_sizes=((1, 1), (3, 3))[gm.rank()]),
)
_verb("broadcast", lambda x: gm.broadcast(x, root=1, dst=gm.R))
_verb("broadcast, dst=gm.I", lambda x: gm.broadcast(x, dst=gm.I))
_verb("scatter", lambda x: gm.scatter(x))
_verb("replicate", lambda x: gm.replicate(x), same=True)
_verb("shard", lambda x: gm.shard(x), same=True)
_verb("convert", lambda x: gm.convert(x, src=gm.R, dst=gm.V), same=True)
_verb("shift", lambda x: gm.shift(x))
_verb("shift, wrap=False", lambda x: gm.shift(x, wrap=False))
_verb("permute", lambda x: gm.permute(x, pairs=[(0, 1)]))
_verb("scan", lambda x: gm.scan(x))
_verb("exscan", lambda x: gm.exscan(x))
_verb("halo_exchange", lambda x: gm.halo_exchange(x, halo=(1, 2)))
_verb("neighbor_all_to_all", lambda x: gm.neighbor_all_to_all(x, **_neighbors(x)))
_verb("exchange", lambda x: torch.cat([part.reshape(-1) for part in gm.exchange([x[:2], x.T])]))
_verb("all_gather of a structure", lambda x: torch.cat([y.reshape(-1) for y in gm.all_gather((x, x[0]))]))
_verb("all_reduce of a structure", lambda x: torch.cat(gm.all_reduce([x, x * 2], dst=gm.R)))
_verb("async all_gather", lambda x: gm.all_gather(x, async_op=True).wait())
_verb("async all_reduce", lambda x: gm.all_reduce(x, dst=gm.R, async_op=True).wait())
_verb('async all_reduce, "max"', lambda x: gm.all_reduce(x, op="max", dst=gm.R, async_op=True).wait())
_verb("async halo_exchange", lambda x: gm.halo_exchange(x, dim=1, async_op=True).wait())
_verb(
    "async reduce_scatter, sizes",
    lambda x: gm.reduce_scatter(x.T.sin(), dim=1, sizes=(1, 3), async_op=True).wait(),
)
_verb(
    "async all_gather of a structure",
    lambda x: gm.all_gather({"x": x, "y": x * x}, async_op=True).wait()["y"],
)


def _in_order(x: Tensor) -> Tensor:
    first, second = gm.all_gather(x, async_op=True), gm.shift(x * x, async_op=True)
    y = x.sin()
    return y * second.wait() + first.wait()[:4]


_verb("two async calls", _in_order)


def _verbs_in_order() -> Iterator[list[Tensor]]:
    x = leaf(4, 3)
    yield [x]
    with gm.ordered():
        y = gm.all_gather(x)
        z = gm.reduce_scatter(y * y)
        loss = (z**2).sum() if gm.rank() == 0 else None
        gm.backward(loss)
    assert x.grad is not None
    yield [x.grad]


def _async_in_order() -> Iterator[list[Tensor]]:
    x = leaf(4, 3)
    yield [x]
    with gm.ordered():
        y = _in_order(x)
        gm.backward((y**2).sum() if gm.rank() == 1 else None)
    assert x.grad is not None
    yield [x.grad]


def _rooted() -> Iterator[list[Tensor]]:
    x = leaf(4, 3)
    yield [x]
    with gm.ordered():
        y, z = gm.reduce(x, root=1), gm.gather(x)
        gm.backward((y**2).sum() + (z**2).sum())
    assert x.grad is not None
    yield [x.grad]


def _messages() -> Iterator[list[Tensor]]:
    x = leaf(4, 3)
    yield [x]
    with gm.ordered():
        if gm.rank() == 0:
            gm.send(x**2, to=1)
            gm.backward(None)
        else:
            gm.backward((gm.recv(torch.empty(4, 3, dtype=torch.float64), source=0) * x).sum())
    assert x.grad is not None
    yield [x.grad]


def _checkpointed_messages() -> Iterator[list[Tensor]]:
    def region(x: Tensor) -> Tensor:
        if gm.rank() == 0:
            gm.send(x.sin(), to=1)
            return x.cos()
        return (gm.recv(torch.empty(4, 3, dtype=torch.float64), source=0) * x).sin()

    x = leaf(4, 3)
    yield [x]
    with gm.ordered():
        gm.backward(checkpoint(region, x, use_reentrant=False).sum())
    assert x.grad is not None
    yield [x.grad]


def _checkpointed_without_a_gradient() -> Iterator[list[Tensor]]:
    """Backward is needed of a call whose result has no gradient, and of other operators of the same region."""

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = gm.shift(x)
        z = gm.shift(y)
        for _ in range(4):
            with torch.no_grad():
                z = gm.all_reduce(z, dst=gm.R)
        return (x.sin() * z.detach()).exp().sin()

    x = leaf(4, 3)
    yield [x]
    with gm.ordered():
        gm.backward(sum(checkpoint(region, x, use_reentrant=False).sum() for _ in range(4)))
    assert x.grad is not None
    yield [x.grad]


def _coalesced() -> Iterator[list[Tensor]]:
    x, y = leaf(4, 3), leaf(2, seed=1)
    yield [x, y]
    with gm.coalesce():
        pending = [gm.all_reduce(x, dst=gm.R, async_op=True), gm.all_reduce(y, dst=gm.R, async_op=True)]
        pending.append(gm.all_gather(y, async_op=True))
    yield [each.wait() for each in pending]


def _deferred() -> Iterator[list[Tensor]]:
    leaves = [leaf(3, same=True), leaf(2, 3, same=True, seed=1), leaf(2, same=True, seed=3)]
    w, v, u = (torch.nn.Parameter(each.detach()) for each in leaves)
    x = leaf(4, 3, seed=2).detach()
    yield [w, v, u]
    for step in range(3):
        with gm.no_sync() if step < 2 else contextlib.nullcontext():
            loss = ((gm.replicate(w) * x).sin() + (gm.replicate(v) ** 2).sum() * (step + 1)).sum()
            unused = gm.replicate(u)
            loss = loss + (unused**3).sum() if gm.rank() == 0 else loss  # rank 1 has no gradient of it
        loss.backward()
    grads = [each.grad for each in (w, v, u) if each.grad is not None]
    assert len(grads) == 3
    yield grads


def _objective() -> Iterator[list[Tensor]]:
    x, weights = leaf(4, 3), leaf(4, seed=3).detach().abs().sum()
    yield [x]
    declared = gm.objective((x**2).mean(), weights=weights)
    counted = gm.objective((x**3).mean(), weights=3 + gm.rank())
    yield [declared, counted]


VERBS |= {
    "ordered": _verbs_in_order,
    "async calls in ordered": _async_in_order,
    "reduce and gather": _rooted,
    "send and recv": _messages,
    "send and recv in a checkpoint": _checkpointed_messages,
    "calls without a gradient in a checkpoint": _checkpointed_without_a_gradient,
    "coalesce": _coalesced,
    "no_sync": _deferred,
    "objective": _objective,
}


# ---- layers


def _layer(name: str) -> Callable[[Program], Program]:
    def added(program: Program) -> Program:
        LAYERS[name] = program
        return program

    return added


def _attention(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Program:
    def program() -> Iterator[list[Tensor]]:
        q, k, v = (leaf(1, 2, 4, 3, seed=seed) for seed in range(3))
        yield [q, k, v]
        yield [call(q, k, v)]

    return program


def _embeddings(call: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Program:
    def program() -> Iterator[list[Tensor]]:
        a, b = leaf(*(shape or (4, 3))), leaf(*(shape or (4, 3)), seed=1)
        yield [a, b]
        yield [call(a, b)]

    return program


def _field(call: Callable[[Tensor], Tensor], *shape: int) -> Program:
    def program() -> Iterator[list[Tensor]]:
        x = leaf(*(shape or (1, 2, 4)))
        yield [x]
        yield [call(x)]

    return program


def _module(make: Callable[[], torch.nn.Module], *shape: int, same: bool = False) -> Program:
    def program() -> Iterator[list[Tensor]]:
        module = make().to(torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.copy_(leaf(*parameter.shape, seed=20 + number, same=True))
        x = leaf(*shape, same=same)
        yield [x, *module.parameters()]
        yield [module(x)]

    return program


def _scale() -> Tensor:
    return torch.full((), 2.0, dtype=torch.float64)


LAYERS |= {
    "ring_attention": _attention(lambda q, k, v: gm.nn.ring_attention(q, k, v, causal=True, order="zigzag")),
    "ring_attention, lengths": _attention(
        lambda q, k, v: gm.nn.ring_attention(q, k, v, causal=True, lengths=[3, 5], sizes=(4, 4))
    ),
    "ulysses_attention": _attention(lambda q, k, v: gm.nn.ulysses_attention(q, k, v, causal=True)),
    "clip_loss": _embeddings(lambda a, b: gm.nn.clip_loss(a, b, _scale())),
    "clip_loss, sizes=None": _embeddings(lambda a, b: gm.nn.clip_loss(a, b, 2.0, sizes=None)),
    "clip_loss, ring": _embeddings(lambda a, b: gm.nn.clip_loss(a, b, 2.0, gather="ring", tile=2)),
    "siglip_loss": _embeddings(lambda a, b: gm.nn.siglip_loss(a, b, _scale(), -1.0)),
    "nt_xent_loss": _embeddings(lambda a, b: gm.nn.nt_xent_loss(a, b)),
    "vic_reg_loss": _embeddings(lambda a, b: gm.nn.vic_reg_loss(a, b)),
    "barlow_twins_loss": _embeddings(lambda a, b: gm.nn.barlow_twins_loss(a, b)),
    "ColumnParallelLinear": _module(lambda: gm.nn.ColumnParallelLinear(3, 4), 2, 3, same=True),
    "RowParallelLinear": _module(lambda: gm.nn.RowParallelLinear(6, 2), 2, 3),
    "Replicated": _module(lambda: gm.nn.Replicated(torch.nn.Linear(3, 2)), 2, 3),
    "SyncBatchNorm": _module(lambda: gm.nn.SyncBatchNorm(3), 4, 3),
    "SyncGroupNorm": _module(lambda: gm.nn.SyncGroupNorm(1, 2), 1, 2, 4),
    "HaloConv1d": _module(lambda: gm.nn.HaloConv1d(2, 2, 3, padding=1), 1, 2, 4),
    "max_pool": _field(lambda x: fields.max_pool(x, 2)),
    "avg_pool": _field(lambda x: fields.avg_pool(x, 2)),
    "interpolate": _field(lambda x: fields.interpolate(x, 6, mode="linear", align_corners=True)),
    "rfftn": _field(lambda x: fields.rfftn(x).abs(), 4, 6),
    "bce_with_logits": _field(lambda x: fields.bce_with_logits(x, torch.ones_like(x)), 4),
}


@_layer("sup_con_loss")
def _sup_con() -> Iterator[list[Tensor]]:
    x, labels = leaf(4, 3), torch.tensor([0, 1, 0, 1])
    yield [x]
    yield [gm.nn.sup_con_loss(x, labels, 1.0)]


@_layer("cached_gradients")
def _cached() -> Iterator[list[Tensor]]:
    x, w = leaf(4, 3), leaf(3, 3, seed=1, same=True)
    yield [w]
    loss = gm.nn.cached_gradients(
        lambda part: part @ gm.replicate(w), x.detach(), lambda z: gm.nn.clip_loss(z, z * z, 2.0), 2
    )
    assert w.grad is not None
    yield [loss, w.grad]


@_layer("VocabParallelEmbedding")
def _embedding() -> Iterator[list[Tensor]]:
    layer, ids = gm.nn.VocabParallelEmbedding(5, 2).double(), torch.tensor([4, 0, 1, 4])
    with torch.no_grad():
        layer.weight.copy_(leaf(*layer.weight.shape, seed=4))
    yield [layer.weight]
    yield [layer(ids)]


@_layer("vocab_parallel_cross_entropy")
def _cross_entropy() -> Iterator[list[Tensor]]:
    logits, target = leaf(3, 4), torch.tensor([7, 0, 3])
    yield [logits]
    yield [gm.nn.vocab_parallel_cross_entropy(logits, target)]


@_layer("linear_cross_entropy")
def _linear_cross_entropy() -> Iterator[list[Tensor]]:
    x, table, target = leaf(3, 2, same=True), leaf(4, 2, seed=1), torch.tensor([7, 0, 3])
    yield [x, table]
    yield [gm.nn.linear_cross_entropy(x, table, target, tile=2)]


@_layer("clip_grad_norm_")
def _clipped() -> Iterator[list[Tensor]]:
    weights = [leaf(3), leaf(2, 2, seed=1, same=True)]
    gm.nn.mark_sharded(weights[0])
    for number, weight in enumerate(weights):
        weight.grad = leaf(*weight.shape, seed=5 + number, same=number == 1).detach()
    yield weights
    norm = gm.nn.clip_grad_norm_(weights, 1.0, axis=gm.axis())
    yield [norm, *[weight.grad for weight in weights if weight.grad is not None]]


@_layer("clip_grad_norm_, norm_type=0")
def _count_norm() -> Iterator[list[Tensor]]:
    weights = [torch.nn.Parameter(leaf(3).detach()) for _ in range(3)]
    for number, weight in enumerate(weights):
        weight.grad = leaf(3, seed=1).detach() * (gm.rank() < number)
    gm.nn.mark_sharded(weights[1])
    yield []
    yield [gm.nn.clip_grad_norm_(weights, 1.0, norm_type=0, axis=gm.axis())]


def _routed(capacity: float | None) -> Program:
    def program() -> Iterator[list[Tensor]]:
        x, weights = leaf(4, 3), leaf(4, 2, seed=1)
        chosen = torch.tensor([[0, 3], [2, 1], [3, 0], [3, 2]])[: 3 + gm.rank()]
        x, weights = (
            x[: 3 + gm.rank()].detach().requires_grad_(),
            weights[: 3 + gm.rank()].detach().requires_grad_(),
        )
        yield [x, weights]
        plan = gm.nn.ExpertDispatch(chosen, 4, capacity_factor=capacity)
        rows = plan.send(x)
        yield [plan.combine(rows * rows, weights)]

    return program


LAYERS |= {"ExpertDispatch": _routed(None), "ExpertDispatch, capacity_factor": _routed(0.75)}


@_layer("ExpertParallel")
def _experts() -> Iterator[list[Tensor]]:
    layer = gm.nn.ExpertParallel(torch.nn.Linear(3, 4), lambda number: torch.nn.Linear(3, 3), 4, k=2).double()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(leaf(*parameter.shape, seed=30 + number, same=number < 2))
    x = leaf(4, 3)
    yield [x, *layer.parameters()]
    yield [layer(x)]


@_layer("balance_loss")
def _balance() -> Iterator[list[Tensor]]:
    scores, chosen = leaf(4, 3), torch.tensor([[0], [2], [2], [1]])
    yield [scores]
    yield [gm.nn.balance_loss(scores, chosen)]


def _graph() -> GraphPlan:
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 3], [1, 2, 3, 4, 5, 0, 3, 0]])
    return GraphPlan(edges, torch.tensor([0, 1, 0, 1, 0, 1]))


@_layer("GraphPlan")
def _plan() -> Iterator[list[Tensor]]:
    yield []
    plan = _graph()
    yield [plan.own, plan.remote, plan.edge_index]


@_layer("GraphPlan, its use")
def _plan_used() -> Iterator[list[Tensor]]:
    plan, x = _graph(), leaf(3, 2)
    yield [x]
    rows = plan.exchange(x)
    source, _ = plan.edge_index
    y = plan.scatter_add(rows[source])
    yield [y, plan.gather(y), plan.pool(y, torch.zeros_like(plan.own), 1), plan.take(leaf(6, 2, same=True))]

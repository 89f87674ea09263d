"""Every drop-in against plain torch in one process: values, first and second derivatives, one row for each.

The ranks' losses differ where the result is V or R; where it is I they are equal and count once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

import gradmesh as gm
from gradmesh.compat import fairchem, ksuit, megatron, towhee
from gradmesh.compat import gp_utils as gp
from gradmesh.compat import torch_nn as nn

Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One drop-in.

    Attributes:
        name: of the test.
        call: the drop-in on this rank's tensor and the group.
        dense: every rank's result from every rank's tensor, with torch alone.
        shape: this rank's operand for its rank and the number of ranks.
        src: `I` if the operand is the same on every rank.
        dst: `I` if the result is.
    """

    name: str
    call: Callable[[Tensor, Any], Result]
    dense: Callable[[Sequence[Tensor]], Sequence[Result]]
    shape: Callable[[int, int], Sequence[int]] = lambda *_: (3, 2)
    src: gm.Type = gm.V
    dst: gm.Type = gm.V


def everywhere(value: Callable[[Sequence[Tensor]], Result]) -> Callable[[Sequence[Tensor]], Sequence[Result]]:
    return lambda xs: [value(xs)] * len(xs)


def at_root(value: Callable[[Sequence[Tensor]], Result]) -> Callable[[Sequence[Tensor]], Sequence[Result]]:
    def dense(xs: Sequence[Tensor]) -> Sequence[Result]:
        whole = value(xs)
        nothing: Result = (
            tuple(torch.zeros_like(part) for part in whole)
            if isinstance(whole, tuple)
            else torch.zeros_like(whole)
        )
        return [whole if rank == 1 else nothing for rank in range(len(xs))]

    return dense


def cut(dim: int, sizes: Callable[[int, int], Sequence[int]]) -> Callable[[Tensor, int], tuple[Tensor, ...]]:
    return lambda x, n: x.split(list(sizes(x.shape[dim], n)), dim)


def equal(total: int, n: int) -> list[int]:
    return [total // n] * n


def ceil(total: int, n: int) -> list[int]:
    part = -(-total // n)
    return [max(0, min(part, total - rank * part)) for rank in range(n)]


def uneven(n: int) -> list[int]:
    return [2 * rank for rank in range(n)]


def parts(x: Tensor) -> list[Tensor]:
    return list(x.unbind(0))


def root(group: Any) -> int:
    return dist.get_process_group_ranks(group)[1]


def total(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def exchanged(xs: Sequence[Tensor], split_dim: int, concat_dim: int) -> list[Result]:
    n = len(xs)
    pieces = [x.split(x.shape[split_dim] // n, split_dim) for x in xs]
    return [torch.cat([piece[rank] for piece in pieces], concat_dim) for rank in range(n)]


def own_sums(xs: Sequence[Tensor], dim: int) -> list[Result]:
    whole = total(xs)
    return list(whole.split(whole.shape[dim] // len(xs), dim))


def tall(rank: int, size: int) -> tuple[int, ...]:
    return (2 * size, 3)


def wide(rank: int, size: int) -> tuple[int, ...]:
    return (3, 2 * size)


def listed(rank: int, size: int) -> tuple[int, ...]:
    return (size, 2, 2)


def args_for(group: Any) -> Any:
    class Args:
        world_size = group.size()
        local_rank = 0

    return Args()


def gp_scatter(dim: int, size: int) -> Row:
    return Row(
        f"gp scatter {size} along {dim}",
        lambda x, _: gp.scatter_to_model_parallel_region(x, dim),
        lambda xs: list(cut(dim, ceil)(xs[0], len(xs))),
        shape=lambda *_: tuple(size if d == dim % 3 else 2 for d in range(3)),
        src=gm.I,
    )


def gp_gather(dim: int) -> Row:
    return Row(
        f"gp gather along {dim}",
        lambda x, _: gp.gather_from_model_parallel_region(x, dim),
        everywhere(lambda xs: torch.cat(list(xs), dim)),
        shape=lambda rank, n: tuple(uneven(n)[rank] if d == dim % 3 else 2 for d in range(3)),
        dst=gm.I,
    )


def gp_gather_sum_grad(dim: int) -> Row:
    return Row(
        f"gp gather, sum of gradients, along {dim}",
        lambda x, _: gp.gather_from_model_parallel_region_sum_grad(x, dim),
        everywhere(lambda xs: torch.cat(list(xs), dim)),
        shape=lambda rank, n: tuple(uneven(n)[rank] if d == dim % 3 else 2 for d in range(3)),
        dst=gm.R,
    )


def balanced(total: int, n: int) -> list[int]:
    return [total // n + (rank < total % n) for rank in range(n)]


def fairchem_gather(name: str, call: Any, atoms: int, dst: gm.Type, padded: bool = False) -> Row:
    def shape(rank: int, n: int) -> tuple[int, ...]:
        return balanced(atoms, n)[0 if padded else rank], 2

    return Row(
        f"fairchem {name} of {atoms}{', padded' * padded}",
        lambda x, _: call(x, atoms),
        everywhere(
            lambda xs: torch.cat([x[:own] for x, own in zip(xs, balanced(atoms, len(xs)), strict=True)])
        ),
        shape=shape,
        dst=dst,
    )


def graph(n: int) -> tuple[Tensor, Tensor]:
    """Who owns each of 3 n + 1 atoms, not in order, and edges from near and from far."""
    atoms = 3 * n + 1
    owners = (torch.arange(atoms) * 5 + 1) % n
    targets = torch.arange(atoms).repeat(2)
    return owners, torch.stack([torch.cat([targets[:atoms] * 2, targets[atoms:] + 1]) % atoms, targets])


def collect(x: Tensor, _: Any) -> Tensor:
    rank, n = fairchem.get_gp_rank(), fairchem.get_gp_world_size()
    owners, edges = graph(n)
    return fairchem.all_to_all_collect(
        x, fairchem.build_gp_context(edges[:, owners[edges[1]] == rank], owners, rank, n)
    )


def collected(xs: Sequence[Tensor]) -> list[Result]:
    owners, edges = graph(len(xs))
    found: list[Result] = []
    for rank in range(len(xs)):
        sources = {s for s, t in edges.T.tolist() if owners[t] == rank and owners[s] != rank}
        mine = [
            xs[int(owners[atom])][int((owners[:atom] == owners[atom]).sum())]
            for atom in sorted(sources, key=lambda atom: (int(owners[atom]), atom))
        ]
        found.append(torch.stack(mine))
    return found


def nn_reductions(op: Any, fold: Callable[[Sequence[Tensor]], Tensor]) -> list[Row]:
    return [
        Row(f"nn all_reduce {op}", lambda x, group: nn.all_reduce(x, op, group), everywhere(fold), dst=gm.R),
        Row(f"nn reduce {op}", lambda x, group: nn.reduce(x, root(group), op, group), at_root(fold)),
        Row(
            f"nn reduce_scatter {op}",
            lambda x, group: nn.reduce_scatter(x.new_empty(2, 2), parts(x), op, group),
            lambda xs: list(fold(xs).unbind(0)),
            shape=listed,
        ),
    ]


GP = [
    Row("gp copy", lambda x, _: gp.copy_to_model_parallel_region(x), lambda xs: list(xs), src=gm.I, dst=gm.R),
    Row("gp reduce", lambda x, _: gp.reduce_from_model_parallel_region(x), everywhere(total), dst=gm.I),
    *(gp_scatter(dim, size) for dim, size in ((0, 6), (1, 5), (2, 1), (-1, 7), (-3, 4), (-2, 0))),
    *(gp_gather(dim) for dim in (0, 1, 2, -1, -2)),
    *(gp_gather_sum_grad(dim) for dim in (0, -1)),
    Row(
        "fairchem reduce",
        lambda x, _: fairchem.reduce_from_model_parallel_region(x),
        everywhere(total),
        dst=gm.I,
    ),
    Row("fairchem sum", lambda x, _: fairchem.all_reduce_sum_with_grad(x), everywhere(total), dst=gm.R),
    *(
        Row(
            f"fairchem scatter of {atoms}",
            lambda x, _: fairchem.scatter_to_model_parallel_region(x),
            lambda xs: list(cut(0, balanced)(xs[0], len(xs))),
            shape=lambda *_, atoms=atoms: (atoms, 2),
            src=gm.I,
        )
        for atoms in (6, 5, 1, 0)
    ),
    *(
        fairchem_gather("gather", fairchem.gather_from_model_parallel_region, atoms, gm.I, padded)
        for atoms, padded in ((5, False), (5, True), (1, False), (0, True))
    ),
    *(
        fairchem_gather(
            "gather, sum", fairchem.gather_from_model_parallel_region_sum_grad, atoms, gm.R, padded
        )
        for atoms, padded in ((5, False), (7, True))
    ),
    Row(
        "fairchem parts",
        lambda x, _: fairchem.GatherFromModelParallelRegionGradPadded.apply(x),
        everywhere(tuple),
        dst=gm.I,
    ),
    Row(
        "fairchem parts, sum",
        lambda x, _: fairchem.GatherFromModelParallelRegionSumGradPadded.apply(x),
        everywhere(tuple),
        dst=gm.R,
    ),
    Row(
        "fairchem collect",
        collect,
        collected,
        shape=lambda rank, n: (int((graph(n)[0] == rank).sum()), 2),
    ),
]

NN = [
    Row("nn all_gather", nn.all_gather, everywhere(tuple), dst=gm.R),
    Row("nn all_gather of scalars", nn.all_gather, everywhere(tuple), shape=lambda *_: (), dst=gm.R),
    Row(
        "nn _all_gather_base",
        lambda x, group: nn._all_gather_base(x.new_empty(group.size() * 3, 2), x, group),
        everywhere(lambda xs: torch.cat(list(xs))),
        dst=gm.R,
    ),
    Row(
        "nn all_to_all",
        lambda x, group: nn.all_to_all(list(torch.empty_like(x)), parts(x), group),
        lambda xs: [tuple(x[rank] for x in xs) for rank in range(len(xs))],
        shape=listed,
    ),
    Row(
        "nn all_to_all of other shapes",
        lambda x, group: nn.all_to_all(
            [x.new_empty(r + 1, group.rank() + 2) for r in range(group.size())],
            [x[: (group.rank() + 1) * (r + 2)].view(group.rank() + 1, r + 2) for r in range(group.size())],
            group,
        ),
        lambda xs: [
            tuple(x[: (r + 1) * (rank + 2)].view(r + 1, rank + 2) for r, x in enumerate(xs))
            for rank in range(len(xs))
        ],
        shape=lambda rank, n: ((rank + 1) * (n + 1),),
    ),
    Row(
        "nn all_to_all_single",
        lambda x, group: nn.all_to_all_single(torch.empty_like(x), x, group=group),
        lambda xs: exchanged(xs, 0, 0),
        shape=tall,
    ),
    Row(
        "nn all_to_all_single with sizes",
        lambda x, group: nn.all_to_all_single(
            x.new_empty(group.rank() * group.size(), 2),
            x,
            [group.rank()] * group.size(),
            list(range(group.size())),
            group,
        ),
        lambda xs: [torch.cat([x.split(list(range(len(xs))))[rank] for x in xs]) for rank in range(len(xs))],
        shape=lambda _, n: (n * (n - 1) // 2, 2),
    ),
    Row(
        "nn broadcast",
        lambda x, group: nn.broadcast(x, root(group), group),
        everywhere(lambda xs: xs[1] * 1),
        dst=gm.R,
    ),
    Row("nn gather", lambda x, group: nn.gather(x, root(group), group), at_root(tuple)),
    Row(
        "nn gather of scalars",
        lambda x, group: nn.gather(x, root(group), group),
        at_root(tuple),
        lambda *_: (),
    ),
    Row(
        "nn scatter",
        lambda x, group: nn.scatter(parts(x), root(group), group),
        lambda xs: list(xs[1].unbind(0)),
        shape=listed,
    ),
    *nn_reductions(ReduceOp.SUM, total),
    *nn_reductions(ReduceOp.AVG, lambda xs: total(xs) / len(xs)),
    *nn_reductions(ReduceOp.MAX, lambda xs: torch.stack(list(xs)).amax(0)),
    *nn_reductions(ReduceOp.MIN, lambda xs: torch.stack(list(xs)).amin(0)),
    *nn_reductions(ReduceOp.PRODUCT, lambda xs: torch.stack(list(xs)).prod(0)),
]

MEGATRON = [
    Row(
        "megatron copy",
        megatron.copy_to_tensor_model_parallel_region,
        lambda xs: list(xs),
        src=gm.I,
        dst=gm.R,
    ),
    Row("megatron reduce", megatron.reduce_from_tensor_model_parallel_region, everywhere(total), dst=gm.I),
    Row(
        "megatron scatter",
        megatron.scatter_to_tensor_model_parallel_region,
        lambda xs: list(cut(-1, equal)(xs[0], len(xs))),
        shape=wide,
        src=gm.I,
    ),
    Row(
        "megatron gather",
        megatron.gather_from_tensor_model_parallel_region,
        everywhere(lambda xs: torch.cat(list(xs), -1)),
        dst=gm.I,
    ),
    Row(
        "megatron scatter to sequence",
        megatron.scatter_to_sequence_parallel_region,
        lambda xs: list(cut(0, equal)(xs[0], len(xs))),
        shape=tall,
        src=gm.I,
    ),
    Row(
        "megatron gather from sequence",
        lambda x, group: megatron.gather_from_sequence_parallel_region(x, group=group),
        everywhere(lambda xs: torch.cat(list(xs))),
        dst=gm.R,
    ),
    Row(
        "megatron gather from sequence with sizes",
        lambda x, group: megatron.gather_from_sequence_parallel_region(
            x, True, group, torch.tensor(uneven(group.size()))
        ),
        everywhere(lambda xs: torch.cat(list(xs))),
        shape=lambda rank, n: (uneven(n)[rank], 2),
        dst=gm.R,
    ),
    Row(
        "megatron gather from sequence for repeated work",
        lambda x, group: megatron.gather_from_sequence_parallel_region(x, False, group, uneven(group.size())),
        everywhere(lambda xs: torch.cat(list(xs))),
        shape=lambda rank, n: (uneven(n)[rank], 2),
        dst=gm.I,
    ),
    Row(
        "megatron reduce_scatter to sequence",
        megatron.reduce_scatter_to_sequence_parallel_region,
        lambda xs: own_sums(xs, 0),
        shape=tall,
    ),
    Row(
        "megatron reduce_scatter to sequence with sizes",
        lambda x, group: megatron.reduce_scatter_to_sequence_parallel_region(x, group, uneven(group.size())),
        lambda xs: list(total(xs).split(uneven(len(xs)))),
        shape=lambda _, n: (sum(uneven(n)), 2),
    ),
    Row(
        "megatron all_gather last dim",
        megatron.all_gather_last_dim_from_tensor_parallel_region,
        everywhere(lambda xs: torch.cat(list(xs), -1)),
        dst=gm.R,
    ),
    Row(
        "megatron reduce_scatter last dim",
        megatron.reduce_scatter_last_dim_to_tensor_parallel_region,
        lambda xs: own_sums(xs, -1),
        shape=wide,
    ),
    Row(
        "megatron all_to_all",
        lambda x, group: megatron.all_to_all(group, x),
        lambda xs: exchanged(xs, 0, 0),
        shape=tall,
    ),
    Row(
        "megatron all_to_all with sizes",
        lambda x, group: megatron.all_to_all(
            group, x, [group.rank()] * group.size(), torch.arange(group.size())
        ),
        lambda xs: [torch.cat([x.split(list(range(len(xs))))[rank] for x in xs]) for rank in range(len(xs))],
        shape=lambda _, n: (n * (n - 1) // 2, 2),
    ),
    Row("megatron all_to_all_sp2hp", megatron.all_to_all_sp2hp, lambda xs: exchanged(xs, 1, 0), shape=wide),
    Row("megatron all_to_all_hp2sp", megatron.all_to_all_hp2sp, lambda xs: exchanged(xs, 0, 1), shape=tall),
]

OTHERS = [
    Row("ksuit", ksuit.AllGatherGradAutograd.apply, everywhere(tuple), dst=gm.R),
    Row(
        "ksuit of scalars",
        ksuit.AllGatherGradAutograd.apply,
        everywhere(tuple),
        shape=lambda *_: (),
        dst=gm.R,
    ),
    Row(
        "towhee",
        lambda x, group: towhee.AllGather.apply(x, args_for(group), group),
        everywhere(lambda xs: torch.cat(list(xs))),
        dst=gm.I,
    ),
]

ROWS = {row.name: row for row in [*GP, *NN, *MEGATRON, *OTHERS]}


def random(seed: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operand(row: Row, rank: int, size: int) -> Tensor:
    return random(1 if row.src is gm.I else 10 + rank, row.shape(rank, size)).requires_grad_()


def loss(row: Row, result: Result, rank: int) -> Tensor:
    """A curved function of a result; the same on every rank if the result is I."""
    found = result if isinstance(result, tuple) else (result,)
    seed = 100 if row.dst is gm.I else 100 + rank
    return torch.stack(
        [(random(seed + 10 * i, part.shape) * torch.sin(part)).sum() for i, part in enumerate(found)]
    ).sum()


def bend(row: Row, grad: Tensor, rank: int) -> Tensor:
    """A curved function of a gradient, for the second order; the same on every rank if the operand is I."""
    return (random(1000 if row.src is gm.I else 1000 + rank, grad.shape) * grad**2).sum()


@dataclass
class Found:
    values: list[Tensor]
    first: Tensor
    second: Tensor


def on_rank(row: Row, place: str) -> Found | None:
    """The row on this rank; None if the rank is not in the group."""
    if place == "world":
        group = dist.group.WORLD
    elif row in GP:
        group = None
    else:
        group = dist.new_group([1, 3])
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
    if row in GP:
        gp.setup_gp({"gp_gpus": 2 if group is None else group.size(), "distributed_backend": "threads"})
        group = gp.get_gp_group()
    assert group is not None
    rank, size = group.rank(), group.size()
    x = operand(row, rank, size)
    before = x.detach().clone()
    result = row.call(x, group)
    (first,) = torch.autograd.grad(loss(row, result, rank), x, create_graph=True)
    (second,) = torch.autograd.grad(bend(row, first, rank), x)
    assert torch.equal(x.detach(), before), "the operand was written to"
    if row in GP:
        gp.cleanup_gp()
    values = [part.detach() for part in (result if isinstance(result, tuple) else (result,))]
    return Found(values, first.detach(), second)


def in_one_process(row: Row, size: int) -> list[Found]:
    xs = [operand(row, rank, size) for rank in range(size)]
    if row.src is gm.I:
        xs = xs[:1] * size
    results = row.dense(xs)
    losses = [loss(row, result, rank) for rank, result in enumerate(results)]
    whole = losses[0] if row.dst is gm.I else torch.stack(losses).sum()
    leaves = xs[:1] if row.src is gm.I else xs
    firsts = torch.autograd.grad(whole, leaves, create_graph=True, materialize_grads=True)
    bent = torch.stack([bend(row, first, rank) for rank, first in enumerate(firsts)]).sum()
    seconds = torch.autograd.grad(bent, leaves, materialize_grads=True)
    found = []
    for rank, result in enumerate(results):
        values = [part.detach() for part in (result if isinstance(result, tuple) else (result,))]
        which = 0 if row.src is gm.I else rank
        found.append(Found(values, firsts[which].detach(), seconds[which]))
    return found


@pytest.mark.parametrize("place", ["world of 2", "world of 3", "two ranks of 4"])
@pytest.mark.parametrize("name", list(ROWS))
def test_a_drop_in_has_the_values_and_derivatives_of_one_process(threads: Any, name: str, place: str) -> None:
    row = ROWS[name]
    if place == "two ranks of 4":
        found = [one for one in threads(4)(on_rank, row, "subgroup") if one is not None]
        expected = in_one_process(row, 2) * (len(found) // 2)
    else:
        size = int(place[-1])
        found = threads(size)(on_rank, row, "world")
        expected = in_one_process(row, size)
    for one, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(one.values, reference.values)
        torch.testing.assert_close(one.first, reference.first)
        torch.testing.assert_close(one.second, reference.second)

"""The cases: what each verb computes, as a dense program of one process over the operands of all ranks.

A case is stated once, for all systems. Two ranks take part; with one exception the verbs do the same on two ranks as on
more (a ring of two has one neighbour, not two).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh import I, P, R, Type, V

__all__ = ["CASES", "PAIRS", "RANKS", "ROOT", "SIZES", "Case", "amounts", "picked"]

RANKS = 2
ROOT = 1
"""The root of the verbs that have one: not 0, which a mix-up of ranks would hit by chance."""
PAIRS = ((0, 1),)
SIZES = {"even": (2, 2), "uneven": (3, 2), "zero": (1, 0)}
"""The ranks' sizes along dim 0. They are those of torch.chunk, which DTensor takes for granted."""

Dense = Callable[[list[Tensor], str], list[Tensor]]
Shape = Callable[[int, str], tuple[int, ...]]


def amounts(layout: str) -> tuple[tuple[int, ...], ...]:
    """How many rows of an all_to_all each rank sends to each."""
    return {"even": ((2, 2), (2, 2)), "uneven": ((1, 2), (3, 1)), "zero": ((0, 0), (2, 1))}[layout]


def picked(layout: str) -> dict[tuple[int, int], list[int]]:
    """The rows that each rank sends to the other, as far as it has any; one of them twice."""
    first, second = SIZES[layout]
    return {(0, 1): [first - 1, 0, 0], (1, 0): [0] if second else []}


@dataclass(frozen=True)
class Case:
    """A verb, and what it computes.

    Attributes:
        name: the call, as the tables show it.
        src: the type of the operand.
        dst: the type of the result.
        shape: a rank's operand, given the rank and the layout.
        dense: all ranks' results from all ranks' operands, in the given layout.
        ragged: whether the ranks' sizes may differ.
        at_root: whether the result counts at the root alone.
    """

    name: str
    src: Type
    dst: Type
    shape: Shape
    dense: Dense
    ragged: bool = False
    at_root: bool = False

    @property
    def users(self) -> tuple[int, ...]:
        """The ranks whose result is defined."""
        return (ROOT,) if self.at_root else tuple(range(RANKS))


def _plain(_: int, layout: str) -> tuple[int, ...]:
    return (0 if layout == "zero" else 2, 2)


def _part(rank: int, layout: str) -> tuple[int, ...]:
    return (SIZES[layout][rank], 2)


def _whole(_: int, layout: str) -> tuple[int, ...]:
    return (sum(SIZES[layout]), 2)


def _at_root(rank: int, layout: str) -> tuple[int, ...]:
    return (sum(SIZES[layout]) if rank == ROOT else 0, 2)


def _sends(rank: int, layout: str) -> tuple[int, ...]:
    return (sum(amounts(layout)[rank]), 2)


def _wide(rank: int, layout: str) -> tuple[int, ...]:
    return (SIZES[layout][rank], 2 * RANKS)


def _everywhere(combine: Callable[[Tensor], Tensor]) -> Dense:
    """Every rank gets the same combination of the stacked operands."""
    return lambda xs, _: [combine(torch.stack(xs))] * RANKS


def _concatenated(xs: list[Tensor], _: str) -> list[Tensor]:
    return [torch.cat(xs)] * RANKS


def _sum_cut(xs: list[Tensor], layout: str) -> list[Tensor]:
    return list(torch.stack(xs).sum(0).split(SIZES[layout]))


def _mean_cut(xs: list[Tensor], layout: str) -> list[Tensor]:
    return list(torch.stack(xs).mean(0).split(SIZES[layout]))


def _own_slice(xs: list[Tensor], layout: str) -> list[Tensor]:
    return [x.split(SIZES[layout])[rank] for rank, x in enumerate(xs)]


def _same(xs: list[Tensor], _: str) -> list[Tensor]:
    return list(xs)


def _kept(xs: list[Tensor], _: str) -> list[Tensor]:
    return [xs[0], *(0 * x for x in xs[1:])]


def _exchanged(xs: list[Tensor], layout: str) -> list[Tensor]:
    parts = [x.split(row) for x, row in zip(xs, amounts(layout), strict=True)]
    return [torch.cat([sent[rank] for sent in parts]) for rank in range(RANKS)]


def _transposed(xs: list[Tensor], _: str) -> list[Tensor]:
    return list(torch.cat(xs).chunk(RANKS, 1))


def _scattered(xs: list[Tensor], layout: str) -> list[Tensor]:
    return list(xs[ROOT].split(SIZES[layout]))


def _shifted(xs: list[Tensor], _: str) -> list[Tensor]:
    return [xs[rank - 1] for rank in range(RANKS)]


def _permuted(xs: list[Tensor], _: str) -> list[Tensor]:
    out = [0 * x for x in xs]
    for source, target in PAIRS:
        out[target] = xs[source]
    return out


def _neighbors(xs: list[Tensor], layout: str) -> list[Tensor]:
    rows = picked(layout)
    return [xs[1][rows[1, 0]], xs[0][rows[0, 1]]]


def _halos(xs: list[Tensor], layout: str) -> list[Tensor]:
    whole, out, start = torch.cat(xs), [], 0
    for size in SIZES[layout]:
        out.append(whole[max(0, start - 1) : start + size + 1])
        start += size
    return out


def _sums(xs: list[Tensor], first: int) -> list[Tensor]:
    """The sum of the operands up to each rank, or before it."""
    return [sum(xs[: rank + first], torch.zeros_like(xs[0])) for rank in range(RANKS)]


_REDUCTIONS: Sequence[tuple[str, Callable[[Tensor], Tensor]]] = (
    ("max", lambda x: x.amax(0)),
    ("min", lambda x: x.amin(0)),
    ("prod", lambda x: x.prod(0)),
    ("logsumexp", lambda x: x.logsumexp(0)),
)

_ALL = (
    Case("all_gather(dst=R)", V, R, _part, _concatenated, ragged=True),
    Case("all_gather(dst=I)", V, I, _part, _concatenated, ragged=True),
    Case("reduce_scatter", P, V, _whole, _sum_cut, ragged=True),
    Case("reduce_scatter(op='mean')", P, V, _whole, _mean_cut, ragged=True),
    Case("all_reduce(dst=R)", P, R, _plain, _everywhere(lambda x: x.sum(0))),
    Case("all_reduce(dst=I)", P, I, _plain, _everywhere(lambda x: x.sum(0))),
    Case("all_reduce(op='mean', dst=R)", P, R, _plain, _everywhere(lambda x: x.mean(0))),
    Case("all_reduce(op='mean', dst=I)", P, I, _plain, _everywhere(lambda x: x.mean(0))),
    *(
        Case(f"all_reduce(op='{name}', dst=R)", V, R, _plain, _everywhere(combine))
        for name, combine in _REDUCTIONS
    ),
    Case("replicate", I, R, _plain, _same),
    Case("shard(src=I)", I, V, _whole, _own_slice, ragged=True),
    Case("shard(src=R)", R, V, _whole, _own_slice, ragged=True),
    Case("convert(src=R, dst=P)", R, P, _plain, _kept),
    Case("convert(src=R, dst=I)", R, I, _plain, _same),
    Case("convert(src=I, dst=P)", I, P, _plain, _kept),
    Case("convert(src=V, dst=P)", V, P, _plain, _same),
    Case("convert(src=R, dst=V)", R, V, _plain, _same),
    Case("all_to_all", V, V, _sends, _exchanged, ragged=True),
    Case("all_to_all(split_dim=1)", V, V, _wide, _transposed, ragged=True),
    Case("exchange", V, V, _sends, _exchanged, ragged=True),
    Case("broadcast(dst=R)", V, R, _plain, lambda xs, _: [xs[ROOT]] * RANKS),
    Case("broadcast(dst=I)", V, I, _plain, lambda xs, _: [xs[ROOT]] * RANKS),
    Case("reduce", P, V, _plain, _everywhere(lambda x: x.sum(0)), at_root=True),
    Case("gather", V, V, _part, _concatenated, ragged=True, at_root=True),
    Case("scatter", V, V, _at_root, _scattered, ragged=True),
    Case("send, recv", V, V, _plain, lambda xs, _: [xs[0]] * RANKS, at_root=True),
    Case("shift", V, V, _plain, _shifted),
    Case("permute", V, V, _plain, _permuted),
    Case("halo_exchange", V, V, _part, _halos, ragged=True),
    Case("neighbor_all_to_all", V, V, _part, _neighbors, ragged=True),
    Case("scan", V, V, _plain, lambda xs, _: _sums(xs, 1)),
    Case("exscan", V, V, _plain, lambda xs, _: _sums(xs, 0)),
)

CASES = {case.name: case for case in _ALL}

"""What each rank holds before and after an op, read off the op's own matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.ops.base import LinearOp
from gradmesh.ops.registry import REGISTRY
from gradmesh.ops.row import Row
from gradmesh.verify.laws import matrix

WORLD = 3
"""Ranks in a picture: the fewest with a neighbour on each side."""

_CUT = {"reduce_scatter", "shard", "all_to_all"}
"""The verbs that cut their operand: it has a row for each rank."""

_MADE_FOR_ROWS = {"gather", "scatter", "halo_exchange", "neighbor_all_to_all"}
"""The verbs whose example is made for its own number of rows."""


@dataclass(frozen=True)
class Term:
    """A part of what a cell holds: an element of a rank's operand, and its factor."""

    rank: int
    element: int
    factor: float


@dataclass(frozen=True)
class Cell:
    """An element of a rank's tensor, as the terms that it is the sum of; no terms is zero."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Motion:
    """One direction of a verb."""

    src: str  # the operand's type, as a letter
    dst: str  # the result's
    before: tuple[tuple[Cell, ...], ...]  # each rank's cells of the operand
    after: tuple[tuple[Cell, ...], ...]  # each rank's cells of the result

    @property
    def elements(self) -> int:
        """The most cells that a rank's operand has."""
        return max(len(cells) for cells in self.before)


def drawn() -> list[Row]:
    """The rows of the registry that have a picture: every public one."""
    return [row for row in REGISTRY if row.public]


def motions() -> dict[str, tuple[Motion, Motion]]:
    """Each verb's motion forward and backward, by how the registry calls it."""
    found = gm.launch(_on_each_rank, WORLD, backend="threads")
    return {
        row.call: (
            _motion([ops[row.call][0] for ops in found]),
            _motion([ops[row.call][1] for ops in found]),
        )
        for row in drawn()
    }


OnRank = tuple[str, str, int, int, Tensor]
"""An op on one rank: its types, this rank's numbers of input and output elements, and the matrix over all ranks."""


def _on_each_rank() -> dict[str, tuple[OnRank, OnRank]]:
    axis = gm.axis()
    found = {}
    for row in drawn():
        op, shape = row.examples(axis)[0]
        verb = row.call.split("(")[0]
        own = (WORLD if verb in _CUT else shape[0] if verb in _MADE_FOR_ROWS else 1, 1)
        found[row.call] = _on_rank(op, own), _on_rank(op.adjoint, op.out_shape(own))
    return found


def _on_rank(op: LinearOp, shape: Sequence[int]) -> OnRank:
    into, out = torch.Size(shape).numel(), torch.Size(op.out_shape(shape)).numel()
    return op.src.value, op.dst.value, into, out, matrix(op, shape)


def _motion(ranks: Sequence[OnRank]) -> Motion:
    src, dst, _, _, whole = ranks[0]
    sources = [(rank, element) for rank, one in enumerate(ranks) for element in range(one[2])]
    after, row = [], 0
    for one in ranks:
        after.append(tuple(_cell(whole[row + at], sources, src) for at in range(one[3])))
        row += one[3]
    before = tuple(
        tuple(Cell((Term(_named(src, rank), element, 1.0),)) for element in range(one[2]))
        for rank, one in enumerate(ranks)
    )
    return Motion(src, dst, before, tuple(after))


SAME = -1
"""The rank of an element that is the same on all of them."""


def _named(src: str, rank: int) -> int:
    return SAME if src in "RI" else rank


def _cell(factors: Tensor, sources: Sequence[tuple[int, int]], src: str) -> Cell:
    """The terms of one element; copies of a value that is the same on the ranks are one term."""
    terms: dict[tuple[int, int], float] = {}
    for (rank, element), factor in zip(sources, factors.tolist(), strict=True):
        if factor:
            key = (_named(src, rank), element)
            terms[key] = terms.get(key, 0.0) + factor
    return Cell(tuple(Term(rank, element, factor) for (rank, element), factor in terms.items()))

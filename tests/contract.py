"""The contract of every op, as functions that run on one rank of an axis.

The law tests run them on simulated ranks for each op; the process tests run the same functions on real ones. They are
those of `gradmesh.testing`, and what holds for the package's ops alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import gradmesh as gm
from gradmesh import testing
from gradmesh.ops.base import LinearOp
from gradmesh.ops.mean import Mean
from gradmesh.ops.registry import REGISTRY
from gradmesh.testing import (
    has_conjugate_wirtinger_gradients_to_third_order,
    keeps_the_law,
    matches_dense_autograd_to_third_order,
)
from gradmesh.verify import laws

__all__ = [
    "LAWS",
    "Check",
    "axis_of",
    "has_conjugate_wirtinger_gradients_to_third_order",
    "has_its_transpose_as_adjoint",
    "keeps_the_law",
    "matches_dense_autograd_to_third_order",
    "on_examples",
    "on_examples_of",
    "row_ids",
]

Check = Callable[[LinearOp, Sequence[int]], None]


def axis_of(place: str) -> gm.Axis | None:
    """The axis that a place stands for: the world, or two of its ranks that are not 0 and 1."""
    if place == "world":
        return gm.axis()
    group = dist.new_group([1, 3])
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else gm.axis(group)


def on_examples(check: Check, rows: Sequence[int], place: str = "world") -> int:
    """Put every example of the rows to a check, on this rank; returns how many there were."""
    return on_examples_of(axis_of(place), check, rows)


def on_examples_of(axis: gm.Axis | None, check: Check, rows: Sequence[int]) -> int:
    """The same on an axis, or None on a rank that is not on it."""
    count = 0
    if axis is None:
        return count
    for index in rows:
        for op, shape in REGISTRY[index].examples(axis):
            check(op, shape)
            count += 1
    return count


def row_ids() -> list[str]:
    return [row.call for row in REGISTRY]


def has_its_transpose_as_adjoint(op: LinearOp, shape: Sequence[int]) -> None:
    """More closely than ops with factors of their own can."""
    assert laws.adjoint_matrix_error(op, shape) < 1e-15


def moves_integers_and_bools(op: LinearOp, shape: Sequence[int]) -> None:
    x = (10 * laws.sample(op.src, shape, torch.float32, op.axis)).round()
    if isinstance(op, Mean):
        return
    expected = op.apply(x)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        y = op.apply(x.to(dtype))
        assert y.dtype is dtype
        assert torch.equal(y.float(), expected), dtype
    if not op.sums:
        assert torch.equal(op.apply(x > 0), op.apply((x > 0).float()).bool())


LAWS: tuple[Check, ...] = (
    *(law for law in testing.LAWS if law.__name__ != has_its_transpose_as_adjoint.__name__),
    has_its_transpose_as_adjoint,
    moves_integers_and_bools,
)

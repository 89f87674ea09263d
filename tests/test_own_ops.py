"""Collectives that are defined outside of the package: `gm.apply` of a subclass of `LinearOp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.ops.base import LinearOp, SameShape
from gradmesh.transport import Transport

Ranks = Callable[[int], Callable[..., list[Any]]]


class Mirror(SameShape):
    """V -> V: each rank gets the tensor of the rank at the same distance from the other end."""

    verb = "mirror"
    src, dst = gm.V, gm.V

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        other = self.axis.size - 1 - self.axis.rank
        got = wire.relay(x, other, other, x.shape)
        assert got is not None
        return got

    @property
    def adjoint(self) -> LinearOp:
        return Mirror(self.axis, **self.swapped)


def mirrored() -> float:
    rank, size = gm.rank(), gm.world_size()
    x = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    y = gm.apply(Mirror(gm.axis()), x)
    ((1 + rank) * y**2).sum().backward()
    assert x.grad is not None
    assert y.item() == size - rank
    assert x.grad.item() == 2 * (1 + rank) * (size - rank)
    return gm.verify.adjoint_matrix_error(Mirror(gm.axis()), (2, 3))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_op_from_outside_keeps_the_law(size: int, threads: Ranks) -> None:
    assert threads(size)(mirrored) == [0.0] * size


@pytest.mark.processes
def test_an_op_from_outside_keeps_the_law_on_processes(processes: Ranks) -> None:
    assert processes(2)(mirrored) == [0.0] * 2


def mismatched() -> str:
    with pytest.raises(gm.MismatchError) as caught:
        gm.apply(Mirror(gm.axis()), torch.ones(2 + gm.rank()))
    return str(caught.value)


def test_a_mismatch_names_the_op_and_the_line_of_the_caller(threads: Ranks) -> None:
    for text in threads(2)(mismatched):
        assert text.startswith("gradmesh.mirror: ")
        assert text.count("test_own_ops.py") == 2
        assert "in mismatched" in text


def test_non_op_or_non_tensor_raises_a_library_error(threads: Ranks) -> None:
    def wrong() -> None:
        with pytest.raises(gm.ArgumentError, match="apply: the op is not a LinearOp"):
            gm.apply(torch.ones(2), Mirror(gm.axis()))  # type: ignore[arg-type]
        with pytest.raises(gm.ArgumentError, match="mirror: the operand must be a dense tensor"):
            gm.apply(Mirror(gm.axis()), [1.0])  # type: ignore[arg-type]

    threads(2)(wrong)

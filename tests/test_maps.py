"""adjoint_error and as_matrix of user-defined maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.ops.all_gather import AllGather
from gradmesh.ops.shard import Shard
from gradmesh.ops.sizes import EQUAL
from gradmesh.verify import adjoint_error, as_matrix, matrix


class HandReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, both: bool) -> Tensor:
        ctx.both = both
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        if ctx.both:
            dist.all_reduce(grad)
        return grad, None


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("both", "dst"), [(True, gm.R), (False, gm.I)])
def test_a_hand_written_reduction_keeps_the_law_of_one_type_alone(
    both: bool, dst: gm.Type, dtype: torch.dtype
) -> None:
    def of(kind: gm.Type) -> float:
        return adjoint_error(
            lambda x: HandReduce.apply(x, both), (2, 3), src=gm.P, dst=kind, dtype=dtype, world_size=3
        )

    assert of(dst) < 1e-12
    assert of(gm.I if dst is gm.R else gm.R) > 1e-3


def test_shapes_may_differ_from_rank_to_rank() -> None:
    def gathered(x: Tensor) -> Tensor:
        return gm.all_gather(x, sizes="auto")

    assert adjoint_error(gathered, lambda rank: (rank, 2), dst=gm.R, world_size=3) < 1e-12
    assert torch.equal(
        as_matrix(gathered, lambda rank: (rank,), world_size=3), torch.eye(3).double().repeat(3, 1)
    )


def test_an_op_of_the_library_is_taken_as_it_is(threads: Callable[[int], Callable[..., list[Any]]]) -> None:
    def on_each_rank() -> tuple[float, float, float, bool]:
        op, wrong = AllGather(gm.axis(), 0, EQUAL), Shard(gm.axis(), 0, EQUAL)
        own = torch.equal(as_matrix(op, (2,)), matrix(op, (2,)))
        manual_calls = adjoint_error(op, adjoint=lambda y: 2 * op.adjoint.apply(y))
        return adjoint_error(op), adjoint_error(op, adjoint=wrong), manual_calls, own

    for right, wrong, manual_calls, own in threads(2)(on_each_rank):
        assert right < 1e-12
        assert min(wrong, manual_calls) > 1e-3
        assert own


def test_operand_without_gradient_or_element_raises() -> None:
    with pytest.raises(gm.RankError, match="does not require grad"):
        adjoint_error(lambda x: x.detach(), world_size=2)
    with pytest.raises(gm.RankError, match="the operands of all ranks are empty"):
        as_matrix(lambda x: x, (0,), world_size=2)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x: gm.all_gather(x).square(), "at a random operand"),
        (lambda x: gm.all_gather(x) + 1, "at zero"),
        (lambda x: x * (x.abs().sum() <= 1), "at a random operand"),
        (lambda x: (gm.all_gather(x), x), "got       tuple"),
        (lambda x: None, "got       NoneType"),
    ],
)
def test_nonlinear_map_has_no_matrix(
    threads: Callable[[int], Callable[..., list[Any]]], fn: Callable[[Tensor], Any], text: str
) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.ArgumentError) as caught:
            as_matrix(fn, (2,))
        return str(caught.value)

    assert all(text in printed for printed in threads(2)(on_each_rank))

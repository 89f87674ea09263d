"""gradcheck of losses whose rounding hides gradients: it takes larger steps, or says that it cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import gradcheck
from gradmesh.verify.gradients.report import TOO_FEW_DIGITS


class OwnSlice(torch.autograd.Function):
    """A gather that leaves out the sum over ranks in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size())[dist.get_rank()].clone()


def inputs(rank: int) -> tuple[Tensor, ...]:
    return (torch.ones(2) + rank,)


def loss_of(gather: Callable[..., Tensor], constant: float, factor: float) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        return factor * gather(x).square().sum() * (1 + dist.get_rank()) + constant

    return loss


@pytest.mark.parametrize(("constant", "factor"), [(1e9, 1.0), (1e6, 1e-3)])
def test_a_large_constant_does_not_hide_a_wrong_gradient(constant: float, factor: float) -> None:
    wrong = gradcheck(loss_of(OwnSlice.apply, constant, factor), inputs, world_size=2, raise_exception=False)
    assert not wrong.ok
    assert not any(entry.unclear for entry in wrong.failed)
    assert gradcheck(loss_of(gm.all_gather, constant, factor), inputs, world_size=2).ok


def test_the_diagnosis_looks_where_the_difference_was_seen() -> None:
    report = gradcheck(loss_of(OwnSlice.apply, 1e9, 1.0), inputs, world_size=2, raise_exception=False)
    assert report.diagnosis is not None
    assert report.diagnosis.hypothesis == "sum over ranks missing"


def test_undecidable_steps_do_not_count_as_right() -> None:
    for gather in (OwnSlice.apply, gm.all_gather):
        report = gradcheck(loss_of(gather, 1e12, 1e-3), inputs, world_size=2, raise_exception=False)
        assert not report.ok
        assert all(entry.unclear for entry in report.failed)
        assert "undecidable: the loss has too few digits" in str(report)
        assert report.diagnosis is not None
        assert report.diagnosis.hypothesis == TOO_FEW_DIGITS


def test_an_unused_input_beside_a_large_loss_is_right() -> None:
    def loss(x: Tensor, unused: Tensor) -> Tensor:
        shift = (x - unused.sum()) + unused.sum()  # a gradient that cancels, but for rounding
        return loss_of(gm.all_gather, 1e7, 1.0)(shift)

    assert gradcheck(loss, lambda r: (torch.ones(2) + r, torch.ones(2)), world_size=2).ok

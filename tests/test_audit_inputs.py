"""Functions that an audit has to take as they are: with a domain, other results, other dtypes, ranks that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import audit
from tests.test_audit_kinds import function, summed

FEW = ["not-adjoint", "hangs", "backward-raises", "precision-lost", "operand-overwritten", "aborts"]
"""The kinds that matter here; the others would only cost time."""


def test_a_function_with_a_domain_is_audited_inside_of_it() -> None:
    def fn(x: Tensor) -> Tensor:
        if bool((x <= 0).any()):
            raise ValueError("positive, please")
        return gm.all_gather(x.log())

    found = audit(lambda: (fn, torch.rand(3) + 1), kinds=FEW)
    assert found.ok, found
    assert found.arrows == ("V -> R",)


def test_a_backward_that_sends_on_one_rank_only_hangs() -> None:
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return summed(grad) if dist.get_rank() == 0 else grad.clone()

    made = function(lambda ctx, x: summed(x), backward)
    assert audit(lambda: (made.apply, torch.randn(3)), kinds=FEW, timeout=5).kinds == ("hangs",)


@pytest.mark.parametrize(
    "layer", [torch.nn.LayerNorm(8), torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh())]
)
def test_a_float32_module_that_is_not_linear_loses_no_precision(layer: Any) -> None:
    found = audit(lambda: ((lambda x: gm.all_gather(layer(x))), torch.randn(3, 8)), kinds=FEW)
    assert found.ok, found
    assert "float64" in found.left_out["precision-lost"]


def test_a_bfloat16_function_that_is_not_linear_is_left_out() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).bfloat16()
    found = audit(lambda: ((lambda x: gm.all_gather(layer(x))), torch.randn(3, 4).bfloat16()), kinds=FEW)
    assert found.ok, found
    assert "bfloat16" in found.left_out["not-adjoint"]


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: gm.all_gather(x.log()), torch.full((3,), 2e-4)),
        (lambda x: gm.all_gather((1000 * x).softmax(0)), torch.tensor([0.1, 0.1003, 0.0999])),
        (lambda x: gm.all_gather(x.square()), torch.zeros(3)),
        (lambda x: gm.all_gather(x.pow(3)), 1e5 * torch.arange(1.0, 4)),
    ],
)
def test_the_step_of_finite_differences_fits_the_function(fn: Any, x: Tensor) -> None:
    found = audit(lambda: (fn, x), kinds=FEW)
    assert found.ok, found
    assert not found.linear
    assert found.arrows


@pytest.mark.parametrize("fn", [lambda x: gm.all_gather(x.relu()), lambda x: gm.all_gather(x.abs())])
def test_where_there_is_no_derivative_none_is_judged(fn: Any) -> None:
    found = audit(lambda: (fn, torch.zeros(3)), kinds=FEW)
    assert found.ok, found
    assert "no derivative" in found.left_out["not-adjoint"]

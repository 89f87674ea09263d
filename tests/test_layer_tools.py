"""The table of layers: each is right at small sizes, and a wrong one is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradmesh as gm
from tests.seldom import seldom
from tools.layers.case import Case, deviations, findings
from tools.layers.table import CASES, CLOSE, row_of


@pytest.mark.parametrize("name", seldom(CASES, list(CASES)[::2]))
def test_a_layer_has_the_value_and_both_derivatives_of_the_dense_one(name: str) -> None:
    row = row_of(CASES[name], {}, weigh=False)
    assert row.right, row.cells()
    assert row.even


def _without_a_sum(*_: object) -> object:
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T  # x is whole, and its gradient is a part

    return layer


def test_layer_that_lacks_a_sum_is_reported() -> None:
    right = CASES["ColumnParallelLinear"]
    wrong: Case = replace(right, parts=_without_a_sum)  # type: ignore[arg-type]
    far = gm.launch(deviations, 2, backend="threads", args=(wrong, (2, 2)))
    assert max(each[0] for each in far) <= CLOSE
    assert max(each[1] for each in far) > 0.1


def test_an_audit_of_a_layer_with_a_wrong_adjoint_has_a_finding() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return gm.all_gather(x)

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return gm.reduce_scatter(grad) / 2

    right = CASES["ColumnParallelLinear, own rows"]
    wrong: Case = replace(right, parts=lambda *_: lambda x, w: Half.apply(x) @ w.T)
    assert findings(wrong, 2)

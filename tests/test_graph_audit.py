"""The audit and gradcheck find nothing of plans, in every way of making and using them; and find what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan
from tools.audits import plans

CASES = plans()
ARROWS = {"plan.take": "I -> V", "plan.gather(dst=R)": "V -> R", "plan.gather(dst=I)": "V -> I"}
SLOWER = {"plan.exchange, of_state", "plan.exchange, root=0", "plan.exchange, own="}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOWER else ()) for name in CASES]
)
def test_the_audit_finds_nothing(name: str) -> None:
    found = gm.verify.audit(CASES[name], world_size=2)
    assert found.findings == ()
    assert ARROWS.get(name, "V -> I" if "pool" in name else "V -> V") in found.arrows


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_audit_finds_nothing_on_more_ranks(name: str, ranks: int) -> None:
    assert gm.verify.audit(CASES[name], world_size=ranks).findings == ()


def plan_for() -> GraphPlan:
    edges = torch.randint(0, 5, (2, 20), generator=torch.Generator().manual_seed(0))
    return GraphPlan(edges, torch.arange(5) % gm.world_size())


def lossy() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    plan = plan_for()
    return (lambda x: plan.exchange(x, comm_dtype=torch.float32)), torch.rand(len(plan.own), 2)


def forgetful() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    plan = plan_for()
    return (lambda x: torch.cat((x, plan.exchange(x)[len(x) :].detach()))), torch.rand(len(plan.own), 2)


def test_the_audit_finds_a_lossy_transport_and_rows_not_sent_back() -> None:
    assert gm.verify.audit(lossy, world_size=2).kinds == ("precision-lost",)
    assert "not-adjoint" in gm.verify.audit(forgetful, world_size=2).kinds


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOWER else ()) for name in CASES]
)
def test_second_derivatives_and_forward_mode_pass_gradcheck(name: str) -> None:
    ranks = 3
    counts = gm.launch(lambda: tuple(CASES[name]()[1].shape), ranks, backend="threads")

    def inputs(rank: int) -> tuple[Tensor]:
        draw = torch.Generator().manual_seed(0 if name == "plan.take" else rank)
        return (torch.randn(counts[rank], dtype=torch.float64, generator=draw),)

    def loss(x: Tensor) -> Tensor:
        call, _ = CASES[name]()
        if name == "plan.take":
            x = gm.all_reduce(x, op="mean", dst=gm.I)  # the same on every rank
        y = call(x)
        if "pool" in name or name == "plan.gather(dst=I)":
            y = gm.replicate(y)  # used differently from here on
        return (1 + gm.rank()) * (y.sin() * y).sum()

    assert gm.verify.gradcheck(loss, inputs, world_size=ranks, order=2, forward=True)


EMPTY = ((0, 3), (3, 0), (0, 0), (5, 1))


@pytest.mark.parametrize("parts", EMPTY)
def test_gradcheck_passes_with_empty_and_uneven_parts(parts: tuple[int, int]) -> None:
    build = CASES["a layer, overlapped"]

    def loss(x: Tensor) -> Tensor:
        call, _ = build(parts=parts)
        return (1 + gm.rank()) * call(x).sin().sum()

    def inputs(rank: int) -> tuple[Tensor]:
        draw = torch.Generator().manual_seed(rank)
        return (torch.randn(parts[rank], 2, dtype=torch.float64, generator=draw),)

    assert gm.verify.gradcheck(loss, inputs, world_size=2, order=2, forward=True)

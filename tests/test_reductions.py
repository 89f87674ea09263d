"""max, min, prod and logsumexp over the ranks: values and gradients at every order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.types import Convention, Reduction

Threads = Callable[[int], Callable[..., list[Any]]]
SIZE = 3

DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "prod": lambda t: t.prod(0),
    "logsumexp": lambda t: t.logsumexp(0),
}

OPERANDS = {
    "random": torch.randn(SIZE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "ties": torch.tensor([[1.0, 2, 3, 0], [1, 2, 1, 0], [0, 2, 3, 0]], dtype=torch.float64),
    "zeros": torch.tensor([[0.0, 0, 2, 0], [3, 0, 5, 0], [2, 4, 7, 0]], dtype=torch.float64),
    "large": torch.tensor(
        [[1e4, -1e4, 7e2, 0], [9e3, -2e4, 8e2, 0], [1e4, -1e4, 9e2, 1]], dtype=torch.float64
    ),
}


@pytest.mark.parametrize("dst", [gm.R, gm.I])
@pytest.mark.parametrize("operand", ["random", "ties", "zeros"])
@pytest.mark.parametrize("op", DENSE)
def test_gradients_of_three_orders_match_torch_on_one_process(
    op: Reduction, operand: str, dst: Convention, threads: Threads
) -> None:
    whole = OPERANDS[operand]

    def on_each_rank() -> list[Tensor]:
        rank = gm.axis().rank
        x = whole[rank].clone().requires_grad_()
        y = gm.all_reduce(x, op=op, dst=dst)
        factor = 1 + rank if dst is gm.R else 1
        value, out = (factor * torch.sin(y + 0.5)).sum(), [y.detach()]
        for _ in range(3):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            out.append(g.detach())
            # Only this rank's own elements, so that the sum over the ranks is one function of all of them.
            value = (g**2).sum()
        return out

    x = whole.clone().requires_grad_()
    y = DENSE[op](x)
    value = ((SIZE * (SIZE + 1) // 2 if dst is gm.R else 1) * torch.sin(y + 0.5)).sum()
    got = threads(SIZE)(on_each_rank)
    for rank in range(SIZE):
        if op in ("max", "min"):
            assert torch.equal(got[rank][0], y)
        torch.testing.assert_close(got[rank][0], y.detach(), rtol=1e-14, atol=1e-14)
    # From the second order on, the losses of the ranks are no longer alike, as an I result promises.
    orders = 1 if dst is gm.I else 3
    for order in range(orders):
        (g,) = torch.autograd.grad(value, x, create_graph=True)
        mine = torch.stack([rank[order + 1] for rank in got])
        torch.testing.assert_close(mine, g.detach(), rtol=1e-10, atol=1e-12)
        value = (g**2).sum()


@pytest.mark.parametrize("op", DENSE)
def test_forward_mode_and_vmap_match_torch(op: Reduction, threads: Threads) -> None:
    whole = OPERANDS["random"]

    def on_each_rank() -> tuple[Tensor, Tensor]:
        x = whole[gm.axis().rank]
        reduce = lambda x: gm.all_reduce(x, op=op, dst=gm.R)
        _, tangent = torch.func.jvp(reduce, (x,), (x.cos(),))
        return tangent, torch.func.vmap(reduce, in_dims=1)(x.view(2, 2))

    _, tangent = torch.func.jvp(DENSE[op], (whole,), (whole.cos(),))
    batched = DENSE[op](whole).view(2, 2).T
    for mine, mapped in threads(SIZE)(on_each_rank):
        torch.testing.assert_close(mine, tangent, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(mapped, batched, rtol=1e-13, atol=1e-13)


def test_logsumexp_does_not_overflow_where_torchs_does_not(threads: Threads) -> None:
    whole = OPERANDS["large"]

    def on_each_rank() -> tuple[Tensor, Tensor | None]:
        x = whole[gm.axis().rank].clone().requires_grad_()
        y = gm.all_reduce(x, op="logsumexp", dst=gm.I)
        y.sum().backward()
        return y.detach(), x.grad

    x = whole.clone().requires_grad_()
    x.logsumexp(0).sum().backward()
    assert x.grad is not None
    for rank, (y, g) in enumerate(threads(SIZE)(on_each_rank)):
        torch.testing.assert_close(y, whole.logsumexp(0), rtol=1e-14, atol=0)
        torch.testing.assert_close(g, x.grad[rank], rtol=1e-12, atol=1e-300)


def test_logsumexp_of_nothing_but_minus_infinity_has_a_zero_gradient(threads: Threads) -> None:
    def on_each_rank() -> tuple[float, float]:
        x = torch.tensor(-torch.inf, requires_grad=True)
        y = gm.all_reduce(x, op="logsumexp", dst=gm.I)
        y.backward()
        assert x.grad is not None
        return y.item(), x.grad.item()

    assert threads(2)(on_each_rank) == [(-torch.inf, 0.0)] * 2


def test_infinite_and_missing_values_come_through_max_and_min(threads: Threads) -> None:
    whole = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0], [torch.inf, 2.0, 0.0, -0.0]])

    def on_each_rank() -> tuple[Tensor, Tensor, Tensor | None]:
        x = whole[gm.axis().rank].clone().requires_grad_()
        y = gm.all_reduce(x, op="max", dst=gm.I)
        y[:2].sum().backward()
        return y.detach(), gm.all_reduce(x.detach(), op="min", dst=gm.I), x.grad

    got = threads(2)(on_each_rank)
    for y, low, _ in got:
        assert torch.equal(y.nan_to_num(nan=9), whole.amax(0).nan_to_num(nan=9))
        assert torch.equal(low.nan_to_num(nan=9), whole.amin(0).nan_to_num(nan=9))
    assert [g.tolist()[:2] for _, _, g in got] == [[0.5, 0.0], [0.5, 1.0]]


def test_integers_and_bools_have_max_and_min(threads: Threads) -> None:
    def on_each_rank() -> tuple[int, int, bool, int]:
        rank = gm.axis().rank
        return (
            gm.all_reduce(torch.tensor(rank), op="max", dst=gm.I).item(),
            gm.all_reduce(torch.tensor(rank, dtype=torch.int16), op="min", dst=gm.I).item(),
            gm.all_reduce(torch.tensor(rank == 1), op="max", dst=gm.I).item(),
            gm.all_reduce(torch.tensor(rank + 2), op="prod", dst=gm.I).item(),
        )

    assert threads(3)(on_each_rank) == [(2, 0, True, 24)] * 3


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("max", torch.complex64),
        ("logsumexp", torch.complex64),
        ("logsumexp", torch.int64),
        ("mean", torch.int64),
        ("mean", torch.bool),
        ("sum", torch.bool),
        ("prod", torch.bool),
    ],
)
def test_a_dtype_without_a_rule_is_refused_on_every_rank(
    op: Reduction, dtype: torch.dtype, threads: Threads
) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.DTypeError) as caught:
            gm.all_reduce(torch.ones(2, dtype=dtype), op=op, dst=gm.R)
        return str(caught.value)

    for text in threads(2)(on_each_rank):
        assert "gradmesh.all_reduce" in text
        assert str(dtype) in text
        assert "remedy" in text


def test_mean_divides_values_and_gradients_by_the_number_of_ranks(threads: Threads) -> None:
    def on_each_rank() -> tuple[float, float, list[float], float]:
        rank = gm.axis().rank
        x = torch.tensor(3.0 * rank, requires_grad=True)
        y = gm.all_reduce(x, op="mean", dst=gm.R)
        (y * (1 + rank)).backward()
        z = torch.arange(3.0, requires_grad=True)
        part = gm.reduce_scatter(z, op="mean")
        part.sum().backward()
        assert x.grad is not None
        assert z.grad is not None
        return y.item(), x.grad.item(), part.tolist(), z.grad[0].item()

    third = pytest.approx(1 / 3)
    assert threads(3)(on_each_rank) == [(3.0, 2.0, [float(r)], third) for r in range(3)]


@pytest.mark.parametrize("value", [torch.finfo(torch.float16).min, torch.finfo(torch.float16).max, 0.1])
def test_a_tie_at_the_ends_of_float16_stays_exact(value: float, threads: Threads) -> None:
    def on_each_rank() -> tuple[float, float]:
        x = torch.tensor([value], dtype=torch.float16, requires_grad=True)
        y = gm.all_reduce(x, op="max", dst=gm.I)
        y.sum().backward()
        assert x.grad is not None
        return y.item(), x.grad.item()

    exact = torch.tensor(value, dtype=torch.float16).item()
    assert threads(3)(on_each_rank) == [(exact, pytest.approx(1 / 3, rel=1e-3))] * 3


def test_low_precision_communication_finds_the_rank(threads: Threads) -> None:
    def on_each_rank() -> tuple[float, list[float]]:
        x = torch.tensor([1.001 + gm.axis().rank], requires_grad=True)
        y = gm.all_reduce(x, op="max", dst=gm.I, comm_dtype=torch.bfloat16)
        y.sum().backward()
        assert x.grad is not None
        return y.item(), x.grad.tolist()

    assert threads(2)(on_each_rank) == [(2.0, [0.0]), (2.0, [1.0])]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex32])
@pytest.mark.parametrize("op", ["sum", "max", "prod"])
def test_a_dtype_that_torch_only_stores_is_refused(
    op: Reduction, dtype: torch.dtype, threads: Threads
) -> None:
    def on_each_rank() -> None:
        with pytest.raises(gm.DTypeError, match=r"gradmesh\.all_reduce"):
            gm.all_reduce(torch.zeros(2, dtype=dtype), op=op, dst=gm.R)

    threads(2)(on_each_rank)

"""`scale_gradient`: the value is the operand, and every derivative through it is multiplied, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]
FACTORS = [0.25, -3, torch.tensor(0.25), torch.tensor(-3.0, dtype=torch.float64)]


def data() -> Tensor:
    return torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def cube(x: Tensor, s: float | Tensor) -> Tensor:
    return gm.scale_gradient(x, s) ** 3


@pytest.mark.parametrize("s", FACTORS)
def test_the_nth_derivative_has_the_factor_n_times(s: float | Tensor) -> None:
    x, factor = data().requires_grad_(), float(s)
    value = cube(x, s)
    assert torch.equal(value, x**3)
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(first, factor * 3 * x**2)
    torch.testing.assert_close(second, factor**2 * 6 * x)
    torch.testing.assert_close(third, torch.full_like(x, factor**3 * 6))


@pytest.mark.parametrize("s", FACTORS)
def test_all_modes_have_one_derivative(s: float | Tensor) -> None:
    x = data()
    first, second = float(s) * 3 * x**2, torch.diag(float(s) ** 2 * 6 * x)

    def total(x: Tensor) -> Tensor:
        return cube(x, s).sum()

    tangent = torch.linspace(1, 2, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.func.jvp(lambda x: cube(x, s), (x,), (tangent,))[1], first * tangent)
    with forward_ad.dual_level():
        dual = cube(forward_ad.make_dual(x, tangent), s)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, first * tangent)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda x: cube(x, s)))(x), first)
    for one in (torch.func.jacfwd, torch.func.jacrev):
        for other in (torch.func.jacfwd, torch.func.jacrev):
            torch.testing.assert_close(one(other(total))(x), second)


def test_a_factor_for_each_row_under_vmap() -> None:
    x, s = data(), torch.arange(5.0, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(cube))(x, s), s * 3 * x**2)


@pytest.mark.parametrize("s", [0.25, torch.tensor(0.25, dtype=torch.float64)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_compiles_as_one_graph(backend: str, s: float | Tensor) -> None:
    torch.compiler.reset()
    x = data().requires_grad_()
    value = torch.compile(cube, fullgraph=True, backend=backend)(x, s)
    value.sum().backward()
    torch.testing.assert_close(value, x**3)
    torch.testing.assert_close(x.grad, 0.25 * 3 * x.detach() ** 2)


def test_a_compiled_program_refuses_forward_mode() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: cube(x, 0.5), backend="eager", fullgraph=True)
    with forward_ad.dual_level(), pytest.raises(Exception, match=r"forward[- ]mode"):
        compiled(forward_ad.make_dual(data(), data()))


def test_value_is_kept_bitwise_in_separate_memory() -> None:
    x = torch.tensor([-0.0, 1.0, float("inf"), float("nan")])
    y = gm.scale_gradient(x, 0.1)
    assert x.view(torch.int32).tolist() == y.view(torch.int32).tolist()
    assert y.data_ptr() != x.data_ptr()
    strided = gm.scale_gradient(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), 2)
    assert strided.is_contiguous(memory_format=torch.channels_last)


def test_the_factor_keeps_the_dtype_and_the_rule_holds_for_complex_numbers() -> None:
    narrow = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    gm.scale_gradient(narrow, torch.tensor(0.5, dtype=torch.float64)).sum().backward()
    assert narrow.grad is not None
    assert narrow.grad.dtype is torch.bfloat16
    z = torch.tensor([1 + 2j], requires_grad=True)
    (plain,) = torch.autograd.grad((z.abs() ** 3).sum(), z)
    (scaled,) = torch.autograd.grad((gm.scale_gradient(z, 0.5).abs() ** 3).sum(), z)
    torch.testing.assert_close(scaled, 0.5 * plain)


def test_a_factor_that_is_written_before_backward_is_an_error() -> None:
    x, s = data().requires_grad_(), torch.tensor(2.0)
    loss = cube(x, s).sum()
    s.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "s", [True, 1j, "2", None, [1.0], torch.ones(1), torch.tensor(1j), torch.tensor(True)]
)
def test_non_real_number_raises(s: Any) -> None:
    with pytest.raises(gm.ArgumentError, match="s must be one real number"):
        gm.scale_gradient(data(), s)


def test_factor_requiring_grad_and_non_tensor_operand_raise() -> None:
    with pytest.raises(gm.ArgumentError, match="s must not require grad"):
        gm.scale_gradient(data(), torch.tensor(1.0, requires_grad=True))
    with pytest.raises(gm.ArgumentError, match="x must be a tensor"):
        gm.scale_gradient([data()], 2.0)  # type: ignore[arg-type]


def test_a_gather_whose_gradients_are_averaged(threads: Threads) -> None:
    """The recipe of docs/migration.md: at every order the factor 1 / W of each pass through the gather."""

    def on_each_rank(averaged: bool) -> tuple[Tensor, Tensor]:
        rank, size = gm.rank(), gm.world_size()
        x = torch.randn(
            3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
        ).requires_grad_()
        y = gm.all_gather(x)
        if averaged:
            y = gm.scale_gradient(y, 1 / size)
        (first,) = torch.autograd.grad((1 + rank) * (y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * (2 + rank)).sum(), x)
        return first.detach(), second

    summed, averaged = threads(3)(on_each_rank, False), threads(3)(on_each_rank, True)
    for (first, second), (first_mean, second_mean) in zip(summed, averaged, strict=True):
        torch.testing.assert_close(first_mean, first / 3)
        torch.testing.assert_close(second_mean, second / 9)


def test_types_pass_through(threads: Threads) -> None:
    def on_each_rank() -> None:
        with gm.typed():
            x = torch.tensor([1.0 + gm.rank()], requires_grad=True)
            gathered = gm.scale_gradient(gm.all_gather(x), 0.5)
            gm.assert_type(gathered, gm.R)
            gm.assert_type(gm.scale_gradient(x, 0.5), gm.V)

    threads(2)(on_each_rank)

"""Fourier transforms of tensors that are cut over ranks: torch's own on the whole, in every derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from tests.field_programs import far
from tests.fourier_programs import KINDS, Program, deviation, random_program

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]
fields = gm.nn.fields
CLOSE = 1e-10


def test_numbers_without_fractions_are_transformed_also_where_a_rank_has_none(threads: Threads) -> None:
    x = torch.arange(6).view(3, 2)
    seen = threads(2)(lambda: fields.rfftn(x[gm.axis().slice((3, 0))], sizes=(3, 0)))
    torch.testing.assert_close(torch.cat(seen), torch.fft.rfftn(x))


@pytest.mark.parametrize("kind", KINDS)
def test_random_transforms_have_the_value_and_both_derivatives_of_torchs(threads: Threads, kind: str) -> None:
    for seed in range(20):
        ranks, program = random_program(seed, kind)
        assert max(threads(ranks)(deviation, program)) < CLOSE, program


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_transforms_have_the_value_and_both_derivatives_of_torchs(
    threads: Threads, kind: str
) -> None:
    for seed in range(1000, 1600):
        ranks, program = random_program(seed, kind)
        assert max(threads(ranks)(deviation, program)) < CLOSE, program


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_transforms_on_processes_are_torchs(processes: Callable[[int], Run], kind: str) -> None:
    program = Program(
        kind, 3, (5, 4, 3), (4, 1), 0, None, 1, None, 5 if kind == "irfftn" else None, kind == "rfftn", -1
    )
    assert max(processes(2)(deviation, program)) < CLOSE


@pytest.mark.parametrize("out", [None, (1, 2), (2, 1), (1, 0)])
def test_a_pencil_is_cut_over_two_axes(threads: Threads, out: tuple[int, int] | None) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, 7, generator=draw, dtype=torch.float64)

    def found() -> float:
        gm.mesh(a=2, b=2)
        a, b = gm.axis("a"), gm.axis("b")
        own = x[a.slice((1, 4)), b.slice((2, 2))]
        options: dict[str, Any] = {
            "axis": ("a", "b"),
            "dim": (0, 1),
            "out_dim": out,
            "sizes": ((1, 4), (2, 2)),
        }
        half = fields.rfftn(own, **options)
        whole = torch.fft.rfftn(x)
        first, second = out or (0, 1)
        index: list[Any] = [slice(None)] * 3
        index[first], index[second] = a.slice(whole.shape[first]), b.slice(whole.shape[second])
        back = fields.irfftn(half, n=7, axis=("a", "b"), dim=(first, second), out_dim=(0, 1), sizes="auto")
        home = x[a.slice(5), b.slice(4)]
        return max(far(half, whole[tuple(index)]), far(back, home))

    assert max(threads(4)(found)) < CLOSE


def test_another_dim_to_end_with_saves_a_transpose() -> None:
    def calls(out: int | None) -> int:
        def one() -> None:
            fields.fftn(torch.ones(2, 4, dtype=torch.complex128), out_dim=out)

        return len(list(gm.verify.simulate(one, 2).events.select(rank=0)))

    assert calls(1) == 1
    assert calls(None) == 2


def test_a_tensor_of_one_dim_is_transformed_behind_a_dim_of_one(threads: Threads) -> None:
    x = torch.arange(5.0)

    def found() -> float:
        y = fields.fftn(x[gm.axis().slice(5)].unsqueeze(0), dim=1, dims=(1,), sizes=(3, 2))
        return far(y[0], torch.fft.fft(x)[gm.axis().slice(5)])

    assert max(threads(2)(found)) < 1e-6


def _input(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(gm.rank())
    dtype = torch.float64 if kind == "rfftn" else torch.complex128
    return torch.randn(2, 3, generator=draw, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
def test_an_audit_finds_nothing(kind: str) -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Tensor]:
        return lambda x: getattr(fields, kind)(x), _input(kind)

    assert not gm.verify.audit(build, world_size=2).findings


def test_finite_differences_agree_to_the_second_order() -> None:
    def loss(x: Tensor) -> Tensor:
        y = fields.rfftn(x, dim=1)
        return (1 + gm.rank()) * (fields.irfftn(y * y.abs(), n=4, dim=1, sizes=(2, 1)) ** 3).sum()

    def inputs(rank: int) -> tuple[Tensor]:
        draw = torch.Generator().manual_seed(rank)
        return (torch.randn(3, 2, generator=draw, dtype=torch.float64).requires_grad_(),)

    assert gm.verify.gradcheck(loss, inputs, world_size=2, order=2)


def _compiled(kind: str) -> float:
    x = _input(kind)

    def loss(x: Tensor) -> Tensor:
        return (getattr(fields, kind)(x).abs() ** 3).sum()

    eager = torch.autograd.grad(loss(x), x)[0]
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)[0]
    return far(compiled, eager)


@pytest.mark.slow
@pytest.mark.processes
def test_transforms_compile_whole(worlds: Callable[..., Any]) -> None:
    for kind in KINDS:
        assert max(worlds(2, "shm", 240).run(_compiled, kind)) < 1e-12


X = torch.ones(2, 3)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "half of complex": (lambda: fields.rfftn(X + 0j), "rfftn does not support complex tensors"),
    "a dim twice": (lambda: fields.fftn(X, dims=(0, 0)), "has repeated dims, or a wrong length"),
    "two dims for one axis": (lambda: fields.fftn(X, out_dim=(0, 1)), "has repeated dims, or a wrong length"),
    "no other dim": (lambda: fields.fftn(X[0]), "all dims are sharded"),
    "another norm": (lambda: fields.fftn(X[: gm.rank()], sizes=(0, 1), norm="no"), "norm must be"),  # type: ignore[arg-type]
    "halves": (lambda: fields.fftn(X[: gm.rank()].half(), sizes=(0, 1)), "unsupported dtype"),
    "no points": (
        lambda: fields.irfftn(X[: gm.rank()], sizes=(0, 1), n=0),
        "size of the real result is not positive",
    ),
    "no points of one mode": (
        lambda: fields.irfftn(X[: gm.rank(), :1], sizes=(0, 1)),
        "size of the real result is not positive",
    ),
    "no rows": (lambda: fields.fftn(X[:0]), "a transformed dim is empty"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_arguments_raise_on_every_rank(threads: Threads, what: str) -> None:
    fn, words = WRONG[what]

    def refused() -> str:
        with pytest.raises(gm.GradmeshError) as error:
            fn()
        return str(error.value)

    for text in threads(2)(refused):
        assert words in text

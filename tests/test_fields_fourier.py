"""Fourier transforms of tensors that are cut over ranks: torch's own on the whole, in every derivative."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from tests.field_programs import dense_slopes, far, slopes

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]
fields = gm.nn.fields
KINDS = ("fftn", "ifftn", "rfftn", "irfftn")
CLOSE = 1e-10


@dataclass(frozen=True)
class Program:
    """A transform.

    Attributes:
        kind: which one.
        seed: of the values.
        shape: of the whole tensor.
        parts: each rank's rows along `dim`.
        dim, dims, out_dim, norm: as the functions take them.
        n: the size of the last real dim.
        real: whether the tensor is real.
        idle: a rank whose loss leaves its rows out; -1: there is none.
    """

    kind: str
    seed: int
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    dim: int
    dims: tuple[int, ...] | None
    out_dim: int | None
    norm: Any
    n: int | None
    real: bool
    idle: int


def random_program(seed: int, kind: str) -> tuple[int, Program]:
    """How many ranks, and what they transform."""
    draw = random.Random(seed)
    ranks, number = draw.choice([1, 2, 3, 4]), draw.choice([2, 2, 3])
    shape = [draw.choice([1, 2, 3, 4, 5, 7]) for _ in range(number)]
    parts = tuple(draw.choice([0, 1, 2, 3]) for _ in range(ranks))
    parts = parts if sum(parts) else (*parts[1:], 3)
    dim = draw.randrange(number)
    shape[dim] = sum(parts)
    dims = None
    if draw.random() < 0.7:
        dims = tuple(draw.sample(range(number), draw.randint(1, number)))
    last = number - 1 if dims is None else dims[-1]
    most = 2 * shape[last] - 1
    n = draw.choice([most, most + 1, max(most - 1, 1)]) if kind == "irfftn" else None
    real = kind == "rfftn" or (kind != "irfftn" and draw.random() < 0.3)
    out = draw.choice([None, *range(number)])
    norm = draw.choice([None, "backward", "ortho", "forward"])
    idle = draw.choice([-1, draw.randrange(ranks)]) if ranks > 1 else -1
    return ranks, Program(kind, seed, tuple(shape), parts, dim, dims, out, norm, n, real, idle)


def _loss(y: Tensor) -> Tensor:
    """Of complex values too; with a second derivative, and no symmetry."""
    real = y.real + 2 * y.imag if y.is_complex() else y
    return (real**3).sum() + (y.abs() ** 2).sum()


def deviation(program: Program) -> float:
    """On a rank: how far value, first and second slopes are from torch's own."""
    kind = torch.float64 if program.real else torch.complex128
    draw = torch.Generator().manual_seed(program.seed)
    x = torch.randn(program.shape, generator=draw, dtype=kind).requires_grad_()
    dims = tuple(range(x.dim())) if program.dims is None else program.dims
    torchs: Any = getattr(torch.fft, program.kind)
    if program.n is None:
        y = torchs(x, dim=dims, norm=program.norm)
    else:
        y = torchs(x, [*(x.shape[d] for d in dims[:-1]), program.n], dim=dims, norm=program.norm)
    before, after = (slice(None),) * program.dim, program.dim if program.out_dim is None else program.out_dim
    mine = (*before, gm.axis().slice(program.parts))
    own = x.detach()[mine].requires_grad_()
    options = {"dim": program.dim, "dims": program.dims, "out_dim": program.out_dim, "norm": program.norm}
    if program.n is not None:
        options["n"] = program.n
    with gm.ordered():
        z = getattr(fields, program.kind)(own, sizes=program.parts, **options)
        loss = (own.abs() ** 2).sum() * 0 if gm.rank() == program.idle else (1 + gm.rank()) * _loss(z)
        got = slopes(loss, [own])
    rows = gm.sizes(z, dim=after)
    pieces = y.split(rows, after)
    right = torch.stack(
        [(1 + r) * _loss(p) for r, p in enumerate(pieces) if r != program.idle] or [x.abs().sum() * 0]
    ).sum()
    expected = [slope[mine] for slope in dense_slopes(right, [x])]
    pairs = [(z.detach(), pieces[gm.rank()].detach()), *zip(got, expected, strict=True)]
    return max(far(a, b) for a, b in pairs)


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


@pytest.mark.processes
def test_transforms_compile_whole(worlds: Callable[..., Any]) -> None:
    for kind in KINDS:
        assert max(worlds(2, "shm", 240).run(_compiled, kind)) < 1e-12


X = torch.ones(2, 3)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "half of complex": (lambda: fields.rfftn(X + 0j), "real tensors alone"),
    "a dim twice": (lambda: fields.fftn(X, dims=(0, 0)), "named twice"),
    "two dims for one axis": (lambda: fields.fftn(X, out_dim=(0, 1)), "named twice"),
    "no other dim": (lambda: fields.fftn(X[0]), "no dim to cut"),
    "no rows": (lambda: fields.fftn(X[:0]), "without rows"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_right_is_refused_on_every_rank(threads: Threads, what: str) -> None:
    fn, words = WRONG[what]

    def refused() -> str:
        with pytest.raises(gm.GradmeshError) as error:
            fn()
        return str(error.value)

    for text in threads(2)(refused):
        assert words in text

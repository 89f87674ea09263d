"""Layers on fields that are cut over ranks: values and both derivatives are torch's on the whole field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmesh as gm
from tests import field_grids
from tests.field_programs import KINDS, Program, deviation, far, random_program

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]

# torch says so of its own "same" with an even kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
CLOSE = 1e-8


@pytest.mark.parametrize("kind", KINDS)
def test_random_layers_have_the_value_and_both_derivatives_of_the_whole(threads: Threads, kind: str) -> None:
    for seed in range(12):
        ranks, program = random_program(seed, kind)
        assert max(threads(ranks)(deviation, program)) < CLOSE, program


def test_random_layers_over_two_axes_have_the_value_and_both_derivatives_of_the_whole(
    threads: Threads,
) -> None:
    for seed in range(16):
        grid = field_grids.random_grid(seed)
        ranks = len(grid.parts[0]) * len(grid.parts[1])
        assert max(threads(ranks)(field_grids.deviation, grid)) < CLOSE, grid


def test_outputs_that_no_row_reaches_are_the_bias(threads: Threads) -> None:
    options = {"kernel_size": 1, "stride": 3, "padding": 2, "output_padding": 1}
    assert max(threads(3)(deviation, Program("transposed", 1, (2,), (0, 1, 1), 0, options))) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_layers_have_the_value_and_both_derivatives_of_the_whole(
    threads: Threads, kind: str
) -> None:
    for seed in range(1000, 1400):
        ranks, program = random_program(seed, kind)
        assert max(threads(ranks)(deviation, program)) < CLOSE, program


@pytest.mark.slow
def test_many_random_layers_over_two_axes_have_both_derivatives_of_the_whole(threads: Threads) -> None:
    for seed in range(1000, 1400):
        grid = field_grids.random_grid(seed)
        ranks = len(grid.parts[0]) * len(grid.parts[1])
        assert max(threads(ranks)(field_grids.deviation, grid)) < CLOSE, grid


FIXED = [
    Program(
        "conv", 1, (5, 4), (4, 1), 0, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, auto=True
    ),
    Program("transposed", 2, (4,), (1, 3), 0, {"kernel_size": 4, "stride": 2, "padding": 1}),
    Program("spectral", 3, (5, 6), (2, 4), 1, {"modes": [2, 3]}),
]


@pytest.mark.processes
@pytest.mark.parametrize("program", FIXED, ids=lambda program: program.kind)
def test_layers_on_processes_are_torchs_on_the_whole(
    processes: Callable[[int], Run], program: Program
) -> None:
    assert max(processes(2)(deviation, program)) < CLOSE


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_nearest_rows_are_rounded_as_torch_rounds_them_in_so_many_dims(threads: Threads, dims: int) -> None:
    """By 2.3 a field of two dims has other nearest rows than one of one or three, of which torch's slopes are wrong."""
    x = _rows(0)[:, :1].view(1, 1, 3, *(1,) * (dims - 1)).expand(1, 1, *(3,) * dims)
    right = nn.functional.interpolate(x, scale_factor=2.3)

    def found() -> tuple[Tensor, Tensor]:
        own = x[:, :, gm.axis().slice((1, 2))].clone().requires_grad_()
        y = gm.nn.fields.interpolate(own, scale_factor=2.3, sizes=(1, 2))
        slope = torch.autograd.grad((y**2).sum() / 2, own)[0]
        return gm.all_gather(y.detach(), dim=2, sizes="auto"), gm.all_gather(slope, dim=2, sizes=(1, 2))

    for y, slope in threads(2)(found):
        assert torch.equal(y, right)
        # Each output is one row, so that the slopes by the rows, times the rows, have the outputs' squares for a sum.
        torch.testing.assert_close((slope * x).sum(), (right**2).sum())


@pytest.mark.parametrize(
    ("dtype", "rows", "mode"), [(torch.float32, 49, "nearest"), (torch.bfloat16, 6, "nearest-exact")]
)
def test_nearest_rows_are_rounded_in_the_precision_of_the_field(
    threads: Threads, dtype: torch.dtype, rows: int, mode: Any
) -> None:
    x = torch.arange(rows).to(dtype).view(1, 1, rows)
    where: dict[str, Any] = {"scale_factor": 2.3} if mode == "nearest" else {"size": 37}
    right = nn.functional.interpolate(x, mode=mode, **where)
    other = nn.functional.interpolate(x.double(), mode=mode, **where)
    assert not torch.equal(right.double(), other)  # else nothing would be shown

    def found() -> Tensor:
        parts = (rows - 4, 4)
        y = gm.nn.fields.interpolate(x[..., gm.axis().slice(parts)], mode=mode, sizes=parts, **where)
        return gm.all_gather(y, dim=2, sizes="auto")

    assert all(torch.equal(y, right) for y in threads(2)(found))


def test_a_rank_without_rows_has_the_dtype_of_autocast(threads: Threads) -> None:
    def found() -> list[torch.dtype]:
        layer = gm.nn.HaloConv1d(1, 1, 3, padding=1, stride=2, sizes=(4, 0))
        back = gm.nn.HaloConvTranspose1d(1, 1, 2, stride=2, sizes=(2, 0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(torch.ones(1, 1, (4, 0)[gm.rank()]))
            return [y.dtype, back(y).dtype]

    assert threads(2)(found) == [[torch.bfloat16] * 2] * 2


@pytest.mark.parametrize("shape", [(1, 1, 6), (1, 1, 4, 6)], ids=["1d", "2d"])
def test_modes_of_halves_are_those_of_float32(threads: Threads, shape: tuple[int, ...]) -> None:
    x = torch.arange(6.0).sin().expand(shape).bfloat16()

    def found() -> tuple[torch.dtype, bool]:
        layer = gm.nn.SpectralConv(1, 1, (2,) * (len(shape) - 2), sizes="auto")
        own = x[:, :, gm.axis().slice((3, 1) if len(shape) == 4 else (5, 1))]
        y = layer(own)
        return y.dtype, torch.equal(y, layer(own.float()).bfloat16())

    assert threads(2)(found) == [(torch.bfloat16, True)] * 2


def test_a_last_window_may_be_larger_than_the_field(threads: Threads) -> None:
    def found() -> list[float]:
        own = torch.full((1, 1, 1), 2.0)[..., gm.axis().slice((0, 1))]
        return gm.nn.fields.max_pool(own, 2, ceil_mode=True, sizes=(0, 1)).flatten().tolist()

    right = nn.functional.max_pool1d(torch.full((1, 1, 1), 2.0), 2, ceil_mode=True)
    assert threads(2)(found) == [[], right.flatten().tolist()]


def _made(kind: str) -> nn.Module:
    """A layer of each kind for rows (3, 1) of a field of two channels and one dim."""
    where: dict[str, Any] = {"sizes": (3, 1)}
    made: dict[str, Callable[[], nn.Module]] = {
        "conv": lambda: gm.nn.HaloConv1d(2, 2, 3, padding=1, **where).double(),
        "reflected": lambda: gm.nn.HaloConv1d(2, 2, 3, padding=2, padding_mode="reflect", **where).double(),
        "transposed": lambda: gm.nn.HaloConvTranspose1d(2, 2, 3, stride=2, **where).double(),
        "max_pool": lambda: gm.nn.HaloMaxPool(2, stride=1, **where),
        "avg_pool": lambda: gm.nn.HaloAvgPool(2, stride=1, **where),
        "spectral": lambda: gm.nn.SpectralConv(2, 2, 3, **where, dtype=torch.float64),
    }
    layer = made[kind]()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            draw = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))
    return layer


MADE = ("conv", "reflected", "transposed", "max_pool", "avg_pool", "spectral")


def _rows(rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 + rank)
    return torch.randn(1, 2, (3, 1)[rank], generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("kind", MADE)
def test_finite_differences_agree_to_the_second_order(kind: str) -> None:
    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        layer = _made(kind)
        named = dict(zip([name for name, _ in layer.named_parameters()], parameters, strict=True))
        return (1 + gm.rank()) * (torch.func.functional_call(layer, named, (x,)) ** 3).sum()

    def inputs(rank: int) -> tuple[Any, ...]:
        layer = gm.launch(lambda: _made(kind), 2, backend="threads")[0]
        # The layer sums its parameters' gradients: each rank has the whole.
        whole = [gm.verify.Input(p.detach().clone().requires_grad_(), gm.I) for p in layer.parameters()]
        return (_rows(rank).requires_grad_(), *whole)

    assert gm.verify.gradcheck(loss, inputs, world_size=2, order=2)


@pytest.mark.parametrize("kind", MADE)
def test_an_audit_finds_nothing(kind: str) -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Tensor]:
        return _made(kind).requires_grad_(False), _rows(gm.rank())

    assert not gm.verify.audit(build, world_size=2).findings


def test_training_a_network_is_that_of_one_process() -> None:
    def network(kinds: tuple[Any, ...], **where: Any) -> nn.Module:
        conv, up, pool = kinds
        return nn.Sequential(
            conv(1, 4, 3, padding="same", padding_mode="circular", **where),
            nn.Tanh(),
            pool(2, **where),
            up(4, 1, 4, stride=2, padding=1, **where),
        ).double()

    def parallel(module: nn.Module) -> nn.Module:
        made = network((gm.nn.HaloConv2d, gm.nn.HaloConvTranspose2d, gm.nn.HaloAvgPool), sizes="auto")
        made.load_state_dict(module.state_dict())
        return made

    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 6, 4), torch.randn(2, 1, 6, 4)

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return ((module(x) - y) ** 2).sum()

    gm.verify.same_as_single(
        loss,
        inputs=(gm.verify.Shard(x, dim=2), gm.verify.Shard(y, dim=2)),
        world_size=3,
        module=lambda: network((nn.Conv2d, nn.ConvTranspose2d, nn.AvgPool2d)),
        parallel=parallel,
        parameters={"*": gm.I},
        steps=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.001),
    )


def test_two_axes_cut_two_dims_of_a_field(threads: Threads) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 5, 6, generator=draw, dtype=torch.float64)
    dense = nn.Conv2d(2, 3, 3, stride=(1, 2), padding=1, dilation=(2, 1)).double()
    right = dense(x)
    slope = torch.autograd.grad((right**3).sum(), [*dense.parameters()])

    def found() -> float:
        gm.mesh(a=2, b=2)
        options: dict[str, Any] = {"axis": ("a", "b"), "dim": (2, 3), "sizes": ((4, 1), (3, 3))}
        layer = gm.nn.HaloConv2d(2, 3, 3, stride=(1, 2), padding=1, dilation=(2, 1), **options).double()
        layer.load_state_dict(dense.state_dict())
        own = x[:, :, gm.axis("a").slice((4, 1)), gm.axis("b").slice((3, 3))]
        y = layer(own)
        rows, columns = layer.output_sizes(((4, 1), (3, 3)))
        part = right.detach()[:, :, gm.axis("a").slice(rows), gm.axis("b").slice(columns)]
        slopes = torch.autograd.grad((y**3).sum(), [*layer.parameters()])
        return max(far(y.detach(), part), *map(far, slopes, slope))

    assert max(threads(4)(found)) < CLOSE


def test_without_replication_a_rank_has_one_term_of_the_gradient(threads: Threads) -> None:
    def found(layer: Callable[..., nn.Module]) -> tuple[Tensor, Tensor]:
        slopes = []
        for replicated in (True, False):
            module = layer(replicated=replicated)
            (weight,) = module.parameters()
            with torch.no_grad():
                weight.copy_(torch.arange(weight.numel()).view_as(weight))
            slopes.append(torch.autograd.grad((module(_rows(gm.rank())) ** 2).sum(), weight)[0])
        return slopes[0], slopes[1]

    for layer in (
        lambda **o: gm.nn.HaloConv1d(2, 1, 3, bias=False, padding=1, sizes=(3, 1), **o).double(),
        lambda **o: gm.nn.SpectralConv(2, 1, 2, sizes=(3, 1), dtype=torch.float64, **o),
    ):
        (whole, one), (same, other) = threads(2)(found, layer)
        torch.testing.assert_close(whole, same)
        torch.testing.assert_close(one + other, whole)
        assert float(one.abs().max()) > 0 < float((one - whole).abs().max())


def _compiled(kinds: tuple[str, ...]) -> float:
    layers, x = [_made(kind) for kind in kinds], _rows(gm.rank()).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return torch.stack([(layer(x) ** 3).sum() for layer in layers]).sum()

    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    eager = torch.autograd.grad(loss(x), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), leaves)
    return max(map(far, compiled, eager))


@pytest.mark.processes
@pytest.mark.torch_at_least("2.10", "Dynamo cannot hash frozen dataclasses")
@pytest.mark.parametrize(
    "kinds", [("conv",), pytest.param(MADE, marks=pytest.mark.slow)], ids=["conv", "all"]
)
def test_layers_compile_whole(worlds: Callable[..., Any], kinds: tuple[str, ...]) -> None:
    assert max(worlds(2, "shm", 240).run(_compiled, kinds)) < 1e-12


X = torch.ones(1, 2, 3)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "other channels": (lambda: gm.nn.HaloConv1d(3, 1, 3)(X), "wrong number of channels or dims"),
    "other numbers, on a rank without rows too": (
        lambda: gm.nn.HaloConv1d(2, 1, 3, padding=1, sizes=(0, 3))(X[..., : 3 * gm.rank()].double()),
        "dtype differs from the weight's",
    ),
    "no batch": (lambda: gm.nn.HaloConv1d(2, 1, 3)(X[0]), "wrong number of channels or dims"),
    "a cut channel": (lambda: gm.nn.HaloConv1d(2, 1, 3, dim=1)(X), "not sharded along a spatial dim"),
    "a reflection of more than the field": (
        lambda: gm.nn.HaloConv1d(2, 1, 3, padding=6, padding_mode="reflect")(X),
        "one less with 'reflect'",
    ),
    "a small field": (lambda: gm.nn.HaloConv1d(2, 1, 9)(X), "too small"),
    "too much of a circle": (
        lambda: gm.nn.HaloConv1d(2, 1, 3, padding=7, padding_mode="circular")(X),
        "too small",
    ),
    "other rows": (
        lambda: gm.nn.HaloConv1d(2, 1, 3, sizes=(3, 2))(X[..., :1]),
        "sizes does not match this rank's number of rows",
    ),
    "dims without axes": (lambda: gm.nn.HaloConv1d(2, 1, 3, dim=(1, 2))(X), "one dim for each of 1 axes"),
    "an axis twice": (
        lambda: gm.nn.HaloConv1d(2, 1, 3, axis=(None, None), dim=(1, 2))(X),
        "is repeated",
    ),
    "an output size": (lambda: gm.nn.HaloConvTranspose1d(2, 1, 3)(X, [9]), "output_size is not supported"),
    "no output": (
        lambda: gm.nn.HaloConvTranspose1d(2, 1, 1, padding=3)(X),
        "the output is empty along dim 2",
    ),
    "much padding": (lambda: gm.nn.HaloMaxPool(2, padding=2)(X), "larger than half of the kernel"),
    "numbers of other dims": (lambda: gm.nn.HaloAvgPool((2, 2))(X), "each spatial dim"),
    "a pool of no size": (lambda: gm.nn.HaloMaxPool(0)(X), "each spatial dim"),
    "a pool with less padding than none": (lambda: gm.nn.HaloAvgPool(2, padding=-1)(X), "each spatial dim"),
    "means of whole numbers": (lambda: gm.nn.HaloAvgPool(2)(X.long()), "unsupported dtype"),
    "the largest whole number": (lambda: gm.nn.HaloMaxPool(2)(X.long()), "unsupported dtype"),
    "two grids": (
        lambda: gm.nn.fields.interpolate(X, 3, scale_factor=2.0),
        "either size or scale_factor",
    ),
    "a grid of a half": (lambda: gm.nn.fields.interpolate(X, 3.5), "each spatial dim"),  # type: ignore[arg-type]
    "a grid of four dims": (
        lambda: gm.nn.fields.interpolate(X[..., None, None, None], 3, mode="linear"),
        "each spatial dim",
    ),
    "another mode": (
        lambda: gm.nn.fields.interpolate(X, 3, mode="cubic"),  # type: ignore[arg-type]
        "unsupported interpolation mode",
    ),
    "a grid of none": (lambda: gm.nn.fields.interpolate(X, 0), "the result is empty along dim 2"),
    "many modes": (lambda: gm.nn.SpectralConv(2, 1, 5)(X), "does not match the layer"),
    "modes over two axes": (
        lambda: gm.nn.SpectralConv(2, 1, 1, axis=(None, None), dim=(2, 3))(X),  # type: ignore[arg-type]
        "axis argument",
    ),
    "no modes": (lambda: gm.nn.SpectralConv(2, 1, 0), "modes must be positive"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_arguments_raise_on_every_rank(threads: Threads, what: str) -> None:
    fn, words = WRONG[what]

    def refused() -> str:
        with pytest.raises(gm.GradmeshError) as error:
            fn()
        return str(error.value)

    assert any(words in text for text in threads(2)(refused))


def test_error_on_one_rank_notifies_the_other(threads: Threads) -> None:
    def refused() -> str:
        with pytest.raises(gm.GradmeshError) as error:
            gm.nn.HaloConv1d(2, 1, 3, padding=1)(X if gm.rank() else torch.ones(1, 3, 3))
        return type(error.value).__name__

    assert threads(2)(refused) == ["ArgumentError", "MismatchError"]

"""Small operators on tensors that are cut over ranks: torch's own on the whole, in every derivative."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import parametrizations

import gradmesh as gm
from tests.field_programs import dense_slopes, far, slopes

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]
fields = gm.nn.fields
CLOSE = 1e-9

# torch 2.11 warns for any sparse tensor, whatever is passed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta"),
]


def _parts(draw: random.Random) -> tuple[int, ...]:
    parts = tuple(draw.choice([0, 1, 2, 4]) for _ in range(draw.choice([1, 2, 3, 4])))
    return parts if sum(parts) else (*parts[1:], 3)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _apart(got: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return max(far(a.detach(), b.detach()) for a, b in zip(got, right, strict=True))


def bce(seed: int, parts: tuple[int, ...]) -> float:
    """The loss of rows, or of classes, over ranks."""
    draw = random.Random(seed)
    dim = draw.choice([0, 1])
    reduction: Any = draw.choice(["mean", "sum", "none"])
    shape = (sum(parts), 3) if dim == 0 else (3, sum(parts))
    x, target = _random(seed, *shape).requires_grad_(), (_random(seed + 1, *shape) > 0).double()
    weights = [torch.rand(3, 1).double() if dim else None, _random(seed + 2, shape[1]).abs()]
    weights = [_random(seed + 3, *w.shape).abs() if w is not None else None for w in weights]
    index = (gm.axis().slice(parts),) if dim == 0 else (slice(None), gm.axis().slice(parts))
    own = x.detach()[index].requires_grad_()
    here = [w if w is None or dim == 0 or w.dim() == 2 else w[index[1]] for w in weights]
    with gm.ordered():
        loss = fields.bce_with_logits(
            own, target[index], weight=here[0], pos_weight=here[1], reduction=reduction
        )
        got = slopes((loss**2).sum(), [own])
    right = binary_cross_entropy_with_logits(x, target, weights[0], None, None, reduction, weights[1])
    expected = [slope[index] for slope in dense_slopes((right**2).sum(), [x])]
    right = right[index] if reduction == "none" else right
    # A penalty of own slopes counts them on each rank, so that its slopes are their sum: as of the whole.
    return _apart([loss, *got], [right, *expected])


def inverses(seed: int, parts: tuple[int, ...]) -> float:
    """Inverses of a batch, some of them singular."""
    x = _random(seed, sum(parts), 3, 3)
    x[seed % len(x)] = 0
    x.requires_grad_()
    index = gm.axis().slice(parts)
    own = x.detach()[index].requires_grad_()
    right, info = torch.linalg.inv_ex(x)
    with gm.ordered():
        found = fields.inv_ex(own, sizes=parts)
        assert torch.equal(found.info, info)
        there = (info == 0).view(-1, 1, 1)
        loss = (1 + gm.rank()) * (found.inverse.where(there[index], 0) ** 2).sum()
        got = slopes(loss, [own])
    factors = torch.cat([torch.full((n, 1, 1), 1.0 + r) for r, n in enumerate(parts)]).double()
    expected = dense_slopes((factors * right.where(there, 0) ** 2).sum(), [x])
    kept = there.view(-1)
    mine = kept[index]
    pairs = zip([found.inverse, *got], [right, *expected], strict=True)
    return _apart(*map(list, zip(*[(a[mine], b[index][mine]) for a, b in pairs], strict=True)))


def diagonals(seed: int, parts: tuple[int, ...]) -> float:
    """A sparse matrix in rows, and what it makes of a vector."""
    draw = random.Random(seed)
    width, shape = sum(parts), (draw.choice([1, 3, 6]), draw.choice([2, 5, 8]))
    there = range(1 - shape[0], min(width, shape[1]))  # torch's own refuses others
    offsets = draw.sample(there, min(3, len(there)))
    x = _random(seed, len(offsets), width).requires_grad_()
    cuts = sorted(draw.randrange(shape[0] + 1) for _ in parts[1:])
    rows = tuple(b - a for a, b in zip([0, *cuts], [*cuts, shape[0]], strict=True))
    index = gm.axis().slice(parts)
    own = x.detach()[:, index].requires_grad_()
    options: dict[str, Any] = {"sizes": parts, "rows": rows}
    with gm.ordered():
        found = fields.spdiags(own, torch.tensor(offsets), shape, layout=torch.strided, **options)
        got = slopes((1 + gm.rank()) * (found**3).sum() + (own**2).sum(), [own])
    # One diagonal may have one dim, and its offset none, as torch.sparse.spdiags accepts them.
    given = (own[0], torch.tensor(offsets[0])) if len(offsets) == 1 else (own, torch.tensor(offsets))
    layout = draw.choice([torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
    with gm.ordered():
        sparse = fields.spdiags(*given, shape, layout=layout, **options)
        assert sparse.layout is layout
        # torch differentiates what is sparse once.
        got += gm.grad((1 + gm.rank()) * (sparse.to_dense() ** 3).sum() + (own**2).sum(), [own])
    factors = torch.cat([torch.full((n, 1), 1.0 + r) for r, n in enumerate(rows)]).double()
    dense = _dense_diagonals(x, offsets, shape)
    y = dense.detach()
    if width <= shape[1]:  # beyond that torch's own writes where it has no memory
        assert torch.equal(torch.sparse.spdiags(x.detach(), torch.tensor(offsets), shape).to_dense(), y)
    expected = [slope[:, index] for slope in dense_slopes((factors * dense**3).sum() + (x**2).sum(), [x])]
    mine = y[gm.axis().slice(rows)]
    return _apart([found, sparse.to_dense(), *got], [mine, mine, *expected, expected[0]])


def _dense_diagonals(x: Tensor, offsets: list[int], shape: tuple[int, int]) -> Tensor:
    """What spdiags makes, in a form with two derivatives."""
    rows, columns = torch.meshgrid(torch.arange(shape[0]), torch.arange(shape[1]), indexing="ij")
    made = torch.zeros(shape, dtype=x.dtype)
    for diagonal, offset in zip(x, offsets, strict=True):
        there = (columns - rows == offset) & (columns < len(diagonal))
        made = made + diagonal[columns.clamp(max=len(diagonal) - 1)].where(there, 0)
    return made


def narrowed(seed: int, parts: tuple[int, ...]) -> float:
    """A range of the whole."""
    draw, total = random.Random(seed), sum(parts)
    start = draw.randrange(total + 1)
    length = draw.randrange(total - start + 1)
    x = _random(seed, 2, total).requires_grad_()
    right = x.narrow(1, start, length).clone()  # in torch 2.11 narrow_copy has no gradient
    index = gm.axis().slice(parts)
    own = x.detach()[:, index].requires_grad_()
    found = fields.narrow_copy(
        own, 1, start - total * (draw.random() < 0.5 and start > 0), length, sizes=parts
    )
    rows = fields.narrowed_sizes(parts, start, length)
    assert not found.numel() or found.data_ptr() != own.data_ptr()
    got = torch.autograd.grad((found**3).sum() + 0 * own.sum(), own)
    expected = torch.autograd.grad((right**3).sum(), x)[0][:, index]
    return _apart([found, *got], [right[:, gm.axis().slice(rows)], expected])


def narrowed_sparse(seed: int, parts: tuple[int, ...]) -> float:
    """A range of a sparse tensor with zeros, cut and narrowed along a sparse or a dense dim."""
    draw, total = random.Random(seed), sum(parts)
    start = draw.randrange(total + 1)
    length = draw.randrange(total - start + 1)
    x = _random(seed, 2, total, 2)
    x = x.where(_random(seed + 1, 2, total, 2) > 0, 0).requires_grad_()
    index = gm.axis().slice(parts)
    own = x.detach()[:, index].requires_grad_()
    dims = draw.choice([1, 2, 3])
    found = fields.narrow_copy(own.to_sparse(dims), 1, start, length, sizes=parts)
    assert found.layout is torch.sparse_coo
    assert found.sparse_dim() == dims
    assert found.is_coalesced()
    got = torch.autograd.grad((found.to_dense() ** 3).sum() + 0 * own.sum(), own)
    right = torch.narrow_copy(x.detach().to_sparse(dims), 1, start, length).to_dense()
    expected = torch.autograd.grad((x.narrow(1, start, length) ** 3).sum(), x)[0][:, index]
    rows = fields.narrowed_sizes(parts, start, length)
    return _apart([found.to_dense(), *got], [right[:, gm.axis().slice(rows)], expected])


PROGRAMS = {each.__name__: each for each in (bce, inverses, diagonals, narrowed, narrowed_sparse)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_parts_have_the_value_and_the_derivatives_of_the_whole(threads: Threads, name: str) -> None:
    for seed in range(12):
        parts = _parts(random.Random(seed))
        assert max(threads(len(parts))(PROGRAMS[name], seed, parts)) < CLOSE, (seed, parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_random_parts_have_the_value_and_the_derivatives_of_the_whole(
    threads: Threads, name: str
) -> None:
    for seed in range(1000, 1800):
        parts = _parts(random.Random(seed))
        assert max(threads(len(parts))(PROGRAMS[name], seed, parts)) < CLOSE, (seed, parts)


def normed(
    cut: str, dim: int, parts: tuple[int, ...], start: dict[str, Tensor], weight: Tensor
) -> list[Tensor]:
    """Weights and slopes over training steps on the local part; `start` has the estimates of the whole."""
    along = dim if cut == "rows" else min(d for d in range(weight.dim()) if d != dim)
    index = (slice(None),) * along + (gm.axis().slice(parts),)
    module = nn.Module()
    module.weight = nn.Parameter(weight[index].clone())
    fields.spectral_norm(module, dim=dim, cut=cut)  # type: ignore[arg-type]
    estimates: Any = module.parametrizations["weight"][0]  # type: ignore[index]
    rows, columns = start["_u"], start["_v"]
    own = gm.axis().slice(parts)
    if cut == "rows":
        rows = rows[own]
    else:
        whole = columns.view(-1, *_tail(weight, dim)[1:])
        columns = whole.view(sum(parts), -1)[own].flatten()
    estimates.u, estimates.v = rows.clone(), columns.clone()
    seen = []
    for _ in range(3):
        used = module.weight
        leaf = module.parametrizations["weight"].original  # type: ignore[index,union-attr]
        with gm.ordered():
            loss = (1 + torch.arange(used.numel()).view_as(used) * 0) * used**3
            (slope,) = gm.grad(loss.sum(), [leaf], create_graph=True)
            (second,) = gm.grad((slope**2).sum(), [leaf])
        seen += [used.detach(), slope.detach(), second.detach()]
        with torch.no_grad():
            leaf -= 0.01 * slope
    return seen


def _tail(weight: Tensor, dim: int) -> tuple[int, ...]:
    return tuple(n for d, n in enumerate(weight.shape) if d != dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_spectral_norm_is_torchs_on_the_whole_weight_step_by_step(
    threads: Threads, cut: str, dim: int
) -> None:
    parts, weight = (1, 0, 3), _random(0, 4, 4, 2)
    dense = nn.Module()
    dense.weight = nn.Parameter(weight.clone())
    parametrizations.spectral_norm(dense, dim=dim)
    start = {name: value.clone() for name, value in dense.parametrizations["weight"][0].named_buffers()}  # type: ignore[index,union-attr]
    right = []
    for _ in range(3):
        used = dense.weight
        leaf = dense.parametrizations["weight"].original  # type: ignore[index,union-attr]
        (slope,) = torch.autograd.grad((used**3).sum(), [leaf], create_graph=True)
        (second,) = torch.autograd.grad((slope**2).sum(), [leaf])
        right += [used.detach(), slope.detach(), second.detach()]
        with torch.no_grad():
            leaf -= 0.01 * slope
    along = dim if cut == "rows" else min(d for d in range(3) if d != dim)
    each = threads(3)(normed, cut, dim, parts, start, weight)
    for number, whole in enumerate(right):
        assert far(torch.cat([seen[number] for seen in each], along), whole) < CLOSE, number


def test_spectral_norm_takes_the_rows_of_a_transposed_convolution_as_torch_does(threads: Threads) -> None:
    def found() -> Tensor:
        layer = nn.ConvTranspose2d(2, 3, 2)
        layer.weight.data = _random(0, 2, 6, 2, 2)[:, gm.axis().slice((4, 2))]
        fields.spectral_norm(layer, n_power_iterations=50)
        return layer.weight.detach()

    whole = torch.cat(threads(2)(found), 1).movedim(1, 0).flatten(1)
    assert far(torch.linalg.matrix_norm(whole, 2), torch.ones((), dtype=whole.dtype)) < 1e-6


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_spectral_norm_refuses_less_than_one_power_iteration(threads: Threads, steps: Any) -> None:
    def found() -> str:
        layer = nn.Linear(3, 2)
        with pytest.raises(gm.ArgumentError) as caught:
            fields.spectral_norm(layer, n_power_iterations=steps)
        assert "parametrizations" not in dict(layer.named_modules())
        return str(caught.value)

    assert all(f"n_power_iterations={steps}" in text for text in threads(2)(found))


@pytest.mark.parametrize("kind", ["parametrization", "older", "own", "own, older"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_spectral_norm_takes_the_states_of_torchs(threads: Threads, cut: Any, dim: int, kind: str) -> None:
    weight, parts = _random(0, 4, 4, 2), (1, 0, 3)
    along = dim if cut == "rows" else 1 - dim
    dense: Any = nn.Module()
    dense.weight = nn.Parameter(weight.clone())
    if kind == "older":
        conv: Any = nn.Conv1d(4, 4, 2, bias=False).double()
        conv.weight.data = weight.clone()
        nn.utils.spectral_norm(conv, dim=dim)
        conv(torch.zeros(1, 4, 2, dtype=torch.float64))
        dense = conv.eval()
        conv(torch.zeros(1, 4, 2, dtype=torch.float64))
    else:
        parametrizations.spectral_norm(dense, dim=dim)
        dense.eval()
    state, expected = dense.state_dict(), dense.weight.detach()

    def found(state: dict[str, Tensor]) -> Tensor:
        def module() -> Any:
            made: Any = nn.Module()
            made.weight = nn.Parameter(torch.zeros_like(weight).narrow(along, 0, parts[gm.rank()]) + 1)
            return fields.spectral_norm(made, dim=dim, cut=cut).eval()

        one: Any = module()
        one.load_state_dict(state)
        if kind.startswith("own"):
            own = one.state_dict()
            if kind == "own, older":  # gradmesh's own earlier names
                own = {name.replace("_u", "u").replace("_v", "v"): value for name, value in own.items()}
            one = module()
            one.load_state_dict(own)
        own_part: Tensor = copy.deepcopy(one).weight.detach()
        return own_part

    parts_found = threads(3)(found, state)
    assert far(torch.cat(parts_found, along), expected) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_over_many_halves_does_not_overflow(threads: Threads, dtype: torch.dtype) -> None:
    logits = torch.zeros(70_001, dtype=dtype)  # more than the largest half
    right = binary_cross_entropy_with_logits(logits.double(), torch.ones_like(logits).double())

    def found() -> Tensor:
        own = logits[gm.axis().slice((70_000, 1))]
        return fields.bce_with_logits(own, torch.ones_like(own))

    for loss in threads(2)(found):
        assert loss.dtype == dtype
        torch.testing.assert_close(loss.double(), right, rtol=4e-3, atol=0)


def test_an_evaluation_leaves_the_estimates_as_they_are(threads: Threads) -> None:
    def found() -> bool:
        layer = fields.spectral_norm(nn.Linear(3, 2)).eval()
        return torch.equal(layer.weight, layer.weight)  # type: ignore[arg-type]

    assert all(threads(2)(found))


def test_a_loss_that_every_rank_uses_differently_is_one_with_dst_r(threads: Threads) -> None:
    def found() -> float:
        x = torch.zeros(1 + gm.rank(), requires_grad=True)
        loss = fields.bce_with_logits(x, torch.ones(1 + gm.rank()), dst=gm.R)
        return float(torch.autograd.grad((1 + gm.rank()) * loss, x)[0][0])

    for slope in threads(2)(found):
        assert slope == pytest.approx(-3 * 0.5 / 3)


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "bce": lambda x: fields.bce_with_logits(x, torch.ones_like(x), pos_weight=torch.tensor(2.0)),
    "inverses": lambda x: fields.inv_ex(x.view(1, 2, 2)).inverse,
    "narrowed": lambda x: fields.narrow_copy(x, 0, 3, 3),
}


def _vector() -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(gm.rank()), dtype=torch.float64)


@pytest.mark.parametrize("name", OPERATORS)
def test_finite_differences_agree_to_the_second_order(name: str) -> None:
    def loss(x: Tensor) -> Tensor:
        factor = 1 if name == "bce" else 1 + gm.rank()
        return factor * (OPERATORS[name](x) ** 3).sum()

    vectors = gm.launch(_vector, 2, backend="threads")
    kind: Any = "replicated" if name == "bce" else "sum"
    assert gm.verify.gradcheck(
        loss, lambda rank: (vectors[rank].requires_grad_(),), world_size=2, order=2, objective=kind
    )


def _compiled(name: str) -> float:
    x, layer = _vector().requires_grad_(), fields.spectral_norm(nn.Linear(4, 2).double()).eval()
    compiled_too: dict[str, Callable[[Tensor], Tensor]] = {
        "nearest": lambda x: fields.interpolate(x.view(1, 1, 4), 11),
        "linear": lambda x: fields.interpolate(x.view(1, 1, 4), 11, mode="linear"),
        "diagonals": lambda x: fields.spdiags(x.view(1, 4), [2], (8, 8), layout=torch.strided),
        "norm": lambda x: layer(x),
        **OPERATORS,
    }

    def loss(x: Tensor) -> Tensor:
        return (compiled_too[name](x) ** 3).sum()

    eager = torch.autograd.grad(loss(x), x)[0]
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)[0]
    return far(compiled, eager)


@pytest.mark.slow
@pytest.mark.processes
def test_operators_compile_whole(worlds: Callable[..., Any]) -> None:
    for name in (*OPERATORS, "nearest", "linear", "diagonals", "norm"):
        assert max(worlds(2, "shm", 240).run(_compiled, name)) < 1e-12


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a singular matrix": (
        lambda: fields.inv_ex(torch.eye(2).unsqueeze(0) * gm.rank(), check_errors=True),
        "at index 0 of all ranks' batch has a zero pivot",
    ),
    "no batch": (lambda: fields.inv_ex(torch.eye(2)), "not a batch of square matrices"),
    "another target": (
        lambda: fields.bce_with_logits(torch.ones(2), torch.ones(3)),
        "do not match the logits",
    ),
    "a weight that is too long": (
        lambda: fields.bce_with_logits(torch.ones(2), torch.ones(2), pos_weight=torch.ones(3)),
        "do not match the logits",
    ),
    "another reduction": (
        lambda: fields.bce_with_logits(torch.ones(2), torch.ones(2), reduction="batchmean"),  # type: ignore[arg-type]
        "reduction must be 'mean' or 'sum'",
    ),
    "offsets twice": (
        lambda: fields.spdiags(torch.ones(2, 1), torch.tensor([0, 0]), (2, 2)),
        "one distinct int for each diagonal",
    ),
    "rows of another matrix": (
        lambda: fields.spdiags(torch.ones(1, 1), torch.tensor([0]), (2, 2), rows=(2, 2)),
        "rows does not match the matrix",
    ),
    "offsets between diagonals": (
        lambda: fields.spdiags(torch.ones(1, 1), torch.tensor([0.5]), (2, 2)),
        "one distinct int for each diagonal",
    ),
    "a matrix of one size": (
        lambda: fields.spdiags(torch.ones(1, 1), [0], (2,)),  # type: ignore[arg-type]
        "shape must be two ints",
    ),
    "a non-numeric offset": (
        lambda: fields.spdiags(torch.ones(1, 1), None, (2, 2)),  # type: ignore[arg-type]
        "one distinct int for each diagonal",
    ),
    "a block layout": (
        lambda: fields.spdiags(torch.ones(1, 1), [0], (2, 2), layout=torch.sparse_bsr),
        "layout must be torch.sparse_coo or",
    ),
    "a sparse range beyond the end": (
        lambda: fields.narrow_copy(torch.ones(2).to_sparse(), 0, 3, 2),
        "start and length are out of range",
    ),
    "a range from a half on": (
        lambda: fields.narrow_copy(torch.ones(2), 0, 0.5, 1),  # type: ignore[arg-type]
        "start and length are out of range",
    ),
    "a range beyond the end": (
        lambda: fields.narrow_copy(torch.ones(2), 0, 3, 2),
        "start and length are out of range",
    ),
    "a range over two axes": (
        lambda: fields.narrow_copy(torch.ones(2, 2), (0, 1), 0, 3, (None, None)),  # type: ignore[arg-type]
        "axis argument",
    ),
    "a vector's norm": (
        lambda: fields.spectral_norm(nn.LayerNorm(2)),
        "fewer than 2 dims",
    ),
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

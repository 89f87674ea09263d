"""Norms with the statistics of all ranks: equal to torch's on the whole batch, in every derivative."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmesh as gm

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]


def _whole(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 100 + torch.randn(*shape, generator=draw, dtype=torch.float64)


def _slopes(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The first slopes and those of their squares."""
    first = gm.grad(loss, leaves, create_graph=True)
    penalty = torch.stack([(slope**2).sum() for slope in first]).sum()
    return [*(slope.detach() for slope in first), *gm.grad(penalty, leaves)]


def _made(kind: str, axis: Any = None) -> tuple[nn.Module, nn.Module]:
    """The dense norm and ours."""
    dense: Any = nn.BatchNorm1d(4) if kind == "batch" else nn.GroupNorm(2, 4)
    ours: Any = gm.nn.SyncBatchNorm(4, axis=axis) if kind == "batch" else gm.nn.SyncGroupNorm(2, 4, axis=axis)
    for each in (dense.double(), ours.double()):
        with torch.no_grad():
            each.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
            each.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
    return dense, ours


def deviation(kind: str, seed: int, parts: tuple[int, ...], idle: int) -> float:
    """How far a rank's results are from torch's on the whole; batches are cut along dim 0, samples along dim 2."""
    dim = 0 if kind == "batch" else 2
    shape = (sum(parts), 4, 3) if kind == "batch" else (2, 4, sum(parts))
    x = _whole(seed, *shape).requires_grad_()
    dense, ours = _made(kind)
    factors = torch.cat([torch.full((n,), (1.0 + r) * (r != idle)) for r, n in enumerate(parts)]).double()
    factors = factors.view(-1, 1, 1) if dim == 0 else factors
    y = dense(x)
    with gm.ordered():
        right = _slopes((factors * y**3).sum(), [x, *dense.parameters()])
    rows = gm.axis().slice(parts)
    index = (rows,) if dim == 0 else (slice(None), slice(None), rows)
    own = x.detach()[index].requires_grad_()
    with gm.ordered():
        z = gm.nn.Replicated(ours)(own)
        loss = z.sum() * 0 if gm.rank() == idle else (1 + gm.rank()) * (z**3).sum()
        got = _slopes(loss, [own, *ours.parameters()])
    expected = [right[0][index], *right[1:3], right[3][index], *right[4:]]
    pairs = [(z.detach(), y.detach()[index]), *zip(got, expected, strict=True)]
    if kind == "batch":
        pairs += list(zip(ours.buffers(), dense.buffers(), strict=True))
    return max(
        (float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs if b.numel()), default=0.0
    )


def _program(seed: int) -> tuple[int, tuple[str, int, tuple[int, ...], int]]:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3, 4])
    parts = tuple(draw.choice([0, 1, 2, 5]) for _ in range(ranks))
    if sum(parts) < 2:
        parts = (*parts[1:], 3)
    return ranks, (draw.choice(["batch", "group"]), seed, parts, draw.choice([-1, draw.randrange(ranks)]))


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_have_the_value_and_both_derivatives_of_the_whole(threads: Threads, seed: int) -> None:
    ranks, program = _program(seed)
    assert max(threads(ranks)(deviation, *program)) < 1e-8, program


@pytest.mark.slow
def test_many_random_batches_have_the_value_and_both_derivatives_of_the_whole(threads: Threads) -> None:
    for seed in range(100, 900):
        ranks, program = _program(seed)
        assert max(threads(ranks)(deviation, *program)) < 1e-8, program


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["batch", "group"])
def test_norms_on_processes_are_torchs_on_the_whole(processes: Callable[[int], Run], kind: str) -> None:
    assert max(processes(2)(deviation, kind, 1, (1, 3), -1)) < 1e-8


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_an_audit_finds_nothing(kind: str) -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Tensor]:
        module = _made(kind)[1]
        if kind == "batch":
            module = gm.nn.SyncBatchNorm(4, affine=False, track_running_stats=False)
        shape = (3, 4, 3) if kind == "batch" else (2, 4, 3)
        return module, _whole(gm.rank(), *shape).requires_grad_()

    assert not gm.verify.audit(build, world_size=2).findings


@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_and_evaluation_are_torchs(threads: Threads, momentum: float | None) -> None:
    batches = [_whole(seed, 5, 2) for seed in range(3)]
    dense = nn.BatchNorm1d(2, momentum=momentum).double()
    for batch in batches:
        dense(batch)
    dense.track_running_stats = False  # from here on they stay
    dense(batches[0])
    dense.eval()

    def found() -> list[Tensor]:
        ours = gm.nn.SyncBatchNorm(2, momentum=momentum).double()
        rows = gm.axis().slice((4, 1))
        for batch in batches:
            ours(batch[rows])
        ours.track_running_stats = False
        ours(batches[0][rows])
        ours.eval()
        return [*ours.buffers(), gm.all_gather(ours(batches[0][rows]).detach(), sizes=(4, 1))]

    for got in threads(2)(found):
        for a, b in zip(got, [*dense.buffers(), dense(batches[0]).detach()], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_running_statistics_an_evaluation_takes_those_of_all_ranks_too(threads: Threads) -> None:
    x = _whole(0, 5, 2)
    dense = nn.BatchNorm1d(2, track_running_stats=False).double().eval()

    def found() -> Tensor:
        ours = gm.nn.SyncBatchNorm(2, track_running_stats=False).double().eval()
        return gm.all_gather(ours(x[gm.axis().slice((4, 1))]).detach(), sizes=(4, 1))

    for got in threads(2)(found):
        torch.testing.assert_close(got, dense(x).detach())


def test_a_conversion_keeps_values_and_names(threads: Threads) -> None:
    def found() -> bool:
        net = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.Sequential(nn.BatchNorm2d(2, momentum=0.5), nn.ReLU())
        ).eval()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        made: Any = gm.nn.SyncBatchNorm.converted(net)
        kinds = isinstance(made[1][0], gm.nn.SyncBatchNorm) and not made[1][0].training
        after = made.state_dict()
        same = all(torch.equal(value, before[name]) for name, value in after.items())
        return kinds and list(after) == list(before) and made[1][0].momentum == 0.5 and same

    assert all(threads(2)(found))


def test_half_precision_has_the_statistics_of_float32(threads: Threads) -> None:
    x = _whole(0, 6, 4, 3).to(torch.bfloat16)

    def found() -> Tensor:
        return gm.all_gather(gm.nn.SyncBatchNorm(4)(x[gm.axis().slice((5, 1))]).detach(), sizes=(5, 1))

    expected = nn.BatchNorm1d(4)(x.float()).detach().to(torch.bfloat16)
    for got in threads(2)(found):
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("make", "shape", "words"),
    [
        (lambda: gm.nn.SyncBatchNorm(4), (2, 3), "wrong number of channels"),
        (lambda: gm.nn.SyncGroupNorm(2, 4), (2, 3), "wrong number of channels"),
        (lambda: gm.nn.SyncBatchNorm(4), (0, 4), "too few values per channel"),
    ],
)
def test_invalid_arguments_raise_on_every_rank(
    threads: Threads, make: Callable[[], nn.Module], shape: tuple[int, ...], words: str
) -> None:
    def refused() -> str:
        with pytest.raises(gm.GradmeshError) as error:
            make()(torch.ones(*shape))
        return str(error.value)

    for text in threads(2)(refused):
        assert words in text


def _compiled() -> float:
    module = gm.nn.SyncBatchNorm(4).double()
    x = _whole(gm.rank(), 3, 4).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return (module(x) ** 3).sum()

    eager = torch.autograd.grad(loss(x), x)[0]
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)[0]
    return float((eager - compiled).abs().max())


@pytest.mark.processes
def test_a_batch_norm_compiles_whole(worlds: Callable[..., Any]) -> None:
    assert max(worlds(2, "shm", 240).run(_compiled)) < 1e-12


def test_a_norm_with_two_names_is_converted_once() -> None:
    norm = nn.BatchNorm1d(2)
    net: Any = nn.ModuleDict({"a": norm, "b": norm, "c": nn.Sequential(norm)})
    gm.nn.SyncBatchNorm.converted(net)
    assert isinstance(net["a"], gm.nn.SyncBatchNorm)
    assert net["a"] is net["b"] is net["c"][0]


class Doubled(nn.BatchNorm1d):
    """A norm with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        return 2 * super().forward(input)


@pytest.mark.parametrize("make", [nn.LazyBatchNorm1d, lambda: Doubled(2)])
def test_a_norm_that_cannot_be_converted_is_refused_and_nothing_is_changed(
    make: Callable[[], nn.Module],
) -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), make())
    before = str(net)
    with pytest.raises(gm.ArgumentError, match="cannot convert this norm"):
        gm.nn.SyncBatchNorm.converted(net)
    assert str(net) == before


def test_numbers_that_cannot_be_normalised_are_refused(threads: Threads) -> None:
    def refused() -> str:
        with pytest.raises(gm.GradmeshError) as error:
            gm.nn.SyncBatchNorm(4)(torch.ones(2, 4, dtype=torch.int64))
        return str(error.value)

    for text in threads(2)(refused):
        assert "is not floating point" in text


def test_a_batch_norm_under_ddp_has_the_gradient_of_the_whole_batch(threads: Threads) -> None:
    x = _whole(5, 6, 3) - 100

    def slopes(net: nn.Module, rows: Tensor) -> list[Tensor]:
        loss = net(rows).sub(0.3).pow(3).mul(torch.arange(1.0, 4.0)).mean()
        loss.backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    def on_rank() -> list[Tensor]:
        net = nn.Sequential(nn.Linear(3, 3), gm.nn.SyncBatchNorm(3)).double()
        net.load_state_dict(start)
        return slopes(nn.parallel.DistributedDataParallel(net), gm.shard(x))

    dense = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    start = dense.state_dict()
    right = slopes(dense, x)
    for found in threads(2)(on_rank):
        assert len(found) == len(right)
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)

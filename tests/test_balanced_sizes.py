"""`sizes="balanced"`: the split of `shard`, by the verbs that cut and those that join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]
TOTALS = (0, 1, 2, 7, 8)


def whole(total: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, total, dtype=torch.float64, generator=source).requires_grad_()


def there_and_back(total: int) -> list[Tensor]:
    """A tensor that is cut and joined again, and the gradients of losses that differ between ranks."""
    rank, size = gm.rank(), gm.world_size()
    x = whole(total, seed=rank)
    part = gm.reduce_scatter(x, dim=1, sizes="balanced")
    (x_grad,) = torch.autograd.grad(((1 + rank) * part**2).sum(), x, create_graph=True)
    own = gm.shard(whole(total, seed=size), dim=1, sizes="balanced").detach().requires_grad_()
    joined = gm.all_gather(own, dim=1, sizes="balanced")
    (own_grad,) = torch.autograd.grad(((1 + rank) * joined**2).sum(), own)
    return [part.detach(), x_grad.detach(), joined.detach(), own_grad]


def check(results: list[list[Tensor]], total: int) -> None:
    size = len(results)
    sizes = [total // size + (rank < total % size) for rank in range(size)]
    summed = torch.stack([whole(total, seed=rank).detach() for rank in range(size)]).sum(0)
    shared = whole(total, seed=size).detach()
    x_grad = torch.cat([2 * (1 + rank) * part for rank, part in enumerate(summed.split(sizes, 1))], 1)
    for rank, found in enumerate(results):
        own = shared.split(sizes, 1)[rank]
        expected = [summed.split(sizes, 1)[rank], x_grad, shared, size * (size + 1) * own]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_balanced_sizes_are_those_of_shard_forward_and_backward(
    total: int, size: int, threads: Ranks
) -> None:
    check(threads(size)(there_and_back, total), total)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_balanced_sizes_are_those_of_shard_on_processes(backend: str) -> None:
    with gm.Ranks(2, backend=backend, timeout=60) as ranks:
        for total in TOTALS:
            check(ranks.run(there_and_back, total), total)


def not_balanced() -> str:
    with pytest.raises(gm.ShapeError) as caught:
        gm.all_gather(torch.ones(3 + (gm.rank() == 1)), sizes="balanced")
    return str(caught.value) + str(gm.all_gather(torch.ones(1)).tolist())


def test_shards_that_are_not_balanced_raise_on_every_rank(threads: Ranks) -> None:
    for text in threads(3)(not_balanced):
        assert "sizes=(4, 3, 3), the balanced split of 10 over 3 ranks" in text
        assert "sizes=(3, 4, 3)" in text
        assert text.endswith("[1.0, 1.0, 1.0]")


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_shards_that_are_not_balanced_raise_on_every_process(backend: str) -> None:
    for text in gm.launch(not_balanced, 3, backend=backend, timeout=60):
        assert "sizes=(3, 4, 3)" in text


def resharded(rows: int, columns: int) -> list[Tensor]:
    """From rows to columns and back, and the gradient of a loss that differs between ranks."""
    rank = gm.rank()
    source = torch.Generator().manual_seed(3)
    full = torch.randn(rows, 2, columns, dtype=torch.float64, generator=source)
    x = gm.shard(full, sizes="balanced").detach().requires_grad_()
    y = gm.all_to_all(x, split_dim=2, concat_dim=0, split_sizes="balanced", concat_sizes="auto")
    back = gm.all_to_all(y, split_dim=0, concat_dim=2, split_sizes="balanced", concat_sizes="auto")
    (grad,) = torch.autograd.grad(((1 + rank) * y**2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((grad**3).sum(), x)
    return [full, x.detach(), y.detach(), back.detach(), grad.detach(), second]


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (6, 3), (1, 2), (0, 4), (4, 0)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_exchange_between_dims_cuts_in_balance_and_asks_for_the_sizes_that_it_joins(
    rows: int, columns: int, size: int, threads: Ranks
) -> None:
    results = threads(size)(resharded, rows, columns)
    sizes = [columns // size + (rank < columns % size) for rank in range(size)]
    factors = torch.cat([torch.full((n,), 2.0 + 2 * rank) for rank, n in enumerate(sizes)]).double()
    for rank, (full, x, y, back, grad, second) in enumerate(results):
        torch.testing.assert_close(y, full.split(sizes, 2)[rank])
        torch.testing.assert_close(back, x)
        torch.testing.assert_close(grad, factors * x)
        torch.testing.assert_close(second, 3 * factors * (factors * x) ** 2)


def test_sizes_of_an_exchange_along_one_dim_are_not_asked_for(threads: Ranks) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.ArgumentError, match="split_dim and concat_dim are one") as caught:
            gm.all_to_all(torch.ones(4), concat_sizes="auto")
        return str(caught.value)

    assert all(
        "what that rank passes for this one in split_sizes" in text for text in threads(2)(on_each_rank)
    )


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (
            lambda x: gm.all_to_all(x, split_dim=2, concat_dim=1, split_sizes=(3, 2)),
            'concat_sizes="auto" or concat_sizes=(2, 3)',
        ),
        (
            lambda x: gm.all_to_all(x, split_dim=2, concat_dim=1, split_sizes=(3, 2), concat_sizes=(3, 2)),
            "concat_sizes=(2, 2) if the others are right",
        ),
        (
            lambda x: gm.all_to_all(x, split_dim=2, concat_dim=1),
            'split_sizes="balanced" or split_sizes=(3, 2)',
        ),
        (lambda x: gm.halo_exchange(x, dim=1), 'sizes="auto" or sizes=(2, 3)'),
    ],
)
def test_the_remedy_for_uneven_shards_names_the_argument_that_takes_their_sizes(
    call: Callable[[Tensor], Tensor], remedy: str, threads: Ranks
) -> None:
    def on_each_rank() -> str:
        with pytest.raises(gm.GradmeshError) as caught:
            call(torch.zeros(1, 2 + gm.rank(), 5))
        return str(caught.value)

    assert any(remedy in text for text in threads(2)(on_each_rank))

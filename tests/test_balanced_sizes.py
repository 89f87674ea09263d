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

"""The drop-in for ksuit's AllGatherGradAutograd; its derivatives are in test_compat_gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.compat.ksuit import AllGatherGradAutograd


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_name_of_the_original_is_there() -> None:
    assert all(callable(getattr(AllGatherGradAutograd, name)) for name in ("apply", "forward", "backward"))


def _one_element_each() -> Tensor:
    rank = gm.axis().rank
    x = random(rank, 2).requires_grad_()
    parts = AllGatherGradAutograd.apply(x)
    assert isinstance(parts, tuple)
    (parts[(rank + 1) % 3] ** 2).sum().backward()
    assert x.grad is not None
    return x.grad


def test_an_element_that_a_rank_does_not_use_gets_a_zero_gradient(threads: Any) -> None:
    for rank, grad in enumerate(threads(3)(_one_element_each)):
        torch.testing.assert_close(grad, 2 * random(rank, 2))


def _changed_in_place() -> None:
    rank = gm.axis().rank
    x = random(rank, 2).requires_grad_()
    parts = AllGatherGradAutograd.apply(x)
    cubes = [part**3 for part in parts]
    parts[0].mul_(2)
    sum((1 + rank) * cube.sum() for cube in cubes[1:]).backward()
    assert torch.equal(x.detach(), random(rank, 2))
    torch.testing.assert_close(parts[1], random(1, 2))
    torch.testing.assert_close(x.grad, 9 * random(rank, 2) ** 2 if rank else torch.zeros(2, dtype=x.dtype))


def test_an_element_can_be_changed_in_place_without_the_others(threads: Any) -> None:
    threads(2)(_changed_in_place)


def test_shapes_that_differ_are_refused(threads: Any) -> None:
    def refused() -> None:
        AllGatherGradAutograd.apply(torch.zeros(2 + gm.axis().rank))

    with pytest.raises(gm.RankError) as error:
        gm.launch(refused, 2, backend="threads")
    assert isinstance(error.value.__cause__, gm.GradmeshError)

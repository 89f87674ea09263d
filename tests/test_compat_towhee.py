"""The drop-in for towhee's AllGather; its derivatives are in test_compat_gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.compat.towhee import AllGather

NAMES = [
    "apply",
    "backward",
    "forward",
    "jvp",
    "mark_dirty",
    "mark_non_differentiable",
    "mark_shared_storage",
    "name",
    "register_hook",
    "save_for_backward",
    "save_for_forward",
    "set_materialize_grads",
    "vjp",
    "__call__",
    "__init__",
    "dirty_tensors",
    "is_traceable",
    "materialize_grads",
    "metadata",
    "needs_input_grad",
    "next_functions",
    "non_differentiable",
    "requires_grad",
    "saved_for_forward",
    "saved_tensors",
    "saved_variables",
    "to_save",
]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_name_of_the_original_is_there() -> None:
    assert [name for name in NAMES if not hasattr(AllGather, name)] == []


def _on_a_second_machine() -> None:
    """Two machines of two ranks: the local rank is 0 and 1 on both."""
    rank = gm.axis().rank
    x = random(rank, 2, 3).requires_grad_()
    y = AllGather.apply(x, SimpleNamespace(world_size=4, local_rank=rank % 2))
    incoming = random(9, 8, 3)
    (grad,) = torch.autograd.grad(y, x, incoming)
    assert torch.equal(y, torch.cat([random(r, 2, 3) for r in range(4)]))
    assert torch.equal(grad, incoming[2 * rank : 2 * rank + 2])


def test_the_slice_of_the_gradient_is_that_of_the_rank_and_not_of_the_local_rank(threads: Any) -> None:
    threads(4)(_on_a_second_machine)


def _in_a_subgroup() -> None:
    rank = gm.axis().rank
    pair = rank % 2
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = random(rank, 2).requires_grad_()
    args = SimpleNamespace(world_size=2, local_rank=rank)
    incoming = random(9, 4)
    mesh = dist.device_mesh.DeviceMesh.from_group(groups[pair], "cpu")
    with gm.use_mesh(mesh):
        of_mesh = AllGather.apply(x, args)
    for y in (of_mesh, AllGather.apply(x, args, groups[pair])):
        (grad,) = torch.autograd.grad(y, x, incoming)
        assert torch.equal(y, torch.cat([random(pair, 2), random(pair + 2, 2)]))
        assert torch.equal(grad, incoming.view(2, 2)[rank // 2])


def test_the_slice_of_the_gradient_is_that_of_the_rank_in_a_subgroup(threads: Any) -> None:
    threads(4)(_in_a_subgroup)


@pytest.mark.parametrize("args", [SimpleNamespace(world_size=3, local_rank=0), SimpleNamespace(local_rank=0)])
def test_a_world_size_that_is_not_that_of_the_axis_is_refused(threads: Any, args: Any) -> None:
    def refused() -> str:
        with pytest.raises(gm.ArgumentError) as error:
            AllGather.apply(torch.zeros(2), args)
        return str(error.value)

    assert threads(2)(refused)[1] == (
        "gradmesh.compat.towhee.AllGather: args.world_size differs from the axis size\n"
        "  axis      'world', rank 1 of 2\n"
        "  expected  args.world_size=2\n"
        f"  got       args.world_size={getattr(args, 'world_size', None)}\n"
        "  remedy    set args.world_size=2, or pass the axis: AllGather.apply(x, args, axis)"
    )


def _alone() -> tuple[list[float], list[float]]:
    x = (1.0 + random(gm.rank() if dist.is_initialized() else 0, 2)).requires_grad_()
    y = AllGather.apply(x, SimpleNamespace(world_size=1, local_rank=0))
    (grad,) = torch.autograd.grad((3.0 * y).sum(), x)
    assert torch.equal(y, x)
    return y.tolist(), grad.tolist()


def test_a_world_size_of_one_returns_the_tensor_in_a_group_and_without_one(threads: Any) -> None:
    found = threads(2)(_alone)
    assert [grad for _, grad in [*found, _alone()]] == [[3.0, 3.0]] * 3
    assert found[0] != found[1]


def _scalars() -> None:
    rank = gm.axis().rank
    x = random(rank).requires_grad_()
    y = AllGather.apply(x, SimpleNamespace(world_size=2))
    incoming = random(9, 2)
    (grad,) = torch.autograd.grad(y, x, incoming)
    assert torch.equal(y, torch.stack([random(0), random(1)]))
    assert torch.equal(grad, incoming[rank])


def test_scalars_are_stacked(threads: Any) -> None:
    threads(2)(_scalars)

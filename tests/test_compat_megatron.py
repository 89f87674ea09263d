"""The drop-in for Megatron's mappings; their values and derivatives are in test_compat_gradients."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.compat import megatron

ARGUMENTS = {
    "copy_to_tensor_model_parallel_region": "input_ group",
    "reduce_from_tensor_model_parallel_region": "input_ group",
    "scatter_to_tensor_model_parallel_region": "input_ group",
    "gather_from_tensor_model_parallel_region": "input_ group",
    "scatter_to_sequence_parallel_region": "input_ group",
    "gather_from_sequence_parallel_region": (
        "input_ tensor_parallel_output_grad group output_split_sizes use_global_buffer"
    ),
    "reduce_scatter_to_sequence_parallel_region": "input_ group input_split_sizes use_global_buffer",
    "all_gather_last_dim_from_tensor_parallel_region": "input_ group",
    "reduce_scatter_last_dim_to_tensor_parallel_region": "input_ group",
    "all_to_all": "group input_ output_split_sizes_ input_split_sizes",
    "all_to_all_sp2hp": "input_ group",
    "all_to_all_hp2sp": "input_ group",
}


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_names_and_arguments_are_megatrons() -> None:
    assert megatron.__all__ == sorted(ARGUMENTS)
    for name, arguments in ARGUMENTS.items():
        assert " ".join(inspect.signature(getattr(megatron, name)).parameters) == arguments


def _without_a_group() -> list[int]:
    sizes = [megatron.gather_from_tensor_model_parallel_region(torch.zeros(1)).numel()]
    with gm.use_mesh(gm.mesh(dp=1, tp=-1)):
        sizes.append(megatron.gather_from_tensor_model_parallel_region(torch.zeros(1)).numel())
    with gm.use_mesh(gm.mesh(dp=2, tp=2)):
        sizes.append(megatron.gather_from_tensor_model_parallel_region(torch.zeros(1)).numel())
        sizes.append(megatron.gather_from_tensor_model_parallel_region(torch.zeros(1), "dp").numel())
    return sizes


def test_without_a_group_the_axis_is_tp_of_the_mesh_or_else_the_world() -> None:
    assert gm.launch(_without_a_group, 4, backend="threads") == [[4, 4, 2, 2]] * 4


def _mlp(weights: bool) -> tuple[Tensor, ...]:
    """Column- then row-parallel: the two regions of a tensor-parallel layer, with the same loss on every rank."""
    rank = gm.axis().rank
    x = random(1, 3, 4).requires_grad_()
    up = random(2, 4, 6).chunk(2, 1)[rank].clone().requires_grad_()
    down = random(3, 6, 4).chunk(2, 0)[rank].clone().requires_grad_()
    hidden = torch.tanh(megatron.copy_to_tensor_model_parallel_region(x) @ up)
    y = megatron.reduce_from_tensor_model_parallel_region(hidden @ down)
    return torch.autograd.grad((y**2).sum(), (x, up, down))


def test_a_tensor_parallel_layer_has_the_gradients_of_the_whole_one(threads: Any) -> None:
    x, up, down = (random(i, *shape).requires_grad_() for i, shape in ((1, (3, 4)), (2, (4, 6)), (3, (6, 4))))
    expected = torch.autograd.grad(((torch.tanh(x @ up) @ down) ** 2).sum(), (x, up, down))
    found = threads(2)(_mlp, True)
    for grad, _, _ in found:
        torch.testing.assert_close(grad, expected[0])
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in found], 1), expected[1])
    torch.testing.assert_close(torch.cat([grad for _, _, grad in found], 0), expected[2])


def _there_and_back() -> None:
    rank = gm.axis().rank
    x = random(rank, 2, 2, 4)
    there = megatron.all_to_all_sp2hp(x)
    assert there.shape == (8, 2)
    assert torch.equal(megatron.all_to_all_hp2sp(there), x.view(4, 4))


def test_from_rows_to_columns_and_back_is_the_identity(threads: Any) -> None:
    threads(2)(_there_and_back)


def _caller_tensors() -> None:
    rank = gm.axis().rank
    x, incoming = random(rank, 4).requires_grad_(), random(5 + rank, 4)
    megatron.reduce_from_tensor_model_parallel_region(x)
    assert torch.equal(x.detach(), random(rank, 4))
    torch.autograd.grad(megatron.copy_to_tensor_model_parallel_region(x), x, incoming)
    assert torch.equal(incoming, random(5 + rank, 4))


def test_neither_operands_nor_incoming_gradients_are_summed_in_place(threads: Any) -> None:
    threads(2)(_caller_tensors)

"""The drop-in for torch.distributed.nn.functional; values and derivatives are in test_compat_gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as original
from torch import Tensor
from torch.distributed import ReduceOp

import gradmesh as gm
from gradmesh.compat import torch_nn as nn

NAMES = [*nn.__all__, "_all_gather_base"]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_names_and_arguments_are_torchs() -> None:
    theirs = {
        name
        for name, value in vars(original).items()
        if inspect.isfunction(value) and value.__module__ == original.__name__ and not name.startswith("_")
    }
    assert set(nn.__all__) == theirs
    for name in NAMES:
        ours, torchs = (inspect.signature(getattr(module, name)).parameters for module in (nn, original))
        assert list(ours) == list(torchs)
        assert [p.default for p in ours.values()] == [p.default for p in torchs.values()]


def test_importing_the_original_is_not_needed_and_nothing_warns(threads: Any) -> None:
    # Warnings are errors in this suite, and the original warns at every call.
    assert threads(2)(lambda: nn.all_reduce(torch.ones(())).item()) == [2.0, 2.0]


def _default_group() -> list[int]:
    with gm.use_mesh(gm.mesh(dp=2, tp=2)):
        return [len(nn.all_gather(torch.zeros(1), group)) for group in (None, dist.group.WORLD, "tp")]


def test_no_group_is_the_world_also_in_a_mesh() -> None:
    assert gm.launch(_default_group, 4, backend="threads") == [[4, 4, 2]] * 4


AS_IN_TORCH: list[Callable[[Any, Tensor], Tensor]] = [
    lambda module, x: module.all_reduce(x),
    lambda module, x: module.broadcast(x, 1),
    lambda module, x: torch.cat(module.all_gather(x)),
    lambda module, x: torch.cat(module.gather(x, 1)),
    lambda module, x: module.scatter(list(x.chunk(2)), 1),
    lambda module, x: module.reduce_scatter(x.new_empty(2, 2), list(x.chunk(2))),
    lambda module, x: module.all_to_all_single(torch.empty_like(x), x),
    lambda module, x: torch.cat(module.all_to_all(list(torch.empty_like(x).chunk(2)), list(x.chunk(2)))),
]


def _value_and_gradient(index: int, module: Any) -> tuple[Tensor, Tensor]:
    rank = gm.axis().rank
    x = random(rank, 4, 2).requires_grad_()
    y = AS_IN_TORCH[index](module, x)
    (grad,) = torch.autograd.grad(y, x, random(5 + rank, *y.shape))
    return y.detach(), grad


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize("index", range(len(AS_IN_TORCH)))
def test_where_torch_is_right_the_numbers_are_torchs(threads: Any, index: int) -> None:
    found, expected = (threads(2)(_value_and_gradient, index, module) for module in (nn, original))
    torch.testing.assert_close(found, expected)


def _of_a_transposed_gradient() -> tuple[Tensor, Tensor]:
    """The gradient of a gather in dim 1 whose result is transposed, and that of one process."""
    rank = gm.axis().rank
    weights = [random(at, 3, 2, 4).transpose(0, 1) for at in range(2)]
    x = random(7 + rank, 2, 2, 3).requires_grad_()
    whole = torch.cat(nn.all_gather(x), dim=1).transpose(1, 2)
    (grad,) = torch.autograd.grad((whole * weights[rank]).sum(), x)
    return grad, sum(weights, torch.zeros(())).transpose(1, 2).chunk(2, dim=1)[rank]


def test_the_gradient_of_a_gather_is_right_in_every_memory_format(processes: Any) -> None:
    for found, expected in processes(2)(_of_a_transposed_gradient):
        torch.testing.assert_close(found, expected)


def _ties() -> tuple[list[float], list[float]]:
    rank = gm.axis().rank
    x = torch.tensor([1.0, 2.0 + rank, 5.0]).requires_grad_()
    (largest,) = torch.autograd.grad((1 + rank) * nn.all_reduce(x, ReduceOp.MAX).sum(), x)
    zeros = torch.tensor([0.0, 2.0 + rank, 0.0 if rank else 3.0]).requires_grad_()
    (product,) = torch.autograd.grad((1 + rank) * nn.all_reduce(zeros, ReduceOp.PRODUCT).sum(), zeros)
    return largest.tolist(), product.tolist()


def test_ties_of_max_share_and_products_are_right_with_zeros(threads: Any) -> None:
    assert threads(2)(_ties) == [
        ([1.5, 0.0, 1.5], [0.0, 9.0, 0.0]),
        ([1.5, 3.0, 1.5], [0.0, 6.0, 9.0]),
    ]


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])
def test_a_reduction_without_a_gradient_rule_is_refused(threads: Any, op: Any) -> None:
    def refused() -> str:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: nn.all_reduce(torch.ones(2), op),
            lambda: nn.reduce(torch.ones(2), 0, op),
            lambda: nn.reduce_scatter(torch.ones(1), list(torch.ones(2, 1)), op),
        )
        for call in calls:
            with pytest.raises(gm.ArgumentError, match="no gradient rule") as error:
                call()
        return str(error.value)

    assert "compat.torch_nn.reduce_scatter" in threads(2)(refused)[0]


def test_an_instance_of_reduce_op_is_the_same_as_its_kind(threads: Any) -> None:
    assert threads(2)(lambda: nn.all_reduce(torch.ones(()), ReduceOp(ReduceOp.AVG)).item()) == [1.0, 1.0]


def _ranks_of_the_world() -> list[float] | None:
    group = dist.new_group([1, 2])
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    x = torch.tensor([float(gm.axis().rank)])
    with pytest.raises(gm.ArgumentError, match=r"src is not in the group(.|\n)*\[1, 2\](.|\n)*src=0"):
        nn.broadcast(x, 0, group)
    with pytest.raises(gm.ArgumentError, match="dst is not in the group"):
        nn.gather(x, 3, group)
    return [nn.broadcast(x, 2, group).item(), nn.reduce(x, 2, group=group).item()]


def test_src_and_dst_are_ranks_of_the_world(threads: Any) -> None:
    assert threads(4)(_ranks_of_the_world) == [None, [2.0, 0.0], [2.0, 3.0], None]


def _filled() -> None:
    rank = gm.axis().rank
    x = random(rank, 2, 2).requires_grad_()
    buffers = [torch.empty(1, 2, dtype=x.dtype) for _ in range(2)]
    one, two, three = (
        torch.empty(2, dtype=x.dtype),
        torch.empty(2, 2, 2, dtype=x.dtype),
        torch.empty(2, 2, dtype=x.dtype),
    )
    for buffer, result in (
        (one, nn.reduce_scatter(one, list(x))),
        (two, nn._all_gather_base(two, x)),
        (three, nn.all_to_all_single(three, x)),
        *zip(buffers, nn.all_to_all(buffers, list(x.split(1))), strict=True),
    ):
        assert torch.equal(buffer, result)
        assert result.requires_grad
        assert not buffer.requires_grad
        assert buffer.data_ptr() != result.data_ptr()
    assert torch.equal(x.detach(), random(rank, 2, 2))


def test_an_output_buffer_is_filled_and_the_returned_tensor_has_the_gradient(threads: Any) -> None:
    threads(2)(_filled)


def _buffer_again() -> Tensor:
    x = random(gm.axis().rank, 2).requires_grad_()
    buffer = torch.empty(4, dtype=x.dtype)
    results = [nn._all_gather_base(buffer, step * x) for step in (1.0, 2.0)]
    (results[0] ** 2 + results[1] ** 2).sum().backward()
    assert x.grad is not None
    return x.grad


def test_an_output_buffer_can_be_used_again_before_backward(threads: Any) -> None:
    for rank, grad in enumerate(threads(2)(_buffer_again)):
        torch.testing.assert_close(grad, 2 * 2 * 5 * random(rank, 2))


def _misfits() -> None:
    x = torch.ones(4)
    for call in (
        lambda: nn.scatter([x]),
        lambda: nn.scatter(None),  # type: ignore[arg-type]
        lambda: nn.scatter([x, x[:2]]),
        lambda: nn.reduce_scatter(x, [x, x, x]),
        lambda: nn.all_to_all([x], [x, x]),
        lambda: nn.all_to_all_single(x[:3], x),
        lambda: nn.reduce_scatter(x[:2], [x, x]),
        lambda: nn._all_gather_base(x, x),
    ):
        with pytest.raises(gm.ShapeError, match=r"gradmesh\.compat\.torch_nn"):
            call()


def test_lists_and_outputs_that_do_not_fit_are_refused(threads: Any) -> None:
    threads(2)(_misfits)


def _integers() -> None:
    rank = gm.axis().rank
    x = torch.arange(2, dtype=torch.int32) + rank
    for parts in (nn.gather(x, 1), nn.gather(x > 0, 1)):
        assert {part.dtype for part in parts} <= {torch.int32, torch.bool}
    assert nn.all_reduce(x, ReduceOp.MAX).tolist() == [1, 2]


def test_dtypes_stay(threads: Any) -> None:
    threads(2)(_integers)

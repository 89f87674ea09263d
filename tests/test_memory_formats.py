"""Results lie in memory as their operands do: channels_last and other dense formats, forward and backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]
SHAPE = (4, 6, 8, 10)
ORDERS = list(itertools.permutations(range(4)))

VERBS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce R": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_reduce I": lambda x: gm.all_reduce(x, dst=gm.I),
    "mean": lambda x: gm.all_reduce(x, op="mean", dst=gm.R),
    "max": lambda x: gm.all_reduce(x, op="max", dst=gm.R),
    "replicate": gm.replicate,
    "broadcast": gm.broadcast,
    "broadcast I": lambda x: gm.broadcast(x, dst=gm.I),
    "reduce": gm.reduce,
    "shift": gm.shift,
    "shift, open": lambda x: gm.shift(x, wrap=False),
    "permute": lambda x: gm.permute(x, pairs=[(0, gm.world_size() - 1)]),
    "scan": gm.scan,
    "exscan": gm.exscan,
    "convert, kept at one": lambda x: gm.convert(x, src=gm.R, dst=gm.P),
    "convert, relabelled": lambda x: gm.convert(x, src=gm.V, dst=gm.P),
    "narrower on the way": lambda x: gm.shift(x, comm_dtype=torch.float32),
    "async": lambda x: gm.all_reduce(x, dst=gm.R, async_op=True).wait(),
}
"""Whose result has the operand's shape."""

ALONG: dict[str, Callable[..., Tensor]] = {
    "all_gather": lambda x, dim: gm.all_gather(x, dim=dim),
    "all_gather I": lambda x, dim: gm.all_gather(x, dim=dim, dst=gm.I),
    "all_gather, asked": lambda x, dim: gm.all_gather(x, dim=dim, sizes="auto"),
    "gather": lambda x, dim: gm.gather(x, dim=dim, root=gm.world_size() - 1),
    "shard": lambda x, dim: gm.shard(x, dim=dim),
}
"""Whose result differs from it along one dimension."""


def along(dim: int) -> dict[str, Callable[[Tensor], Tensor]]:
    return {name: functools.partial(call, dim=dim) for name, call in ALONG.items()}


def laid_out(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values, with the dimensions in this order in memory."""
    back = [order.index(dim) for dim in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def order_of(x: Tensor) -> list[int]:
    """The dimensions by how far apart their elements lie, those of one element left out."""
    strides = list(x.stride())
    return sorted((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=lambda dim: -strides[dim])


def is_in_the_order_of(x: Tensor, other: Tensor) -> bool:
    return order_of(x) == [dim for dim in order_of(other) if x.shape[dim] > 1] and is_dense(x)


def is_dense(x: Tensor) -> bool:
    strides = list(x.stride())
    return not x.numel() or x.permute(*sorted(range(x.dim()), key=lambda d: -strides[d])).is_contiguous()


def own(*more: int) -> Tensor:
    draw = torch.Generator().manual_seed(1 + gm.rank())
    return torch.randn((*SHAPE, *more), generator=draw, dtype=torch.float64)


def differences(x: Tensor, call: Callable[[Tensor], Tensor]) -> list[str]:
    """What is not as it would be of a contiguous operand, but for the memory format, which is the operand's."""
    plain, same = x.detach().contiguous().requires_grad_(), x.detach().requires_grad_()
    assert same.stride() == x.stride()
    y, expected = call(same), call(plain)
    incoming = (1 + gm.rank()) * torch.randn(
        y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype
    )
    (wanted,) = torch.autograd.grad(expected, plain, incoming)
    laid = torch.empty_like(y).copy_(incoming)  # as whatever follows in that format hands it back
    (found,) = torch.autograd.grad(y, same, laid)
    wrong = {
        "value": not torch.equal(y, expected),
        "gradient": not torch.equal(found, wanted),
        "a view": y._is_view(),
        "format": bool(y.numel()) and not is_in_the_order_of(y, same),
        "format of the gradient": bool(y.numel()) and not is_in_the_order_of(found, same),
        "memory": bool(y.numel()) and y.data_ptr() == same.data_ptr(),
    }
    return [name for name, is_so in wrong.items() if is_so]


def all_of_them(orders: list[tuple[int, ...]]) -> list[str]:
    wrong = []
    for order in orders:
        x = laid_out(own(), order)
        calls = {**VERBS, **along(order[0])}
        wrong += [
            f"{name} of {order}: {what}" for name, call in calls.items() for what in differences(x, call)
        ]
    x = own(2).to(memory_format=torch.channels_last_3d)
    return wrong + [f"{name} in 3d: {what}" for name, call in VERBS.items() for what in differences(x, call)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_dense_format_is_kept_forward_and_backward(ranks: int, threads: Ranks) -> None:
    assert threads(ranks)(all_of_them, ORDERS[::2]) == [[]] * ranks


@pytest.mark.processes
def test_between_processes_every_dense_format_is_kept_forward_and_backward(processes: Ranks) -> None:
    assert processes(2)(all_of_them, ORDERS[::5]) == [[]] * 2


def as_each_rank_has_it() -> list[str]:
    """Ranks may lay their operands out differently: elements meet by their place in the tensor."""
    x = laid_out(own(), ORDERS[7 * gm.rank()])
    return [f"{name}: {what}" for name, call in VERBS.items() for what in differences(x, call)]


def test_ranks_with_different_formats_get_the_same_values(threads: Ranks) -> None:
    assert threads(3)(as_each_rank_has_it) == [[]] * 3


def of_gaps() -> list[tuple[bool, bool]]:
    found = []
    whole = own()
    for x in (whole[:, :, ::2], whole[:1].expand(*SHAPE), whole.transpose(0, 1)[1:]):
        y = gm.all_reduce(x, dst=gm.R)
        found.append((y.is_contiguous(), torch.equal(y, gm.all_reduce(x.contiguous(), dst=gm.R))))
    return found


def test_an_operand_with_gaps_or_overlaps_has_a_contiguous_result(threads: Ranks) -> None:
    assert threads(2)(of_gaps) == [[(True, True)] * 3] * 2


def imagined() -> list[str]:
    wrong = []
    for order in ORDERS[1::3]:
        x = laid_out(own(), order)
        calls = {**VERBS, **along(order[0])}
        for name, call in calls.items():
            if name in ("all_gather, asked", "async", "max"):  # ask for values
                continue
            there, nowhere = call(x), call(laid_out(x.to("meta"), order))
            if (there.shape, there.stride()) != (nowhere.shape, nowhere.stride()):
                wrong.append(f"{name} of {order}: {nowhere.stride()} in the place of {there.stride()}")
    return wrong


def test_tensors_without_values_get_the_same_strides(threads: Ranks) -> None:
    assert threads(2)(imagined) == [[]] * 2


def compiled_block(backend: str) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    first = torch.nn.Conv2d(6, 4, 3)
    first.weight.data = first.weight.data.to(memory_format=torch.channels_last)

    def block(x: Tensor) -> Tensor:
        y = gm.all_gather(torch.relu(first(x)))
        return gm.shift(gm.all_reduce(gm.replicate(y) ** 2, dst=gm.R))

    found = []
    for form in (torch.channels_last, torch.contiguous_format):
        x = own().float().to(memory_format=form).requires_grad_()
        results = []
        for call in (block, torch.compile(block, fullgraph=True, backend=backend)):
            y = call(x)
            results.append((y, *torch.autograd.grad((y**2).sum(), [x, first.weight])))
        for here, there in zip(*results, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-3)
            found.append((here.stride(), there.stride()))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_program_has_the_same_strides(backend: str, compiling: Ranks) -> None:
    for found in compiling(2)(compiled_block, backend):
        assert [here for here, _ in found] == [there for _, there in found]

"""The edges that the design decides: wide halos, rings of two, scalars, uneven and empty shards, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.ops.halo import plan

Threads = Callable[[int], Callable[..., list[Any]]]


def cut(whole: Tensor, sizes: tuple[int, ...], dim: int = 0) -> Tensor:
    return whole.split(list(sizes), dim)[gm.axis().rank]


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("halo", [0, 1, (2, 0), (0, 3), (4, 5), (9, 9)])
@pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 1, 1), (2, 0, 4), (0, 0, 2), (4,), (2, 2)])
def test_halo_holds_the_rows_around_the_local_ones_at_any_distance(
    sizes: tuple[int, ...], halo: int | tuple[int, int], wrap: bool, threads: Threads
) -> None:
    total = sum(sizes)
    left, right = (halo, halo) if isinstance(halo, int) else halo

    def on_each_rank() -> list[int]:
        x = cut(torch.arange(total), sizes)
        return gm.halo_exchange(x, halo=halo, wrap=wrap, sizes=sizes).tolist()

    for rank, got in enumerate(threads(len(sizes))(on_each_rank)):
        first = sum(sizes[:rank])
        wanted = range(first - left, first + sizes[rank] + right)
        assert got == [row % total if wrap else row for row in wanted if wrap or 0 <= row < total]


def test_a_ring_of_two_does_not_mix_up_its_two_messages(threads: Threads) -> None:
    def on_each_rank() -> tuple[list[float], list[float]]:
        rank = gm.axis().rank
        x = (torch.arange(3.0) + 10 * rank).requires_grad_()
        y = gm.halo_exchange(x, halo=1, wrap=True)
        y.backward(torch.arange(1.0, 6.0) * (1 + 10 * rank))
        assert x.grad is not None
        return y.tolist(), x.grad.tolist()

    (y0, g0), (y1, g1) = threads(2)(on_each_rank)
    assert y0 == [12, 0, 1, 2, 10]
    assert y1 == [2, 10, 11, 12, 0]
    # Rank 0's first row is the last of rank 1's halo (5 * 11), its last row the first of it (1 * 11).
    assert g0 == [2 + 55, 3, 4 + 11]
    assert g1 == [22 + 5, 33, 44 + 1]


def test_the_plan_of_an_empty_line_is_empty() -> None:
    assert plan((0, 0), 3, 3, True) == ((), ())


def test_an_all_to_all_of_different_dims_turns_a_cut_around(threads: Threads) -> None:
    whole = torch.arange(6 * 4).view(6, 4)

    def on_each_rank() -> tuple[bool, bool]:
        rows = cut(whole, (2, 2, 2))
        columns = gm.all_to_all(
            rows, split_dim=1, concat_dim=0, split_sizes=(2, 1, 1), concat_sizes=(2, 2, 2)
        )
        back = gm.all_to_all(
            columns, split_dim=0, concat_dim=1, split_sizes=(2, 2, 2), concat_sizes=(2, 1, 1)
        )
        return torch.equal(columns, cut(whole, (2, 1, 1), 1)), torch.equal(back, rows)

    assert threads(3)(on_each_rank) == [(True, True)] * 3


def test_scalars_stack_and_pass_through(threads: Threads) -> None:
    def on_each_rank() -> list[object]:
        x = torch.tensor(1.0 + gm.axis().rank)
        return [
            gm.all_gather(x).tolist(),
            gm.gather(x, root=1).tolist(),
            *(
                verb(x).item()
                for verb in (gm.scan, gm.exscan, gm.shift, gm.broadcast, gm.reduce, gm.replicate)
            ),
            gm.all_reduce(x, dst=gm.R).item(),
        ]

    assert threads(2)(on_each_rank) == [
        [[1, 2], [], 1, 0, 2, 1, 3, 1, 3],
        [[1, 2], [1, 2], 3, 1, 1, 1, 0, 2, 3],
    ]


def scattered_wholes() -> list[tuple[Tensor, Tensor]]:
    """Parts and gradients of a tensor that every rank has, each rank another one."""
    rank, found = gm.rank(), []
    for dim in (0, 1):
        for sizes in (None, "auto", (3, 0, 2)):
            x = torch.randn(5, 5, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            part = gm.scatter(x, dim=dim, root=1, sizes=sizes)
            ((1 + rank) * part**2).sum().backward()
            assert x.grad is not None
            found.append((part.detach(), x.grad))
    return found


def hold_scattered_wholes(got: list[list[tuple[Tensor, Tensor]]]) -> None:
    whole = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    cases = [(dim, sizes) for dim in (0, 1) for sizes in ((2, 2, 1), (2, 2, 1), (3, 0, 2))]
    for (dim, sizes), *ranks in zip(cases, *got, strict=True):
        for rank, (part, gradient) in enumerate(ranks):
            torch.testing.assert_close(part, whole.split(sizes, dim)[rank])
            weights = torch.cat(
                [torch.full_like(w, 2.0 * (1 + r)) for r, w in enumerate(whole.split(sizes, dim))], dim
            )
            torch.testing.assert_close(
                gradient, weights * whole if rank == 1 else torch.zeros(5, 5), rtol=1e-6, atol=1e-6
            )


def test_scatter_takes_a_whole_from_every_rank_and_reads_that_of_the_root(threads: Threads) -> None:
    hold_scattered_wholes(threads(3)(scattered_wholes))


@pytest.mark.processes
def test_between_processes_scatter_takes_a_whole_from_every_rank(processes: Threads) -> None:
    hold_scattered_wholes(processes(3)(scattered_wholes))


def test_scatter_raises_unless_the_operand_is_empty_or_full(threads: Threads) -> None:
    def on_each_rank() -> str:
        with pytest.raises((gm.ShapeError, gm.MismatchError)) as caught:
            gm.scatter(torch.ones(4 - gm.rank()))
        return str(caught.value)

    assert all("size 0, or 4 as at rank 0" in text for text in threads(3)(on_each_rank))


def test_scatter_uses_only_the_root_and_splits_evenly_or_by_sizes(threads: Threads) -> None:
    def on_each_rank() -> tuple[list[int], list[int], list[float]]:
        at_root = gm.axis().rank == 1
        x = torch.arange(7.0) if at_root else torch.empty(0)
        explicit = gm.scatter(x, root=1, sizes=(0, 5, 2))
        y = x.clone().requires_grad_()
        even = gm.scatter(y, root=1)
        (even * (1 + gm.axis().rank)).sum().backward()
        assert y.grad is not None
        return explicit.tolist(), even.tolist(), y.grad.tolist()

    assert threads(3)(on_each_rank) == [
        ([], [0, 1, 2], []),
        ([0, 1, 2, 3, 4], [3, 4], [1, 1, 1, 2, 2, 3, 3]),
        ([5, 6], [5, 6], []),
    ]


def test_sizes_may_be_explicit_or_exchanged(threads: Threads) -> None:
    def on_each_rank() -> list[bool]:
        rank = gm.axis().rank
        sizes = (2, 0, 3)
        whole = torch.arange(10.0).view(5, 2)
        x = cut(whole, sizes)
        return [
            gm.sizes(x) == sizes,
            torch.equal(gm.all_gather(x, sizes="auto"), whole),
            torch.equal(gm.all_gather(x, sizes=sizes, dst=gm.I), whole),
            torch.equal(gm.all_gather(x.T, dim=-1, sizes=list(sizes)), whole.T),
            torch.equal(gm.shard(whole, sizes=sizes), x),
            gm.shard(torch.zeros(2)).shape == ((1,), (1,), (0,))[rank],
            torch.equal(gm.reduce_scatter(whole, sizes=sizes), 3 * x),
            torch.equal(gm.halo_exchange(x, sizes="auto"), gm.halo_exchange(x, sizes=sizes)),
        ]

    assert threads(3)(on_each_rank) == [[True] * 8] * 3


@pytest.mark.parametrize("sizes", [(0, 0, 5), (5, 0, 0), (0, 0, 0)])
def test_ranks_with_nothing_take_part(sizes: tuple[int, ...], threads: Threads) -> None:
    def on_each_rank() -> list[float]:
        x = cut(torch.arange(float(sum(sizes))), sizes).requires_grad_()
        (gm.all_gather(x, sizes=sizes) * (1 + gm.axis().rank)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert threads(3)(on_each_rank) == [[6.0] * n for n in sizes]


def test_communication_dtypes_may_differ_forward_and_backward(threads: Threads) -> None:
    third = torch.tensor([1 / 3], dtype=torch.float64)

    def on_each_rank() -> tuple[bool, bool, torch.dtype]:
        x = third.clone().requires_grad_()
        y = gm.all_gather(x, comm_dtype=torch.bfloat16, backward_dtype=torch.float32)
        y.backward(third.repeat(2))
        assert x.grad is not None
        forward = torch.equal(y.detach(), third.bfloat16().double().repeat(2))
        backward = torch.equal(x.grad, 2 * third.float().double())
        return forward, backward, y.dtype

    assert threads(2)(on_each_rank) == [(True, True, torch.float64)] * 2


def test_a_world_of_one_gives_fresh_results_of_the_right_shape(threads: Threads) -> None:
    def on_each_rank() -> None:
        x = torch.randn(4, 2, requires_grad=True)
        for y in (
            gm.all_gather(x),
            gm.reduce_scatter(x),
            gm.all_to_all(x),
            gm.shard(x),
            gm.gather(x),
            gm.scatter(x),
            gm.broadcast(x),
            gm.reduce(x),
            gm.shift(x),
            gm.scan(x),
            gm.halo_exchange(x),
            gm.all_reduce(x, dst=gm.I),
            gm.all_reduce(x, op="max", dst=gm.R),
            gm.all_reduce(x, op="prod", dst=gm.R),
        ):
            assert torch.equal(y, x)
            assert y.data_ptr() != x.data_ptr()
            (g,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(g, torch.ones(4, 2))

    threads(1)(on_each_rank)


def test_float8_and_int16_travel_though_backends_do_not_know_them(threads: Threads) -> None:
    def on_each_rank() -> tuple[list[float], list[int]]:
        x = torch.tensor([1.0 + gm.axis().rank])
        eighth = gm.all_gather(x.to(torch.float8_e4m3fn)).float().tolist()
        return eighth, gm.reduce(x.to(torch.int16)).tolist()

    assert threads(2)(on_each_rank) == [([1, 2], [3]), ([1, 2], [0])]


def test_shift_and_permute_carry_sizes_that_differ(threads: Threads) -> None:
    sizes = (2, 0, 3)

    def on_each_rank() -> list[object]:
        rank = gm.axis().rank
        x = (torch.arange(float(sizes[rank])) + 10 * rank).requires_grad_()
        ring = gm.shift(x, sizes="auto")
        line = gm.shift(x, offset=-1, wrap=False, sizes=sizes)
        pair = gm.permute(x, pairs=[(2, 0)], sizes=sizes)
        (ring.sum() + 10 * line.sum() + 100 * (1 + rank) * pair.sum()).backward()
        assert x.grad is not None
        return [ring.tolist(), line.tolist(), pair.tolist(), x.grad.tolist()]

    assert threads(3)(on_each_rank) == [
        [[20, 21, 22], [], [20, 21, 22], [1, 1]],
        [[0, 1], [20, 21, 22], [], []],
        [[], [], [], [111, 111, 111]],
    ]


ONE_ELEMENT: dict[str, tuple[Callable[[Tensor], Any], list[float]]] = {
    "all_gather": (lambda x: gm.all_gather(x[None]), [2, 2]),
    "all_reduce": (lambda x: gm.all_reduce(x, dst=gm.R), [2, 2]),
    "all_to_all": (lambda x: gm.all_to_all(x.expand(2, *x.shape), split_dim=0, concat_dim=0), [2, 2]),
    "broadcast": (lambda x: gm.broadcast(x), [2, 0]),
    "exscan": (lambda x: gm.exscan(x), [1, 0]),
    "neighbor_all_to_all": (lambda x: gm.exchange([x, x]), [2, 2]),
    "permute": (lambda x: gm.permute(x, pairs=[(0, 1)]), [1, 0]),
    "reduce_scatter": (lambda x: gm.reduce_scatter(x.expand(2, *x.shape)), [2, 2]),
    "scatter": (lambda x: gm.scatter(x.expand(2, *x.shape)), [2, 0]),
    "shift": (lambda x: gm.shift(x[None]), [1, 1]),
}


@pytest.mark.processes
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_with_an_expanded_gradient_travels(shape: tuple[int, ...], processes: Threads) -> None:
    """The gradient of a sum has strides of 0, which one element may have and still be dense."""

    def on_each_rank() -> dict[str, float]:
        found = {}
        for verb, (call, _) in ONE_ELEMENT.items():
            x = torch.ones(shape, requires_grad=True)
            out = call(x)
            parts = out if isinstance(out, list | tuple) else [out]
            torch.stack([part.sum() for part in parts]).sum().backward()
            assert x.grad is not None
            found[verb] = x.grad.item()
        with gm.ordered():
            x = torch.ones(shape, requires_grad=True)
            if gm.rank() == 0:
                gm.send(x.detach().expand(shape), to=1)
                gm.send(torch.ones(()).expand(1, 1), to=1)
            else:
                found["recv"] = gm.recv(torch.empty(shape), source=0).item()
                found["recv 1x1"] = gm.recv(torch.empty(1, 1), source=0).item()
            gm.backward(gm.gather(x[None]).sum())
        assert x.grad is not None
        found["gather"] = x.grad.item()
        return found

    for rank, found in enumerate(processes(2)(on_each_rank)):
        received = {"recv": 1, "recv 1x1": 1} if rank else {}
        wanted = {verb: grads[rank] for verb, (_, grads) in ONE_ELEMENT.items()} | {"gather": 1} | received
        assert found == wanted

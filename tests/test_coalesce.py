"""`gm.coalesce`: the same numbers as one by one, in fewer messages, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import simulate

Ranks = Callable[[int], Callable[..., list[Any]]]
T = torch.float64


def operands() -> list[Tensor]:
    source = torch.Generator().manual_seed(gm.rank())
    shapes: list[tuple[int, ...]] = [(3,), (), (2, 4), (0,), (5, 1)]
    made = [torch.randn(shape, generator=source, dtype=T) for shape in shapes]
    made.append(torch.randn(3, generator=source))
    return [x.requires_grad_(i != 2) for i, x in enumerate(made)]


def one_of_each(x: Tensor, *, apart: bool) -> list[Any]:
    """Calls of several kinds."""
    return [
        gm.all_reduce(x, dst=gm.R, async_op=apart),
        gm.all_reduce(x, dst=gm.I, op="mean", async_op=apart),
        gm.all_gather(x, dim=x.dim() - 1 if x.dim() else 0, async_op=apart),
        gm.broadcast(x, root=1, async_op=apart),
        gm.shift(x, async_op=apart),
        gm.replicate(x, async_op=apart),
        gm.scan(x, async_op=apart),
    ]


def size(gradients: Sequence[Tensor | None]) -> Tensor:
    return torch.stack([g.double().square().sum() for g in gradients if g is not None]).sum() * (
        1 + gm.rank()
    )


def step(together: bool, ordered: bool, twice: bool) -> list[Any]:
    xs = operands()

    def loss() -> Tensor:
        if together:
            with gm.coalesce():
                made = [y for x in xs for y in one_of_each(x, apart=True)]
            results = [y.wait() for y in made]
        else:
            results = [y for x in xs for y in one_of_each(x, apart=False)]
        used = [
            y.double().sin().sum() * (1 + i + gm.rank()) for i, y in enumerate(results) if i % 3 != gm.rank()
        ]
        return torch.stack(used).sum() ** 2

    wanted = [x for x in xs if x.requires_grad]
    if ordered:
        with gm.ordered():
            first = gm.grad(loss(), wanted, create_graph=twice, allow_unused=True)
            if twice:
                gm.backward(size(first))
    else:
        first = torch.autograd.grad(loss(), wanted, create_graph=twice, allow_unused=True)
        if twice:
            size(first).backward()
    return [*(None if g is None else g.detach() for g in first), *(x.grad for x in wanted if twice)]


@pytest.mark.parametrize("twice", [False, True])
def test_coalesced_calls_are_the_calls_one_by_one(twice: bool, threads: Ranks) -> None:
    apart = threads(2)(step, False, True, twice)
    for one, many in zip(apart, threads(2)(step, True, True, twice), strict=True):
        for a, b in zip(many, one, strict=True):
            near = 1e-12 if b is None or b.dtype is T else 1e-6
            torch.testing.assert_close(a, b, rtol=near, atol=near)


def sums(together: bool, count: int) -> list[float]:
    xs = [torch.full((4,), 1.0 + i, requires_grad=True) for i in range(count)]
    if together:
        with gm.coalesce():
            made = [gm.all_reduce(x, dst=gm.R, async_op=True) for x in xs]
        ys = [one.wait() for one in made]
    else:
        ys = [gm.all_reduce(x, dst=gm.R) for x in xs]
    torch.stack([y.sum() for y in ys]).prod().backward()
    return [x.grad[0].item() for x in xs]  # type: ignore[index]


def test_many_small_tensors_are_one_message_forward_and_one_backward() -> None:
    one, many = simulate(sums, 2, args=(True, 6)), simulate(sums, 2, args=(False, 6))
    assert one.results == many.results
    assert [len(run.events.select(rank=0)) for run in (one, many)] == [2, 12]
    assert {sum(e.sent for e in run.events.select(rank=0)) for run in (one, many)} == {2 * 6 * 16}


@pytest.mark.processes
def test_on_processes_too(processes: Ranks) -> None:
    assert processes(2)(sums, True, 3) == processes(2)(sums, False, 3)


def test_ranks_whose_calls_in_the_block_differ_are_refused(threads: Ranks) -> None:
    def on_rank() -> str:
        a, b = torch.ones(2), torch.ones(3)
        with gm.coalesce():
            made = [gm.shift(x, async_op=True) for x in ((a, b) if gm.rank() else (b, a))]
        with pytest.raises(gm.MismatchError) as caught:
            made[0].wait()
        return str(caught.value)

    for text in threads(2)(on_rank):
        assert "made of [2], [3]" in text
        assert "made of [3], [2]" in text
        assert text.count("test_coalesce.py") == 2  # the lines are the caller's
        assert "contextlib" not in text


def test_a_wait_or_a_write_inside_the_block_is_refused(threads: Ranks) -> None:
    def on_rank() -> None:
        x = torch.ones(2)
        with pytest.raises(gm.OrderError, match="was not sent"), gm.coalesce():
            gm.shift(x, async_op=True).wait()
        with pytest.raises(gm.OrderError, match="was modified in place before the end"), gm.coalesce():
            x.add_(gm.shift(x, async_op=True).done())

    # What was refused was never sent, and leaves nothing to wait for.
    assert gm.launch(on_rank, 2, backend="threads") == [None, None]


def test_calls_on_another_axis_and_those_that_cut_go_by_themselves(threads: Ranks) -> None:
    def on_rank() -> list[Any]:
        gm.mesh(a=2, b=2)
        x = torch.arange(4.0) + gm.rank("a") + 10 * gm.rank("b")
        with gm.coalesce("a"):
            made = [
                gm.shift(x, "a", async_op=True),
                gm.shift(x, "b", async_op=True),
                gm.reduce_scatter(x, "a", async_op=True),
            ]
            made[1].wait()
        return [y.wait().tolist() for y in made]

    def at_once() -> list[Any]:
        gm.mesh(a=2, b=2)
        x = torch.arange(4.0) + gm.rank("a") + 10 * gm.rank("b")
        return [y.tolist() for y in (gm.shift(x, "a"), gm.shift(x, "b"), gm.reduce_scatter(x, "a"))]

    assert threads(4)(on_rank) == threads(4)(at_once)


def failing(how: str, xs: list[Tensor]) -> list[Any]:
    with gm.coalesce():
        coming = [gm.replicate(x, async_op=True) for x in xs]
        if how == "written":
            xs[1].add_(1)  # refused at the end of the block
            return coming
        if how == "kept":
            raise ValueError(coming)
        del coming
        raise ValueError


def left_by_an_error(how: str) -> list[Any]:
    xs = [torch.ones(2), torch.ones(3)]
    with pytest.raises((ValueError, gm.OrderError)) as caught:
        failing(how, xs)
    if how == "kept":
        with pytest.raises(gm.OrderError, match="raised an error before it sent"):
            caught.value.args[0][0].wait()
    del caught
    return [gm.all_gather(xs[0]).tolist()]  # would raise for calls that were never waited for


@pytest.mark.parametrize("how", ["kept", "lost", "written"])
def test_calls_that_an_error_kept_from_being_sent_need_no_wait(how: str, threads: Ranks) -> None:
    assert threads(2)(left_by_an_error, how) == [[[1.0] * 4]] * 2

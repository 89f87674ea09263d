"""Messages between two ranks and ragged exchanges, differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]


def stage(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x * w)


def pipeline(batches: int) -> tuple[Tensor, Tensor]:
    """A model of one stage a rank; microbatches go down the line. Returns the gradients of x and w on this rank."""
    rank, last = gm.axis().rank, gm.axis().size - 1
    x, w = weights(rank, batches)
    total = torch.zeros((), dtype=torch.float64)
    with gm.ordered():
        for i in range(batches):
            before = x[i] if rank == 0 else gm.recv(torch.empty(3, dtype=torch.float64), source=rank - 1)
            y = stage(before, w)
            if rank < last:
                gm.send(y, to=rank + 1)
            else:
                total = total + (i + 1) * (y**2).sum()
        gm.backward(total if rank == last else None)
    assert w.grad is not None
    return x.grad if x.grad is not None else torch.zeros_like(x), w.grad


def weights(rank: int, batches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(batches, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    return x.requires_grad_(), torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_()


def dense_pipeline(size: int, batches: int) -> tuple[Tensor, list[Tensor]]:
    x, ws = weights(0, batches)[0], [weights(rank, batches)[1] for rank in range(size)]
    y = x
    for w in ws:
        y = stage(y, w)
    (torch.arange(1, batches + 1)[:, None] * y**2).sum().backward()
    assert x.grad is not None
    return x.grad, [w.grad for w in ws if w.grad is not None]


def compare_pipeline(got: list[tuple[Tensor, Tensor]], size: int, batches: int) -> None:
    x, ws = dense_pipeline(size, batches)
    torch.testing.assert_close(got[0][0], x, rtol=1e-12, atol=1e-12)
    for (_, mine), expected in zip(got, ws, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_a_pipeline_has_the_gradient_of_the_whole_model(size: int, threads: Ranks) -> None:
    compare_pipeline(threads(size)(pipeline, 5), size, 5)


@pytest.mark.processes
def test_a_pipeline_of_processes_has_the_gradient_of_the_whole_model(processes: Ranks) -> None:
    compare_pipeline(processes(4)(pipeline, 5), 4, 5)


def test_both_ranks_may_send_first(threads: Ranks) -> None:
    def on_each_rank() -> tuple[list[float], list[float]]:
        rank = gm.axis().rank
        x = torch.full((2,), 1.0 + rank, requires_grad=True)
        with gm.ordered():
            gm.send(x**2, to=1 - rank)
            y = gm.recv(x, source=1 - rank)
            gm.backward((y * (10 + rank)).sum())
        assert x.grad is not None
        return y.tolist(), x.grad.tolist()

    # Each gradient comes from the other rank: 2 x times its factor.
    assert threads(2)(on_each_rank) == [([4.0, 4.0], [22.0, 22.0]), ([1.0, 1.0], [40.0, 40.0])]


def test_messages_and_collectives_mix_in_second_order(threads: Ranks) -> None:
    def on_each_rank() -> tuple[float, float]:
        rank = gm.axis().rank
        x = torch.tensor(2.0 + rank, dtype=torch.float64, requires_grad=True)
        with gm.ordered():
            y = gm.all_reduce(x**3, dst=gm.R)
            if rank == 0:
                gm.send(y * x, to=1)
                value = None
            else:
                value = gm.recv(x, source=0) ** 2
            (g,) = gm.grad(value, x, create_graph=True)
            gm.backward(g if rank == 1 else None)
        assert x.grad is not None
        return g.item(), x.grad.item()

    xs = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(((xs**3).sum() * xs[0]) ** 2, xs, create_graph=True)
    (second,) = torch.autograd.grad(g[1], xs)
    got = threads(2)(on_each_rank)
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), torch.stack([g.detach(), second], 1))


def test_unexpected_messages_are_reported() -> None:
    def on_each_rank() -> str:
        if gm.axis().rank == 0:
            gm.send(torch.ones(2), to=1)
            return ""
        with pytest.raises(gm.MismatchError) as caught:
            gm.recv(torch.ones(3), source=0)
        return str(caught.value)

    text = gm.launch(on_each_rank, 2, backend="threads", timeout=60)[1]
    assert "expected  float32[3] from rank 0" in text
    assert "got       float32[2]" in text


def test_forward_mode_and_vmap_of_a_message_are_refused() -> None:
    def on_each_rank() -> None:
        x, rank = torch.ones(2), gm.axis().rank
        with pytest.raises(gm.ArgumentError, match=r"do not support torch.func.vmap(.|\n)*gradmesh\.permute"):
            torch.func.vmap(lambda x: gm.send(x, to=1 - rank))(torch.ones(3, 2))
        with pytest.raises(gm.OrderError, match=r"does not support forward mode(.|\n)*gradmesh\.permute"):
            torch.func.jvp(lambda x: gm.send(x, to=1 - rank), (x,), (x,))
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(gm.OrderError, match=r"does not support forward mode"),
        ):
            gm.recv(x, source=1 - rank)

    gm.launch(on_each_rank, 2, backend="threads", timeout=60)


SHAPES = [[(2, 3), (), (0,)], [(1,), (0, 4), (2, 2)], [(5,), (1, 1, 2), (3,)]]
"""The shape that each of three ranks sends to each."""


def part(source: int, target: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * source + target)
    return torch.randn(SHAPES[source][target], dtype=torch.float64, generator=generator)


def ragged() -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    rank = gm.axis().rank
    parts = [part(rank, target).requires_grad_() for target in range(3)]
    got = gm.exchange(parts)
    loss = torch.stack([((1 + rank) * (g**3)).sum() for g in got]).sum()
    grads = torch.autograd.grad(loss, parts, create_graph=True)
    second = torch.autograd.grad(torch.stack([g.sum() for g in grads]).sum(), parts)
    return [g.detach() for g in got], [g.detach() for g in grads], list(second)


def check_ragged(results: list[tuple[list[Tensor], list[Tensor], list[Tensor]]]) -> None:
    for rank, (got, grads, second) in enumerate(results):
        for other in range(3):
            assert torch.equal(got[other], part(other, rank))
            sent = part(rank, other)
            torch.testing.assert_close(grads[other], (1 + other) * 3 * sent**2)
            torch.testing.assert_close(second[other], (1 + other) * 6 * sent)


def test_tensors_of_any_shape_are_exchanged_with_their_gradients(threads: Ranks) -> None:
    check_ragged(threads(3)(ragged))


def test_a_rank_that_sends_nothing_takes_part_in_the_second_derivative_of_an_exchange(threads: Ranks) -> None:
    def on_each_rank() -> Tensor | None:
        rank = gm.axis().rank
        x = part(0, 0).flatten().requires_grad_()
        sent = x if rank == 0 else x[:0]
        y = gm.exchange([sent, sent])[0]
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (grad * (1 + rank)).sum().backward()
        return x.grad

    first, second = threads(2)(on_each_rank)
    torch.testing.assert_close(first, 2 * 6 * part(0, 0).flatten())
    assert not second.any()


@pytest.mark.processes
def test_processes_exchange_tensors_of_any_shape(processes: Ranks) -> None:
    def on_each_rank() -> bool:
        rank = gm.axis().rank
        got = gm.exchange([torch.full((rank, r), 10 * rank + r) for r in range(4)])
        return all(torch.equal(g, torch.full((r, rank), 10 * r + rank)) for r, g in enumerate(got))

    assert processes(4)(on_each_rank) == [True] * 4


def many_first() -> bool:
    """More than any buffer holds, sent by both ranks before they receive."""
    rank, n = gm.rank(), 400
    for i in range(n):
        gm.send(torch.full((5_000 if i % 2 else 3,), float(i + rank)), to=1 - rank)
    got = [gm.recv(torch.empty(5_000 if i % 2 else 3), source=1 - rank) for i in range(n)]
    return all(bool((g == i + 1 - rank).all()) for i, g in enumerate(got))


def a_message_that_does_not_fit() -> object:
    """What the receiver says of it, and the message after it."""
    if gm.rank() == 0:
        gm.send(torch.ones(2), to=1)
        gm.send(torch.arange(3.0), to=1)
        return None
    with pytest.raises(gm.MismatchError) as caught:
        gm.recv(torch.ones(3, dtype=torch.float64), source=0)
    return str(caught.value), gm.recv(torch.ones(3), source=0).tolist()


def a_send_that_is_refused() -> object:
    if gm.rank() == 0:
        with pytest.raises(gm.DTypeError):
            gm.send(torch.ones(2), to=1, comm_dtype=torch.int8)
        gm.send(torch.arange(3.0), to=1)
        return None
    with pytest.raises(gm.MismatchError) as caught:
        gm.recv(torch.ones(2), source=0)
    return str(caught.value), gm.recv(torch.ones(3), source=0).tolist()


def a_send_whose_gradient_nobody_would_send_back() -> object:
    if gm.rank() == 0:
        with pytest.raises(
            gm.OrderError, match=r"gradmesh\.send: the backward of send might not run(.|\n)*ordered"
        ):
            gm.send(torch.ones(2, requires_grad=True), to=1)
        gm.send(torch.arange(3.0), to=1)
        return None
    with pytest.raises(gm.MismatchError) as caught:
        gm.recv(torch.ones(2), source=0)
    return str(caught.value), gm.recv(torch.ones(3), source=0).tolist()


def a_receive_that_is_refused() -> object:
    if gm.rank() == 0:
        gm.send(torch.ones(2), to=1)
        gm.send(torch.arange(3.0), to=1)
        return None
    with pytest.raises(gm.ArgumentError) as caught:
        gm.recv([1.0, 1.0], source=0)  # type: ignore[call-overload]
    return str(caught.value), gm.recv(torch.ones(3), source=0).tolist()


def both_ends_refuse() -> object:
    """The receiver's refusal takes the sender's with it."""
    if gm.rank() == 0:
        with pytest.raises(gm.ArgumentError):
            gm.send(None, to=1)  # type: ignore[call-overload]
        gm.send(torch.arange(3.0), to=1)
        return None
    with pytest.raises(gm.ArgumentError) as caught:
        gm.recv(None, source=0)  # type: ignore[call-overload]
    return str(caught.value), gm.recv(torch.ones(3), source=0).tolist()


REFUSED: dict[Callable[[], object], tuple[str, str]] = {
    a_message_that_does_not_fit: ("expected  float64[3] from rank 0", "got       float32[2]"),
    a_send_that_is_refused: ("expected  float32[2] from rank 0", "none, because send() raised on rank 0"),
    a_send_whose_gradient_nobody_would_send_back: (
        "expected  float32[2] from rank 0",
        "none, because send() raised on rank 0: gradmesh.send: the backward of send might not run",
    ),
    a_receive_that_is_refused: ("expected  a strided torch.Tensor", "got       list"),
    both_ends_refuse: ("expected  a strided torch.Tensor", "got       NoneType"),
}


@pytest.mark.parametrize("work", REFUSED, ids=lambda work: work.__name__)
def test_after_a_message_that_goes_wrong_the_next_is_right(
    work: Callable[[], object], threads: Ranks
) -> None:
    text, after = threads(2)(work)[1]
    assert all(words in text for words in REFUSED[work])
    assert after == [0.0, 1.0, 2.0]


@pytest.mark.processes
@pytest.mark.parametrize("work", REFUSED, ids=lambda work: work.__name__)
def test_after_a_message_of_processes_that_goes_wrong_the_next_is_right(
    work: Callable[[], object], processes: Ranks
) -> None:
    text, after = processes(2)(work)[1]
    assert all(words in text for words in REFUSED[work])
    assert after == [0.0, 1.0, 2.0]


def test_ranks_may_send_as_much_as_they_like_first(threads: Ranks) -> None:
    assert threads(2)(many_first) == [True, True]


@pytest.mark.processes
def test_processes_may_send_as_much_as_they_like_first(processes: Ranks) -> None:
    assert processes(2)(many_first) == [True, True]

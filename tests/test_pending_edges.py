"""Async calls with something else before their wait: modes, threads, passes inside of passes, kept objects."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import gradmesh as gm

Ranks = Callable[[int], Callable[..., list[Any]]]


def own(requires: bool = True) -> Tensor:
    return (torch.arange(3.0) + dist.get_rank()).requires_grad_(requires)


class Mark:
    """Something that a node of a graph can hold."""


def what_lives(apart: bool, ordered: bool) -> list[bool]:
    """Whether an operand and a result live on behind the call, without the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        x = own()

        def step() -> tuple[Tensor, list[weakref.ref[Any]]]:
            operand, mark = x.exp() * 2, Mark()
            assert operand.grad_fn is not None
            kept: Any = operand.grad_fn.metadata
            kept["mark"] = mark  # which lives as long as the graph before the call
            made = gm.all_gather(operand, async_op=apart)
            y = made.wait() if isinstance(made, gm.Pending) else made
            return y.sin().sum(), [weakref.ref(operand), weakref.ref(y), weakref.ref(mark)]

        if ordered:
            with gm.ordered():
                loss, refs = step()
                gm.backward(loss)
        else:
            loss, refs = step()
            before = [ref() is not None for ref in refs]
            loss.backward()
            del loss
            return before + [ref() is not None for ref in refs]
        return [ref() is not None for ref in refs]
    finally:
        gc.enable()


@pytest.mark.parametrize("ordered", [False, True])
def test_graph_of_an_async_call_saves_no_more_than_the_sync_one(ordered: bool, threads: Ranks) -> None:
    assert threads(2)(what_lives, True, ordered) == threads(2)(what_lives, False, ordered)


def test_a_link_is_not_ended_where_nothing_is_recorded(threads: Ranks) -> None:
    """Its operand requires no grad, but the chain goes through it."""

    def on_rank() -> list[float]:
        x = own()
        with gm.ordered():
            first = gm.all_gather(x)
            pending = gm.shift(torch.ones(2), async_op=True)
            with torch.no_grad(), pytest.raises(gm.OrderError, match="another grad mode"):
                pending.wait()
            pending.wait()
            second = gm.all_gather(2 * x)
            gm.backward((second * (first if gm.rank() == 0 else 1)).sum())
        assert x.grad is not None
        return x.grad.tolist()

    assert threads(2)(on_rank) == [[2.0, 6.0, 10.0], [6.0, 10.0, 14.0]]


def test_coalesced_calls_keep_their_grad_mode(threads: Ranks) -> None:
    def on_rank() -> list[Any]:
        x = own()
        with gm.coalesce():
            with torch.no_grad():
                hidden = gm.all_reduce(x, dst=gm.R, async_op=True)
            seen = gm.all_reduce(x, dst=gm.R, async_op=True)
        with torch.no_grad():
            constant = hidden.wait()
        (constant * seen.wait()).sum().backward()
        assert x.grad is not None
        return [constant.requires_grad, x.grad.tolist()]

    assert threads(2)(on_rank) == [[False, [2.0, 6.0, 10.0]]] * 2


def test_coalesced_calls_in_inference_mode(threads: Ranks) -> None:
    def on_rank() -> list[float]:
        with torch.inference_mode():
            with gm.coalesce():
                made = [gm.shift(own(False) + i, async_op=True) for i in range(2)]
            found: list[float] = (made[0].wait() + made[1].wait()).tolist()
            return found

    assert threads(2)(on_rank) == [[3.0, 5.0, 7.0], [1.0, 3.0, 5.0]]


def test_coalesced_calls_are_done_and_have_futures(threads: Ranks) -> None:
    def on_rank() -> list[list[float]]:
        with gm.coalesce():
            made = [gm.shift(own(False) + i, async_op=True) for i in range(2)]
        limit = time.monotonic() + 20
        while not all(one.done() for one in made):
            assert time.monotonic() < limit
        found = [one.value().tolist() for one in torch.futures.collect_all([p.future() for p in made]).wait()]
        assert found == [one.wait().tolist() for one in made]
        return found

    assert threads(2)(on_rank)[1] == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]


def test_a_future_of_coalesced_calls_does_not_stand_for_a_wait_that_backward_needs() -> None:
    def on_rank() -> None:
        with gm.coalesce():
            pending = gm.shift(own(), async_op=True)
        pending.future().wait()

    with pytest.raises(gm.RankError, match="never waited for"):
        gm.launch(on_rank, 2, backend="threads")


def test_a_deadlock_is_seen_through_calls_that_are_queued() -> None:
    def on_rank() -> None:
        x = torch.ones(2)
        gm.all_gather(x, async_op=True).wait()
        if gm.rank() == 0:
            kept = gm.all_gather(x, async_op=True)
            gm.shift(x, async_op=True).wait()
            kept.wait()
        else:
            gm.all_gather(x)

    begin = time.monotonic()
    with pytest.raises(gm.RankError, match="DeadlockError"):
        gm.launch(on_rank, 2, backend="threads", timeout=30)
    assert time.monotonic() - begin < 10


def test_a_constant_gradient_is_none_as_with_the_verb(threads: Ranks) -> None:
    """Zeros would be NaN behind an infinite derivative."""

    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> None:
            return None

    def on_rank(apart: bool) -> bool:
        x = torch.zeros(2, requires_grad=True)
        made = gm.all_reduce(x.sqrt(), dst=gm.I, async_op=apart)
        Ends.apply(made.wait() if isinstance(made, gm.Pending) else made).sum().backward()
        return x.grad is None

    assert threads(2)(on_rank, False) == threads(2)(on_rank, True) == [True, True]


def test_threads_of_a_rank_may_wait_for_one_call(threads: Ranks) -> None:
    def on_rank() -> int:
        if gm.rank() == 1:
            time.sleep(0.3)
        pending, found = gm.all_gather(torch.ones(2), async_op=True), list[Tensor]()
        waiting = [threading.Thread(target=lambda: found.append(pending.wait())) for _ in range(3)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        assert all(one is found[0] for one in found)
        return len(found)

    assert threads(2)(on_rank) == [3, 3]


def test_a_pass_inside_of_a_pass_over_the_same_graph(threads: Ranks) -> None:
    def on_rank(apart: bool) -> list[Any]:
        x = own()
        made = gm.all_gather(x, async_op=apart)
        between, inner = x.exp(), list[Any]()
        y = made.wait() if isinstance(made, gm.Pending) else made
        loss = y.sum() * between.sum() * (1 + gm.rank())

        def again(_: Tensor) -> None:
            if not inner:
                inner.append(None)
                inner.append(torch.autograd.grad(loss, x, retain_graph=True)[0].tolist())

        between.register_hook(again)
        loss.backward(retain_graph=True)
        assert x.grad is not None
        return [x.grad.tolist(), inner]

    assert threads(2)(on_rank, True) == threads(2)(on_rank, False)


def test_forward_mode_after_an_async_call(threads: Ranks) -> None:
    def on_rank(apart: bool) -> list[float]:
        gm.all_gather(torch.ones(1), async_op=True).wait()
        with forward_ad.dual_level():
            x = forward_ad.make_dual(own(False), own(False).exp())
            made = gm.all_gather(x, async_op=apart)
            y = made.wait() if isinstance(made, gm.Pending) else made
            tangent: list[float] = forward_ad.unpack_dual(y).tangent.tolist()
            return tangent

    assert threads(2)(on_rank, True) == threads(2)(on_rank, False)


def test_checkpoint_may_end_before_its_async_call_is_waited_for(threads: Ranks) -> None:
    """The second run of a region stops as soon as it has saved what backward needs."""

    def on_rank() -> list[float]:
        x = own()

        def region(x: Tensor) -> Tensor:
            pending = gm.shift(x.detach(), async_op=True)
            y = x.exp()
            return y + pending.wait()

        checkpoint(region, x, use_reentrant=False).sum().backward()
        assert x.grad is not None
        return gm.all_reduce(x.grad, dst=gm.R).tolist()

    first, second = threads(2)(on_rank)
    assert first == second


def test_a_wait_on_the_thread_that_makes_the_calls_is_refused(threads: Ranks) -> None:
    def on_rank() -> list[float]:
        x = own(False)
        if gm.rank() == 1:
            time.sleep(0.3)  # the other rank's first call is over when it says what then
        one, other = gm.shift(x, async_op=True), gm.shift(x, async_op=True)
        if gm.rank() == 0:
            future = one.future().then(lambda _: other.wait())
            with pytest.raises(RuntimeError, match="would deadlock"):
                future.wait()
        assert other.wait().equal(one.wait())  # the refused one as well
        found: list[float] = one.wait().tolist()
        return found

    assert threads(2)(on_rank) == [[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]


def test_a_wait_inside_of_a_coalesced_block_is_refused_and_the_call_can_be_waited_for_after_it(
    threads: Ranks,
) -> None:
    def on_rank() -> list[float]:
        with gm.coalesce():
            one = gm.shift(own(False), async_op=True)
            with pytest.raises(gm.OrderError, match=r"wait\(\) inside the block"):
                one.wait()
        found: list[float] = one.wait().tolist()
        return found

    assert threads(2)(on_rank) == [[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]

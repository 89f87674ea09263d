"""Inside `ordered()` every collective's backward runs on every rank, in the reverse of the forward order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]
SIZE = 3


def data(rank: int, n: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_()


def terms(x: Tensor) -> list[Tensor]:
    """Results of collectives on two axes, of which a rank's loss may use any."""
    a = gm.all_gather(x.sin(), "columns")
    b = gm.shift(a**2, "rows")
    c = gm.all_reduce(x * b.sum(), "columns", dst=gm.R)
    d = gm.scan(b.mean() * c, "rows")
    return [a, b, c, d]


def dense_terms(xs: Tensor, rows: int, columns: int) -> list[list[Tensor]]:
    """The same for all ranks, on one process."""
    at = lambda r, c: (r % rows) * columns + c
    spots = [(r, c) for r in range(rows) for c in range(columns)]
    a = [torch.cat([xs[at(r, k)].sin() for k in range(columns)]) for r, c in spots]
    b = [a[at(r - 1, c)] ** 2 for r, c in spots]
    c_ = [torch.stack([xs[at(r, k)] * b[at(r, k)].sum() for k in range(columns)]).sum(0) for r, c in spots]
    d = [torch.stack([b[at(k, c)].mean() * c_[at(k, c)] for k in range(r + 1)]).sum(0) for r, c in spots]
    return [[a[i], b[i], c_[i], d[i]] for i in range(len(spots))]


USES = [(), (3,), (0, 2), (1,)]
"""Which results each of four ranks' losses use: the first rank's none."""


def loss_of(results: list[Tensor], rank: int) -> Tensor | None:
    used = [(1 + rank) * (results[i] ** 2).sum() for i in USES[rank]]
    return torch.stack(used).sum() if used else None


def dense_loss(xs: Tensor) -> Tensor:
    results = dense_terms(xs, 2, 2)
    return torch.stack([loss for r in range(4) if (loss := loss_of(results[r], r)) is not None]).sum()


def whole() -> Tensor:
    return torch.stack([data(r).detach() for r in range(4)]).requires_grad_()


def test_ranks_that_use_different_outputs_get_the_dense_gradient(threads: Threads) -> None:
    def on_each_rank() -> Tensor | None:
        rank = gm.axis().rank
        gm.mesh(rows=2, columns=2)
        x = data(rank)
        with gm.ordered():
            gm.backward(loss_of(terms(x), rank))
        return x.grad

    xs = whole()
    dense_loss(xs).backward()
    torch.testing.assert_close(torch.stack(threads(4)(on_each_rank)), xs.grad, rtol=1e-12, atol=1e-12)


def test_without_the_chain_the_same_program_does_not_end_well(threads: Threads) -> None:
    """What `ordered` is for: the backward collectives do not meet."""

    def on_each_rank() -> None:
        rank = gm.axis().rank
        gm.mesh(rows=2, columns=2)
        loss = loss_of(terms(data(rank)), rank)
        if loss is not None:
            loss.backward()

    with pytest.raises(gm.RankError) as caught:
        gm.launch(on_each_rank, 4, backend="threads")
    assert isinstance(caught.value.__cause__, gm.DeadlockError | gm.MismatchError)


def test_higher_orders_with_different_losses_match_the_dense_ones(threads: Threads) -> None:
    def on_each_rank() -> list[Tensor]:
        rank = gm.axis().rank
        gm.mesh(rows=2, columns=2)
        x = data(rank)
        out = []
        with gm.ordered():
            value = loss_of(terms(x), rank)
            for order in range(3):
                (g,) = gm.grad(value if value is not None else x.sum() * 0, x, create_graph=True)
                out.append(g.detach())
                # A loss of another shape on each rank, and more collectives between the passes.
                shifted = gm.shift(g, "rows")
                value = (shifted**2).sum() * (1 + rank) if (rank + order) % 2 else None
                value = value if value is not None else (g**2).sum()
            gm.backward(value)
        return out

    xs = whole()
    value, expected = dense_loss(xs), []
    for order in range(3):
        (g,) = torch.autograd.grad(value, xs, create_graph=True)
        expected.append(g.detach())
        parts = []
        for rank in range(4):
            above = g[(rank + 2) % 4]
            parts.append((above**2).sum() * (1 + rank) if (rank + order) % 2 else (g[rank] ** 2).sum())
        value = torch.stack(parts).sum()
    got = threads(4)(on_each_rank)
    for order in range(3):
        mine = torch.stack([rank[order] for rank in got])
        torch.testing.assert_close(mine, expected[order], rtol=1e-11, atol=1e-11)


def test_an_operand_that_requires_no_grad_on_one_rank_takes_part(threads: Threads) -> None:
    def on_each_rank() -> list[float] | None:
        rank = gm.axis().rank
        x = data(rank).detach().requires_grad_(rank != 1)
        with gm.ordered():
            gm.backward((gm.all_gather(x) * (1 + rank)).sum())
        return None if x.grad is None else x.grad.tolist()

    assert threads(SIZE)(on_each_rank) == [[6.0] * 3, None, [6.0] * 3]


def test_a_rank_without_a_loss_and_one_without_rows_take_part(threads: Threads) -> None:
    def on_each_rank() -> list[float]:
        rank = gm.axis().rank
        x = data(rank, (2, 0, 3)[rank])
        with gm.ordered() as order:
            y = gm.all_gather(x, sizes="auto")
            loss = order.join(y.sum() if rank == 1 else None)
        loss.backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert threads(SIZE)(on_each_rank) == [[1.0, 1.0], [], [1.0, 1.0, 1.0]]


def test_rooted_verbs_need_no_care_inside(threads: Threads) -> None:
    def on_each_rank() -> float:
        rank = gm.axis().rank
        x = data(rank, 1)
        with gm.ordered():
            y = gm.gather(x**2, root=1)
            gm.reduce(x, root=0)  # used by no rank
            z = gm.scatter(y.sin(), root=1)
            gm.backward(z.sum() if rank != 2 else None)
        assert x.grad is not None
        return float(x.grad / (2 * x.detach() * (x.detach() ** 2).cos()))

    assert threads(SIZE)(on_each_rank) == [pytest.approx(1), pytest.approx(1), 0]


def test_two_backwards_in_one_block_have_a_chain_each(threads: Threads) -> None:
    def on_each_rank() -> tuple[float, float]:
        rank = gm.axis().rank
        x = data(rank, 1)
        with gm.ordered() as order:
            y = gm.scan(x)
            order.backward(y.sum() if rank else None)
            assert x.grad is not None
            first = x.grad.item()
            gm.all_reduce(x, dst=gm.R)
            z = gm.shift(3 * x)
            gm.backward(z.sum() if rank == 0 else None)
        return first, x.grad.item() - first

    assert threads(SIZE)(on_each_rank) == [(2.0, 0.0), (2.0, 0.0), (1.0, pytest.approx(3.0))]


def test_backward_to_given_inputs_keeps_the_chain(threads: Threads) -> None:
    def on_each_rank() -> tuple[float | None, float | None]:
        rank = gm.axis().rank
        x, w = data(rank, 1), torch.ones(1, dtype=torch.float64, requires_grad=True)
        with gm.ordered() as order:
            y = gm.all_reduce(x * w, dst=gm.R)
            order.backward(y.sum() if rank == 0 else None, inputs=x)
        return None if x.grad is None else x.grad.item(), None if w.grad is None else w.grad.item()

    assert threads(SIZE)(on_each_rank) == [(1.0, None)] * SIZE


def test_a_checkpointed_region_is_recomputed_on_every_rank_or_none(threads: Threads) -> None:
    """Also where a rank does not use the region: its collectives run again in backward, on all ranks alike."""

    def region(x: Tensor) -> Tensor:
        return (gm.all_gather(x.sin()) ** 2).cos()

    def on_each_rank(saving: bool) -> Tensor | None:
        rank = gm.axis().rank
        x = data(rank)
        with gm.ordered():
            before = gm.shift(x**2)
            y = checkpoint(region, x, use_reentrant=False) if saving else region(x)
            after = gm.scan(x * 2)
            loss = [y.sum() + after.sum(), None, (before * after).sum()][rank]
            gm.backward(loss)
        return x.grad

    plain, saved = threads(SIZE)(on_each_rank, False), threads(SIZE)(on_each_rank, True)
    for a, b in zip(plain, saved, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_a_reentrant_checkpoint_is_refused() -> None:
    def on_each_rank() -> None:
        x = data(gm.axis().rank)
        with gm.ordered():
            y = checkpoint(lambda x: gm.all_gather(x), x, use_reentrant=True)
            gm.shift(x)
            gm.backward(y.sum())

    with pytest.raises(gm.RankError, match="use_reentrant=False") as caught:
        gm.launch(on_each_rank, 2, backend="threads")
    assert isinstance(caught.value.__cause__, gm.OrderError)


def test_a_kept_graph_keeps_its_chain(threads: Threads) -> None:
    def on_each_rank() -> list[float]:
        rank = gm.axis().rank
        x = data(rank, 1)
        with gm.ordered():
            y = gm.all_gather(x)
            gm.backward(y.sum() if rank else None, retain_graph=True)
            (g,) = gm.grad((2 * y).sum() if rank == 1 else None, x, retain_graph=True)
            gm.backward((y**2).sum() if rank == 0 else None)
        assert x.grad is not None
        return [g.item(), (x.grad - 2 * x.detach()).item()]

    assert threads(SIZE)(on_each_rank) == [[2.0, pytest.approx(2.0)]] * SIZE


@pytest.mark.parametrize("opened", ["around both", "around the forward", "around the backward"])
def test_checkpoint_saves_the_same_inside_and_outside_the_block(opened: str, threads: Threads) -> None:
    def on_each_rank() -> Tensor | None:
        x = data(gm.axis().rank)
        run = lambda: checkpoint(lambda t: gm.all_gather(t.sin()) ** 2, x, use_reentrant=False)
        factor = 1 + gm.axis().rank
        if opened == "around the backward":
            y = run()
            with gm.ordered():
                gm.shift(x)
                gm.backward(factor * y.sum())
            return x.grad
        with gm.ordered() as order:
            y = run()
            loss = order.join(factor * y.sum())
            if opened == "around both":
                loss.backward()
        if opened == "around the forward":
            loss.backward()
        return x.grad

    for rank, got in enumerate(threads(SIZE)(on_each_rank)):
        x = data(rank).detach()
        torch.testing.assert_close(got, 6 * 2 * x.sin() * x.cos())


@pytest.mark.parametrize("joined", [False, True], ids=["backward in the block", "backward after the block"])
@pytest.mark.parametrize("nested", [False, True])
def test_messages_of_a_checkpointed_region_are_sent_again(
    joined: bool, nested: bool, threads: Threads
) -> None:
    def region(x: Tensor) -> Tensor:
        x = x.sin()
        if gm.axis().rank == 1:
            gm.send(x**2, to=0, async_op=True).wait()
            return x.cos()
        return x * gm.recv(torch.empty(3, dtype=torch.float64), source=1)

    def outer(x: Tensor) -> Tensor:
        return checkpoint(region, x.exp(), use_reentrant=False).cos()

    def on_each_rank() -> Tensor | None:
        x = data(gm.axis().rank)
        with gm.ordered() as order:
            y = (
                checkpoint(outer, x, use_reentrant=False)
                if nested
                else checkpoint(region, x.exp(), use_reentrant=False).cos()
            )
            loss = order.join(y.sum())
            if not joined:
                loss.backward()
        if joined:
            loss.backward()
        return x.grad

    xs = [data(rank) for rank in range(2)]
    a, b = (x.exp().sin() for x in xs)
    ((a * b**2).cos().sum() + b.cos().cos().sum()).backward()
    for x, got in zip(xs, threads(2)(on_each_rank), strict=True):
        torch.testing.assert_close(got, x.grad)


@pytest.mark.parametrize("opened", ["around the forward", "around the backward"])
def test_a_collective_without_a_gradient_in_a_checkpointed_region_keeps_what_is_saved(
    opened: str, threads: Threads
) -> None:
    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            total = gm.all_reduce(x, dst=gm.I)
        return (x * total).sin()

    def on_each_rank() -> Tensor | None:
        x = data(gm.axis().rank)
        if opened == "around the backward":
            y = checkpoint(region, x, use_reentrant=False)
            with gm.ordered():
                gm.backward(y.sum())
            return x.grad
        with gm.ordered() as order:
            loss = order.join(checkpoint(region, x, use_reentrant=False).sum())
        loss.backward()
        return x.grad

    total = torch.stack([data(rank) for rank in range(SIZE)]).sum(0).detach()
    for rank, got in enumerate(threads(SIZE)(on_each_rank)):
        torch.testing.assert_close(got, total * (data(rank) * total).cos())


def test_a_hooks_collective_is_on_no_chain(threads: Threads) -> None:
    def on_each_rank() -> float:
        x = data(gm.axis().rank, 1)
        with gm.ordered():
            y = gm.replicate(x)
            hook = y.register_hook(lambda g: gm.all_reduce(g, dst=gm.I))
            (g,) = gm.grad((y * 2).sum(), x, create_graph=True)
            hook.remove()
            gm.backward((g * x).sum())
        return g.item()

    assert threads(2)(on_each_rank) == [8.0, 8.0]


def test_failed_pass_leaves_a_chain_that_can_restart(threads: Threads) -> None:
    def fail(g: Tensor) -> None:
        raise ZeroDivisionError

    def on_each_rank() -> float:
        x = data(gm.axis().rank, 1)
        with gm.ordered():
            y = gm.scan(x)
            y.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                gm.backward(y.sum())
            gm.backward(gm.shift(x).sum())
        assert x.grad is not None
        return x.grad.item()

    assert threads(2)(on_each_rank) == [1.0, 1.0]


def test_a_rank_may_have_nothing_to_differentiate(threads: Threads) -> None:
    def on_each_rank() -> float:
        x = data(gm.axis().rank, 1)
        with gm.ordered():
            y = gm.all_reduce(x, dst=gm.R)
            (g,) = gm.grad(y if gm.axis().rank else None, x)
        return g.item()

    assert threads(SIZE)(on_each_rank) == [2.0] * SIZE


def test_a_rank_that_made_no_call_may_have_a_loss_of_nothing(threads: Threads) -> None:
    """Two ranks exchange a message, and a third one has neither that nor anything to differentiate."""

    def on_each_rank() -> list[float]:
        x = torch.tensor([2.0], requires_grad=True)
        with gm.ordered():
            loss = torch.zeros(())
            if gm.rank() == 0:
                gm.send(x, to=1)
            elif gm.rank() == 1:
                loss = (gm.recv(torch.empty(1), source=0) ** 2).sum()
            gm.backward(loss)
        return [] if x.grad is None else x.grad.tolist()

    assert threads(3)(on_each_rank) == [[4.0], [], []]


@pytest.mark.parametrize("loss", [0.0, "a", torch.tensor(1)])
def test_a_loss_that_has_no_gradient_is_refused(loss: Any, threads: Threads) -> None:
    def on_each_rank() -> None:
        with (
            gm.ordered() as order,
            pytest.raises(gm.OrderError, match="must be a floating-point or complex tensor"),
        ):
            order.join(loss)

    threads(2)(on_each_rank)


def test_batches_of_gradients_are_refused(threads: Threads) -> None:
    def on_each_rank() -> None:
        x = data(gm.axis().rank)
        with gm.ordered():
            y = gm.shift(x)
            with pytest.raises(gm.OrderError, match="is_grads_batched=True"):
                gm.grad(y, x, torch.eye(3, dtype=torch.float64), is_grads_batched=True)
            gm.backward(y.sum())

    threads(2)(on_each_rank)


def test_a_join_without_grad_mode_ties_nothing(threads: Threads) -> None:
    def on_each_rank() -> None:
        x = data(gm.axis().rank)

        def program() -> None:
            with gm.ordered() as order:
                y = gm.shift(x)
                with torch.no_grad():
                    order.join(y.sum())

        with pytest.raises(gm.OrderError, match=r"without join\(\)"):
            program()

    threads(2)(on_each_rank)


def test_nested_blocks_share_the_outer_chain(threads: Threads) -> None:
    def on_each_rank() -> float:
        x = data(gm.axis().rank, 1)
        with gm.ordered() as outer:
            y = gm.scan(x)
            with gm.ordered() as inner:
                assert inner is outer
                gm.shift(y)
            gm.backward(y.sum() if gm.axis().rank else None)
        assert x.grad is not None
        return x.grad.item()

    assert threads(SIZE)(on_each_rank) == [2.0, 2.0, 1.0]


def test_forgetting_join_is_an_error_that_counts_and_points(threads: Threads) -> None:
    def on_each_rank() -> str:
        x = data(gm.axis().rank)

        def forgetful() -> None:
            with gm.ordered():
                gm.all_gather(x)
                gm.shift(x)

        with pytest.raises(gm.OrderError) as caught:
            forgetful()
        assert gm.all_gather(torch.ones(1)).tolist() == [1.0] * SIZE
        return str(caught.value)

    for text in threads(SIZE)(on_each_rank):
        assert "without join()" in text
        assert "2 collectives that were not joined, the first: all_gather at" in text
        assert "test_order.py" in text


def test_a_collective_after_join_is_an_error(threads: Threads) -> None:
    def on_each_rank() -> None:
        x = data(gm.axis().rank)
        with gm.ordered():
            gm.join(gm.all_gather(x).sum())
            with pytest.raises(gm.OrderError, match=r"called after join\(\)(.|\n)*covered 1 collectives"):
                gm.shift(x)

    threads(2)(on_each_rank)


def test_an_exception_in_the_block_comes_through_as_it_is(threads: Threads) -> None:
    def on_each_rank() -> None:
        def broken() -> None:
            with gm.ordered():
                gm.all_gather(data(gm.axis().rank))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            broken()
        with pytest.raises(gm.OrderError, match=r"called outside of gm.ordered\(\)"):
            gm.join(torch.ones(()))

    threads(2)(on_each_rank)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vjp"])
def test_torch_func_derivatives_inside_are_refused(transform: str, threads: Threads) -> None:
    def on_each_rank() -> None:
        x = data(gm.axis().rank).detach()
        f = lambda x: gm.all_gather(x).sum()
        run: dict[str, Callable[[], object]] = {
            "grad": lambda: torch.func.grad(f)(x),
            "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
            "vjp": lambda: torch.func.vjp(f, x),
        }
        with gm.ordered(), pytest.raises(gm.OrderError, match=r"torch\.func derivatives are not supported"):
            run[transform]()

    threads(2)(on_each_rank)


def test_vmap_inside_is_a_loop(threads: Threads) -> None:
    def on_each_rank() -> tuple[Tensor, Tensor | None]:
        x = data(gm.axis().rank, 6)
        with gm.ordered():
            y = torch.func.vmap(lambda x: gm.all_gather(x))(x.view(2, 3))
            gm.backward((y.sin().sum() * (1 + gm.axis().rank)) if gm.axis().rank else None)
        return y.detach(), x.grad

    got = threads(2)(on_each_rank)
    rows = torch.stack([data(r, 6).detach().view(2, 3) for r in range(2)])
    for rank, (y, g) in enumerate(got):
        assert torch.equal(y, torch.cat([rows[0], rows[1]], 1))
        torch.testing.assert_close(g, 2 * rows[rank].reshape(-1).cos())


def test_a_tangent_under_vmap_inside_is_a_link_too(threads: Threads) -> None:
    """Reverse over forward; only one rank's loss uses the tangent."""
    from torch.autograd import forward_ad

    def on_each_rank() -> Tensor | None:
        x = data(gm.axis().rank, 6)
        with forward_ad.dual_level(), gm.ordered():
            dual = forward_ad.make_dual(x, data(5, 6).detach())
            y = torch.func.vmap(lambda x: gm.all_gather(x**3))(dual.view(2, 3))
            tangent = forward_ad.unpack_dual(y).tangent
            gm.backward(tangent.sum() if gm.axis().rank == 1 else None)
        return x.grad

    for rank, grad in enumerate(threads(2)(on_each_rank)):
        torch.testing.assert_close(grad, (6 * data(rank, 6) * data(5, 6)).detach())


def test_forward_mode_levels_pass_through(threads: Threads) -> None:
    from torch.autograd import forward_ad

    def on_each_rank() -> list[float]:
        x = data(gm.axis().rank, 1)
        with gm.ordered(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            y = gm.scan(dual)
            tangent = forward_ad.unpack_dual(y).tangent
            assert tangent is not None
            gm.backward(y.sum() if gm.axis().rank == 0 else None)
        return tangent.tolist()

    assert threads(SIZE)(on_each_rank) == [[1.0], [2.0], [3.0]]


def test_call_without_gradient_is_not_an_ordered_op(threads: Threads) -> None:
    def on_each_rank() -> None:
        with gm.ordered():
            gm.all_gather(torch.tensor([gm.axis().rank]))
            with torch.no_grad():
                gm.all_gather(torch.ones(1))

    threads(2)(on_each_rank)


def test_an_unused_output_behind_an_infinite_slope_gives_nan_as_documented(threads: Threads) -> None:
    def on_each_rank() -> bool:
        x = torch.zeros(1, requires_grad=True)
        with gm.ordered():
            gm.all_gather(x.sqrt())
            gm.backward(None)
        return x.grad is not None and bool(x.grad.isnan().all())

    assert threads(2)(on_each_rank) == [True, True]


@pytest.mark.processes
def test_unused_outputs_do_not_hang_processes(processes: Threads) -> None:
    def on_each_rank() -> Tensor | None:
        rank = gm.axis().rank
        gm.mesh(rows=2, columns=2)
        x = data(rank)
        with gm.ordered():
            gm.backward(loss_of(terms(x), rank))
        return x.grad

    xs = whole()
    dense_loss(xs).backward()
    torch.testing.assert_close(torch.stack(processes(4)(on_each_rank)), xs.grad, rtol=1e-12, atol=1e-12)


def two_trainings(steps: int) -> list[str]:
    """Two threads of a process, each with a group and a chain of its own; what became of them."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    became = ["", ""]

    def train(which: int) -> None:
        try:
            for _ in range(steps):
                x = torch.tensor([1.0 + rank + which, 2.0], dtype=torch.float64, requires_grad=True)
                with gm.ordered():
                    y = gm.scan(gm.all_gather(x.sin(), groups[which]), groups[which])
                    gm.backward((y**2).sum() if (rank + which) % 2 else None)
                xs = [
                    torch.tensor([1.0 + other + which, 2.0], dtype=torch.float64, requires_grad=True)
                    for other in range(2)
                ]
                whole = torch.cat([other.sin() for other in xs])
                (
                    ((2 - which) * whole) ** 2
                ).sum().backward()  # the rank that has the loss is the scan's last or first
                assert x.grad is not None
                assert xs[rank].grad is not None
                torch.testing.assert_close(x.grad, xs[rank].grad)
            became[which] = "right"
        except Exception as error:
            became[which] = repr(error)

    threads = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for group in groups:
        dist.destroy_process_group(group)
    return became


@pytest.mark.processes
def test_two_threads_of_a_process_have_separate_chains(
    processes: Callable[[int], Callable[..., list[Any]]],
) -> None:
    assert processes(2)(two_trainings, 20) == [["right", "right"]] * 2


def without_values() -> tuple[int, ...]:
    a = torch.ones(3, device="meta", requires_grad=True)
    with gm.ordered():
        y = checkpoint(
            lambda x: gm.all_reduce(gm.all_reduce(x, dst=gm.R).sin(), dst=gm.R), a, use_reentrant=False
        )
        gm.backward(y.sum())
    assert a.grad is not None
    return tuple(a.grad.shape)


def test_meta_tensors_in_a_checkpoint_have_gradients_without_values(threads: Threads) -> None:
    assert threads(2)(without_values) == [(3,), (3,)]

"""The verbs in every autodiff mode that torch has, against one dense program on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]
SIZE = 3


def local_data(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def chain(x: Tensor, w: Tensor) -> Tensor:
    """A loss that differs from rank to rank and goes through ops of every kind of type."""
    y = gm.all_gather(torch.sin(x))
    y = gm.shift(y * w, offset=1)
    y = gm.reduce_scatter(y**3)
    y = gm.halo_exchange(y, halo=1)
    return gm.all_reduce((y**2).sum(), dst=gm.R) * w.sum()


def dense_chain(xs: Tensor, ws: Tensor) -> Tensor:
    """The sum of all ranks' losses, on one process; xs is (ranks, n), ws (ranks, 1)."""
    ranks, n = xs.shape
    y = [torch.sin(xs).reshape(-1) * w for w in ws]
    y = [y[(r - 1) % ranks] ** 3 for r in range(ranks)]
    total = torch.stack(y).sum(0)
    padded = [total[max(r * n - 1, 0) : (r + 1) * n + 1] for r in range(ranks)]
    return sum((p**2).sum() for p in padded) * ws.sum()


def whole_data() -> tuple[Tensor, Tensor]:
    return torch.stack([local_data(r, 4) for r in range(SIZE)]), torch.arange(
        1.0, SIZE + 1, dtype=torch.float64
    )[:, None]


def own_data() -> tuple[Tensor, Tensor]:
    xs, ws = whole_data()
    return xs[gm.axis().rank], ws[gm.axis().rank]


def test_backward_and_higher_orders_match_the_dense_program(threads: Threads) -> None:
    def on_each_rank() -> list[Tensor]:
        x, w = own_data()
        x.requires_grad_()
        out, value = [], chain(x, w)
        for _ in range(3):
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            out.append(g.detach())
            value = (g**2).sum()
        return out

    xs, ws = whole_data()
    xs.requires_grad_()
    value = dense_chain(xs, ws)
    got = threads(SIZE)(on_each_rank)
    for order in range(3):
        (g,) = torch.autograd.grad(value, xs, create_graph=True)
        torch.testing.assert_close(
            torch.stack([rank[order] for rank in got]), g.detach(), rtol=1e-12, atol=1e-12
        )
        value = (g**2).sum()


@pytest.mark.parametrize("mode", ["grad", "vjp", "vmap of grad"])
def test_reverse_transforms_match_the_dense_gradient(mode: str, threads: Threads) -> None:
    def on_each_rank() -> Tensor:
        x, w = own_data()
        if mode == "grad":
            return torch.func.grad(chain)(x, w)
        if mode == "vjp":
            _, pull = torch.func.vjp(lambda x: chain(x, w), x)
            return pull(torch.tensor(1.0, dtype=torch.float64))[0]
        batch = torch.stack([2 * x, x])
        return torch.func.vmap(torch.func.grad(lambda x: chain(x, w)))(batch)[1]

    xs, ws = whole_data()
    expected = torch.func.grad(dense_chain)(xs, ws)
    torch.testing.assert_close(torch.stack(threads(SIZE)(on_each_rank)), expected, rtol=1e-12, atol=1e-12)


def test_jvp_and_jvp_of_grad_match_the_dense_ones(threads: Threads) -> None:
    def on_each_rank() -> tuple[Tensor, Tensor]:
        x, w = own_data()
        along = (x.cos(),)
        _, tangent = torch.func.jvp(lambda x: chain(x, w), (x,), along)
        _, curved = torch.func.jvp(torch.func.grad(lambda x: chain(x, w)), (x,), along)
        return tangent, curved

    xs, ws = whole_data()
    along = (xs.cos(),)
    _, tangent = torch.func.jvp(lambda xs: dense_chain(xs, ws), (xs,), along)
    _, curved = torch.func.jvp(torch.func.grad(lambda xs: dense_chain(xs, ws)), (xs,), along)
    got = threads(SIZE)(on_each_rank)
    torch.testing.assert_close(sum(t for t, _ in got), tangent, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack([c for _, c in got]), curved, rtol=1e-12, atol=1e-12)


def test_jacobian_transforms_give_the_sum_over_ranks_of_the_blocks(threads: Threads) -> None:
    """Every rank is seeded at once, which is documented; one dense Jacobian says what the sum has to be."""

    def on_each_rank() -> tuple[Tensor, Tensor, Tensor]:
        x, w = own_data()
        weighted = lambda x: gm.all_gather(x**2) * w
        return (
            torch.func.jacrev(weighted)(x),
            torch.func.jacfwd(weighted)(x),
            torch.func.hessian(lambda x: chain(x, w))(x),
        )

    xs, ws = whole_data()
    blocks = torch.func.jacrev(lambda xs: torch.stack([(xs**2).reshape(-1) * w for w in ws]))(xs)
    hessians = torch.func.hessian(dense_chain)(xs, ws)
    for rank, (reverse, forward, hessian) in enumerate(threads(SIZE)(on_each_rank)):
        # Reverse: every rank's row i is pulled back together. Forward: every rank's column j is pushed together.
        torch.testing.assert_close(reverse, blocks[:, :, rank].sum(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(forward, blocks[rank].sum(1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(hessian, hessians[rank].sum(1), rtol=1e-12, atol=1e-12)


def test_torch_gradcheck_passes_on_a_world_of_one(threads: Threads) -> None:
    """On more ranks they perturb all of them at once, forward and backward in ways that do not match."""

    def on_each_rank() -> None:
        x, w = own_data()
        x = x[:2].clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x: gm.all_to_all(gm.all_gather(x.sin()) * w),
            x,
            check_forward_ad=True,
            check_batched_grad=True,
            check_batched_forward_grad=True,
        )
        assert torch.autograd.gradgradcheck(lambda x: chain(x, w), x, check_fwd_over_rev=True)

    threads(1)(on_each_rank)


def test_batched_gradients_are_a_loop_over_gradients(threads: Threads) -> None:
    def on_each_rank() -> tuple[Tensor, Tensor, Tensor]:
        x, _ = own_data()
        x.requires_grad_()
        y = gm.shift(gm.all_gather(x.sin(), dim=0)[:5] ** 2)
        seeds = torch.stack([local_data(10 * s + gm.axis().rank, 5) for s in range(4)])
        (batched,) = torch.autograd.grad(y, x, seeds, is_grads_batched=True, retain_graph=True)
        looped = torch.stack([torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in seeds])
        jacobian = torch.autograd.functional.jacobian(gm.shift, x.detach(), vectorize=True)
        assert isinstance(jacobian, Tensor)
        return batched, looped, jacobian

    for batched, looped, jacobian in threads(SIZE)(on_each_rank):
        torch.testing.assert_close(batched, looped, rtol=1e-14, atol=1e-14)
        assert torch.equal(jacobian, torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_with_the_same_gradient(reentrant: bool, threads: Threads) -> None:
    def on_each_rank() -> tuple[Tensor, Tensor]:
        x, w = own_data()
        plain, saved = x.clone().requires_grad_(), x.clone().requires_grad_()
        chain(plain, w).backward()
        loss = checkpoint(chain, saved, w, use_reentrant=reentrant)
        assert isinstance(loss, Tensor)
        loss.backward()
        assert plain.grad is not None
        assert saved.grad is not None
        return plain.grad, saved.grad

    for plain, saved in threads(SIZE)(on_each_rank):
        assert torch.equal(plain, saved)


def test_hooks_see_and_may_change_the_gradient(threads: Threads) -> None:
    def on_each_rank() -> tuple[list[float], list[float]]:
        seen: list[float] = []
        x = torch.tensor([1.0], requires_grad=True)
        y = gm.all_gather(x)
        y.register_hook(lambda g: seen.append(g.sum().item()))
        x.register_hook(lambda g: 10 * g)
        (y * (1 + gm.axis().rank)).sum().backward()
        assert x.grad is not None
        return seen, x.grad.tolist()

    assert threads(2)(on_each_rank) == [([2.0], [30.0]), ([4.0], [30.0])]


def test_complex_gradients_are_torchs_conjugate_wirtinger_ones(threads: Threads) -> None:
    def data(rank: int) -> Tensor:
        return torch.complex(local_data(rank, 2), local_data(rank + 10, 2))

    def on_each_rank() -> Tensor:
        z = data(gm.axis().rank).requires_grad_()
        y = gm.all_gather(z.exp())
        loss = ((1 + gm.axis().rank) * y * y.conj().roll(1)).real.sum()
        loss.backward()
        assert z.grad is not None
        return z.grad

    whole = torch.stack([data(r) for r in range(SIZE)]).requires_grad_()
    y = whole.exp().reshape(-1)
    torch.stack([((1 + r) * y * y.conj().roll(1)).real.sum() for r in range(SIZE)]).sum().backward()
    assert whole.grad is not None
    got = torch.stack(threads(SIZE)(on_each_rank))
    torch.testing.assert_close(got, whole.grad, rtol=1e-12, atol=1e-12)


def test_expanded_and_strided_gradients_are_taken(threads: Threads) -> None:
    def on_each_rank() -> tuple[Tensor | None, Tensor | None]:
        x = torch.ones(2, 2, requires_grad=True)
        gm.all_reduce(x, dst=gm.R).sum().backward()  # the gradient is an expanded scalar
        y = torch.ones(2, 2, requires_grad=True)
        weight = torch.arange(4.0).view(2, 2)
        (gm.all_gather(y).t()[:, :2] * weight).sum().backward()
        return x.grad, y.grad

    for x, y in threads(2)(on_each_rank):
        assert torch.equal(x, torch.full((2, 2), 2.0))
        assert y is not None
    first, second = (y for _, y in threads(2)(on_each_rank))
    assert torch.equal(first, 2 * torch.arange(4.0).view(2, 2).t())
    assert torch.equal(second, torch.zeros(2, 2))


def test_a_dual_of_a_rooted_op_keeps_its_tangent_beside_reverse_mode(threads: Threads) -> None:
    def on_each_rank() -> float:
        x = torch.tensor(3.0 if gm.axis().rank == 0 else 0.0)
        _, tangent = torch.func.jvp(lambda x: gm.broadcast(x) ** 2, (x,), (torch.ones(()),))
        return tangent.item()

    assert threads(2)(on_each_rank) == [6.0, 6.0]

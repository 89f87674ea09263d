"""Rules that were learned by trying: memory, participation, captured axes, forward mode on threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]

SAME_SHAPE: dict[str, Callable[[Tensor], Tensor]] = {
    "replicate": gm.replicate,
    "all_reduce to R": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_reduce to I": lambda x: gm.all_reduce(x, dst=gm.I),
    "convert V to P": lambda x: gm.convert(x, src=gm.V, dst=gm.P),
    "convert R to P": lambda x: gm.convert(x, src=gm.R, dst=gm.P),
    "convert R to I": lambda x: gm.convert(x, src=gm.R, dst=gm.I),
    "broadcast": gm.broadcast,
    "shift": gm.shift,
    "scan": gm.scan,
    "max": lambda x: gm.all_reduce(x, op="max", dst=gm.R),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("verb", SAME_SHAPE)
def test_gradients_of_two_operands_never_share_memory(verb: str, size: int, threads: Threads) -> None:
    def on_each_rank() -> bool:
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        (SAME_SHAPE[verb](a) + SAME_SHAPE[verb](b)).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        kept = b.grad.clone()
        a.grad.fill_(99)
        return torch.equal(b.grad, kept)

    assert all(threads(size)(on_each_rank))


@pytest.mark.parametrize("verb", SAME_SHAPE)
def test_the_gradient_handed_in_is_never_written(verb: str, threads: Threads) -> None:
    def on_each_rank() -> bool:
        x = torch.ones(3, requires_grad=True)
        g = torch.arange(3.0)
        SAME_SHAPE[verb](x).backward(g)
        assert x.grad is not None
        x.grad.add_(1)
        return torch.equal(g, torch.arange(3.0))

    assert all(threads(2)(on_each_rank))


@pytest.mark.parametrize("verb", SAME_SHAPE)
def test_a_result_written_in_place_leaves_the_operand_alone(verb: str, threads: Threads) -> None:
    def on_each_rank() -> bool:
        x = torch.arange(3.0, requires_grad=True)
        SAME_SHAPE[verb](x).mul_(5).sum().backward()
        return torch.equal(x, torch.arange(3.0)) and x.grad is not None

    assert all(threads(2)(on_each_rank))


@pytest.mark.parametrize("verb", ["broadcast", "scatter"])
def test_results_from_a_root_require_grad_on_every_rank(verb: str, threads: Threads) -> None:
    """Else the ranks whose own operand requires none would not join the backward collective."""

    def on_each_rank() -> tuple[bool, bool, bool, list[float] | None]:
        at_root = gm.axis().rank == 0
        x = torch.ones(2 if at_root or verb == "broadcast" else 0, requires_grad=at_root)
        run = lambda x: gm.broadcast(x) if verb == "broadcast" else gm.scatter(x, sizes=(1, 1))
        y = run(x)
        with torch.no_grad():
            quiet = run(x)
        counted = gm.broadcast(torch.ones(2, dtype=torch.int64))
        (y.sum() * (1 + gm.axis().rank)).backward()
        grad = None if x.grad is None else x.grad.tolist()
        return y.requires_grad, quiet.requires_grad, counted.requires_grad, grad

    expected = [3.0, 3.0] if verb == "broadcast" else [1.0, 2.0]
    assert threads(2)(on_each_rank) == [(True, False, False, expected), (True, False, False, None)]


def test_second_order_through_a_root_needs_no_care(threads: Threads) -> None:
    def on_each_rank() -> float | None:
        at_root = gm.axis().rank == 0
        x = torch.tensor(2.0, requires_grad=True)
        y = gm.broadcast(x)
        (g,) = torch.autograd.grad((1 + gm.axis().rank) * y**3, x, create_graph=True)
        (g * 1.0 if at_root else 0 * g).backward()
        return None if x.grad is None else x.grad.item()

    # The root's gradient is (1 + 2) 3 x^2, and the derivative of that 18 x.
    assert threads(2)(on_each_rank)[0] == 36.0


def test_a_recomputation_meets_the_axis_of_the_first_run(threads: Threads) -> None:
    """Backward and checkpoint may run when another mesh is current; the op keeps the axis it was called with."""

    def on_each_rank() -> tuple[list[float], int]:
        gm.mesh(rows=2, columns=2)
        x = torch.tensor([1.0 + gm.axis("columns").rank], requires_grad=True)
        y = gm.all_gather(x, "columns")
        axis = gm.axis("columns")
        z = checkpoint(lambda x: gm.all_gather(x, axis) ** 2, x, use_reentrant=False)
        assert isinstance(z, Tensor)
        gm.mesh(columns=4)
        ((1 + axis.rank) * (y + z)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist(), gm.axis("columns").size

    assert threads(4)(on_each_rank) == [([9.0], 4), ([15.0], 4)] * 2


def test_forward_mode_on_many_threads_at_once_is_right(threads: Threads) -> None:
    """Levels of forward mode are global to a process; ranks that enter and leave them at odds must not meet."""

    def on_each_rank() -> bool:
        rank = gm.axis().rank
        x = torch.full((8,), 1.0 + rank, dtype=torch.float64)
        right = True
        for turn in range(12):
            time.sleep(0.001 * ((rank * 7 + turn * 3) % 4))
            _, tangent = torch.func.jvp(lambda x: gm.all_reduce(x**2, dst=gm.R), (x,), (torch.ones_like(x),))
            right &= torch.equal(tangent, torch.full_like(x, 20.0))
            hessian = torch.func.hessian(lambda x: (gm.replicate(x) ** 3).sum())(x[:2])
            total = sum(6 * (1.0 + r) for r in range(4))
            right &= torch.equal(torch.diagonal(hessian), torch.full((2,), total, dtype=torch.float64))
        return right

    assert threads(4)(on_each_rank) == [True] * 4


def test_threads_and_subgroups_in_any_order_keep_separate_state(threads: Threads) -> None:
    def on_each_rank() -> tuple[list[int], list[int]]:
        rank = dist.get_rank()
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
        mine = groups[rank % 2]
        first = gm.all_gather(torch.tensor(rank), mine).tolist()
        if rank % 2:
            time.sleep(0.02)
        return first, gm.shift(torch.tensor([rank]), mine).tolist()

    # Ranks of a group are in the order that torch gives them, which sorts.
    assert threads(4)(on_each_rank) == [([0, 2], [2]), ([1, 3], [3]), ([0, 2], [0]), ([1, 3], [1])]


def test_a_sparse_gradient_is_taken(threads: Threads) -> None:
    def on_each_rank() -> list[float]:
        w = torch.ones(3, 1, requires_grad=True)
        rows = torch.tensor([gm.axis().rank, 2])
        torch.nn.functional.embedding(rows, gm.replicate(w), sparse=True).sum().backward()
        assert w.grad is not None
        return w.grad.flatten().tolist()

    assert threads(2)(on_each_rank) == [[1.0, 1.0, 2.0]] * 2


def test_whatever_python_takes_for_an_int_is_one(threads: Threads) -> None:
    np = pytest.importorskip("numpy")

    def on_each_rank() -> list[list[int]]:
        x = torch.arange(2) + 2 * gm.axis().rank
        return [
            gm.all_gather(x, dim=np.int64(0), sizes=torch.tensor([2, 2])).tolist(),  # type: ignore[call-overload]
            gm.broadcast(x, root=np.int32(1)).tolist(),
            gm.shift(x, offset=np.int64(1)).tolist(),
            gm.permute(x, pairs=zip([0, 1], [1, 0], strict=True)).tolist(),  # type: ignore[call-overload]
            gm.shard(x, sizes=np.array([1, 1])).tolist(),
            gm.halo_exchange(x, halo=np.int64(1)).tolist(),
        ]

    first, second = threads(2)(on_each_rank)
    assert first == [[0, 1, 2, 3], [2, 3], [2, 3], [2, 3], [0], [0, 1, 2]]
    assert second == [[0, 1, 2, 3], [2, 3], [0, 1], [0, 1], [3], [1, 2, 3]]

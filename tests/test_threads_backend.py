"""The threads backend: every collective of torch.distributed, on ranks that are threads."""

from __future__ import annotations

import datetime
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.func import hessian, jacfwd, jvp

import gradmesh as gm
from gradmesh import _torch
from gradmesh.backends import threads
from gradmesh.backends.threads import rendezvous
from gradmesh.errors import ArgumentError, DeadlockError, MismatchError, RankError, ShapeError
from gradmesh.launch import launch
from gradmesh.runtime.state import RankState

W = 3
# The names of torch 2.13, and the ones before them, which it deprecates.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
functional_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
functional_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def ranks(fn: Callable[..., Any], *args: Any, nprocs: int = W, timeout: float = 60) -> list[Any]:
    return launch(fn, nprocs, backend="threads", args=args, timeout=timeout)


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(1, 7, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# ---- values


def test_no_memory_is_shared_between_ranks() -> None:
    def work() -> list[int]:
        x = torch.ones(2)
        out = [torch.empty(2) for _ in range(W)]
        dist.all_gather(out, x)
        dist.all_reduce(x)
        objects: list[Any] = [None] * W
        dist.all_gather_object(objects, x)
        received = torch.empty(2)
        pair = [dist.isend(x, (dist.get_rank() + 1) % W), dist.irecv(received, (dist.get_rank() - 1) % W)]
        for request in pair:
            assert request is not None
            request.wait()
        kept.append([x, *out, received, *objects])
        return [t.data_ptr() for t in kept[-1]]

    kept: list[list[Tensor]] = []
    pointers = [p for of_rank in ranks(work) for p in of_rank]
    assert len(set(pointers)) == len(pointers)


# ---- who a rank is


def test_rank_state_is_rank_local() -> None:
    def work() -> tuple[int, bool]:
        mine = threads.here.kept
        assert isinstance(mine, RankState)
        mine.put(dist.get_rank())
        dist.barrier()
        helper: list[object] = []
        thread = threading.Thread(target=lambda: helper.append(threads.here.kept))
        thread.start()
        thread.join()
        again = threads.here.kept
        assert again is mine
        return mine.objects[int], helper == [None]

    assert ranks(work) == [(0, True), (1, True), (2, True)]
    assert threads.here.kept is None


def test_an_outer_world_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        outer = dist.group.WORLD
        seen: list[bool] = []

        def work() -> int:
            done = threading.Event()

            def look() -> None:  # a thread that is not a rank sees the process's world, also meanwhile
                seen.append(dist.group.WORLD is outer and dist.get_world_size() == 1)
                done.set()

            threading.Thread(target=look).start()
            done.wait()
            return dist.get_world_size()

        assert ranks(work) == [3] * 3
        with pytest.raises(RankError):
            ranks(lambda: 1 / 0)
        assert seen == [True] * 3
        assert dist.group.WORLD is outer
        x = funcol.all_reduce(torch.ones(1), "sum", outer)  # type: ignore[arg-type]
        assert x.item() == 1
    finally:
        dist.destroy_process_group()


def test_a_world_leaves_torch_as_it_found_it() -> None:
    def state() -> list[object]:
        return [
            c10d._world,
            c10d._backend,
            sys.excepthook,
            forward_ad.enter_dual_level,
            forward_ad.exit_dual_level,
            type(forward_ad._current_level),
            type(eager_transforms.JVP_NESTING),
            torch.get_num_threads(),
        ]

    before = state()
    ranks(lambda: jvp(torch.sin, (torch.ones(1),), (torch.ones(1),)))
    with pytest.raises(RankError):
        ranks(lambda: 1 / 0)
    assert state() == before
    assert not dist.is_initialized()


def test_a_group_may_be_destroyed_and_made_again() -> None:
    def work() -> list[float]:
        x, y = torch.ones(1), torch.ones(1)
        dist.all_reduce(x)
        store = PrefixStore("again", HashStore())
        rank = dist.get_rank()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("threads", store=store, rank=rank, world_size=W)
        dist.all_reduce(y)
        return [x.item(), y.item()]

    assert ranks(work) == [[3, 3]] * W


def test_a_rank_may_launch_ranks() -> None:
    def inner(outer: int) -> float:
        x = torch.tensor(float(outer + dist.get_rank()))
        dist.all_reduce(x)
        return x.item()

    def work() -> list[float]:
        got = ranks(inner, 10 * dist.get_rank(), nprocs=2)
        assert dist.get_world_size() == W
        dist.barrier()
        return got

    assert ranks(work) == [[1, 1], [21, 21], [41, 41]]


def test_backend_raises_on_a_non_rank_thread() -> None:
    threads.register()
    with pytest.raises(ArgumentError, match=r"gradmesh\.launch"):
        dist.init_process_group("threads", store=HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_tensors_are_given_back_after_a_call() -> None:
    def work() -> bool:
        x = torch.ones(3)
        dist.all_reduce(x)
        ref = weakref.ref(x)
        del x
        dist.barrier()
        gc.collect()
        return ref() is None

    assert all(ranks(work))


@pytest.mark.timed
def test_many_ranks_are_practical() -> None:
    def work() -> float:
        x, out = torch.tensor([float(dist.get_rank())]), torch.empty(64)
        for _ in range(20):
            all_gather_single(out, x)
        return out.sum().item()

    start = time.monotonic()
    assert ranks(work, nprocs=64) == [2016] * 64
    assert time.monotonic() - start < 20


# ---- wrong programs


def failure(fn: Callable[[], object], nprocs: int = W) -> RankError:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(fn, nprocs=nprocs)
    assert time.monotonic() - start < 10
    return caught.value


def by_rank(*calls: Callable[[], object]) -> Callable[[], object]:
    return lambda: calls[dist.get_rank()]()


MISMATCHES = {
    "ops": (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 0)),
    "roots": (lambda: dist.broadcast(torch.ones(2), 0), lambda: dist.broadcast(torch.ones(2), 1)),
    "reductions": (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX),
    ),
    "shapes": (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(3))),
    "dtypes": (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(2).double())),
    "sizes": (
        lambda: all_gather_single(torch.ones(4), torch.ones(2)),
        lambda: all_gather_single(torch.ones(6), torch.ones(3)),
    ),
    "splits": (
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 2]),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 2]),
    ),
    "messages": (lambda: dist.send(torch.ones(2), 1), lambda: dist.recv(torch.ones(3), 0)),
}


@pytest.mark.timed
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_shows_the_call_of_each_rank(name: str) -> None:
    error = failure(by_rank(*MISMATCHES[name]), nprocs=2)
    assert isinstance(error.__cause__, MismatchError)
    for rank in range(2):
        assert f"rank {rank}  " in str(error)
    assert str(error).count(f"{__file__}:") >= 2


def test_mismatch_raises_on_every_rank() -> None:
    heard: list[int] = []

    def work() -> None:
        try:
            dist.all_reduce(torch.ones(1 + dist.get_rank()))
        except MismatchError:
            heard.append(dist.get_rank())

    ranks(work)
    assert sorted(heard) == [0, 1, 2]


def test_kernel_error_raises_on_every_rank() -> None:
    def work() -> str:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND)
        return str(caught.value)

    assert all("bitwise_and" in text for text in ranks(work))


@pytest.mark.timed
def test_a_large_tensor_that_is_not_one_piece_per_rank_is_refused() -> None:
    error = failure(lambda: all_gather_single(torch.ones(7), torch.ones(2)))
    assert isinstance(error.__cause__, (ShapeError, ValueError, RuntimeError))


@pytest.mark.timed
def test_unknown_reduction_error_lists_the_known_ones() -> None:
    error = failure(lambda: dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0)))  # type: ignore[attr-defined]
    assert isinstance(error.__cause__, ArgumentError)
    assert "PREMUL_SUM" in str(error)
    assert "BXOR" in str(error)


@pytest.mark.timed
def test_deadlock_names_the_waiting_ranks_and_lines() -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(3), 2, tag=5)

    text = str(failure(work))
    assert "DeadlockError" in text
    assert "rank 0  waits in all_reduce(sum)  float32[2]  at " in text
    assert "rank 1  waits in recv(from place 2, tag 5)  float32[3]  at " in text
    assert "rank 2  has returned" in text
    assert "of ranks 0, 1, 2" in text


@pytest.mark.timed
def test_a_deadlock_names_a_rank_that_goes_back_through_another_ranks_graph() -> None:
    kept: list[torch.Tensor] = []
    made = threading.Event()

    def work() -> None:
        y = gm.all_reduce(torch.ones(1, requires_grad=True), dst=gm.R).sum()
        if dist.get_rank() == 0:
            kept.append(y)
            made.set()
            dist.barrier()
        else:
            assert made.wait(10)
            kept[0].backward()

    text = str(failure(work, nprocs=2))
    assert "DeadlockError" in text
    assert "rank 0  waits in barrier" in text
    assert "rank 1  waits in a call on behalf of another rank" in text


@pytest.mark.timed
def test_two_groups_in_different_orders_are_a_deadlock() -> None:
    def work() -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        if dist.get_rank():
            groups.reverse()
        for group in groups:
            dist.barrier(group=group)

    assert isinstance(failure(work, nprocs=2).__cause__, DeadlockError)


@pytest.mark.timed
def test_waiting_for_a_rank_that_returned_ends_while_others_still_run() -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1)
        while dist.get_rank() == 2 and time.monotonic() < start + 20:
            time.sleep(0.05)  # in short sleeps, which end with a thread

    start = time.monotonic()
    with pytest.raises(RankError, match="DeadlockError"):
        ranks(work)
    assert time.monotonic() - start < 5


def test_slow_rank_is_not_reported_as_deadlock() -> None:
    def work() -> float:
        x = torch.ones(1)
        if dist.get_rank() == 1:
            time.sleep(1.2)
        dist.all_reduce(x)
        return x.item()

    assert ranks(work) == [3] * W


@pytest.mark.timed
def test_the_timeout_of_a_group_is_honoured() -> None:
    def work() -> None:
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.6))
        if dist.get_rank() == 0:
            dist.barrier(group=group)
        elif dist.get_rank() == 1:
            time.sleep(1.5)
            dist.barrier(group=group)

    error = failure(work)
    assert isinstance(error.__cause__, DeadlockError)
    assert "0.6 s" in str(error)


@pytest.mark.timed
def test_a_failing_rank_wakes_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE", 30)  # a rank that only looked around now and then would be late
    woken: list[tuple[float, BaseException]] = []
    failed_at: list[float] = []

    def work() -> None:
        if dist.get_rank() == 2:
            time.sleep(0.4)
            failed_at.append(time.monotonic())
            raise ValueError("boom")
        try:
            dist.barrier()
        except BaseException as error:
            woken.append((time.monotonic() - failed_at[0], error))
            raise

    error = failure(work)
    assert error.rank == 2
    assert isinstance(error.__cause__, ValueError)
    assert len(woken) == 2
    for seconds, secondary in woken:
        assert seconds < 2
        assert isinstance(secondary, RankError)
        assert "rank 2 failed with ValueError: boom" in str(secondary)


# ---- forward mode


def composed(depth: int) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = torch.sin(x) * 1.1
        return x

    return f


def test_forward_mode_on_all_ranks_at_once_gives_right_values() -> None:
    def work() -> int:
        rank, wrong = dist.get_rank(), 0
        x = torch.linspace(0, 1, 4, dtype=torch.float64) + rank
        t = torch.linspace(1, 2, 4, dtype=torch.float64)
        for i in range(60):
            f = composed(1 + (7 * i + 13 * rank) % 25)
            leaf = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(f(leaf).sum(), leaf)
            along = jvp(f, (x,), (t,))[1]
            wrong += not torch.allclose(along, slope * t)
            with forward_ad.dual_level():
                tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent
            wrong += tangent is None or not torch.allclose(tangent, slope * t)
        for n in (3, 4):
            wrong += not torch.allclose(jacfwd(jacfwd(lambda z: (z**3).sum()))(x), torch.diag(6 * x))
            wrong += not torch.allclose(
                hessian(lambda z, n=n: (z**n).sum())(x).diag(), n * (n - 1) * x ** (n - 2)
            )
        return wrong

    assert ranks(work, nprocs=4, timeout=120) == [0] * 4


def test_a_rank_outside_forward_mode_does_not_see_the_others_level() -> None:
    def work() -> tuple[bool, bool]:
        if dist.get_rank() == 0:
            with forward_ad.dual_level():
                inside = _torch.transforms_active()
                dist.barrier()
                dist.barrier()
            return inside, _torch.transforms_active()
        dist.barrier()
        seen = _torch.transforms_active(), forward_ad._current_level >= 0
        dist.barrier()
        return seen

    assert ranks(work, nprocs=2) == [(True, False), (False, False)]


def test_a_nested_level_is_refused_as_torch_refuses_it() -> None:
    def work() -> None:
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match="Nested forward mode"),
            forward_ad.dual_level(),
        ):
            pass
        assert not _torch.transforms_active()

    ranks(work)


def test_a_launch_inside_a_dual_level_leaves_the_level_alone() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(1), torch.full((1,), 3.0))
        got = ranks(lambda: jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))[1].item())
        assert got == [1.0] * W
        assert forward_ad._current_level == 0
        tangent = forward_ad.unpack_dual(dual * 2).tangent
        assert tangent is not None
        assert tangent.item() == 6
    assert forward_ad._current_level == -1


def test_collectives_do_not_carry_tangents_or_graphs() -> None:
    def work() -> bool:
        x = torch.ones(2, requires_grad=True)
        out = torch.empty(2 * W)
        all_gather_single(out, x * 2)
        return out.requires_grad

    assert ranks(work) == [False] * W


def test_inference_tensors_may_be_reduced() -> None:
    def work() -> float:
        with torch.inference_mode(dist.get_rank() == 0):
            x = torch.ones(1)
            dist.all_reduce(x)
            return x.item()

    assert ranks(work) == [3] * W

"""Direct calls of gradmesh's groups, without c10d: values, signatures, and both ways of making them."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gradmesh as gm
from gradmesh.backends.own_group import CallCheck, OwnGroup
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.backends.threads.group import ThreadsGroup
from tests.seldom import seldom

pytestmark = pytest.mark.processes

W = 3
BACKENDS = {"threads": ("threads", None), "shm": ("shm", None), "shm, tiny chunks": ("shm", "4096")}
SIZES = [0, 1, 7, 1000, 20_001]


class Run(Protocol):
    def __call__(self, fn: Callable[..., Any], *args: Any, nprocs: int = W) -> list[Any]: ...


@pytest.fixture(scope="module", params=BACKENDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Run]:
    """`ranks(fn, *args, nprocs=n)` runs fn on n ranks of the backend."""
    backend, chunk = BACKENDS[request.param]
    pools: dict[int, gm.Ranks] = {}

    def run(fn: Callable[..., Any], *args: Any, nprocs: int = W) -> list[Any]:
        if nprocs not in pools:
            pools[nprocs] = gm.Ranks(nprocs, backend=backend, timeout=60)
            with pytest.MonkeyPatch.context() as patch:
                if chunk is not None:
                    patch.setenv("GRADMESH_SHM_CHUNK", chunk)
                pools[nprocs].run(dist.barrier)
        return pools[nprocs].run(fn, *args)

    yield run
    for pool in pools.values():
        pool.close()


def world() -> OwnGroup:
    made = dist.group.WORLD
    assert isinstance(made, OwnGroup)
    return made


def data(rank: int, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return (10 * torch.randn(count, generator=generator, dtype=torch.float64)).to(dtype)


class _Transparent(TorchDispatchMode):
    """Does nothing, but a mode that a call must not be seen by keeps it from the direct way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def moved(count: int, dtype: torch.dtype) -> dict[str, bool]:
    """Whether every call that moves has the values that it should have."""
    group, rank, size = world(), dist.get_rank(), dist.get_world_size()
    right = {}
    out = torch.empty(size * count, dtype=dtype)
    group.all_gather_flat(out, data(rank, count, dtype))
    right["all_gather"] = torch.equal(out, torch.cat([data(r, count, dtype) for r in range(size)]))
    group.exchange_flat(out, data(rank, size * count, dtype))
    expected = torch.cat([data(r, size * count, dtype).view(size, count)[rank] for r in range(size)])
    right["equal exchange"] = torch.equal(out, expected)
    counts = [[count * ((source + target) % 2) + target for target in range(size)] for source in range(size)]
    takes = [row[rank] for row in counts]
    out = torch.empty(sum(takes), dtype=dtype)
    group.exchange_flat(out, data(rank, sum(counts[rank]), dtype), counts[rank], takes)
    pieces = [data(r, sum(counts[r]), dtype).split(counts[r])[rank] for r in range(size)]
    right["uneven exchange"] = torch.equal(out, torch.cat(pieces))
    for root in range(size):
        out = torch.empty(count, dtype=dtype)
        group.broadcast_flat(out, data(rank, count, dtype), root)
        right[f"broadcast from {root}"] = torch.equal(out, data(root, count, dtype))
    first, last = rank == 0, rank == size - 1
    out = torch.empty(0 if first else count, dtype=dtype)
    group.relay_flat(out, data(rank, 0 if last else count, dtype), None if first else rank - 1)
    right["relay"] = first or torch.equal(out, data(rank - 1, count, dtype))
    return right


def summed(count: int, dtype: torch.dtype) -> dict[str, bool]:
    """Whether every call that sums has the values that it should have, to the bit."""
    group, rank, size = world(), dist.get_rank(), dist.get_world_size()
    right = {}

    def total(count: int) -> Tensor:
        expected = data(0, count, dtype)
        for other in range(1, size):
            expected = expected + data(other, count, dtype)
        return expected

    out = torch.empty(count, dtype=dtype)
    group.all_reduce_flat(out, data(rank, count, dtype))
    right["all_reduce"] = torch.equal(out, total(count))
    out = torch.empty(count, dtype=dtype)
    group.reduce_scatter_flat(out, data(rank, size * count, dtype))
    right["reduce_scatter"] = torch.equal(out, total(size * count).view(size, count)[rank])
    for root in range(size):
        out = torch.full((count,), 1, dtype=dtype)
        group.reduce_flat(out, data(rank, count, dtype), root)
        expected = total(count) if rank == root else torch.ones(count, dtype=dtype)
        right[f"reduce to {root}"] = torch.equal(out, expected)
    return right


@pytest.mark.parametrize("nprocs", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.bool, torch.complex64])
def test_every_call_has_its_values(dtype: torch.dtype, nprocs: int, ranks: Run) -> None:
    for work in (moved, summed):
        for count in SIZES:
            for right in ranks(work, count, dtype, nprocs=nprocs):
                assert right == dict.fromkeys(right, True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bfloat16])
def test_storage_only_dtypes_are_communicated(dtype: torch.dtype, ranks: Run) -> None:
    def work() -> dict[str, bool]:
        size, rank = W, dist.get_rank()
        bits = [torch.randint(0, 100, (6,), generator=torch.Generator().manual_seed(r)) for r in range(size)]
        given = [each.to(torch.uint8).repeat(dtype.itemsize).view(dtype) for each in bits]
        gathered = torch.empty(size * given[0].numel(), dtype=dtype)
        world().all_gather_flat(gathered, given[rank])
        exchanged = torch.empty_like(given[rank])
        world().exchange_flat(exchanged, given[rank])
        parts = [each.view(size, -1)[rank] for each in given]
        copied = torch.empty_like(given[rank])
        world().broadcast_flat(copied, given[rank], 1)
        return {
            "gathered": torch.equal(gathered.view(torch.uint8), torch.cat(given).view(torch.uint8)),
            "exchanged": torch.equal(exchanged.view(torch.uint8), torch.cat(parts).view(torch.uint8)),
            "copied": torch.equal(copied.view(torch.uint8), given[1].view(torch.uint8)),
        }

    for right in ranks(work):
        assert right == dict.fromkeys(right, True)


@pytest.mark.parametrize("late", seldom(range(W), [1]))
def test_ranks_may_go_the_direct_way_and_through_the_queue(late: int, ranks: Run) -> None:
    """A rank under a dispatch mode takes the queue; with one that is late, the others begin directly and wait there."""

    def work(count: int) -> list[dict[str, bool]]:
        rank, rights = dist.get_rank(), []
        for turn in range(6):
            if (turn + rank) % W == late and turn % 2:
                time.sleep(0.01)
            mode = _Transparent() if (turn + rank) % 3 == 1 else contextlib.nullcontext()
            with mode:
                rights += [moved(count, torch.float64), summed(count, torch.float64)]
        return rights

    for count in (3, 1000, 20_001 if late else 100_000):
        for rights in ranks(work, count):
            for right in rights:
                assert right == dict.fromkeys(right, True)


def test_calls_of_torch_and_direct_ones_are_the_same_calls(ranks: Run) -> None:
    def work() -> list[list[float]]:
        rank, group, ones = dist.get_rank(), world(), torch.ones(W)
        outs = [torch.zeros(W) for _ in range(4)]
        if rank == 1:
            dist.broadcast(outs[0], 0)
            outs[1] += ones
            dist.all_reduce(outs[1])
            dist.all_to_all_single(outs[2], ones * rank)
            dist.all_to_all_single(outs[3], ones * rank, [1] * W, [1] * W)
        else:
            group.broadcast_flat(outs[0], ones * 7, 0)
            group.all_reduce_flat(outs[1], ones)
            group.exchange_flat(outs[2], ones * rank)
            group.exchange_flat(outs[3], ones * rank)
        return [out.tolist() for out in outs]

    assert ranks(work) == [[[7.0] * W, [3.0] * W, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]] * W


def test_sync_call_queues_behind_async_calls(ranks: Run) -> None:
    def work() -> list[float]:
        rank, before, out = dist.get_rank(), torch.ones(500_000), torch.empty(3)
        time.sleep(0.02 * rank)
        started = dist.all_reduce(before, async_op=True)
        world().all_reduce_flat(out, torch.ones(3))
        assert started is not None
        done = started.is_completed()
        return [before[-1].item(), out[-1].item(), float(done)]

    assert ranks(work) == [[3.0, 3.0, 1.0]] * W


# ---- claims


class _RefusedHereError(Exception):
    pass


def call_check(digest: int) -> CallCheck:
    rank = dist.get_rank()
    return CallCheck(
        digest,
        lambda: f"rank {rank} said {digest}",
        lambda words: _RefusedHereError(f"at rank {rank}: " + "; ".join(words)),
    )


Calls = dict[str, Callable[[OwnGroup, CallCheck | None], None]]
CALLS: Calls = {
    "all_gather": lambda g, c: g.all_gather_flat(torch.empty(3 * W), torch.ones(3), c),
    "reduce_scatter": lambda g, c: g.reduce_scatter_flat(torch.empty(3), torch.ones(3 * W), c),
    "all_reduce": lambda g, c: g.all_reduce_flat(torch.empty(3), torch.ones(3), c),
    "reduce": lambda g, c: g.reduce_flat(torch.empty(3), torch.ones(3), 1, c),
    "broadcast": lambda g, c: g.broadcast_flat(torch.empty(3), torch.ones(3), 1, c),
    "equal exchange": lambda g, c: g.exchange_flat(torch.empty(W), torch.ones(W), None, None, c),
    "exchange": lambda g, c: g.exchange_flat(torch.empty(W), torch.ones(W), [1] * W, [1] * W, c),
    "relay": lambda g, c: g.relay_flat(torch.empty(3), torch.ones(3), (g.place + 1) % W, c),
    "a large all_reduce": lambda g, c: g.all_reduce_flat(torch.empty(1 << 19), torch.ones(1 << 19), c),
}


def tried(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize("name", CALLS)
def test_different_signatures_raise_on_every_rank_and_the_group_continues(name: str, ranks: Run) -> None:
    def work(odd: int) -> list[str]:
        call = CALLS[name]
        return [
            tried(lambda: call(world(), call_check(5))),
            tried(lambda: call(world(), call_check(5 + (dist.get_rank() == odd)))),
            tried(lambda: call(world(), call_check(-5))),
            tried(lambda: call(world(), None)),
        ]

    for odd in range(W):
        words = "; ".join(f"rank {rank} said {5 + (rank == odd)}" for rank in range(W))
        for rank, got in enumerate(ranks(work, odd)):
            assert got == ["", f"_RefusedHereError at rank {rank}: {words}", "", ""]


@pytest.mark.parametrize("claimed", [True, False])
def test_a_call_that_a_rank_withdraws_from_is_refused_on_the_others(claimed: bool, ranks: Run) -> None:
    def work() -> list[str]:
        group, mine = world(), call_check(5) if claimed else None
        if dist.get_rank() == 1:
            first = tried(lambda: group.withdraw(mine, "it has no tensor"))
        else:
            first = tried(lambda: CALLS["all_reduce"](group, mine))
        return [first, tried(lambda: CALLS["all_gather"](group, mine))]

    for rank, (first, second) in enumerate(ranks(work)):
        assert second == ""
        if rank == 1:
            assert first == ""
        else:
            assert first.startswith("_RefusedHereError" if claimed else "MismatchError")
            assert "it has no tensor" in first


def test_a_claim_against_none_is_refused_on_every_rank(ranks: Run) -> None:
    def work() -> list[str]:
        mine = call_check(5) if dist.get_rank() else None
        return [
            tried(lambda: CALLS["all_gather"](world(), mine)),
            tried(lambda: CALLS["reduce"](world(), None)),
        ]

    for first, second in ranks(work):
        assert first
        assert second == ""


def test_a_claim_is_not_compared_with_another_call(ranks: Run) -> None:
    """The same claim on two different calls is refused all the same."""

    def work() -> list[str]:
        name = "all_gather" if dist.get_rank() else "all_reduce"
        return [
            tried(lambda: CALLS[name](world(), call_check(5))),
            tried(lambda: CALLS["relay"](world(), None)),
        ]

    for first, second in ranks(work):
        assert first
        assert second == ""


MISFITS: dict[str, Callable[[OwnGroup, bool], None]] = {
    "all_gather": lambda g, odd: g.all_gather_flat(torch.empty((3 + odd) * W), torch.ones(3 + odd)),
    "all_reduce": lambda g, odd: g.all_reduce_flat(torch.empty(3 + odd), torch.ones(3 + odd)),
    "equal exchange": lambda g, odd: g.exchange_flat(torch.empty(W + odd * W), torch.ones(W + odd * W)),
    "exchange": lambda g, odd: g.exchange_flat(
        torch.empty(W + odd), torch.ones(W), [1] * W, [1] * (W - 1) + [1 + odd]
    ),
    "relay": lambda g, odd: g.relay_flat(torch.empty(3 + odd), torch.ones(3), (g.place + 1) % W),
    "relay of nothing": lambda g, odd: g.relay_flat(
        torch.empty(3), torch.ones(0 if odd else 3), (g.place + 1) % W
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_sizes_that_do_not_fit_are_an_error_on_every_rank(name: str, ranks: Run) -> None:
    def work() -> list[str]:
        rank, call = dist.get_rank(), MISFITS[name]
        return [tried(lambda: call(world(), rank == 1)), tried(lambda: call(world(), False))]

    for first, second in ranks(work):
        assert first.startswith("MismatchError")
        assert second == ""


OF_TORCH = """
allreduce reduce reduce_scatter reduce_scatter_single_coalesced broadcast allgather all_gather_single_coalesced gather
scatter alltoall all_to_all_single barrier send
"""
"""The calls of torch that `OwnGroup` leaves to its subclasses."""


@pytest.mark.parametrize("group", [ShmGroup, ThreadsGroup])
def test_group_implements_the_whole_contract(group: type[OwnGroup]) -> None:
    deferred: Sequence[str] = [
        name for name, value in inspect.getmembers(OwnGroup) if getattr(value, "__isabstractmethod__", False)
    ]
    assert "all_gather_flat" in deferred
    below = group.__mro__[: group.__mro__.index(OwnGroup)]
    assert set(OF_TORCH.split()) <= {name for base in below for name in vars(base)}
    assert [name for name in deferred if getattr(getattr(group, name), "__isabstractmethod__", False)] == []

"""Random collectives on the shm backend, each checked against Gloo, for as long as you like.

Every rank draws the same calls: a kind, a group, a dtype, a size. What only moves, the smallest and the largest, whole
numbers and sums of two ranks must agree bit for bit; other sums and products to rounding, as Gloo takes them in another
order. Memory and descriptors are looked at after a tenth of the time, and at the end.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import datetime
import gc
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.complex64,
    torch.bool,
)
SIZES = (0, 1, 7, 100, 1023, 4096, 20_000, 65_537, 300_000, 1_500_000)
"""Elements a rank: less than what any copy handles at once, to several chunks."""
ALLOWED = {
    torch.float64: 1e-14,
    torch.float32: 5e-6,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
    torch.complex64: 5e-6,
}
"""How far two orders of adding a few numbers may be apart, relative to the largest of them."""


@dataclasses.dataclass
class Summary:
    """What a soak did on one rank."""

    seconds: float = 0.0  # how long it took
    calls: int = 0  # the number of collectives and messages
    # how many of each kind
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    largest: int = 0  # bytes of the largest tensor that was reduced or handed on
    worst: float = 0.0  # the largest relative deviation from Gloo where the order of the sum may differ
    memory: tuple[int, int] = (0, 0)  # resident bytes of the process's own, after the warm-up and at the end
    shared: int = 0  # resident bytes of shared memory, at the end
    descriptors: tuple[int, int] = (0, 0)  # open file descriptors, likewise

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        before, after = self.memory
        return (
            f"{self.calls} calls in {self.seconds:.0f} s ({kinds}); largest {self.largest / 2**20:.1f} MiB; "
            f"own memory {before / 2**20:.0f} MiB -> {after / 2**20:.0f} MiB, shared {self.shared / 2**20:.0f} MiB; "
            f"descriptors {self.descriptors[0]} -> {self.descriptors[1]}; worst relative deviation {self.worst:.1e}"
        )


class _Pair:
    """The same ranks as a group of either backend."""

    def __init__(self, ranks: list[int]) -> None:
        patience = datetime.timedelta(seconds=60)
        self.ranks = ranks
        self.shm: Any = dist.new_group(ranks, backend="shm", timeout=patience)
        self.gloo: Any = dist.new_group(ranks, backend="gloo", timeout=patience)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def place(self) -> int:
        return self.ranks.index(dist.get_rank())

    def close(self) -> None:
        if dist.get_rank() in self.ranks:
            dist.destroy_process_group(self.shm)
            dist.destroy_process_group(self.gloo)


class _Soak:
    """One rank of a soak."""

    def __init__(self, seed: int) -> None:
        self.calls = random.Random(seed)  # the same on every rank
        self.values = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        self.summary = Summary()
        world = list(range(dist.get_world_size()))
        self.groups = [_Pair(world), _Pair(world)]
        for _ in range(3 if len(world) > 2 else 0):
            self.groups.append(_Pair(sorted(self.calls.sample(world, self.calls.randint(2, len(world))))))

    # -- drawing a call

    def data(self, dtype: torch.dtype, count: int) -> Tensor:
        if dtype == torch.bool:
            return torch.randint(2, (count,), generator=self.values).bool()
        if dtype.is_complex:
            return torch.view_as_complex(torch.rand(count, 2, generator=self.values) + 0.5)
        if dtype.is_floating_point:
            return (torch.rand(count, generator=self.values) + 0.5).to(dtype)
        return torch.randint(1, 20, (count,), generator=self.values).to(dtype)

    def op(self, dtype: torch.dtype) -> str:
        if dtype == torch.bool:
            return self.calls.choice(("MIN", "MAX"))
        if dtype.is_complex:
            return "SUM"
        if dtype.is_floating_point:
            return self.calls.choice(("SUM", "SUM", "PRODUCT", "MIN", "MAX"))
        return self.calls.choice(("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))

    def step(self) -> None:
        """One call of this rank, or none where the group is without it."""
        kind = self.calls.choice(tuple(KINDS))
        pair = self.calls.choice(self.groups)
        dtype, count = self.calls.choice(DTYPES), self.calls.choice(SIZES)
        details = self.calls.randrange(1 << 30)
        if dist.get_rank() in pair.ranks:
            shared, self.calls = self.calls, random.Random(details)
            before = f"call {self.summary.calls}: {kind} of {count} x {dtype} among {pair.ranks}"
            try:
                KINDS[kind](self, pair, dtype, count)
            except Exception as error:
                error.add_note(before)
                raise
            self.calls = shared
            self.summary.calls += 1
            self.summary.kinds[kind] += 1
            self.summary.largest = max(self.summary.largest, count * dtype.itemsize)

    # -- comparing

    def same(self, got: Tensor, expected: Tensor) -> None:
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        bits, others = (t.contiguous().view(-1).view(torch.uint8) for t in (got, expected))
        if not torch.equal(bits, others):
            at = (bits != others).nonzero()
            raise AssertionError(f"{len(at)} bytes differ, the first is number {at[0].item()}")

    def close(self, got: Tensor, expected: Tensor, op: str, ranks: int) -> None:
        exact = ranks == 2 or op not in ("SUM", "PRODUCT")
        if exact or not (got.is_floating_point() or got.is_complex()):
            self.same(got, expected)
        elif got.numel():
            wide = torch.complex128 if got.is_complex() else torch.float64
            difference = (got.to(wide) - expected.to(wide)).abs() / expected.to(wide).abs()
            deviation = difference.max().item()
            assert deviation <= ALLOWED[got.dtype], f"{op} deviates by {deviation}"
            self.summary.worst = max(self.summary.worst, deviation)

    # -- the kinds of calls

    def all_reduce(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        op, x = self.op(dtype), self.data(dtype, count)
        expected = x.clone()
        dist.all_reduce(expected, getattr(dist.ReduceOp, op), group=pair.gloo)
        dist.all_reduce(x, getattr(dist.ReduceOp, op), group=pair.shm)
        self.close(x, expected, op, pair.size)

    def reduce(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        op, x, root = self.op(dtype), self.data(dtype, count), self.calls.choice(pair.ranks)
        total, own = x.clone(), x.clone()
        dist.all_reduce(total, getattr(dist.ReduceOp, op), group=pair.gloo)
        dist.reduce(x, root, getattr(dist.ReduceOp, op), group=pair.shm)
        if dist.get_rank() == root:
            self.close(x, total, op, pair.size)
        else:
            self.same(x, own)

    def reduce_scatter(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        op, count = self.op(dtype), count // pair.size
        x = self.data(dtype, pair.size * count)
        total, given, out = x.clone(), x.clone(), torch.empty(count, dtype=dtype)
        dist.all_reduce(total, getattr(dist.ReduceOp, op), group=pair.gloo)
        if self.calls.random() < 0.5:
            pieces = list(x.view(pair.size, count).unbind(0))
            dist.reduce_scatter(out, pieces, getattr(dist.ReduceOp, op), pair.shm)
        else:
            reduce_scatter_single(out, x, getattr(dist.ReduceOp, op), pair.shm)
        self.close(out, total[pair.place * count : (pair.place + 1) * count], op, pair.size)
        self.same(x, given)

    def broadcast(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        x, root = self.data(dtype, count), self.calls.choice(pair.ranks)
        expected = x.clone()
        dist.broadcast(expected, root, group=pair.gloo)
        dist.broadcast(x, root, group=pair.shm)
        self.same(x, expected)

    def all_gather(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        x = self.data(dtype, count)
        expected = [torch.empty_like(x) for _ in pair.ranks]
        dist.all_gather(expected, x, group=pair.gloo)
        out = torch.empty(pair.size * count, dtype=dtype)
        if self.calls.random() < 0.5:
            dist.all_gather(list(out.view(pair.size, count).unbind(0)), x, group=pair.shm)
        else:
            all_gather_single(out, x, group=pair.shm)
        self.same(out, torch.cat(expected))

    def gather_and_scatter(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        x, root = self.data(dtype, count), self.calls.choice(pair.ranks)
        everything = [torch.empty_like(x) for _ in pair.ranks]
        dist.all_gather(everything, x, group=pair.gloo)
        gathered = [torch.empty_like(x) for _ in pair.ranks] if dist.get_rank() == root else None
        dist.gather(x, gathered, dst=root, group=pair.shm)
        for got, expected in zip(gathered or [], everything, strict=False):
            self.same(got, expected)
        back = torch.empty_like(x)
        dist.scatter(back, gathered, src=root, group=pair.shm)
        self.same(back, x)

    def all_to_all(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        most = 2 * (count // pair.size) + 1
        splits = [[self.calls.randrange(most) for _ in pair.ranks] for _ in pair.ranks]
        if self.calls.random() < 0.3:
            splits = [[count // pair.size] * pair.size] * pair.size
        give, take = splits[pair.place], [row[pair.place] for row in splits]
        x = self.data(dtype, sum(give))
        expected, out = torch.empty(sum(take), dtype=dtype), torch.empty(sum(take), dtype=dtype)
        dist.all_to_all_single(expected, x, take, give, group=pair.gloo)
        if self.calls.random() < 0.5:
            dist.all_to_all_single(out, x, take, give, group=pair.shm)
        else:
            dist.all_to_all(list(out.split(take)), list(x.split(give)), group=pair.shm)
        self.same(out, expected)

    def ring(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        step, many = self.calls.randrange(1, pair.size), self.calls.randint(1, 4)
        xs = [self.data(dtype, count) for _ in range(many)]
        target = pair.ranks[(pair.place + step) % pair.size]
        source = pair.ranks[(pair.place - step) % pair.size]
        everybody = [torch.empty(many * count, dtype=dtype) for _ in pair.ranks]
        dist.all_gather(everybody, torch.cat(xs), group=pair.gloo)
        outs = [torch.empty_like(x) for x in xs]
        works = [dist.isend(x, target, group=pair.shm, tag=tag) for tag, x in enumerate(xs)]
        works += [dist.irecv(out, source, group=pair.shm, tag=tag) for tag, out in enumerate(outs)]
        self.calls.shuffle(works)
        for work in works:
            assert work is not None
            work.wait()
        self.same(torch.cat(outs), everybody[pair.ranks.index(source)])

    def barrier(self, pair: _Pair, _dtype: torch.dtype, _count: int) -> None:
        dist.barrier(group=pair.shm)

    def two_at_once(self, pair: _Pair, dtype: torch.dtype, count: int) -> None:
        """Begin calls on a group, then on others with the same ranks, and wait in another order on each rank."""
        pairs = [other for other in self.groups if other.ranks == pair.ranks] * 2
        xs = [self.data(dtype, count) for _ in pairs]
        expected, works = [x.clone() for x in xs], []
        for other, x in zip(pairs, expected, strict=True):
            dist.all_reduce(
                x, dist.ReduceOp.MAX if not dtype.is_complex else dist.ReduceOp.SUM, group=other.gloo
            )
        for other, x in zip(pairs, xs, strict=True):
            op = dist.ReduceOp.MAX if not dtype.is_complex else dist.ReduceOp.SUM
            works.append(dist.all_reduce(x, op, group=other.shm, async_op=True))
        random.Random(dist.get_rank()).shuffle(works)
        for work in works:
            assert work is not None
            work.wait()
        for x, y in zip(xs, expected, strict=True):
            self.close(x, y, "SUM" if dtype.is_complex else "MAX", pair.size)


KINDS: dict[str, Callable[[_Soak, _Pair, torch.dtype, int], None]] = {
    "all_reduce": _Soak.all_reduce,
    "reduce": _Soak.reduce,
    "reduce_scatter": _Soak.reduce_scatter,
    "broadcast": _Soak.broadcast,
    "all_gather": _Soak.all_gather,
    "gather and scatter": _Soak.gather_and_scatter,
    "all_to_all": _Soak.all_to_all,
    "ring": _Soak.ring,
    "barrier": _Soak.barrier,
    "two at once": _Soak.two_at_once,
}


def soak(seconds: float, seed: int = 0) -> Summary:
    """Make random calls on this rank, and compare them with Gloo's; on every rank of a world of shm ranks."""
    run = _Soak(seed)
    summary, begin = run.summary, time.monotonic()
    warm: tuple[int, int] | None = None
    turn = 0
    while True:
        run.step()
        turn += 1
        if turn % 20:
            continue
        # Rank 0's clock decides for all. A group of all ranks goes, and a new one takes its place.
        now = torch.tensor([time.monotonic() - begin])
        dist.broadcast(now, 0, group=run.groups[0].gloo)
        if warm is None and now >= seconds / 4:
            warm = _resident("RssAnon"), _descriptors()
        if turn % 100 == 0:
            run.groups[1].close()
            run.groups[1] = _Pair(run.groups[1].ranks)
        if now >= seconds:
            break
    assert warm is not None
    summary.seconds = time.monotonic() - begin
    summary.memory, summary.descriptors = (warm[0], _resident("RssAnon")), (warm[1], _descriptors())
    summary.shared = _resident("RssShmem")
    for pair in run.groups:
        pair.close()
    return summary


def soak_ranks(seconds: float, ranks: int = 4, seed: int = 0) -> list[Summary]:
    """Soak on ranks of this machine.

    Gloo's threads take the tensors that they receive from as many arenas of malloc, which grow for minutes; so the
    ranks have one arena, and large blocks go back at once.
    """
    before = dict(os.environ)
    os.environ.update(MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536")
    try:
        return gm.launch(soak, ranks, backend="shm", args=(seconds, seed))
    finally:
        os.environ.clear()
        os.environ.update(before)


def _resident(kind: str) -> int:
    """Resident bytes of this process, after what malloc keeps for later has gone back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{kind}:"))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    """Soak on ranks of this machine, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for rank, summary in enumerate(soak_ranks(options.seconds, options.ranks, options.seed)):
        print(f"rank {rank}: {summary}")


if __name__ == "__main__":
    main()

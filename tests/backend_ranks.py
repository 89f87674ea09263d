"""What a rank of test_mpi.py and test_hosts.py does: `mpirun -n 2 python -m tests.backend_ranks NAME ...`."""

from __future__ import annotations

import datetime
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.backends.hosts import HostsGroup
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.errors import AbortedError
from gradmesh.ops.registry import REGISTRY
from tests import contract

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.uint8, torch.bool)


def laws() -> None:
    """All laws of all ops."""
    for law in contract.LAWS:
        assert contract.on_examples(law, range(len(REGISTRY))) > len(REGISTRY), law


class Drawn:
    """Random calls, the same on every rank, each held against what one process computes of all operands."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.pending: list[tuple[str, Any, list[Tensor], list[Tensor]]] = []

    def operands(self, *shape: int) -> list[Tensor]:
        """Every rank's operand, small whole numbers, so that sums are exact in every dtype."""
        dtype = self.draw.choice(DTYPES)
        drawn = torch.randint(0, 4, (self.size, *shape), generator=self.numbers).to(dtype)
        if dtype.is_complex:
            drawn = drawn * (1 + 2j)
        return list(drawn)

    def strided(self, x: Tensor) -> Tensor:
        """The same values, maybe in another memory format."""
        if self.draw.random() < 0.5 or not x.dim():
            return x.clone()
        return torch.empty((*x.shape, 2), dtype=x.dtype).select(-1, 0).copy_(x)

    def call(self) -> None:
        """Begin one call."""
        rows = self.draw.choice((0, 1, 3, 7, 5000, 90001))
        kind = self.draw.choice(
            ("all_reduce", "broadcast", "all_gather", "gathered", "scattered", "exchange", "reduce")
        )
        later = self.draw.random() < 0.5
        xs = (
            self.operands(self.size * rows, 2)
            if kind in ("scattered", "exchange")
            else self.operands(rows, 2)
        )
        mine, root = self.strided(xs[self.rank]), self.draw.randrange(self.size)
        biggest = self.draw.random() < 0.3 and not xs[0].is_complex() and xs[0].dtype != torch.bool
        op = dist.ReduceOp.MAX if biggest else dist.ReduceOp.SUM
        whole = torch.stack(xs)
        total = (
            whole.amax(0)
            if biggest
            else whole.to(torch.complex128 if whole.is_complex() else torch.float64).sum(0)
        )
        total = total.to(whole.dtype)
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        outs, expected, work = [mine], [total], None
        if kind == "all_reduce":
            work = dist.all_reduce(mine, op, async_op=later)
        elif kind == "reduce":
            work = dist.reduce(mine, root, op, async_op=later)
            expected = [total if self.rank == root else xs[self.rank]]
        elif kind == "broadcast":
            work, expected = dist.broadcast(mine, root, async_op=later), [xs[root]]
        elif kind == "gathered":
            outs, expected = [torch.empty(self.size * rows, 2, dtype=mine.dtype)], [torch.cat(xs)]
            work = dist.all_gather_into_tensor(outs[0], mine, async_op=later)
        elif kind == "all_gather":
            outs, expected = [self.strided(torch.zeros_like(x)) for x in xs], xs
            work = dist.all_gather(outs, mine, async_op=later)
        elif kind == "scattered":
            outs, expected = [torch.empty(rows, 2, dtype=mine.dtype)], [total[own]]
            work = dist.reduce_scatter_tensor(outs[0], mine, op, async_op=later)
        else:
            outs = [torch.empty(self.size * rows, 2, dtype=mine.dtype)]
            expected = [torch.cat([x[own] for x in xs])]
            work = dist.all_to_all_single(outs[0], mine, async_op=later)
        self.pending.append((f"{kind} of {rows} rows, {mine.dtype}", work, outs, expected))

    def message(self) -> None:
        """A message around the ring, of another size each time."""
        xs = self.operands(self.draw.randrange(1, 3000))
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        out = torch.empty_like(xs[0])
        sent = dist.isend(self.strided(xs[self.rank]), to, tag=5)
        work = dist.irecv(out, source, tag=5)
        self.pending.append(("send", sent, [], []))
        self.pending.append(("receive", work, [out], [xs[source]]))

    def settle(self) -> None:
        """Wait for what is pending, the last first as often as not, and compare."""
        if self.draw.random() < 0.5:
            self.pending.reverse()
        for shown, work, outs, expected in self.pending:
            if work is not None:
                work.wait()
            for got, right in zip(outs, expected, strict=True):
                assert torch.equal(got, right), (
                    f"{shown}: {got.flatten()[:8]} instead of {right.flatten()[:8]}"
                )
        self.pending.clear()


def calls() -> None:
    """Random calls of torch.distributed, some pending at a time."""
    drawn = Drawn(int(os.environ.get("SEED", "1")))
    for at in range(150):
        drawn.message() if drawn.draw.random() < 0.2 else drawn.call()
        if at % 5 == 4:
            drawn.settle()
    drawn.settle()


def averages() -> None:
    """Means over all ranks, whatever parts a sum is made of; those of integers are truncated."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 3000, 90_001):
        for dtype in (torch.float64, torch.int32):
            column = torch.arange(count * size).to(dtype)
            whole = torch.stack([column * (1 + at) for at in range(size)]).sum(0)
            mean = whole / size if dtype.is_floating_point else whole.div(size, rounding_mode="trunc")
            x, out, reduced = column * (1 + rank), torch.empty(count, dtype=dtype), column * (1 + rank)
            dist.reduce_scatter_tensor(out, x, dist.ReduceOp.AVG)
            assert torch.equal(out, mean[rank * count : (rank + 1) * count])
            dist.reduce(reduced, size - 1, dist.ReduceOp.AVG)
            assert rank < size - 1 or torch.equal(reduced, mean)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            assert torch.equal(x, mean)


def lists() -> None:
    """Calls with one tensor per rank, of sizes that differ, of objects, and of sparse tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = range(size)
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, [torch.arange(to + 1.0) * (rank + 1) for to in every])
    assert out.tolist() == [sum(1 + at for at in every) * column for column in range(rank + 1)]
    given = [torch.full((rank + to,), 10.0 * rank + to) for to in every]
    taken = [torch.zeros(source + rank) for source in every]
    dist.all_to_all(taken, given)
    assert [x.tolist() for x in taken] == [[10.0 * source + rank] * (source + rank) for source in every]
    root = size - 1
    gathered = [torch.zeros(2, 1) for _ in every] if rank == root else None
    dist.gather(torch.full((2, 1), float(rank)), gathered, dst=root)
    assert gathered is None or [x.flatten().tolist() for x in gathered] == [[at, at] for at in every]
    scattered = torch.zeros(2)
    dist.scatter(scattered, [torch.full((2,), float(to)) for to in every] if rank == root else None, src=root)
    assert scattered.tolist() == [rank, rank]
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": "of" * rank})
    assert objects == [{"rank": "of" * at} for at in every]
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank, size]]), torch.tensor([1.0, 2.0]), (size + 1,), check_invariants=True
    )
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [*[1.0] * size, 2.0 * size]


def subgroups() -> None:
    """Groups of some ranks, one of them in another order, beside each other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([at, (at + 1) % size]) for at in range(size)]
    for at, group in enumerate(groups):
        members = sorted({at, (at + 1) % size})
        if rank in members:
            x = torch.full((3,), float(rank))
            dist.all_reduce(x, group=group)
            assert x.tolist() == [float(sum(members))] * 3


def dense() -> tuple[torch.nn.Module, Tensor, list[Tensor]]:
    """A model, this rank's rows, and the gradients of one process with all rows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
    rows = torch.randn(4 * dist.get_world_size(), 5, dtype=torch.float64)
    model(rows).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return model, rows.chunk(dist.get_world_size())[dist.get_rank()], expected


def ddp() -> None:
    """The gradients of DistributedDataParallel are those of one process with all rows."""
    model, rows, expected = dense()
    wrapped = DistributedDataParallel(model)
    wrapped(rows).square().mean().backward()
    for p, right in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, right)


def mismatch() -> None:
    """Every rank gets gradmesh's error where ranks make different calls, and goes on."""
    x = torch.ones(2 + dist.get_rank(), requires_grad=True)
    with pytest.raises(gm.MismatchError, match=r"(?s)all_reduce.*all_gather"):
        gm.all_gather(x) if dist.get_rank() else gm.all_reduce(x, dst=gm.R)
    assert gm.all_reduce(torch.ones(()), dst=gm.I).item() == dist.get_world_size()


def in_place() -> None:
    """The input may be the output, or this rank's part of it, as FSDP2 gathers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [float(at) for at in range(size) for _ in range(2)]
    out = torch.zeros(2 * size)
    own = out.narrow(0, 2 * rank, 2).fill_(rank)
    dist.all_gather_into_tensor(out, own)
    assert out.tolist() == gathered
    parts = list(torch.zeros(2 * size).chunk(size))
    dist.all_gather(parts, parts[rank].fill_(rank))
    assert torch.cat(parts).tolist() == gathered
    both = torch.full((2 * size,), float(rank))
    dist.all_to_all_single(both, both)
    assert both.tolist() == gathered


def inference() -> None:
    """Calls in inference mode, which end outside of it, on tensors of either kind."""
    size = dist.get_world_size()
    for shape in ((3, 2), (1 << 15, 2)):
        normal, waited = torch.ones(shape).t(), torch.ones(shape).t()
        with torch.inference_mode():
            inner = torch.ones(shape).t()
            works = [dist.all_reduce(x, async_op=True) for x in (normal, inner)]
            dist.all_reduce(waited)
        for work in works:
            work.wait()
        for x in (normal, waited, inner):
            assert x.eq(size).all()


def fsdp() -> None:
    """The gradients of fully_shard are those of one process with all rows."""
    model, rows, expected = dense()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(rows).square().mean().backward()
    for p, right in zip(model.parameters(), expected, strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), right)


def another_world() -> None:
    """The process group may be destroyed, and another one made of the variables that `gm.init` has set."""
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [dist.get_world_size()] * 2
    dist.destroy_process_group()
    gm.init(timeout=60)


def destroyed() -> None:
    """A call on a group that was destroyed says so."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    backend: Any = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group(group)
    with pytest.raises(AbortedError, match="the process group was destroyed"):
        backend.allreduce([torch.ones(1)], dist.AllreduceOptions())


def many_groups() -> None:
    """More groups than MPI has communicators, one after the other: those of destroyed groups are freed."""
    for _ in range(2200):
        dist.destroy_process_group(dist.new_group())


def late_member() -> None:
    """A rank that does not create a group is named after the timeout."""
    if dist.get_rank() == 0:
        with pytest.raises(gm.DeadlockError, match="rank 1"):
            dist.new_group(timeout=datetime.timedelta(seconds=1))
    dist.barrier()


def too_long() -> None:
    """A message that is longer than the tensor for it is an error of the receiver."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(8), 1)
    elif dist.get_rank() == 1:
        with pytest.raises(gm.MismatchError, match="does not match the message"):
            dist.recv(torch.ones(3), 0)


def late() -> None:
    """A call that other ranks do not make ends with an error after the timeout, and the group says so afterwards."""
    world = dist.group.WORLD
    assert world is not None
    world.set_timeout(datetime.timedelta(seconds=1))
    if dist.get_rank() == 0:
        begin, x = time.monotonic(), torch.ones(3)
        with pytest.raises(gm.DeadlockError, match="all_reduce") as raised:
            dist.all_reduce(x)
        assert 0.9 < time.monotonic() - begin < 10
        memory = StorageWeakRef(x.untyped_storage())
        raised.value.with_traceback(None)  # whose frames have the tensor
        del x, raised
        gc.collect()
        assert not memory.expired()  # MPI may still write to it
        with pytest.raises(AbortedError, match="timed out after 1 s"):
            dist.barrier()
        print("late is right", flush=True)
    else:
        time.sleep(30)
    sys.exit(3)  # which ends the other rank too


def long_messages() -> None:
    """A long exchange is not slowed down by the pauses of those that wait for it: it moves at each poll."""
    x, y = torch.ones(2**20 * dist.get_world_size()), torch.empty(2**20)

    def fastest(call: Any) -> float:
        times = []
        for _ in range(5):
            dist.barrier()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    gathered = fastest(lambda: dist.all_gather_into_tensor(x, y))
    scattered = fastest(lambda: dist.reduce_scatter_tensor(y, x))
    exchanged = fastest(lambda: dist.all_to_all_single(torch.empty_like(x), x))
    assert max(scattered, exchanged) < 60 * gathered, (gathered, scattered, exchanged)


def uncaught() -> None:
    """An error on one rank ends the others, which wait for it."""
    if dist.get_rank() == 0:
        raise ValueError("of rank 0")
    begin = time.monotonic()
    try:
        dist.barrier()
    finally:
        if time.monotonic() - begin > 55:
            print("waited until the timeout", flush=True)


def layouts() -> None:
    """A group of one host is one of shm; one whose hosts have different numbers of ranks is one of Gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert isinstance(dist.group.WORLD, HostsGroup)
    for ranks, kind in ((range(size // 2), ShmGroup), (range(1, size), dist.ProcessGroup)):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            assert type(group) is kind
            x = torch.full((5000,), float(rank))
            dist.all_reduce(x, group=group)
            assert x.eq(sum(ranks)).all()


def messages() -> None:
    """Messages are of Gloo: in both directions at once, of any rank, and into memory that is not contiguous."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(3, 2).t()
    ops = [
        dist.P2POp(dist.isend, torch.full((2, 3), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, out, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert out.eq((rank - 1) % size).all()
    if rank:
        dist.send(torch.full((2,), float(rank)), 0)
    else:
        found = torch.zeros(size - 1, 2)
        senders = [dist.recv(row) for row in found]
        assert sorted(senders) == list(range(1, size))
        assert found[:, 0].tolist() == senders
    if rank < 2:
        gm.send(torch.ones(3), to=1 - rank)
        with pytest.raises(gm.MismatchError):
            gm.recv(torch.ones(2), source=1 - rank)


def futures() -> None:
    """A future has the result, and an error ends all calls that are pending."""
    rank = dist.get_rank()
    works = [dist.all_reduce(torch.full((n,), 1.0), async_op=True) for n in (3, 70_000)]
    found = [work.get_future().then(lambda done: done.value()[0].sum().item()).wait() for work in works]
    assert found == [3.0 * dist.get_world_size(), 70_000.0 * dist.get_world_size()]
    assert all(work.is_completed() for work in works)
    group = dist.new_group()
    group.set_timeout(datetime.timedelta(seconds=2))  # not of making it
    if rank:
        works = [dist.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(3)]
        for work in works:
            with pytest.raises(AbortedError):
                work.wait()
    dist.barrier()


def differ() -> None:
    """Ranks of a host that make different calls say so on all hosts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    error = gm.MismatchError if rank >= size // 2 else AbortedError
    with pytest.raises(error, match="the ranks made different calls"):
        dist.all_reduce(torch.ones(90_000 + (rank == size - 1)), group=group)
    with pytest.raises(AbortedError, match="an earlier call on this group failed"):
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


def lost() -> None:
    """Ranks that are killed are named by all others, and the group says so afterwards."""
    killed = os.environ["LOST"].split(",")
    x = torch.ones(int(os.environ["NUMBERS"]))
    dist.all_reduce(x)
    if str(dist.get_rank()) in killed:
        # After some seconds it is in the middle of a call, if that takes long.
        threading.Timer(float(os.environ["AFTER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(AbortedError) as raised:
        any(dist.all_reduce(x) for _ in range(10_000))  # which returns None
    seconds, said = time.monotonic() - begin, str(raised.value).splitlines()[0]
    assert seconds < 20
    assert f"rank{'s' * (len(killed) > 1)} {', '.join(killed)} did not respond" in said
    assert raised.value.rank == int(killed[0])
    with pytest.raises(AbortedError, match="an earlier call on this group failed"):
        dist.barrier()
    print(f"named in {seconds:.1f} s: {said}\n", end="", flush=True)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"named on {dist.get_rank()}", "")
    if dist.get_rank() == 0:  # which has the store
        others = [f"named on {rank}" for rank in range(dist.get_world_size()) if str(rank) not in killed]
        store.wait(others, datetime.timedelta(seconds=30))


def aborted() -> None:
    """A rank that aborts its group gets that error at once, with the call in shared memory or between hosts."""
    group = dist.new_group()
    assert isinstance(group, HostsGroup)
    if dist.get_rank():
        work = dist.all_reduce(torch.ones(90_000), group=group, async_op=True)
        time.sleep(0.2)
        begin = time.monotonic()
        group.abort()
        assert work is not None
        with pytest.raises(AbortedError, match="the process group was aborted"):
            work.wait()
        assert time.monotonic() - begin < 3
    dist.barrier()


def without_store() -> None:
    """Ranks go on, and wait for a late one, after rank 0, which has the store, has ended in order."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(3)
    x = torch.full((3,), float(dist.get_rank()))
    dist.broadcast(x, 0)
    assert x.eq(0).all()
    print("without_store is right", flush=True)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    backend = os.environ.get("BACKEND", "mpi4py")
    if "HOSTS" in os.environ:  # this one counts as so many
        each = int(os.environ["WORLD_SIZE"]) // int(os.environ["HOSTS"])
        os.environ["GRADMESH_HOST"] = f"host-{int(os.environ['RANK']) // each}"
    gm.init(None if backend == "mpi4py" else backend, timeout=60)
    assert dist.get_backend() == {"auto": "hosts"}.get(backend, backend)
    for name in sys.argv[1:]:
        globals()[name]()
        print(f"{name} is right on rank {dist.get_rank()}\n", end="", flush=True)
    dist.destroy_process_group()

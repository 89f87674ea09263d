"""The backends of our own, as torch.distributed sees them: every collective, on threads and on shared memory.

Shared memory is tried with chunks of their usual size and with tiny ones, where nearly everything takes many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import gradmesh as gm

W = 3
# The names of torch 2.13, and the ones before them, which it deprecates.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
functional_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
functional_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor

BACKENDS = {"threads": ("threads", None), "shm": ("shm", None), "shm, tiny chunks": ("shm", "4096")}


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


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(1, 7, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda stack: stack.sum(0),
    "AVG": lambda stack: stack.mean(0),
    "PRODUCT": lambda stack: stack.prod(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
    "BAND": lambda stack: stack[0] & stack[1] & stack[2],
    "BOR": lambda stack: stack[0] | stack[1] | stack[2],
    "BXOR": lambda stack: stack[0] ^ stack[1] ^ stack[2],
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_reduces_over_the_ranks(name: str, ranks: Run) -> None:
    dtype = torch.int64 if name.startswith("B") else torch.float64
    expected = REDUCTIONS[name](torch.stack([data(r, 4, dtype=dtype) for r in range(W)]))

    def work() -> tuple[Tensor, Tensor, Tensor]:
        rank, op = dist.get_rank(), getattr(dist.ReduceOp, name)
        everywhere, at_root, scattered = (
            data(rank, 4, dtype=dtype),
            data(rank, 4, dtype=dtype),
            torch.empty(2, dtype=dtype),
        )
        dist.all_reduce(everywhere, op)
        dist.reduce(at_root, 1, op)
        dist.reduce_scatter(scattered, [data(rank, 4, dtype=dtype)[i : i + 2] for i in range(W)], op)
        return everywhere, at_root, scattered

    for rank, (everywhere, at_root, scattered) in enumerate(ranks(work)):
        torch.testing.assert_close(everywhere, expected)
        torch.testing.assert_close(at_root, expected if rank == 1 else data(rank, 4, dtype=dtype))
        torch.testing.assert_close(scattered, expected[rank : rank + 2])


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int8, torch.uint8, torch.bool],
)
def test_every_dtype_is_summed_and_gathered(dtype: torch.dtype, ranks: Run) -> None:
    def work() -> tuple[Tensor, Tensor]:
        x = data(dist.get_rank(), 2, 3, dtype=dtype)
        gathered = torch.empty(2 * W, 3, dtype=dtype)
        all_gather_single(gathered, x)
        if dtype != torch.bool:
            dist.all_reduce(x)
        return x, gathered

    for total, gathered in ranks(work):
        assert torch.equal(gathered, torch.cat([data(r, 2, 3, dtype=dtype) for r in range(W)]))
        if dtype != torch.bool:
            expected = data(0, 2, 3, dtype=dtype) + data(1, 2, 3, dtype=dtype) + data(2, 2, 3, dtype=dtype)
            assert torch.equal(total, expected)


def test_a_sum_has_the_same_bits_on_every_rank_every_time(ranks: Run) -> None:
    def work() -> list[Tensor]:
        outs = []
        for i in range(30):
            x = data(dist.get_rank(), 1000, dtype=torch.float32)
            time.sleep(0.0003 * ((dist.get_rank() + i) % W))  # another rank comes last
            dist.all_reduce(x)
            outs.append(x)
        return outs

    seen = [x for outs in ranks(work) for x in outs]
    assert all(torch.equal(seen[0], x) for x in seen)


def test_gather_scatter_and_broadcast_move_pieces_from_and_to_the_root(ranks: Run) -> None:
    def work() -> tuple[list[Tensor] | None, Tensor, Tensor]:
        rank = dist.get_rank()
        gathered = [torch.empty(3, dtype=torch.float64) for _ in range(W)] if rank == 2 else None
        dist.gather(data(rank, 3), gathered, dst=2)
        scattered = torch.empty(3, dtype=torch.float64)
        dist.scatter(scattered, [data(10 + i, 3) for i in range(W)] if rank == 1 else None, src=1)
        copied = data(rank, 3)
        dist.broadcast(copied, 2)
        return gathered, scattered, copied

    for rank, (gathered, scattered, copied) in enumerate(ranks(work)):
        assert (gathered is not None) == (rank == 2)
        for i, piece in enumerate(gathered or []):
            assert torch.equal(piece, data(i, 3))
        assert torch.equal(scattered, data(10 + rank, 3))
        assert torch.equal(copied, data(2, 3))


def test_lists_may_be_uneven(ranks: Run) -> None:
    def work() -> tuple[list[Tensor], Tensor, list[Tensor]]:
        rank = dist.get_rank()
        gathered = [torch.empty(i, 2, dtype=torch.float64) for i in range(W)]
        dist.all_gather(gathered, data(rank, rank, 2))
        scattered = torch.empty(rank + 1, dtype=torch.float64)
        dist.reduce_scatter(scattered, [data(rank, i + 1) for i in range(W)])
        exchanged = [torch.empty(i + rank, dtype=torch.float64) for i in range(W)]
        dist.all_to_all(exchanged, [data(rank * W + i, i + rank) for i in range(W)])
        return gathered, scattered, exchanged

    for rank, (gathered, scattered, exchanged) in enumerate(ranks(work)):
        for i in range(W):
            assert torch.equal(gathered[i], data(i, i, 2))
            assert torch.equal(exchanged[i], data(i * W + rank, i + rank))
        torch.testing.assert_close(
            scattered, sum((data(r, rank + 1) for r in range(W)), torch.zeros(rank + 1)).double()
        )


def test_all_to_all_single_takes_equal_and_uneven_splits(ranks: Run) -> None:
    splits = [[0, 2, 1], [1, 0, 3], [2, 2, 2]]  # splits[source][target]

    def work() -> tuple[Tensor, Tensor]:
        rank = dist.get_rank()
        equal = torch.empty(2 * W, dtype=torch.float64)
        dist.all_to_all_single(equal, data(rank, 2 * W))
        take = [splits[source][rank] for source in range(W)]
        uneven = torch.empty(sum(take), 2, dtype=torch.float64)
        dist.all_to_all_single(uneven, data(rank, sum(splits[rank]), 2), take, splits[rank])
        return equal, uneven

    for rank, (equal, uneven) in enumerate(ranks(work)):
        assert torch.equal(equal, torch.cat([data(s, 2 * W)[2 * rank : 2 * rank + 2] for s in range(W)]))
        pieces = [data(s, sum(splits[s]), 2).split(splits[s])[rank] for s in range(W)]
        assert torch.equal(uneven, torch.cat(pieces))


@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (0, 3)])
def test_single_tensor_forms_join_or_stack(shape: tuple[int, ...], ranks: Run) -> None:
    def work() -> list[Tensor]:
        x = data(dist.get_rank(), *shape)
        stacked, back = torch.empty(W, *shape, dtype=torch.float64), torch.empty(shape, dtype=torch.float64)
        all_gather_single(stacked, x)
        joined = (
            torch.empty(W * shape[0], *shape[1:], dtype=torch.float64) if shape else torch.empty(W).double()
        )
        all_gather_single(joined, x)
        reduce_scatter_single(back, joined * (dist.get_rank() + 1))
        return [stacked, joined, back]

    for rank, (stacked, joined, back) in enumerate(ranks(work)):
        expected = torch.stack([data(r, *shape) for r in range(W)])
        assert torch.equal(stacked, expected)
        assert torch.equal(joined, expected.reshape(joined.shape))
        torch.testing.assert_close(back, 6 * data(rank, *shape))


def test_tensors_may_be_strided(ranks: Run) -> None:
    def work() -> tuple[Tensor, Tensor]:
        rank = dist.get_rank()
        x = data(rank, 4, 3).t()
        base = torch.zeros(3, 2 * W * 3, dtype=torch.float64)
        out = base.t()[::2]  # (9, 3), in neither memory order
        group: Any = dist.group.WORLD
        group.all_gather_single(out, data(rank, 3, 3).t()).wait()
        dist.all_reduce(x)
        return x, out

    for total, gathered in ranks(work):
        torch.testing.assert_close(
            total, sum((data(r, 4, 3).t() for r in range(W)), torch.zeros(3, 4).double())
        )
        assert torch.equal(gathered, torch.cat([data(r, 3, 3).t() for r in range(W)]))


def formats(x: Tensor) -> list[Tensor]:
    """The same values in other memory formats: dense in the usual order, channels last, transposed, and in no piece."""
    transposed = x.clone().transpose(0, -1).contiguous().transpose(0, -1)
    apart = torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0].copy_(x)
    return [x.clone(), x.clone(memory_format=torch.channels_last), transposed, apart]


def test_calls_in_inference_mode_take_strided_tensors_of_either_kind_and_may_end_outside_of_it(
    ranks: Run,
) -> None:
    def fn() -> list[Tensor]:
        normal, waited = torch.ones(3, 2).t(), torch.ones(3, 2).t()
        with torch.inference_mode():
            inner = torch.ones(3, 2).t()
            works = [dist.all_reduce(x, async_op=True) for x in (normal, inner)]
            dist.all_reduce(waited)
        for work in works:
            work.wait()
        return [x.clone() for x in (normal, waited, inner)]

    for found in ranks(fn):
        for total in found:
            assert torch.equal(total, torch.full((2, 3), float(W)))


@pytest.mark.parametrize("first", range(4))
def test_sums_of_tensors_in_different_memory_formats_are_of_their_elements(first: int, ranks: Run) -> None:
    shape = (W, 4, 3, 2)

    def work() -> dict[str, Tensor]:
        rank = dist.get_rank()
        mine = data(rank, *shape)
        own = (first + rank) % 4
        everywhere, at_root, scattered, listed = (formats(mine)[own] for _ in range(4))
        dist.all_reduce(everywhere)
        dist.reduce(at_root, 1)
        part, parts = formats(torch.zeros(1, *shape[1:]).double())[(own + 1) % 4], torch.empty(1, *shape[1:])
        reduce_scatter_single(part, scattered)
        parts = formats(parts.double())[(own + 2) % 4]
        dist.reduce_scatter(parts, list(listed.split(1)))
        return {"all": everywhere, "root": at_root, "single": part, "list": parts}

    total = data(0, *shape) + data(1, *shape) + data(2, *shape)
    for rank, got in enumerate(ranks(work)):
        assert torch.equal(got["all"], total)
        assert rank != 1 or torch.equal(got["root"], total)
        assert torch.equal(got["single"], total[rank : rank + 1])
        assert torch.equal(got["list"], total[rank : rank + 1])


def test_an_expanded_operand_is_summed_by_its_elements(ranks: Run) -> None:
    def work() -> tuple[Tensor, Tensor]:
        rank = dist.get_rank()
        row = data(rank, 4)
        given = row.expand(W, 4) if rank else row.expand(W, 4).t().contiguous().t()
        single, listed = torch.empty(1, 4, dtype=torch.float64), torch.empty(4, dtype=torch.float64)
        reduce_scatter_single(single, given)
        dist.reduce_scatter(listed, list(given.unbind(0)))
        return single, listed

    total = data(0, 4) + data(1, 4) + data(2, 4)
    for single, listed in ranks(work):
        assert torch.equal(single, total[None])
        assert torch.equal(listed, total)


def test_equal_sizes_may_be_passed_on_one_rank_and_omitted_on_another(ranks: Run) -> None:
    def work() -> Tensor:
        rank, out = dist.get_rank(), torch.empty(2 * W, 3, dtype=torch.float64)
        sizes = [2] * W if rank == 1 else None
        dist.all_to_all_single(out, data(rank, 2 * W, 3), sizes, sizes)
        return out

    for rank, out in enumerate(ranks(work)):
        assert torch.equal(out, torch.cat([data(s, 2 * W, 3)[2 * rank : 2 * rank + 2] for s in range(W)]))


def test_a_tensor_sent_may_be_changed_at_once(ranks: Run) -> None:
    def work() -> list[float]:
        if dist.get_rank() == 0:
            x = torch.zeros(1)
            for i in range(5):
                x.fill_(i)
                dist.send(x, 1)
            return []
        time.sleep(0.05)
        got, x = [], torch.empty(1)
        for _ in range(5):
            dist.recv(x, 0)
            got.append(x.item())
        return got

    assert ranks(work, nprocs=2)[1] == [0, 1, 2, 3, 4]


def test_messages_match_by_sender_and_tag(ranks: Run) -> None:
    def work() -> Any:
        rank = dist.get_rank()
        if rank:
            dist.send(torch.tensor(10.0 * rank), 0, tag=7)
            dist.send(torch.tensor(10.0 * rank + 1), 0, tag=8)
            return None
        x, y, z = torch.empty(()), torch.empty(()), torch.empty(())
        dist.recv(x, 2, tag=8)
        dist.recv(y, 2, tag=7)
        source = dist.recv(z, tag=8)
        return x.item(), y.item(), z.item(), source

    assert ranks(work)[0] == (21.0, 20.0, 11.0, 1)


def test_receive_before_send_does_not_deadlock(ranks: Run) -> None:
    def work() -> float:
        rank, x = dist.get_rank(), torch.empty(1)
        ops = [
            dist.P2POp(dist.irecv, x, (rank - 1) % W),
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % W),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return x.item()

    assert ranks(work) == [2, 0, 1]


def test_async_calls_on_two_groups_may_be_waited_for_in_any_order(ranks: Run) -> None:
    def work() -> tuple[float, float]:
        other = dist.new_group(list(range(W)))
        a, b = torch.ones(1), torch.ones(1) * 2
        calls = [(a, dist.group.WORLD), (b, other)]
        if dist.get_rank() == 1:
            calls.reverse()
        works = [dist.all_reduce(x, group=group, async_op=True) for x, group in calls]
        for request in reversed(works):
            assert request is not None
            request.wait()
            assert request.is_completed()
        return a.item(), b.item()

    assert ranks(work) == [(3, 6)] * W


def test_coalesced_calls_are_one_work(ranks: Run) -> None:
    def work() -> list[float]:
        xs = [torch.ones(1) * i for i in range(4)]
        with dist._coalescing_manager(async_ops=True) as pending:  # type: ignore[attr-defined]
            for x in xs:
                dist.all_reduce(x)
        pending.wait()
        return [x.item() for x in xs]

    assert ranks(work) == [[0, 3, 6, 9]] * W


def test_groups_and_meshes_of_some_of_the_ranks(ranks: Run) -> None:
    def work() -> Any:
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gp"))
        odd = dist.new_group([1, 3])
        x = torch.tensor(float(rank))
        y, z, u = x.clone(), x.clone(), x.clone()
        dist.all_reduce(y, group=mesh.get_group("dp"))
        dist.all_reduce(z, group=mesh.get_group("gp"))
        if rank % 2:
            dist.all_reduce(u, group=odd)
        gathered = functional_all_gather(x.reshape(1), 0, mesh["gp"])
        total = funcol.all_reduce(x, "sum", mesh["dp"])
        return (
            list(mesh.get_coordinate() or ()),
            y.item(),
            z.item(),
            u.item(),
            gathered.tolist(),
            total.item(),
        )

    assert ranks(work, nprocs=4) == [
        ([0, 0], 2, 1, 0, [0, 1], 2),
        ([0, 1], 4, 1, 4, [0, 1], 4),
        ([1, 0], 2, 5, 2, [2, 3], 2),
        ([1, 1], 4, 5, 4, [2, 3], 4),
    ]


def test_functional_collectives_and_objects_work(ranks: Run) -> None:
    def work() -> Any:
        rank, group = dist.get_rank(), dist.group.WORLD
        assert group is not None
        x = data(rank, W, 2)
        scattered = functional_reduce_scatter(x, "sum", 0, group)
        exchanged = funcol.all_to_all_single(x, None, None, group)
        both = funcol.all_reduce_coalesced([x, 2 * x], "sum", group)
        names: list[Any] = [None] * W
        dist.all_gather_object(names, f"rank {rank}")
        shared: list[Any] = [{"root": rank}]
        dist.broadcast_object_list(shared, 2)
        return [t + 0 for t in (scattered, exchanged, *both)], names, shared

    total = data(0, W, 2) + data(1, W, 2) + data(2, W, 2)
    for rank, ((scattered, exchanged, once, twice), names, shared) in enumerate(ranks(work)):
        torch.testing.assert_close(scattered, total[rank : rank + 1])
        assert torch.equal(exchanged, torch.stack([data(r, W, 2)[rank] for r in range(W)]))
        torch.testing.assert_close(once, total)
        torch.testing.assert_close(twice, 2 * total)
        assert names == [f"rank {r}" for r in range(W)]
        assert shared == [{"root": 2}]


def test_ddp_averages_gradients(ranks: Run) -> None:
    def work() -> Tensor:
        model = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(float(dist.get_rank()))  # DDP broadcasts rank 0's
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp(data(dist.get_rank(), 2, 3, dtype=torch.float32)).sum().backward()
        assert model.weight.detach().abs().max() == 0
        assert model.weight.grad is not None
        return model.weight.grad

    expected = torch.stack([data(r, 2, 3, dtype=torch.float32).sum(0) for r in range(W)]).mean(0)
    for gradient in ranks(work):
        torch.testing.assert_close(gradient[0], expected)


def test_long_call_progresses_while_its_rank_waits_for_a_message(ranks: Run) -> None:
    def work() -> float:
        rank, x, y = dist.get_rank(), torch.ones(200_000, dtype=torch.float64), torch.zeros(1)
        if rank == 0:
            request = dist.all_reduce(x, async_op=True)
            dist.recv(y, 1)  # which rank 1 sends when the sum is there
            assert request is not None
            request.wait()
        else:
            dist.all_reduce(x)
            if rank == 1:
                dist.send(y + 7, 0)
        assert (x == W).all()
        return y.item()

    assert ranks(work)[0] == 7


def test_a_group_may_have_the_name_of_one_of_fewer_ranks_that_is_gone(ranks: Run) -> None:
    def work() -> list[float]:
        sums = []
        for count in (2, 3, 2, 3):
            group = dist.new_group(list(range(count)))
            x = torch.ones(1)
            if dist.get_rank() < count:
                dist.all_reduce(x, group=group)
                dist.destroy_process_group(group)
            sums.append(x.item())
        return sums

    assert ranks(work) == [[2, 3, 2, 3]] * 2 + [[1, 3, 1, 3]]

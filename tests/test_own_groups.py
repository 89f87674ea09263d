"""What torch asks of a group besides the collectives proper: on threads and on shared memory."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from tests.conftest import Worlds
from tests.store_event import StoreEvent

W = 3
Run = Callable[..., list[Any]]
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(scope="module", params=["threads", "shm"])
def ranks(request: pytest.FixtureRequest, worlds: Worlds) -> Run:
    """`ranks(fn, *args)` runs fn on three ranks of the backend."""
    return worlds(W, request.param, 60).run


def data(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- lists of tensors


@pytest.mark.filterwarnings(
    "ignore:.torch.distributed.all_gather_coalesced. will be deprecated:FutureWarning"
)
def test_a_list_of_tensors_of_any_shape_is_gathered_from_every_rank(ranks: Run) -> None:
    shapes = [(2,), (), (3, 1), (0, 4)]

    def work(async_op: bool) -> tuple[list[list[Tensor]], bool]:
        outputs = [[torch.empty(shape, dtype=torch.float64) for shape in shapes] for _ in range(W)]
        inputs = [data(10 * dist.get_rank() + i, *shape) for i, shape in enumerate(shapes)]
        future = dist.all_gather_coalesced(outputs, inputs, async_op=async_op)
        if future is None:
            return outputs, True
        value = future.wait()
        return outputs, all(torch.equal(value[r][i], outputs[r][i]) for r in range(W) for i in range(4))

    for async_op in (False, True):
        for outputs, same in ranks(work, async_op):
            assert same
            for rank, of_rank in enumerate(outputs):
                for i, shape in enumerate(shapes):
                    assert torch.equal(of_rank[i], data(10 * rank + i, *shape))


@pytest.mark.parametrize("root", [-1, W, W + 4])
def test_a_root_outside_of_the_group_is_refused_on_every_rank(root: int, ranks: Run) -> None:
    def work() -> list[str]:
        x, before = torch.full((3,), float(dist.get_rank())), torch.full((3,), float(dist.get_rank()))
        said = [
            error_of(lambda: dist.broadcast(x, group_src=root)),
            error_of(lambda: dist.reduce(x, group_dst=root)),
            error_of(lambda: dist.gather(x, group_dst=root)),
            error_of(lambda: dist.scatter(x, group_src=root)),
        ]
        assert torch.equal(x, before)
        dist.all_reduce(x)  # the group goes on
        assert x.tolist() == 3 * [float(sum(range(W)))]
        return said

    for said in ranks(work):
        for text in said:
            assert text.startswith("ArgumentError: gradmesh: the root is not a rank of the group")
            assert f"got       {root}\n" in text


@pytest.mark.filterwarnings(
    "ignore:.torch.distributed.all_gather_coalesced. will be deprecated:FutureWarning"
)
def test_lists_that_are_not_one_for_each_rank_and_input_are_refused(ranks: Run) -> None:
    def work() -> tuple[str, str, float]:
        x, group = torch.ones(2), dist.group.WORLD
        short = [[torch.empty(2)] for _ in range(W - 1)]
        uneven = [[torch.empty(2)] * (1 + (r == 1)) for r in range(W)]
        errors = [error_of(lambda o=o: dist.all_gather_coalesced(o, [x])) for o in (short, uneven)]
        dist.all_reduce(x, group=group)
        return errors[0], errors[1], x[0].item()

    for short, uneven, total in ranks(work):
        assert "ArgumentError: gradmesh: all_gather_coalesced requires one list of outputs per rank" in short
        assert "lists of lengths [1, 1]" in short
        assert "lists of lengths [1, 2, 1]" in uneven
        assert total == W


def test_sparse_tensors_are_summed_into_separate_memory(ranks: Run) -> None:
    def dense(rank: int) -> Tensor:
        x = torch.zeros(5, dtype=torch.float64)
        x[[0, rank + 1]] = data(rank, 2)
        return x

    def work() -> Tensor:
        x = dense(dist.get_rank()).to_sparse()
        dist.all_reduce(x)
        total = x.to_dense()
        dist.barrier()
        if dist.get_rank() == 0:
            x.coalesce().values().zero_()
        dist.barrier()
        assert dist.get_rank() == 0 or torch.equal(x.to_dense(), total)
        return total

    for total in ranks(work):
        torch.testing.assert_close(total, dense(0) + dense(1) + dense(2))


# -- a barrier that names who is missing


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_waits_for_all(wait_all_ranks: bool, ranks: Run) -> None:
    def work() -> tuple[float, float]:
        group: Any = dist.group.WORLD
        if dist.get_rank() == 2:
            time.sleep(0.1)
        came = time.monotonic()
        group.monitored_barrier(datetime.timedelta(seconds=30), wait_all_ranks=wait_all_ranks)
        return came, time.monotonic()

    times = ranks(work)
    assert max(came for came, _ in times) <= min(left for _, left in times)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("missing", "wait_all_ranks", "named"),
    [([1], False, "Rank 1"), ([1, 2], False, "Rank 1"), ([1, 2], True, "Ranks 1, 2"), ([2], True, "Ranks 2")],
)
def test_a_monitored_barrier_names_the_ranks_that_do_not_come(
    missing: list[int], wait_all_ranks: bool, named: str, ranks: Run
) -> None:
    def work() -> str:
        group: Any = dist.new_group(timeout=datetime.timedelta(seconds=30))
        said = ""
        if dist.get_rank() not in missing:
            limit = datetime.timedelta(seconds=1)
            said = error_of(lambda: group.monitored_barrier(limit, wait_all_ranks=wait_all_ranks))
            seen[dist.get_rank()].set()
        for rank in range(W):
            if rank not in missing:
                seen[rank].wait()  # a rank that has returned would be named by itself
        return said

    seen = [StoreEvent() for _ in range(W)]
    said = ranks(work)
    assert f"{named} failed to pass monitoredBarrier in 1000 ms" in said[0]
    assert said[0].startswith("DeadlockError: gradmesh: ")
    for rank in range(1, W):
        if rank not in missing:
            assert f"Rank {rank} successfully reached monitoredBarrier, but received errors" in said[rank]
            assert "missing: " + ", ".join(f"rank {m}" for m in missing) in said[rank]


def test_a_monitored_barrier_without_time_fails_at_once(ranks: Run) -> None:
    def work() -> str:
        group: Any = dist.new_group()
        said = ""
        if dist.get_rank() == 0:
            said = error_of(lambda: group.monitored_barrier(datetime.timedelta(0)))
            seen.set()
        seen.wait()
        return said

    seen = StoreEvent()
    assert "Rank 0 timed out in monitoredBarrier after 0 ms" in ranks(work)[0]


def test_a_monitored_barrier_keeps_the_error_of_ranks_that_call_something_else(ranks: Run) -> None:
    def work() -> str:
        group: Any = dist.new_group()
        if dist.get_rank() == 1:
            return error_of(lambda: dist.all_reduce(torch.ones(1), group=group))
        return error_of(group.monitored_barrier)

    for said in ranks(work):
        assert said.startswith("MismatchError")
        assert "barrier" in said
        assert "all_reduce" in said


def test_torchs_function_takes_a_group_from_2_14_on(ranks: Run) -> None:
    def work() -> str:
        return error_of(lambda: dist.monitored_barrier(timeout=datetime.timedelta(seconds=30)))

    expected = (
        "" if TORCH >= (2, 14) else "ValueError: monitored_barrier is only implemented for GLOO backend."
    )
    assert ranks(work) == [expected] * W


# -- the backend and the devices of a group


def test_group_is_the_backend_of_the_cpu_only(ranks: Run) -> None:
    def work() -> tuple[bool, list[torch.device], str]:
        group: Any = dist.group.WORLD
        return (
            group._get_backend(torch.device("cpu")) is group,
            group._device_types,
            error_of(lambda: group._get_backend(torch.device("cuda"))),
        )

    for own, devices, error in ranks(work):
        assert own
        assert devices == [torch.device("cpu")]
        assert error.startswith("RuntimeError: No backend type associated with device type cuda")


def test_messages_go_as_a_batch_in_a_group_of_some_of_the_ranks(ranks: Run) -> None:
    def work() -> float:
        rank, x = dist.get_rank(), torch.empty(1)
        group = dist.new_group([0, 2])
        if rank == 1:
            return -1
        ops = [
            dist.P2POp(dist.irecv, x, 2 - rank, group),
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), 2 - rank, group),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return x.item()

    assert ranks(work) == [2, -1, 0]


def test_a_state_dict_is_broadcast_from_rank_0(ranks: Run) -> None:
    def work() -> Tensor:
        model = nn.Linear(2, 3, bias=False)
        state = {"weight": data(7, 3, 2).float()} if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)  # type: ignore[arg-type]
        return model.weight.detach()

    for weight in ranks(work):
        assert torch.equal(weight, data(7, 3, 2).float())

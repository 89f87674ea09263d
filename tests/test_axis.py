"""Axes: from every kind of argument, with ranks counted on the axis."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gradmesh as gm

Threads = Callable[[int], Callable[..., list[Any]]]


def test_every_kind_of_axis_argument_finds_its_ranks(threads: Threads) -> None:
    def on_each_rank() -> None:
        world = dist.get_rank()
        mesh = gm.mesh(dp=2, gp=-1)
        gp = gm.axis("gp")
        assert (gp.name, gp.rank, gp.size) == ("gp", world % 2, 2)
        assert gp.global_ranks == [world // 2 * 2, world // 2 * 2 + 1]
        expected = [10 * r for r in gp.global_ranks]
        x = torch.tensor([10 * world])
        for which in ("gp", mesh.get_group("gp"), mesh["gp"], gp):
            assert gm.all_gather(x, which).tolist() == expected
        assert gm.all_gather(x, "dp").tolist() == [10 * (world % 2), 10 * (world % 2) + 20]
        assert gm.all_gather(x, dist.group.WORLD).tolist() == [0, 10, 20, 30]

    threads(4)(on_each_rank)


def test_none_is_the_only_axis_of_the_mesh_or_the_world(threads: Threads) -> None:
    def on_each_rank() -> None:
        assert (gm.axis().name, gm.axis().size) == ("world", 4)
        with gm.use_mesh(init_device_mesh("cpu", (4,))):
            assert (gm.axis().name, gm.axis().size) == ("mesh", 4)
        with gm.use_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))):
            with pytest.raises(gm.AxisError, match=r"several axes(.|\n)*'a', 'b'(.|\n)*axis='a'"):
                gm.axis()
            with pytest.raises(gm.AxisError, match=r"no axis 'c'(.|\n)*'a', 'b'"):
                gm.all_gather(torch.ones(1), "c")
        assert (gm.axis().name, gm.axis().size) == ("world", 4)

    threads(4)(on_each_rank)


def test_subgroup_counts_its_members(threads: Threads) -> None:
    def on_each_rank() -> list[object] | str:
        group = dist.new_group([1, 3])
        if dist.get_rank() not in (1, 3):
            with pytest.raises(gm.AxisError) as caught:
                gm.all_gather(torch.ones(1), group)
            return str(caught.value).splitlines()[0]
        x = torch.tensor([float(dist.get_rank())], requires_grad=True)
        y = gm.broadcast(x, group, root=1)
        (y * (1 + gm.axis(group).rank)).sum().backward()
        parts = gm.reduce_scatter(torch.tensor([1, 2]) * dist.get_rank(), group)
        return [gm.axis(group).rank, y.item(), None if x.grad is None else x.grad.item(), parts.tolist()]

    refused = "gradmesh.all_gather: this rank is not in the group"
    assert threads(4)(on_each_rank) == [refused, [0, 3.0, 0.0, [4]], refused, [1, 3.0, 3.0, [8]]]


def test_an_error_of_a_subgroup_names_its_global_ranks(threads: Threads) -> None:
    def on_each_rank() -> str:
        group = dist.new_group([1, 3]) if gm.rank() % 2 else dist.new_group([0, 2])
        try:
            gm.all_gather(torch.ones(2 + gm.rank()), group)
        except gm.MismatchError as error:
            return str(error)
        return ""

    shown = threads(4)(on_each_rank)
    assert "'group' of global ranks 0, 2, rank 0 of 2" in shown[0]
    assert "'group' of global ranks 1, 3, rank 1 of 2" in shown[3]


def test_an_axis_that_only_describes_a_call_has_a_text_without_a_process_group() -> None:
    assert not dist.is_initialized()
    assert str(gm.Axis("group", 0, 2, None)) == "'group', rank 0 of 2"  # type: ignore[arg-type]


def test_a_group_may_be_there_twice(threads: Threads) -> None:
    def on_each_rank() -> list[int]:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        x = torch.tensor([dist.get_rank()])
        return (gm.all_gather(x, first) + 10 * gm.all_gather(x, second)).tolist()

    assert threads(2)(on_each_rank) == [[0, 11]] * 2


def test_a_mesh_of_a_world_that_is_gone_is_forgotten() -> None:
    def on_each_rank() -> int:
        gm.mesh(x=2)
        return gm.axis("x").size

    assert gm.launch(on_each_rank, 2, backend="threads") == [2, 2]
    assert gm.launch(lambda: gm.axis().name, 2, backend="threads") == ["world", "world"]


@pytest.mark.parametrize(
    "sizes",
    [{"a": 3}, {"a": 2, "b": 3}, {"a": -1, "b": -1}, {"a": 3, "b": -1}, {"a": 0}, {}, {"a": 4.0}, {"a": "4"}],
)
def test_a_mesh_that_does_not_fill_the_world_is_refused(sizes: dict[str, Any], threads: Threads) -> None:
    def on_each_rank() -> None:
        with pytest.raises(gm.ArgumentError, match=r"gradmesh.mesh(.|\n)*product 4"):
            gm.mesh(**sizes)

    threads(4)(on_each_rank)


def test_on_a_mesh_of_several_axes_rank_and_world_size_are_those_of_the_world(threads: Threads) -> None:
    def on_each_rank() -> None:
        mesh = gm.mesh(dp=2, gp=2)
        assert (gm.rank(), gm.world_size()) == (dist.get_rank(), 4)
        with gm.use_mesh(mesh["gp"]):
            assert (gm.rank(), gm.world_size()) == (dist.get_rank() % 2, 2)
        with pytest.raises(gm.AxisError, match=r"gradmesh.rank: (.*) several axes"):
            gm.rank(mesh)

    threads(4)(on_each_rank)


def test_rank_and_world_size_are_those_of_the_axis(threads: Threads) -> None:
    def on_each_rank() -> None:
        world = dist.get_rank()
        assert (gm.rank(), gm.world_size()) == (world, 4)
        gm.mesh(dp=2, gp=-1)
        assert (gm.rank("dp"), gm.rank("gp"), gm.world_size("gp")) == (world // 2, world % 2, 2)
        with pytest.raises(gm.AxisError, match=r"gradmesh.world_size"):
            gm.world_size("tp")

    threads(4)(on_each_rank)


def test_a_barrier_lets_no_rank_pass_before_all_have_come(threads: Threads) -> None:
    came: list[int] = []

    def on_each_rank(axis: str | None, pause: float) -> int:
        gm.mesh(dp=2, gp=2) if axis else None
        time.sleep(pause * gm.rank(axis))
        came.append(dist.get_rank())
        gm.barrier(axis)
        return len(came)

    assert min(threads(4)(on_each_rank, None, 0.02)) == 4
    came.clear()
    assert min(threads(4)(on_each_rank, "gp", 0.02)) >= 2


def other_calls_during_a_barrier() -> tuple[str, list[list[str]], float]:
    """What a barrier on one rank raises while the other is in a verb; the same between two threads of each rank."""

    def outcome(call: Callable[[], object]) -> str:
        try:
            call()
        except gm.MismatchError as error:
            return str(error)
        return "passed"

    def verb() -> None:
        gm.all_reduce(torch.ones(3), dst=gm.R)

    def posted() -> int:
        world: Any = dist.group.WORLD
        return world._get_sequence_number_for_group()

    def after_the_other(before: int, call: Callable[[], object]) -> str:
        deadline = time.monotonic() + 60
        while posted() == before:
            assert time.monotonic() < deadline, "the other thread makes no call"
            time.sleep(0.001)
        return outcome(call)

    one = outcome(gm.barrier if gm.rank() == 0 else verb)
    two: list[list[str]] = []
    for _ in range(5):
        found: list[str] = []
        first, second = outcome, functools.partial(after_the_other, posted())
        in_thread, in_main = (first, second) if gm.rank() == 0 else (second, first)
        other = threading.Thread(target=lambda found=found, made=in_thread: found.append(made(verb)))
        other.start()
        found.append(in_main(gm.barrier))
        other.join()
        two.append(found)
    gm.barrier()
    x = torch.ones((), requires_grad=True)
    gm.all_reduce(x, dst=gm.R).backward()
    assert x.grad is not None
    return one, two, x.grad.item()


@pytest.mark.processes
def test_a_barrier_is_compared_with_the_calls_of_other_ranks_and_threads(processes: Threads) -> None:
    for one, two, after in processes(2)(other_calls_during_a_barrier):
        assert re.search(r"rank 0: barrier.* in outcome(?s:.)*rank 1: all_reduce", one)
        assert [len(found) for found in two] == [2] * 5
        assert all(re.search("do not match|made different calls", text) for found in two for text in found)
        assert after == 2


def test_offset_is_the_first_local_row(threads: Threads) -> None:
    def on_each_rank() -> None:
        x = torch.arange(2 + 3 * dist.get_rank())
        whole, axis = gm.all_gather(x, sizes="auto"), gm.axis()
        sizes = gm.sizes(x)
        assert torch.equal(whole[axis.offset(sizes) :][: len(x)], x)
        assert torch.equal(whole[axis.slice(sizes)], x)
        for n in (0, 2, 7, 9):
            rows = torch.arange(n)
            assert torch.equal(gm.shard(rows), rows[axis.slice(n)])
            assert axis.offset(n) == axis.slice(n).start

    threads(3)(on_each_rank)


@pytest.mark.parametrize("rows", [[1, 2], [1, 2, -3], "123", 2.0, True, -1, None, [1, 2, 3.0]])
def test_rows_that_are_not_one_number_for_each_rank_are_refused(rows: Any) -> None:
    axis = gm.Axis("any", 1, 3, None)  # type: ignore[arg-type]
    with pytest.raises(gm.ArgumentError, match=r"gradmesh.Axis.offset(.|\n)*3 ints of 0 or more"):
        axis.offset(rows)


def test_the_group_of_another_rank_that_threads_share_is_refused(threads: Threads) -> None:
    shared: list[dist.ProcessGroup] = []

    def on_each_rank() -> float:
        own = dist.new_group([0, 1])
        assert isinstance(own, dist.ProcessGroup)
        assert gm.all_reduce(torch.ones(1), own, dst=gm.I).item() == 2
        if gm.rank() == 0:
            shared.append(own)  # as a global of a module
        dist.barrier()
        if gm.rank():
            with pytest.raises(gm.AxisError, match=r'(?s)the object of another rank.*backend="shm"'):
                gm.all_reduce(torch.ones(1), shared[0], dst=gm.I)
        return gm.all_reduce(torch.ones(1), own, dst=gm.I).item()

    assert threads(2)(on_each_rank) == [2.0, 2.0]

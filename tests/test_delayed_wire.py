"""Delayed transport: takes at least the modelled time, overlaps it, and changes no value."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import gradmesh as gm
from gradmesh.runtime.state import INSTALLED
from gradmesh.verify import CostModel, Link, Timeline, delayed, simulate, timeline
from gradmesh.verify.timelines import RecordingTransport, Transfer
from tools.attack import draw as programs
from tools.attack.programs import source
from tools.attack.run import Failure, on_rank
from tools.simulator.attack import alike

Ranks = Callable[[int], Callable[..., list[Any]]]

LATENCY, BANDWIDTH = 4e-3, 1e6
"""Seconds, and bytes per second: slow enough to be seen, in any state of the machine."""
WIRE = Link(LATENCY * 1e6, BANDWIDTH / 1e9)
ROWS = 1200
"""Rows of 8 bytes."""


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 + gm.rank())
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def messages(x: Tensor) -> Tensor:
    if gm.rank() == 0:
        gm.send(x, to=1)
        return gm.recv(torch.empty_like(x), source=1)
    got = gm.recv(torch.empty_like(x), source=0)
    gm.send(x, to=0)
    return got


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "all_gather": (gm.all_gather, 1, 1),
    "reduce_scatter": (gm.reduce_scatter, 1, 0.5),
    "all_reduce": (lambda x: gm.all_reduce(x, dst=gm.R), 2, 1),
    "all_reduce of the largest": (lambda x: gm.all_reduce(x, dst=gm.R, op="max"), 2, 1),
    "all_to_all": (gm.all_to_all, 1, 0.5),
    "broadcast": (lambda x: gm.broadcast(x, root=1), 1, 1),
    "reduce": (lambda x: gm.reduce(x, root=1), 1, 1),
    "gather": (lambda x: gm.gather(x, root=1), 1, 0.5),
    "shift": (gm.shift, 1, 1),
    "send and recv": (messages, 1, 1),
}
"""Each with the rounds and the operands that the slowest rank sends, at two ranks; at least."""


def timed(name: str, wire: Link | None) -> tuple[float, Tensor]:
    call, x = CALLS[name][0], drawn(ROWS)
    call(x)
    gm.barrier()
    started = time.perf_counter()
    if wire is None:
        result = call(x)
    else:
        with delayed(wire):
            result = call(x)
    return time.perf_counter() - started, result


@pytest.mark.timed
@pytest.mark.parametrize("name", CALLS)
def test_call_takes_at_least_the_modelled_time_with_equal_result(name: str, threads: Ranks) -> None:
    def on_each_rank() -> tuple[float, bool]:
        plain, (took, result) = timed(name, None), timed(name, WIRE)
        return took, torch.equal(plain[1], result)

    _, rounds, sent = CALLS[name]
    least = rounds * LATENCY + sent * 8 * ROWS / BANDWIDTH
    found = threads(2)(on_each_rank)
    assert max(took for took, _ in found) >= least
    assert min(took for took, _ in found) < 3 * least + 0.05
    assert all(same for _, same in found)


def backward(wire: Link | None) -> tuple[list[float], Tensor]:
    """Seconds of each half, and a gradient of a loss that differs from rank to rank."""
    x = drawn(ROWS).requires_grad_()
    with delayed(wire or Link(0, math.inf)):
        times = [time.perf_counter()]
        loss = gm.all_gather(x).sin().sum() * (1 + gm.rank())
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
    assert x.grad is not None
    return [after - before for before, after in itertools.pairwise(times)], x.grad


@pytest.mark.timed
def test_backward_is_delayed_and_exact_on_processes(processes: Ranks) -> None:
    plain, slow = processes(2)(backward, None), processes(2)(backward, WIRE)
    least = LATENCY + 8 * ROWS / BANDWIDTH
    assert min(min(times) for times, _ in slow) >= least
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(plain, slow, strict=True))


@pytest.mark.timed
def test_the_time_of_the_transfer_counts_into_the_delay(threads: Ranks) -> None:
    """A rank that waits for another for longer than the delay waits no more after that."""

    def on_each_rank() -> float:
        gm.barrier()
        with delayed(Link(80_000, math.inf)):
            if gm.rank() == 1:
                time.sleep(0.12)
            started = time.perf_counter()
            gm.all_gather(drawn(1))
            return time.perf_counter() - started

    first, second = threads(2)(on_each_rank)
    assert 0.1 < first < 0.18
    assert second >= 0.08


@pytest.mark.timed
def test_slower_of_two_blocks_counts(threads: Ranks) -> None:
    def on_each_rank() -> list[float]:
        found = []
        for outer, inner in ((40_000, 10_000), (10_000, 40_000)):
            with delayed(Link(outer, math.inf)), delayed(Link(inner, math.inf)):
                started = time.perf_counter()
                gm.shift(drawn(1))
                found.append(time.perf_counter() - started)
        return found

    assert all(0.04 <= took < 0.05 + 0.04 for found in threads(2)(on_each_rank) for took in found)


def test_a_model_has_a_link_for_each_axis_and_an_axis_without_one_is_an_error(threads: Ranks) -> None:
    def on_each_rank() -> float:
        x, mesh = drawn(1), init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
        with gm.use_mesh(mesh), delayed(CostModel({"outer": Link(30_000, 1)})):
            started = time.perf_counter()
            gm.all_gather(x, "outer")
            took = time.perf_counter() - started
            with pytest.raises(gm.ArgumentError, match="no link for an axis"):
                gm.all_gather(x, torch.distributed.group.WORLD)
        return took

    assert min(threads(2)(on_each_rank)) >= 0.03


def test_the_other_threads_of_a_rank_work_meanwhile(threads: Ranks) -> None:
    """The delay sleeps without the interpreter's lock."""

    def on_each_rank() -> int:
        counted, over = 0, threading.Event()

        def count() -> None:
            nonlocal counted
            while not over.is_set():
                counted += 1

        beside = threading.Thread(target=count)
        with delayed(Link(50_000, math.inf)):
            beside.start()
            gm.all_gather(drawn(1))
            over.set()
        beside.join()
        return counted

    assert min(threads(2)(on_each_rank)) > 1000


@pytest.mark.timed
def test_it_ends_with_its_block_and_is_rank_local(threads: Ranks) -> None:
    def on_each_rank() -> float:
        with pytest.raises(RuntimeError, match="left"), delayed(Link(1e6, 1)):
            raise RuntimeError("left")
        gm.barrier()
        started = time.perf_counter()
        with delayed(Link(30_000 * gm.rank(), math.inf)):  # none on rank 0
            gm.all_gather(drawn(1))
            took = time.perf_counter() - started
            gm.barrier()
        return took

    first, second = threads(2)(on_each_rank)
    assert first < 0.03 <= second
    assert INSTALLED == [0]


def watched(program: str) -> tuple[Any, Timeline]:
    with delayed(Link(50, 1)), timeline() as line:
        outcome = on_rank(program)
    return outcome, line


def hold_to_the_plain_run(index: int, threads: Ranks) -> tuple[int, int]:
    """Run a random program plainly and watched on a slow wire; returns how many calls and links were seen."""
    program = programs.drawn(41, index)
    plain = threads(program.ranks)(on_rank, source(program))
    found = threads(program.ranks)(watched, source(program))
    exact = not any(isinstance(outcome, Failure) for outcome in plain)
    assert alike([outcome for outcome, _ in found], plain, exact=exact), source(program)
    line = Timeline.joined(line for _, line in found)
    for event in line.events:
        if event.origin is not None:
            origin = line.events[event.origin]
            assert (origin.rank, origin.axis) == (event.rank, event.axis)
            assert origin.start is not None
            assert event.start is not None
            assert origin.start <= event.start
    return len(line.events), sum(event.origin is not None for event in line.events)


def test_random_programs_are_unchanged_on_a_slow_link_and_recorded(threads: Ranks) -> None:
    seen = [hold_to_the_plain_run(index, threads) for index in range(12)]
    assert sum(calls for calls, _ in seen) > 100
    assert sum(links for _, links in seen) > 20


@pytest.mark.slow
def test_many_random_programs_are_unchanged_on_a_slow_link_and_recorded(threads: Ranks) -> None:
    for index in range(12, 300):
        hold_to_the_plain_run(index, threads)


def test_a_result_that_watching_changes_is_found(threads: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    through = RecordingTransport.through

    def spoilt(self: RecordingTransport, transfer: Transfer, move: Callable[[], Any]) -> Any:
        result = through(self, transfer, move)
        if isinstance(result, Tensor) and result.is_floating_point():
            result.add_(1)
        return result

    monkeypatch.setattr(RecordingTransport, "through", spoilt)

    def some() -> None:
        for index in range(4):
            hold_to_the_plain_run(index, threads)

    with pytest.raises(AssertionError):
        some()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "send and recv"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_bytes_of_a_timeline_are_those_of_the_simulator(name: str, size: int) -> None:
    def on_each_rank() -> Timeline:
        with timeline() as line:
            CALLS[name][0](drawn(6 * size))
        return line

    run = simulate(on_each_rank, size)
    seen = Timeline.joined(run.results).events
    for rank in range(size):
        # A fold is one motion of the transport, and several calls on the wire.
        mine, theirs = (sum(e.sent for e in events.select(rank=rank)) for events in (seen, run.events))
        assert mine == theirs
    assert sum(e.sent for e in seen) > 0

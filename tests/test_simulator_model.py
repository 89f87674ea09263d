"""What a collective costs: the formulas against programs of messages, and a model that is lived."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import CostModel, Link, simulate

LINK = Link(latency_us=30, gbytes_per_s=2)
ITEM = 8


def swap(give: Tensor, to: int, source: int) -> Tensor:
    got = torch.empty_like(give)
    sent = dist.isend(give.contiguous(), to)
    dist.recv(got, source)
    if sent is not None:
        sent.wait()
    return got


def ring_all_gather(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = {rank: x}
    for step in range(size - 1):
        parts[(rank - step - 1) % size] = swap(
            parts[(rank - step) % size], (rank + 1) % size, (rank - 1) % size
        )
    return torch.stack([parts[source] for source in range(size)])


def ring_reduce_scatter(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(x.clone().chunk(size))
    for step in range(size - 1):
        got = swap(parts[(rank - step - 1) % size], (rank + 1) % size, (rank - 1) % size)
        parts[(rank - step - 2) % size] += got
    return parts[rank]


def ring_all_reduce(x: Tensor) -> Tensor:
    return ring_all_gather(ring_reduce_scatter(x)).reshape(x.shape)


def pairwise_all_to_all(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(x.chunk(size))
    got = {rank: parts[rank]}
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        got[source] = swap(parts[to], to, source)
    return torch.cat([got[source] for source in range(size)])


def doubling_all_reduce(x: Tensor) -> Tensor:
    rank, step = dist.get_rank(), 1
    while step < dist.get_world_size():
        x = x + swap(x, rank ^ step, rank ^ step)
        step *= 2
    return x


def doubling_all_gather(x: Tensor) -> Tensor:
    rank, step, have = dist.get_rank(), 1, x[None]
    while step < dist.get_world_size():
        got = swap(have, rank ^ step, rank ^ step)
        have = torch.cat([have, got] if rank & step == 0 else [got, have])
        step *= 2
    return have


def all_gather(x: Tensor) -> Tensor:
    return gm.all_gather(x[None])


def reduce_scatter(x: Tensor) -> Tensor:
    return gm.reduce_scatter(x)


def all_reduce(x: Tensor) -> Tensor:
    return gm.all_reduce(x, dst=gm.R)


def all_to_all(x: Tensor) -> Tensor:
    return gm.all_to_all(x)


def timed(
    call: Callable[[Tensor], Tensor], size: int, model: CostModel
) -> tuple[list[Tensor], float, list[int]]:
    def on_rank() -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return call(torch.randn(size * 1000, dtype=torch.float64, generator=generator))

    run = simulate(on_rank, size, seed=1, model=model, compute=0)
    sent = [sum(event.sent for event in run.events.select(rank=rank)) for rank in range(size)]
    return run.results, run.seconds, sent


@pytest.mark.parametrize(
    ("verb", "messages", "algorithm", "sizes", "as_much"),
    [
        (all_gather, ring_all_gather, "ring", (2, 3, 5), True),
        (reduce_scatter, ring_reduce_scatter, "ring", (2, 3, 5), True),
        (all_reduce, ring_all_reduce, "ring", (2, 3, 5), True),
        (all_to_all, pairwise_all_to_all, "ring", (2, 3, 5), True),
        (all_gather, doubling_all_gather, "tree", (2, 4, 8), True),
        (all_reduce, doubling_all_reduce, "tree", (2,), False),
    ],
)
def test_a_formula_takes_the_time_and_bytes_of_its_algorithm_in_messages(
    verb: Any, messages: Any, algorithm: Any, sizes: tuple[int, ...], as_much: bool
) -> None:
    model = CostModel(LINK, algorithm)
    for size in sizes:
        values, seconds, sent = timed(verb, size, model)
        theirs, their_seconds, their_sent = timed(messages, size, model)
        for value, other in zip(values, theirs, strict=True):
            torch.testing.assert_close(value, other)
        assert seconds == pytest.approx(their_seconds, rel=1e-9)
        if as_much:
            assert sent == their_sent


def test_the_formulas_are_those_of_the_paper() -> None:
    latency, byte = 30e-6, 1 / 2e9
    ring, tree, direct, fastest = (CostModel(LINK, a) for a in ("ring", "tree", "direct", "fastest"))
    n, size = 1e6, 16
    assert ring.seconds("all_reduce", "x", size, n) == pytest.approx(30 * latency + 2 * 15 / 16 * n * byte)
    assert tree.seconds("all_reduce", "x", size, n) == pytest.approx(8 * latency + 2 * 15 / 16 * n * byte)
    assert tree.seconds("all_reduce", "x", size, 8) == pytest.approx(4 * (latency + 8 * byte))
    assert ring.seconds("reduce_scatter", "x", size, n) == pytest.approx(15 * latency + 15 / 16 * n * byte)
    assert tree.seconds("broadcast", "x", size, 8) == pytest.approx(4 * (latency + 8 * byte))
    assert tree.seconds("all_to_all", "x", size, n) == pytest.approx(4 * latency + 2 * n * byte)
    assert direct.seconds("all_gather", "x", size, n) == pytest.approx(latency + 15 * n * byte)
    assert tree.seconds("barrier", "x", 9, 0) == pytest.approx(4 * latency)
    assert tree.seconds("permute", "x", 9, n) == pytest.approx(latency + n * byte)
    for op in ("all_reduce", "all_gather", "broadcast", "all_to_all", "gather"):
        both = [model.seconds(op, "x", size, n) for model in (ring, tree)]
        assert fastest.seconds(op, "x", size, n) == min(both)


def test_a_group_along_several_axes_has_the_slowest_link_of_them() -> None:
    model = CostModel({"outer": Link(20, 10), "inner": Link(3, 5)})
    assert model.link("outer+inner") == Link(20, 5)
    assert model.link("inner") == Link(3, 5)
    with pytest.raises(gm.ArgumentError, match="no link for an axis"):
        model.link("world")
    with pytest.raises(gm.ArgumentError, match="unknown algorithm"):
        CostModel(LINK, "snail")  # type: ignore[arg-type]
    for latency, bandwidth in ((-1, 1), (1, 0), (math.nan, 1)):
        with pytest.raises(gm.ArgumentError, match="invalid link"):
            Link(latency, bandwidth)


def test_a_link_is_fitted_to_two_times_and_gives_them_back() -> None:
    model = CostModel(LINK, "direct")
    points = [(n, model.seconds("all_reduce", "x", 4, n)) for n in (1e3, 1e7)]
    fitted = model.fitted("x", "all_reduce", 4, points)
    assert fitted.latency_us == pytest.approx(LINK.latency_us)
    assert fitted.gbytes_per_s == pytest.approx(LINK.gbytes_per_s)
    with pytest.raises(gm.ArgumentError, match="cannot fit a link"):
        model.fitted("x", "all_reduce", 4, [points[1], (1e8, 0.0)])


# -- lived

SLOW = CostModel(Link(latency_us=150_000, gbytes_per_s=1000), "direct")
"""One round takes 150 ms."""


def overlapped(works: int, busy: float) -> tuple[float, float, Tensor]:
    started, cpu = time.perf_counter(), time.thread_time()
    x = torch.full((4, 3), 1.0 + dist.get_rank())
    out = torch.empty(8, 3)
    pending = dist.all_gather(list(out.chunk(2)), x, async_op=True)
    assert pending is not None
    time.sleep(busy)
    pending.wait()
    for _ in range(works - 1):
        dist.all_gather(list(out.chunk(2)), x)
    return time.perf_counter() - started, time.thread_time() - cpu, out


@pytest.mark.timed
def test_a_result_comes_after_its_time_and_the_rank_works_meanwhile() -> None:
    run = simulate(overlapped, 2, args=(1, 0.12), model=SLOW)
    for seconds, cpu, out in run.results:
        assert 0.15 <= seconds < 0.25  # one after the other takes 0.27
        assert cpu < 0.05, "it was waited for by asking"
        assert out[4:].eq(2).all()
    run = simulate(overlapped, 2, args=(2, 0.0), model=SLOW)
    assert min(seconds for seconds, _, _ in run.results) >= 0.3


@pytest.mark.timed
def test_clock_of_a_rank_shows_the_same_overlap() -> None:
    hidden = simulate(overlapped, 2, args=(1, 0.1), model=SLOW, seed=0)
    assert 0.15 <= hidden.seconds < 0.24
    longer = simulate(overlapped, 2, args=(1, 0.2), model=SLOW, seed=0)
    assert 0.2 <= longer.seconds < 0.33
    assert longer.events[0].waited == 0
    still = simulate(overlapped, 2, args=(3, 0.0), model=SLOW, seed=0, compute=0)
    assert still.seconds == pytest.approx(3 * 0.15, rel=1e-3)


def two_at_once(first: str, second: str) -> None:
    works = [
        dist.all_reduce(torch.ones(4), group=gm.axis(name).group, async_op=True) for name in (first, second)
    ]
    for work in works:
        if work is not None:
            work.wait()


def test_a_link_carries_one_call_at_a_time_and_two_links_two() -> None:
    model = CostModel({"a": Link(1000, 1), "b": Link(1000, 1)}, "direct")
    mesh = {"a": 2, "b": 2}
    alike = simulate(two_at_once, 4, args=("a", "a"), mesh=mesh, model=model, seed=0, compute=0)
    apart = simulate(two_at_once, 4, args=("a", "b"), mesh=mesh, model=model, seed=0, compute=0)
    assert alike.seconds == pytest.approx(4e-3, rel=1e-3)
    assert apart.seconds == pytest.approx(2e-3, rel=1e-3)


@pytest.mark.timed
def test_a_rank_that_comes_late_delays_the_others_and_not_itself() -> None:
    def on_rank() -> None:
        if gm.rank() == 1:
            time.sleep(0.03)
        gm.all_reduce(torch.ones(3), dst=gm.R)

    run = simulate(on_rank, 3, seed=2, model=CostModel(Link(1000, 1), "direct"))
    waited = {event.rank: event.waited for event in run.events}
    assert 1e-3 < waited[1] < 2.01e-3
    assert min(waited[0], waited[2]) > waited[1] + 0.025


@pytest.mark.timed
def test_a_future_is_handed_out_before_its_result_is_there() -> None:
    def on_rank() -> tuple[float, float, bool]:
        started = time.perf_counter()
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        future = work.get_future()
        handed = time.perf_counter() - started
        future.wait()
        return handed, time.perf_counter() - started, bool(x.eq(2).all())

    for handed, seconds, right in simulate(on_rank, 2, model=SLOW).results:
        assert handed < 0.15
        assert seconds >= 0.3
        assert right


@pytest.mark.timed
def test_a_message_takes_its_time() -> None:
    def on_rank() -> float:
        started = time.perf_counter()
        if gm.rank() == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.empty(3), 0)
        return time.perf_counter() - started

    sender, receiver = simulate(on_rank, 2, model=SLOW).results
    assert sender < 0.1
    assert receiver >= 0.14


def test_the_same_model_gives_the_same_times_in_every_run() -> None:
    def on_rank() -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(gm.rank())).requires_grad_()
        gm.all_gather(gm.all_reduce(x, dst=gm.R)).square().sum().backward()

    runs = [simulate(on_rank, 4, seed=seed, model=CostModel(LINK), compute=0) for seed in (0, 0, 1)]
    rows = [run.events.rows() for run in runs]
    assert rows[0] == rows[1]
    assert runs[2].seconds == runs[0].seconds

"""The simulator: reproducible orders, every collective recorded, deadlocks reported, one rank standing for many."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.verify import CostModel, Link, Simulation, simulate

MESH = {"outer": 2, "inner": 2}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def step(rows: int = 4) -> Tensor:
    """Several verbs on two axes, and another loss on each rank."""
    x = drawn(rows, 3).requires_grad_()
    y = gm.all_reduce(x, "inner", dst=gm.R)
    z = gm.all_gather(y.sin(), "outer", 1)
    z = gm.all_to_all(z, "inner", split_dim=0, concat_dim=1)
    z = gm.shift(z, "outer")
    (z.square().sum() * (1 + dist.get_rank())).backward()
    assert x.grad is not None
    return x.grad


# -- an order that comes back


def test_one_seed_gives_one_order_and_another_seed_another_one() -> None:
    runs = [simulate(step, 4, mesh=MESH, seed=seed) for seed in (3, 3, 4)]
    first, again, other = ([event.what for event in run.events] for run in runs)
    assert first == again
    assert first != other
    plain = simulate(step, 4, mesh=MESH)
    for run in runs:
        assert all(map(torch.equal, run.results, plain.results))


def lose_an_update(shared: list[int]) -> None:
    for _ in range(4):
        seen = shared[0]
        gm.barrier()
        shared[0] = seen + 1 + dist.get_rank()
        dist.all_reduce(torch.ones(1))


def test_an_error_that_depends_on_the_order_comes_back_with_its_seed() -> None:
    def left(seed: int) -> int:
        shared = [0]
        simulate(lose_an_update, 3, args=(shared,), seed=seed)
        return shared[0]

    found = [left(seed) for seed in range(6)]
    assert found == [left(seed) for seed in range(6)]
    assert len(set(found)) > 1, found


def test_without_a_call_in_between_no_rank_is_interrupted() -> None:
    def on_rank(shared: list[int]) -> None:
        for _ in range(200):
            shared.append(dist.get_rank())
            time.sleep(0)

    shared: list[int] = []
    simulate(on_rank, 3, args=(shared,), seed=0)
    turns = [shared[200 * number] for number in range(3)]
    assert shared == [rank for rank in turns for _ in range(200)]


def polls(model: CostModel | None, seed: int | None) -> float:
    def on_rank() -> None:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        while not work.is_completed():
            pass

    return simulate(on_rank, 3, seed=seed, model=model, compute=None if seed is None else 0).seconds


@pytest.mark.parametrize("seed", [None, 5])
def test_a_loop_that_asks_whether_a_call_is_over_ends(seed: int | None) -> None:
    polls(None, seed)
    assert polls(CostModel(Link(1000, 1)), seed) >= 2e-3


def test_non_rank_thread_is_not_scheduled() -> None:
    def on_rank() -> list[str]:
        errors: list[str] = []
        group = dist.group.WORLD

        def call() -> None:
            try:
                group.barrier().wait()  # type: ignore[union-attr]
            except gm.ArgumentError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return errors

    for errors in simulate(on_rank, 2, seed=0).results:
        assert len(errors) == 1
        assert "a rank may communicate only from its main thread" in errors[0]


def test_a_failure_ends_every_rank_and_keeps_the_events_until_then() -> None:
    def on_rank() -> None:
        gm.all_gather(torch.ones(2))
        if dist.get_rank() == 1:
            raise ValueError("of rank 1")
        gm.all_reduce(torch.ones(2), dst=gm.R)

    for seed in (None, 0, 1):
        run = simulate(on_rank, 3, seed=seed, check=False)
        assert run.error is not None
        assert run.error.rank == 1
        assert isinstance(run.error.__cause__, ValueError)
        assert len(run.events.select(op="all_gather")) == 3
        assert run.results == []
        with pytest.raises(gm.RankError, match="of rank 1"):
            simulate(on_rank, 3, seed=seed)


def test_ranks_that_wait_by_a_lock_of_pythons_are_ended_by_the_timeout() -> None:
    def on_rank(lock: threading.Lock) -> None:
        with lock:
            gm.barrier()

    run = simulate(on_rank, 2, args=(threading.Lock(),), seed=0, timeout=0.5, check=False)
    assert "did not return within 0.5 s" in str(run.error)
    assert "with lock:" in str(run.error)


# -- deadlocks


@pytest.mark.timed
def test_deadlock_is_detected_at_once_with_every_ranks_pending_call_and_line() -> None:
    def on_rank() -> None:
        if dist.get_rank() == 0:
            gm.all_gather(torch.ones(2), gm.axis())
        elif dist.get_rank() == 1:
            dist.recv(torch.empty(3), 0, tag=9)
        else:
            dist.recv(torch.empty(3), 1)

    started = time.perf_counter()
    run = simulate(on_rank, 3, seed=0, check=False)
    assert time.perf_counter() - started < 1
    assert run.error is not None
    assert isinstance(run.error.__cause__, gm.DeadlockError)
    lines = [line for line in str(run.error.__cause__).splitlines() if "waits in" in line]
    for rank, call in enumerate(("all_gather_single", "recv(from place 0, tag 9)", "recv(from place 1")):
        assert f"rank {rank}  waits in {call}" in lines[rank]
        assert f"{Path(__file__).name}:" in lines[rank]
    assert all(event.end is None for event in run.events)


def test_ranks_with_the_same_pending_call_share_a_line_in_a_large_world() -> None:
    def on_rank() -> None:
        if dist.get_rank() != 39:
            gm.barrier()

    run = simulate(on_rank, 40, seed=1, check=False)
    text = str(run.error)
    assert "ranks 0 to 38  each waits in barrier" in text
    assert "rank 39  has returned" in text
    assert "rank 39 has returned, and the others wait for it" in text


# -- what is seen


def recorded(run: Simulation[Any], rank: int) -> list[tuple[object, ...]]:
    return [(e.verb or e.op, e.axis, e.phase, e.payload, e.sent) for e in run.events.select(rank=rank)]


def test_every_call_is_an_event_with_its_axis_bytes_pass_and_line() -> None:
    run = simulate(step, 4, mesh=MESH, seed=0)
    size = 4 * 3 * 8
    assert recorded(run, 3) == [
        ("all_reduce", "inner", "forward", size, size),
        ("all_gather", "outer", "forward", size, size),
        ("all_to_all", "inner", "forward", 2 * size, size),
        ("shift", "outer", "forward", 2 * size, 2 * size),
        ("shift", "outer", "backward", 2 * size, 2 * size),
        ("all_to_all", "inner", "backward", 2 * size, size),
        ("reduce_scatter", "outer", "backward", 2 * size, size),
        ("all_reduce", "inner", "backward", size, size),
    ]
    for event in run.events:
        assert f"{Path(__file__).name}:" in event.line
        assert (event.origin is not None) == (event.phase == "backward")
        if event.origin is not None:
            forward = run.events[event.origin]
            assert event.of == forward.line
            assert (forward.rank, forward.axis) == (event.rank, event.axis)
            assert forward.phase == "forward"
    assert len(str(run.events).splitlines()) == 1 + len(run.events)
    assert run.events.rows()[5]["axis"] == run.events[5].axis
    assert sum(row["calls"] for row in run.events.totals()) == len(run.events)


def tangent() -> None:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(drawn(3), drawn(3, seed=1))
        gm.all_gather(x)


def test_a_tangent_is_one_and_leads_to_its_call() -> None:
    events = simulate(tangent, 2, seed=0).events.select(rank=1)
    assert sorted(event.phase for event in events) == ["forward", "tangent"]


SIZES = (3, 0, 2)
ROWS = 8 * 5
"""Bytes of a row of five numbers."""


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        (lambda: gm.all_gather(drawn(SIZES[gm.rank()], 5), sizes=SIZES), (6, 0, 4)),
        (lambda: gm.reduce_scatter(drawn(5, 5), sizes=SIZES), (2, 5, 3)),
        (lambda: gm.all_to_all(drawn(6, 5)), (4, 4, 4)),
        (lambda: gm.all_reduce(drawn(6, 5), dst=gm.R), (8, 8, 8)),
        (lambda: gm.all_reduce(drawn(4, 5), dst=gm.R), (16 / 3, 16 / 3, 16 / 3)),
        (lambda: gm.broadcast(drawn(2, 5), root=1), (0, 4, 0)),
        (lambda: dist.broadcast(drawn(2, 5), 1), (0, 4, 0)),
        (lambda: gm.reduce(drawn(2, 5), root=2), (2, 2, 0)),
        (lambda: dist.reduce(drawn(2, 5), 2), (2, 2, 0)),
        (lambda: gm.gather(drawn(2, 5), root=1), (2, 0, 2)),
        (lambda: dist.scatter(drawn(2, 5), list(drawn(3, 2, 5)) if gm.rank() == 2 else None, 2), (0, 0, 4)),
        (lambda: gm.permute(drawn(2, 5), pairs=((0, 2), (1, 1))), (2, 0, 0)),
        (lambda: dist.all_reduce(drawn(6, 5)), (8, 8, 8)),
        (lambda: dist.all_gather([drawn(2, 5) for _ in range(3)], drawn(2, 5)), (4, 4, 4)),
        (lambda: dist.reduce_scatter(drawn(2, 5), [drawn(2, 5) for _ in range(3)]), (4, 4, 4)),
        (lambda: dist.barrier(), (0, 0, 0)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_bytes_are_those_that_belong_to_other_ranks(
    call: Callable[[], object], sent: tuple[float, ...]
) -> None:
    events = simulate(call, 3, seed=0).events
    found = [sum(event.sent for event in events.select(rank=rank)) / ROWS for rank in range(3)]
    assert sum(found) == pytest.approx(sum(sent))
    if all(float(rows).is_integer() for rows in sent):
        assert found == list(sent)
    else:  # cut into parts that differ by a number
        assert found == pytest.approx(list(sent), abs=0.2)


def train(wrap: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    with torch.random.fork_rng():
        model = wrap(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double())
    model(drawn(3, 4)).square().sum().backward()


def test_collectives_of_torch_wrappers_are_seen() -> None:
    events = simulate(partial(train, DistributedDataParallel), 2, seed=0).events
    sums = events.select(rank=0, op="all_reduce", phase="backward")
    assert sum(event.payload for event in sums) == 8 * (24 + 6 + 12 + 2)
    events = simulate(partial(train, fully_shard), 2, seed=0).events
    assert events.select(rank=1, op="all_gather", phase="forward")
    assert events.select(rank=1, op="reduce_scatter", phase="backward")
    assert {event.axis for event in events} == {"world"}


def test_the_trace_has_a_slice_for_each_call_and_an_arrow_to_each_gradient(tmp_path: Path) -> None:
    run = simulate(step, 4, mesh=MESH, seed=0, model=CostModel(Link(10, 1)))
    run.save_trace(tmp_path / "trace.json")
    assert str(run).startswith(f"simulation of {run.world_size} ranks, ")
    assert str(run).endswith(str(run.events))
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [e for e in entries if e["ph"] == "X" and not e["name"].startswith("waits")]
    assert len(slices) == len(run.events)
    arrows = {kind: {e["id"]: e for e in entries if e["ph"] == kind} for kind in "sf"}
    backward = run.events.select(phase="backward")
    assert set(arrows["s"]) == set(arrows["f"]) == {event.number for event in backward}
    for number, end in arrows["f"].items():
        start = arrows["s"][number]
        assert start["pid"] == end["pid"] == run.events[number].rank
        assert start["ts"] < end["ts"] == pytest.approx(1e6 * (run.events[number].start or 0))
    rows: dict[tuple[int, int], float] = {}
    for entry in sorted((e for e in entries if e["ph"] == "X"), key=lambda e: e["ts"]):
        row = entry["pid"], entry["tid"]
        assert entry["ts"] >= rows.get(row, 0) - 1e-6, "slices of one row overlap"
        rows[row] = entry["ts"] + entry["dur"]
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    assert set(rows) <= named


# -- many ranks, and one that stands for many


def contrastive(rank: int, size: int, weight: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """The term of the rank's two rows in a loss over the rows of all ranks."""
    rows = [
        torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(r))
        for r in (range(size) if rank < 0 else [rank])
    ]
    features = F.normalize(torch.cat(rows) @ weight, dim=1)
    logits = features @ gather(features).T / 0.3
    labels = (torch.arange(len(logits)) + 2 * max(rank, 0) + 1) % (2 * size)
    return F.cross_entropy(logits, labels, reduction="sum") / (2 * size)


def start() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def train_once(size: int) -> Tensor:
    weight = start().requires_grad_()
    shared = gm.replicate(weight)
    contrastive(gm.rank(), size, shared, gm.all_gather).backward()
    torch.optim.SGD([weight], lr=0.1).step()
    return weight.detach()


def test_a_step_of_256_ranks_is_that_of_one_process() -> None:
    size = 256
    weight = start().requires_grad_()
    contrastive(-1, size, weight, lambda x: x).backward()
    torch.optim.SGD([weight], lr=0.1).step()
    run = simulate(train_once, size, args=(size,), seed=0)
    assert all(torch.equal(found, run.results[0]) for found in run.results)
    torch.testing.assert_close(run.results[0], weight.detach(), rtol=1e-12, atol=1e-14)
    assert len(run.events) == 3 * size


def test_single_rank_simulation_makes_the_calls_of_the_full_run() -> None:
    mesh, model = {"outer": 4, "inner": 2}, CostModel({"outer": Link(20, 1), "inner": Link(2, 10)})
    whole = simulate(step, 8, mesh=mesh, seed=0, model=model, compute=0)
    alone = simulate(step, 8, mesh=mesh, only=5, model=model, compute=0)

    def timed(run: Simulation[Any]) -> list[tuple[object, ...]]:
        return [
            (e.op, e.verb, e.axis, e.payload, e.sent, e.phase, e.line, e.of, e.start, e.end)
            for e in run.events.select(rank=5)
        ]

    assert timed(alone) == timed(whole)
    assert alone.seconds == whole.seconds
    assert len(alone.results) == 1


def test_a_world_of_1024_is_played_by_one_rank() -> None:
    model = CostModel({"outer": Link(20, 10), "inner": Link(3, 300)})
    run = simulate(step, 1024, args=(8,), mesh={"outer": 128, "inner": 8}, only=0, model=model, compute=0)
    gathered = run.events.select(op="all_gather")[0]
    assert gathered.sent == 127 * gathered.payload
    assert run.events.select(op="reduce_scatter")[0].payload == 128 * gathered.payload
    assert 0 < run.seconds < 1


def test_messages_need_both_ends() -> None:
    with pytest.raises(gm.RankError, match="point-to-point messages are not supported"):
        simulate(lambda: dist.send(torch.ones(1), 1), 4, only=0)


def test_a_rank_that_plays_alone_has_to_return_in_time() -> None:
    with pytest.raises(gm.RankError, match=r"did not return within 0.1 s"):
        simulate(time.sleep, 8, args=(0.5,), only=3, timeout=0.1)


def test_the_axes_of_a_mesh_that_the_program_makes_are_named() -> None:
    def on_rank() -> None:
        gm.mesh(dp=2, tp=2)
        gm.all_gather(torch.ones(1), "tp")
        gm.all_gather(torch.ones(1), "dp")
        dist.barrier()

    events = simulate(on_rank, 4, seed=0).events
    assert [event.axis for event in events.select(rank=3)] == ["tp", "dp", "world"]


def test_an_axis_without_a_link_is_an_error_on_every_rank() -> None:
    model = CostModel({"outer": Link(1, 1)})
    run = simulate(step, 4, mesh=MESH, seed=0, model=model, check=False)
    assert "the cost model has no link for an axis" in str(run.error)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mesh": {"tp": 3}}, "the mesh does not match the world size"),
        ({"only": 4}, "only is out of range"),
        ({"only": 0, "seed": 1}, "seed and only exclude each other"),
        ({"compute": -1.0, "seed": 1}, "invalid compute"),
        ({"compute": 0.0}, "requires virtual clocks"),
    ],
)
def test_invalid_arguments_raise(given: dict[str, Any], text: str) -> None:
    with pytest.raises(gm.ArgumentError, match=text):
        simulate(step, 4, **given)

"""While a profiler is on, each collective is one named range, forward and backward; else it costs next to nothing."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gradmesh as gm
from gradmesh import _torch
from gradmesh.transport import run
from gradmesh.verify import Profile, profiles

pytestmark = pytest.mark.filterwarnings("ignore:Profiler clears events at the end of each cycle:UserWarning")
Threads = Callable[[int], Callable[..., list[Any]]]


@contextlib.contextmanager
def ranges() -> Iterator[list[str]]:
    """The names of the library's ranges in a block, in the order in which they began."""
    names: list[str] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield names
    events = sorted(profiled.events() or (), key=lambda event: event.time_range.start)
    names += [event.name for event in events if event.name.startswith("gradmesh::")]


def forward_and_backward() -> tuple[list[str], list[str]]:
    gm.mesh(tp=-1)
    rank, size = gm.axis("tp").rank, gm.axis("tp").size
    x = torch.randn(
        4 * (1 + rank), 8, dtype=torch.float64, requires_grad=True
    )  # 256 bytes, on the next rank 512
    with ranges() as forward:
        y = gm.all_gather(x, "tp", sizes=[4 * (1 + r) for r in range(size)])
        z = gm.all_reduce(y, "tp", op="mean", dst=gm.I)
        narrow = gm.replicate(z.float(), "tp", backward_dtype=torch.bfloat16)
        loss = (1 + rank) * (narrow**2).sum()
    with ranges() as backward:
        loss.backward()
    return forward, backward


def test_each_collective_is_one_range_with_its_verb_axis_and_bytes() -> None:
    """On the rank that profiles; a profiler of torch sees the thread that started it, so the world is of one rank."""
    gm.init()
    try:
        forward, backward = forward_and_backward()
    finally:
        torch.distributed.destroy_process_group()
    assert forward == [
        "gradmesh::all_gather axis=tp bytes=256",
        "gradmesh::all_reduce axis=tp bytes=256",
        "gradmesh::replicate axis=tp bytes=128",
    ]
    assert backward == [
        "gradmesh::all_reduce axis=tp bytes=64 backward",  # 32 numbers of bfloat16
        "gradmesh::replicate axis=tp bytes=256 backward",
        "gradmesh::reduce_scatter axis=tp bytes=256 backward",
    ]


def in_other_modes() -> dict[str, list[str]]:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

    def cube(x: Tensor) -> Tensor:
        return (gm.all_gather(x) ** 3).sum()

    def save_powers(_: object, op: object, *__: Any, **___: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.pow.Tensor_Scalar
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def ordered() -> None:
        with gm.ordered():
            gm.backward(cube(x))

    selective = functools.partial(create_selective_checkpoint_contexts, save_powers)
    work: dict[str, Callable[[], object]] = {
        "vmap": lambda: torch.vmap(gm.all_gather)(x),
        "jvp": lambda: torch.func.jvp(cube, (x,), (x,)),
        "func.grad": lambda: torch.func.grad(cube)(x),
        "double backward": lambda: torch.autograd.grad(cube(x), x, create_graph=True)[0].sum().backward(),
        "max": lambda: gm.all_reduce(x, op="max", dst=gm.R),
        "ordered": ordered,
        "checkpoint": lambda: checkpoint(cube, x, use_reentrant=False).backward(),
        "selective": lambda: checkpoint(cube, x, use_reentrant=False, context_fn=selective).backward(),
    }
    found = {}
    for name, call in work.items():
        with ranges() as found[name]:
            call()
    # A profiler that is on for only one of the two passes.
    y = checkpoint(cube, x, use_reentrant=False, context_fn=selective)
    with ranges() as found["recomputed"]:
        y.backward()
    return found


def test_ranges_in_every_autodiff_mode_and_checkpoint() -> None:
    gm.init()
    try:
        found = in_other_modes()
    finally:
        torch.distributed.destroy_process_group()
    verbs = {name: " ".join(verb(range_) for range_ in names) for name, names in found.items()}
    assert verbs == {
        "vmap": "all_gather",
        "jvp": "all_gather all_gather",
        "func.grad": "all_gather reduce_scatter<",
        "double backward": "all_gather reduce_scatter< all_gather< reduce_scatter<",
        "max": verbs["max"],
        "ordered": "all_gather convert convert< reduce_scatter<",  # join relabels the loss
        "checkpoint": "all_gather all_gather< reduce_scatter<",
        "selective": "all_gather all_gather< reduce_scatter<",
        "recomputed": "all_gather< reduce_scatter<",
    }
    assert verbs["max"].split()[0] == "all_reduce"


def verb(name: str) -> str:
    """The verb of a range, with a mark if it is of a backward pass."""
    return name.split()[0].removeprefix("gradmesh::") + "<" * name.endswith(" backward")


# torch's own compiler does what torch warns of.
@pytest.mark.torch_at_least("2.10", "a compiled program has the ranges of an eager one")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_program_and_a_fake_tensor_have_no_ranges() -> None:
    gm.init()
    try:
        compiled = torch.compile(lambda x: gm.all_gather(x.sin()).sum(), fullgraph=True, backend="aot_eager")
        x = torch.ones(3, requires_grad=True)
        with ranges() as names:
            compiled(x).backward()
            gm.all_gather(torch.ones(3, device="meta"))
    finally:
        torch.distributed.destroy_process_group()
    assert x.grad is not None
    assert names == []


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a flag is all that an unprofiled collective pays for it."""

    def unexpected(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(run, "profiled", unexpected)
    gm.init()
    try:
        x = torch.ones(3, requires_grad=True)
        gm.all_gather(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert min(timeit.repeat(_torch.profiler_on, number=1000, repeat=5)) < 1e-3  # a microsecond each, at most


@pytest.mark.processes
def test_every_process_profiles_itself(processes: Threads) -> None:
    for rank, (forward, backward) in enumerate(processes(2)(forward_and_backward)):
        mine, whole = 256 * (1 + rank), 256 * 3
        assert forward[0] == f"gradmesh::all_gather axis=tp bytes={mine}"
        assert backward[-1] == f"gradmesh::reduce_scatter axis=tp bytes={whole} backward"


def step(rank: int) -> None:
    x = torch.full((4, 8), 1.0 + rank, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    coming = gm.all_gather(x, async_op=True)
    worked = (weight @ weight).sum()
    loss = (1 + rank) * (gm.all_reduce(coming.wait() * worked, dst=gm.R, comm_dtype=torch.float32) ** 2).sum()
    loss.backward()
    gm.scan(x.detach())


def whole_step() -> Profile:
    with gm.verify.profiled() as profile:
        step(gm.rank())
    return profile


TABLE = {
    ("all_gather", "forward"): (lambda _: 256, True),
    ("all_reduce", "forward"): (lambda ranks: 128 * ranks, False),  # of float32
    ("all_reduce", "backward"): (lambda ranks: 256 * ranks, False),
    ("reduce_scatter", "backward"): (lambda ranks: 256 * ranks, True),
    ("scan", "forward"): (lambda _: 256, False),
}
"""Bytes that one of so many ranks hands in, and whether the call is async, so that another thread makes it."""


def check_profiles(parts: list[Profile], ranks: int) -> None:
    whole = Profile.joined(parts)
    assert {(row.verb, row.direction): (row.calls, row.bytes) for row in whole.rows} == {
        key: (ranks, ranks * count(ranks)) for key, (count, _) in TABLE.items()
    }
    assert {row.axis for row in whole.rows} == {"world"}
    spans = [entry for entry in whole.entries if entry["ph"] == "X"]
    assert {entry["pid"] for entry in spans} == set(range(ranks))
    for rank in range(ranks):
        mine = [entry for entry in spans if entry["pid"] == rank]
        assert any("mm" in entry["name"] for entry in mine), "torch's own operators are there too"
        made_on = {
            entry["name"].split()[0].removeprefix("gradmesh::"): entry["tid"]
            for entry in mine
            if entry["name"].startswith("gradmesh::")
        }
        beside = {verb for verb, thread in made_on.items() if thread != made_on["scan"]}
        assert beside == {verb for (verb, _), (_, started) in TABLE.items() if started}
    names = {e["pid"]: e["args"]["name"] for e in whole.entries if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(ranks)}
    for verb in ("all_reduce", "scan"):
        # No rank has the result before every rank has come, so that on one clock the calls overlap.
        calls = [
            e for e in spans if e["name"].startswith(f"gradmesh::{verb} ") and "backward" not in e["name"]
        ]
        assert max(e["ts"] for e in calls) < min(e["ts"] + e["dur"] for e in calls)


def test_the_profiles_of_ranks_on_threads_are_one_on_one_clock(threads: Threads) -> None:
    check_profiles(threads(3)(whole_step), 3)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_profiles_of_processes_are_one_on_one_clock(backend: str) -> None:
    check_profiles(gm.launch(whole_step, 2, backend=backend), 2)  # processes without threads of other tests


def in_another_time_zone() -> Profile:
    """As if rank 1 were another machine, whose clock is an hour ahead."""
    hour = 3600 * 10**9
    if gm.rank() == 1:
        profiles.now, profiles.machine = lambda: time.time_ns() + hour, lambda: "another"
    try:
        ahead = profiles.offset()
    finally:
        profiles.now, profiles.machine = NOW, MACHINE
    with gm.verify.profiled() as profile:
        step(gm.rank())
    # What a clock that is ahead would have made of it.
    profile.started += (hour if gm.rank() == 1 else 0) - ahead
    return profile


NOW, MACHINE = profiles.now, profiles.machine


@pytest.mark.processes
def test_clocks_of_several_machines_are_aligned(processes: Threads) -> None:
    first, second = processes(2)(in_another_time_zone)
    started = first.started, second.started
    assert abs(started[0] - started[1]) < 10**9
    whole = Profile.joined([first, second])
    assert {row.calls for row in whole.rows} == {2}
    assert max(entry.get("ts", 0) for entry in whole.entries) < 60e6


def one_fails() -> tuple[str, Profile]:
    said = ""
    profile = Profile()
    try:
        with gm.verify.profiled() as profile:
            gm.scan(torch.ones(2))
            if gm.rank() == 1:
                raise KeyError
    except KeyError:
        said = "failed"
    return said, profile


def test_a_rank_that_fails_in_the_block_leaves_the_others_their_profile(threads: Threads) -> None:
    for _ in range(2):  # the next block is as good
        found = threads(2)(one_fails)
        assert [said for said, _ in found] == ["", "failed"]
        assert [row.calls for row in Profile.joined(profile for _, profile in found).rows] == [2]


def test_incomplete_traces_are_not_joined() -> None:
    with pytest.raises(gm.ArgumentError, match="no complete records"):
        Profile.joined([])
    with pytest.raises(gm.ArgumentError, match="1 of them with an open block"):
        Profile.joined([Profile()])


def test_the_trace_is_a_file_that_says_which_rank_is_which(threads: Threads, tmp_path: Path) -> None:
    whole = Profile.joined(threads(2)(whole_step))
    whole.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    arrows = [entry["id"] for entry in trace["traceEvents"] if entry["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 0, "no arrow of one rank is one of another"
    assert str(whole).splitlines()[0].split() == [
        "verb",
        "axis",
        "direction",
        "calls",
        "bytes",
        "ms",
        "us",
        "a",
        "call",
        "longest",
        "us",
    ]
    assert len(str(whole).splitlines()) == 1 + len(TABLE)


def draw(seed: int) -> list[tuple[str, int]]:
    chosen = random.Random(seed)
    return [
        (chosen.choice(["all_gather", "scan", "shift", "all_to_all"]), 2 * chosen.randint(1, 9))
        for _ in range(12)
    ]


def random_calls(seed: int) -> Profile:
    rank = gm.rank()
    with gm.verify.profiled() as profile, gm.ordered():
        loss = torch.zeros(())
        for number, (verb, count) in enumerate(draw(seed)):
            y = getattr(gm, verb)(torch.ones(count, requires_grad=True))
            if (number + rank) % 2:  # each rank uses others
                loss = loss + y.sum()
        gm.backward(loss if rank else None)
    return profile


ADJOINT = {"all_gather": "reduce_scatter"}


def test_the_table_counts_every_call_of_random_programs(threads: Threads) -> None:
    for seed in range(5):
        expected: dict[tuple[str, str], list[int]] = {}
        for verb, count in draw(seed):
            for key, factor in (
                ((verb, "forward"), 1),
                ((ADJOINT.get(verb, verb), "backward"), 1 + (verb == "all_gather")),
            ):
                expected.setdefault(key, []).append(4 * count * factor)
        rows = Profile.joined(threads(2)(random_calls, seed)).rows
        found = {(row.verb, row.direction): (row.calls, row.bytes) for row in rows if row.verb != "convert"}
        assert found == {key: (2 * len(counts), 2 * sum(counts)) for key, counts in expected.items()}


def test_a_profiler_that_is_on_is_not_disturbed() -> None:
    gm.init()
    try:
        with ranges() as names:
            with pytest.raises(gm.ArgumentError, match="another profiler is running"), gm.verify.profiled():
                pass
            gm.scan(torch.ones(2))
    finally:
        torch.distributed.destroy_process_group()
    assert len(names) == 1


def imported_in_a_profile() -> tuple[list[str], list[str]]:
    """The modules that verbs import while a profile with stacks is on, and the names in it that are of such modules."""
    attention = gm.nn.ring_attention  # which imports the layers
    with profile(
        activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True, profile_memory=True
    ) as done:
        before = set(sys.modules)
        x = torch.ones(2, 3, requires_grad=True)
        with gm.ordered():
            gm.backward(gm.all_reduce(gm.all_gather(x), dst=gm.R).sum() + gm.shift(x).sum())
        gm.all_gather(x, async_op=True).wait().sum().backward()
        gm.barrier()
        q, k, v = torch.ones(3, 1, 1, 2, 4, requires_grad=True)
        attention(q, k, v).sum().backward()
        new = sorted(set(sys.modules) - before)
        litter = [bytes([128 + n % 100]) * (n % 64) for n in range(20000)]  # where names were that are gone
    return new, [event.name for event in done.events() or () if "(0): " in event.name and litter]


@pytest.mark.processes
def test_a_profile_with_stacks_can_be_read_as_nothing_is_imported_inside_of_it() -> None:
    """A profile points at the names of code, and the code of a module is freed when it has been imported."""
    for new, names in gm.launch(imported_in_a_profile, 2, backend="shm", timeout=120):
        assert not new
        assert not names

"""The shm backend: what is particular to ranks that are processes and share memory.

The values of every collective are in test_own_backends.py. Groups that a test breaks are groups of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import multiprocessing
import os
import random
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

import gradmesh as gm
from gradmesh.backends.shm import engine, shared_memory
from gradmesh.backends.shm.shared_memory import Segment, chunk_bytes, segment_bytes
from gradmesh.errors import ArgumentError, GradmeshError
from tests.store_event import StoreEvent
from tools.kill_ranks import RANDOM, WAITS, Trial, kill_ranks
from tools.soak import soak_ranks

pytestmark = pytest.mark.processes

W = 4
MIB = 1 << 20
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Run(Protocol):
    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]: ...


@pytest.fixture(scope="module")
def ranks() -> Iterator[Run]:
    """`ranks(fn, *args)` runs fn on four ranks."""
    with gm.Ranks(W, backend="shm", timeout=60) as pool:
        yield pool.run


@contextlib.contextmanager
def group(count: int = W, seconds: float = 30.0) -> Iterator[Any]:
    """A new group of the first ranks; every rank makes it, and its members leave it at the end."""
    made = dist.new_group(list(range(count)), backend="shm", timeout=datetime.timedelta(seconds=seconds))
    try:
        yield made
    finally:
        if dist.get_rank() < count:
            dist.destroy_process_group(made)


class Tried(NamedTuple):
    """What became of a call: its result, or its error's class and text; and how long it took."""

    result: Any
    error: str
    text: str
    seconds: float


def attempt(call: Callable[[], Any]) -> Tried:
    begin = time.monotonic()
    try:
        result = call()
    except Exception as error:
        return Tried(None, type(error).__name__, str(error), time.monotonic() - begin)
    return Tried(result, "", "", time.monotonic() - begin)


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def total(group: Any = None) -> float:
    """A sum over the group, to see whether it works."""
    x = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(x, group=group)
    return x.item()


def started(work: Any) -> Any:
    assert work is not None
    return work


def poll(work: Any, seconds: float = 10.0) -> bool:
    """Whether a work is completed in time, without waiting for it."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
    return True


# ---- ranks that end


def check(trials: list[Trial]) -> None:
    for trial in trials:
        survivors = [rank for rank in range(trial.size) if rank != trial.victim]
        assert [notice.rank for notice in trial.notices] == survivors, trial
        for notice in trial.notices:
            assert notice.named == trial.victim, trial
            assert f"rank {trial.victim}" in notice.text
            assert 0 <= notice.seconds < 5, trial
        assert trial.left_behind == [], trial


@pytest.mark.timed
@pytest.mark.parametrize("ending", ["killed", "exits", "leaves"])
def test_waiting_for_an_exited_rank_raises_with_its_name(ending: str) -> None:
    waits = [name for name in WAITS if name != "polled all_reduce"]
    trials = kill_ranks(len(waits), waits=waits, ending=ending, seed=1)
    assert [trial.waits for trial in trials] == waits
    check(trials)


@pytest.mark.timed
def test_polling_a_work_ends_when_a_rank_has_been_killed() -> None:
    check(kill_ranks(1, waits=["polled all_reduce"]))


@pytest.mark.timed
def test_every_survivor_of_three_kills_raises_within_five_seconds() -> None:
    trials = kill_ranks(3, waits=[RANDOM], seed=2)
    assert len(trials) == 3
    check(trials)


@pytest.mark.slow
def test_every_survivor_of_fifty_kills_raises_within_five_seconds() -> None:
    trials = kill_ranks(50, size=4, waits=[RANDOM], seed=3)
    assert len(trials) == 50
    check(trials)


def test_group_without_the_rank_that_left_continues(ranks: Run) -> None:
    def work() -> Any:
        with group(3) as small:
            large = dist.new_group(backend="shm")
            tried = None if dist.get_rank() == 3 else attempt(lambda: dist.barrier(group=large))
            dist.destroy_process_group(large)
            return None if tried is None else (tried.error, total(small))

    assert ranks(work) == [("AbortedError", 6.0)] * 3 + [None]


# ---- time limits


@pytest.mark.timed
def test_the_first_timeout_of_a_group_names_the_late_rank_and_ends_the_others_waiting(ranks: Run) -> None:
    def work() -> Tried:
        with group(seconds=2) as late:
            dist.barrier()
            time.sleep({0: 0.0, 1: 1.4, 2: 1.4, 3: 3.2}[dist.get_rank()])
            return attempt(lambda: [total(late), total(late)])

    first, *others, last = ranks(work)
    assert first.error == "DeadlockError"
    assert 1.8 < first.seconds < 3
    assert "rank 3" in first.text
    assert "rank 1" not in first.text
    for other in others:
        assert "rank 0" in other.text or "rank 3" in other.text
        assert other.seconds < 1.4  # 0.6 after it came; its own time would be over after 2
    assert last.error == "AbortedError"
    assert last.seconds < 1


@pytest.mark.timed
def test_wait_takes_a_timeout(ranks: Run) -> None:
    def work() -> Tried | None:
        with group(2) as pair:
            if dist.get_rank() == 0:
                return attempt(
                    lambda: started(dist.barrier(pair, async_op=True)).wait(datetime.timedelta(seconds=0.3))
                )
            if dist.get_rank() == 1:
                time.sleep(1)
        return None

    first = ranks(work)[0]
    assert first.error == "DeadlockError"
    assert 0.2 < first.seconds < 0.9


def test_receive_from_any_source_reports_the_awaited_ranks(ranks: Run) -> None:
    def work() -> Tried | None:
        tried = None
        with group(3) as trio:
            if dist.get_rank() == 0:
                came = started(dist.irecv(torch.empty(1), group=trio))
                tried = attempt(lambda: came.wait(datetime.timedelta(seconds=0.5)))
            dist.barrier()  # until when the others stay in the group
        return tried

    first = ranks(work)[0]
    assert first.error == "DeadlockError"
    expected = next(line for line in first.text.splitlines() if line.strip().startswith("expected"))
    assert "1" in expected
    assert "2" in expected


@pytest.mark.timed
def test_finding_each_other_is_over_after_the_timeout_of_the_group() -> None:
    store = HashStore()
    store.set_timeout(datetime.timedelta(seconds=5))
    tried = attempt(lambda: Segment(store, 0, 2, [0, 1], 0.5, "late"))
    assert tried.error == "DeadlockError"
    assert "rank 1" in tried.text
    assert tried.seconds < 3


# ---- forks


def test_a_forked_child_cannot_call_and_does_not_disturb_its_parent(ranks: Run) -> None:
    def child(under_way: Any, pipe: Any, leave: bool) -> None:
        tries = [
            attempt(lambda: total()),
            attempt(lambda: dist.send(torch.ones(1), 0)),
            attempt(under_way.wait),
        ]
        if leave:
            dist.destroy_process_group()
        gc.collect()
        pipe.send([(tried.error, tried.text) for tried in tries])

    def work() -> Any:
        said = []
        for leave in (False, True):
            x = torch.ones(1 << 18)
            if dist.get_rank() == 0:
                for rank in (1, 2):  # it is not complete when the children try
                    dist.recv(torch.empty(1), rank)
            under_way = started(dist.all_reduce(x, async_op=True))
            if dist.get_rank() in (1, 2):
                context = multiprocessing.get_context("fork")
                ours, theirs = context.Pipe()
                process = context.Process(target=child, args=(under_way, theirs, leave))
                process.start()
                said += ours.recv()
                process.join()
                assert process.exitcode == 0
                dist.send(torch.ones(1), 0)
            under_way.wait()
            assert torch.equal(x, torch.full_like(x, W))
        return said, [total() for _ in range(20)]

    for rank, (said, totals) in enumerate(ranks(work)):
        assert totals == [10.0] * 20
        assert len(said) == (6 if rank in (1, 2) else 0)
        for error, text in said:
            assert error == "NotInitializedError"
            assert "fork" in text


# ---- beginning and ending


def test_second_world_raises_and_the_first_continues(ranks: Run) -> None:
    def work() -> tuple[Tried, float]:
        return attempt(lambda: dist.init_process_group("shm")), total()

    for tried, after in ranks(work):
        assert tried.error == "ValueError"
        assert "twice" in tried.text
        assert after == 10


@pytest.mark.slow
def test_worlds_made_again_and_again_leave_no_descriptor_and_no_mapping(ranks: Run) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            mappings = sum("memfd:gradmesh" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mappings

    def work() -> Any:
        seen = []
        for _ in range(20):
            dist.destroy_process_group()
            dist.init_process_group("shm", timeout=datetime.timedelta(seconds=60))
            assert total() == 10
            seen.append(held())
        return seen

    for seen in ranks(work):
        opened = [descriptors for descriptors, _ in seen]
        assert min(opened[-5:]) == min(
            opened[:5]
        )  # one may be open for a moment, while ranks find each other
        assert seen[-1][1] == 1


def test_a_group_that_is_left_gives_its_memory_back_at_once(ranks: Run) -> None:
    def work() -> list[int]:
        gc.collect()
        gc.disable()
        counts = []
        try:
            for _ in range(3):
                with group() as made:
                    total(made)
                del made
                with open("/proc/self/maps") as maps:
                    counts.append(sum("memfd:gradmesh" in line for line in maps))
        finally:
            gc.enable()
        return counts

    assert ranks(work) == [[1, 1, 1]] * W


def test_async_calls_complete_before_a_rank_leaves(ranks: Run) -> None:
    def work() -> list[float]:
        made = dist.new_group(backend="shm")
        xs = [torch.ones(1 << 18) * i for i in range(3)]
        works = [dist.all_reduce(x, group=made, async_op=True) for x in xs]
        if dist.get_rank() != 2:  # it never waits
            for each in works:
                started(each).wait()
        dist.destroy_process_group(made)
        return [x[-1].item() for x in xs]

    assert ranks(work) == [[0, 4, 8]] * W


# ---- the host, and the memory


def test_ranks_on_two_hosts_are_refused_on_every_rank(ranks: Run) -> None:
    def work() -> tuple[Tried, float]:
        elsewhere = ["elsewhere", "another-boot", "pid:[1]"]
        with contextlib.ExitStack() as stack:
            if dist.get_rank() == 2:
                stack.enter_context(mock.patch.object(shared_memory, "_host", return_value=elsewhere))
            tried = attempt(lambda: dist.new_group(backend="shm"))
        return tried, total()

    for tried, after in ranks(work):
        assert tried.error == "ArgumentError"
        assert "gloo" in tried.text
        assert "rank 2: elsewhere" in tried.text
        assert after == 10


def descriptors() -> list[str]:
    """The shared memory that is still open in this process."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if "gradmesh" in link or link.startswith("/dev/shm")]


def test_the_memory_is_its_owners_and_never_grows(ranks: Run) -> None:
    def work() -> Any:
        kept: list[int] = []
        create = shared_memory.create

        def watched(size: int, token: bytes) -> int:
            fd = create(size, token)
            kept.append(os.dup(fd))
            return fd

        with mock.patch.object(shared_memory, "create", watched), group() as made:
            before = [os.fstat(fd) for fd in kept]
            x = torch.ones(64 * MIB // 4)
            dist.all_reduce(x, group=made)
            after = [os.fstat(fd) for fd in kept]
            chunk = made.segment.chunk
        for fd in kept:
            os.close(fd)
        return [(s.st_mode, s.st_uid, s.st_size) for s in (*before, *after)], x[-1].item(), chunk

    for rank, (seen, value, chunk) in enumerate(ranks(work)):
        assert value == W
        assert len(seen) == (2 if rank == 0 else 0)
        for mode, owner, size in seen:
            assert stat.S_IMODE(mode) == 0o600
            assert owner == os.getuid()
            assert size == segment_bytes(W, chunk)


def test_nothing_lies_in_dev_shm_and_the_descriptor_is_closed(ranks: Run) -> None:
    assert ranks(descriptors) == [[]] * W


def test_the_chunk_is_a_variable_of_the_environment(ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> tuple[int, float]:
        with mock.patch.dict(os.environ, GRADMESH_SHM_CHUNK="8192"), group() as made:
            return made.segment.chunk, total(made)

    assert ranks(work) == [(8192, 10.0)] * W
    for size in (4096, MIB, 64 * MIB):
        monkeypatch.setenv("GRADMESH_SHM_CHUNK", str(size))
        assert chunk_bytes() == size


@pytest.mark.parametrize(
    "text", ["", "0", "2048", "12345", "1048577", "134217728", "-4096", "1e6", "1MiB", " 4096"]
)
def test_a_chunk_that_cannot_be_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMESH_SHM_CHUNK", text)
    with pytest.raises(ArgumentError, match="GRADMESH_SHM_CHUNK"):
        chunk_bytes()


@pytest.mark.timed
def test_a_group_that_one_rank_refuses_is_an_error_on_all_of_them(ranks: Run) -> None:
    def work() -> tuple[Tried, float]:
        with contextlib.ExitStack() as stack:
            if dist.get_rank() == 1:
                stack.enter_context(mock.patch.dict(os.environ, GRADMESH_SHM_CHUNK="12345"))
            tried = attempt(lambda: dist.new_group(backend="shm", timeout=datetime.timedelta(seconds=30)))
        return tried, total()

    for rank, (tried, after) in enumerate(ranks(work)):
        assert tried.error == "ArgumentError" if rank == 1 else tried.error
        assert tried.seconds < 5  # not by the timeout
        assert after == 10


# ---- calls that do not fit together


def _reduce_to(root: int, group: Any) -> None:
    dist.reduce(torch.ones(3), root, group=group)


def _exchange(splits: list[int], group: Any) -> None:
    dist.all_to_all_single(torch.empty(W), torch.ones(sum(splits)), [1] * W, splits, group=group)


def _coalesced(sizes: list[int], group: Any) -> None:
    group.allreduce_coalesced(
        [torch.ones(size) for size in sizes],
        dist.AllreduceCoalescedOptions(),
    ).wait()


def _sum(count: int, group: Any, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> None:
    dist.all_reduce(torch.ones(count, dtype=dtype), op, group=group)


def _gather(count: int, group: Any) -> None:
    outs = [torch.empty(3) for _ in range(W)] if dist.get_rank() == 0 else None
    dist.gather(torch.ones(count), outs, dst=0, group=group)


def _lists(counts: list[int], group: Any) -> None:
    dist.all_gather([torch.empty(count) for count in counts], torch.ones(3), group=group)


Misfit = tuple[Callable[[Any], None], str, Callable[[Any], None], str]
MISFITS: dict[str, Misfit] = {
    "another call": (
        functools.partial(_sum, 3),
        "all_reduce(sum)",
        lambda g: dist.barrier(group=g),
        "barrier",
    ),
    "another call, of large tensors": (
        functools.partial(_sum, 1 << 20),
        "all_reduce(sum)  float32[1048576]",
        lambda g: dist.broadcast(torch.ones(1 << 20), 0, group=g),
        "broadcast(root 0)  float32[1048576]",
    ),
    "another reduction": (
        functools.partial(_sum, 3),
        "all_reduce(sum)",
        lambda g: _sum(3, g, op=dist.ReduceOp.MAX),
        "all_reduce(max)",
    ),
    "another dtype": (
        functools.partial(_sum, 3),
        "float32[3]",
        lambda g: _sum(3, g, torch.int32),
        "int32[3]",
    ),
    "another size": (functools.partial(_sum, 3), "float32[3]", functools.partial(_sum, 4), "float32[4]"),
    "another root": (functools.partial(_reduce_to, 0), "root 0", functools.partial(_reduce_to, 1), "root 1"),
    "splits that do not fit": (
        functools.partial(_exchange, [1] * W),
        "float32[4]",
        functools.partial(_exchange, [2, 0, 1, 1]),
        "float32[4]",
    ),
    "another piece of a gather": (
        functools.partial(_gather, 3),
        "float32[3]",
        functools.partial(_gather, 2),
        "float32[2]",
    ),
    "another list": (
        functools.partial(_lists, [3] * W),
        "4 x float32[3]",
        functools.partial(_lists, [3, 3, 3, 2]),
        "float32[2]",
    ),
    "a longer list": (
        functools.partial(_coalesced, [3]),
        "float32[3]",
        functools.partial(_coalesced, [3, 3]),
        "2 x float32[3]",
    ),
    "a list of other sizes": (
        functools.partial(_coalesced, [3, 4]),
        "float32[3] float32[4]",
        functools.partial(_coalesced, [3, 5]),
        "float32[3] float32[5]",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_calls_that_do_not_fit_together_are_an_error_on_every_rank(name: str, ranks: Run) -> None:
    most, most_say, odd, odd_says = MISFITS[name]

    def work() -> tuple[Tried, Tried]:
        made = dist.new_group(backend="shm", timeout=datetime.timedelta(seconds=30))
        mine = odd if dist.get_rank() == 2 else most
        tried, after = attempt(lambda: mine(made)), attempt(lambda: [total(made) for _ in range(3)])
        dist.destroy_process_group(made)
        return tried, after

    for tried, after in ranks(work):
        assert tried.error == "MismatchError", tried.text
        for rank in range(W):
            line = next(line for line in tried.text.splitlines() if f"rank {rank}: " in line)
            assert (odd_says if rank == 2 else most_say) in line
            assert "test_shm_backend.py" in line
        assert after.result == [10.0] * 3, after.text


def _fake(group: Any) -> None:
    with FakeTensorMode():
        x = torch.ones(3)
    dist.all_reduce(x, group=group)


def _quantized(group: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    dist.broadcast(x, 0, group=group)


REFUSED: dict[str, Callable[[Any], None]] = {
    "bits of floats": lambda g: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND, group=g),
    "a sum of 8-bit floats": lambda g: dist.all_reduce(torch.ones(3).to(torch.float8_e5m2), group=g),
    "another device": lambda g: dist.all_reduce(torch.ones(3, device="meta"), group=g),
    "another layout": lambda g: dist.broadcast(torch.ones(3).to_mkldnn(), 0, group=g),
    "quantized": _quantized,
    "fake": _fake,
    "an expanded result": lambda g: dist.all_reduce(torch.ones(1).expand(3), group=g),
    "expanded results": lambda g: dist.all_gather([torch.ones(1).expand(3)] * W, torch.ones(3), group=g),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_tensor_raises_and_the_group_continues(name: str, ranks: Run) -> None:
    def work() -> tuple[Tried, Tried]:
        with group() as made:
            return attempt(lambda: REFUSED[name](made)), attempt(lambda: total(made))

    for tried, after in ranks(work):
        assert tried.error
        assert after.result == 10, after.text


def test_error_shows_the_launch_line_not_the_wait_line(ranks: Run) -> None:
    def begin(made: Any) -> Any:
        return started(dist.all_reduce(torch.ones(2 + (dist.get_rank() == 1)), group=made, async_op=True))

    def work() -> str:
        with group() as made:
            return attempt(begin(made).wait).text

    for text in ranks(work):
        assert text.count("in begin") == W


# ---- messages


def test_messages_much_larger_than_the_ring_go_both_ways(ranks: Run) -> None:
    count = 16 * MIB // 8

    def work() -> bool | None:
        rank = dist.get_rank()
        if rank > 1:
            return None
        out = torch.empty(count, dtype=torch.float64)
        sent = started(dist.isend(data(rank, count), 1 - rank))
        came = started(dist.irecv(out, 1 - rank))
        (came if rank else sent).wait()
        (sent if rank else came).wait()
        return torch.equal(out, data(1 - rank, count))

    assert ranks(work)[:2] == [True, True]


def test_both_may_wait_for_their_large_message_to_go_before_they_wait_for_the_others(ranks: Run) -> None:
    def work() -> float | None:
        rank = dist.get_rank()
        if rank > 1:
            return None
        out = torch.empty(MIB)
        came, sent = dist.irecv(out, 1 - rank), dist.isend(torch.full((MIB,), rank + 1.0), 1 - rank)
        started(sent).wait()
        started(came).wait()
        return out.sum().item() / MIB

    assert ranks(work)[:2] == [2, 1]


def test_many_messages_may_be_outstanding_and_are_taken_in_order(ranks: Run) -> None:
    def work() -> list[float] | None:
        rank = dist.get_rank()
        if rank == 0:
            works = [dist.isend(torch.full((1000,), float(i)), 1, tag=i % 3) for i in range(600)]
            for each in works:
                started(each).wait()
        if rank == 1:
            outs = [torch.empty(1000) for _ in range(600)]
            works = [dist.irecv(out, 0, tag=i % 3) for i, out in enumerate(outs)]
            for each in reversed(works):
                started(each).wait()
            return [out.unique().item() for out in outs]
        return None

    assert ranks(work)[1] == list(range(600))


def test_large_messages_may_be_asked_for_in_another_order_than_sent(ranks: Run) -> None:
    tags, order = [5, 6, 7, 8], [7, 5, 8, 6]

    def work() -> list[bool] | None:
        rank = dist.get_rank()
        if rank == 0:
            works = [dist.isend(data(tag, MIB), 1, tag=tag) for tag in tags]
            for each in works:
                started(each).wait()
        if rank == 1:
            equal = []
            for tag in order:
                out = torch.empty(MIB, dtype=torch.float64)
                dist.recv(out, 0, tag=tag)
                equal.append(torch.equal(out, data(tag, MIB)))
            return equal
        return None

    assert ranks(work)[1] == [True] * 4


def test_messages_from_any_source_name_their_sender_and_arrive_once(ranks: Run) -> None:
    def work() -> Any:
        rank = dist.get_rank()
        if rank:
            time.sleep(0.02 * (rank % 2))
            for i in range(5):
                dist.send(torch.tensor([float(rank), i]).repeat(40_000), 0)
            return None
        got = []
        for _ in range(15):
            out = torch.empty(80_000)
            source = dist.recv(out)
            assert torch.equal(out, out[:2].repeat(40_000))
            got.append((source, out[0].item(), out[1].item()))
        return got

    got = ranks(work)[0]
    assert sorted(got) == [(rank, rank, i) for rank in (1, 2, 3) for i in range(5)]
    for rank in (1, 2, 3):
        assert [i for source, _, i in got if source == rank] == list(range(5))


def test_messages_may_be_empty(ranks: Run) -> None:
    def work() -> float | None:
        rank = dist.get_rank()
        if rank == 0:
            dist.send(torch.empty(0, 3), 1)
            dist.send(torch.tensor(4.0), 1)
        if rank == 1:
            dist.recv(torch.empty(2, 0), 0)
            x = torch.empty(())
            dist.recv(x, 0)
            return x.item()
        return None

    assert ranks(work)[1] == 4


@pytest.mark.parametrize("large", [False, True])
def test_a_message_that_does_not_fit_is_the_receivers_error_and_the_next_one_comes(
    large: bool, ranks: Run
) -> None:
    count = MIB if large else 3

    def work() -> Any:
        rank = dist.get_rank()
        if rank == 0:
            for _ in range(2):
                dist.send(torch.ones(count), 1)
            dist.send(torch.ones(count) * 5, 1)
        if rank == 1:
            other_dtype = attempt(lambda: dist.recv(torch.empty(count, dtype=torch.int32), 0))
            other_size = attempt(lambda: dist.recv(torch.empty(count + 1), 0))
            x = torch.empty(count)
            dist.recv(x, 0)
            return other_dtype, other_size, x.sum().item()
        return None

    other_dtype, other_size, value = ranks(work)[1]
    for tried, own in (
        (other_dtype, f"int32, {count} elements"),
        (other_size, f"float32, {count + 1} elements"),
    ):
        assert tried.error == "MismatchError"
        assert f"float32, {count} elements" in tried.text
        assert own in tried.text
    assert value == 5 * count


@pytest.mark.parametrize("count", [5, 2 * MIB])
def test_a_rank_may_send_to_itself(count: int, ranks: Run) -> None:
    def work() -> bool:
        rank, out = dist.get_rank(), torch.empty(count, dtype=torch.float64)
        sent, came = dist.isend(data(rank, count), rank), dist.irecv(out, rank)
        started(came).wait()
        started(sent).wait()
        return torch.equal(out, data(rank, count))

    assert ranks(work) == [True] * W


@pytest.mark.parametrize("same", [True, False], ids=["the same group", "another group"])
def test_large_messages_go_on_while_the_ranks_wait_in_a_collective(same: bool, ranks: Run) -> None:
    def work() -> Any:
        rank = dist.get_rank()
        with group(2) as made, group(2) as other:
            if rank > 1:
                return None
            out, x = torch.empty(MIB), torch.ones(1 << 19)
            came = dist.irecv(out, 1 - rank, group=made)
            sent = dist.isend(torch.full((MIB,), rank + 1.0), 1 - rank, group=made)
            if rank:
                started(sent).wait()  # the other rank takes it while it is in the collective
            dist.all_reduce(x, group=made if same else other)
            started(came).wait()
            started(sent).wait()
            return out.sum().item() / MIB, x[0].item()

    assert ranks(work)[:2] == [(2, 2), (1, 2)]


@pytest.mark.parametrize("same", [True, False], ids=["the same group", "another group"])
def test_large_collective_progresses_while_a_rank_waits_for_a_message(same: bool, ranks: Run) -> None:
    def work() -> Any:
        rank = dist.get_rank()
        with group(3) as made, group(3) as other:
            if rank > 2:
                return None
            x, out = torch.ones(1 << 20), torch.zeros(1)
            under_way = started(dist.all_reduce(x, group=made, async_op=True))
            mail = made if same else other
            if rank == 0:
                dist.recv(out, 1, group=mail)
            under_way.wait()
            if rank == 1:
                dist.send(torch.ones(1), 0, group=mail)
            return x[-1].item(), out.item()

    assert ranks(work)[:3] == [(3, 1), (3, 0), (3, 0)]


def test_a_message_that_is_completed_is_in_the_receivers_tensor(ranks: Run) -> None:
    def work() -> Any:
        rank = dist.get_rank()
        if rank == 0:
            dist.send(torch.arange(6.0).view(3, 2), 1)
        if rank == 1:
            out = torch.zeros(2, 3).t()
            assert poll(started(dist.irecv(out, 0)))
            return out.tolist()
        return None

    assert ranks(work)[1] == [[0, 1], [2, 3], [4, 5]]


# ---- async calls


@pytest.mark.parametrize("count", [3, 1 << 20])
def test_a_work_completes_when_the_others_come_without_being_waited_for(count: int, ranks: Run) -> None:
    def work() -> tuple[bool, bool, float]:
        rank, x = dist.get_rank(), torch.ones(count)
        dist.barrier()
        if rank:
            looked.wait()
        under_way = started(dist.all_reduce(x, async_op=True))
        early = under_way.is_completed()
        if rank == 0:
            looked.set()
        return early, poll(under_way), x[-1].item()

    looked = StoreEvent()
    got = ranks(work)
    assert got[0][0] is False
    assert [(done, value) for _, done, value in got] == [(True, W)] * W


@pytest.mark.timed
def test_coalesced_works_complete_without_being_waited_for(ranks: Run) -> None:
    def work() -> tuple[bool, float]:
        with group() as made:
            x = torch.ones(3)
            made._start_coalescing(torch.device("cpu"))
            dist.all_reduce(x, group=made, async_op=True)
            dist.all_reduce(x, group=made, async_op=True)
            return poll(made._end_coalescing(torch.device("cpu")), 2), x[0].item()

    assert ranks(work) == [(True, 16.0)] * W


def test_polling_a_work_progresses_the_other_groups(ranks: Run) -> None:
    def work() -> tuple[bool, float]:
        with group() as first, group() as second:
            x, y = torch.ones(1 << 20), torch.ones(3)
            if dist.get_rank():
                dist.all_reduce(x, group=first)
                dist.all_reduce(y, group=second)
                return True, x[-1].item()
            large = started(dist.all_reduce(x, group=first, async_op=True))
            small = started(dist.all_reduce(y, group=second, async_op=True))
            done = poll(small)
            large.wait()
            return done, x[-1].item()

    assert ranks(work) == [(True, W)] * W


def test_works_of_two_groups_may_be_waited_for_in_any_order(ranks: Run) -> None:
    def work() -> list[float]:
        with group() as first, group() as second:
            values = []
            for turn in range(10):
                order = random.Random(7 * turn + dist.get_rank())
                xs = [torch.full((200_000,), float(i)) for i in range(6)]
                calls = {
                    made: [x for x in xs if int(x[0].item()) % 2 == at]
                    for at, made in enumerate((first, second))
                }
                works = []
                for made in order.sample([first, second], 2):
                    works += [started(dist.all_reduce(x, group=made, async_op=True)) for x in calls[made]]
                order.shuffle(works)
                for each in works:
                    each.wait()
                values.append(sum(x[-1].item() for x in xs))
            return values

    assert ranks(work) == [[60.0] * 10] * W


def test_unwaited_work_completes_before_the_next_call(ranks: Run) -> None:
    def work() -> tuple[float, float, bool]:
        with group() as made:
            x, y = torch.ones(1 << 20), torch.ones(3)
            time.sleep(0.02 * dist.get_rank())
            forgotten = started(dist.all_reduce(x, group=made, async_op=True))
            dist.all_reduce(y, group=made)
            return x[-1].item(), y[-1].item(), forgotten.is_completed()

    assert ranks(work) == [(W, W, True)] * W


def test_a_future_has_the_result_and_calls_back(ranks: Run) -> None:
    def work() -> float:
        x = torch.ones(3)
        future = started(dist.all_reduce(x, async_op=True)).get_future()
        after: Any = future.then(lambda done: done.value()[0] * 10)
        return after.wait()[0].item()

    assert ranks(work) == [40.0] * W


def test_two_threads_of_a_rank_may_each_use_a_group(ranks: Run) -> None:
    def work() -> tuple[list[float], list[float]]:
        with group() as first, group() as second:
            values: tuple[list[float], list[float]] = ([], [])

            def use(made: Any, count: int, out: list[float]) -> None:
                for turn in range(60):
                    x = torch.full((count,), float(turn))
                    dist.all_reduce(x, group=made)
                    out.append(x[-1].item())

            other = threading.Thread(target=use, args=(second, 100_000, values[1]))
            other.start()
            use(first, 3, values[0])
            other.join()
            return values

    expected = [float(W * turn) for turn in range(60)]
    assert ranks(work) == [(expected, expected)] * W


def test_more_ranks_than_cores_get_on() -> None:
    def work() -> tuple[list[float], float]:
        begin, values = time.monotonic(), []
        for turn in range(60):
            x = torch.tensor([float(turn + dist.get_rank())])
            dist.all_reduce(x)
            values.append(x.item())
            dist.barrier()
        return values, time.monotonic() - begin

    for values, seconds in gm.launch(work, 8, backend="shm", timeout=120):
        assert values == [8.0 * turn + 28 for turn in range(60)]
        assert seconds < 30


# ---- values


def test_the_collectives_are_right_with_the_fence_of_other_processors(ranks: Run) -> None:
    def work() -> list[bool]:
        with mock.patch.object(shared_memory, "fence", shared_memory._through_a_lock), group() as made:
            rank, right = dist.get_rank(), []
            for count in (3, 30_000, 600_001):
                xs = [data(r, count, dtype=torch.float32) for r in range(W)]
                x, out = xs[rank].clone(), torch.empty(W * count)
                dist.all_reduce(x, group=made)
                right.append(torch.equal(x, xs[0] + xs[1] + xs[2] + xs[3]))
                all_gather_single(out, xs[rank], group=made)
                right.append(torch.equal(out, torch.cat(xs)))
                back = torch.empty(count)
                sent = started(dist.isend(xs[rank], (rank + 1) % W, group=made))
                dist.recv(back, (rank - 1) % W, group=made)
                sent.wait()
                right.append(torch.equal(back, xs[(rank - 1) % W]))
                turned = torch.empty(W * count)
                dist.all_to_all_single(turned, out, group=made)
                right.append(torch.equal(turned, xs[rank].repeat(W)))
            return right

    assert ranks(work) == [[True] * 12] * W


def sums(count: int, dtype: torch.dtype, size: int) -> list[Tensor]:
    """Sums and means of the first ranks, over the world where it has that size."""
    with contextlib.nullcontext() if dist.get_world_size() == size else group(size) as made:
        if dist.get_rank() >= size:
            return []
        x, mean = data(dist.get_rank(), count, dtype=dtype), data(dist.get_rank(), count, dtype=dtype)
        pieces = [data(size * dist.get_rank() + i, count, dtype=dtype) for i in range(size)]
        scattered = torch.empty(count, dtype=dtype)
        dist.all_reduce(x, group=made)
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=made)
        dist.reduce_scatter(scattered, pieces, group=made)
        return [x, mean, scattered]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_bits_of_the_threads_backend_on_all_ranks(
    dtype: torch.dtype, size: int, ranks: Run
) -> None:
    for count in (17, 100_000, 700_001):
        expected = gm.launch(sums, size, backend="threads", args=(count, dtype, size), timeout=60)
        got = ranks(sums, count, dtype, size)[:size]
        for mine, other in zip(got, expected, strict=True):
            for x, y in zip(mine, other, strict=True):
                assert torch.equal(x, y)
            assert torch.equal(mine[0], got[0][0])
            assert torch.equal(mine[1], got[0][1])


@pytest.mark.slow
def test_the_soak_finds_no_value_that_differs_from_gloos_and_no_growth() -> None:
    for summary in soak_ranks(4, ranks=W, seed=5):
        assert summary.calls > 20
        assert len(summary.kinds) > 5
        assert summary.memory[1] - summary.memory[0] < 24 * MIB
        assert summary.shared < 8 * segment_bytes(W, MIB)
        assert summary.descriptors[1] - summary.descriptors[0] < 10


# ---- tensors of every kind


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(True, True), (True, False), (False, True), (False, False)])
def test_inference_tensors_are_written_in_whatever_mode(
    begin: bool, end: bool, strided: bool, ranks: Run
) -> None:
    def work() -> tuple[Tried, float]:
        rank = dist.get_rank()
        with group() as made:
            dist.barrier()
            time.sleep(0.05 * ((rank + 1) % W))
            with torch.inference_mode():
                base = torch.ones(2, 3, 100_000)
                x, out = (base[0].t(), base[1].t()) if strided else (base[0], base[1])
            with torch.inference_mode(begin):
                works = [
                    dist.all_reduce(x, group=made, async_op=True),
                    dist.irecv(out, (rank - 1) % W, group=made),
                    dist.isend(torch.full((300_000,), rank + 5.0), (rank + 1) % W, group=made),
                ]
            with torch.inference_mode(end):
                tried = attempt(lambda: [started(each).wait() for each in works] and None)
            return tried, x.sum().item(), out.sum().item()

    for rank, (tried, x, out) in enumerate(ranks(work)):
        assert tried.error == "", tried.text
        assert x == W * 300_000
        assert out == ((rank - 1) % W + 5) * 300_000


def test_tensors_that_require_a_gradient_and_views_are_written(ranks: Run) -> None:
    def work() -> list[float]:
        leaf = torch.ones(3, requires_grad=True)
        result = torch.ones(3, requires_grad=True) * 2
        rows = (torch.ones(3, 4, requires_grad=True) * 3).unbind(0)
        parts = torch.ones(6).split(3)
        for x in (leaf, result, rows[1], parts[1]):
            dist.all_reduce(x)
        got = torch.zeros(W, 2, requires_grad=True) * 1
        dist.all_gather(list(got.unbind(0)), torch.full((2,), dist.get_rank() + 1.0, requires_grad=True))
        sums = [x.detach().sum().item() for x in (leaf, result, *rows, *parts, got)]
        assert leaf.is_leaf
        assert result.grad_fn is not None
        return sums

    assert ranks(work) == [[12.0, 24.0, 12.0, 48.0, 12.0, 3.0, 12.0, 20.0]] * W


def test_inputs_may_be_expanded_and_outputs_strided(ranks: Run) -> None:
    def work() -> list[Any]:
        rank = dist.get_rank()
        expanded = torch.tensor([rank + 1.0]).expand(3)
        out = [torch.zeros(6)[::2] for _ in range(W)]
        dist.all_gather(out, expanded)
        turned = torch.zeros(W, 2).t()[0]
        dist.all_to_all_single(turned, torch.tensor([rank + 1.0]).expand(W))
        x = torch.full((2, 3), float(rank)).t()
        dist.broadcast(x, 2)
        return [[each.tolist() for each in out], turned.tolist(), x.tolist()]

    rows = [[rank + 1.0] * 3 for rank in range(W)]
    assert ranks(work) == [[rows, [1.0, 2.0, 3.0, 4.0], [[2.0, 2.0]] * 3]] * W


def test_conjugated_and_negated_views_are_handed_on_by_value(ranks: Run) -> None:
    def work() -> Any:
        rank, made = dist.get_rank(), dist.group.WORLD
        assert made is not None
        z = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        out = torch.empty(2 * W, dtype=z.dtype)
        started(made.all_gather_single(out, z.conj())).wait()
        x = z[:1].conj().imag  # negated, and contiguous
        assert x.is_neg()
        dist.all_reduce(x)
        y = torch.zeros(1)
        sent = started(dist.isend(z[1:].conj().imag, (rank + 1) % W))
        dist.recv(y, (rank - 1) % W)
        sent.wait()
        return out.tolist(), x.item(), y.item()

    gathered = [(1 - 2j) * r for r in (1, 2, 3, 4)], [(3 + 1j) * r for r in (1, 2, 3, 4)]
    for rank, (out, x, y) in enumerate(ranks(work)):
        assert out == [value for pair in zip(*gathered, strict=True) for value in pair]
        assert x == -20
        assert y == (rank - 1) % W + 1


class _Seen(TorchDispatchMode):
    """Notes every op."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


VIEWS = {"aten::detach", "aten::view", "aten::slice", "aten::split", "aten::unbind", "aten::alias", "aten::t"}


def test_a_dispatch_mode_of_the_caller_sees_no_copy_and_no_sum(ranks: Run) -> None:
    def work() -> tuple[set[str], list[float]]:
        rank, x, strided = dist.get_rank(), torch.ones(3, dtype=torch.int16), torch.ones(3, 2).t()
        out, y = torch.empty(W * 6), torch.zeros(3, 2).t()
        with _Seen() as seen:
            dist.all_reduce(x)  # the first sum of this dtype
            all_gather_single(out, strided)
            dist.all_reduce(strided)
            sent = started(dist.isend(strided, (rank + 1) % W))
            dist.recv(y, (rank - 1) % W)
            sent.wait()
            dist.barrier()
        return seen.ops - VIEWS, [float(each.sum()) for each in (x, out, strided, y)]

    assert ranks(work) == [(set(), [12.0, 24.0, 24.0, 24.0])] * W


def test_a_default_device_of_the_caller_changes_nothing(ranks: Run) -> None:
    def work() -> list[float]:
        rank = dist.get_rank()
        x, large, y = torch.ones(3), torch.ones(1 << 20), torch.zeros(300_000, 2).t()
        out = [torch.zeros(i + 1) for i in range(W)]
        given = torch.full((600_000,), float(rank))
        torch.set_default_device("meta")
        try:
            with group() as made:
                dist.all_reduce(x, group=made)
                dist.all_reduce(large, group=made)
                dist.all_gather(out, x[:1].expand(rank + 1), group=made)
                sent = started(dist.isend(given, (rank + 1) % W, group=made))
                dist.recv(y, (rank - 1) % W, group=made)
                sent.wait()
        finally:
            torch.set_default_device("cpu")
            torch.set_default_device(None)
        return [float(each.sum()) for each in (x, large, *out, y)]

    for rank, got in enumerate(ranks(work)):
        assert got == [12.0, 4.0 * (1 << 20), 4.0, 8.0, 12.0, 16.0, 600_000.0 * ((rank - 1) % W)]


def test_a_segment_of_one_rank_needs_no_store() -> None:
    segment = Segment(None, 0, 1, [0], 1.0, "alone")
    assert segment.missing([0], str) is None
    assert segment.peers.dead([0]) == []
    assert not isinstance(segment.missing([0], str), GradmeshError)


@pytest.mark.timed
def test_async_call_progresses_while_its_rank_waits_for_another(ranks: Run) -> None:
    def work() -> tuple[float, float]:
        other = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=20))
        dist.barrier(group=other)
        x, y = torch.ones(1 << 20), torch.zeros(1 << 20)
        rank, begin = dist.get_rank(), time.monotonic()
        if rank == 0:
            works = [dist.all_reduce(x, async_op=True), dist.irecv(y, 1)]
            dist.barrier(group=other)  # where the others come after the sum and the message
            seconds = time.monotonic() - begin
            for each in works:
                started(each).wait()
        else:
            dist.all_reduce(x)
            if rank == 1:
                dist.send(torch.full((1 << 20,), 7.0), 0)
            dist.barrier(group=other)
            seconds = time.monotonic() - begin
        assert (x == W).all()
        dist.destroy_process_group(other)
        return seconds, y[-1].item()

    outcomes = ranks(work)
    assert outcomes[0][1] == 7
    assert all(seconds < 10 for seconds, _ in outcomes)


def test_two_threads_of_a_rank_may_wait_in_one_group(ranks: Run) -> None:
    def work() -> list[float]:
        rank, got = dist.get_rank(), torch.zeros(1)
        with group(2) as pair:
            if rank >= 2:
                return []
            receiver = threading.Thread(target=lambda: dist.recv(got, 1 - rank, group=pair))
            receiver.start()
            time.sleep(0.2)
            dist.send(torch.tensor([rank + 5.0]), 1 - rank, group=pair)
            receiver.join(10)
            return got.tolist()

    assert ranks(work)[:2] == [[6.0], [5.0]]


def test_two_threads_may_look_whether_the_others_are_alive(ranks: Run) -> None:
    def work() -> list[str]:
        errors = []
        with group(2) as pair:
            if dist.get_rank() >= 2:
                return []
            until = time.monotonic() + 0.5

            def look() -> None:
                while time.monotonic() < until:
                    tried = attempt(lambda: pair.segment.peers.dead(pair.segment.peers.others))
                    if tried.result != []:
                        errors.append(tried.text)
                        return

            threads = [threading.Thread(target=look) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            dist.barrier(group=pair)
        return errors

    assert ranks(work) == [[]] * W


def test_an_asynchronous_call_may_wait_long_for_a_slow_rank(ranks: Run) -> None:
    def work() -> list[float]:
        rank, values = dist.get_rank(), []
        with group(2, seconds=20) as pair:
            if rank >= 2:
                return []
            for _ in range(3):
                if rank:
                    time.sleep(0.7)
                x = torch.ones(4)
                started(dist.all_reduce(x, group=pair, async_op=True)).wait()
                values.append(x[0].item())
        return values

    assert ranks(work)[:2] == [[2.0] * 3] * 2


def test_a_forked_child_that_aborts_its_copy_of_a_group_ends_nothing(ranks: Run) -> None:
    def work() -> tuple[list[int], list[float]]:
        with group() as made:
            if dist.get_rank() == 1:
                pid = os.fork()
                if pid == 0:
                    try:
                        made.abort()
                    finally:
                        os._exit(0)
                os.waitpid(pid, 0)
            dist.barrier(group=made)
            states = made.segment.states.tolist()
            return states, [total(made) for _ in range(3)]

    assert ranks(work) == [([0] * W, [10.0] * 3)] * W


def test_a_message_is_whole_for_every_thread_that_sees_it_done(ranks: Run) -> None:
    def work() -> bool:
        rank, right = dist.get_rank(), []
        with group(2) as pair:
            if rank >= 2:
                return True
            for turn in range(20):
                if rank:
                    dist.send(torch.full((2000, 300), float(turn)), 0, group=pair)
                    continue
                out = torch.full((300, 2000), -1.0).t()  # so that it is copied when it is here
                came = started(dist.irecv(out, 1, group=pair))

                def look(came: Any = came, out: Tensor = out, turn: int = turn) -> None:
                    came.wait()
                    right.append(bool((out == turn).all()))

                threads = [threading.Thread(target=look) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        return all(right) and len(right) == (0 if rank else 60)

    assert ranks(work) == [True] * W


def test_the_helper_is_started_once_by_threads_that_need_it_at_once() -> None:
    for _ in range(50):
        errors: list[str] = []
        helper, at_once = engine._Helper(), threading.Barrier(4)

        def need(helper: Any = helper, at_once: Any = at_once, errors: list[str] = errors) -> None:
            at_once.wait()
            try:
                helper.need()
            except RuntimeError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=need) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        helper.end()
        assert errors == []

"""A rank returns while others wait for it: they get an error soon, and no rank gets it wrongly."""

from __future__ import annotations

import datetime
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradmesh as gm
from gradmesh._util.call_sites import Place, stack_of
from gradmesh.backends.shm.shared_memory import Run
from gradmesh.launch import hang_detector
from gradmesh.launch.hang_detector import MainThread, Probe, is_waiting_in
from gradmesh.launch.outcomes import Failure, Outcome
from tests.forking import Forking

BACKENDS = [
    "threads",
    pytest.param("shm", marks=pytest.mark.processes),
    pytest.param("gloo", marks=pytest.mark.processes),
]
SOON = {"threads": 1.5, "shm": 1.5, "gloo": 5.0}
"""Seconds between the return of a rank and the error."""


def skipped_backward() -> None:
    x = torch.arange(3.0, requires_grad=True)
    gathered = gm.all_gather(x)
    if dist.get_rank() == 1:
        gathered.square().sum().backward()


def one_call_fewer() -> None:
    if dist.get_rank() != 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        work.wait()


def message_that_is_not_sent() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.empty(3), 0)


def never_comes(fn: Callable[..., object], backend: str) -> tuple[str, float]:
    """The error of a launch of two ranks, of which rank 0 returns early, and its seconds after both had started."""
    with gm.Ranks(2, backend=backend, timeout=60) as ranks:
        ranks.run(dist.get_rank)
        start = time.monotonic()
        with pytest.raises(gm.RankError) as caught:
            ranks.run(fn)
        seconds = time.monotonic() - start
    assert isinstance(caught.value.__cause__, gm.DeadlockError)
    assert caught.value.rank == 1
    return str(caught.value), seconds


@pytest.mark.timed
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_backward_is_an_error_with_the_rank_the_line_and_the_remedy(backend: str) -> None:
    text, seconds = never_comes(skipped_backward, backend)
    first = text.splitlines()[0]
    assert "rank 0" in first
    assert "returned" in first
    assert "ordered()" in text
    assert f"{__file__}" in text
    assert "skipped_backward" in text
    forward = skipped_backward.__code__.co_firstlineno + 2
    assert f"the backward of all_gather at {__file__}:{forward} in skipped_backward" in text
    assert "gathered.square().sum().backward()" in text  # the stack of the rank that waits
    assert seconds < SOON[backend]


# On gloo the launcher sees no difference between the two.
@pytest.mark.timed
@pytest.mark.parametrize(
    ("backend", "fn"),
    [
        ("threads", one_call_fewer),
        ("threads", message_that_is_not_sent),
        pytest.param("shm", one_call_fewer, marks=pytest.mark.processes),
        pytest.param("shm", message_that_is_not_sent, marks=pytest.mark.processes),
        pytest.param("gloo", one_call_fewer, marks=[pytest.mark.processes, pytest.mark.slow]),
    ],
)
def test_a_call_that_a_rank_does_not_make_is_an_error_with_the_rank(
    backend: str, fn: Callable[..., object]
) -> None:
    text, seconds = never_comes(fn, backend)
    assert "rank 0" in text.splitlines()[0]
    assert fn.__name__ in text
    assert seconds < SOON[backend]


# ---- cases without an error


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str], gm.Ranks]]:
    """Two ranks of each backend, kept: none of the functions below fails."""
    kept: dict[str, gm.Ranks] = {}

    def pool(backend: str) -> gm.Ranks:
        if backend not in kept:
            kept[backend] = gm.Ranks(2, backend=backend, timeout=60)
        return kept[backend]

    yield pool
    for ranks in kept.values():
        ranks.close()


def alone_for_long() -> int:
    if dist.get_rank() == 1:
        time.sleep(1.5)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            torch.ones(100).sum()
    return dist.get_rank()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_that_works_alone_after_the_others_returned_does_not_raise(
    backend: str, pools: Callable[[str], gm.Ranks]
) -> None:
    assert pools(backend).run(alone_for_long) == [0, 1]


def sums_in_turn(late: int) -> float:
    if dist.get_rank() == late:
        time.sleep(0.3)  # it has returned from the run before, and not started this one
    x = torch.ones(2)
    dist.all_reduce(x)
    return float(x.sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_has_returned_from_the_run_before_is_waited_for(
    backend: str, pools: Callable[[str], gm.Ranks]
) -> None:
    for turn in range(4):
        assert pools(backend).run(sums_in_turn, turn % 2) == [4.0, 4.0]


def leaves_calls_under_way() -> tuple[float, float]:
    """Rank 0 begins a sum and a message that fits in no ring, and returns; rank 1 comes later."""
    x, large = torch.ones(3), torch.ones(1 << 20)
    if dist.get_rank() == 0:
        dist.all_reduce(x, async_op=True)
        dist.isend(large, 1)
    else:
        time.sleep(0.5)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        dist.recv(large.zero_(), 0)
    return float(x.sum()), float(large.sum())


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_pending_send_of_a_returned_rank_is_delivered(backend: str, pools: Callable[[str], gm.Ranks]) -> None:
    assert pools(backend).run(leaves_calls_under_way)[1] == (6.0, float(1 << 20))


def test_process_without_a_launcher_treats_no_rank_as_returned() -> None:
    run = Run()
    assert run.waits == 0
    run.begin(3)
    assert run.waits == 3
    run.end(failed=False)
    assert run.waits == 0


# ---- the guess about a rank that waits inside C++


def standing(thread: threading.Thread, waits: bool = True) -> list[Place]:
    """Where a thread stands, as soon as it stands; if it `waits` for other ranks, as soon as it does that."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stack = stack_of(thread.ident)
        time.sleep(0.05)
        if stack == stack_of(thread.ident) and is_waiting_in(stack) >= waits:
            break
    return stack


def stands_in(fn: Callable[[threading.Event], object], waits: bool) -> tuple[list[Place], threading.Event]:
    """Where a thread stands that runs fn, and what ends it."""
    end = threading.Event()
    thread = threading.Thread(target=fn, args=(end,), daemon=True)
    thread.start()
    return standing(thread, waits), end


class _Work:
    """Its `wait` is a function of C, as that of a work is."""

    def __init__(self) -> None:
        self.wait = threading.Lock().acquire
        self.wait()


def test_only_a_wait_for_other_ranks_is_taken_for_one() -> None:
    lock = threading.Lock()
    lock.acquire()
    waits: list[tuple[Callable[[threading.Event], object], bool]] = [
        (lambda end: time.sleep(60), False),
        (lambda end: end.wait(60), False),
        (lambda end: lock.acquire(timeout=60), False),
        (lambda end: torch.futures.Future().wait(), True),
        (lambda end: _Work().wait(), True),
    ]
    for number, (fn, expected) in enumerate(waits):
        stack, end = stands_in(fn, expected)
        assert stack
        assert is_waiting_in(stack) is expected, number
        end.set()
    lock.release()


def test_the_main_thread_of_a_test_is_not_taken_for_waiting() -> None:
    main = MainThread()
    seen: list[float] = []

    def look() -> None:
        for _ in range(4):
            seen.append(main.waits())
            time.sleep(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [0.0] * 4
    assert "test_the_main_thread" in main.stack(below="nowhere")


AT_WORK = """
import subprocess, threading
from gradmesh.launch.process_ranks import _Parent
from gradmesh.launch.hang_detector import has_other_work
print(has_other_work())
child = subprocess.Popen(["sleep", "60"])
print(has_other_work())
child.kill()
child.wait()
print(has_other_work())
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
print(has_other_work())
end.set()
thread.join()
print(has_other_work())
"""


@pytest.mark.processes
def test_a_process_with_a_thread_of_the_program_or_a_child_may_be_at_work(forking: Forking) -> None:
    """In a process of its own, since pytest's has the threads of other tests' ranks."""
    said = forking.run(AT_WORK).stdout.split()
    assert said == ["False", "True", "False", "True", "False"]


@pytest.mark.timed
def test_main_thread_is_not_reported_as_waiting_while_others_may_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, never = MainThread(), torch.futures.Future()  # type: ignore[var-annotated]
    seen: dict[bool, float] = {}

    def look() -> None:
        standing(threading.main_thread())
        for others in (False, True):
            monkeypatch.setattr(hang_detector, "has_other_work", lambda others=others: others)
            for _ in range(4):
                time.sleep(0.1)
                seen[others] = main.waits()
        never.set_result(0)

    thread = threading.Thread(target=look)
    thread.start()
    never.wait()
    thread.join()
    assert seen[False] > 0.2
    assert seen[True] == 0.0


@pytest.mark.timed
def test_suspended_machine_does_not_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute without processor time between two looks, on a rank that stands inside of autograd."""
    monkeypatch.setattr(hang_detector, "has_other_work", lambda: False)
    main, never = MainThread(), torch.futures.Future()  # type: ignore[var-annotated]
    seen: list[float] = []

    def look() -> None:
        standing(threading.main_thread())
        main.waits()
        now = time.monotonic()
        for later in (60.0, 60.1):
            monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
            seen.append(main.waits())
        monkeypatch.undo()
        never.set_result(0)

    thread = threading.Thread(target=look)
    thread.start()
    never.wait()
    thread.join()
    assert 0 < seen[0] < 1.5
    assert seen[0] < seen[1]


def test_a_rank_that_gets_no_processor_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "has_other_work", lambda: False)
    wanted = iter([0.0, 0.1, 5.0, 9.9])
    monkeypatch.setattr(hang_detector, "_wanted", lambda: next(wanted))
    main, never = MainThread(), torch.futures.Future()  # type: ignore[var-annotated]
    seen: list[float] = []

    def look() -> None:
        standing(threading.main_thread())
        for _ in range(3):
            time.sleep(0.1)
            seen.append(main.waits())
        never.set_result(0)

    thread = threading.Thread(target=look)
    thread.start()
    never.wait()
    thread.join()
    assert seen == [0.0, 0.0, 0.0]


def test_the_launcher_needs_all_that_are_missing_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked: list[int] = []
    probe = Probe(asked.append)

    def answers(*seconds: float) -> dict[int, str]:
        for rank, each in zip((1, 2), seconds, strict=True):
            probe.answer(rank, pickle.dumps((each, f"stack {rank}")))
        return probe.waiting([1, 2], returned=1)

    now = 1.0
    assert probe.waiting([1, 2], returned=1) == {}
    assert asked == [1, 2]
    now = 10.0
    assert answers(9.0, 0.0) == {}  # rank 2 is at work
    assert asked == [1, 2, 1, 2]
    now = 20.0
    assert answers(9.0, 2.0) == {1: "stack 1", 2: "stack 2"}
    assert probe.waiting([1, 2], returned=2) == {}  # one more has returned meanwhile


def test_a_rank_that_is_alone_is_never_taken_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded machine it may get no processor time for seconds."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    probe = Probe(lambda _: None)
    for clock[0] in (10.0, 20.0, 30.0):
        probe.answer(0, pickle.dumps((9.0, "stack 0")))
        assert probe.waiting([0], returned=0) == {}


def test_error_names_the_returned_rank_and_the_waiting_line() -> None:
    outcome = Outcome(3, results={0: None})
    stack = f'  File "{torch.__file__}", line 1, in x\n  File "/home/a/train.py", line 7, in step\n    y()\n'
    outcome.record_deadlock({1: stack, 2: stack})
    with pytest.raises(
        gm.RankError, match="rank 0 returned, and ranks 1, 2 still wait in a collective"
    ) as caught:
        outcome.values()
    assert 'rank 2 waits at "/home/a/train.py", line 7, in step' in str(caught.value)


# ---- how long ranks wait at most


def timeouts_here() -> list[float]:
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group(timeout=datetime.timedelta(seconds=7))]
    return [getattr(group, "timeout", 0.0) for group in groups]


@pytest.mark.parametrize(("given", "world"), [(None, 300.0), (5.0, 300.0), (900.0, 900.0)])
def test_group_uses_the_default_or_the_given_timeout(given: float | None, world: float) -> None:
    assert gm.launch(timeouts_here, 2, backend="threads", timeout=given) == [[world, world, 7.0]] * 2


@pytest.mark.processes
def test_groups_of_processes_do_too(pools: Callable[[str], gm.Ranks]) -> None:
    assert pools("shm").run(timeouts_here) == [[300.0, 300.0, 7.0]] * 2


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), True, "5", None])
def test_invalid_timeout_raises(timeout: Any) -> None:
    with pytest.raises(gm.ArgumentError, match="timeout="):
        gm.init(timeout=timeout)


# ---- what the launcher makes of it


def skipped_backward_of_ddp() -> None:
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    loss = module(torch.ones(2, 3)).sum()
    if dist.get_rank() == 1:
        loss.backward()


@pytest.mark.processes
def test_under_ddp_which_waits_in_cpp_the_first_line_names_the_rank_too() -> None:
    with pytest.raises(gm.RankError) as caught:
        gm.launch(skipped_backward_of_ddp, 2, backend="shm", timeout=60)
    first = str(caught.value).splitlines()[0]
    assert "rank 0, process" in first
    assert "has returned" in first
    assert "ordered()" in str(caught.value)


@pytest.mark.parametrize("marked", ["", "[WITH __notes__]"])
def test_an_error_that_only_says_that_another_rank_was_lost_is_never_the_first(marked: str) -> None:
    raised = RuntimeError(f"error in the callback: AbortedError{marked}: gradmesh: rank 1 does not answer")
    own = ValueError("the fault")
    failures = [Failure.of(0, raised), Failure.of(1, own)]
    with pytest.raises(gm.RankError, match="rank 1 of 2 failed with ValueError; rank 0 failed too"):
        Outcome(2, failures=failures).values()


def test_a_rank_that_gave_up_waiting_is_shown_beside_the_place_of_the_one_that_did_not_come() -> None:
    failure = Failure.of(0, RuntimeError("Timed out waiting 3000ms for recv operation to complete"))
    outcome = Outcome(2, failures=[failure], unfinished={1: "  in a place\n"})
    with pytest.raises(
        gm.RankError, match="failed with RuntimeError; rank 1 had not returned: Timed out"
    ) as caught:
        outcome.values()
    assert "Stack of rank 1:\n\n  in a place" in str(caught.value)
    own = Outcome(2, failures=[Failure.of(0, ValueError("x"))], unfinished={1: "  in a place\n"})
    with pytest.raises(gm.RankError) as caught:
        own.values()
    assert "Stack of rank" not in str(caught.value)


def crossed_groups() -> None:
    """On a mesh of 2 x 2 each rank waits for one that waits for another, in two axes."""
    gm.mesh(rows=2, cols=2)
    row, column = gm.rank("rows"), gm.rank("cols")
    x = torch.ones(2, requires_grad=True)
    along, across = gm.all_gather(x, "rows"), gm.all_gather(x, "cols")
    loss = (along if row == column else across).square().sum()
    loss.backward()


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_deadlock_across_groups_is_reported(backend: str) -> None:
    with gm.Ranks(4, backend=backend, timeout=60) as ranks:
        start = time.monotonic()
        with pytest.raises(gm.RankError, match="for each other") as caught:
            ranks.run(crossed_groups)
    assert time.monotonic() - start < 30
    assert isinstance(caught.value.__cause__, gm.DeadlockError)
    assert "test_returned.py" in str(caught.value)

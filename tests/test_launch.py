"""`launch` and `Ranks`: results in rank order, the first error with its rank, and nothing left behind."""

from __future__ import annotations

import contextlib
import doctest
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradmesh as gm
import gradmesh.launch
from gradmesh.errors import ArgumentError, RankError
from gradmesh.launch import Ranks, launch, process_ranks

launch_module = sys.modules["gradmesh.launch"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Two gloo processes; a test whose ranks fail makes the next one start new ones."""
    with Ranks(2, timeout=60) as ranks:
        yield ranks


@pytest.fixture(params=["threads", pytest.param("gloo", marks=pytest.mark.processes)])
def both(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks of either kind."""
    if request.param == "gloo":
        yield request.getfixturevalue("pool")
        return
    with Ranks(2, backend="threads", timeout=60) as ranks:
        yield ranks


def my_rank_plus(start: int, *, by: int = 1) -> int:
    total = torch.tensor(by)
    dist.all_reduce(total)
    return start + dist.get_rank() * int(total)


class OwnError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def fail_on_rank_1(kind: str) -> object:
    if dist.get_rank() == 1:
        match kind:
            case "value":
                raise ValueError("boom")
            case "own":
                raise OwnError(7, "an error that pickles and does not come back")
            case "interrupt":
                raise KeyboardInterrupt
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(5)
            case "kill":
                print("last words", end="", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "generator":
                return (i for i in range(3))
    dist.barrier()
    return None


def stay(path: str) -> None:
    Path(path, f"{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(600)


def gone(pid: int, within: float = 5) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_other_tests() -> None:
    """Pools that the whole run shares may have rank threads of their own."""
    _before.clear()
    _before.update(threading.enumerate())


def rank_threads() -> list[threading.Thread]:
    new = set(threading.enumerate()) - _before
    return [thread for thread in new if thread.name.startswith("gradmesh rank")]


def run_python(
    code: str, *flags: str, name: str = "script.py", folder: Path
) -> subprocess.CompletedProcess[str]:
    script = folder / name
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, *flags, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        check=False,
    )


# ---- results


def test_results_come_in_rank_order(both: Ranks) -> None:
    assert both.run(my_rank_plus, 10, by=2) == [10, 14]


def test_a_closure_runs_on_every_rank(both: Ranks) -> None:
    offset = torch.arange(3.0)
    results = both.run(lambda x: x + offset + dist.get_rank(), torch.ones(3))
    assert [r.tolist() for r in results] == [[1, 2, 3], [2, 3, 4]]


def test_ranks_stay_the_same_from_run_to_run(both: Ranks) -> None:
    def who() -> tuple[int, int]:
        return os.getpid(), threading.get_ident()

    assert both.run(who) == both.run(who)


@pytest.mark.processes
def test_a_rank_has_its_place_in_the_environment(pool: Ranks) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    rows = pool.run(
        lambda: ([os.environ[n] for n in names], torch.get_num_threads(), os.getcwd(), dist.get_backend())
    )
    intra_op = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // 2))
    for rank, row in enumerate(rows):
        assert row == (
            [str(rank)] * 2 + ["2", "2", "127.0.0.1", intra_op],
            int(intra_op),
            os.getcwd(),
            "shm",
        )


def test_launch_passes_args_and_kwargs() -> None:
    assert launch(my_rank_plus, 3, backend="threads", args=(1,), kwargs={"by": 5}) == [1, 16, 31]


def test_a_launch_may_come_from_another_thread() -> None:
    results: list[object] = []
    thread = threading.Thread(
        target=lambda: results.append(launch(my_rank_plus, 2, backend="threads", args=(0,)))
    )
    thread.start()
    thread.join(60)
    assert results == [[0, 2]]


def test_two_threads_may_launch_at_the_same_time() -> None:
    def sums(n: int) -> list[float]:
        x = torch.ones(1)
        for _ in range(50):
            dist.all_reduce(x, dist.ReduceOp.MAX)
            time.sleep(0.0005)
        dist.all_reduce(x)
        return [x.item(), float(dist.get_world_size())]

    results: dict[int, object] = {}
    threads = [
        threading.Thread(
            target=lambda n=n: results.update({n: launch(sums, n, backend="threads", args=(n,))})
        )
        for n in (2, 3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {n: [[n, n]] * n for n in (2, 3, 4)}


# ---- errors


def test_the_first_failing_rank_is_named_with_its_traceback(both: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        both.run(fail_on_rank_1, "value")
    error = caught.value
    assert error.rank == 1
    assert "rank 1 of 2 failed with ValueError" in str(error)
    assert "boom" in str(error)
    assert 'raise ValueError("boom")' in error.rank_traceback
    assert error.rank_traceback.rstrip() in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert both.run(my_rank_plus, 0) == [0, 2]  # the next run starts new ranks


@pytest.mark.timed
def test_an_interrupt_or_exit_on_a_rank_is_a_failure_of_that_rank() -> None:
    for kind, name in (("interrupt", "KeyboardInterrupt"), ("exit", "SystemExit")):
        with pytest.raises(RankError, match=f"rank 1 of 2 failed with {name}"):
            launch(fail_on_rank_1, 2, backend="threads", args=(kind,))
    assert not rank_threads()


@pytest.mark.processes
def test_a_process_that_dies_is_named_with_how_it_died(
    pool: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed with exit code 5") as caught:
        pool.run(fail_on_rank_1, "die")
    assert caught.value.rank == 1
    with pytest.raises(RankError, match="rank 1 of 2 failed with SIGKILL") as caught:
        pool.run(fail_on_rank_1, "kill")
    assert caught.value.rank == 1
    assert "[rank 1] last words\n" in capsys.readouterr().out


@pytest.mark.processes
def test_unpicklable_result_is_reported(pool: Ranks) -> None:
    with pytest.raises(
        RankError, match=r"rank 1 of 2 failed with TypeError(.|\n)*a generator, cannot be pickled"
    ):
        pool.run(fail_on_rank_1, "generator")
    with pytest.raises(RankError, match="failed with OwnError") as caught:
        pool.run(fail_on_rank_1, "own")
    assert caught.value.__cause__ is None
    assert "does not come back" in str(caught.value)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"nprocs": 0}, "nprocs=0"),
        ({"nprocs": True}, "nprocs=True"),
        ({"backend": "smoke-signals"}, "gloo"),
        ({"backend": "cpu:threads,cuda:nccl"}, "cpu:threads"),
        ({"backend": "cpu:threads"}, "backend='cpu:threads'"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"timeout": True}, "timeout=True"),
        ({"args": 3}, "args=3"),
        ({"args": "abc"}, "args='abc'"),
        ({"kwargs": ["x"]}, "kwargs=['x']"),
        ({"fn": 3}, "fn=3"),
    ],
)
def test_unusable_arguments_are_refused_before_anything_starts(arguments: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {"fn": my_rank_plus, "nprocs": 2, "backend": "threads"}
    with pytest.raises(ArgumentError, match="remedy") as caught:
        launch(**{**good, **arguments})
    assert text in str(caught.value)
    assert not rank_threads()


# ---- time


def late_in(seconds: float) -> Callable[[], None]:
    def in_a_sleep() -> None:
        if dist.get_rank() == 1:
            time.sleep(seconds)

    return in_a_sleep


@pytest.mark.timed
@pytest.mark.processes
def test_a_process_that_is_late_is_shown_where_it_is() -> None:
    with Ranks(2, timeout=60) as ranks:
        ranks.run(my_rank_plus, 0)  # the limit is not for starting them
        ranks.timeout = 3.0
        with pytest.raises(RankError) as caught:
            ranks.run(late_in(600))
    text = str(caught.value)
    assert "rank 1 of 2 did not return within 3 s" in text
    assert "rank 0 returned" in text
    assert "time.sleep(seconds)" in text
    assert caught.value.rank is None


def stop_the_launcher(launcher: int) -> int:
    """Rank 0 stops the launcher's main thread; all ranks return in the meantime."""
    if gm.rank() == 0:
        os.kill(launcher, signal.SIGUSR1)
    return gm.rank()


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_answers_that_came_while_the_launcher_stood_still_are_read_after_the_limit(backend: str) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(4))
    try:
        with Ranks(3, backend=backend, timeout=2) as ranks:
            begin = time.monotonic()
            assert ranks.run(stop_the_launcher, os.getpid()) == [0, 1, 2]
            assert time.monotonic() - begin > 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.timed
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_thread_that_is_late_is_shown_where_it_is_and_ended() -> None:
    def spin() -> None:
        while dist.get_rank() == 1:
            time.sleep(0.01)

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 did not return within 0\.5 s") as caught:
        launch(spin, 2, backend="threads", timeout=0.5)
    assert "time.sleep(0.01)" in str(caught.value)
    assert time.monotonic() - start < 4
    assert not rank_threads()


# The exception that ends a thread may come while a callback of the garbage collector runs in it, where Python can do
# no more than report it: hypothesis has such a callback.
@pytest.mark.timed
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_a_thread_that_swallows_its_errors_in_a_collective_is_ended() -> None:
    def stubborn() -> None:
        while dist.get_rank() == 1:
            with contextlib.suppress(Exception):
                dist.barrier()
        raise ValueError("boom")

    with pytest.raises(RankError, match="rank 0 of 2 failed with ValueError"):
        launch(stubborn, 2, backend="threads")
    assert not rank_threads()


# ---- nothing is left behind


@pytest.mark.timed
@pytest.mark.processes
def test_success_and_failure_leave_no_process(tmp_path: Path) -> None:
    def mark(fail: bool) -> None:
        Path(folder, f"{os.getpid()}").touch()
        subprocess.Popen(["sleep", "600"], start_new_session=False)
        if fail and dist.get_rank() == 0:
            raise ValueError("boom")
        if fail:
            time.sleep(600)

    folder = str(tmp_path)
    launch(mark, 2, args=(False,))
    with pytest.raises(RankError):
        launch(mark, 2, args=(True,))
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 4
    assert all(gone(pid) for pid in pids)
    # Nor a process that a rank started; a zombie waits only for the init process.
    rows = [
        line.split() for line in subprocess.check_output(["ps", "-eo", "pgid,stat"], text=True).splitlines()
    ]
    assert not {group for group, state in rows if not state.startswith("Z")} & {str(pid) for pid in pids}


@pytest.mark.processes
@pytest.mark.fresh_ranks
def test_ranks_are_forked_from_one_process_and_draw_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> tuple[int, float, float, int]:
        import random

        import numpy as np

        return os.getppid(), random.random(), float(np.random.rand()), torch.initial_seed()

    def unlike(of: list[tuple[int, float, float, int]]) -> list[int]:
        return [len(set(each)) for each in zip(*of, strict=True)]

    assert unlike(launch(drawn, 3)) == [1, 3, 3, 3]
    assert launch(os.getppid, 3) != [os.getpid()] * 3
    monkeypatch.setattr(process_ranks, "FORKS", False)
    assert unlike(launch(drawn, 3)) == [1, 3, 3, 3]
    assert launch(os.getppid, 3) == [os.getpid()] * 3


@pytest.mark.processes
@pytest.mark.fresh_ranks
def test_a_child_that_the_launcher_forks_does_not_keep_the_ranks(tmp_path: Path) -> None:
    code = """
        import multiprocessing, os, time
        from gradmesh.launch import Ranks
        with Ranks(2) as ranks:
            ranks.run(os.getpid)
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
            child.start()
            begin = time.monotonic()
        print(time.monotonic() - begin)
    """
    assert float(run_python(code, folder=tmp_path).stdout) < 20


@pytest.mark.processes
@pytest.mark.fresh_ranks
def test_files_that_a_rank_keeps_open_are_written_at_its_end(tmp_path: Path) -> None:
    def keep(folder: str) -> None:
        kept = Path(folder, f"{dist.get_rank()}").open("w")  # noqa: SIM115
        sys.modules["kept_of_a_rank"] = kept  # type: ignore[assignment]
        kept.write("all of it")

    launch(keep, 2, args=(str(tmp_path),))
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["all of it"] * 2


@pytest.mark.timed
@pytest.mark.processes
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_launcher_ends_the_ranks(ended_by: signal.Signals, tmp_path: Path) -> None:
    # A script without a main guard, whose function only it has.
    code = f"""
        import os, signal, time, torch.distributed as dist
        from pathlib import Path
        from gradmesh.launch import launch
        def stay():
            Path({str(tmp_path)!r}, f"rank{{dist.get_rank()}}").write_text(str(os.getpid()))
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)  # it does not notice anything
            time.sleep(600)
        launch(stay, 2)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    launcher = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    marks = [tmp_path / f"rank{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(mark.exists() and mark.read_text() for mark in marks):
        assert time.monotonic() < deadline
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(ended_by)
    _, errors = launcher.communicate(timeout=30)
    assert all(gone(int(mark.read_text())) for mark in marks)
    if ended_by == signal.SIGINT:
        assert errors.count("KeyboardInterrupt") == 1


def test_ctrl_c_ends_a_launch_of_threads(tmp_path: Path) -> None:
    code = """
        import os, signal, threading, time, torch.distributed as dist
        from gradmesh.launch import launch
        def work():
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGINT)
            dist.barrier()
            while True:
                time.sleep(0.01)
        try:
            launch(work, 2, backend="threads")
        except KeyboardInterrupt:
            print("ended", threading.active_count())
    """
    assert run_python(code, folder=tmp_path).stdout == "ended 1\n"


# ---- where functions come from


@pytest.mark.processes
def test_a_script_without_a_main_guard_and_a_notebook_cell_work(tmp_path: Path) -> None:
    code = """
        import sys, torch, torch.distributed as dist
        from gradmesh.launch import launch
        print("main", sys.flags.dev_mode, sys.warnoptions)
        class Scale:  # lives in __main__ too
            factor = 3
        def work(scale):
            x = torch.tensor(scale.factor); dist.all_reduce(x)
            print("rank", sys.flags.dev_mode, sys.warnoptions)  # they have this interpreter's flags
            return x.item()
        print(launch(work, 2, args=(Scale(),)))
        cell = "def cell():\\n    return dist.get_rank() + Scale.factor\\nprint(launch(cell, 2))"
        exec(compile(cell, "<cell>", "exec"), globals())
    """
    ran = run_python(code, "-X", "dev", "-W", "error", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    main, *ranks, first, second = ran.stdout.splitlines()
    assert (main, first, second) == ("main True ['default', 'error']", "[6, 6]", "[3, 4]")
    assert sorted(ranks) == [f"[rank {rank}] {main.replace('main', 'rank')}" for rank in range(2)]


# ---- the docs


def test_the_examples_in_the_docs_run() -> None:
    result = doctest.testmod(sys.modules["gradmesh.launch"])
    assert result.attempted > 0
    assert result.failed == 0

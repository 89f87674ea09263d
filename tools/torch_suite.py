"""Torch's own tests for backends, on a backend of gradmesh in the place of Gloo or MPI.

    python -m tools.torch_suite --backend shm            # in the place of gloo, and then in the place of mpi
    python -m tools.torch_suite --backend shm --as gloo -k monitored_barrier

The tests are those that torch's wheel brings in `torch.testing._internal.distributed.distributed_test`; they need the
package `expecttest`, which the `dev` extra has. Three ranks run them, four of `hosts`: processes that are forked,
threads for the `threads` backend, or processes that mpiexec starts for each test of `mpi4py`. As `gloo`, the tests run
on Gloo too, and what Gloo fails or skips here is not asked of the backend. No wheel of torch has MPI; as `mpi`, every
test counts that torch does not skip.

What is relied on besides public names: `distributed_test` reads BACKEND and WORLD_SIZE from the environment when it is
imported, asks `TestDistBackend._run` to start a rank and `_barrier` to meet the others; `distributed_c10d` makes every
group in `_new_process_group_helper` and keeps its backend's name in `_world`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import IO, Any
from unittest import mock

import click
import torch
import torch.distributed as dist

import gradmesh as gm
from benchmarks.speed import mpi

torch_distributed: Any = dist
c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

RANKS = 3
ON_HOSTS = 4
"""The ranks of the `hosts` backend: two on each of two hosts, as it takes this machine for."""
_ON_RANK = "GRADMESH_TORCH_SUITE_RANK"
"""Set where this is the main program of a rank of MPI: what torch takes the backend for, the test, and a file."""

_LIMIT = 60
"""Seconds that a test may take."""

_TAIL = 8000
"""Characters that are kept of what the ranks of a test that failed have printed."""

_DRAWS = "expects the same random numbers on every rank; threads share torch's default generator"
SKIPPED: Mapping[str, Mapping[str, str]] = {
    "shm": {},
    "hosts": {
        "test_all_to_all_group": "makes a group of three ranks on two hosts: one of Gloo, which cannot do it",
    },
    "mpi4py": {},
    "threads": {
        "test_DistributedDataParallelCPU.*": "trains a model that is a global of its module; threads share it",
        "test_accumulate_gradients_no_sync.*": _DRAWS,
        "test_all_gather_object_.*": _DRAWS,
        "test_gather_object.*": _DRAWS,
        "test_scatter_object_list": _DRAWS,
        "test_.*_torch_profiler": "starts a profiler on every rank; a process has one",
        "test_barrier_timeout_.*": "expects the error after the timeout; threads notice a deadlock before it",
        "test_get_rank": "counts ranks by their process ids",
    },
}
"""The tests that a backend is not asked to pass, and why: by backend, a pattern of the whole name and a reason."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a test."""

    word: str  # "pass", "fail", "skip" where torch skips it, or "excused" where it is in `SKIPPED`
    why: str = ""  # the traceback, or the reason


def run(
    backend: str, name: str, pattern: str = "", report: Callable[[str], object] = str
) -> dict[str, Outcome]:
    """Run the tests on a backend that torch takes for another."""
    outcomes = {}
    # Another process: torch's tests are made for one backend, when they are imported.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _begin, (backend, name)) as process:
        for test in process.submit(_tests).result():
            if re.search(pattern, test):
                report(test)
                outcomes[test] = process.submit(_run_one, test).result()
    return outcomes


def asked(ours: Mapping[str, Outcome], gloo: Mapping[str, Outcome] | None) -> list[str]:
    """The tests that count: those that Gloo passes, or that torch does not skip if there is nothing to compare with."""
    if gloo is None:
        return [test for test, outcome in ours.items() if outcome.word not in ("skip", "excused")]
    return [test for test, outcome in gloo.items() if outcome.word == "pass" and ours[test].word != "excused"]


def failures(ours: Mapping[str, Outcome], gloo: Mapping[str, Outcome] | None) -> list[str]:
    """The tests that count and did not pass."""
    return [test for test in asked(ours, gloo) if ours[test].word != "pass"]


def show(backend: str, ours: Mapping[str, Outcome], gloo: Mapping[str, Outcome] | None) -> str:
    """The table of tests that count, those that the backend is not asked to pass and why, and how many it passes."""
    rows = [["test", "gloo", backend] if gloo else ["test", backend]]
    rows.append(["---"] * len(rows[0]))
    counted = asked(ours, gloo)
    rows += [[test, *([gloo[test].word] if gloo else []), ours[test].word] for test in counted]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    # In the place of mpi, it is not known which other tests would have run.
    excused = [
        test for test in ours if ours[test].word == "excused" and (not gloo or gloo[test].word == "pass")
    ]
    lines += ["", *(f"not run: {test}: {ours[test].why}" for test in excused)]
    passed = len(counted) - len(failures(ours, gloo))
    which = "Gloo passes" if gloo else "torch does not skip"
    also = f", {len(excused)} not run" if excused else ""
    return "\n".join(
        [*lines, f"{backend} passes {passed} of {len(counted)} that {which}{also}; {len(ours)} tests"]
    )


# -- in the process that runs the tests


class _Side:
    """Which backend this process tries."""

    backend: str
    name: str
    case: type[Any]
    folder: tempfile.TemporaryDirectory[str]
    said: IO[str]
    """What the ranks print, such as the reason why one ended without reporting to its parent."""


def _begin(backend: str, name: str) -> None:
    _Side.folder = tempfile.TemporaryDirectory()
    os.environ.update(
        BACKEND=name,
        WORLD_SIZE=str(ranks_of(backend)),
        INIT_METHOD=f"file://{_Side.folder.name}/init",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(_LIMIT),
    )
    torch.set_num_threads(1)
    _Side.said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - for as long as the process runs
    os.dup2(_Side.said.fileno(), 1)
    os.dup2(_Side.said.fileno(), 2)
    _define(backend, name)
    _Side.case.setUpClass()


def ranks_of(backend: str) -> int:
    """How many ranks run the tests of a backend."""
    return ON_HOSTS if backend == "hosts" else RANKS


def _define(backend: str, name: str) -> None:
    """Make the class of the tests."""
    if backend != name:
        _stand_in(backend, name)
    # Imported now, as it reads the environment.
    distributed_test: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    if backend == "threads":
        distributed_test.initialize_temp_directories()
        # A process has one profiler, and every rank would start one.
        torch.autograd.profiler.profile = lambda **_: contextlib.nullcontext()  # type: ignore[assignment, misc]
    if backend != name:
        # Gloo shows its calls in a profile under names of its own; no other backend does.
        for known in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(distributed_test, known).clear()

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            if backend != "mpi4py":
                self._start_processes(multiprocessing.get_context("fork").Process)

    _Side.backend, _Side.name, _Side.case = backend, name, Case


def _tests() -> list[str]:
    return list(unittest.TestLoader().getTestCaseNames(_Side.case))


def _run_one(test: str) -> Outcome:
    method = getattr(_Side.case, test)
    if getattr(method, "__unittest_skip__", False):
        return Outcome("skip", method.__unittest_skip_why__)
    excuse = _excused(_Side.backend, test)
    if excuse is not None:
        return Outcome("excused", excuse)
    _Side.said.seek(0)
    _Side.said.truncate()
    result = unittest.TestResult()
    with _true_name(test):
        if _Side.backend == "threads":
            return _on_threads(test)
        if _Side.backend == "mpi4py":
            return _over_mpi(test)
        _Side.case(test).run(result)
    for _, why in result.errors + result.failures:
        _Side.said.seek(0)
        return Outcome("fail", why + _Side.said.read()[-_TAIL:])
    for _, why in result.skipped:
        return Outcome("skip", why)
    return Outcome("pass")


def _excused(backend: str, test: str) -> str | None:
    return next((why for of, why in SKIPPED.get(backend, {}).items() if re.fullmatch(of, test)), None)


def _true_name(test: str) -> contextlib.AbstractContextManager[object]:
    """Have torch know the groups by their own name, for the test that compares it with the one that DDP has noted."""
    if test == "test_ddp_logging_data_cpu":
        return mock.patch.object(dist, "get_backend", return_value=_Side.backend)
    return contextlib.nullcontext()


def _on_threads(test: str) -> Outcome:
    """Run a test on ranks that are threads, where torch would start processes."""
    meeting = threading.Barrier(RANKS)

    def on_rank() -> Outcome:
        case = _Side.case(test)
        case.rank, case.file_name = dist.get_rank(), ""
        case._barrier = lambda wait_for=RANKS, timeout=10: meeting.wait(timeout)  # noqa: ARG005 - all ranks are here
        try:
            getattr(case, test)()
        except (unittest.SkipTest, SystemExit) as reason:
            return Outcome("skip", str(reason))
        return Outcome("pass")

    torch.manual_seed(0)
    torch_distributed.set_debug_level(torch_distributed.DebugLevel.OFF)  # a test may have set it
    try:
        with warnings.catch_warnings():
            return gm.launch(on_rank, RANKS, backend="threads", timeout=_LIMIT)[0]
    except gm.RankError as error:
        return Outcome("fail", str(error))


def _over_mpi(test: str) -> Outcome:
    """Run a test on ranks that mpiexec starts."""
    case = _Side.case(test)
    case.setUp()  # what ranks meet by, in a folder whose name they inherit
    command = [str(mpi.launcher()), "-n", str(RANKS), sys.executable, "-m", "tools.torch_suite"]
    environment = {**os.environ, _ON_RANK: f"{_Side.name} {test} {_Side.folder.name}/{test}"}
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return Outcome("fail", f"not over after {_LIMIT} s: {str(error.stdout)[-_TAIL:]}")
    skips: dict[int, str] = {each.exit_code: each.message for each in _skips().values()}
    codes = [int(code) for code in re.findall(r"rank \d ends with (\d+)", done.stdout)]
    reason = next((skips[code] for code in codes if code in skips), None)
    if reason is not None:
        return Outcome("skip", reason)
    if codes == [0] * RANKS and not done.returncode:
        return Outcome("pass")
    return Outcome("fail", f"{codes}\n{done.stdout[-_TAIL:]}\n{done.stderr[-_TAIL:]}")


def _skips() -> Any:
    return importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS


def _rank_over_mpi() -> None:
    """The main program of such a rank."""
    name, test, init = os.environ[_ON_RANK].split()
    rank = importlib.import_module("mpi4py.MPI").COMM_WORLD.rank
    os.environ["INIT_METHOD"] = f"file://{init}"
    _define("mpi4py", name)
    ours, theirs = multiprocessing.Pipe()
    try:
        with _true_name(test):
            _Side.case._run(rank, test, init, theirs)
    except SystemExit as end:
        while ours.poll():
            try:
                print(ours.recv())
            except EOFError:
                break
        print(f"rank {rank} ends with {end.code}", flush=True)


def _stand_in(ours: str, name: str) -> None:
    """Have torch.distributed make groups of ours where `name` is asked for, and know them by that name."""
    make, init = c10d._new_process_group_helper, c10d.init_process_group

    def helper(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        meant = backend in (ours, name)
        if ours == "hosts" and rank is not None:
            os.environ.setdefault(
                "GRADMESH_HOST", f"host-{2 * rank // ON_HOSTS}"
            )  # the first group is the world
        group, store = make(size, rank, ranks, dist.Backend(ours) if meant else backend, *args, **kwargs)
        if meant and isinstance(group, dist.ProcessGroup):
            c10d._world.pg_map[group] = (dist.Backend(name), store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(name)))
        return group, store

    def begin(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        init(ours if backend == name else backend, *args, **kwargs)

    c10d._new_process_group_helper = helper
    c10d.init_process_group = dist.init_process_group = begin
    if name == "mpi":
        dist.is_mpi_available = c10d.is_mpi_available = lambda: True


@click.command(help=__doc__.partition("\n\n")[0])
@click.option(
    "--backend", type=click.Choice(list(SKIPPED)), required=True, help="Whose groups run the tests."
)
@click.option(
    "--as", "names", type=click.Choice(["gloo", "mpi"]), multiple=True, help="What torch takes it for."
)
@click.option("-k", "pattern", default="", help="Only tests in whose names this regular expression is found.")
def main(backend: str, names: tuple[str, ...], pattern: str) -> None:
    """Run the tests, print the table, and exit with 1 if a test that counts fails."""
    bad: dict[str, Outcome] = {}
    for name in names or ("gloo", "mpi"):
        sides = {
            of: run(of, name, pattern, _tell(of, name))
            for of in (("gloo",) if name == "gloo" else ()) + (backend,)
        }
        click.echo(f"\n{backend} as {name}, torch {torch.__version__}, {ranks_of(backend)} ranks\n")
        click.echo(show(backend, sides[backend], sides.get("gloo")))
        bad |= {test: sides[backend][test] for test in failures(sides[backend], sides.get("gloo"))}
    for test, outcome in bad.items():
        click.echo(f"\n{test}\n{outcome.why}")
    sys.exit(bool(bad))


def _tell(backend: str, name: str) -> Callable[[str], None]:
    return lambda test: click.echo(f"{backend} as {name}: {test}", err=True)


if __name__ == "__main__":
    if _ON_RANK in os.environ:
        _rank_over_mpi()
    else:
        main()

"""The mpi4py backend, on ranks that mpirun starts: torch's calls, the laws, and errors on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.speed import mpi

Done = subprocess.CompletedProcess[str]

pytestmark = pytest.mark.processes


def started(ranks: int, *command: str, **variables: str) -> Done:
    root = Path(__file__).parents[1]
    paths = {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    return subprocess.run(
        [str(mpi.launcher()), "-n", str(ranks), sys.executable, *command],
        cwd=root,
        env={**os.environ, **paths, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module", autouse=True)
def _mpi() -> None:
    """Skips where there is no MPI, or one that starts no ranks on this machine."""
    if reason := mpi.absent():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def run() -> Callable[..., Done]:
    """A run of several programs, made once."""

    @cache
    def made(ranks: int, names: tuple[str, ...]) -> Done:
        return started(ranks, "-m", "tests.backend_ranks", *names)

    return made


RIGHT = (
    "calls",
    "averages",
    "lists",
    "in_place",
    "inference",
    "subgroups",
    "ddp",
    "fsdp",
    "mismatch",
    "too_long",
    "destroyed",
    "another_world",
)


@pytest.mark.parametrize("name", RIGHT)
def test_calls_over_mpi_are_those_of_one_process_and_errors_are_named(
    name: str, run: Callable[..., Done]
) -> None:
    done = run(3, RIGHT)
    assert [f"{name} is right on rank {rank}" in done.stdout for rank in range(3)] == [True] * 3, done.stderr


def test_every_op_keeps_its_laws_over_mpi(run: Callable[..., Done]) -> None:
    done = run(2, ("laws",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("laws is right") == 2


@pytest.mark.parametrize("name", ["late_member", "many_groups"])
def test_groups_over_mpi_name_a_missing_member_and_free_what_they_held(
    name: str, run: Callable[..., Done]
) -> None:
    done = run(2, (name,))
    assert done.stdout.count(f"{name} is right") == 2, done.stderr


@pytest.mark.timed
def test_a_long_exchange_takes_not_much_longer_than_a_gather() -> None:
    done = started(2, "-m", "tests.backend_ranks", "long_messages")  # anew at each attempt
    assert done.stdout.count("long_messages is right") == 2, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_calls_over_mpi_are_those_of_one_process(seed: int, ranks: int) -> None:
    done = started(ranks, "-m", "tests.backend_ranks", "calls", SEED=str(seed))
    assert done.stdout.count("calls is right") == ranks, done.stderr


def test_a_call_that_another_rank_does_not_make_ends_after_the_timeout(run: Callable[..., Done]) -> None:
    done = run(2, ("late",))
    assert "late is right" in done.stdout, done.stderr


@pytest.mark.parametrize("backend", ["mpi4py", "gloo"])
def test_an_uncaught_error_ends_the_ranks_that_wait(backend: str) -> None:
    done = started(2, "-m", "tests.backend_ranks", "uncaught", BACKEND=backend)
    assert done.returncode != 0
    assert "ValueError: of rank 0" in done.stderr
    assert "until the timeout" not in done.stdout


def test_without_mpi4py_a_process_of_mpirun_is_no_world_of_one(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gradmesh as gm; gm.init()"
    done = started(2, "-c", program)
    assert done.returncode != 0
    assert "MissingExtraError" in done.stderr
    assert "gradmesh[mpi]" in done.stderr


def test_a_world_of_one_needs_no_mpi4py_also_in_a_shell_of_srun(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gradmesh as gm; import torch.distributed as dist\n"
        "gm.init(); print(dist.get_world_size(), dist.get_backend())"
    )
    assert started(1, "-c", program).stdout == "1 shm\n"

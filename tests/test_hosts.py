"""The hosts backend: torch's calls, laws, and errors on every rank; one machine counts as several hosts, or is two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from gradmesh.launch.process_ranks import held_port
from tools.hosts import Hosts, why_not

Done = list[tuple[int, str, str]]
"""For each rank: its exit code, and what it printed."""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[1]
PROGRAM = ("-m", "tests.backend_ranks")


def environment(rank: int, ranks: int, address: str, port: int) -> dict[str, str]:
    """What a launcher would set; the ranks are started without one, since it would end all ranks after the first."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "BACKEND": "hosts",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }


def ended(processes: list[subprocess.Popen[str]]) -> Done:
    """The ranks, when they have ended."""
    try:
        with ThreadPoolExecutor(
            len(processes)
        ) as readers:  # a rank whose pipe is full would hold the others up
            said = list(readers.map(lambda process: process.communicate(timeout=500), processes))
        return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()


def started(ranks: int, hosts: int, names: tuple[str, ...], **variables: str) -> Done:
    """Programs on this machine, which counts as several hosts."""
    with held_port() as port:
        return ended(
            [
                subprocess.Popen(
                    [sys.executable, *PROGRAM, *names],
                    cwd=ROOT,
                    env={
                        **os.environ,
                        **environment(rank, ranks, "127.0.0.1", port),
                        "HOSTS": str(hosts),
                        **variables,
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(ranks)
            ]
        )


@pytest.fixture(scope="module")
def run() -> Callable[..., Done]:
    """A run of several programs, made once."""
    return cache(started)


RIGHT = (
    "layouts",
    "calls",
    "averages",
    "lists",
    "in_place",
    "inference",
    "subgroups",
    "messages",
    "futures",
    "ddp",
    "fsdp",
    "mismatch",
    "differ",
    "destroyed",
    "aborted",
    "another_world",
    "laws",
)


@pytest.mark.parametrize("name", RIGHT)
def test_calls_over_two_hosts_are_those_of_one_process_and_errors_are_named(
    name: str, run: Callable[..., Done]
) -> None:
    for rank, (_, printed, errors) in enumerate(run(4, 2, RIGHT)):
        assert f"{name} is right on rank {rank}" in printed, errors


def test_random_calls_over_three_hosts_are_those_of_one_process() -> None:
    for rank, (_, printed, errors) in enumerate(started(6, 3, ("calls",), SEED="7")):
        assert f"calls is right on rank {rank}" in printed, errors


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_random_calls_over_hosts_are_those_of_one_process(seed: int, ranks: int, hosts: int) -> None:
    for rank, (_, printed, errors) in enumerate(started(ranks, hosts, ("calls",), SEED=str(seed))):
        assert f"calls is right on rank {rank}" in printed, errors


@pytest.mark.timed  # the other ranks have 1.5 s to say that they are there
@pytest.mark.parametrize(("numbers", "after"), [("10", "0"), ("100000", "0"), ("20000000", "0.5")])
def test_a_rank_that_is_killed_is_named_on_every_host(numbers: str, after: str) -> None:
    outcomes = started(4, 2, ("lost",), LOST="3", NUMBERS=numbers, AFTER=after)
    for _, printed, errors in outcomes[:3]:
        assert "lost is right" in printed, errors
    assert outcomes[3][0] == -9


def test_ranks_go_on_after_the_rank_with_the_store_has_ended() -> None:
    for _, printed, errors in started(4, 2, ("without_store",)):
        assert "without_store is right" in printed, errors


@pytest.mark.timed
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_hosts_with_two_ranks_each_take_the_backend_and_one_that_is_lost_is_named() -> None:
    with Hosts(2, delay=1) as hosts:
        outcomes = ended(
            [
                hosts.popen(
                    rank // 2,
                    [
                        "env",
                        *(f"{key}={value}" for key, value in variables.items()),
                        *(sys.executable, *PROGRAM, "layouts", "calls", "lost"),
                    ],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                for rank in range(4)
                for variables in [
                    {
                        **environment(rank, 4, hosts.address(0), 29417),
                        "BACKEND": "auto",
                        "GROUP_WORLD_SIZE": "2",
                        "AFTER": "0",
                        "LOST": "2,3",
                        "NUMBERS": "100000",
                    }
                ]
            ]
        )
    for rank, (_, printed, errors) in enumerate(outcomes):
        assert f"calls is right on rank {rank}" in printed, errors
    for _, printed, errors in outcomes[:2]:
        assert "ranks 2, 3 did not respond (host" in printed, errors

"""A rank or a host is lost under torchrun: the others name it, and training continues from the last checkpoint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradmesh.launch.process_ranks import held_port
from tests import elastic_program
from tests.elastic_program import LOST_AT, STEPS
from tools.hosts import Hosts, why_not

pytestmark = pytest.mark.processes
PROGRAM = elastic_program.__file__


def trained() -> torch.Tensor:
    """What one process without gradmesh gets."""
    torch.manual_seed(0)
    rows, wanted = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    weight = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (rows @ weight - wanted).square().mean().backward()
        optimizer.step()
    return weight.detach()


def begins(folder: Path) -> list[list[int]]:
    """The first step of each start, and on how many ranks."""
    return [[int(word) for word in line.split()] for line in (folder / "begins").read_text().splitlines()]


def test_ranks_on_shm_start_again_from_the_checkpoint_and_leave_nothing(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with held_port() as port:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"),
            *("--master-addr=127.0.0.1", f"--master-port={port}", PROGRAM, str(tmp_path), "rank"),
        ]
        environment = {**os.environ, "PYTHONPATH": paths}  # with tools
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    assert begins(tmp_path) == [[0, 2], [LOST_AT, 2]]
    torch.testing.assert_close(torch.load(tmp_path / "weight"), trained())
    # Nothing that could be left: other programs have files in /dev/shm too, which come and go.
    assert (tmp_path / "opened").read_text() == ""
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_host_that_is_lost_is_named_and_the_other_goes_on_alone(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        agents = [
            hosts.popen(
                host,
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
                    *("--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:29411"),
                    f"--rdzv-conf=is_host={1 - host},last_call_timeout=2,keep_alive_interval=1",
                    *(f"--local-addr={hosts.address(host)}", PROGRAM, str(tmp_path), "host"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for host in range(2)
        ]
        end = time.monotonic() + 100
        while not (tmp_path / "waits").exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        hosts.kill(1)
        _, errors = agents[0].communicate(timeout=120)
        agents[1].communicate()
    assert agents[0].returncode == 0, errors
    assert begins(tmp_path) == [[0, 2], [LOST_AT, 1]]
    torch.testing.assert_close(torch.load(tmp_path / "weight"), trained())
    seconds, _, said = (tmp_path / "error").read_text().partition(" ")
    assert float(seconds) < 20
    assert "rank 1 did not respond" in said

"""The language model of the examples follows one process, as threads and as processes that torchrun starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradmesh import cli

EXAMPLE = Path(__file__).parent.parent / "examples" / "lm_chars.py"


def _apart(text: str) -> list[float]:
    found = re.search(r"losses are at most (\S+) apart, parameters (\S+)", text)
    assert found, text
    return [float(number) for number in found.groups()]


def test_eight_threads_follow_one_process_step_by_step() -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert max(_apart(run.stdout)) < 1e-12


@pytest.mark.processes
def test_four_processes_of_torchrun_follow_one_process_step_by_step() -> None:
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(EXAMPLE),
        "--steps",
        "2",
    ]
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stderr
    assert max(_apart(run.stdout)) < 1e-12
    assert "4 processes" in run.stdout


def test_the_demo_shows_both_runs_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "lm.png"
    told = CliRunner().invoke(
        cli.commands(), ["demo", "lm", "--steps", "2", "--dp", "1", "--json", "--picture", str(picture)]
    )
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert max(found["far"], found["apart"]) < 1e-12
    assert len(found["losses"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")

"""The language model of the demo and of the example follows one process, on threads and on processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from gradmesh_demos.lm import Job, run

from gradmesh import cli


def test_eight_threads_follow_one_process_step_by_step() -> None:
    found = run(Job(steps=3))
    assert len(found.losses) == 3
    assert max(*found.far, found.apart) < 1e-12


@pytest.mark.slow
@pytest.mark.processes
def test_four_processes_follow_one_process_step_by_step() -> None:
    found = run(Job(dp=1, steps=2, backend="shm"))
    assert max(*found.far, found.apart) < 1e-12


def test_the_demo_shows_both_runs_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "lm.png"
    result = CliRunner().invoke(
        cli.commands(), ["demo", "lm", "--steps", "2", "--dp", "1", "--json", "--picture", str(picture)]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert max(found["far"], found["apart"]) < 1e-12
    assert len(found["losses"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")

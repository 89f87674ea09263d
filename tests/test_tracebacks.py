"""What an uncaught error prints: the frames of the program and the error, unless all frames are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, gradmesh as gm

def step(x):
    if gm.rank() == 1:
        return gm.all_gather(x{more})
    return gm.{verb}

def train():
    return step(torch.ones(3))

{start}
"""
LAUNCHED = "gm.launch(train, 2, backend={backend!r})"
MOST = 25


def printed(folder: Path, start: str, *, verb: str, more: str = "", full: bool = False) -> list[str]:
    """The lines that a script prints whose ranks' calls differ."""
    script = folder / "program.py"
    script.write_text(SCRIPT.format(start=start, verb=verb, more=more))
    environment = {**os.environ, "GRADMESH_TRACEBACK": "full"} if full else dict(os.environ)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


VERBS, SIZES = ("all_reduce(x, dst=gm.R)", ""), ("all_gather(x)", "[1:]")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "verb", "more"),
    [
        pytest.param("threads", *VERBS, id="verbs-threads"),
        pytest.param("gloo", *SIZES, id="sizes-gloo"),
        pytest.param("shm", *VERBS, id="verbs-shm", marks=pytest.mark.slow),
        pytest.param("threads", *SIZES, id="sizes-threads", marks=pytest.mark.slow),
        pytest.param("shm", *SIZES, id="sizes-shm", marks=pytest.mark.slow),
        pytest.param("gloo", *VERBS, id="verbs-gloo", marks=pytest.mark.slow),
    ],
)
def test_an_uncaught_mismatch_prints_a_page_with_the_calls_first(
    backend: str, verb: str, more: str, tmp_path: Path
) -> None:
    lines = printed(tmp_path, LAUNCHED.format(backend=backend), verb=verb, more=more)
    assert len(lines) <= MOST
    shown = [text for text in lines if text.strip("~^ ")]  # without the markers of Python 3.13
    assert "MismatchError" in shown[3]
    for rank, line in enumerate((7, 6)):
        assert any(f"rank {rank}: " in text and f"program.py:{line}" in text for text in lines[:10])
    assert not any(text.strip().startswith("File ") and "program.py" not in text for text in lines)
    assert "GRADMESH_TRACEBACK=full" in lines[-1]


def test_all_frames_are_shown_if_asked_for(tmp_path: Path) -> None:
    lines = printed(tmp_path, LAUNCHED.format(backend="threads"), verb="all_reduce(x, dst=gm.R)", full=True)
    assert len(lines) > MOST
    assert any("autograd/rule.py" in line for line in lines)


@pytest.mark.parametrize("full", [False, True])
def test_an_error_of_one_process_shows_the_frames_of_the_program(full: bool, tmp_path: Path) -> None:
    start = "gm.init('gloo')\ntrain()"
    lines = printed(tmp_path, start, verb="all_gather(x, dim=5)", full=full)
    assert any("dim is out of range" in line for line in lines)
    assert any("verbs/collectives.py" in line for line in lines) == full
    assert any("in step" in line for line in lines)


def test_other_errors_are_shown_as_they_are(tmp_path: Path) -> None:
    lines = printed(tmp_path, "gm.init('gloo')\ntorch.nn.Linear(2, 2)(torch.ones(3))", verb="barrier()")
    assert any("linear.py" in line for line in lines)
    assert "GRADMESH_TRACEBACK" not in lines[-1]

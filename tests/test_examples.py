"""Every example runs, at a size at which it takes seconds; one that is not listed here is missed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seldom import seldom

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

SMALL = {
    "clip_digits.py": ["--batch", "30", "--chunk", "6", "--steps", "3"],
    "fno_burgers.py": ["--epochs", "1", "--samples", "16", "--points", "34"],
    "forces_slab.py": ["--side", "3", "--structures", "2", "--steps", "3", "--md", "2"],
    "lm_chars.py": ["--steps", "2"],
    "ring_attention.py": ["--steps", "3", "--length", "26"],
    "sharded.py": ["--steps", "2"],
}
"""What makes each example small."""

SAYS = {
    "clip_digits.py": r"batch 30: loss [\d.]+",
    "fno_burgers.py": r"loss [\d.]+ in 1 steps",
    "forces_slab.py": r"loss [\d.]+ -> [\d.]+ in 3 steps",
    "lm_chars.py": r"step +1  loss [\d.]+",
    "ring_attention.py": r"loss [\d.]+ -> [\d.]+; the furthest step differs by",
    "sharded.py": r"verbs: loss [\d.]+ -> [\d.]+; the furthest step differs by",
}
"""What it prints of its end."""


def run(command: list[str]) -> str:
    paths = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *command],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_short_and_listed() -> None:
    lengths = {file.name: len(file.read_text().splitlines()) for file in EXAMPLES.glob("*.py")}
    assert set(lengths) == set(SMALL) == set(SAYS)
    assert max(lengths.values()) < 150


@pytest.mark.parametrize("name", seldom(SMALL, ["clip_digits.py", "lm_chars.py", "sharded.py"]))
def test_an_example_runs_on_local_ranks(name: str) -> None:
    said = run([str(EXAMPLES / name), *SMALL[name], "--ranks", "2", "--backend", "threads"])
    assert re.search(SAYS[name], said), said


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("name", SMALL)
def test_an_example_runs_under_torchrun_with_the_same_figures(name: str, backend: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    here = run([str(EXAMPLES / name), *SMALL[name], "--ranks", "1", "--backend", "threads"])
    said = run([*torchrun, str(EXAMPLES / name), *SMALL[name], "--backend", backend])
    (expected,), (found,) = (re.findall(SAYS[name], each) for each in (here, said))
    assert found == expected

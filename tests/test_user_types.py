"""Type checkers see what a user's file gets from the installed package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REVEALED = {
    "gm.all_gather(x)": "Tensor",
    "gm.all_reduce(x, dst=gm.I)": "Tensor",
    'gm.all_gather({"a": x})': "dict[str, Tensor]",
    "gm.all_gather(x, async_op=True).wait()": "Tensor",
    "gm.nn.clip_loss(x, x, x)": "Tensor",
    'gm.launch(lambda: 1.0, 2, backend="threads")': "list[float]",
}
HEAD = "import gradmesh as gm\nfrom torch import Tensor\n\ndef step(x: Tensor) -> None:\n"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "user.py"
    path.write_text(HEAD + "".join(f"    reveal_type({said})\n" for said in REVEALED))
    return path


def test_mypy_infers_the_return_types_of_the_verbs(program: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", program.name]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=False)
    revealed = [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed type" in line]
    plain = [text.replace("torch._tensor.", "").replace("builtins.", "") for text in revealed]
    assert (done.returncode, plain) == (0, list(REVEALED.values())), done.stdout


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_infers_the_return_types_of_the_verbs(program: Path) -> None:
    command = ["pyright", "--pythonpath", sys.executable, program.name]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=False)
    revealed = [
        line.rsplit(' is "', 1)[1].rstrip('"') for line in done.stdout.splitlines() if "Type of" in line
    ]
    assert (done.returncode, revealed) == (0, list(REVEALED.values())), done.stdout

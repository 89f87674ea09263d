"""An environment of its own for each release of transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


class Environment:
    """Python with a release of transformers; it is made where it is not there.

    Args:
        name: the release of transformers, or of the environment where `packages` says what is in it.
        folder: of all environments.
        packages: a file of requirements.
        alone: a file of those that are installed behind these, without what they require.
    """

    def __init__(
        self, name: str, folder: Path, packages: Path | None = None, alone: Path | None = None
    ) -> None:
        self.python = folder / name / "bin" / "python"
        done = folder / name / "ready"
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
            own = ["-r", str(packages)] if packages else [f"transformers=={name}", "-r", str(REQUIREMENTS)]
            wanted = [f"torch=={TORCH}", *own]
            install = [str(self.python), "-m", "pip", "install", "-q"]
            subprocess.run([*install, *wanted], check=True)
            if alone is not None:
                subprocess.run(
                    [*install, "--no-deps", "--no-build-isolation", "-r", str(alone)],
                    check=True,
                    env={**os.environ, "DS_BUILD_OPS": "0"},  # no compiled operators
                )
            done.touch()

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start Python, with this copy of gradmesh, in the repository's root."""
        quiet = {
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        given = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **quiet, **variables}
        return subprocess.Popen(
            [str(self.python), *arguments],
            cwd=ROOT,
            env={**os.environ, **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

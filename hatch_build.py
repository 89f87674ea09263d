"""Builds the data path of the shm backend in C, if this machine can: src/gradmesh/backends/shm/native.c.

Without Linux, a C compiler or Python's headers the wheel is pure Python, and so is the backend's data path.
GRADMESH_NATIVE=0 in the environment of the build asks for that, GRADMESH_NATIVE=1 makes it an error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/gradmesh/backends/shm/native.c")
LIBRARY = "_native.abi3.so"
# No floating-point option: sums have the bits of torch's.
OPTIONS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")


def compile_native(root: Path, into: Path, options: tuple[str, ...] = OPTIONS) -> str | None:
    """Compile it; the reason if it cannot be done."""
    if not sys.platform.startswith("linux"):
        return f"the shm backend needs Linux, not {sys.platform}"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc") or ["cc"]
    compiler = compiler if shutil.which(compiler[0]) else ["cc"]
    if shutil.which(compiler[0]) is None:
        return "no C compiler"
    headers = f"-I{sysconfig.get_path('include')}"
    command = [*compiler, *options, headers, str(root / SOURCE), "-o", str(into)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if made.returncode == 0 else f"{shlex.join(command)} failed:\n{made.stderr}"


class NativePath(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled file to a wheel, which is then for all Pythons from 3.11 on this kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds; an editable install gets the file beside its source."""
        root = Path(self.root)
        wanted = os.environ.get("GRADMESH_NATIVE", "")
        editable = version == "editable"
        # Not in the source tree, which may not be writable.
        self._folder = Path(tempfile.mkdtemp())
        into = (root / SOURCE.parent if editable else self._folder) / LIBRARY
        problem = "GRADMESH_NATIVE=0" if wanted == "0" else compile_native(root, into)
        if problem is not None:
            into.unlink(missing_ok=True)
            if wanted == "1":
                raise RuntimeError(f"the data path in C cannot be built: {problem}")
            self.app.display_warning(f"gradmesh without its data path in C: {problem}")
        elif not editable:
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"
            build_data["force_include"][str(into)] = f"gradmesh/backends/shm/{LIBRARY}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Called when it has built."""
        shutil.rmtree(self._folder, ignore_errors=True)

"""Builds the C++ part of the simulated device, once for each torch and source, into `build/simulated_device`."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

__all__ = ["module", "why_not"]

_SOURCE = Path(__file__).with_name("device.cpp")
_BUILDS = Path(__file__).parents[2] / "build" / "simulated_device"
_NAME = "_simulated_device"
_SUPPORTED = ((2, 11), (2, 15))


def why_not() -> str | None:
    """Why the device is not available here, as the reason of a skip; None: it is."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not _SUPPORTED[0] <= (major, minor) <= _SUPPORTED[1]:
        return f"the simulated device supports torch 2.11 to 2.15, not {torch.__version__}"
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        return f"no C++ compiler: {cpp_extension.get_cxx_compiler()} was not found"
    if torch.cuda.is_available():
        return "torch has another accelerator here"
    return None


@functools.cache
def module() -> ModuleType:
    """The extension module, built if need be."""
    text = _SOURCE.read_bytes() + torch.__version__.encode() + str(sysconfig.get_config_var("SOABI")).encode()
    folder = _BUILDS / hashlib.sha256(text).hexdigest()[:16]
    library = folder / f"{_NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _compile(library: Path) -> None:
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()
    unfinished = library.with_suffix(".part")
    command = [
        *(cpp_extension.get_cxx_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"),
        *(f"-isystem{path}" for path in includes),
        *(str(_SOURCE), "-o", str(unfinished)),
        *(f"-L{path}" for path in libraries),
        *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"the simulated device does not compile:\n{' '.join(command)}\n{done.stderr[-4000:]}"
        )
    unfinished.rename(library)

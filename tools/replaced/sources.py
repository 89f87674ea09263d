"""Where the files of a repository come from, and a copy of them with replaced definitions."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple
from zipfile import ZipFile

from tools.models.environments import ROOT, Environment
from tools.replaced.own_tests import PYTEST, swap

TEXTS = Path(__file__).parent / "texts"
_PACKAGES, _ALONE = (
    ROOT / "tools/libraries" / f"{name}.txt" for name in ("requirements", "without_dependencies")
)
RELEASES = dict(
    re.findall(r"^([\w-]+)(?:\[\w+\])?==(.+)$", _PACKAGES.read_text() + _ALONE.read_text(), re.MULTILINE)
)


class Replaced(NamedTuple):
    """A file, the names in it that go, and the text that stands for them."""

    path: str  # below the folder that is imported from
    text: str  # a file of `texts`
    gone: tuple[str, ...] = ()  # empty: the whole file goes


@dataclass(frozen=True)
class Source:
    """Where files come from.

    Attributes:
        repository: owner and name on GitHub.
        commit: the one of the tests, and of the files where there is no release.
        release: a release on the package index, "name==version"; empty: the files are those of the commit.
        inside: the folder of the repository that is imported from.
        parts: the folders of the repository that are needed; all of `inside` where empty.
        swaps: texts in the files and what stands for them, before and after.
    """

    repository: str
    commit: str = ""
    release: str = ""
    inside: str = "."
    parts: tuple[str, ...] = ()
    swaps: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """What the table shows."""
        return self.release.replace("==", " ") or f"{self.repository} {self.commit[:10]}"


class Place:
    """The folder of all environments and copies.

    Args:
        folder: where they are, or are made.
        clones: a folder with `owner+name/repo`, clones that exist; others are cloned.
    """

    def __init__(self, folder: Path, clones: Path | None = None) -> None:
        self.folder, self.clones = folder.resolve(), clones
        self.environment = Environment("libraries", self.folder, _PACKAGES, _ALONE)

    def packages(self, names: Sequence[str]) -> Path:
        """A folder with further packages, which hold no torch."""
        into = self.folder / "replaced" / "packages"
        for name in names:
            done = into / f"{name}.ready"
            if not done.exists():
                alone = ["--no-deps"] if name not in PYTEST else []
                command = [str(self.environment.python), "-m", "pip", "install", "-q", *alone]
                subprocess.run([*command, "--target", str(into), name], check=True)
                done.touch()
        return into

    def clone(self, repository: str) -> Path:
        """The git folder of a repository."""
        name = repository.replace("/", "+")
        if self.clones is not None and (self.clones / name / "repo").exists():
            return self.clones / name / "repo"
        into = self.folder / "replaced" / "clones" / name
        if not into.exists():
            where = f"https://github.com/{repository}"
            subprocess.run(["git", "clone", "-q", "--bare", where, str(into)], check=True)
        return into

    def archive(self, source: Source, paths: Sequence[str], into: Path) -> None:
        """Write paths of a repository, at its commit, into an empty folder."""
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True, exist_ok=True)
        git = ["git", "-C", str(self.clone(source.repository)), "archive", source.commit, *paths]
        with subprocess.Popen(git, stdout=subprocess.PIPE) as packed:
            subprocess.run(["tar", "-x", "-C", str(into)], stdin=packed.stdout, check=True)

    def files(self, name: str, source: Source, after: Sequence[Replaced] | None) -> Path:
        """A new copy of the files, from which they can be imported; with the replacement where there is one."""
        into = self.folder / "replaced" / name / ("before" if after is None else "after")
        shutil.rmtree(into, ignore_errors=True)
        shutil.rmtree(into.parent / f"tests-{into.name}", ignore_errors=True)
        into.mkdir(parents=True)
        if not source.release:
            self.archive(source, source.parts or (source.inside,), into)
        elif source.parts and (own := self._installed(source)) is not None:
            for part in source.parts:
                shutil.copytree(own / part, into / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            self._unpacked(source, into)
        root = into / source.inside if not source.release else into
        swap(into, source.swaps)
        for each in after or ():
            path = root / each.path
            path.write_text(instead(path.read_text(), each))
        return root

    def _installed(self, source: Source) -> Path | None:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        done = subprocess.run(
            [str(self.environment.python), "-c", code], check=True, capture_output=True, text=True
        )
        own = Path(done.stdout.strip())
        return own if (own / source.parts[0]).exists() else None

    def _unpacked(self, source: Source, into: Path) -> None:
        wheels = self.folder / "replaced" / "wheels"
        stem = source.release.split("==")[0].replace("-", "_")
        if not list(wheels.glob(f"{stem}-*.whl")):
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
            subprocess.run([*command, "--only-binary", ":all:", source.release], check=True)
        with ZipFile(next(wheels.glob(f"{stem}-*.whl"))) as wheel:
            wheel.extractall(into)

    def start(
        self,
        *arguments: str,
        paths: Sequence[Path],
        cwd: Path,
        out: int | IO[str] = subprocess.PIPE,
        err: int = subprocess.PIPE,
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start Python in the environment, with these folders before the installed packages."""
        every = os.pathsep.join(map(str, (*paths, ROOT / "src", ROOT)))
        given = {
            "PYTHONPATH": every,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [str(self.environment.python), *arguments]
        env = {**os.environ, **given, **variables}
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err, text=True)

    def python(self, *arguments: str, paths: Sequence[Path], cwd: Path, limit: float) -> tuple[str, str]:
        """Run it: what it prints."""
        with self.start(*arguments, paths=paths, cwd=cwd) as process:
            try:
                return process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                return "", f"not over after {limit:g} seconds"


def instead(text: str, replaced: Replaced) -> str:
    """A file's text with the names that go replaced by ours, where the first of them stood."""
    ours = (TEXTS / replaced.text).read_text()
    return swapped(text, replaced.gone, ours) if replaced.gone else ours


def swapped(text: str, gone: Sequence[str], ours: str) -> str:
    r"""A module's text with definitions replaced.

    >>> swapped("a = 1\ndef f():\n    return 2\nclass G:\n    pass\nb = 3\n", ["f", "G"], "f = G = None\n")
    'a = 1\nf = G = None\nb = 3\n'
    """
    lines, left, first = text.splitlines(keepends=True), set(gone), None
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in gone:
            left.discard(node.name)
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            del lines[first : node.end_lineno]
    if first is None or left:
        raise ValueError(f"not found: {', '.join(sorted(left))}")
    return "".join([*lines[:first], ours, *lines[first:]])

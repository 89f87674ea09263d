"""Where the files of a repository come from, a copy of them with replaced definitions, and its own tests."""

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
from typing import NamedTuple
from zipfile import ZipFile

from tools.models.environments import ROOT, Environment

TEXTS = Path(__file__).parent / "texts"
PYTEST = ("pytest", "pytest-mock", "pytest-timeout")
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
    """

    repository: str
    commit: str = ""
    release: str = ""
    inside: str = "."
    parts: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What the table shows."""
        return self.release.replace("==", " ") or f"{self.repository} {self.commit[:10]}"


@dataclass(frozen=True)
class Tests:
    """Tests of a repository that run on CPUs.

    Attributes:
        paths: files and folders of the repository, at its commit.
        run: arguments of pytest.
        inside: the folder to run in.
        packages: what they need besides pytest.
    """

    paths: tuple[str, ...]
    run: tuple[str, ...]
    inside: str = "."
    packages: tuple[str, ...] = ()


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
        """Write paths of a repository, at its commit, into a folder."""
        into.mkdir(parents=True, exist_ok=True)
        git = ["git", "-C", str(self.clone(source.repository)), "archive", source.commit, *paths]
        with subprocess.Popen(git, stdout=subprocess.PIPE) as packed:
            subprocess.run(["tar", "-x", "-C", str(into)], stdin=packed.stdout, check=True)

    def files(self, name: str, source: Source, after: Sequence[Replaced] | None) -> Path:
        """A new copy of the files, from which they can be imported; with the replacement where there is one."""
        into = self.folder / "replaced" / name / ("before" if after is None else "after")
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        if not source.release:
            self.archive(source, source.parts or (source.inside,), into)
        elif source.parts and (own := self._installed(source)) is not None:
            for part in source.parts:
                shutil.copytree(own / part, into / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            self._unpacked(source, into)
        root = into / source.inside if not source.release else into
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

    def python(self, *arguments: str, paths: Sequence[Path], cwd: Path, limit: float) -> tuple[str, str]:
        """Run Python in the environment, with these folders before the installed packages."""
        every = os.pathsep.join(map(str, (*paths, ROOT / "src", ROOT)))
        given = {
            "PYTHONPATH": every,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [str(self.environment.python), *arguments]
        try:
            done = subprocess.run(
                command, cwd=cwd, env={**os.environ, **given}, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return "", f"not over after {limit:g} seconds"
        return done.stdout, done.stderr

    def tested(self, name: str, source: Source, tests: Tests, root: Path) -> str:
        """The result of a repository's own tests, with the files of a folder."""
        into = self.folder / "replaced" / name / "tests"
        if not into.exists():
            self.archive(source, tests.paths, into)
        own = self.packages([*PYTEST, *tests.packages])
        run = ("-m", "pytest", "-q", "-p", "images", "-p", "no:cacheprovider", "--timeout=120", *tests.run)
        images = (
            ROOT / "tools/libraries/programs"
        )  # torchvision, whose wheel needs a build of torch with CUDA
        out, error = self.python(*run, paths=(root, own, images), cwd=into / tests.inside, limit=900)
        (root.parent / f"tests-{root.name}.txt").write_text(out + error)
        return counts(out)


def counts(out: str) -> str:
    r"""The numbers of the last line of pytest.

    >>> counts("...\n===== 2 failed, 3 passed, 1 warning in 0.02s =====")
    '3 passed, 2 failed'
    """
    numbers = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", out[-400:])
    }
    if "error" in numbers:
        numbers["failed"] = numbers.get("failed", 0) + numbers.pop("error")
    kept = [f"{numbers[word]} {word}" for word in ("passed", "failed", "skipped") if word in numbers]
    return ", ".join(kept) or "did not run"


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

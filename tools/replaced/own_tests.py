"""A repository's own tests: which run on CPUs, with what they are given, and their results."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.models.environments import ROOT

if TYPE_CHECKING:
    from tools.replaced.sources import Place, Source

PYTEST = ("pytest", "pytest-mock", "pytest-timeout")
STANDINS = Path(__file__).parent / "standins"
_LIMIT = 1800.0
_DIFFERENCE = 0.05  # of bfloat16


@dataclass(frozen=True)
class Tests:
    """Tests of a repository that run on CPUs, given the same before and after.

    Attributes:
        paths: files and folders of the repository, at its commit.
        run: arguments of pytest.
        inside: the folder to run in.
        packages: what they need besides pytest.
        ranks: processes of pytest, each of them a rank.
        swaps: texts in `paths` and what stands for them.
        standins: folders of `standins` before the installed packages.
        variables: environment variables.
        scripts: programs that print differences, which run instead of pytest.
    """

    paths: tuple[str, ...]
    run: tuple[str, ...] = ()
    inside: str = "."
    packages: tuple[str, ...] = ()
    ranks: int = 1
    swaps: tuple[tuple[str, str], ...] = ()
    standins: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    scripts: tuple[str, ...] = ()


def tested(place: Place, name: str, source: Source, tests: Tests, root: Path) -> str:
    """The results with the files of a folder, as text."""
    folder = place.folder / "replaced" / name / "tests"
    place.archive(source, tests.paths, folder)
    swap(folder, tests.swaps)
    own = place.packages([*PYTEST, *tests.packages])
    images = ROOT / "tools/libraries/programs"  # torchvision, whose wheel needs a build of torch with CUDA
    paths = (*(STANDINS / each for each in tests.standins), root, own, images, STANDINS)
    log = root.parent / f"tests-{root.name}"
    log.mkdir()
    given = ("-q", "-p", "images", "-p", "outcomes", "-p", "no:cacheprovider", "--timeout=900", *tests.run)
    outcomes: dict[str, set[str]] = {}
    for script in tests.scripts or ("",):
        command = [script] if script else ["-m", "pytest", *given]
        at = log / Path(script).stem
        at.mkdir(exist_ok=True)
        codes = _on_ranks(place, command, tests, paths, folder / tests.inside, at)
        if script:
            outs = [(at / f"{rank}.txt").read_text() for rank in range(tests.ranks)]
            outcomes[script] = {"passed" if not any(codes) and agrees("".join(outs)) else "failed"}
    if not tests.scripts:
        outcomes = merged([log / f"{rank}.outcomes" for rank in range(tests.ranks)])
    return counts(outcomes)


def _on_ranks(
    place: Place, command: Sequence[str], tests: Tests, paths: Sequence[Path], cwd: Path, log: Path
) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(tests.ranks):
        variables = {"OUTCOMES": str(log / f"{rank}.outcomes"), **dict(tests.variables)}
        if tests.ranks > 1:
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_RANK": rank, "WORLD_SIZE": tests.ranks}
            variables |= rendezvous | {key: str(value) for key, value in ranks.items()}
        with (log / f"{rank}.txt").open("a") as out:
            processes.append(
                place.start(*command, paths=paths, cwd=cwd, out=out, err=subprocess.STDOUT, **variables)
            )
    until = time.monotonic() + _LIMIT
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


def swap(folder: Path, swaps: Sequence[tuple[str, str]]) -> None:
    """Replace texts in the files of a folder; each of them has to occur."""
    left = {old for old, _ in swaps}
    for file in sorted(folder.rglob("*.py")) if swaps else ():
        text = file.read_text()
        left -= {old for old in left if old in text}
        for old, new in swaps:
            text = text.replace(old, new)
        file.write_text(text)
    if left:
        raise ValueError(f"not found: {', '.join(sorted(left))}")


def merged(files: Sequence[Path]) -> dict[str, set[str]]:
    """Each test's outcomes on all ranks; it failed on a rank where it started and did not end."""
    outcomes: dict[str, set[str]] = {}
    for file in files:
        found = dict(line.split(" ", 1)[::-1] for line in _lines(file))
        for test, outcome in found.items():
            outcomes.setdefault(test, set()).add("failed" if outcome == "started" else outcome)
    return outcomes


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def counts(outcomes: dict[str, set[str]]) -> str:
    """The numbers of outcomes; a test that failed on one rank failed.

    >>> counts({"a": {"passed"}, "b": {"passed", "failed"}, "c": {"skipped"}})
    '1 passed, 1 failed, 1 skipped'
    """
    order = ("failed", "passed", "skipped")
    worst = [next(one for one in order if one in found) for found in outcomes.values() if found & set(order)]
    numbers = {word: worst.count(word) for word in ("passed", "failed", "skipped")}
    return ", ".join(f"{number} {word}" for word, number in numbers.items() if number) or "did not run"


def agrees(out: str) -> bool:
    r"""Whether a script printed no large difference.

    >>> agrees("out diff:\n[0] max 0.0039, mean 1e-05\nlocal_dq:\n[0] max 4, mean 1\n")
    True
    >>> agrees("out diff:\n[0] max nan, mean nan\n"), agrees("no differences\n")
    (False, False)
    """
    parts = re.split(r"^(\w[\w ]*):", out, flags=re.MULTILINE)
    values = [
        float(value)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
        if "diff" in title
        for value in re.findall(r"max ([\w.+-]+)", text)
    ]
    return bool(values) and all(value < _DIFFERENCE for value in values)

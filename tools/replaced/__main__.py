"""Replace differentiable collectives of other libraries by gradmesh, and compare both with one process.

$ python -m tools.replaced                          # all; some twenty minutes on two cores, and the environment
$ python -m tools.replaced lightly DisCo-CLIP       # these
$ python -m tools.replaced --environments FOLDER    # where the environment of tools.libraries is, and the copies
$ python -m tools.replaced --clones FOLDER          # clones that exist, as owner+name/repo; others are cloned
$ python -m tools.replaced --only tests lightly     # its own tests, and nothing else
$ python -m tools.replaced --page                   # the page alone, of what was measured
$ python -m tools.replaced fairchem/core            # a folder of fairchem: the lines and names that gradmesh replaces

The files of each repository are copied, and definitions in the copy are replaced by a text of `tools/replaced/texts`.
Its own tests run with both, and each function runs on three ranks with both, over Gloo and over shared memory. Values,
gradients and second derivatives are compared with one process, in double precision.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.models.environments import ROOT, TORCH
from tools.pages import parser_of
from tools.replaced import lines
from tools.replaced.own_tests import tested
from tools.replaced.page import page
from tools.replaced.repositories import BY_NAME, REPOSITORIES
from tools.replaced.repository import Repository
from tools.replaced.sources import Place

DATA, PAGE = ROOT / "docs/reports/replaced.json", ROOT / "docs/replaced.md"
BACKENDS = {"before": ("gloo", "shm"), "after": ("gloo", "shm")}
_LIMIT = 1200.0


def measured(repository: Repository, place: Place) -> dict[str, Any]:
    """What is found of its functions."""
    found: dict[str, dict[str, Any]] = {}
    for side, backends in BACKENDS.items():
        root = place.files(repository.name, repository.source, repository.files if side == "after" else None)
        more = place.packages(repository.packages)
        for backend in backends:
            wanted = raising(found["before gloo"]) if (side, backend) == ("before", "shm") else []
            out, error = place.python(
                "-m",
                "tools.replaced.ranks",
                repository.name,
                str(root),
                backend,
                side,
                *wanted,
                paths=(root, more),
                cwd=ROOT,
                limit=_LIMIT,
            )
            last = out.strip().splitlines()[-1:] or [""]
            if not last[0].startswith("{"):
                raise RuntimeError(f"{repository.name} {side} {backend}: {out[-500:]} {error[-3000:]}")
            found[f"{side} {backend}"] = json.loads(last[0])
    functions = {case.name: {run: found[run][case.name] for run in found} for case in repository.cases}
    return {"functions": functions}


def own_tests(repository: Repository, place: Place, row: dict[str, Any]) -> None:
    """Count the lines of its files, and run its own tests, if there are any, before and after."""
    for side, replaced in (("before", None), ("after", repository.files)):
        root = place.files(repository.name, repository.source, replaced)
        row[side]["lines"] = [len((root / each.path).read_text().splitlines()) for each in repository.files]
        tests = repository.tests
        row[side]["tests"] = tested(place, repository.name, repository.source, tests, root) if tests else ""


def raising(found: dict[str, Any]) -> list[str]:
    """The functions and situations in which a run raises; "none", if there are none."""
    return [
        f"{name}|{situation}"
        for name, each in found.items()
        for situation, answer in each.items()
        if "raises" in answer or isinstance(answer.get("second"), str)
    ] or ["none"]


def _stored() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(DATA.read_text())["rows"]} if DATA.exists() else {}


def _store(row: dict[str, Any]) -> None:
    """Among the other rows, which another process may have measured since."""
    rows = {**_stored(), row["name"]: row}
    data = {"torch": TORCH, "rows": [rows[each.name] for each in REPOSITORIES if each.name in rows]}
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure, and write the page."""
    parser = parser_of(__doc__, "python -m tools.replaced")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BY_NAME)}; or a folder of fairchem/core"
    )
    parser.add_argument("--environments", type=Path, default=ROOT / "build/models")
    parser.add_argument("--clones", type=Path)
    parser.add_argument("--only", choices=("functions", "tests"))
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args(arguments)
    folders = [Path(name) for name in given.names if name not in BY_NAME]
    if folders:
        return lines.show(folders[0])
    for repository in () if given.page else REPOSITORIES:
        if not given.names or repository.name in given.names:
            row, place = _stored().get(repository.name), Place(given.environments, given.clones)
            if row is None or given.only != "tests":
                row = (row or {"before": {"tests": ""}, "after": {"tests": ""}}) | measured(repository, place)
            row |= {
                "name": repository.name,
                "source": repository.source.label,
                "files": [each.path for each in repository.files],
                "left": repository.left,
            }
            _store(row)
            if given.only != "functions" or "lines" not in row["before"]:
                own_tests(repository, place, row)
                _store(row)
            print(f"{repository.name}: {row['before']['tests']} / {row['after']['tests']}", flush=True)
    (into or PAGE).write_text(page({"torch": TORCH, "rows": list(_stored().values())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Check the parallel plans of transformers' models, release by release.

$ python -m tools.models                              # all cells; an hour on two cores
$ python -m tools.models --only olmoe ep tp           # these families and plans
$ python -m tools.models --environments FOLDER        # where the environments are, or are made
$ python -m tools.models --inject 20 --seed 1         # faults in cells that were right, and which are found
$ python -m tools.models --page                       # the page alone, of what was measured

Cells are measured one by one, and written to docs/reports/models.json and docs/models.md one by one. The exit status
is 1 where a cell of the newest release is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.models.cells import RELEASES, Row, cells, checked
from tools.models.environments import ROOT, TORCH, Environment
from tools.models.inject import injected
from tools.models.page import page
from tools.pages import parser_of

DATA = ROOT / "docs/reports/models.json"
PAGE = ROOT / "docs/models.md"


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure, and write the page."""
    parser = parser_of(__doc__, "python -m tools.models")
    parser.add_argument("--releases", nargs="+", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME")
    parser.add_argument("--environments", type=Path, default=ROOT / "build/models")
    parser.add_argument("--inject", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args(arguments)
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {"torch": TORCH, "rows": []}
    checkpoints = given.environments / "checkpoints"
    status = 0
    if given.inject:
        data["injected"] = injected(data["rows"], given.inject, given.seed, given.environments)
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    for cell in () if given.page or given.inject else cells(given.releases, given.only):
        row = checked(cell, Environment(cell.release, given.environments), checkpoints)
        print(f"{cell!s:32} {row.verdict:10} {row.seconds:6.1f} s  {_said(row)}", flush=True)
        status |= row.verdict == "wrong" and cell.release == max(RELEASES, key=_order)
        data["rows"] = with_row(data["rows"], row)
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    (into or PAGE).write_text(page(data))
    return int(status)


def with_row(rows: Sequence[dict[str, Any]], row: Row) -> list[dict[str, Any]]:
    """The rows with a new one in the place of that of its cell."""
    new = {**asdict(row.cell), **asdict(row)}
    del new["cell"]
    new["seconds"] = round(row.seconds, 1)
    if row.parity is not None:
        new["parity"]["wrong"] = row.parity.wrong
    key = [new[name] for name in ("release", "family", "plan")]
    others = [each for each in rows if [each["release"], each["family"], each["plan"]] != key]
    return sorted([*others, new], key=lambda each: (_order(each["release"]), each["family"], each["plan"]))


def _order(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _said(row: Row) -> str:
    wrong = f", {'confirmed' if row.parity.wrong else row.parity}" if row.parity else ""
    found = ", ".join(each["rule"] for each in row.findings)
    return (row.error or found + wrong)[:200]


if __name__ == "__main__":
    sys.exit(main())

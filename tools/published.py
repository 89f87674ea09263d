"""Check scripts with the silent bugs of three published collections, and say which are named and why others are not.

$ python -m tools.published                          # all of them
$ python -m tools.published --only norm count        # those whose name has one of these
$ python -m tools.report docs/reports/published.md   # all of them, and the tables into the page
"""

from __future__ import annotations

import contextlib
import csv
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradmesh.checker.findings import Verdict
from tests.scripts import MARK, RIGHT, WRONG, Script, read
from tools.checked import checked
from tools.pages import machine, mark, parser_of, put, table

HERE = Path(__file__).parents[1] / "tests" / "published"


@dataclass(frozen=True)
class Bug:
    """One bug of a collection."""

    report: str  # where it is reported
    what: str
    script: str  # the name of a script of tests/published or tests/scripts; "": none runs on CPUs
    why: str  # why there is no script, or why it is not named; "": it is


def collections() -> dict[str, list[Bug]]:
    """The bugs of tests/published/bugs.csv by collection; TTrace's have their one-line descriptions or an issue."""
    found: dict[str, list[Bug]] = {}
    with open(HERE / "bugs.csv", newline="") as lines:
        for collection, *words in list(csv.reader(lines))[1:]:
            found.setdefault(collection, []).append(Bug(*words))
    return found


def sources(text: str) -> tuple[str, str]:
    """A script of tests/published as it is, and the right one."""
    right = re.sub(rf"(?m)^.*{MARK}$\n", "", text)
    return text, re.sub(r"(?m)^(\s*)# right: ?", r"\1", right)


def scripts_of(bug: Bug, folder: Path) -> tuple[Script, Script | None]:
    """The wrong script, and the right one if there is one."""
    if bug.script in WRONG:
        script = WRONG[bug.script]
        return script, RIGHT[script.twin] if script.twin else None
    path, twin = HERE / f"{bug.script}.py", folder / f"{bug.script}.py"
    twin.write_text(sources(path.read_text())[1])
    return read(path), read(twin)


@dataclass(frozen=True)
class Row:
    """What was found for one bug."""

    bug: Bug
    wrong: tuple[str, ...]  # the rules of the findings
    at_line: bool  # whether one of them points at the fault
    right: tuple[str, ...] | None  # of the right script
    expected: set[str | None]  # the rules that are true of the wrong script

    @property
    def named(self) -> bool:
        """Whether the wrong script gets a finding that is true of it, and the right one does not get it."""
        return bool(self.expected.intersection(self.wrong) - {*(self.right or ())})


def row_of(bug: Bug, folder: Path) -> Row:
    """Check the scripts of a bug."""
    wrong, right = scripts_of(bug, folder)
    verdict = checked(wrong)
    places = [place for one in verdict.findings for place in (one.at, one.began, one.received)]
    return Row(
        bug,
        _rules(verdict),
        any(place is not None and place.line in wrong.lines for place in places),
        None if right is None else _rules(checked(right)),
        {wrong.expected, *wrong.also} - {None},
    )


def _rules(verdict: Verdict) -> tuple[str, ...]:
    return tuple(dict.fromkeys(finding.rule.id for finding in verdict.findings))


def _rows(bugs: Sequence[Bug], only: Sequence[str]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for bug in bugs:
            if bug.script and (not only or any(part in bug.script for part in only)):
                row = row_of(bug, Path(folder))
                said = (
                    f"{'named' if row.named else 'not named':9} {bug.script:44} {' '.join(row.wrong) or '-'}"
                )
                print(f"{said}; right: {' '.join(row.right or ()) or '-'}", flush=True)
                yield row


def _section(name: str, bugs: Sequence[Bug], rows: Sequence[Row]) -> str:
    of = {row.bug: row for row in rows}
    lines = []
    for bug in bugs:
        row = of.get(bug)
        if row is None:
            lines.append([bug.report, bug.what, "", "", "", "", bug.why])
            continue
        why = "" if row.named else bug.why or "not known"
        right = "no twin" if row.right is None else " ".join(row.right) or "nothing"
        found = " ".join(row.wrong) or "nothing"
        lines.append(
            [bug.report, bug.what, f"`{bug.script}`", found, "yes" if row.at_line else "", right, why]
        )
    accused = sum(bool(row.right) for row in rows)
    named, at_line = sum(row.named for row in rows), sum(row.at_line for row in rows)
    twins = sum(row.right is not None for row in rows)
    said = (
        f"{len(rows)} scripts: {named} are named, {at_line} with a line of the fault; of {twins} right twins {accused} "
        "are accused."
    )
    heads = "report | fault | script | found | line | found in the right script | why not"
    return f"### {name}\n\n{said}\n\n{table(heads, lines)}"


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Check what is asked for; 1 where a bug without a reason is not named."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parsed = parser.parse_args(arguments)
    found = {name: list(_rows(bugs, parsed.only)) for name, bugs in collections().items()}
    sections = [_section(name, bugs, found[name]) for name, bugs in collections().items()]
    if into is not None and not parsed.only:
        put(into, mark("docs/reports/published.md"), "\n\n".join([f"{machine()}.", *sections]))
    return int(any(not row.named and not row.bug.why for rows in found.values() for row in rows))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())

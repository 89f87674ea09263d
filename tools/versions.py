"""What the tests did on other versions of torch and Python.

$ python -m tools.report docs/versions.md build/*-*.xml

`make torch VERSION=2.15.0` leaves its report in build/torch-2.15.0.xml, `make python VERSION=3.14` in
build/python-3.14.xml. A report build/torch-2.15.0-again.xml, of tests that ran again after a correction, takes the
place of what the first one says about them. Rows of versions without a report stay as they are in the page.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.pages import END, mark, parser_of, put

BEGIN = mark("docs/versions.md", "build/*-*.xml")
_AGAIN = "-again"
_ORDER = ("skipped", "passed", "failed")


@dataclass(frozen=True)
class Report:
    """One run of the tests, and of those that ran again."""

    version: str  # of torch, or "Python 3.14"
    day: str  # when it was
    outcomes: Mapping[
        str, str
    ]  # each test's: "passed", "skipped", or "failed", also where it could not be set up
    again: int = 0  # how many ran again

    def count(self, outcome: str) -> int:
        """The number of tests with an outcome."""
        return sum(each == outcome for each in self.outcomes.values())

    @property
    def failed(self) -> list[str]:
        """The names of those that failed."""
        return sorted(name for name, outcome in self.outcomes.items() if outcome == "failed")


def read(path: Path) -> Report:
    """A report as pytest writes it, the version in the file's name."""
    suites = list(ET.parse(path).getroot().iter("testsuite"))
    outcomes: dict[str, str] = {}
    for case in (case for suite in suites for case in suite.iter("testcase")):
        file, test = case.get("classname", "").replace(".", "/"), case.get("name", "")
        # A file that cannot be imported has no class.
        name = f"{file}.py::{test}" if file else f"{test.replace('.', '/')}.py"
        wrong = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if wrong else "passed" if case.find("skipped") is None else "skipped"
        outcomes[name] = max(outcome, outcomes.get(name, outcome), key=_ORDER.index)
    version = path.stem.removeprefix("torch-").replace("python-", "Python ")
    return Report(version, suites[0].get("timestamp", "")[:10], outcomes)


def joined(reports: Sequence[Report]) -> list[Report]:
    """The reports in the order of the versions, each with what ran again."""
    first = {each.version: each for each in reports if not each.version.endswith(_AGAIN)}
    for each in reports:
        if each.version.endswith(_AGAIN):
            before = first[each.version.removesuffix(_AGAIN)]
            files = {name.partition("::")[0] for name in each.outcomes}
            outcomes = {name: outcome for name, outcome in before.outcomes.items() if name not in files}
            outcomes |= each.outcomes
            first[before.version] = Report(before.version, each.day, outcomes, len(each.outcomes))
    return list(first.values())


def table(reports: Sequence[Report], page: str = "") -> str:
    """The reports as Markdown, a row each, and what failed; other versions as in the page."""
    every = joined(reports)
    rows = {
        one.version: f"| {one.version} | {one.day} | {one.count('passed')} | {one.count('failed')} | "
        f"{one.count('skipped')} | {one.again} |"
        for one in every
    }
    failed = {one.version: [f"* {one.version}: `{name}`" for name in one.failed] for one in every}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        found = re.match(r"([|*]) ((?:Python )?[\d.]+\d)\b", line)
        if found and found[2] not in {one.version for one in every}:
            if found[1] == "|":
                rows[found[2]] = line
            else:
                failed.setdefault(found[2], []).append(line)
    versions = sorted(rows, key=lambda each: (" " in each, [int(n) for n in re.findall(r"\d+", each)]))
    lines = [
        "| torch, or Python | day | passed | failed | skipped | ran again after a correction |",
        "|---|---|---|---|---|---|",
    ]
    lines += [rows[version] for version in versions]
    names = [name for version in versions for name in failed.get(version, ())]
    return "\n".join([*lines, "", *names] if names else lines)


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print the table, or write it into the page."""
    parser = parser_of(__doc__)
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    options = parser.parse_args(arguments)
    made = table([read(path) for path in options.reports], into.read_text() if into else "")
    if into is None:
        print(made)
    else:
        put(into, BEGIN, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

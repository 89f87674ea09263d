"""What the tests did on other versions of torch.

$ python -m tools.report docs/versions.md build/torch-*.xml

`make torch VERSION=2.15.0` leaves its report in build/torch-2.15.0.xml.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.pages import mark, parser_of, put

BEGIN = mark("docs/versions.md", "build/torch-*.xml")


@dataclass(frozen=True)
class Report:
    """One run of the tests."""

    torch: str  # the version
    day: str  # when it was
    tests: int  # how many there were
    skipped: int  # how many of them did not run
    failed: tuple[str, ...]  # the names of those that failed, or could not be set up


def read(path: Path) -> Report:
    """A report as pytest writes it, torch's version in the file's name."""
    suites = list(ET.parse(path).getroot().iter("testsuite"))
    cases = [case for suite in suites for case in suite.iter("testcase")]
    failed = {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    return Report(
        torch=path.stem.removeprefix("torch-"),
        day=suites[0].get("timestamp", "")[:10],
        tests=len({(case.get("classname"), case.get("name")) for case in cases}),
        skipped=sum(case.find("skipped") is not None for case in cases),
        failed=tuple(sorted(failed)),
    )


def table(reports: Sequence[Report]) -> str:
    """The reports as Markdown, a row each, and what failed."""
    rows = [
        f"| {one.torch} | {one.day} | {one.tests - one.skipped - len(one.failed)} | {len(one.failed)} | {one.skipped} |"
        for one in reports
    ]
    failed = [f"* {one.torch}: `{name}`" for one in reports for name in one.failed]
    lines = ["| torch | day | passed | failed | skipped |", "|---|---|---|---|---|", *rows]
    return "\n".join([*lines, "", *failed] if failed else lines)


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print the table, or write it into the page."""
    parser = parser_of(__doc__)
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    options = parser.parse_args(arguments)
    made = table([read(path) for path in sorted(options.reports)])
    if into is None:
        print(made)
    else:
        put(into, BEGIN, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Check the scripts of tests/scripts and say what was found: expected rule, found rules, lines, seconds.

$ python -m tools.checked                          # all of them
$ python -m tools.checked --only megatron clip     # those whose name has one of these
$ python -m tools.report docs/reports/check.md     # all of them, and the table into the page
$ python -m tools.checked --cost                   # each script also without being recorded
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script, recorded
from tests.scripts import SCRIPTS, Script
from tools.pages import mark, parser_of, put

STEPS = 2


@dataclass(frozen=True)
class Row:
    """What a check of a script found."""

    script: Script  # which
    found: tuple[str, ...]  # the rules of its findings, errors first
    at_line: bool  # whether a finding of the expected rule points at a line that the script marks
    notes: int  # how many
    seconds: float  # of the whole check
    plain: float | None = None  # of the script alone; None where that was not measured

    @property
    def expected(self) -> bool:
        """Whether the expected rule was found."""
        return self.script.expected in self.found

    @property
    def right(self) -> bool:
        """Whether nothing is said of what is right; or a rule is found that is true of what is wrong."""
        if self.script.expected is None:
            return not self.found
        return self.expected or bool(self.script.also.intersection(self.found))


def checked(script: Script) -> Verdict:
    """Check a script as a user would."""
    timeout = script.timeout or 60.0
    return check_script(
        Target(str(script.path)), ranks=script.ranks, steps=script.steps or STEPS, timeout=timeout
    )


def row_of(script: Script, cost: bool = False) -> Row:
    """Check a script, and compare with what it says of itself."""
    plain = None
    if cost:
        start = time.perf_counter()
        recorded(Target(str(script.path)), ranks=script.ranks, steps=STEPS, timeout=60.0, record=False)
        plain = time.perf_counter() - start
    start = time.perf_counter()
    verdict = checked(script)
    seconds = time.perf_counter() - start
    lines = {
        place.line
        for finding in verdict.findings
        if finding.rule.id == script.expected or finding.rule.id in script.also
        for place in (finding.at, finding.began, finding.received)
        if place is not None
    }
    return Row(
        script,
        tuple(dict.fromkeys(finding.rule.id for finding in verdict.findings)),
        bool(lines.intersection(script.lines)),
        len(verdict.notes),
        seconds,
        plain,
    )


def table(rows: Sequence[Row]) -> str:
    """The page's table, and what it comes to."""
    wrong = [row for row in rows if row.script.expected is not None]
    right = [row for row in rows if row.script.expected is None]
    said = [
        f"`python -m tools.checked` checks {len(wrong)} wrong scripts and {len(right)} right ones ({_machine()}):",
        f"the expected rule is found in {sum(row.expected for row in wrong)} of {len(wrong)}, "
        f"another that is true of the script as well in {sum(row.right and not row.expected for row in wrong)}, "
        f"and a line that the script marks in {sum(row.at_line for row in wrong)}; "
        f"a finding in {sum(not row.right for row in right)} of {len(right)} right ones.",
        f"A check takes {_spread([row.seconds for row in rows])} s beyond the imports.",
    ]
    reported = [row for row in wrong if row.script.report is not None]
    if reported:
        said.append(
            f"{len(reported)} of the wrong ones have the fault of a public report in a few lines; "
            f"the expected rule is found in {sum(row.expected for row in reported)} of these."
        )
    factors = [row.seconds / row.plain for row in rows if row.plain]
    if factors:
        said.append(f"It takes {_spread(factors)} times what the script takes alone.")
    lines = ["| script | what is wrong with it | expected | found | line | s |", "|---|---|---|---|---|---|"]
    for row in wrong:
        found = " ".join(row.found) or "nothing"
        about = f"{row.script.about} ({row.script.report})" if row.script.report else row.script.about
        lines.append(
            f"| `{row.script.name}` | {about} | {row.script.expected} | {found} | "
            f"{'yes' if row.at_line else 'no'} | {row.seconds:.1f} |"
        )
    return "\n".join([*said, "", *lines])


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.1f} (median; {ordered[0]:.1f} to {ordered[-1]:.1f})"


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, torch {torch.__version__}"


def _rows(names: Sequence[str], cost: bool) -> Iterator[Row]:
    for script in SCRIPTS.values():
        if not names or any(name in script.name for name in names):
            row = row_of(script, cost)
            print(
                f"{'ok ' if row.right else 'BAD'} {row.script.name:36} {row.script.expected or 'none':6} "
                f"{' '.join(row.found) or '-':20} {'line' if row.at_line else '    '} {row.notes} notes "
                f"{row.seconds:5.1f} s",
                flush=True,
            )
            yield row


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Check what is asked for; 1 where less than 95 % of the wrong ones are found, or a right one is accused."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--cost", action="store_true", help="run each script alone too")
    parsed = parser.parse_args(arguments)
    rows = list(_rows(parsed.only, parsed.cost))
    text = table(rows)
    print(text.split("\n\n")[0])
    if into is not None and not parsed.only:
        put(into, mark("docs/reports/check.md"), text)
    wrong = [row for row in rows if row.script.expected is not None]
    accused = any(not row.right for row in rows if row.script.expected is None)
    return int(accused or sum(row.right for row in wrong) < 0.95 * len(wrong))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())

"""Run every program of the zoo under its check, and print what was expected of it and what was reported.

python -m tools.zoo                                 # the table, and how much of it is right
python -m tools.zoo --only NAME                     # those with NAME in their name, with the whole report
python -m tools.report docs/reports/known-bad-programs.md  # the page
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.zoo import PROGRAMS
from tests.zoo.missed import MISSED
from tests.zoo.program import Program
from tests.zoo.running import Outcome, run
from tools.pages import parser_of

LEAST = 0.95
"""The part of the reports that has to be right."""


def outcomes(programs: Sequence[Program], jobs: int) -> Iterable[Outcome]:
    """Each program's outcome, in order; several programs at once in processes of their own."""
    if jobs <= 1:
        yield from map(run, programs)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _one_thread) as pool:
        yield from pool.map(_run, [program.name for program in programs])


def _one_thread() -> None:
    torch.set_num_threads(1)


def _run(name: str) -> Outcome:
    return run(PROGRAMS[name])


def _row(outcome: Outcome) -> tuple[str, str, str, str, str]:
    program = PROGRAMS[outcome.name]
    return (
        program.name,
        program.expected or "none",
        ", ".join(outcome.reported) or "none",
        "right" if outcome.right(program) else "wrong",
        f"{outcome.seconds:.2f}",
    )


def _summary(found: Sequence[Outcome]) -> str:
    lines = []
    for what, wanted in (("wrong programs", True), ("right programs", False)):
        some = [o for o in found if (PROGRAMS[o.name].expected is not None) is wanted]
        if some:
            right = sum(o.right(PROGRAMS[o.name]) for o in some)
            lines.append(f"{len(some)} {what}: {right} reports right, {100 * right / len(some):.1f} %")
    slowest = max(found, key=lambda o: o.seconds)
    total = sum(o.seconds for o in found)
    return "\n".join([*lines, f"{total:.1f} s in all, the slowest {slowest.name}: {slowest.seconds:.1f} s"])


# ---- the page


_HEAD = """# Known-bad programs: what the checkers detect

Small distributed programs, each with one bug that real code has, and correct ones on which nothing may be reported: how
many of them the checkers of `gm.verify` get right. `audit` runs on collectives, `gradcheck` on programs with a loss,
`same_as_single` on programs with a counterpart on one process. A report counts as right if it names the expected kind
and nothing that is false. The programs are in `tests/zoo/`. This page is written by

```console
$ python -m tools.report docs/reports/known-bad-programs.md
```

"""


_LIMITS = """
No check here covers what a compiler does to a program, its speed, faults of a network, or a program whose
single-process reference has the same bug.
"""


def page(found: Sequence[Outcome]) -> str:
    """The page with the results."""
    parts = [_HEAD, f"torch {torch.__version__}:\n\n```text\n{_summary(found)}\n```\n"]
    sections = (("## Wrong programs", True), ("## Right programs", False))
    for title, wanted in sections:
        parts.append(f"\n{title}\n\n| program | seen in | check | expected | reported | report | s |\n")
        parts.append("|---|---|---|---|---|---|---|\n")
        for outcome in found:
            program = PROGRAMS[outcome.name]
            if (program.expected is not None) is wanted:
                name, expected, reported, right, seconds = _row(outcome)
                cells = (f"`{name}`", program.seen, program.check, expected, reported, right, seconds)
                parts.append("| " + " | ".join(cells) + " |\n")
    parts.append("\n## Wrong reports\n\n")
    parts += [f"* `{name}`: {why}.\n" for name, why in MISSED.items()]
    return "".join(parts) + _LIMITS


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Run the zoo; 1 if too few reports are right."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="programs with this in their name")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs at once")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    programs = [program for program in PROGRAMS.values() if args.only in program.name]
    if not programs:
        parser.error(f"no program has {args.only!r} in its name")
    found, start = [], time.perf_counter()
    for outcome in outcomes(programs, args.jobs):
        found.append(outcome)
        name, expected, reported, right, seconds = _row(outcome)
        print(f"{right:<6} {seconds:>6} s  {name:<52} {expected:<28} {reported}", flush=True)
        if args.only:
            print(outcome.text, flush=True)
    print(_summary(found))
    print(f"{time.perf_counter() - start:.1f} s with {args.jobs} at once")
    if into is not None:
        into.write_text(page(found))
    good = sum(o.right(PROGRAMS[o.name]) for o in found)
    return 0 if good >= LEAST * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())

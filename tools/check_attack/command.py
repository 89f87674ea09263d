"""Attack `gradmesh check` with random programs, each proven right, and with faults put into them.

$ python -m tools.check_attack --programs 200 --seed 1
$ python -m tools.check_attack --programs 20 --mutants 6 --keep /tmp/found
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tools.check_attack.attack import Check, Outcome, attacked, check, reduced
from tools.check_attack.mutants import KINDS
from tools.check_attack.programs import draw
from tools.check_attack.ranks import warm
from tools.pages import parser_of

SLOW = 5.0


def outcomes(
    seeds: Sequence[int],
    count: int,
    folder: Path,
    *,
    jobs: int = 2,
    seconds: float = math.inf,
    checked: Check = check,
) -> Iterator[Outcome]:
    """The outcomes of the programs of some seeds, and of their mutants; no program starts after the time limit."""
    warm()
    end = time.monotonic() + seconds

    def one(seed: int) -> list[Outcome]:
        return attacked(draw(seed), folder, count, checked=checked) if time.monotonic() < end else []

    with ThreadPoolExecutor(jobs) as pool:
        for each in pool.map(one, seeds):
            yield from each


def table(found: Sequence[Outcome], seconds: float) -> str:
    """What it comes to, in words and by kind of fault."""
    programs = [each for each in found if not each.kind]
    changed = [each for each in found if each.kind]
    wrong = [each for each in changed if each.truth.startswith("wrong")]
    right = [each for each in changed if each.truth == "right"]
    ways = collections.Counter(each.wrong for each in found)
    times = sorted(each.seconds for each in found)
    lines = [
        f"{len(programs)} programs, {len(changed)} mutants: {len(wrong)} wrong, {len(right)} right, "
        f"{len(changed) - len(wrong) - len(right)} of which neither is said; {seconds:.0f} s ({_machine()})",
        f"missed {ways['missed']}, not judged {ways['unjudged']}, accused {ways['accused']}, "
        f"crashed {ways['crashed']}, not proven {ways['unproven']}; "
        f"right programs with notes {sum(each.truth == 'right' and each.unjudged for each in found)}",
        f"a check takes {statistics.median(times):.1f} s (median; {times[0]:.1f} to {times[-1]:.1f})",
        "",
        "| change | mutants | wrong | found | missed | right | accused |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        own = [each for each in changed if each.kind == kind]
        bad = [each for each in own if each.truth.startswith("wrong")]
        fine = [each for each in own if each.truth == "right"]
        lines.append(
            f"| {kind} | {len(own)} | {len(bad)} | {sum(bool(each.errors) for each in bad)} | "
            f"{sum(not each.errors for each in bad)} | {len(fine)} | {sum(each.wrong == 'accused' for each in fine)} |"
        )
    return "\n".join(lines)


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, torch {torch.__version__}"


def _kept(outcome: Outcome, folder: Path | None, name: str) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    what = f"program {outcome.seed}" + (f", {outcome.kind} at line {outcome.line}" if outcome.kind else "")
    truth, said = (text.splitlines()[-1:] for text in (outcome.truth, outcome.said))
    head = f"# {outcome.wrong}: {what}\n# is {truth}\n# said: {said}\n"
    (folder / name).write_text(head + outcome.text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack; 1 where truth and checker disagree."""
    parser = parser_of(__doc__, "python -m tools.check_attack")
    parser.add_argument("--programs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--mutants", type=int, default=3, help="of each program")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time limit: no program starts after it"
    )
    parser.add_argument("--keep", type=Path, help="where to put what is disagreed on, also made smaller")
    parser.add_argument("--reduce", type=float, default=60.0, help="seconds for making one smaller")
    parser.add_argument("--verbose", action="store_true", help="a line for each script")
    parsed = parser.parse_args(arguments)
    started, found = time.perf_counter(), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="check-attack-") as name:
        folder = Path(name)
        for each in outcomes(
            range(parsed.seed, parsed.seed + parsed.programs),
            parsed.mutants,
            folder,
            jobs=parsed.jobs,
            seconds=parsed.seconds,
        ):
            found.append(each)
            if each.wrong or parsed.verbose:
                print(_line(each), flush=True)
            if each.wrong:
                _kept(each, parsed.keep, f"{each.wrong}-{each.seed}-{each.line}.py")
        print(table(found, time.perf_counter() - started))
        bad = [each for each in found if each.wrong and each.wrong != "unjudged"]
        if parsed.keep:
            for each in bad:
                _, less = reduced(draw(each.seed), each, folder, seconds=parsed.reduce)
                _kept(less, parsed.keep, f"{each.wrong}-{each.seed}-{each.line}-reduced.py")
    return int(bool(bad))


def _line(each: Outcome) -> str:
    what = f"{each.kind} at line {each.line}" if each.kind else "as it is"
    truth = each.truth.splitlines()[-1][:80]
    return (
        f"{each.wrong or 'ok':9} {each.seed:5} {what:34} {truth:40} {' '.join(each.errors) or '-':12} "
        f"{each.seconds:4.1f} s  {each.said.splitlines()[0][:150] if each.said else ''}"
    )


def run() -> None:
    """Run as a program."""
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())

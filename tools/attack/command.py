"""The attack as a whole: many programs, their verdicts counted, what should not have happened shrunk and shown."""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.attack.dense import expected
from tools.attack.draw import drawn
from tools.attack.meanings import Invalid
from tools.attack.programs import Program, script
from tools.attack.run import PATIENCE, Pools, Verdict, judged
from tools.attack.shrink import shrunk

DOCUMENTED = {
    "a reentrant checkpoint cannot contain collectives": "ordered",
    "might not run on every rank": "unordered",
}
"""Refusals that the documentation names, of programs that every rank joins: inside of ordered(), or outside."""


@dataclass(frozen=True)
class Finding:
    """A program that did not end as it should."""

    index: int  # its number in the run
    verdict: Verdict  # what became of it
    program: Program  # the program, made small
    repeated: bool = True  # whether it fails on fresh ranks too; else only behind the programs before it

    def shown(self, backend: str) -> str:
        """A file that runs it, with what went wrong as comments."""
        lines = [f"program {self.index}: {self.verdict.kind}: {self.verdict.what}"]
        lines += self.verdict.detail.splitlines()[:30]
        lines += [] if self.repeated else ["only behind the programs before it, not on fresh ranks"]
        return "\n".join(f"# {line}" for line in lines) + "\n" + script(self.program, backend)


@dataclass
class Summary:
    """What an attack found."""

    # verdicts by kind, and by whether the program was ordered, paired or neither
    counts: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    # the refusals' first lines
    refusals: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    findings: list[Finding] = field(default_factory=list)  # programs that did not end as they should
    seconds: float = 0.0  # how long it took
    following: int = 0  # the number with which a run goes on where this one ended

    @property
    def programs(self) -> int:
        """How many were run."""
        return self.counts.total()

    def __str__(self) -> str:
        where = sorted({group for group, _ in self.counts})
        kinds = sorted({kind for _, kind in self.counts})
        lines = [f"| programs | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
        for group in where:
            lines.append(f"| {group} | {' | '.join(str(self.counts[group, kind]) for kind in kinds)} |")
        lines += [f"{n:6} {group}: {line}" for (group, line), n in sorted(self.refusals.items())]
        found = collections.Counter(f"{one.verdict.kind}: {one.verdict.what}" for one in self.findings)
        lines += [f"{n:6} finding: {what}" for what, n in found.items()]
        lines.append(
            f"{self.programs} programs in {self.seconds:.0f} s, {len(self.findings)} findings; "
            f"the next one is --start {self.following}"
        )
        return "\n".join(lines)


def group_of(program: Program) -> str:
    """Which programs it is counted with: what has to be right, and what may be refused."""
    kind = "every rank alike" if program.paired else "ranks differ"
    return f"{kind}, {'ordered' if program.ordered else 'unordered'}"


def suspicious(program: Program, verdict: Verdict) -> bool:
    """Whether a program should not have ended so."""
    if verdict.kind == "right":
        return False
    if not verdict.kind.startswith("refused"):
        return True
    if not program.ordered and not program.paired:
        return False
    place = "ordered" if program.ordered else "unordered"
    return not any(text in verdict.what and where == place for text, where in DOCUMENTED.items())


def attack(
    programs: int,
    pools: Pools,
    *,
    seed: int = 0,
    ranks: tuple[int, int] = (2, 4),
    start: int = 0,
    most_findings: int = 10,
    tell: Callable[[str], None] = print,
    shrink: bool = True,
    seconds: float = float("inf"),
    pending: float = 0.0,
    by_hand: float = 0.0,
) -> Summary:
    """Run random programs until there are enough, or enough findings."""
    summary, begin, index = Summary(), time.monotonic(), start
    known: collections.Counter[tuple[str, str, str]] = collections.Counter()
    while summary.programs < programs and len(summary.findings) < most_findings:
        if time.monotonic() - begin > seconds:
            break
        program, number, index = drawn(seed, index, ranks, pending=pending, by_hand=by_hand), index, index + 1
        try:
            verdict = judged(program, pools, expected(program))
        except Invalid:
            continue
        group = group_of(program)
        summary.counts[group, verdict.kind] += 1
        if verdict.kind.startswith("refused"):
            summary.refusals[group, verdict.what] += 1
        if not suspicious(program, verdict):
            continue
        alike = (group, verdict.kind, program.mode)
        known[alike] += 1
        if known[alike] > 2:  # one more of those that were shown
            summary.findings.append(Finding(number, verdict, program))
            continue
        finding = _looked_at(program, number, verdict, pools, shrink)
        summary.findings.append(finding)
        tell(finding.shown(pools.backend))
    summary.seconds, summary.following = time.monotonic() - begin, index
    return summary


def _looked_at(program: Program, index: int, verdict: Verdict, pools: Pools, shrink: bool) -> Finding:
    pools.close()
    again = judged(program, pools)
    if (again.kind, again.what) != (verdict.kind, verdict.what):
        return Finding(index, verdict, program, repeated=False)
    if not shrink or verdict.kind == "hang":
        return Finding(index, verdict, program)

    def fails(candidate: Program) -> bool:
        try:
            found = judged(candidate, pools)
        except Invalid:
            return False
        return suspicious(candidate, found) and found.kind == verdict.kind

    small = shrunk(program, fails)
    return Finding(index, judged(small, pools), small)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the number of findings decides the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.attack", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--backend", default="threads", help="threads, shm, gloo, simulated or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first program")
    parser.add_argument("--ranks", default="2..4", help="the least and the largest number of ranks")
    parser.add_argument("--findings", type=int, default=10, help="stop after so many")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds that a program may take")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after so long, to go on later"
    )
    parser.add_argument(
        "--pending", type=float, default=0.0, help="the share of the calls with async_op=True"
    )
    parser.add_argument(
        "--by-hand",
        type=float,
        default=0.0,
        help="the share of the calls in a Function with a backward by hand",
    )
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each kernel of the device")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--write", type=Path, help="a folder for the findings, each as a file")
    given = parser.parse_args(arguments)
    least, _, largest = given.ranks.partition("..")

    def tell(text: str) -> None:
        print(text, flush=True)
        if given.write is not None:
            given.write.mkdir(parents=True, exist_ok=True)
            number = text.split(":", 1)[0].rpartition(" ")[2]
            (given.write / f"{given.backend}_{given.seed}_{number}.py").write_text(text)

    with Pools(given.backend, given.patience, given.delay) as pools:
        summary = attack(
            given.programs,
            pools,
            seed=given.seed,
            ranks=(int(least), int(largest or least)),
            start=given.start,
            most_findings=given.findings,
            tell=tell,
            shrink=not given.no_shrink,
            seconds=given.seconds,
            pending=given.pending,
            by_hand=given.by_hand,
        )
    print(summary)
    return 1 if summary.findings else 0

"""One program and its mutants: what they are, what the checker says of them, and whether that fits."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradmesh.checker.findings import Verdict
from gradmesh.checker.run import Target, check_script
from tools.check_attack.mutants import Mutant, mutants
from tools.check_attack.oracle import reference_of, truth_of
from tools.check_attack.programs import Program, simpler
from tools.check_attack.texts import text_of

Check = Callable[[Path, int], Verdict]

UNJUDGED = ("nothing is said", "could not be", "cannot be")
"""What notes say where the checker has not judged something."""


@dataclass(frozen=True)
class Outcome:
    """What came of one script."""

    seed: int  # of its program
    kind: str  # of the mutant; "" for a program as it is
    line: int  # of the mutant
    # "right", "wrong: ...", "open: ...", or "unproven: ..." for a program that is not what it should be
    truth: str
    errors: tuple[str, ...]  # the rules of the checker's errors
    said: str  # the first finding, or the notes
    unjudged: bool  # whether the checker said that gradients could not be judged
    crash: str  # the traceback, where the check itself raised
    seconds: float  # of the check
    text: str  # of the script

    @property
    def wrong(self) -> str:
        """How the checker and the truth disagree: "missed", "accused", "crashed", "unproven"; "" if they do not."""
        if self.truth.startswith("unproven"):
            return "unproven"
        if self.crash:
            return "crashed"
        if self.truth == "right" and self.errors:
            return "accused"
        if self.truth.startswith("wrong") and not self.errors:
            return "unjudged" if self.unjudged else "missed"
        return ""


def check(path: Path, ranks: int) -> Verdict:
    """Check a script as a user would."""
    return check_script(Target(str(path)), ranks=ranks, steps=2, timeout=10.0)


def attacked(
    program: Program, folder: Path, count: int, *, checked: Check = check, kinds: Sequence[str] = ()
) -> list[Outcome]:
    """What comes of a program and of some of its mutants."""
    path = folder / f"program{program.seed}.py"
    path.write_text(text_of(program))
    reference = reference_of(program, path)
    if isinstance(reference, str):
        return [_outcome(program, None, f"unproven: {reference}", path, checked)]
    found = [_outcome(program, None, "right", path, checked)]
    for number, mutant in enumerate(_chosen(program, count, kinds)):
        own = folder / f"program{program.seed}-{number}.py"
        own.write_text(mutant.text)
        found.append(_outcome(program, mutant, truth_of(program, reference, own), own, checked))
    return found


def _chosen(program: Program, count: int, kinds: Sequence[str]) -> list[Mutant]:
    """Mutants of as many kinds as there may be."""
    dice = random.Random(program.seed)
    possible = [each for each in mutants(text_of(program)) if not kinds or each.kind in kinds]
    dice.shuffle(possible)
    first: dict[str, Mutant] = {}
    for each in possible:
        first.setdefault(each.kind, each)
    rest = [each for each in possible if first[each.kind] is not each]
    return [*first.values(), *rest][:count]


def _outcome(program: Program, mutant: Mutant | None, truth: str, path: Path, checked: Check) -> Outcome:
    kind, line = (mutant.kind, mutant.line) if mutant else ("", 0)
    started = time.perf_counter()
    try:
        verdict = checked(path, program.ranks)
    except Exception:
        seconds = time.perf_counter() - started
        crash = traceback.format_exc()
        return Outcome(
            program.seed,
            kind,
            line,
            truth,
            (),
            crash.splitlines()[-1],
            False,
            crash,
            seconds,
            path.read_text(),
        )
    seconds = time.perf_counter() - started
    errors = tuple(dict.fromkeys(each.rule.id for each in verdict.errors))
    unjudged = any(any(words in note for words in UNJUDGED) for note in verdict.notes)
    said = "; ".join(f"{each.rule.id} {each.message} ({each.at})" for each in verdict.errors) or "; ".join(
        verdict.notes
    )
    return Outcome(program.seed, kind, line, truth, errors, said, unjudged, "", seconds, path.read_text())


def disagreement(
    program: Program, kind: str, folder: Path, wanted: str, checked: Check = check
) -> Outcome | None:
    """Whether a program, or one of its mutants of a kind, is one that truth and checker disagree on."""
    found = attacked(program, folder, 4 if kind else 0, checked=checked, kinds=[kind] if kind else [])
    return next((each for each in found if each.wrong == wanted and bool(each.kind) == bool(kind)), None)


def reduced(
    program: Program, outcome: Outcome, folder: Path, *, seconds: float, checked: Check = check
) -> tuple[Program, Outcome]:
    """A smaller program on which truth and checker disagree in the same way."""
    end = time.monotonic() + seconds
    smaller = True
    while smaller and time.monotonic() < end:
        smaller = False
        for each in simpler(program):
            if time.monotonic() > end:
                break
            still = disagreement(each, outcome.kind, folder, outcome.wrong, checked)
            if still is not None:
                program, outcome, smaller = each, still, True
                break
    return program, outcome

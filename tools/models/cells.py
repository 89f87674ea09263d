"""One cell of the matrix: a family under a plan on a release, checked."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradmesh.checker.findings import relative
from tools.models.environments import ROOT, Environment
from tools.models.parity import Parity, parity
from tools.models.program import FAMILIES, PLANS, replicas

PROGRAM = "tools/models/program.py"
RELEASES = ("5.16.0", "5.18.0", "5.24.0")
_LIMIT = 500.0
Verdict = Literal["right", "wrong", "unchecked", "refused"]


@dataclass(frozen=True)
class Cell:
    """What to check.

    Attributes:
        release: of transformers.
        family: of the model.
        plan: by which it is parallel.
    """

    release: str
    family: str
    plan: str

    @property
    def ranks(self) -> int:
        """How many ranks the plan takes."""
        return replicas(self.plan) * int(PLANS[self.plan].get("tp_size", 1))

    def __str__(self) -> str:
        return f"{self.release} {self.family} {self.plan}"


@dataclass
class Row:
    """What came of a cell.

    Attributes:
        cell: which.
        verdict: "right" (every step was checked), "wrong", "unchecked" (a step was not), or "refused" (it raised).
        seconds: of the whole check.
        findings: as `gradmesh check --json` has them, with files as they are called from a folder of packages.
        notes: of the check.
        error: the first line of what was raised.
        parity: with one process, where that was measured.
    """

    cell: Cell
    verdict: Verdict
    seconds: float
    findings: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    parity: Parity | None = None


def cells(releases: Sequence[str], only: Sequence[str]) -> Iterator[Cell]:
    """The cells of some releases whose family and plan are named, all where none is: experts where a model has them."""
    for release in releases:
        for family, sizes in FAMILIES.items():
            for plan in PLANS:
                if ("ep" in plan.split("+") and "num_experts_per_tok" not in sizes) or (
                    "tp" in plan.split("+") and family in ("vit", "clip")  # which have no plan for it
                ):
                    continue
                families, plans = set(FAMILIES) & set(only), set(PLANS) & set(only)
                if (not families or family in families) and (not plans or plan in plans):
                    yield Cell(release, family, plan)


def checked(cell: Cell, environment: Environment, folder: Path, fault: Sequence[str] = ()) -> Row:
    """Check a cell, and hold a wrong one beside one process, where no fault was put into it."""
    model = folder / f"{cell.family}-{cell.release}"
    if not (model / "config.json").exists():
        made = environment.start(PROGRAM, "make", cell.family, str(model))
        _, error = made.communicate(timeout=_LIMIT)
        if made.returncode:
            return Row(cell, "refused", 0.0, error=error.strip().splitlines()[-1])
    start = time.perf_counter()
    ranks = ["--ranks", str(cell.ranks), "--json"]
    started = environment.start(
        "-m", "gradmesh", "check", *ranks, PROGRAM, "--", "train", str(model), cell.plan, *fault
    )
    try:
        out, error = started.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        started.terminate()
        started.communicate()
        return Row(cell, "unchecked", _LIMIT, error=f"not over after {_LIMIT:g} seconds")
    row = row_of(cell, out, error, time.perf_counter() - start)
    if row.verdict == "wrong" and not fault:
        arguments = (PROGRAM, "gradients", str(model), cell.plan)
        row.parity = parity(environment, arguments, cell.ranks, folder)
    return row


def row_of(cell: Cell, out: str, error: str, seconds: float) -> Row:
    """A row of what `gradmesh check --json` printed."""
    try:
        said = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (error.strip().splitlines() or ["nothing was printed"])[-1]
        return Row(cell, "unchecked", seconds, error=last)
    findings = [_trimmed(each) for each in said["findings"]]
    errors = [each for each in findings if each["severity"] == "error"]
    raised = [each for each in errors if each["rule"] == "GM501"]
    if raised:
        words = raised[0]["message"].partition(" raised ")[2] or raised[0]["message"]
        return Row(cell, "refused", seconds, error=words.splitlines()[0])
    checked_all = said["followed"] is not None and said["followed"] == said["steps"] > 0
    verdict: Verdict = "wrong" if errors else "right" if checked_all else "unchecked"
    return Row(cell, verdict, seconds, findings, said["notes"])


def _trimmed(finding: dict[str, Any]) -> dict[str, Any]:
    places = {key: finding.get(key) for key in ("at", "began", "received")}
    return finding | {
        key: place and place | {"file": relative(place["file"], ROOT)} for key, place in places.items()
    }

"""Faults in cells that are right: a random collective of a backward is doubled, dropped, or not made."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools.models.cells import Cell, checked
from tools.models.environments import Environment
from tools.models.program import FAULTS


def injected(rows: list[dict[str, Any]], number: int, seed: int, environments: Path) -> list[dict[str, Any]]:
    """Check random right cells, each with a fault, and say which faults were found."""
    right = [Cell(row["release"], row["family"], row["plan"]) for row in rows if row["verdict"] == "right"]
    draw, found = random.Random(seed), []
    for at in range(number):
        cell, kind = draw.choice(right), draw.choice(FAULTS)
        fault = [kind, str(seed * 1000 + at)]
        row = checked(cell, Environment(cell.release, environments), environments / "checkpoints", fault)
        rules = sorted({each["rule"] for each in row.findings if each["severity"] == "error"})
        print(f"{cell!s:32} {kind:10} {row.verdict:10} {', '.join(rules)} {row.error[:100]}", flush=True)
        found.append(
            {"cell": str(cell), "fault": kind, "seed": int(fault[1]), "verdict": row.verdict, "rules": rules}
        )
    return found

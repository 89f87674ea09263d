"""The command that prints what fields in parts cost and how far they are from whole ones, and writes the tables.

python -m tools.fields [--programs 40] [--only deviations]
python -m tools.report docs/reports/fields.md [--programs 40] [--only deviations]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.fields.measure import AUDITED, WORLDS, costs, findings, worst
from tools.pages import mark, put


def table_of_deviations(programs: int) -> str:
    """How far random programs are from dense ones, in Markdown."""
    lines = [
        f"Of {programs} random programs of each kind (1 to 4 ranks, uneven and empty parts, a rank that leaves its "
        "rows out), the largest deviation from torch's on the whole field, relative to its largest value (float64):",
        "",
        "| kind | value | first derivative | second derivative | findings of the audit |",
        "|---|---|---|---|---|",
    ]
    for kind in AUDITED:
        value, first, second = worst(kind, programs)
        lines.append(f"| {kind} | {value:.0e} | {first:.0e} | {second:.0e} | {findings(kind)} |")
    return "\n".join(lines)


def table_of_costs() -> str:
    """What a rank keeps for backward and how long a step takes, in Markdown."""
    head = " | ".join(f"MiB kept, {n} rank{'s' * (n > 1)}" for n in WORLDS)
    times = " | ".join(f"ms, {n}" for n in WORLDS)
    lines = [
        f"A field of 4 x 8 x 256 x 256 float32 on all ranks together; torch {torch.__version__}, {os.cpu_count()} "
        "cores, each rank a process with one thread, on shm; forward and backward, the median of 7, of the slowest:",
        "",
        f"| layer | {head} | {times} |",
        "|" + "---|" * (1 + 2 * len(WORLDS)),
    ]
    for name, each in costs().items():
        kept, took = (" | ".join(f"{pair[n]:.1f}" for pair in each) for n in (0, 1))
        lines.append(f"| {name} | {kept} | {took} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print how far sharded fields are from whole ones and what they cost, or write the tables into the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.fields")
    parser.add_argument("--programs", type=int, default=40, help="random programs of each kind")
    parser.add_argument("--only", choices=("deviations", "costs"), help="one table of the two")
    parsed = parser.parse_args(arguments)
    tables = {"deviations": lambda: table_of_deviations(parsed.programs), "costs": table_of_costs}
    for name in [parsed.only] if parsed.only else tables:
        table = tables[name]()
        print(table, end="\n\n", flush=True)
        if into is not None:
            put(into, mark("docs/reports/fields.md", "--only", name), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command that prints what fields in parts cost and how far they are from whole ones, and writes the tables.

python -m tools.fields [--programs 40] [--only deviations] [--write docs/reports/fields.md]
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import torch

from tools.fields.measure import AUDITED, WORLDS, costs, findings, worst

_MARK = "<!-- {name}: written by python -m tools.fields -->"


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


def with_table(text: str, name: str, table: str) -> str:
    """A page with a table in its place."""
    mark = re.escape(_MARK.format(name=name))
    return re.sub(f"({mark}\n\n).*?(\n\n<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.DOTALL)


@click.command(help="Show how far fields in parts are from whole ones, and what they cost.")
@click.option("--programs", default=40, show_default=True, help="Random programs of each kind.")
@click.option(
    "--write", type=click.Path(dir_okay=False, exists=True, path_type=Path), help="The page to write."
)
@click.option("--only", type=click.Choice(["deviations", "costs"]), help="One table of the two.")
def main(programs: int, write: Path | None, only: str | None) -> None:
    """Print the tables."""
    tables = {"deviations": lambda: table_of_deviations(programs), "costs": table_of_costs}
    for name in [only] if only else tables:
        table = tables[name]()
        print(table, end="\n\n", flush=True)
        if write is not None:
            write.write_text(with_table(write.read_text(), name, table))


if __name__ == "__main__":
    main()

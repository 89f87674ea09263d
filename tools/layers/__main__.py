"""Hold every layer against its dense counterpart, and print one table.

python -m tools.layers                          # all of it: some minutes
python -m tools.layers --layer linear_cross_entropy
python -m tools.layers --write docs/layers.md   # the table of the page
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

import gradmesh as gm
from tools.layers.table import CASES, HEAD, Row, row_of
from tools.overlap.page import machine

BEGIN, END = "<!-- table: begin (python -m tools.layers --write docs/layers.md) -->", "<!-- table: end -->"


def _text(rows: list[Row]) -> str:
    lines = [" | ".join(HEAD), " | ".join("---" for _ in HEAD)]
    lines += [" | ".join(row.cells()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def with_table(page: str, rows: list[Row], where: str) -> str:
    """The page with another table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{_text(rows)}\n\n{where}\n{END}{rest.split(END, 1)[1]}"


def main() -> int:
    """Measure; 1 where a layer is further off than it may be, or an audit finds something."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layer", choices=list(CASES), action="append", help="all by default")
    parser.add_argument("--write", type=Path, help="the page to write the table into")
    told = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with ExitStack() as stack:
        processes = {n: stack.enter_context(gm.Ranks(n, backend="shm", timeout=300)).run for n in (1, 2, 4)}
        for name in told.layer or CASES:
            rows.append(row_of(CASES[name], processes))
            print("  ".join(rows[-1].cells()), flush=True)
    if told.write is not None:
        told.write.write_text(with_table(told.write.read_text(), rows, machine(4)))
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())

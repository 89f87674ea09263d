"""Output of `gradmesh bench`."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gradmesh.bench.timing import FULL, QUICK, measured

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement

__all__ = ["bench"]

_NOTE = (
    "Microseconds per call on the slowest rank: median (interquartile range). raw: the call of torch.distributed into "
    "preallocated memory; its backward is a call of the adjoint collective. gradmesh allocates the result, builds the "
    "autograd graph and compares the ranks' calls (GRADMESH_CHECK). added: median of the rounds' differences. ratio: "
    "gradmesh's median divided by raw's. size: of a rank's operand."
)


def bench(backend: str, ranks: int, quick: bool, json_path: Path | None) -> None:
    """Time the verbs, print the table, and write every round's seconds to a file."""
    from rich.console import Console
    from rich.table import Table

    if json_path is not None:
        json_path.touch()  # fail before the measurement if the file cannot be written
    plan, progress = QUICK if quick else FULL, partial(print, file=sys.stderr, flush=True)
    table, cells = Table(title=f"{ranks} ranks on {backend}", title_justify="left", box=None), []
    for column in ("collective", "pass", "size", "gradmesh", "raw", "added", "ratio"):
        is_text = column in ("collective", "pass")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text)
    for cell in measured(ranks, backend, plan, progress):
        added = () if cell.added is None else (f"{1e6 * cell.added[0]:+.1f}", f"{cell.added[1]:.2f}")
        table.add_row(cell.verb, cell.way, cell.size, _formatted(cell.ours), _formatted(cell.raw), *added)
        times = {"ours": cell.ours.times, "raw": cell.raw and cell.raw.times, "added": cell.added}
        cells.append({**cell._asdict(), **times})
    console = Console(highlight=False, width=shutil.get_terminal_size((100, 24)).columns)
    console.print(table)
    console.print(_NOTE, style="dim")
    if json_path is not None:
        found = {"torch": torch.__version__, "backend": backend, "ranks": ranks, "unit": "s", "cells": cells}
        json_path.write_text(json.dumps(found) + "\n")


def _formatted(times: Measurement | None) -> str:
    return "" if times is None else f"{1e6 * times.median:.1f} ({1e6 * times.iqr:.1f})"

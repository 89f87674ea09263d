"""Progress display of jobs that compare ranks with one process step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["ALONE", "IN_PARTS", "Progressed", "shown"]

IN_PARTS: Final = "ranks"
ALONE: Final = "one process"

Progressed = Callable[[str, int], None]
"""Called with the name of a run (`IN_PARTS` or `ALONE`) and its number of additional steps."""


@contextmanager
def shown(introduction: str, total: int, console: Console) -> Iterator[Progressed]:
    """Print an introduction, and show the progress of both runs."""
    console.print(f"{introduction}\n")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {name: progress.add_task(name, total=total) for name in (IN_PARTS, ALONE)}
        yield lambda name, steps: progress.update(tasks[name], advance=steps)

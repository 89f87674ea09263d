"""What the jobs share that follow one process step by step: who has done how much, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["ALONE", "IN_PARTS", "Tell", "shown"]

IN_PARTS: Final = "ranks"
ALONE: Final = "one process"

Tell = Callable[[str, int], None]
"""Is told who has done how many more steps, or epochs."""


@contextmanager
def shown(introduction: str, total: int, console: Console) -> Iterator[Tell]:
    """Introduce a job, and show on the console how far the ranks and one process are."""
    console.print(f"{introduction}\n")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {name: progress.add_task(name, total=total) for name in (IN_PARTS, ALONE)}
        yield lambda name, steps: progress.update(tasks[name], advance=steps)

"""What all demos share: seeded drawing, and comparing a run on ranks with one on a single process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from rich.console import Console

_LOCK = threading.RLock()
"""Thread ranks share torch's default generator and dtype."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator, for one rank at a time, and restore it afterwards."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


IN_PARTS: Final = "ranks"
ALONE: Final = "one process"

Progressed = Callable[[str, int], None]
"""Called with the name of a run (`IN_PARTS` or `ALONE`) and its number of additional steps."""


@contextmanager
def shown(introduction: str, total: int, console: Console) -> Iterator[Progressed]:
    """Print an introduction, and show the progress of both runs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console.print(f"{introduction}\n")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {name: progress.add_task(name, total=total) for name in (IN_PARTS, ALONE)}
        yield lambda name, steps: progress.update(tasks[name], advance=steps)

"""What the commands have in common: a console for tables, progress on stderr, errors as text."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradmesh.errors import GradmeshError

__all__ = ["Tell", "errors_as_text", "progress", "tables_console"]

Tell = Callable[[str, int], None]
"""Called with what is going on, and how many steps further it is than at the call before."""

_PIPED_WIDTH = 180
_PIPED_PERIOD = 2.0
"""Seconds between two lines of progress where there is no terminal to draw a bar on."""

Parameters = ParamSpec("Parameters")


def tables_console(*, stderr: bool = False) -> Console:
    """A console on which tables keep their columns when the output is piped."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


@contextlib.contextmanager
def progress(total: int, period: float = _PIPED_PERIOD) -> Iterator[Tell]:
    """Show on stderr how far a run is: a bar on a terminal, else a line every `period` seconds.

    Args:
        total: how many steps there are.
        period: seconds between two lines.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda what, steps: bar.update(task, advance=steps, description=what)
        return
    done, last = 0, float("-inf")

    def tell(what: str, steps: int) -> None:
        nonlocal done, last
        done += steps
        if time.monotonic() - last >= period:
            click.echo(f"[{done}/{total}] {what}", err=True)  # which flushes
            last = time.monotonic()

    yield tell


def errors_as_text(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Print gradmesh's errors and OSErrors without a traceback, and exit with status 1."""

    @functools.wraps(command)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (GradmeshError, OSError) as error:
            raise click.ClickException(str(error)) from error

    return wrapped

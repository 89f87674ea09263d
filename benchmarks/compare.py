"""`python -m benchmarks.compare OLD NEW`: two runs of `benchmarks.speed` against each other, and what became slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.speed.contenders import CONTENDERS, SYSTEMS
from benchmarks.speed.results import Key, Results, loaded
from benchmarks.speed.tasks import said
from benchmarks.terminal import errors_as_text, tables_console
from gradmesh.errors import ArgumentError, GradmeshError, message

__all__ = ["Change", "changes", "compare", "other_machine"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
@click.option(
    "--threshold",
    type=click.FloatRange(min=1),
    default=1.25,
    show_default=True,
    help="How many times as long a cell may take.",
)
@click.option(
    "--system",
    "systems",
    multiple=True,
    type=click.Choice(SYSTEMS),
    help="A system to compare; all by default.",
)
@errors_as_text
def compare(old: Path, new: Path, threshold: float, systems: Sequence[str]) -> None:
    """Compare two files of `benchmarks.speed --json`: how many times as long each cell takes now.

    Fails when a cell is beyond the threshold.
    """
    console = tables_console()
    before, after = loaded(old), loaded(new)
    found = changes(before, after)
    if systems:
        found = [change for change in found if CONTENDERS[change.contender].system in systems]
    for difference in other_machine(before, after):
        console.print(f"Not the same machine: {difference}", style="yellow", markup=False, soft_wrap=True)
    _show(found, threshold, console)
    if slower := [change for change in found if change.ratio > threshold]:
        raise GradmeshError(
            message(
                f"{len(slower)} of {len(found)} cells have become slower",
                expected=f"at most {threshold:g} times the old time",
                got="\n".join(map(str, sorted(slower, key=lambda change: -change.ratio)[:10])),
            )
        )


@dataclass(frozen=True)
class Change:
    """A cell of both runs.

    Attributes:
        key: which.
        contender: who was timed.
        old: seconds of a call before.
        new: seconds of a call after.
    """

    key: Key
    contender: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes now."""
        return self.new / self.old

    def __str__(self) -> str:
        ranks, verb, way, size = self.key
        times = f"{1e6 * self.old:.1f} us before, {1e6 * self.new:.1f} us now"
        return f"{self.contender}, {verb} {way}, {ranks} ranks, {said(size)}: {self.ratio:.2f} times, {times}"


def changes(old: Results, new: Results) -> list[Change]:
    """The cells that both runs have.

    Raises:
        ArgumentError: there are none.
    """
    common = [at for at in new.table if at in old.table]
    if not common:
        raise ArgumentError(
            message(
                "the two runs have no cell in common",
                expected="the same ranks, verbs, sizes and systems in both, at least in part",
                got=f"{_extent(old)}\nand {_extent(new)}",
                remedy="measure with the same options of `benchmarks.speed`",
            )
        )
    return [Change(*at, old.table[at].median, new.table[at].median) for at in common]


def _extent(results: Results) -> str:
    return f"ranks {results.ranks}, verbs {results.verbs}, sizes {results.sizes}, {results.contenders}"


def other_machine(old: Results, new: Results) -> list[str]:
    """What is different about the machines of the two runs and their software."""
    names = dict.fromkeys([*old.machine, *new.machine])
    pairs = [(name, old.machine.get(name, "none"), new.machine.get(name, "none")) for name in names]
    return [f"{name}: {before} before, {after} now" for name, before, after in pairs if before != after]


def _show(found: Sequence[Change], threshold: float, console: Console) -> None:
    """Print how many times as long each cell takes now, and mark what is beyond the threshold."""
    sizes = sorted({change.key.size for change in found})
    grid = Table(title="New time over old", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("ranks", "verb", "way", "system"):
        grid.add_column(column)
    for size in sizes:
        grid.add_column(said(size), justify="right")
    table = {(change.key, change.contender): change for change in found}
    for key, name in dict.fromkeys((change.key._replace(size=0), change.contender) for change in found):
        cells = [table.get((key._replace(size=size), name)) for size in sizes]
        grid.add_row(str(key.ranks), key.verb, key.way, name, *(_ratio(cell, threshold) for cell in cells))
    console.print(grid)


def _ratio(change: Change | None, threshold: float) -> str:
    if change is None:
        return ""
    if change.ratio > threshold:
        return f"[bold red]{change.ratio:.2f} slower[/]"
    return f"[green]{change.ratio:.2f}[/]" if change.ratio < 1 / threshold else f"{change.ratio:.2f}"


if __name__ == "__main__":
    compare()

"""`gradmesh bench` and `gradmesh compare`: measure, show, write."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gradmesh.bench.speed.tasks import ELEMENT
from gradmesh.demo.extras import require
from gradmesh.errors import ArgumentError, GradmeshError, message

__all__ = ["bench", "compare", "size_of"]


def bench(
    ranks: Sequence[int],
    verbs: Sequence[str],
    sizes: Sequence[str],
    systems: Sequence[str],
    rounds: int | None,
    quick: bool,
    json_path: str | None,
    picture: Path | None,
    page: Path | None,
) -> None:
    """Time every collective, forward and backward, here and in other systems, and show the tables.

    Args:
        ranks: numbers of ranks; those of the plan if empty, and so on.
        verbs: names.
        sizes: bytes of a rank's part, as text.
        systems: names.
        rounds: how often each system is timed at most.
        quick: the plan that takes less than a minute.
        json_path: where to write everything; "-" prints it to stdout, and all else to stderr.
        picture: where to write the picture.
        page: where to write the page of the docs; without `picture` it is drawn beside it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gradmesh.bench.speed import run, tables
    from gradmesh.bench.speed.overhead import overheads
    from gradmesh.bench.speed.targets import targets

    if page is not None and picture is None:
        picture = page.with_suffix(".png")
    if picture is not None:
        require("demo", "bench")
    plan = run.QUICK if quick else run.FULL
    plan = replace(
        plan,
        ranks=tuple(ranks) or plan.ranks,
        verbs=tuple(verbs) or plan.verbs,
        sizes=tuple(map(size_of, sizes)) or plan.sizes,
        systems=tuple(systems),
        rounds=rounds or plan.rounds,
    )
    command = _command(quick, {"ranks": ranks, "verb": verbs, "size": sizes, "system": systems}, rounds, page)
    for path in (picture, page, Path(json_path) if json_path not in (None, "-") else None):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=json_path == "-", highlight=False)
    if not console.is_terminal:
        console.width = 180
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=plan.steps)
        results = run.measure(
            plan,
            command,
            lambda what, steps: progress.update(bar, advance=steps, description=what),
        )
    tables.show(results, console)
    if picture is not None:
        from gradmesh.bench.speed.picture import draw

        draw(results, picture)
    if page is not None:
        from gradmesh.bench.speed.page import markdown

        link = None if picture is None else os.path.relpath(picture, page.parent)
        page.write_text(markdown(results, link))
    if json_path is not None:
        promises = [asdict(target) for target in targets(results)]
        added = [asdict(each) | {"key": each.key._asdict()} for each in overheads(results)]
        text = json.dumps({**results.as_json(), "overheads": added, "targets": promises}, indent=1) + "\n"
        print(text, end="") if json_path == "-" else Path(json_path).write_text(text)


def compare(old: Path, new: Path, threshold: float, systems: Sequence[str]) -> None:
    """Show how many times as long each cell takes now, and fail when one is beyond the threshold.

    Args:
        old: what `bench` wrote before.
        new: what it wrote after.
        threshold: how many times as long a cell may take.
        systems: their names; all if empty.
    """
    from rich.console import Console

    from gradmesh.bench.speed import tables
    from gradmesh.bench.speed.compare import changes, other_machine
    from gradmesh.bench.speed.contenders import CONTENDERS
    from gradmesh.bench.speed.results import loaded

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 180
    before, after = loaded(old), loaded(new)
    found = changes(before, after)
    if systems:
        found = [change for change in found if CONTENDERS[change.contender].system in systems]
    for difference in other_machine(before, after):
        console.print(f"Not the same machine: {difference}", style="yellow", markup=False, soft_wrap=True)
    tables.show_changes(found, threshold, console)
    if slower := [change for change in found if change.ratio > threshold]:
        raise GradmeshError(
            message(
                f"{len(slower)} of {len(found)} cells have become slower",
                op="compare",
                expected=f"at most {threshold:g} times the old time",
                got="\n".join(map(str, sorted(slower, key=lambda change: -change.ratio)[:10])),
            )
        )


def size_of(text: str) -> int:
    """The bytes that a size says, in B, KiB or MiB.

    >>> size_of("4"), size_of("512KiB"), size_of("4 MiB")
    (4, 524288, 4194304)

    Raises:
        ArgumentError: it is no size, or not of whole float32 elements.
    """
    digits = text.rstrip("KMiB ")
    unit = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20}.get(text[len(digits) :].strip())
    size = int(digits) * unit if unit and digits.isdigit() else 0
    if size < ELEMENT or size % ELEMENT:
        raise ArgumentError(
            message(
                "this is no size",
                op="bench",
                expected=f"a multiple of {ELEMENT} bytes such as 4, 4KiB or 32MiB",
                got=f"--size {text}",
            )
        )
    return size


def _command(
    quick: bool, given: Mapping[str, Sequence[object]], rounds: int | None, page: Path | None
) -> str:
    """How the command was called, as far as it decides what is measured and written."""
    words = ["gradmesh bench", *(["--quick"] if quick else [])]
    words += [f"--{name} {shlex.quote(str(value))}" for name, values in given.items() for value in values]
    words += [] if rounds is None else [f"--rounds {rounds}"]
    words += [] if page is None else [f"--write {page}"]
    return " ".join(words)

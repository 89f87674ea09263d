"""`gradmesh bench` and `gradmesh compare`: measure, show, write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
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
    given = {"ranks": ranks, "verbs": verbs, "sizes": [size_of(text) for text in sizes], "systems": systems}
    plan = replace(run.QUICK if quick else run.FULL, **{name: tuple(of) for name, of in given.items() if of})
    plan = plan if rounds is None else replace(plan, rounds=rounds)
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
            _command(quick, given, rounds, page),
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

"""`gradmesh modes`: measure, show, write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gradmesh.bench.cases import CASES
from gradmesh.bench.grid import Pools, available, measure
from gradmesh.bench.modes import MODES
from gradmesh.bench.ours import GRADMESH
from gradmesh.bench.peers import PEERS
from gradmesh.errors import GradmeshError, message

__all__ = ["SYSTEMS", "modes"]

SYSTEMS = {system.name: system for system in (GRADMESH, *PEERS)}


def modes(
    systems: Sequence[str],
    only: Sequence[str],
    quick: bool,
    backend: str,
    json_path: Path | None,
    as_markdown: bool,
    page: Path | None,
) -> None:
    """Run every verb in every mode, show the tables, and fail when a cell of gradmesh is neither right nor refused.

    Args:
        systems: their names; all that are installed if empty.
        only: the modes; all if empty.
        quick: gradmesh alone.
        backend: what gradmesh runs on; the others run on gloo.
        json_path: where to write everything.
        as_markdown: print Markdown.
        page: where to write the page of the docs.
    """
    from rich.console import Console
    from rich.progress import Progress

    from gradmesh.bench import report

    console, status = Console(highlight=False), Console(stderr=True)
    if not console.is_terminal:
        console.width = 180
    chosen = [SYSTEMS[name] for name in systems] or [GRADMESH, *(() if quick else available(PEERS))]
    columns = list(only) or list(MODES)
    found: dict[str, tuple[report.System, report.Grid]] = {}
    with Progress(console=status, transient=True) as progress:
        bar = progress.add_task("starting the ranks", total=len(chosen) * len(columns) * len(CASES))

        def tell(what: str) -> None:
            progress.update(bar, advance=1, description=what)

        for system in chosen:
            with Pools(backend if system is GRADMESH else "gloo") as pools:
                found[system.name] = (system, measure(system, pools, modes=columns, tell=tell))
    if json_path is not None:
        json_path.write_text(json.dumps(report.as_json(found), indent=1) + "\n")
    if page is not None:
        page.write_text(report.markdown(found))
    if as_markdown:
        print(report.markdown(found), end="")
    else:
        report.show(found, console)
    if faults := report.faults(found[GRADMESH.name][1] if GRADMESH.name in found else {}):
        raise GradmeshError(message("a cell is neither right nor refused", op="modes", got="\n".join(faults)))

"""The command line of `python -m benchmarks.modes`: measure, show, write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.modes import report
from benchmarks.modes.grid import Pools, available, measure
from benchmarks.modes.mode import MODES
from benchmarks.systems.cases import CASES
from benchmarks.systems.ours import GRADMESH
from benchmarks.systems.peers import PEERS
from benchmarks.terminal import errors_as_text, progress, tables_console
from gradmesh.errors import GradmeshError, message

__all__ = ["SYSTEMS", "main", "modes"]

SYSTEMS = {system.name: system for system in (GRADMESH, *PEERS)}

_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.option(
    "--system",
    "systems",
    multiple=True,
    type=click.Choice(list(SYSTEMS)),
    help="A system to measure; all by default.",
)
@click.option(
    "--mode",
    "only",
    multiple=True,
    type=click.Choice(list(MODES)),
    help="A mode to run; all by default.",
)
@click.option("--quick", is_flag=True, help="gradmesh alone.")
@click.option(
    "--backend",
    type=click.Choice(["gloo", "shm", "threads"]),
    default="gloo",
    show_default=True,
    help="What gradmesh runs on; compiled programs and the others run on gloo.",
)
@click.option("--json", "json_path", type=_FILE, help="Where to write everything, as JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.pass_obj
@errors_as_text
def modes(
    page: Path | None,
    systems: Sequence[str],
    only: Sequence[str],
    quick: bool,
    backend: str,
    json_path: Path | None,
    as_markdown: bool,
) -> None:
    """Run every verb in every autodiff mode, here and in other systems.

    Each runs on local ranks and is compared with a dense program on one process. Fails if a cell of gradmesh is neither
    correct nor an explicit refusal. Takes minutes.
    """
    chosen = [SYSTEMS[name] for name in systems] or [GRADMESH, *(() if quick else available(PEERS))]
    columns = list(only) or list(MODES)
    found: dict[str, tuple[report.System, report.Grid]] = {}
    with progress(len(chosen) * len(columns) * len(CASES)) as tell:
        tell("starting the ranks", 0)
        for system in chosen:
            with Pools(backend if system is GRADMESH else "gloo") as pools:
                found[system.name] = (
                    system,
                    measure(system, pools, modes=columns, tell=lambda what: tell(what, 1)),
                )
    if json_path is not None:
        json_path.write_text(json.dumps(report.as_json(found), indent=1) + "\n")
    if page is not None:
        page.write_text(report.markdown(found))
    if as_markdown:
        click.echo(report.markdown(found), nl=False)
    else:
        report.show(found, tables_console())
    if faults := report.faults(found[GRADMESH.name][1] if GRADMESH.name in found else {}):
        raise GradmeshError(message("a cell is neither right nor refused", got="\n".join(faults)))


def main(arguments: Sequence[str], into: Path) -> int:
    """Run the command and write the page of the docs."""
    return int(modes.main(list(arguments), prog_name="python -m benchmarks.modes", obj=into))

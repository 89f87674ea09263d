"""The command line: `gradmesh demo`, `gradmesh modes`, `gradmesh bench`, `gradmesh compare` and `gradmesh info`.

Every command is a plain function, and `commands` is the one place that says how its options are spelled. What the
extras bring is imported when it is used, so that without them there is a text and no traceback.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradmesh.bench.command import SYSTEMS, modes
from gradmesh.bench.modes import MODES
from gradmesh.bench.speed.command import bench, compare
from gradmesh.bench.speed.contenders import SYSTEMS as TIMED
from gradmesh.bench.speed.tasks import VERBS
from gradmesh.demo.extras import EXTRAS, missing, require
from gradmesh.demo.job import Settings, run
from gradmesh.errors import GradmeshError, MissingExtraError
from gradmesh.ops.registry import table as ops_table

if TYPE_CHECKING:
    import click

__all__ = ["commands", "main"]


def main() -> None:
    """Run the command that the arguments of the process name."""
    try:
        group = commands()
    except MissingExtraError as error:
        sys.exit(str(error))
    group(prog_name="gradmesh")


def commands() -> click.Group:
    """Build the command line.

    Raises:
        MissingExtraError: the extra `cli` is not installed.
    """
    require("cli", "cli")
    import click

    default = Settings()
    option = functools.partial(click.Option, show_default=True)
    group = click.Group("gradmesh", help="Differentiable collective communication for PyTorch.")
    click.version_option(_version(), prog_name="gradmesh")(group)
    group.add_command(
        click.Command(
            "demo",
            callback=_told(demo),
            short_help="Train on real images over local ranks, and prove the gradients.",
            help="Train two encoders on the halves of handwritten digits, contrasting each image with those of all "
            "ranks, by three gathers: gradmesh's, one without gradient, and one whose backward is the own slice. "
            "Then compare each one's gradients with those of a single process.",
            params=[
                option(
                    ["--ranks"],
                    type=click.IntRange(min=1),
                    default=default.ranks,
                    help="Number of local ranks.",
                ),
                option(
                    ["--backend"],
                    default=default.backend,
                    help="shm, gloo: processes; threads: threads of one process.",
                ),
                option(
                    ["--epochs"],
                    type=click.IntRange(min=1),
                    default=default.epochs,
                    help="Passes over the training images.",
                ),
                option(
                    ["--seed"],
                    type=click.IntRange(min=0),
                    default=default.seed,
                    help="Decides the held-out images, the initial parameters and the order.",
                ),
                option(
                    ["--picture"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    default=Path("gradmesh_demo.png"),
                    help="Where to write the training curves, as PNG.",
                ),
                option(
                    ["--json", "as_json"],
                    is_flag=True,
                    help="Print nothing but a line of JSON to stdout, all else to stderr.",
                ),
            ],
        )
    )
    group.add_command(
        click.Command(
            "modes",
            callback=_told(modes),
            short_help="Run every verb in every autodiff mode, here and in other systems.",
            help="Run every verb in every autodiff mode on local ranks, hold each against a dense program of one "
            "process, and print what came out; the same for other systems that are installed. Takes minutes.",
            params=[
                option(
                    ["--system", "systems"],
                    multiple=True,
                    type=click.Choice(list(SYSTEMS)),
                    help="A system to measure; all by default.",
                ),
                option(
                    ["--mode", "only"],
                    multiple=True,
                    type=click.Choice(list(MODES)),
                    help="A mode to run; all by default.",
                ),
                option(["--quick"], is_flag=True, help="gradmesh alone."),
                option(
                    ["--backend"],
                    type=click.Choice(["gloo", "shm", "threads"]),
                    default="gloo",
                    help="What gradmesh runs on; compiled programs and the others run on gloo.",
                ),
                option(
                    ["--json", "json_path"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Where to write everything, as JSON.",
                ),
                option(["--markdown", "as_markdown"], is_flag=True, help="Print Markdown."),
                option(
                    ["--write", "page"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Where to write the page of the docs.",
                ),
            ],
        )
    )
    group.add_command(
        click.Command(
            "bench",
            callback=_told(bench),
            short_help="Time every collective, forward and backward, here and in other systems.",
            help="Time forward and backward of the collectives on local ranks: gradmesh on each backend, the raw "
            "calls, other systems, MPI where it is installed, and the copies that nobody can avoid. All systems take "
            "turns in one run. Takes some ten minutes.",
            params=[
                option(
                    ["--ranks"],
                    multiple=True,
                    type=click.IntRange(min=2),
                    help="A number of ranks; 2 and 4 by default.",
                ),
                option(
                    ["--verb", "verbs"],
                    multiple=True,
                    type=click.Choice(list(VERBS)),
                    help="A verb to time; all by default.",
                ),
                option(
                    ["--size", "sizes"],
                    multiple=True,
                    help="Bytes of a rank's part; 4, 4KiB, 512KiB, 4MiB and 32MiB by default.",
                ),
                option(
                    ["--system", "systems"],
                    multiple=True,
                    type=click.Choice(TIMED),
                    help="A system to time, on all its backends; all by default.",
                ),
                option(
                    ["--rounds"],
                    type=click.IntRange(min=1),
                    help="How often each system is timed at most.",
                ),
                option(["--quick"], is_flag=True, help="2 ranks, few sizes, few rounds: less than a minute."),
                option(
                    ["--json", "json_path"],
                    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
                    help="Where to write everything, as JSON; - for stdout, all else goes to stderr then.",
                ),
                option(
                    ["--picture"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Where to draw time over floor against size, as PNG.",
                ),
                option(
                    ["--write", "page"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Where to write the page of the docs; the picture is drawn beside it.",
                ),
            ],
        )
    )
    group.add_command(
        click.Command(
            "compare",
            callback=_told(compare),
            help="Compare two files that `gradmesh bench --json` wrote, and fail when a cell has become slower.",
            params=[
                click.Argument(["old"], type=click.Path(exists=True, dir_okay=False, path_type=Path)),
                click.Argument(["new"], type=click.Path(exists=True, dir_okay=False, path_type=Path)),
                option(
                    ["--threshold"],
                    type=click.FloatRange(min=1),
                    default=1.25,
                    help="How many times as long a cell may take.",
                ),
                option(
                    ["--system", "systems"],
                    multiple=True,
                    type=click.Choice(TIMED),
                    help="A system to compare; all by default.",
                ),
            ],
        )
    )
    group.add_command(
        click.Command(
            "info",
            callback=_told(info),
            help="Say what is installed here and what it can run on.",
            params=[
                option(["--table"], is_flag=True, help="Print the table of the collectives, as Markdown.")
            ],
        )
    )
    return group


def demo(ranks: int, backend: str, epochs: int, seed: int, picture: Path, as_json: bool) -> None:
    """Run the demo job and show what it finds."""
    require("demo", "demo")
    from rich.console import Console

    from gradmesh.demo import report

    console = Console(stderr=as_json, highlight=False)
    settings = Settings(ranks, backend, epochs, seed)
    picture.parent.mkdir(parents=True, exist_ok=True)
    with report.shown(settings, console) as watcher:
        result = run(settings, watcher)
    report.draw(result, picture)
    report.print_proof(result, console)
    console.print(f"\n{result.seconds:.1f} s. The training curves are in {picture}")
    if as_json:
        print(json.dumps({**result.as_json(), "picture": str(picture.resolve())}))


def info(table: bool) -> None:
    """Print what is installed, or the table of the ops."""
    if table:
        print(ops_table())
        return
    from rich.console import Console
    from rich.table import Table

    rows = {
        "gradmesh": _version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(_cores()),
        "GPUs": str(torch.cuda.device_count()),
        "backends": ", ".join(_backends()),
    }
    for extra in EXTRAS:
        absent = missing(extra)
        rows[f"extra {extra}"] = (
            f"no {', '.join(absent)}: pip install 'gradmesh\\[{extra}]'" if absent else "installed"
        )
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(name, value)
    Console(highlight=False).print(grid)


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with gradmesh's own errors and unusable files told as text and exit status 1."""
    import click

    @functools.wraps(command)
    def told(**options: object) -> None:
        try:
            command(**options)
        except (GradmeshError, OSError) as error:
            raise click.ClickException(str(error)) from error

    return told


def _version() -> str:
    try:
        return metadata.version("gradmesh")
    except metadata.PackageNotFoundError:
        return "not installed, run from source"


def _cores() -> int:
    """The cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _backends() -> list[str]:
    found = {
        "gloo": dist.is_gloo_available(),
        "mpi": dist.is_mpi_available(),
        "nccl": dist.is_nccl_available(),
    }
    return ["threads", *(name for name, available in found.items() if available)]

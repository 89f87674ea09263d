"""`gradmesh demo`: the command group."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradmesh._util.environment import require
from gradmesh.demo.fno import settings as fno_settings
from gradmesh.demo.forces import settings as forces_settings
from gradmesh.demo.job import Settings, run
from gradmesh.demo.lm import settings as lm_settings

if TYPE_CHECKING:
    import click

__all__ = ["clip", "demo_group", "fno", "forces", "lm"]

_FIRST = "clip"


def demo_group(reporting: Callable[[Callable[..., None]], Callable[..., None]]) -> click.Group:
    """Build `gradmesh demo`; `reporting` wraps each command, to print errors without a traceback."""
    import click

    class Named(click.Group):
        """Without a job's name, runs the first job."""

        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
                args = [_FIRST, *args]
            return super().parse_args(ctx, args)

    option = functools.partial(click.Option, show_default=True)
    group = Named(
        "demo",
        short_help="Train on local ranks, and compare with one process.",
        help=f"Train on local ranks, and compare with one process. The default job is {_FIRST}; see "
        f"`gradmesh demo {_FIRST} --help`.",
    )
    default, potential = Settings(), forces_settings.Settings()

    def number(name: str, least: int, default: int, text: str) -> click.Option:
        return option([f"--{name}"], type=click.IntRange(min=least), default=default, help=text)

    def common(ranks: int | None, backend: str, picture: str) -> list[click.Parameter]:
        local = [] if ranks is None else [number("ranks", 1, ranks, "Number of local ranks.")]
        return [
            *local,
            option(
                ["--backend"], default=backend, help="shm, gloo: processes; threads: threads of one process."
            ),
            option(
                ["--seed"],
                type=click.IntRange(min=0),
                default=0,
                help="Seed of the data, the held-out split, the initial parameters and the order.",
            ),
            option(
                ["--picture"],
                type=click.Path(dir_okay=False, writable=True, path_type=Path),
                default=Path(picture),
                help="Write the plots to this file, as PNG.",
            ),
            option(
                ["--json", "as_json"],
                is_flag=True,
                help="Print a line of JSON to stdout, and everything else to stderr.",
            ),
        ]

    group.add_command(
        click.Command(
            "clip",
            callback=reporting(clip),
            short_help="Contrastive learning of images, with three all-gathers.",
            help="Train two encoders on the halves of handwritten digits, with a contrastive loss over the images of "
            "all ranks, and three all-gathers: gradmesh's, one without a gradient, and one whose backward takes the "
            "local slice only. Compare their gradients with those of a single process.",
            params=[
                *common(default.ranks, default.backend, "gradmesh_demo.png"),
                number("epochs", 1, default.epochs, "Passes over the training images."),
            ],
        )
    )
    group.add_command(
        click.Command(
            "forces",
            callback=reporting(forces),
            short_help="Graph parallelism: an interatomic potential, with molecular dynamics.",
            help="Train an interatomic potential on slabs, alloys, particles and strained crystals of ASE's EMT, each "
            "partitioned over the ranks, and compare with one process; predict forces of held-out structures; count "
            "the rows that are sent; and run molecular dynamics on all ranks.",
            params=[
                *common(potential.ranks, potential.backend, "gradmesh_forces.png"),
                number("steps", 1, potential.steps, "Number of training steps."),
                number("md", 1, potential.md, "Number of steps of molecular dynamics."),
                number(
                    "channels", 1, potential.channels, "Scalar features, and vector features, of each atom."
                ),
                number("structures", 4, potential.structures, "Number of training structures."),
                number("batch", 1, potential.batch, "Structures per step."),
                number("moving", 24, potential.moving, "Atoms in the molecular dynamics."),
                number(
                    "atoms", 256, potential.atoms, "Atoms of the largest slab whose sent rows are counted."
                ),
                option(
                    ["--partition"],
                    type=click.Choice(["space", "graphs"]),
                    default=potential.partition,
                    help="space: partition each structure; graphs: assign each structure to one rank.",
                ),
                option(
                    ["--write"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Write the structures with energies, forces and stresses as extended XYZ, and exit.",
                ),
            ],
        )
    )
    language = lm_settings.Job()
    group.add_command(
        click.Command(
            "lm",
            callback=reporting(lm),
            short_help="Data, sequence and tensor parallelism: a language model.",
            help="Train a character-level language model on Python's reference, with data, sequence and tensor "
            "parallelism, and compare with one process, step by step.",
            params=[
                *common(None, language.backend, "gradmesh_lm.png"),
                number("dp", 1, language.dp, "Data parallel size."),
                number("sp", 1, language.sp, "Sequence parallel size."),
                number("tp", 1, language.tp, "Tensor parallel size."),
                number("steps", 1, language.steps, "Number of training steps."),
            ],
        )
    )
    operator = fno_settings.Job()
    group.add_command(
        click.Command(
            "fno",
            callback=reporting(fno),
            short_help="Domain decomposition: a Fourier neural operator.",
            help="Train a Fourier neural operator on solutions of Burgers' equation, with each field sharded over the "
            "ranks, and compare with one process, step by step.",
            params=[
                *common(operator.ranks, operator.backend, "gradmesh_fno.png"),
                number("epochs", 1, operator.epochs, "Passes over the training solutions."),
                number(
                    "points", 8, operator.points, "Grid points; need not be divisible by the number of ranks."
                ),
                number("samples", 1, operator.samples, "Number of training solutions."),
            ],
        )
    )
    return group


def clip(ranks: int, backend: str, epochs: int, seed: int, picture: Path, as_json: bool) -> None:
    """Run contrastive learning and show the results."""
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
    console.print(f"\n{result.seconds:.1f} s. Training curves: {picture}")
    if as_json:
        print(json.dumps({**result.as_json(), "picture": str(picture.resolve())}))


def forces(picture: Path, as_json: bool, write: Path | None, **chosen: Any) -> None:
    """Train a potential and show the results."""
    require("forces", "demo forces")
    from rich.console import Console

    from gradmesh.demo.forces import job, report, structures

    console = Console(stderr=as_json, highlight=False)
    settings = forces_settings.Settings(**chosen)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        structures.write(write, settings.structures, settings.seed)
        console.print(f"Wrote {settings.structures} structures to {write}")
        if as_json:
            print(json.dumps({"structures": settings.structures, "written": str(write.resolve())}))
        return
    picture.parent.mkdir(parents=True, exist_ok=True)
    with report.shown(settings, console) as watcher:
        result = job.run(settings, watcher)
    report.draw(result, picture)
    report.print_tables(result, console)
    console.print(f"Plots: {picture}")
    if as_json:
        print(json.dumps({**result.as_json(), "picture": str(picture.resolve())}))


def fno(**chosen: Any) -> None:
    """Train a neural operator and show the results."""
    require("demo", "demo fno")
    from gradmesh.demo.fno import job, report

    _run_and_report(job, report, fno_settings.Job, **chosen)


def lm(**chosen: Any) -> None:
    """Train a language model and show the results."""
    require("demo", "demo lm")
    from gradmesh.demo.lm import job, report

    _run_and_report(job, report, lm_settings.Job, **chosen)


def _run_and_report(
    job: Any, report: Any, settings: Any, picture: Path, as_json: bool, **chosen: Any
) -> None:
    from rich.console import Console

    console, options = Console(stderr=as_json, highlight=False), settings(**chosen)
    picture.parent.mkdir(parents=True, exist_ok=True)
    with report.shown(options, console) as progress:
        result = job.run(options, progress)
    report.draw(result, picture)
    report.print_table(result, console)
    console.print(f"Plots: {picture}")
    if as_json:
        print(json.dumps({**result.as_json(), "picture": str(picture.resolve())}))

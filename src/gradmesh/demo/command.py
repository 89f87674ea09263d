"""`gradmesh demo`: a job by its name, and the first of them without one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradmesh.demo.fno import settings as fno_settings
from gradmesh.demo.forces import settings as forces_settings
from gradmesh.demo.job import Settings, run
from gradmesh.demo.lm import settings as lm_settings
from gradmesh.extras import require

if TYPE_CHECKING:
    import click

__all__ = ["clip", "demo_group", "fno", "forces", "lm"]

_FIRST = "clip"


def demo_group(told: Callable[[Callable[..., None]], Callable[..., None]]) -> click.Group:
    """Build `gradmesh demo`.

    Args:
        told: what a command's function is wrapped in, so that errors become text.
    """
    import click

    class Named(click.Group):
        """Takes options without a name for those of the first job."""

        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
                args = [_FIRST, *args]
            return super().parse_args(ctx, args)

    option = functools.partial(click.Option, show_default=True)
    group = Named(
        "demo",
        short_help="Train over local ranks, and prove the gradients.",
        help=f"Train over local ranks, and compare with one process. Without a name: {_FIRST}, whose options "
        f"`gradmesh demo {_FIRST} --help` lists.",
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
                help="Decides the data, what is held out of it, the initial parameters and the order.",
            ),
            option(
                ["--picture"],
                type=click.Path(dir_okay=False, writable=True, path_type=Path),
                default=Path(picture),
                help="Where to write the picture, as PNG.",
            ),
            option(
                ["--json", "as_json"],
                is_flag=True,
                help="Print nothing but a line of JSON to stdout, all else to stderr.",
            ),
        ]

    group.add_command(
        click.Command(
            "clip",
            callback=told(clip),
            short_help="Contrastive learning of images, by three gathers.",
            help="Train two encoders on the halves of handwritten digits, contrasting each image with those of all "
            "ranks, by three gathers: gradmesh's, one without gradient, and one whose backward is the own slice. "
            "Then compare each one's gradients with those of a single process.",
            params=[
                *common(default.ranks, default.backend, "gradmesh_demo.png"),
                number("epochs", 1, default.epochs, "Passes over the training images."),
            ],
        )
    )
    group.add_command(
        click.Command(
            "forces",
            callback=told(forces),
            short_help="A potential for atoms: energies, forces, stresses, dynamics.",
            help="Train a potential on slabs, alloys, particles and strained crystals of ASE's EMT, each cut over the "
            "ranks, beside the same on one process; predict forces on structures held out; count the rows that "
            "travel; and run molecular dynamics with it on all ranks.",
            params=[
                *common(potential.ranks, potential.backend, "gradmesh_forces.png"),
                number("steps", 1, potential.steps, "Steps of training."),
                number("md", 1, potential.md, "Steps of molecular dynamics."),
                number("channels", 1, potential.channels, "Scalars, and vectors, of each atom."),
                number("structures", 4, potential.structures, "Structures to train on."),
                number("batch", 1, potential.batch, "Structures of a step."),
                number("moving", 24, potential.moving, "Atoms of the slab that moves."),
                number("atoms", 256, potential.atoms, "Atoms of the largest slab whose rows are counted."),
                option(
                    ["--partition"],
                    type=click.Choice(["space", "graphs"]),
                    default=potential.partition,
                    help="space: each structure is cut; graphs: each is whole on one rank.",
                ),
                option(
                    ["--write"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Write the structures with their energies, forces and stresses, as extended XYZ, and stop.",
                ),
            ],
        )
    )
    language = lm_settings.Job()
    group.add_command(
        click.Command(
            "lm",
            callback=told(lm),
            short_help="A language model over data, sequence and tensor parallel ranks.",
            help="Train a language model of the characters of Python's reference on ranks that have other sequences, "
            "other places of a sequence and other parts of each layer, beside the same on one process, step by step.",
            params=[
                *common(None, language.backend, "gradmesh_lm.png"),
                number("dp", 1, language.dp, "Ranks that have other sequences."),
                number("sp", 1, language.sp, "Ranks of each sequence."),
                number("tp", 1, language.tp, "Ranks of each layer."),
                number("steps", 1, language.steps, "Steps of training."),
            ],
        )
    )
    operator = fno_settings.Job()
    group.add_command(
        click.Command(
            "fno",
            callback=told(fno),
            short_help="A Fourier neural operator on fields that are cut over the ranks.",
            help="Solve Burgers' equation from random fields, and train a Fourier neural operator to do it, with each "
            "field cut over the ranks, beside the same on one process, step by step.",
            params=[
                *common(operator.ranks, operator.backend, "gradmesh_fno.png"),
                number("epochs", 1, operator.epochs, "Passes over the solutions."),
                number("points", 8, operator.points, "Points of a field; the ranks need not divide them."),
                number("samples", 1, operator.samples, "Solutions to train on."),
            ],
        )
    )
    return group


def clip(ranks: int, backend: str, epochs: int, seed: int, picture: Path, as_json: bool) -> None:
    """Run the job of contrastive learning and show what it finds."""
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


def forces(picture: Path, as_json: bool, write: Path | None, **chosen: Any) -> None:
    """Run the job of a potential and show what it finds."""
    require("forces", "demo forces")
    from rich.console import Console

    from gradmesh.demo.forces import job, report, structures

    console = Console(stderr=as_json, highlight=False)
    settings = forces_settings.Settings(**chosen)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        structures.write(write, settings.structures, settings.seed)
        console.print(f"{settings.structures} structures are in {write}")
        if as_json:
            print(json.dumps({"structures": settings.structures, "written": str(write.resolve())}))
        return
    picture.parent.mkdir(parents=True, exist_ok=True)
    with report.shown(settings, console) as watcher:
        result = job.run(settings, watcher)
    report.draw(result, picture)
    report.print_tables(result, console)
    console.print(f"The picture is in {picture}")
    if as_json:
        print(json.dumps({**result.as_json(), "picture": str(picture.resolve())}))


def fno(**chosen: Any) -> None:
    """Run the job of a neural operator and show what it finds."""
    require("demo", "demo fno")
    from gradmesh.demo.fno import job, report

    _followed(job, report, fno_settings.Job, **chosen)


def lm(**chosen: Any) -> None:
    """Run the job of a language model and show what it finds."""
    require("demo", "demo lm")
    from gradmesh.demo.lm import job, report

    _followed(job, report, lm_settings.Job, **chosen)


def _followed(job: Any, report: Any, settings: Any, picture: Path, as_json: bool, **chosen: Any) -> None:
    """Run a job that follows one process, and show how far it is from that."""
    from rich.console import Console

    console, asked = Console(stderr=as_json, highlight=False), settings(**chosen)
    picture.parent.mkdir(parents=True, exist_ok=True)
    with report.shown(asked, console) as tell:
        result = job.run(asked, tell)
    report.draw(result, picture)
    report.print_table(result, console)
    console.print(f"The picture is in {picture}")
    if as_json:
        print(json.dumps({**result.as_json(), "picture": str(picture.resolve())}))

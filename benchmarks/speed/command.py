"""The command line of `python -m benchmarks.speed`: measure, show, write."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from benchmarks.speed import run, tables
from benchmarks.speed.contenders import SYSTEMS
from benchmarks.speed.overhead import overheads
from benchmarks.speed.page import markdown
from benchmarks.speed.targets import targets
from benchmarks.speed.tasks import ELEMENT, VERBS
from benchmarks.terminal import errors_as_text, progress, tables_console
from gradmesh.errors import ArgumentError, message

__all__ = ["main", "size_of", "speed"]

_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.option(
    "--ranks", multiple=True, type=click.IntRange(min=2), help="A number of ranks; 2 and 4 by default."
)
@click.option(
    "--verb", "verbs", multiple=True, type=click.Choice(list(VERBS)), help="A verb to time; all by default."
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    help="Bytes of a rank's part; 4, 4KiB, 512KiB, 4MiB and 32MiB by default.",
)
@click.option(
    "--system",
    "systems",
    multiple=True,
    type=click.Choice(SYSTEMS),
    help="A system to time, on all its backends; all by default.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="How often each system is timed at most.")
@click.option("--quick", is_flag=True, help="2 ranks, few sizes, few rounds: a minute or two.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    help="Where to write everything, as JSON; - for stdout, all else goes to stderr then.",
)
@click.option("--picture", type=_FILE, help="Where to draw time over floor against size, as SVG.")
@click.pass_obj
@errors_as_text
def speed(
    page: Path | None,
    ranks: Sequence[int],
    verbs: Sequence[str],
    sizes: Sequence[str],
    systems: Sequence[str],
    rounds: int | None,
    quick: bool,
    json_path: str | None,
    picture: Path | None,
) -> None:
    """Time every collective, forward and backward, here and in other systems.

    The systems are gradmesh on each backend, raw calls of torch.distributed, other differentiable libraries, MPI if it
    is installed, and plain memory copies as a lower bound. All are interleaved in one run. Takes about ten minutes.
    """
    if page is not None and picture is None:
        picture = page.with_suffix(".svg")
    plan = run.QUICK if quick else run.FULL
    plan = replace(
        plan,
        ranks=tuple(ranks) or plan.ranks,
        verbs=tuple(verbs) or plan.verbs,
        sizes=tuple(map(size_of, sizes)) or plan.sizes,
        systems=tuple(systems),
        rounds=rounds or plan.rounds,
    )
    given = {"ranks": ranks, "verb": verbs, "size": sizes, "system": systems}
    command = _command(quick, given, rounds, page is not None)
    for path in (picture, page, Path(json_path) if json_path not in (None, "-") else None):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    with progress(plan.steps) as tell:
        results = run.measure(plan, command, tell)
    tables.show(results, tables_console(stderr=json_path == "-"))
    if picture is not None:
        from benchmarks.speed.picture import draw  # matplotlib takes a second, and few runs draw

        draw(results, picture)
    if page is not None:
        link = None if picture is None else os.path.relpath(picture, page.parent)
        page.write_text(markdown(results, link))
    if json_path is not None:
        promises = [asdict(target) for target in targets(results)]
        added = [asdict(each) | {"key": each.key._asdict()} for each in overheads(results)]
        text = json.dumps({**results.as_json(), "overheads": added, "targets": promises}, indent=1) + "\n"
        print(text, end="") if json_path == "-" else Path(json_path).write_text(text)


def size_of(text: str) -> int:
    """Parse a size in B, KiB or MiB.

    >>> size_of("4"), size_of("512KiB"), size_of("4 MiB")
    (4, 524288, 4194304)

    Raises:
        ArgumentError: invalid, or not a multiple of a float32 element.
    """
    digits = text.rstrip("KMiB ")
    unit = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20}.get(text[len(digits) :].strip())
    size = int(digits) * unit if unit and digits.isdigit() else 0
    if size < ELEMENT or size % ELEMENT:
        raise ArgumentError(
            message(
                "--size is invalid",
                expected=f"a multiple of {ELEMENT} bytes, e.g. 4, 4KiB or 32MiB",
                got=f"--size {text}",
            )
        )
    return size


def _command(quick: bool, given: Mapping[str, Sequence[object]], rounds: int | None, report: bool) -> str:
    """How the command was called, as far as it decides what is measured and written."""
    words = ["python -m tools.report docs/reports/bench.md" if report else "python -m benchmarks.speed"]
    words += ["--quick"] if quick else []
    words += [f"--{name} {shlex.quote(str(value))}" for name, values in given.items() for value in values]
    words += [] if rounds is None else [f"--rounds {rounds}"]
    return " ".join(words)


def main(arguments: Sequence[str], into: Path) -> int:
    """Run the command and write the page of the docs, with the picture beside it."""
    return int(speed.main(list(arguments), prog_name="python -m benchmarks.speed", obj=into))

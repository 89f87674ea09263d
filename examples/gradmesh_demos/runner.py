"""What the demos share: command-line options, progress, comparison with one process, tables and plots.

A demo is a module with `Job` (its options), `NEEDS` (the extra), `SHORT` and `HELP` (texts of the command),
`introduction(job)`, `run(job, watcher)`, `print_tables(result, console)` and `draw(result)`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gradmesh._util.environment import require

if TYPE_CHECKING:
    import click
    from matplotlib.axes import Axes
    from rich.progress import Progress
    from rich.table import Table

ALONE: Final = "one process"
ON_RANKS: Final = "ranks"
DEMOS = ("clip", "forces", "lm", "fno")
"""The modules; the first one is the default."""

_LOCK = threading.RLock()
"""Thread ranks share torch's default generator and dtype."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator, for one rank at a time, and restore it afterwards."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the matrices are small, and more threads would compete with the ranks for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def difference(found: Any, expected: Any) -> float:
    """The largest absolute difference of several tensors."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))


# ---- progress


class Watcher:
    """Receives the progress of a demo; this base class ignores it."""

    def begin(self, what: str, steps: int, *, only: bool = False) -> None:
        """A part starts, with a number of steps; with `only`, the earlier parts are hidden."""

    def advance(self, what: str, steps: int = 1, note: str = "") -> None:
        """Some steps of a part are done; `note` is shown."""

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line."""


class _Bars(Watcher):
    """A progress bar for each part."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._tasks = progress, dict[str, Any]()

    def begin(self, what: str, steps: int, *, only: bool = False) -> None:
        for task in self._tasks.values() if only else ():
            self._progress.update(task, visible=False)
        self._tasks[what] = self._progress.add_task(what, total=steps)

    def advance(self, what: str, steps: int = 1, note: str = "") -> None:
        self._progress.update(self._tasks[what], advance=steps, description=f"{what} {note}".rstrip())

    def line(self, text: str, style: str | None = None) -> None:
        # Line by line: a live table would only appear at the end of a log file.
        self._progress.console.print(text, style=style)


# ---- tables and plots


def table(*columns: str, left: tuple[str, ...] = ()) -> Table:
    """A table whose columns are aligned right, except for those in `left`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right")
    return made


def verdict(error: float, exact: float, right: str, wrong: str) -> str:
    """The text for an error: `right` if it is rounding."""
    return f"[green]{right}[/]" if error <= exact else f"[red]{wrong}[/]"


def some_steps(steps: int) -> list[int]:
    """The steps that a table shows."""
    return sorted({0, steps // 4, steps // 2, 3 * steps // 4, steps - 1})


def plain(*several: Axes) -> None:
    """A grid, and no frame at the top and right."""
    for axes in several:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def draw_losses(losses: Axes, apart: Axes, result: Any) -> None:
    """Plot the losses of both runs, and their absolute difference."""
    steps = range(1, len(result.losses) + 1)
    losses.plot(steps, result.right, color="black", linewidth=3, alpha=0.3, label=ALONE)
    losses.plot(steps, result.losses, color="#0072B2", linewidth=1, label=f"{result.job.ranks} ranks")
    losses.legend(frameon=False)
    apart.semilogy(steps, [max(each, 1e-17) for each in result.far], ".", color="#D55E00", markersize=4)
    apart.set(title="Absolute difference of the losses", xlabel="step", ylim=(1e-17, 1e-2))


# ---- the command line


def option(default: Any, text: str, least: int | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of a job that is an option of the command line."""
    how: dict[str, Any] = {"metadata": {"help": text, "least": least, "choices": choices}}
    if callable(default):
        return dataclasses.field(default_factory=default, **how)
    return dataclasses.field(default=default, **how)


RANKS: Final = "Number of local ranks."
BACKEND: Final = "shm, gloo: processes; threads: threads of one process."
SEED: Final = "Seed of the data, the held-out split, the initial parameters and the order."


def demo_group(reporting: Callable[[Callable[..., None]], Callable[..., None]]) -> click.Group:
    """Build `gradmesh demo`; `reporting` wraps each command, to print errors without a traceback."""
    import click

    class Group(click.Group):
        """Without a demo's name, runs the first demo."""

        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
                args = [DEMOS[0], *args]
            return super().parse_args(ctx, args)

    group = Group(
        "demo",
        short_help="Train on local ranks, and compare with one process.",
        help=f"Train on local ranks, and compare with one process. The default job is {DEMOS[0]}; see "
        f"`gradmesh demo {DEMOS[0]} --help`.",
    )
    for name in DEMOS:
        demo = importlib.import_module(f"{__package__}.{name}")
        run = functools.wraps(run_demo)(functools.partial(run_demo, name, demo))
        group.add_command(
            click.Command(
                name, callback=reporting(run), short_help=demo.SHORT, help=demo.HELP, params=_parameters(demo)
            )
        )
    return group


def _parameters(demo: Any) -> list[click.Parameter]:
    import click

    option = functools.partial(click.Option, show_default=True)
    file = click.Path(dir_okay=False, writable=True, path_type=Path)
    default = demo.Job()
    made: dict[str, click.Parameter] = {}
    for field in dataclasses.fields(default):
        how = field.metadata
        if how:
            kind = click.Choice(how["choices"]) if how["choices"] else None
            made[field.name] = option(
                [f"--{field.name}"],
                type=kind if how["least"] is None else click.IntRange(min=how["least"]),
                default=getattr(default, field.name),
                help=how["help"],
            )
    made["picture"] = option(
        ["--picture"],
        type=file,
        default=Path(f"gradmesh_{demo.PICTURE}.png"),
        help="Write the plots to this file, as PNG.",
    )
    made["json"] = option(
        ["--json", "as_json"],
        is_flag=True,
        help="Print a line of JSON to stdout, and everything else to stderr.",
    )
    if hasattr(demo, "write"):
        made["write"] = option(["--write"], type=file, help=demo.WRITE)
    common = [each for each in ("ranks", "backend", "seed", "picture", "json") if each in made]
    return [made[each] for each in dict.fromkeys([*common, *made])]


def run_demo(
    name: str, demo: Any, picture: Path, as_json: bool, write: Path | None = None, **chosen: Any
) -> None:
    """Run a demo, and show its results."""
    require(demo.NEEDS, "demo" if name == DEMOS[0] else f"demo {name}")
    from matplotlib.figure import Figure  # noqa: F401  # before the ranks start
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console, job = Console(stderr=as_json, highlight=False), demo.Job(**chosen)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        demo.write(write, job)
        console.print(f"Wrote {job.structures} structures to {write}")
        if as_json:
            print(json.dumps({"structures": job.structures, "written": str(write.resolve())}))
        return
    picture.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"{demo.introduction(job)}\n")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        result = demo.run(job, _Bars(progress))
    demo.draw(result).savefig(picture, format="png")
    demo.print_tables(result, console)
    console.print(f"Plots: {picture}")
    if as_json:
        print(json.dumps({**result.as_json(), "picture": str(picture.resolve())}))

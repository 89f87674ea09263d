"""The command line: `gradmesh audit`, `bench`, `check`, `demo`, `explain` and `info`.

Every command is a plain function, and `commands` is the one place that says how its options are spelled. What the
extras bring is imported when it is used, so that without them there is a text and no traceback.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gradmesh import installation
from gradmesh.backends import shm
from gradmesh.bench.command import bench
from gradmesh.checker.command import check_command
from gradmesh.demo.command import demo_group
from gradmesh.errors import GradmeshError, MissingExtraError
from gradmesh.explaining import explain_command
from gradmesh.extras import EXTRAS, missing, require
from gradmesh.ops.registry import table as ops_table
from gradmesh.verify.auditing.command import NOT_RUN, audit_command
from gradmesh.verify.auditing.kinds import KINDS

if TYPE_CHECKING:
    import click

__all__ = ["commands", "main"]

_HELP = """Differentiable collective communication for PyTorch.

The command shows what gradmesh does on this machine; programs import it: import gradmesh as gm, and run on
gm.launch, or under torchrun."""

_MOVED = ("compare", "modes")
"""Commands that compare gradmesh with other systems, which is for those who work on it."""


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

    option = functools.partial(click.Option, show_default=True)
    group = click.Group("gradmesh", help=_HELP)
    click.version_option(installation.version(), prog_name="gradmesh")(group)
    group.add_command(
        click.Command(
            "audit",
            callback=_with_exit_status(audit_command),
            short_help="Find out what is wrong with a collective of anyone's, and which law its backward obeys.",
            help="Audit functions that return (fn, inputs), as gradmesh.verify.audit takes them: MODULE:FUNCTION or "
            "FILE.py:FUNCTION. The exit status is 0 where nothing is found, 1 where something is, and 2 where a "
            "function could not be audited.",
            params=[
                click.Argument(["targets"], nargs=-1, required=True, metavar="MODULE:FUNCTION..."),
                option(["--arrow"], help='The types that are meant, such as "V -> R".'),
                option(
                    ["--world-size"], type=click.IntRange(min=1), default=3, help="Number of local ranks."
                ),
                option(
                    ["--backend"],
                    default="threads",
                    help="threads: threads of one process; shm, gloo: processes.",
                ),
                option(
                    ["--timeout"],
                    type=click.FloatRange(min=0, min_open=True),
                    default=20.0,
                    help="Seconds that one question to a function may take.",
                ),
                option(
                    ["--kind", "kinds"],
                    type=click.Choice(list(KINDS)),
                    multiple=True,
                    help="Look for this kind alone; may be given several times.",
                ),
                option(
                    ["--isolate"],
                    is_flag=True,
                    help="Give ranks that are threads a process of their own, so that its end is a finding.",
                ),
                option(
                    ["--gloo/--no-gloo"],
                    default=True,
                    help="Try strided tensors on Gloo processes too where torch.distributed is called.",
                ),
                option(["--json", "as_json"], is_flag=True, help="Print a line of JSON for each function."),
            ],
        )
    )
    group.add_command(
        click.Command(
            "check",
            callback=_with_exit_status(check_command),
            short_help="Find what is wrong with the gradients of a training script that knows nothing of gradmesh.",
            help="Run a script of torch.distributed on local ranks, as torchrun would, and hold the gradients that "
            "its parameters get against those of the sum of its losses: gradmesh check train.py -n 4 -- --lr 0.1, "
            "or -m package.module, or -m pytest -- tests/test_x.py. The exit status is 0 where no error is "
            "found, 1 where one is, and 2 where the script could not be run.",
            params=[
                click.Argument(
                    ["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT] [-- ARGUMENTS...]"
                ),
                option(["-m", "--module"], metavar="MODULE", help="Run a module, as python -m does."),
                option(
                    ["-n", "--ranks"], type=click.IntRange(min=2), default=2, help="Number of local ranks."
                ),
                option(
                    ["--steps"],
                    type=click.IntRange(min=1),
                    default=2,
                    help="Optimizer steps after which the script is stopped.",
                ),
                option(
                    ["--timeout"],
                    type=click.FloatRange(min=0, min_open=True),
                    default=60.0,
                    help="Seconds after which ranks that do nothing are stuck.",
                ),
                option(["--json", "as_json"], is_flag=True, help="Print a line of JSON."),
                option(
                    ["--sarif", "sarif_path"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Where to write what is found as SARIF 2.1.0, for code hosts.",
                ),
                option(
                    ["--baseline"],
                    type=click.Path(exists=True, dir_okay=False, path_type=Path),
                    help="Hide the findings that this file has.",
                ),
                option(
                    ["--write-baseline"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Write what is found to this file, and exit with 0.",
                ),
                option(
                    ["--picture"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Draw the lines of the first step, with the types of what they make, as PNG.",
                ),
            ],
        )
    )
    group.add_command(demo_group(_reporting_errors))
    group.add_command(
        click.Command(
            "bench",
            callback=_reporting_errors(bench),
            short_help="Time the verbs on this machine, beside torch.distributed's own calls.",
            help="Time the verbs on local ranks of this machine, forward, and forward with backward, at a few sizes, "
            "beside torch.distributed's own call of the same backend where there is one. Shows medians and their "
            "spread, and what the verb adds. Takes some minutes. Progress goes to stderr.",
            params=[
                option(
                    ["--backend"],
                    type=click.Choice(["shm", "gloo", "threads", "nccl"]),
                    default=shm.default(),
                    callback=_available,
                    help="shm, gloo, nccl: processes, under nccl a GPU each; threads: threads of one process.",
                ),
                option(["--ranks"], type=click.IntRange(min=2), default=2, help="Number of local ranks."),
                option(["--quick"], is_flag=True, help="Few sizes and few rounds: less than a minute."),
                option(
                    ["--json", "json_path"],
                    type=click.Path(dir_okay=False, writable=True, path_type=Path),
                    help="Where to write every round's times, as JSON.",
                ),
            ],
        )
    )
    group.add_command(
        click.Command(
            "explain",
            callback=_reporting_errors(explain_command),
            short_help="Show the page of an error, or of a rule of gradmesh check.",
            help="Show the pages of errors (AxisError) and of rules of gradmesh check (GM101, or missing-sum): what "
            "raises it in programs that run, and what to do. Without a name, list what has a page.",
            params=[click.Argument(["names"], nargs=-1, metavar="[NAME...]")],
        )
    )
    group.add_command(
        click.Command(
            "info",
            callback=_reporting_errors(info),
            short_help="Say what is installed here and what gradmesh can run on.",
            help="Say what is installed here, which backends and extras there are, and which environment variables "
            "are set for gradmesh.",
            params=[
                option(["--table"], is_flag=True, help="Print the table of the collectives, as Markdown.")
            ],
        )
    )
    for name in _MOVED:
        group.add_command(
            click.Command(
                name,
                callback=_reporting_errors(functools.partial(_moved, name)),
                hidden=True,
                add_help_option=False,
                context_settings={"ignore_unknown_options": True},
                params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
            )
        )
    return group


def info(table: bool) -> None:
    """Print what is installed, or the table of the collectives."""
    if table:
        print(ops_table())
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    backends = {name: why or "available" for name, why in installation.backends().items()}
    backends[shm.default()] += ", the default of gm.launch"
    absent = {extra: ", ".join(missing(extra)) for extra in EXTRAS}
    rows = {
        **installation.versions(),
        **{f"backend {name}": text for name, text in backends.items()},
        **{
            f"extra {extra}": f"no {modules}: pip install 'gradmesh[{extra}]'" if modules else "installed"
            for extra, modules in absent.items()
        },
        **installation.variables(),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(escape(name), escape(value))
    Console(highlight=False).print(grid, soft_wrap=True)


def _with_exit_status(command: Callable[..., int]) -> Callable[..., None]:
    """The command, with what it returns as the exit status, and gradmesh's errors and unusable files as `NOT_RUN`."""
    import click

    @functools.wraps(command)
    def wrapped(**options: object) -> None:
        try:
            status = command(**options)
        except BrokenPipeError:  # who reads has enough: click ends without a word
            raise
        except (GradmeshError, OSError) as error:
            click.echo(str(error), err=True)
            status = NOT_RUN
        click.get_current_context().exit(status)

    return wrapped


def _available(_context: click.Context, _option: click.Parameter, backend: str) -> str:
    """The backend, if it can be had here; else a usage error."""
    import click

    if why := installation.backends()[backend]:
        raise click.BadParameter(f"{backend} is not available: {why}; `gradmesh info` lists what is")
    return backend


def _moved(name: str, arguments: tuple[str, ...]) -> None:
    """Say where a command has gone.

    Raises:
        GradmeshError: always.
    """
    del arguments
    raise GradmeshError(
        f"`gradmesh {name}` is now `python -m benchmarks.{name}`, run in a clone of the repository"
    )


def _reporting_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with gradmesh's own errors and unusable files told as text and exit status 1."""
    import click

    @functools.wraps(command)
    def wrapped(**options: object) -> None:
        try:
            command(**options)
        except BrokenPipeError:
            raise
        except (GradmeshError, OSError) as error:
            raise click.ClickException(str(error)) from error

    return wrapped

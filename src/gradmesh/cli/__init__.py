"""The command line: `gradmesh audit`, `bench`, `check`, `demo`, `explain` and `info`.

Every command is a plain function; `commands` defines all options. Extras are imported when they are used, so that a
missing one is reported without a traceback.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradmesh._util.environment import EXTRAS, missing, require
from gradmesh.backends import shm
from gradmesh.bench import bench as bench_command
from gradmesh.checker.command import check_command
from gradmesh.cli import installation
from gradmesh.cli.explain import explain_command
from gradmesh.errors import GradmeshError, MissingExtraError
from gradmesh.ops.registry import table as ops_table
from gradmesh.verify.auditing.audit import NOT_RUN, audit_command
from gradmesh.verify.auditing.findings import KINDS

if TYPE_CHECKING:
    import click

__all__ = ["commands", "main"]

_HELP = """Differentiable collective communication for PyTorch.

The command checks and times gradmesh on this machine. Programs import it: import gradmesh as gm, and run with
gm.launch or torchrun."""

_MOVED = ("compare", "modes")
"""Former commands for developers of gradmesh."""


def main() -> None:
    """Run the command line."""
    try:
        group = commands()
    except MissingExtraError as error:
        sys.exit(str(error))
    group(prog_name="gradmesh")


def commands() -> click.Group:
    """Build the command line."""
    require("cli", "cli")
    import click

    option = functools.partial(click.Option, show_default=True)
    new_file = click.Path(dir_okay=False, writable=True, path_type=Path)
    audit = click.Command(
        "audit",
        callback=_with_exit_status(audit_command),
        short_help="Audit a custom collective for gradient bugs.",
        help="Audit a custom collective: find gradient bugs and report which convention its backward implements. "
        "Each target is a function that returns (fn, inputs), as for gradmesh.verify.audit: MODULE:FUNCTION or "
        "FILE.py:FUNCTION. The exit status is 0 if there is no error or warning, 1 if there is, and 2 if a "
        "function could not be audited.",
        params=[
            click.Argument(["targets"], nargs=-1, required=True, metavar="MODULE:FUNCTION..."),
            option(["--arrow"], help='The intended types, such as "V -> R".'),
            option(["--world-size"], type=click.IntRange(min=1), default=3, help="Number of local ranks."),
            option(
                ["--backend"],
                default="threads",
                help="threads: threads of one process; shm, gloo: processes.",
            ),
            option(
                ["--timeout"],
                type=click.FloatRange(min=0, min_open=True),
                default=20.0,
                help="Time limit of each test of a function, in seconds.",
            ),
            option(
                ["--kind", "kinds"],
                type=click.Choice(list(KINDS)),
                multiple=True,
                help="Look for this kind of bug only; may be repeated.",
            ),
            option(
                ["--isolate"],
                is_flag=True,
                help="Run thread ranks in a separate process, so that a crash becomes a finding.",
            ),
            option(
                ["--gloo/--no-gloo"],
                default=True,
                help="Also test strided tensors on gloo processes if the function calls torch.distributed.",
            ),
            option(["--json", "as_json"], is_flag=True, help="Print a line of JSON for each function."),
        ],
    )
    check = click.Command(
        "check",
        callback=_with_exit_status(check_command),
        short_help="Find gradient bugs of a distributed training script; it need not use gradmesh.",
        help="Run a torch.distributed training script on local ranks, like torchrun, and compare each parameter's "
        "gradient with the gradient of the sum of all ranks' losses: gradmesh check train.py -n 4 -- --lr 0.1, "
        "or -m package.module, or -m pytest -- tests/test_x.py. The exit status is 0 if no error is found, 1 if "
        "one is, and 2 if the script could not be run.",
        params=[
            click.Argument(
                ["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT] [-- ARGUMENTS...]"
            ),
            option(["-m", "--module"], metavar="MODULE", help="Run a module, as python -m does."),
            option(["-n", "--ranks"], type=click.IntRange(min=2), default=2, help="Number of local ranks."),
            option(
                ["--steps"],
                type=click.IntRange(min=1),
                default=2,
                help="Stop the script after this many optimizer steps.",
            ),
            option(
                ["--timeout"],
                type=click.FloatRange(min=0, min_open=True),
                default=60.0,
                help="Report ranks as stuck after this many idle seconds.",
            ),
            option(["--json", "as_json"], is_flag=True, help="Print a line of JSON."),
            option(
                ["--sarif", "sarif_path"],
                type=new_file,
                help="Write the findings to this file as SARIF 2.1.0, for code hosts.",
            ),
            option(
                ["--baseline"],
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="Hide the findings that are in this file.",
            ),
            option(
                ["--write-baseline"],
                type=new_file,
                help="Write the findings to this file, and exit with status 0.",
            ),
            option(
                ["--picture"],
                type=new_file,
                help="Write a picture of the first step's source lines, with the types of their results, as PNG.",
            ),
            option(
                ["--redistributions"],
                is_flag=True,
                help="List where DTensor redistributes an operand that the script has not redistributed.",
            ),
        ],
    )
    bench = click.Command(
        "bench",
        callback=_reporting_errors(bench_command),
        short_help="Time gradmesh's collectives and those of torch.distributed on this machine.",
        help="Time gradmesh's collectives on local ranks, forward and forward with backward, at several sizes, "
        "and compare with torch.distributed's on the same backend if available. Shows medians, interquartile "
        "ranges and gradmesh's overhead. Takes some minutes. Progress goes to stderr.",
        params=[
            option(
                ["--backend"],
                type=click.Choice(["shm", "gloo", "threads", "nccl"]),
                default=shm.default(),
                callback=_available,
                help="shm, gloo: processes; nccl: processes with one GPU each; threads: threads of one process.",
            ),
            option(["--ranks"], type=click.IntRange(min=2), default=2, help="Number of local ranks."),
            option(["--quick"], is_flag=True, help="Fewer sizes and rounds; less than a minute."),
            option(
                ["--json", "json_path"],
                type=new_file,
                help="Write every round's times to this file, as JSON.",
            ),
        ],
    )
    explain = click.Command(
        "explain",
        callback=_reporting_errors(explain_command),
        short_help="Show the help page of an error or of a rule of gradmesh check.",
        help="Show the help page of an error (AxisError) or of a rule of gradmesh check (GM101 or missing-sum): "
        "programs that cause it, and what to do. Without a name, list all pages.",
        params=[click.Argument(["names"], nargs=-1, metavar="[NAME...]")],
    )
    info = click.Command(
        "info",
        callback=_reporting_errors(info_command),
        short_help="Show versions, available backends, installed extras and environment variables.",
        help="Show versions, available backends, installed extras, and gradmesh's environment variables.",
        params=[option(["--table"], is_flag=True, help="Print the table of the collectives, as Markdown.")],
    )
    moved = [
        click.Command(
            name,
            callback=_reporting_errors(functools.partial(_moved, name)),
            hidden=True,
            add_help_option=False,
            context_settings={"ignore_unknown_options": True},
            params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        )
        for name in _MOVED
    ]
    demo = _demos().demo_group(_reporting_errors)
    group = click.Group("gradmesh", help=_HELP, commands=[audit, check, demo, bench, explain, info, *moved])
    click.version_option(installation.version(), prog_name="gradmesh")(group)
    return group


def info_command(table: bool) -> None:
    """Print versions, backends, extras and variables, or the table of the collectives."""
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
    """Exit with the command's result; print gradmesh's errors and OSErrors, and exit with `NOT_RUN`."""
    import click

    @functools.wraps(command)
    def wrapped(**options: object) -> None:
        try:
            status = command(**options)
        except BrokenPipeError:  # the reader closed the pipe: click exits quietly
            raise
        except (GradmeshError, OSError) as error:
            click.echo(str(error), err=True)
            status = NOT_RUN
        click.get_current_context().exit(status)

    return wrapped


def _available(_context: click.Context, _option: click.Parameter, backend: str) -> str:
    """The backend if it is available, else a usage error."""
    import click

    if why := installation.backends()[backend]:
        raise click.BadParameter(
            f"{backend} is not available: {why}; `gradmesh info` lists available backends"
        )
    return backend


def _moved(name: str, arguments: tuple[str, ...]) -> None:
    """Raise GradmeshError with the command's new name."""
    del arguments
    raise GradmeshError(
        f"`gradmesh {name}` is now `python -m benchmarks.{name}`, run in a clone of the repository"
    )


def _demos() -> Any:
    """The module of `gradmesh demo`: installed with a wheel; in a checkout it is in examples/."""
    examples = Path(__file__).parents[3] / "examples"
    if examples.is_dir() and str(examples) not in sys.path:
        sys.path.append(str(examples))  # process ranks inherit it
    return importlib.import_module("gradmesh_demos.runner")


def _reporting_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print gradmesh's errors and OSErrors without a traceback, and exit with status 1."""
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

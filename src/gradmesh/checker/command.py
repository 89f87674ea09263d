"""`gradmesh check`: what its arguments name, what it writes, and what its exit status says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradmesh import __version__
from gradmesh._torch.operators import redistribution_observer
from gradmesh._util.environment import require
from gradmesh.checker import findings as baselines
from gradmesh.checker.findings import Verdict
from gradmesh.checker.judging.context import Context
from gradmesh.checker.report import counted, sarif, show, show_redistributions
from gradmesh.checker.run import Target, check_script
from gradmesh.errors import ArgumentError

if TYPE_CHECKING:
    from gradmesh.checker.picture import Line

FOUND, NOT_RUN = 1, 2
"""Exit status: errors were found; the script could not be run, or what is known of it is not enough."""


def check_command(
    arguments: Sequence[str],
    *,
    module: str | None = None,
    ranks: int = 2,
    steps: int = 2,
    timeout: float = 60.0,
    as_json: bool = False,
    sarif_path: Path | None = None,
    baseline: Path | None = None,
    write_baseline: Path | None = None,
    picture: Path | None = None,
    redistributions: bool = False,
) -> int:
    """Check a script, print and write what was found, and return the exit status.

    The arguments are the script and its own arguments, of a module these alone; the others are the options of the
    command `gradmesh check`, which describes them.

    Returns 0 where no error was found, or all of it was written down as known; else `FOUND`, or `NOT_RUN`.

    Raises:
        ArgumentError: there is no such script, or the baseline is none.
        GradmeshError: the script cannot be run.
    """
    target = _target(arguments, module)
    known = baselines.read(baseline) if baseline else ()
    seen: list[list[Line]] = []
    if picture:
        require("demo", "check --picture")
    shown_to: dict[str, Any] = {"see": _first_lines(seen)} if picture else {}
    if redistributions:
        redistribution_observer()
    with _progress() as progress:
        verdict = check_script(
            target, ranks=ranks, steps=steps, timeout=timeout, progress=progress, **shown_to
        )
    found = baselines.beside(verdict.findings, known)
    shown = replace(verdict, findings=found.new)
    gone = found.gone if verdict.status == "complete" else ()
    if sarif_path:
        script = None if target.module else target.path_or_module
        log = sarif(shown, version=__version__, script=script)
        sarif_path.write_text(json.dumps(log, indent=1) + "\n")
    if picture and seen:
        from gradmesh.checker.picture import drawn

        title = f"{target.path_or_module}: what each line makes, over {ranks} ranks"
        drawn(seen[0], shown.findings, title).savefig(picture, format="png")
    if as_json:
        data = {**shown.as_json(), "hidden": len(found.hidden), "gone": [str(each) for each in gone]}
        print(json.dumps(data), flush=True)
    else:
        _show(shown, found.hidden, gone, redistributions)
    if verdict.status == "not-run" or (verdict.status == "stopped" and not verdict.errors):
        return NOT_RUN
    if write_baseline:
        baselines.write(write_baseline, verdict.findings)
        if not as_json:
            print(f"{counted(len(verdict.findings), 'finding')} written to {write_baseline}")
        return 0
    unchecked = verdict.followed == 0 and not verdict.findings
    return FOUND if shown.errors else NOT_RUN if unchecked else 0


def _first_lines(seen: list[list[Line]]) -> Callable[[Context], None]:
    from gradmesh.checker.picture import lines_of

    def see(context: Context) -> None:
        if not seen:
            seen.append(lines_of(context))

    return see


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is being done."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda what: status.update(what.replace("[", r"\["))


def _show(
    verdict: Verdict, hidden: Sequence[object], gone: Sequence[baselines.Known], redistributions: bool
) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    show(verdict, console)
    if redistributions:
        show_redistributions(verdict, console)
    if hidden:
        console.print(f"{counted(len(hidden), 'finding')} of the baseline hidden")
    for each in gone:
        console.print(f"of the baseline, no longer found: {each}", soft_wrap=True)


def _target(arguments: Sequence[str], module: str | None) -> Target:
    if module:
        return Target(module, True, tuple(arguments))
    if not arguments:
        raise ArgumentError.of("no script given", op="check", remedy="pass a script or -m MODULE; see --help")
    script = arguments[0]
    if not Path(script).is_file():
        raise ArgumentError.of(
            f"{script!r} is not a file",
            op="check",
            expected="a Python script",
            remedy="pass a script's path, or -m MODULE; put the script's own arguments after --",
        )
    return Target(script, False, tuple(arguments[1:]))

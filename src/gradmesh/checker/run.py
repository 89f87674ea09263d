"""Running a script on local ranks under the recorder, and judging what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

from gradmesh.checker.findings import Verdict
from gradmesh.errors import GradmeshError, message

__all__ = ["Target", "check_script"]


@dataclass(frozen=True)
class Target:
    """What to run.

    Attributes:
        path_or_module: a file, or a module as `python -m` takes it.
        module: whether it is a module.
        args: what the script finds in sys.argv behind its name.
    """

    path_or_module: str
    module: bool = False
    args: tuple[str, ...] = ()


def check_script(target: Target, *, ranks: int, steps: int, timeout: float) -> Verdict:
    """Run a script on ranks, and judge what it did.

    Raises:
        GradmeshError: it cannot be run.
    """
    raise GradmeshError(
        message("scripts cannot be checked yet", op="check", got=f"{target}, {ranks=}, {steps=}, {timeout=}")
    )

"""Plain training scripts that know nothing of gradmesh: what each is about, and the finding that it has to get."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

__all__ = ["MARK", "RIGHT", "SCRIPTS", "WRONG", "Script", "read"]

HERE = Path(__file__).parent
MARK = "# <- here"


@dataclasses.dataclass(frozen=True)
class Script:
    """A script and what is expected of it.

    Attributes:
        path: the file.
        about: what it does, or what is wrong with it.
        ranks: on how many processes it runs.
        expected: the rule that it breaks, None for a right script.
        also: further rules that are true of it as well.
        lines: the lines that a finding may point at, counted from one.
        twin: the name of the right script that differs from it in the fault alone, if there is one.
        cut: ends of the names of the parameters that are not the same on the ranks because each has a part.
        steps: of an optimizer until what is wrong is there; None for two.
        timeout: the seconds after which a script that hangs may be ended.
        report: the public report of the fault in another project, if it is one.
    """

    path: Path
    about: str
    ranks: int
    expected: str | None
    also: frozenset[str]
    lines: tuple[int, ...]
    twin: str | None
    cut: tuple[str, ...]
    steps: int | None
    timeout: float | None
    report: str | None

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem


def read(path: Path) -> Script:
    """What the comments at the head of a script say of it."""
    lines = path.read_text().splitlines()
    facts = {}
    for line in lines:
        found = re.fullmatch(r"# (about|ranks|expect|also|twin|cut|timeout|steps|report): (.+)", line)
        if found is None:
            break
        facts[found[1]] = found[2]
    return Script(
        path,
        facts["about"],
        int(facts["ranks"]),
        None if facts["expect"] == "none" else facts["expect"],
        frozenset(facts.get("also", "").split()),
        tuple(number for number, line in enumerate(lines, 1) if line.endswith(MARK)),
        facts.get("twin"),
        tuple(facts.get("cut", "").split()),
        int(facts["steps"]) if "steps" in facts else None,
        float(facts["timeout"]) if "timeout" in facts else None,
        facts.get("report"),
    )


def _scripts(folder: str) -> dict[str, Script]:
    paths = sorted((HERE / folder).glob("*.py"))
    return {path.stem: read(path) for path in paths if path.stem != "__init__"}


WRONG = _scripts("wrong")
RIGHT = _scripts("right")
SCRIPTS = {**WRONG, **RIGHT}
"""Every script by its name; no name is in both folders."""

"""Draw the lines of a program with the types of their results, as `gradmesh check --picture` does.

$ python -m tools.report docs/check.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradmesh.checker.picture import Line, drawn, lines_of
from gradmesh.checker.run import Target, check_script
from tests.scripts import WRONG
from tools.charts import save

SHOWN, RANKS = WRONG["megatron_g_sums"], 2


def main(arguments: Sequence[str], into: Path) -> int:
    """Check the program, and draw it."""
    seen: list[list[Line]] = []
    target = Target(str(SHOWN.path))
    verdict = check_script(target, ranks=RANKS, steps=1, see=lambda context: seen.append(lines_of(context)))
    title = f"{SHOWN.path.name}: what each line makes, over {RANKS} ranks"
    save(drawn(seen[0], verdict.findings, title), into, title)
    return 0

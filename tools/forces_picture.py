"""Run `gradmesh demo forces`, and draw its results for the docs.

$ python -m tools.report docs/forces.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradmesh_demos import forces

from tools.charts import save


def main(arguments: Sequence[str], into: Path) -> int:
    """Run it, and draw it."""
    figure = forces.draw(forces.run(forces.Job()))
    save(figure, into, "Forces predicted and right, rows sent, energies in molecular dynamics")
    return 0

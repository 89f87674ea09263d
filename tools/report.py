"""Regenerate a generated page, folder or picture; without arguments, list them.

$ python -m tools.report docs/reports/layers.md
$ python -m tools.report docs/reports/graphs-scale.md bytes growth    # with options of the tool that writes it

A tool, run by itself, prints the same, or names the files that are not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent

PAGES = {
    "README.md": "tools.generate",
    "docs/badges": "tools.generate",
    "docs/check-code-host.svg": "tools.code_host.__main__",
    "docs/check.svg": "tools.checked_picture",
    "docs/errors": "tools.errors",
    "docs/forces.svg": "tools.forces_picture",
    "docs/launch.md": "tools.generate",
    "docs/libraries.md": "tools.libraries.__main__",
    "docs/loops.md": "tools.loops",
    "docs/models.md": "tools.models.__main__",
    "docs/no_sync.md": "tools.no_sync",
    "docs/pictures": "tools.pictures.__main__",
    "docs/point.svg": "tools.point",
    "docs/profiler.md": "tools.instructions",
    "docs/replaced.md": "tools.replaced.__main__",
    "docs/reports/attention.md": "tools.attention",
    "docs/reports/audits.md": "tools.audits",
    "docs/reports/backends.md": "tools.backends",
    "docs/reports/bench.md": "benchmarks.speed.command",
    "docs/reports/check.md": "tools.checked",
    "docs/reports/contrastive.md": "tools.contrastive",
    "docs/reports/faults.md": "tools.faults",
    "docs/reports/fields.md": "tools.fields",
    "docs/reports/graphs-scale.md": "tools.graphs.figures",
    "docs/reports/known-bad-programs.md": "tools.zoo",
    "docs/reports/hosts.md": "benchmarks.hosts",
    "docs/reports/gpu.md": "tools.gpu",
    "docs/reports/layers.md": "tools.layers.__main__",
    "docs/reports/loss-scaling.md": "tools.objectives",
    "docs/reports/mismatches.md": "tools.mismatches",
    "docs/reports/modes.md": "benchmarks.modes.command",
    "docs/reports/operators.md": "tools.operators.__main__",
    "docs/reports/overlap.md": "tools.overlap.__main__",
    "docs/reports/overlap.svg": "tools.overlap.__main__",
    "docs/reports/published.md": "tools.published",
    "docs/reports/simulator.md": "tools.simulator.figures",
    "docs/reports/start.md": "benchmarks.start",
    "docs/rules": "tools.rules",
    "docs/tutorials": "tools.notebooks",
    "docs/versions.md": "tools.versions",
    "tests/public_api.txt": "tools.public_api",
}
"""The module that writes each page: its `main(options, into)`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a page; the exit status of the tool that writes it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print("\n".join(f"{page:38} {module.removesuffix('.__main__')}" for page, module in PAGES.items()))
        return 0
    page = given[0].rstrip("/")
    if page not in PAGES:
        print(f"{given[0]} is not a generated page; python -m tools.report lists them", file=sys.stderr)
        return 2
    return int(import_module(PAGES[page]).main(given[1:], ROOT / page))


if __name__ == "__main__":
    sys.exit(main())

"""Write what is generated into README.md, pages in docs/ and the badges; `--check` asks whether they are fresh."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gradmesh._torch import fsdp as _fsdp  # noqa: F401  # registers its names
from gradmesh._torch.names import RELIED_ON, RELIED_ON_LATER
from gradmesh._util import environment
from gradmesh.ops.registry import table
from tools.badges import badges

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
VERSIONS, VARIABLES = ROOT / "docs" / "versions.md", ROOT / "docs" / "launch.md"
MODES = ROOT / "docs" / "reports" / "modes.md"
OTHERS = "<!-- modes: begin (make docs) -->", "<!-- modes: end -->"
BEGIN, END = "<!-- table: begin (make docs) -->", "<!-- table: end -->"


def _between_marks(text: str, generated: str, begin: str = BEGIN, end: str = END) -> str:
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{generated}\n{end}{after}"


def with_table(text: str) -> str:
    """The text with the table of ops between its marks, and the one of other systems as it was measured."""
    measured = MODES.read_text().split("## Summary\n\n")[1].split("\n\n")[0]
    return _between_marks(_between_marks(text, table()), measured, *OTHERS)


def with_names(text: str) -> str:
    """The text with the private names of torch between its marks, and what happens without each."""
    names: dict[str, list[str]] = {}
    for path, without in {**RELIED_ON, **RELIED_ON_LATER}.items():
        names.setdefault(without, []).append(f"`{path}`")
    rows = [f"| {'<br>'.join(paths)} | {without} |" for without, paths in names.items()]
    return _between_marks(text, "\n".join(["| without | what happens |", "|---|---|", *rows]))


def with_variables(text: str) -> str:
    """The text with the environment variables between its marks."""
    return _between_marks(text, environment.table())


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Update all pages, or check them."""
    check = "--check" in (sys.argv if arguments is None else arguments)
    stale = 0
    for page, generated in ((README, with_table), (VERSIONS, with_names), (VARIABLES, with_variables)):
        text = page.read_text()
        fresh = generated(text)
        stale |= text != fresh
        if not check:
            page.write_text(fresh)
    for name, fresh in badges().items():
        path = ROOT / "docs" / "badges" / name
        stale |= not path.exists() or path.read_text() != fresh
        if not check:
            path.write_text(fresh)
    return int(stale and check)


if __name__ == "__main__":
    sys.exit(main())

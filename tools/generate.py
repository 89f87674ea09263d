"""Write what is generated from the registry into README.md; `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from gradmesh.ops.registry import table

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- table: begin (make docs) -->", "<!-- table: end -->"


def with_table(text: str) -> str:
    """The text with the table of ops between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Update the README, or check it."""
    text = README.read_text()
    fresh = with_table(text)
    if "--check" in sys.argv:
        return int(text != fresh)
    README.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The size of the package: files and lines per subpackage, with a ceiling that `make lint` holds.

A change that needs more lines deletes some elsewhere, or raises the ceiling and says why.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

MOST_FILES, MOST_LINES = 180, 62_750
SOURCE = Path(__file__).parent.parent / "src"


def sizes(source: Path = SOURCE) -> tuple[Counter[str], Counter[str]]:
    """Files and lines of each package, by name; what stands at the root of `gradmesh` counts as `gradmesh`."""
    files, lines = Counter[str](), Counter[str]()
    for file in source.rglob("*.py"):
        parts = file.relative_to(source).parent.parts
        name = ".".join(parts[:2])
        files[name] += 1
        lines[name] += len(file.read_text().splitlines())
    return files, lines


def main() -> None:
    """Print the report; exit with 1 above the ceiling."""
    files, lines = sizes()
    for name in sorted(lines):
        print(f"{name:<28}{files[name]:>6} files{lines[name]:>8} lines")
    print(
        f"{'together':<28}{files.total():>6} files{lines.total():>8} lines, at most {MOST_FILES}, {MOST_LINES}"
    )
    if files.total() > MOST_FILES or lines.total() > MOST_LINES:
        sys.exit("src is above the ceiling of tools/size.py: delete elsewhere what this change adds")


if __name__ == "__main__":
    main()

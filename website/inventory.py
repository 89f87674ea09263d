"""What the docstrings name in torch and Python, and where that is described: the used part of their inventories.

`objects.txt` has a line for each name; a build makes of it the files that intersphinx reads, and needs no network.
"""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["OBJECTS", "mapping", "objects"]

OBJECTS = Path(__file__).parent / "objects.txt"


def objects() -> dict[str, tuple[str, list[tuple[str, str, str]]]]:
    """Of each project its address and its names, each with its role and its page."""
    found: dict[str, tuple[str, list[tuple[str, str, str]]]] = {}
    names: list[tuple[str, str, str]] = []
    for line in OBJECTS.read_text().splitlines():
        if line.startswith("# "):
            _, project, address = line.split()
            found[project] = address, (names := [])
        elif line:
            name, role, page = line.split()
            names.append((name, role, page))
    return found


def mapping(folder: Path) -> dict[str, tuple[str, str]]:
    """Write the inventories, and say where they are, as `intersphinx_mapping` takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for project, (address, names) in objects().items():
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        body = "".join(f"{name} py:{role} 1 {page} -\n" for name, role, page in names)
        path = folder / f"{project}.inv"
        path.write_bytes(head.encode() + zlib.compress(body.encode()))
        found[project] = address, str(path)
    return found

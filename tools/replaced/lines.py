"""What `gradmesh.compat.fairchem` replaces of fairchem-core: lines of files that go, and names that others use.

The folder is that of fairchem/core.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gradmesh.compat import fairchem

PLACES = ("common/gp_utils.py", "common/parallelism")
"""What goes."""

_MODULES = ("gp_utils", "parallelism", "graph_parallel_a2a", "graph_partition")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Counted(NamedTuple):
    """A file that goes."""

    path: str  # where it is
    blob: str  # the first digits of its hash in git, by which it is found whatever the commit
    lines: int
    code: int  # those of them that are neither empty nor comments nor docstrings


def counted(core: Path) -> list[Counted]:
    """The files that go, with how long they are."""
    return [_counted(core, file) for place in PLACES for file in _files(core / place)]


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def _counted(core: Path, file: Path) -> Counted:
    held = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(held) + held, usedforsecurity=False).hexdigest()
    return Counted(str(file.relative_to(core)), blob[:12], len(held.splitlines()), len(_code(held.decode())))


def _code(text: str) -> set[int]:
    """The lines with code."""
    texts = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return lines - texts


def names_used(core: Path) -> dict[str, set[str]]:
    """For each name of these files that another file uses, where."""
    gone = {file for place in PLACES for file in _files(core / place)}
    used: dict[str, set[str]] = {}
    for file in sorted(set(core.rglob("*.py")) - gone):
        for name in _used(ast.parse(file.read_text())):
            used.setdefault(name, set()).add(str(file.relative_to(core)))
    return used


def _used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in _MODULES:
            yield from (alias.name for alias in node.names if alias.name not in _MODULES)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "gp_utils"
        ):
            yield node.attr


def show(core: Path) -> int:
    """Print both; the exit status says whether a name is missing."""
    files = counted(core)
    print("| file | in git | lines | of code |\n|---|---|---:|---:|")
    for each in files:
        print(f"| `{each.path}` | `{each.blob}` | {each.lines:,} | {each.code:,} |")
    print(f"| all | | {sum(each.lines for each in files):,} | {sum(each.code for each in files):,} |\n")
    used = names_used(core)
    missing = {name: where for name, where in used.items() if not hasattr(fairchem, name)}
    where = set().union(*used.values()) if used else set()
    print(
        f"{len(used)} names are used in {len(where)} other files; missing: {', '.join(sorted(missing)) or 'none'}"
    )
    return int(bool(missing))

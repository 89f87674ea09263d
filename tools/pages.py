"""Generated parts of pages, between the mark that names their command and `END`; folders of generated files."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

END = "<!-- end -->"


def mark(page: str, *options: str) -> str:
    """The line above a generated part of a page: the command that writes it."""
    return f"<!-- {' '.join(('python -m tools.report', page, *options))} -->"


def with_part(text: str, begin: str, part: str) -> str:
    """A page's text with another part below a mark."""
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{part}\n\n{END}{rest.split(END, 1)[1]}"


def put(page: Path, begin: str, part: str) -> None:
    """Write a part into a page."""
    page.write_text(with_part(page.read_text(), begin, part))


def show(text: str, into: Path | None) -> None:
    """Write a whole page, or print it."""
    if into is None:
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        into.write_text(text)


def written(files: Mapping[Path, str], write: bool) -> int:
    """Write the files that are not up to date, or name them; the exit status."""
    stale = {path: text for path, text in files.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        else:
            print(f"{path} is not up to date")
    return int(bool(stale) and not write)


def table(heads: str | Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; its heads are listed, or written as in the table: "one | other"."""
    heads = heads.split(" | ") if isinstance(heads, str) else heads
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def machine(ranks: int | None = None) -> str:
    """Where something was measured."""
    where = f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {os.cpu_count()} cores"
    return where if ranks is None else f"{where}, {ranks} ranks with one thread each"


def parser_of(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )

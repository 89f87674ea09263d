"""Generated parts of pages, between the mark that names their command and `END`; folders of generated files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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

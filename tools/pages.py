"""Files that a command writes, or says of that they are not up to date."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["written"]


def written(about: str | None, folder: Path, files: Callable[[Path], Mapping[Path, str]]) -> int:
    """Write the files where `--write` asks for it, else name those that are not up to date; the exit status.

    Args:
        about: what the command says of itself.
        folder: where the files are.
        files: what they have to hold, in a folder.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write what is not up to date")
    options = parser.parse_args()
    made = files(options.write or folder)
    stale = {path: text for path, text in made.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if options.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        else:
            print(f"{path} is not up to date")
    return int(bool(stale) and not options.write)

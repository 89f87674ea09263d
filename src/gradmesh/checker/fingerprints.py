"""What a finding is known by, on other machines and after edits elsewhere in the file."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gradmesh.checker.findings import Finding, Place

__all__ = ["fingerprint", "numbered", "place_of", "relative", "root"]


def root(folder: Path | None = None) -> Path:
    """The folder that files are named from: the nearest one upward that is under version control, else the folder.

    Args:
        folder: where to begin; the current folder if there is none.
    """
    folder = (folder or Path.cwd()).resolve()
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def relative(file: str, base: Path) -> str:
    """A file as it is called from a folder; of an installed package, from where packages are installed.

    >>> relative("/home/me/model/train.py", Path("/home/me/model"))
    'train.py'
    >>> relative("/usr/lib/python3/site-packages/megatron/layers.py", Path("/home/me/model"))
    'megatron/layers.py'
    """
    path = Path(file)
    if "site-packages" in path.parts:
        last = len(path.parts) - path.parts[::-1].index("site-packages")
        return Path(*path.parts[last:]).as_posix()
    path = Path(os.path.abspath(path))
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()


def place_of(finding: Finding) -> Place:
    """Where a finding is shown: where it goes wrong, else where it began, else nowhere."""
    return finding.at or finding.began or Place("", 0, "", "")


def fingerprint(finding: Finding, base: Path | None = None) -> str:
    """What stays when lines move: rule, file, function, source text without its spaces, and subject.

    Args:
        finding: what is known by it.
        base: the folder that files are named from; `root()` if there is none.
    """
    place = place_of(finding)
    file = relative(place.file, base or root()) if place.file else ""
    parts = (finding.rule.id, file, place.function, " ".join(place.text.split()), finding.subject)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def numbered(findings: Iterable[Finding], base: Path) -> list[tuple[Finding, str, int]]:
    """Each finding with its fingerprint, and a number from 1 that tells those of one fingerprint apart."""
    seen: Counter[str] = Counter()
    found = []
    for finding in findings:
        print_ = fingerprint(finding, base)
        seen[print_] += 1
        found.append((finding, print_, seen[print_]))
    return found

"""Write the rules of `gradmesh check` into their pages: python -m tools.report docs/rules.

The head of each page and the page that lists them come from the registry; the programs of a page are written by hand.
By itself it only lists outdated pages.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from gradmesh.checker.findings import RULES, Rule
from tools.pages import mark, with_part, written

FOLDER = Path(__file__).parent.parent / "docs" / "rules"
BEGIN = mark("docs/rules")

_INDEX = """# Rules of `gradmesh check`

What [`gradmesh check`](../check.md) can find, each with a wrong and a right program. An error is a wrong number, or no
answer, and makes the exit status 1; a warning is what goes wrong in some uses and is meant in others. Written by
`python -m tools.report docs/rules`.
"""

_GROUPS = {
    "GM1": "Gradients",
    "GM2": "Parameters, buffers and steps",
    "GM3": "Data and random numbers",
    "GM4": "Calls",
    "GM5": "The run",
}


def index() -> str:
    """The page that lists the rules."""
    lines = [_INDEX]
    for prefix, title in _GROUPS.items():
        rows = [
            f"| [{rule.id}]({rule.id}.md) | {rule.name} | {rule.severity} | {rule.short} |"
            for rule in RULES.values()
            if rule.id.startswith(prefix)
        ]
        lines += [
            f"## {title}\n",
            "| rule | name | severity | what it finds |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    return "\n".join(lines)


def with_rule(text: str, rule: Rule) -> str:
    """A rule's page with what the registry says of it."""
    text = re.sub(r"\A# .*", f"# {rule.id} {rule.name}", text)
    parts = (f"*{rule.severity}* · {rule.short}", rule.why, f"**To fix it.** {rule.remedy}")
    described = "\n\n".join(textwrap.fill(part, 119, break_on_hyphens=False) for part in parts)
    return with_part(text, BEGIN, described)


def pages(folder: Path) -> dict[Path, str]:
    """Every page as it has to be."""
    found = {folder / "README.md": index()}
    for rule in RULES.values():
        path = folder / f"{rule.id}.md"
        found[path] = with_rule(path.read_text(), rule)
    return found


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Write the pages, or say which are not up to date."""
    return written(pages(into or FOLDER), into is not None)


if __name__ == "__main__":
    sys.exit(main())

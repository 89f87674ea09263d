"""`gradmesh explain`: the help pages of the errors and of the rules of `gradmesh check`.

The pages are docs/errors and docs/rules; a wheel contains a copy of both.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from gradmesh import errors
from gradmesh.checker.findings import RULES

_INSTALLED = Path(__file__).parent.parent / "pages"
_CHECKOUT = Path(__file__).parents[3] / "docs"


def titles() -> dict[str, str]:
    """The names with a help page, each with a one-line summary: errors and warnings, then rules.

    >>> titles()["AxisError"]
    'The axis argument matches no axis, several axes, or one that this rank is not on.'
    """
    of_errors = {
        name: (getattr(errors, name).__doc__ or "").splitlines()[0]
        for name in errors.__all__
        if isinstance(getattr(errors, name), type)
    }
    return {**of_errors, **{rule.id: rule.short for rule in RULES.values()}}


def page(name: str) -> str:
    """The page of an error or a rule, as Markdown."""
    known = titles()
    spelled = {each.lower(): each for each in known} | {rule.name: rule.id for rule in RULES.values()}
    asked = name.lower().rpartition(".")[2]
    if asked not in spelled:
        near = difflib.get_close_matches(asked, spelled, n=1)
        raise errors.ArgumentError.of(
            f"no help page named {name!r}",
            op="explain",
            expected="the name of an error, such as AxisError, or a rule of gradmesh check, such as GM101",
            got=repr(name),
            remedy=f"did you mean {spelled[near[0]]}?"
            if near
            else "run `gradmesh explain` to list all pages",
        )
    found = spelled[asked]
    folder = "rules" if found in RULES else "errors"
    for root in (_INSTALLED, _CHECKOUT):
        if (file := root / folder / f"{found}.md").is_file():
            return _plain(file.read_text())
    raise errors.ArgumentError.of(
        "the help pages are not installed",
        op="explain",
        expected=f"{folder}/{found}.md in {_INSTALLED} or {_CHECKOUT}",
        got="neither file exists",
        remedy="install gradmesh from a wheel, or run it from a clone of the repository",
    )


def explain_command(names: Sequence[str]) -> None:
    """Print help pages; without names, list all pages."""
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Table

    console = Console(highlight=False)
    if not names:
        grid = Table.grid(padding=(0, 2))
        for name, title in titles().items():
            grid.add_row(name, title)
        console.print(grid)
        return
    for text in [page(name) for name in names]:
        if console.is_terminal:
            console.print(Markdown(text))
        else:
            print(text)


def _plain(text: str) -> str:
    """A page without generator comments, with links replaced by page names."""
    text = re.sub(r"\n?<!--.*?-->\n?", "\n", text)
    text = re.sub(r"\[([^]]*)\]\(\w+\.md\)", r"\1", text)
    return re.sub(r"\[([^]]*)\]\(\.\./([\w/-]+\.md)[^)]*\)", r"\1 (docs/\2)", text)

"""`gradmesh explain`: the pages of the errors and of the rules of `gradmesh check`, which come with the package.

The pages are docs/errors and docs/rules; a wheel holds a copy of both.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from gradmesh import errors
from gradmesh.checker.rules import RULES

__all__ = ["explain_command", "page", "titles"]

_INSTALLED = Path(__file__).parent / "pages"
_CHECKOUT = Path(__file__).parent.parent.parent / "docs"


def titles() -> dict[str, str]:
    """What can be explained, and a line about it: the errors and warnings, then the rules.

    >>> titles()["AxisError"]
    'The axis argument names no axis, more than one, or one that this rank is not on.'
    """
    of_errors = {
        name: (getattr(errors, name).__doc__ or "").splitlines()[0]
        for name in errors.__all__
        if isinstance(getattr(errors, name), type)
    }
    return {**of_errors, **{rule.id: rule.short for rule in RULES.values()}}


def page(name: str) -> str:
    """The page of an error or a rule, as Markdown.

    Args:
        name: an error as `GradmeshError` or `gradmesh.GradmeshError`, a rule as `GM101` or `missing-sum`; capitals do
            not matter.

    Raises:
        ArgumentError: there is no such error or rule, or the pages are not there.
    """
    known = titles()
    spelled = {each.lower(): each for each in known} | {rule.name: rule.id for rule in RULES.values()}
    asked = name.lower().rpartition(".")[2]
    if asked not in spelled:
        near = difflib.get_close_matches(asked, spelled, n=1)
        raise errors.ArgumentError(
            errors.message(
                "this is nothing that has a page",
                op="explain",
                expected="the name of an error, or a rule of gradmesh check",
                got=repr(name),
                remedy=f"did you mean {spelled[near[0]]}?" if near else "gradmesh explain lists what has one",
            )
        )
    found = spelled[asked]
    folder = "rules" if found in RULES else "errors"
    for root in (_INSTALLED, _CHECKOUT):
        if (file := root / folder / f"{found}.md").is_file():
            return _plain(file.read_text())
    raise errors.ArgumentError(
        errors.message(
            "the pages are not there",
            op="explain",
            expected=f"{folder}/{found}.md in {_INSTALLED} or {_CHECKOUT}",
            got="neither",
            remedy="install gradmesh from a wheel, or run it in a clone",
        )
    )


def explain_command(names: Sequence[str]) -> None:
    """Print the pages of some errors and rules; without one, print what has a page.

    Args:
        names: as `page` takes them.

    Raises:
        ArgumentError: one of them has none.
    """
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
    """A page as it is read alone: without the marks of what writes it, and with names of pages for links to them."""
    text = re.sub(r"\n?<!--.*?-->\n?", "\n", text)
    text = re.sub(r"\[([^]]*)\]\(\w+\.md\)", r"\1", text)
    return re.sub(r"\[([^]]*)\]\(\.\./([\w/-]+\.md)[^)]*\)", r"\1 (docs/\2)", text)

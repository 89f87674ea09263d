"""Names in backticks, as docstrings have them: a link where the name is on the site or in an inventory, else code."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import roles
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes
from sphinx.application import Sphinx

__all__ = ["setup"]

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_SHORT = {"gm": "gradmesh", "dist": "torch.distributed"}


def named(
    _role: str,
    rawtext: str,
    text: str,
    _line: int,
    _inliner: Inliner,
    _options: dict[str, Any] | None = None,
    _content: list[str] | None = None,
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """The role of text in single backticks."""
    shown = nodes.literal(rawtext, text.replace("\x00", "\\"))
    name = text.removesuffix("()")
    if not _NAME.fullmatch(name):
        return [shown], []
    first, dot, rest = name.partition(".")
    target = f"{_SHORT.get(first, first)}{dot}{rest}"
    if not dot:
        target = f"gradmesh.{target}"
    reference = addnodes.pending_xref(
        rawtext, shown, refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=False
    )
    return [reference], []


def setup(app: Sphinx) -> None:
    """Make it the role that names in backticks have."""
    roles.register_local_role("named", named)  # type: ignore[arg-type]  # docutils types it by protocol
    app.connect("autodoc-process-docstring", _as_rst)


def _as_rst(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Docstrings have Markdown's code in double backticks nowhere, and its tables as simple ones; nothing else to do."""
    lines[:] = [line.replace("\\ ", " ") if "::" in line else line for line in lines]

"""Docstrings and pages as they are written, made into what Sphinx reads.

A name in backticks is a link where the site or an inventory has it, else code; a folder's README.md is the head of the
pages that it links to.
"""

from __future__ import annotations

import os
import re
from typing import Any

import inventory
from docutils import nodes
from docutils.parsers.rst import roles
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import make_refnode

__all__ = ["setup"]

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_SHORT = {"gm": "gradmesh", "dist": "torch.distributed"}
_ARGUMENTS = {"axis", "rank", "sizes"}
"""Functions, but mostly what an argument is called."""


def setup(app: Sphinx) -> None:
    """Connect all of it."""
    roles.register_local_role("named", _named)  # type: ignore[arg-type]  # docutils types it by protocol
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("builder-inited", _of_one_tensor)
    app.connect("source-read", _with_its_pages)
    app.connect("missing-reference", _by_last_name)


def _named(
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
    if not _NAME.fullmatch(name) or name in _ARGUMENTS:
        return [shown], []
    first, dot, rest = name.partition(".")
    target = f"{_SHORT.get(first, first)}.{rest}" if dot else f"gradmesh.{first}"
    reference = addnodes.pending_xref(
        rawtext, shown, refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=False
    )
    return [reference], []


def _as_rst(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Plurals of names, and the bars of an absolute value, which would be something else to docutils."""
    for at, line in enumerate(lines):
        if not line.startswith("    "):
            lines[at] = re.sub(r"(`[^`]+`)([A-Za-z])?", _set_apart, line).replace("|<", r"\|<")


def _set_apart(found: re.Match[str]) -> str:
    return found[1] + (f"\\ {found[2]}" if found[2] else "")


def _of_one_tensor(_app: Sphinx) -> None:
    """Of a verb's overloads the reference shows those that return a tensor; its text has the others."""
    analyzer = ModuleAnalyzer.for_module("gradmesh.verbs.collectives")
    analyzer.analyze()
    for name, signatures in analyzer.overloads.items():
        analyzer.overloads[name] = [
            one
            for one in signatures
            if "Pending" not in one.return_annotation and one.return_annotation != "StructureT"
        ]


def _by_last_name(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.Element
) -> nodes.Element | None:
    """What the reference has under another module than the one that is named, such as that of its file."""
    target = str(node.get("reftarget", ""))
    first, last = target.split(".")[0], target.rsplit(".", 1)[-1]
    if node.get("refdomain") == "py" and first == "torch":
        return _of_torch(last, shown)
    if node.get("refdomain") != "py" or first != "gradmesh":
        return None
    last = "Type" if last in ("V", "R", "I", "P") else last
    known = env.domains["py"].data["objects"]
    found = [name for name in known if name.rsplit(".", 1)[-1] == last and known[name].objtype in _TOP]
    if len(found) != 1:
        return None
    entry = known[found[0]]
    return make_refnode(app.builder, str(node["refdoc"]), entry.docname, entry.node_id, shown, found[0])


_TOP = ("class", "exception", "function")


def _of_torch(last: str, shown: nodes.Element) -> nodes.Element | None:
    """A class of torch, which annotations name by the file that it is in."""
    address, names = inventory.objects()["torch"]
    pages = [page for name, role, page in names if role == "class" and name.rsplit(".", 1)[-1] == last]
    if len(pages) != 1:
        return None
    return nodes.reference("", "", shown, internal=False, refuri=address + pages[0], classes=["external"])


def _with_its_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the pages that a folder's README.md links to below it."""
    folder, base = os.path.split(name)
    if base != "README":
        return
    linked = dict.fromkeys(re.findall(r"\]\(([\w-]+)\.(?:md|ipynb)\)", source[0]))
    if linked:
        tree = "\n".join(each for each in linked if f"{folder}/{each}" in app.env.found_docs)
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"

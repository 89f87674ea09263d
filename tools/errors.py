"""Write every error text that users can meet into the page of its class: python -m tools.report docs/errors.

The texts are read from the source: the arguments of `errors.message`, of `GradmeshError.of`, and of the helpers that
raise through them. The values that fill a text in are shown as names in angle brackets. By itself it only lists
outdated pages.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gradmesh
import gradmesh as gm
from gradmesh import errors
from tests import test_errors, wrong_calls
from tools.pages import mark, with_part, written

RANKS = 2


def cases() -> dict[str, tuple[str, str]]:
    """Of each wrong call its error's class and first line, by how it is written."""
    written = {**_written(test_errors), **_written(wrong_calls)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested and quantized tensors
        said = gm.launch(_said, RANKS, backend="threads")[0]
    return {written[name]: text for name, text in sorted(said.items()) if name in written}


def _said() -> dict[str, tuple[str, str]]:
    calls = {name: call for name, (_, _, call) in test_errors.BAD.items()}
    calls |= {name: case.wrong for name, case in wrong_calls.CASES.items()}
    found = {}
    for name, call in calls.items():
        try:
            call()
        except gm.GradmeshError as error:
            first = str(error).splitlines()[0]
            found[name] = type(error).__name__, first.split(": ", 1)[-1]
    return found


def _written(module: ModuleType) -> dict[str, str]:
    """The calls of a file's tables by their names, each on one line."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_rows":
            verb, _, rows = node.args
            if isinstance(verb, ast.Constant) and isinstance(rows, ast.Dict):
                found |= {f"{verb.value!s}: {name}": call for name, call in _calls(rows).items()}
        elif isinstance(node, ast.Dict):
            found |= {name: call for name, call in _calls(node).items() if name not in found}
    return found


def _calls(table: ast.Dict) -> dict[str, str]:
    found = {}
    for key, value in zip(table.keys, table.values, strict=True):
        held = value.args if isinstance(value, ast.Call) else getattr(value, "elts", [])
        calls = [each for each in held if isinstance(each, ast.Lambda)]
        if calls and isinstance(key, ast.Constant) and isinstance(key.value, str):
            found[key.value] = ast.unparse(calls[0].body)
    return found


FOLDER = Path(__file__).parent.parent / "docs" / "errors"
SOURCE = Path(gradmesh.__file__).parent
BEGIN = mark("docs/errors")

_REFUSING = {"fail", "_fail", "_refuse"}
_NOT_OF_USERS = ("demo", *(f"checker/{name}.py" for name in ("hooks", "recorder", "trace", "verbs")))

_INDEX = """# Errors and warnings

Every error class of gradmesh, with what raises it and how to fix it. The traceback of an error ends with the name of
its page; `gradmesh explain AxisError` prints the page without a clone.

A message always has the same lines: the verb and the problem, then `axis`, `expected`, `got` and `remedy`. Each page
has programs that raise the error, what to do, and all messages of the class, with the shortest call in the tests that
raises each (`ones` is `torch.ones`). The lists are written by `python -m tools.report docs/errors`.

| class | it is also | messages | meaning |
|---|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Text:
    """What an error says: its problem, what to do about it, and its class's name."""

    problem: str
    remedy: str
    kind: str


def classes() -> dict[str, type[Exception]]:
    """The errors and warnings, by name."""
    return {
        name: found
        for name, found in vars(errors).items()
        if inspect.isclass(found) and issubclass(found, Exception) and found.__module__ == errors.__name__
    }


def texts() -> list[Text]:
    """Every text that the source has."""
    found = set()
    for file in sorted(SOURCE.rglob("*.py")):
        if not str(file.relative_to(SOURCE)).startswith(_NOT_OF_USERS):
            found |= set(_of_file(file))
    return sorted(found)


def _of_file(file: Path) -> Iterator[Text]:
    tree = ast.parse(file.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    helpers = {node.name: _only(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "message":
            problem, kind = _shown(node.args[0]), _around(node, parents)
            remedy = _shown(given.get("remedy"))
        elif name == "of" and isinstance(node.func, ast.Attribute) and _name(node.func.value) in classes():
            problem, kind = _shown(node.args[0]), _name(node.func.value)
            remedy = _shown(given.get("remedy"))
        elif name in _REFUSING:
            shown = [_shown(arg) for arg in node.args]
            problem = next((text for text in shown if " " in text), "")
            of_an_op = file.parent.name == "ops" and isinstance(node.func, ast.Attribute)
            default = (not of_an_op and helpers.get(name)) or ("ShapeError" if of_an_op else "ArgumentError")
            kind = _name(given["kind"]) if "kind" in given else default
            remedy = _shown(given.get("remedy")) or (
                shown[-1] if len(shown) > 2 and " " in shown[-1] and shown[-1][0] != "(" else ""
            )
        else:
            continue
        literal = _FILLED.sub("", problem)
        if kind in classes() and len(re.findall(r"\w+", literal)) > 1 and problem != remedy:
            yield Text(problem, remedy, kind)


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """The class of the error that a text is for: the call around it, or the only one that its function makes."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.Call):
            named = [_name(each) for each in (node.func, *node.args) if _name(each) in classes()]
            if named:
                return named[0]
        if isinstance(node, ast.FunctionDef):
            return _only(node)
    return ""


def _only(function: ast.FunctionDef) -> str:
    """The one class of errors that a function names."""
    named = {_name(node) for node in ast.walk(function) if isinstance(node, ast.Name)} & set(classes())
    return named.pop() if len(named) == 1 else ""


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


_FILLED = re.compile(r"<[^<>]*>")


def _shown(node: ast.AST | None) -> str:
    """A string of the source as text, with names in angle brackets for the values that fill it in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            str(part.value)
            if isinstance(part, ast.Constant)
            else _filled(part.value if isinstance(part, ast.FormattedValue) else part)
            for part in node.values
        )
        return re.sub(r"(<[^<>]*>)(?=<)", r"\1 ", "".join(parts))
    if isinstance(node, ast.BinOp):
        return _shown(node.left) + _shown(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (_shown(node.body), _shown(node.orelse))))
    return ""


def _filled(node: ast.AST) -> str:
    """A value that fills a text in: its name in angle brackets, or the alternatives between which it chooses."""
    if isinstance(node, ast.IfExp) and all(
        isinstance(each, ast.Constant) for each in (node.body, node.orelse)
    ):
        options = [_shown(each) for each in (node.body, node.orelse)]
        return "/".join(options) if all(options) else f"({''.join(options)})"
    inner: Any = node
    while not isinstance(inner, ast.Name | ast.Attribute):
        if isinstance(inner, ast.GeneratorExp | ast.ListComp):
            inner = inner.generators[0].iter
        elif isinstance(inner, ast.Call) and inner.args:
            inner = inner.args[-1]
        else:
            inner = getattr(inner, "value", None) or getattr(inner, "left", None)
        if not isinstance(inner, ast.expr):
            return "<value>"
    name = _name(inner).strip("_")
    return _constants().get(name) or f"<{name}>"


@functools.cache
def _constants() -> dict[str, str]:
    """The texts that the source's modules define as constants."""
    found = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, text = node.targets[0].id.strip("_"), _literal(node.value)
                if name.isupper() and " " in text:
                    found[name] = text
    return found


def _literal(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def examples(known: list[Text]) -> dict[Text, str]:
    """Of each text in which a wrong call of the tests ends, the shortest such call; each has to be known."""
    found: dict[Text, str] = {}
    for call, (kind, first) in cases().items():
        ends = [text for text in known if text.kind == kind and _fits(text.problem, first)]
        assert ends, f"{call} ends in a text that was not found: {kind}: {first}"
        text = max(ends, key=lambda text: len(_FILLED.sub("", text.problem)))  # the most specific one
        if not re.search(r"\b_[a-z]", call):
            found[text] = min(found.get(text, call), call, key=len)
    return found


def _fits(problem: str, first: str) -> bool:
    parts = re.split(r"<[^<>]*>|\(\w+\)|\w+(?:/\w+)+", problem)
    return re.fullmatch(".*".join(map(re.escape, parts)), first) is not None


def pages(folder: Path) -> dict[Path, str]:
    """Every page as it has to be."""
    known, found = texts(), {}
    shown = examples(known)
    index = [_INDEX.rstrip("\n")]
    for name, kind in sorted(classes().items()):
        path = folder / f"{name}.md"
        own = [text for text in known if text.kind == name]
        found[path] = with_part(path.read_text(), BEGIN, _table(own, shown))
        bases = [base.__name__ for base in kind.__mro__[1:] if base.__module__ == "builtins"]
        bases = [base for base in bases if base not in ("Exception", "Warning", "BaseException", "object")]
        says = (kind.__doc__ or "").splitlines()[0]
        index.append(f"| [{name}]({name}.md) | {', '.join(bases)} | {len(own)} | {says} |")
    found[folder / "README.md"] = "\n".join(index) + "\n"
    return found


def _table(own: list[Text], shown: dict[Text, str]) -> str:
    """All messages with their remedies; those whose remedy depends on the call come as a list."""
    rows: dict[str, list[str]] = {}
    for text in own:
        example = f"<br>{_code(shown[text])}" if text in shown else ""
        rows.setdefault(_cell(text.problem) + example, []).append(_cell(text.remedy))
    lines = [
        f"| {problem} | {'; or: '.join(filter(None, remedies))} |"
        for problem, remedies in rows.items()
        if any(remedies)
    ]
    parts = ["## All messages", ""] if own else []
    if lines:
        parts += ["| message | what to do |", "| --- | --- |", *lines, ""]
    if rest := [f"* {problem}" for problem, remedies in rows.items() if not any(remedies)]:
        parts += ["The remedy in these messages depends on the call:" if lines else "", "", *rest, ""]
    return "\n".join(parts).rstrip("\n")


def _code(call: str) -> str:
    return f"`{call}`".replace("|", "\\|") if call else ""


def _cell(text: str) -> str:
    """Text as it reads, in a table; what stands in backticks stays code."""
    parts = text.strip().replace("\n", " ").replace("|", "\\|").split("`")
    return "`".join(
        part if at % 2 else re.sub(r"([*_<\[\]])", r"\\\1", part) for at, part in enumerate(parts)
    )


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Write the pages, or say which are not up to date."""
    return written(pages(into or FOLDER), into is not None)


if __name__ == "__main__":
    sys.exit(main())

"""Package layers: which package may import which, and no import cycles."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import gradmesh

PACKAGE = Path(gradmesh.__file__).parent

LAYERS = (
    ("_util", "errors"),
    ("_torch",),
    ("dims", "types"),
    ("backends",),
    ("runtime",),
    ("launch", "transport"),
    ("ops",),
    ("autograd",),
    ("verbs",),
    ("objective", "type_inference"),
    ("nn",),
    ("compat", "verify"),
    ("bench", "checker", "demo"),
    ("cli",),
)
"""The layers from the bottom up: a file imports only from its package and from packages of lower layers."""

ROOT = {"__init__", "__main__"}
"""Modules that only re-export the packages' names."""

LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def imports(file: Path) -> list[tuple[int, tuple[str, ...]]]:
    """The gradmesh imports of a file with their lines, including those inside of functions."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gradmesh":
            inside = tuple(node.module.split(".")[1:])
            for alias in node.names:
                whole = (*inside, alias.name)
                known = (PACKAGE.joinpath(*whole).with_suffix(".py")).exists() or PACKAGE.joinpath(
                    *whole
                ).is_dir()
                found.append((node.lineno, whole if known else inside))
        elif isinstance(node, ast.Import):
            found += [
                (node.lineno, tuple(alias.name.split(".")[1:]))
                for alias in node.names
                if alias.name.split(".")[0] == "gradmesh"
            ]
    return found


def is_for_typing_only(file: Path, line: int) -> bool:
    """Whether an import is under `if TYPE_CHECKING`, so that it does not run."""
    return any(guard.lineno <= line <= (guard.end_lineno or guard.lineno) for guard in guards(file))


@functools.cache
def guards(file: Path) -> list[ast.If]:
    """The `if TYPE_CHECKING` statements of a file."""
    return [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]


def test_every_package_has_a_layer() -> None:
    packages = {module_of(file)[0] for file in files()} - ROOT
    assert packages <= set(LAYER), packages - set(LAYER)


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_downward(file: Path) -> None:
    package = module_of(file)[0]
    if package in ROOT:
        return
    for line, path in imports(file):
        if not path:  # names re-exported by the root package
            assert LAYER[package] > LAYER["verbs"], f"{file.name}:{line}: {package} imports the root package"
            continue
        there = path[0]
        assert there in LAYER, f"{file.name}:{line} imports gradmesh.{there}, which is not listed"
        below = LAYER[there] < LAYER[package] or there == package or LAYER[there] == LAYER[package] == 0
        assert below, f"{file.name}:{line}: {package} imports {there}"


def test_imports_have_no_cycle() -> None:
    """Not between files of one package either."""
    names = {".".join(module_of(file)): file for file in files()}
    graph = {
        name: {
            found
            for line, path in imports(file)
            if (found := ".".join(path)) in names and found != name and not is_for_typing_only(file, line)
        }
        for name, file in names.items()
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*way, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())

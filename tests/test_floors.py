"""Package layers: which package may import which, and no import cycles."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import gradmesh

PACKAGE = Path(gradmesh.__file__).parent

FLOORS = (
    (
        "_torch",
        "bounded_cache",
        "call_sites",
        "dtypes",
        "environment",
        "errors",
        "extras",
        "stacks",
        "structure",
        "tracebacks",
        "types",
    ),
    ("dims",),
    ("backends",),
    ("state",),
    ("checking", "world"),
    ("axis", "launch"),
    ("profiling",),
    ("transport",),
    ("ops", "scaling", "withdrawal"),
    ("barriers", "unsummed"),
    ("autograd",),
    ("overlap",),
    ("arguments", "order", "deferred", "reordering"),
    ("no_sync", "reductions", "pytrees"),
    ("collectives", "own_ops"),
    ("averaging",),
    ("objective",),
    ("type_inference",),
    ("nn",),
    ("compat", "verify"),
    ("bench", "checker", "demo", "installation"),
    ("explaining",),
    ("cli",),
)
"""The rooms from the ground up: a file imports from its own room and from the floors below it alone."""

ROOFS = {"__init__", "__main__"}
"""What only puts the rooms' names together."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def imports(file: Path) -> list[tuple[int, tuple[str, ...]]]:
    """What a file imports of the package, each with its line; imports inside of functions too."""
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


def is_for_types_alone(file: Path, line: int) -> bool:
    """Whether an import stands under `if TYPE_CHECKING`, so that it is none when the program runs."""
    return any(guard.lineno <= line <= (guard.end_lineno or guard.lineno) for guard in guards(file))


@functools.cache
def guards(file: Path) -> list[ast.If]:
    """What stands under `if TYPE_CHECKING`."""
    return [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]


def test_every_package_has_a_layer() -> None:
    rooms = {module_of(file)[0] for file in files()} - ROOFS
    assert rooms <= set(FLOOR), rooms - set(FLOOR)


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_import_runs_upward_or_sideways(file: Path) -> None:
    room = module_of(file)[0]
    if room in ROOFS:
        return
    for line, path in imports(file):
        if not path:  # the names of the roof, which are all there
            assert FLOOR[room] > FLOOR["collectives"], f"{file.name}:{line}: {room} imports the roof"
            continue
        there = path[0]
        assert there in FLOOR, f"{file.name}:{line} imports gradmesh.{there}, which is no room"
        below = FLOOR[there] < FLOOR[room] or there == room or FLOOR[there] == FLOOR[room] == 0
        assert below, f"{file.name}:{line}: {room} imports {there}"


def test_imports_have_no_cycle() -> None:
    """Not between files of one room either."""
    names = {".".join(module_of(file)): file for file in files()}
    graph = {
        name: {
            found
            for line, path in imports(file)
            if (found := ".".join(path)) in names and found != name and not is_for_types_alone(file, line)
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

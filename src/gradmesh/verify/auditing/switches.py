"""Switches: module globals, attributes and dict keys that code reads and that other code can change."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from gradmesh.verify.auditing.subject import is_library

__all__ = ["Switch", "restore", "set_switch", "switches"]

_MOST = 24
"""The maximum number of switches to try."""
_DEPTH = 5
"""The maximum depth of calls to follow."""

_changed: dict[tuple[int, str], tuple[Any, str, Any]] = {}
"""The switches that are changed in this process now: holder, name and original value."""


@dataclass(frozen=True, eq=False)
class Switch:
    """One switch.

    Attributes:
        holder: the module globals, object, class or dict that contains it.
        name: its name or key.
        where: its location, as text.
        value: its current value.
        other: an alternative value.
    """

    holder: Any
    name: str
    where: str
    value: Any
    other: Any

    def __str__(self) -> str:
        return f"{self.where} = {self.other!r} instead of {self.value!r}"


def set_switch(switch: Switch, forth: bool) -> None:
    """Set a switch to its other value, or restore it. Thread ranks share switches and set them to the same value."""
    key = id(switch.holder), switch.name
    if forth:
        _changed.setdefault(key, (switch.holder, switch.name, switch.value))
    else:
        _changed.pop(key, None)
    _put(switch.holder, switch.name, switch.other if forth else switch.value)


def restore() -> None:
    """Restore every switch that is still changed in this process."""
    for holder, name, value in list(_changed.values()):
        _put(holder, name, value)
    _changed.clear()


def _put(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def switches(*things: Any) -> list[Switch]:
    """The switches that functions and classes read, including the code that they call.

    Code of torch, gradmesh and the standard library is not followed. A bool is a switch; a string or a number is one
    if some code assigns it and the code that reads it contains another constant of that type.
    """
    found: dict[tuple[int, str], Switch] = {}
    seen: set[int] = set()
    for thing in things:
        for switch in _search(thing, seen, _DEPTH):
            found.setdefault((id(switch.holder), switch.name), switch)
    return list(found.values())[:_MOST]


def _search(thing: Any, seen: set[int], depth: int) -> Iterator[Switch]:
    if id(thing) in seen or depth < 0:
        return
    seen.add(id(thing))
    if isinstance(thing, functools.partial):
        yield from _search(thing.func, seen, depth)
    elif isinstance(thing, staticmethod | classmethod):
        yield from _search(thing.__func__, seen, depth)
    elif inspect.ismethod(thing) or (inspect.isbuiltin(thing) and inspect.isclass(thing.__self__)):
        yield from _search(thing.__self__, seen, depth)
        yield from _search(getattr(thing, "__func__", None), seen, depth)
    elif isinstance(thing, FunctionType):
        yield from _of_function(inspect.unwrap(thing), seen, depth)
    elif inspect.isclass(thing):
        if not _foreign(thing):
            for value in list(vars(thing).values()):
                yield from _search(value, seen, depth)
    elif callable(thing) and not inspect.isbuiltin(thing):
        yield from _search(type(thing), seen, depth)


def _of_function(fn: Any, seen: set[int], depth: int) -> Iterator[Switch]:
    if not isinstance(fn, FunctionType) or is_library(fn.__code__.co_filename):
        return
    codes = list(_codes(fn.__code__))
    names = {name for code in codes for name in code.co_names}
    constants = [value for code in codes for value in code.co_consts]
    spaces = [(fn.__globals__, fn.__globals__.get("__name__", "?"), names)]
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    with_values = {name: cell.cell_contents for name, cell in cells.items() if _filled(cell)}
    for space, where, wanted in spaces:
        for name in sorted(wanted & set(space)):
            value = space[name]
            set_by_code = _assigned(space, name)
            yield from _switch(space, name, f"{where}.{name}", value, constants, set_by_code)
            yield from _inside(value, f"{where}.{name}", names, constants, seen, depth)
    for name, value in with_values.items():
        yield from _inside(value, name, names, constants, seen, depth)


def _inside(
    value: Any, where: str, names: set[str], constants: list[Any], seen: set[int], depth: int
) -> Iterator[Switch]:
    """The switches in a value that code refers to, and in the code that it leads to."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _search(item, seen, depth - 1)
    elif isinstance(value, dict):
        for key in [key for key in value if isinstance(key, str) and key in constants]:
            yield from _switch(value, key, f"{where}[{key!r}]", value[key], constants, True)
    elif isinstance(value, ModuleType):
        if not is_library(getattr(value, "__file__", None) or "<frozen"):
            for name in sorted(names & set(vars(value))):
                inner = vars(value)[name]
                yield from _switch(
                    vars(value), name, f"{where}.{name}", inner, constants, _assigned(vars(value), name)
                )
                yield from _search(inner, seen, depth - 1)
    elif isinstance(value, FunctionType):
        yield from _search(value, seen, depth - 1)
    elif not _foreign(value if inspect.isclass(value) else type(value)):
        attributes = getattr(value, "__dict__", {})
        for name in sorted(names & set(attributes)):
            yield from _switch(value, name, f"{where}.{name}", attributes[name], constants, True)
        yield from _search(value, seen, depth - 1)
    elif type(value).__name__ == "SimpleNamespace":
        for name in sorted(names & set(vars(value))):
            yield from _switch(value, name, f"{where}.{name}", vars(value)[name], constants, True)


def _switch(
    holder: Any, name: str, where: str, value: Any, constants: list[Any], assigned: bool
) -> Iterator[Switch]:
    if isinstance(value, bool):
        yield Switch(holder, name, where, value, not value)
    elif assigned and isinstance(value, str | int | float):
        others = [
            c for c in constants if type(c) is type(value) and c != value and not _is_name(c, constants)
        ]
        if others:
            yield Switch(holder, name, where, value, others[0])


def _is_name(constant: Any, constants: list[Any]) -> bool:
    """Whether a string constant is a docstring."""
    return isinstance(constant, str) and (
        " " in constant or constant == (constants[0] if constants else None)
    )


def _assigned(space: dict[str, Any], name: str) -> bool:
    """Whether a function of a module assigns one of its names."""
    return any(
        name in code.co_names and _stores(code, name)
        for value in list(space.values())
        if isinstance(value, FunctionType) and value.__globals__ is space
        for code in _codes(value.__code__)
    )


def _stores(code: CodeType, name: str) -> bool:
    return any(i.opname == "STORE_GLOBAL" and i.argval == name for i in dis.get_instructions(code))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - empty ones raise
    except ValueError:
        return False
    return True


def _foreign(cls: Any) -> bool:
    """Whether a class is built in or belongs to a library."""
    module = sys.modules.get(getattr(cls, "__module__", ""), None)
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(cls, "__module__", "") != "__main__"
    return is_library(file)

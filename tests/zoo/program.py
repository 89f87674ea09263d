"""What a program of the zoo is, and the list that each of them joins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

__all__ = ["PROGRAMS", "Checker", "Program", "right", "wrong"]

Checker = Literal["audit", "gradcheck", "same_as_single"]

PROGRAMS: dict[str, Program] = {}
"""Every program by its name, in the order in which they are written."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A small program and what has to be said of it.

    Attributes:
        name: a name of its own.
        check: the function of `gradmesh.verify` that it is handed to.
        build: for "audit", what each rank runs to get `(fn, inputs)`; for the others, what returns the positional
            arguments of the check.
        expected: the kind that has to be among those reported, None for a right program.
        also: further kinds that are true of the program as well. Whatever else is reported is a false alarm.
        seen: where such code is seen.
        options: keyword arguments of the check.
    """

    name: str
    check: Checker
    build: Callable[..., Any]
    expected: str | None
    also: frozenset[str]
    seen: str
    options: Mapping[str, Any]


def wrong(
    check: Checker, expected: str, seen: str, *, also: tuple[str, ...] = (), **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a program that has a fault.

    Args:
        check: what it is handed to.
        expected: the kind of the fault.
        seen: where such code is seen.
        also: other kinds that are true of it.
        options: keyword arguments of the check.
    """
    return _adding(check, expected, seen, also, options)


def right(check: Checker, seen: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a program without a fault, about which nothing may be reported."""
    return _adding(check, None, seen, (), options)


def _adding(
    check: Checker, expected: str | None, seen: str, also: tuple[str, ...], options: Mapping[str, Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(build: Callable[..., Any]) -> Callable[..., Any]:
        name = build.__name__
        if name in PROGRAMS:
            raise ValueError(f"two programs of the zoo are called {name}")
        PROGRAMS[name] = Program(name, check, build, expected, frozenset(also), seen, options)
        return build

    return add

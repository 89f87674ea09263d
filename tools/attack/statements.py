"""The statements of a random program: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tools.attack.calls import Verb


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program begins with."""

    name: str  # the variable
    seed: int  # of its values; those of type V add the rank
    shapes: tuple[tuple[int, ...], ...]  # each rank's shape
    kind: str  # V; R or I, the same values on all ranks
    requires: tuple[bool, ...]  # whether it requires grad, on each rank


@dataclass(frozen=True)
class Local:
    """Work without communication: an expression over variables, each rank's own."""

    name: str
    texts: tuple[str, ...]
    args: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """Statements that run under `torch.utils.checkpoint`."""

    body: tuple[Local | Verb, ...]
    reentrant: bool


Statement = Leaf | Local | Verb | Region


def names_of(statement: Statement) -> tuple[str, ...]:
    """The variables that a statement defines."""
    if isinstance(statement, Region):
        return tuple(inner.name for inner in statement.body)
    return (statement.name,)


def arguments_of(statement: Statement) -> tuple[str, ...]:
    """The variables that it uses and does not define."""
    if isinstance(statement, Leaf):
        return ()
    if isinstance(statement, Region):
        used = dict.fromkeys(arg for inner in statement.body for arg in arguments_of(inner))
        return tuple(arg for arg in used if arg not in names_of(statement))
    return statement.args if isinstance(statement, Local) else (statement.arg,)

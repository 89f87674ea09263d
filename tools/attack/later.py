"""Async calls of a program: where each is waited for, and which are coalesced into one message."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tools.attack.calls import DERIVATIVES, VMAPS, Region, Statement, Verb, arguments_of, launched

_MOST = 4


@dataclass
class _Open:
    """A pending call."""

    verb: Verb  # the call
    done: str  # the expression of its result
    left: int  # how many statements may still come before the wait


def blocks(
    statements: Sequence[Statement], at_once: Callable[[Statement], list[str]], named: Callable[[str], str]
) -> list[str]:
    """The lines of statements. A pending call is waited for before its result is used, or at the end."""
    lines: list[str] = []
    opened: list[_Open] = []
    axis: str | None = None  # of the block of coalesced calls
    inside: set[str] = set()  # the calls launched in it

    def wait(names: set[str]) -> None:
        for one in [one for one in opened if one.verb.name in names]:
            opened.remove(one)
            add(one.verb, [f"{one.verb.name} = {one.done}"])

    def add(statement: Statement, new: list[str]) -> None:
        hidden = isinstance(statement, Verb) and not statement.recorded
        new = ["with torch.no_grad():", *(f"    {line}" for line in new)] if hidden else new
        lines.extend(new if axis is None else [f"    {line}" for line in new])

    for statement in statements:
        used = set(arguments_of(statement))
        apart = isinstance(statement, Verb) and _leaves_time(statement)
        coalesced = isinstance(statement, Verb) and apart and statement.coalesced
        if axis is not None:
            inner = not isinstance(statement, Region) and not used & inside
            if not inner or (coalesced and statement.axis != axis):  # type: ignore[union-attr]  # it is a verb
                axis, inside = None, set()
        wait(used)
        if coalesced and axis is None:
            axis = statement.axis  # type: ignore[union-attr]
            lines.append(f"with gm.coalesce({axis!r}):" if axis else "with gm.coalesce():")
        if not apart:
            lines.extend(
                at_once(statement) if axis is None else [f"    {line}" for line in at_once(statement)]
            )
        else:
            assert isinstance(statement, Verb)
            pending = f"{statement.name}_pending"
            begin, done = launched(statement, named(statement.arg), pending)
            add(statement, [f"{pending} = {begin}"])
            opened.append(_Open(statement, done, statement.later or 0))
            if axis is not None:
                inside.add(statement.name)
        for one in opened:
            one.left -= 1
        wait({one.verb.name for one in opened if one.left < 0} - inside)
    axis = None
    wait({one.verb.name for one in opened})
    return lines


def _leaves_time(verb: Verb) -> bool:
    """Whether something can be done before the wait: not where the call is inside of a function."""
    return verb.later is not None and verb.way not in (*VMAPS, *DERIVATIVES)


def with_pending(statements: Sequence[Statement], rng: random.Random, share: float) -> tuple[Statement, ...]:
    """The statements with some of their calls made async."""
    made: list[Statement] = []
    for statement in statements:
        if isinstance(statement, Region):
            body = with_pending(statement.body, rng, share)
            made.append(replace(statement, body=body))  # type: ignore[arg-type]  # of the same kinds as before
        elif isinstance(statement, Verb) and statement.verb != "messages" and rng.random() < share:
            made.append(replace(statement, later=rng.randint(0, _MOST), coalesced=rng.random() < 0.4))
        else:
            made.append(statement)
    return tuple(made)

"""Making a program that fails small: whatever can go without another verdict goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.attack.calls import Leaf, Local, Region, Statement, Verb, names_of
from tools.attack.meanings import Invalid
from tools.attack.programs import Program, Term


def _renamed(statement: Statement, old: str, new: str) -> Statement:
    if isinstance(statement, Verb):
        return replace(statement, arg=new) if statement.arg == old else statement
    if isinstance(statement, Local):
        return replace(statement, args=tuple(new if arg == old else arg for arg in statement.args))
    if isinstance(statement, Region):
        return replace(statement, body=tuple(_renamed(inner, old, new) for inner in statement.body))  # type: ignore[misc]
    return statement


def _without(program: Program, name: str, instead: str | None) -> Program:
    """The program without a variable; what used it uses another one, or is dropped."""
    statements: list[Statement] = []
    for statement in program.statements:
        if isinstance(statement, Region):
            body = tuple(inner for inner in statement.body if inner.name != name)
            if body:
                statements.append(replace(statement, body=body))
        elif statement.name != name:
            statements.append(statement)
    losses = program.losses
    if instead is not None:
        statements = [_renamed(statement, name, instead) for statement in statements]
        losses = tuple(
            tuple(replace(term, arg=instead) if term.arg == name else term for term in terms)
            for terms in losses
        )
    losses = tuple(
        tuple(term for term in terms if term.arg not in (name, f"grad {name}")) for terms in losses
    )
    after = tuple(verb for verb in program.after if verb.arg != name)
    return replace(program, statements=tuple(statements), losses=losses, after=after)


def _dropped_statements(program: Program) -> Iterator[Program]:
    for statement in reversed(program.statements):
        if isinstance(statement, Region):
            at = program.statements.index(statement)
            flat = (*program.statements[:at], *statement.body, *program.statements[at + 1 :])
            yield replace(program, statements=flat)
        for name in reversed(names_of(statement)):
            yield _without(program, name, None)
            body = statement.body if isinstance(statement, Region) else (statement,)
            inner = next(one for one in body if one.name == name)
            for arg in (inner.arg,) if isinstance(inner, Verb) else getattr(inner, "args", ()):
                yield _without(program, name, arg)


def _simpler_statements(program: Program) -> Iterator[Program]:
    def put(at: int, statement: Statement) -> Program:
        return replace(
            program, statements=(*program.statements[:at], statement, *program.statements[at + 1 :])
        )

    for at, statement in enumerate(program.statements):
        if isinstance(statement, Leaf):
            ranks = program.ranks
            if not all(statement.requires):
                yield put(at, replace(statement, requires=(True,) * ranks))
            for shape in ((1, 1), (2, 1), (2, 2)):
                if set(statement.shapes) != {shape} and max(statement.shapes) > shape:
                    yield put(at, replace(statement, shapes=(shape,) * ranks))
        if isinstance(statement, Local):
            for text in (*dict.fromkeys(statement.texts), "2 * {0}"):
                if set(statement.texts) != {text}:
                    yield put(at, replace(statement, texts=(text,) * program.ranks))
        if isinstance(statement, Verb):
            if not statement.recorded:
                yield put(at, replace(statement, recorded=True))
            if statement.way:
                yield put(at, replace(statement, way="", adjoint=None))
            if statement.later is not None:
                yield put(at, replace(statement, later=None, coalesced=False))
            if statement.coalesced:
                yield put(at, replace(statement, coalesced=False))
            whole = tuple(pair for pair in statement.params if not pair[0].endswith("_dtype"))
            if whole != statement.params:
                yield put(at, replace(statement, params=whole))
            if "sizes" in dict(statement.params):
                kept = tuple(pair for pair in statement.params if pair[0] != "sizes")
                yield put(at, replace(statement, params=kept))


def _simpler_losses(program: Program) -> Iterator[Program]:
    for order, terms in enumerate(program.losses):

        def put(new: tuple[Term, ...], order: int = order) -> Program:
            return replace(program, losses=(*program.losses[:order], new, *program.losses[order + 1 :]))

        for at, term in enumerate(terms):
            rest = (terms[:at], terms[at + 1 :])
            yield put((*rest[0], *rest[1]))
            if term.weighted:
                yield put((*rest[0], replace(term, weighted=False), *rest[1]))
            for text in dict.fromkeys(term.texts):
                if text is not None and set(term.texts) != {text}:
                    yield put((*rest[0], replace(term, texts=(text,) * program.ranks), *rest[1]))
            for rank, text in enumerate(term.texts):
                if text is not None and not program.paired:
                    texts = (*term.texts[:rank], None, *term.texts[rank + 1 :])
                    yield put((*rest[0], replace(term, texts=texts), *rest[1]))


def _simpler(program: Program) -> Iterator[Program]:
    """Programs with less in them, the most different first."""
    if program.mode == "third":
        yield replace(program, mode="second", losses=program.losses[:2])
    if program.mode == "second":
        yield replace(program, mode="first", losses=program.losses[:1])
    if program.after:
        yield replace(program, after=())
    yield from _dropped_statements(program)
    if program.ordered:
        yield replace(program, ordered=False)
    if program.dtype != "float64":
        yield replace(program, dtype="float64")
    yield from _simpler_losses(program)
    yield from _simpler_statements(program)


def shrunk(
    program: Program, fails: Callable[[Program], bool], tries: int = 400, seconds: float = 20.0
) -> Program:
    """The smallest program that is found by dropping and simplifying, one thing at a time."""
    again, deadline = True, time.monotonic() + seconds
    while again:
        again = False
        for candidate in _simpler(program):
            if tries <= 0 or time.monotonic() > deadline:
                return program
            try:
                found = fails(candidate)
            except (Invalid, KeyError, IndexError):
                continue
            tries -= 1
            if found:
                program, again = candidate, True
                break
    return program

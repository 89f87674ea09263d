"""How a verb is called: on a tensor, on a structure of them, under `vmap`, or inside of a derivative of `torch.func`.

Each way is one expression; what it means for all ranks is in `ways`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TAKES_STRUCTURES = ("all_gather", "all_reduce", "broadcast", "permute", "replicate", "shift")
"""The verbs that do."""

# Linear, as a structure may be of pending sums.
STRUCTURES = ("({0}, 2 * {0})", "{{'k': {0}, 'v': [-{0}, {0}[:1]]}}", "[{0}.flip(0), ({0}[1:],)]")
"""Structures made of a tensor."""

VMAPS = ("vmap 0", "vmap 1")
"""Which dim is the batch's."""

BY_HAND = "by hand"
"""Inside of an autograd Function, whose backward calls the adjoint."""

DERIVATIVES = ("grad", "vjp", "jvp")
"""Derivatives of `torch.func` that are taken on the spot."""

HELPERS = {
    "column": """\
def column(tree):
    if isinstance(tree, torch.Tensor):
        return tree.reshape(-1, 1)
    return torch.cat([column(one) for one in (tree.values() if isinstance(tree, dict) else tree)])
""",
    "messages": """\
def messages(x, axis, sends, receives):
    me, got = gm.rank(axis), {}
    ends = [(me, to, ()) for to in sends]
    ends += [(source, me, (number, shape)) for number, (source, shape) in enumerate(receives)]
    if not x.is_cpu:  # where a message waits for its receiver
        ends.sort(key=lambda end: end[:2])
    for source, to, wanted in ends:
        if wanted:
            got[wanted[0]] = gm.recv(x.new_empty(wanted[1]), axis, source=source)
        else:
            gm.send(x, axis, to=to)
    return torch.cat([x.new_zeros(0, 1), *(got[number].reshape(-1, 1) for number in range(len(got)))])
""",
    "by_hand": """\
class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, run, adjoint):
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.adjoint(g), None, None

by_hand = ByHand.apply
""",
    "energy": """\
def energy(y):
    return (y * y.conj()).real.sum() + y.real.sin().sum()
""",
    "pulled": """\
def pulled(f, x):
    y, pull = torch.func.vjp(f, x)
    return pull(y.sin())[0]
""",
    "pushed": """\
def pushed(f, x):
    return torch.func.jvp(f, (x,), (x.cos(),))[1]
""",
}
"""Functions that calls use, by name."""


@dataclass(frozen=True)
class PerRank:
    """A value for each global rank."""

    values: tuple[Any, ...]


def pick(value: Any, rank: int) -> Any:
    """What a value is on one rank."""
    return value.values[rank] if isinstance(value, PerRank) else value


@dataclass(frozen=True)
class Verb:
    """A collective."""

    name: str  # the variable
    verb: str  # the name of the verb; "messages" are sends and receives of each rank
    arg: str  # its operand
    axis: str  # over which it runs
    params: tuple[tuple[str, Any], ...] = ()  # what else it is called with
    recorded: bool = True  # whether gradients are
    way: str = ""  # "", `BY_HAND`, or one of `STRUCTURES`, `VMAPS`, `DERIVATIVES`
    adjoint: Verb | None = None  # of a call by hand, the verb that its backward calls
    # the most statements between an async call and its wait; None: the call is synchronous
    later: int | None = None
    coalesced: bool = False  # whether an async call is in a block of `gradmesh.coalesce` with those beside it


def literal(key: str, value: Any) -> str:
    """A value as Python says it on every rank."""
    if isinstance(value, PerRank):
        if len(set(map(repr, value.values))) == 1:
            return literal(key, value.values[0])
        return f"[{', '.join(literal(key, one) for one in value.values)}][rank]"
    if key.endswith("_dtype"):
        return f"torch.{value}"
    if key in ("dst", "src"):
        return f"gm.{value}"
    if key == "send_rows":
        return (
            "{"
            + ", ".join(
                f"{to}: torch.tensor({list(rows)}, dtype=torch.int64, device=HERE)" for to, rows in value
            )
            + "}"
        )
    return repr(dict(value)) if key == "receive_counts" else repr(value)


def call(verb: Verb, operand: str) -> str:
    """The expression that every rank evaluates."""
    if verb.adjoint is not None:
        return f"by_hand({operand}, lambda t: {_plain(verb, 't')}, lambda g: {_plain(verb.adjoint, 'g')})"
    if verb.way in DERIVATIVES:
        inner = _plain(verb, "t")
        if verb.way == "grad":
            return f"torch.func.grad(lambda t: energy({inner}))({operand})"
        return f"{'pulled' if verb.way == 'vjp' else 'pushed'}(lambda t: {inner}, {operand})"
    if verb.way in VMAPS:
        dim = verb.way[-1]
        return f"torch.func.vmap(lambda t: {_plain(verb, 't')}, {dim}, {dim})({operand})"
    if verb.way:
        return f"column({_plain(verb, verb.way.format(operand))})"
    return _plain(verb, operand)


def launched(verb: Verb, operand: str, pending: str) -> tuple[str, str]:
    """The expression that launches the call, and the expression of its result."""
    structure = verb.way or verb.verb == "exchange"
    done = f"{pending}.wait()"
    return _bare(
        verb, verb.way.format(operand) if verb.way else operand
    ), f"column({done})" if structure else done


def _plain(verb: Verb, operand: str) -> str:
    words = [repr(verb.axis)] if verb.axis else []
    if verb.verb == "messages":
        both = [literal("", dict(verb.params)[key]) for key in ("sends", "receives")]
        return f"messages({', '.join([operand, *(words or ['None']), *both])})"
    text = _bare(verb, operand)
    text = text if verb.later is None else f"{text}.wait()"
    return f"column({text})" if verb.verb == "exchange" else text


def _bare(verb: Verb, operand: str) -> str:
    """The call alone."""
    words, params = [repr(verb.axis)] if verb.axis else [], dict(verb.params)
    if verb.verb == "exchange":
        parts, dim = (literal("", params.pop(key)) for key in ("parts", "dim"))
        operand = f"{operand}.split({parts}, {dim})"
    words += [f"{key}={literal(key, value)}" for key, value in params.items()]
    words += [] if verb.later is None else ["async_op=True"]
    return f"gm.{verb.verb}({', '.join([operand, *words])})"


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

"""Random programs. Whether one is meant for the verbs is not known here: each statement is tried on the dense run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tools.attack.calls import (
    BY_HAND,
    DERIVATIVES,
    STRUCTURES,
    TAKES_STRUCTURES,
    VMAPS,
    Leaf,
    Local,
    PerRank,
    Region,
    Statement,
    Verb,
)
from tools.attack.dense import CONSTANT, LINEAR, Dense
from tools.attack.later import with_pending
from tools.attack.meanings import MEANINGS, Invalid, need
from tools.attack.programs import MODES, Program, Term


def adjoint(verb: Verb) -> Verb | None:
    """The call that a backward written by hand makes; None where no single verb is it."""
    params = dict(verb.params)
    if params.get("sizes") == "auto" or any(key.endswith("_dtype") for key in params):
        return None
    made = _adjoint(verb.verb, params)
    return None if made is None else replace(verb, verb=made[0], params=tuple(made[1].items()), way="")


def _adjoint(verb: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    if verb == "all_gather" and params["dst"] == "R":
        return "reduce_scatter", {key: value for key, value in params.items() if key != "dst"}
    if verb == "reduce_scatter" and params["op"] == "sum":
        return "all_gather", {key: value for key, value in params.items() if key != "op"}
    if verb == "all_reduce" and params == {"op": "sum", "dst": "R"}:
        return verb, params
    if verb in ("scan", "exscan"):
        return verb, {"reverse": not params["reverse"]}
    if verb == "shift" and "sizes" not in params:
        return verb, {**params, "offset": -params["offset"]}
    if verb == "permute" and "sizes" not in params:
        return verb, {**params, "pairs": [(target, source) for source, target in params["pairs"]]}
    if verb == "all_to_all":
        other = {"split": "concat", "concat": "split"}
        return verb, {
            f"{other[key.split('_')[0]]}_{key.split('_')[1]}": value for key, value in params.items()
        }
    return None


def with_by_hand(statements: Sequence[Statement], rng: random.Random, share: float) -> tuple[Statement, ...]:
    """The statements with some of their calls inside of a Function."""
    made: list[Statement] = []
    for statement in statements:
        if isinstance(statement, Region):
            body = with_by_hand(statement.body, rng, share)
            made.append(replace(statement, body=body))  # type: ignore[arg-type]  # of the same kinds as before
        elif (
            isinstance(statement, Verb) and not statement.way and adjoint(statement) and rng.random() < share
        ):
            made.append(replace(statement, way=BY_HAND, adjoint=adjoint(statement)))
        else:
            made.append(statement)
    return tuple(made)


Shapes = list[tuple[int, ...]]
"""Each rank's shape of a variable."""


class Arguments:
    """Draws what the verbs of a program are called with."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.program, self.rng = program, rng

    def chance(self, p: float) -> bool:
        """Whether something happens."""
        return self.rng.random() < p

    def parts(self, whole: int, count: int) -> tuple[int, ...]:
        """Sizes, zero among them, that add up to a whole."""
        cuts = sorted(self.rng.randint(0, whole) for _ in range(count - 1))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, whole], strict=True))

    def sizes_on_ranks(self, shapes: Shapes, dim: int, axis: str) -> PerRank:
        """The sizes along dim on the ranks of each rank's group."""
        found = {}
        for group in self.program.groups(axis):
            for rank in group:
                found[rank] = tuple(shapes[other][dim] for other in group)
        return PerRank(tuple(found[rank] for rank in range(self.program.ranks)))

    def sizes(self, shapes: Shapes, dim: int, axis: str) -> dict[str, Any]:
        """A `sizes` argument for a dim: every size or "auto"; often none if the sizes are equal."""
        explicit = self.sizes_on_ranks(shapes, dim, axis)
        even = all(len(set(one)) == 1 for one in explicit.values)
        if even and self.chance(0.6):
            return {}
        return {"sizes": self.rng.choice([explicit, "auto"])}

    def by_group(self, axis: str, made: Callable[[tuple[int, ...]], dict[int, Any]]) -> PerRank:
        """A value for each rank, made group by group."""
        found: dict[int, Any] = {}
        for group in self.program.groups(axis):
            found.update(made(group))
        return PerRank(tuple(found[rank] for rank in range(self.program.ranks)))

    def params(self, verb: str, shapes: Shapes, axis: str, dim: int) -> dict[str, Any]:
        """What a verb is called with."""
        rng, ranks = self.rng, len(self.program.groups(axis)[0])
        if verb == "all_gather":
            return {"dim": dim, "dst": rng.choice("RRRI"), **self.sizes(shapes, dim, axis)}
        if verb == "all_reduce":
            op = rng.choice(("sum", "sum", "sum", "mean", "max", "min", "prod", "logsumexp"))
            return {"op": op, "dst": rng.choice("RRRI")}
        if verb == "all_to_all":
            return self.all_to_all(shapes, axis, dim)
        if verb == "broadcast":
            return {"root": rng.randrange(ranks), "dst": rng.choice("RRI")}
        if verb == "convert":
            src, dst = rng.choice(("RP", "RI", "IP", "VP", "RV"))
            return {"src": src, "dst": dst}
        if verb in ("scan", "exscan"):
            return {"reverse": self.chance(0.4)}
        if verb == "reduce":
            return {"root": rng.randrange(ranks)}
        if verb == "gather":
            return {"dim": dim, "root": rng.randrange(ranks), **self.sizes(shapes, dim, axis)}
        if verb == "halo_exchange":
            return {
                "dim": dim,
                "halo": (rng.randrange(3), rng.randrange(3)),
                "wrap": self.chance(0.5),
                **self.sizes(shapes, dim, axis),
            }
        if verb == "shift":
            return {
                "offset": rng.choice((1, 1, -1, 2)),
                "wrap": self.chance(0.7),
                **self.moved(shapes, axis, dim),
            }
        if verb == "permute":
            sources, targets = (rng.sample(range(ranks), ranks) for _ in range(2))
            count = rng.randint(1, ranks)
            pairs = list(zip(sources[:count], targets[:count], strict=True))
            return {"pairs": pairs, **self.moved(shapes, axis, dim)}
        if verb == "neighbor_all_to_all":
            return self.neighbors(shapes, axis)
        if verb == "exchange":
            return {"parts": PerRank(tuple(self.parts(shape[dim], ranks) for shape in shapes)), "dim": dim}
        if verb == "messages":
            return self.messages(shapes, axis)
        if verb in ("reduce_scatter", "shard"):
            given: dict[str, Any] = {"dim": dim}
            given |= {"src": rng.choice("RI")} if verb == "shard" else {"op": rng.choice(("sum", "mean"))}
            if self.chance(0.5):
                given["sizes"] = self.by_group(
                    axis, lambda g: dict.fromkeys(g, self.parts(shapes[g[0]][dim], len(g)))
                )
            return given
        return {}

    def moved(self, shapes: Shapes, axis: str, dim: int) -> dict[str, Any]:
        """The arguments of `shift` and `permute` that depend on sizes."""
        sizes = self.sizes(shapes, dim, axis)
        return {"dim": dim, **sizes} if sizes else {}

    def all_to_all(self, shapes: Shapes, axis: str, dim: int) -> dict[str, Any]:
        """What is cut and joined, along one dim or along two."""
        if len(shapes[0]) == 1 or self.chance(0.5):  # the same dim: any sizes
            send = [self.parts(shape[dim], len(self.program.groups(axis)[0])) for shape in shapes]

            def received(group: tuple[int, ...]) -> dict[int, Any]:
                return {r: tuple(send[s][place] for s in group) for place, r in enumerate(group)}

            return {
                "split_dim": dim,
                "concat_dim": dim,
                "split_sizes": PerRank(tuple(send)),
                "concat_sizes": self.by_group(axis, received),
            }
        given: dict[str, Any] = {"split_dim": dim, "concat_dim": 1 - dim}
        if self.chance(0.6):
            given["split_sizes"] = self.by_group(
                axis, lambda g: dict.fromkeys(g, self.parts(shapes[g[0]][dim], len(g)))
            )
            given["concat_sizes"] = self.sizes_on_ranks(shapes, 1 - dim, axis)
        return given

    def messages(self, shapes: Shapes, axis: str) -> dict[str, Any]:
        """A few messages from rank to rank, also several from one to another."""
        everyone = range(self.program.ranks)
        sends: dict[int, list[int]] = {rank: [] for rank in everyone}
        receives: dict[int, list[Any]] = {rank: [] for rank in everyone}
        for group in self.program.groups(axis):
            for _ in range(self.rng.randint(1, 3)):
                source, to = self.rng.sample(range(len(group)), 2)
                sends[group[source]].append(to)
                receives[group[to]].append((source, shapes[group[source]]))
        return {
            "sends": PerRank(tuple(tuple(sends[rank]) for rank in everyone)),
            "receives": PerRank(tuple(tuple(receives[rank]) for rank in everyone)),
        }

    def neighbors(self, shapes: Shapes, axis: str) -> dict[str, Any]:
        """Rows for some of the ranks."""
        rows: dict[int, dict[int, tuple[int, ...]]] = {}
        counts: dict[int, dict[int, int]] = {rank: {} for rank in range(self.program.ranks)}
        for group in self.program.groups(axis):
            for place, rank in enumerate(group):
                rows[rank] = {}
                for to, target in enumerate(group):
                    if shapes[rank][0] and self.chance(0.6):
                        picked = tuple(
                            self.rng.randrange(shapes[rank][0]) for _ in range(self.rng.randint(0, 3))
                        )
                        rows[rank][to] = picked
                        counts[target][place] = len(picked)
        ranks = range(self.program.ranks)
        return {
            "send_rows": PerRank(tuple(tuple(sorted(rows[rank].items())) for rank in ranks)),
            "receive_counts": PerRank(tuple(tuple(sorted(counts[rank].items())) for rank in ranks)),
        }


_UNARY = (
    *LINEAR,
    "{0}.sin()",
    "{0}.cos()",
    "{0} ** 2",
    "{0} ** 3",
    "{0} * {0}.sum()",
    "(0.5 * {0}).exp()",
    "{0} + 1",
    "{0}.cumsum(0)",
)
_RESHAPING = (
    "{0}[1:]",
    "torch.cat([{0}, {0}.sin()])",
    "{0}.sum(0, keepdim=True)",
    "{0}.T",
    "{0}.repeat(2, 1)",
)
_BINARY = ("{0} * {1}", "{0} + {1}", "{0} - {1} ** 2", "torch.cat([{0}, {1}])", "{0} * {1}.sum()")
_TERMS = (
    "({0} ** 2).sum()",
    "{0}.sum()",
    "{0}.sin().sum()",
    "({0} ** 3).sum()",
    "(2 * {0}).sum()",
    "{0}.sum() ** 2",
)
_TRIES = 12


class _Draw(Arguments):
    """A program that is being drawn."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        super().__init__(program, rng)
        self.dense = Dense(program)
        # Most programs in which ranks leave out much end early, and hide what they could be wrong in further on.
        self.unused = rng.choice((0.0, 0.0, 0.3))
        self.constants = rng.random() < 0.3
        self.names = (f"{letter}{i or ''}" for i in range(9) for letter in "abcdefghijklm")

    # -- pieces

    def shapes(self, name: str) -> Shapes:
        return [tuple(x.shape) for x in self.dense.values[name].tensors]

    # -- statements

    def leaf(self, index: int) -> Leaf:
        columns, most = self.rng.choice((1, 2, 2, 3)), self.rng.choice((2, 3, 4))
        kind = self.rng.choices("VRI", (8, 1, 2))[0]
        uneven = kind == "V" and self.chance(0.3)
        rows = [self.rng.randint(0, most) if uneven else most for _ in range(self.program.ranks)]
        requires = [True] * self.program.ranks
        if self.chance(0.1):
            requires = [False] * self.program.ranks
        elif not self.program.paired and kind != "I" and self.constants and self.chance(0.3):
            requires = [self.chance(0.6) for _ in requires]
        return Leaf(
            next(self.names), 100 * (index + 1), tuple((n, columns) for n in rows), kind, tuple(requires)
        )

    def text(self, choices: Sequence[str]) -> tuple[str, ...]:
        ranks = self.program.ranks
        if self.program.paired or self.chance(0.6):
            return (self.rng.choice(choices),) * ranks
        # In forward mode every rank has to give a collective's operand a tangent.
        constants = self.constants and "forward" not in self.program.mode
        others = [*choices, *CONSTANT] if constants else choices
        pool = [self.rng.choice(choices), self.rng.choice(others)]
        return tuple(self.rng.choice(pool) for _ in range(ranks))

    def local(self, made: Sequence[str]) -> list[Local]:
        if self.chance(0.3):
            return [Local(next(self.names), self.text(_BINARY), (self.variable(made), self.variable(made)))]
        choices = _RESHAPING if self.chance(0.2) else _UNARY
        return [Local(next(self.names), self.text(choices), (self.variable(made),))]

    def variable(self, made: Sequence[str]) -> str:
        recent = list(made)[-3:]
        return self.rng.choice(recent if self.chance(0.6) else list(made))

    def verb(self, made: Sequence[str]) -> list[Local | Verb]:
        verb, arg = self.rng.choice(sorted(MEANINGS)), self.variable(made)
        axis = self.rng.choice(self.program.axes)
        if "I" in self.dense.values[arg].types.values() and self.chance(0.7):
            verb = self.rng.choice(("replicate", "shard", "convert"))
        before: list[Local | Verb] = []
        dim = self.rng.randrange(2)
        shapes = self.shapes(arg)
        if verb == "scatter":
            root = self.rng.randrange(len(self.program.groups(axis)[0]))
            empty = "({0} * 1)[:0]" if dim == 0 else "({0} * 1)[:, :0]"
            roots = [group[root] for group in self.program.groups(axis)]
            if self.chance(0.4):  # a whole on every rank
                empty = "{0} * 1"
            texts = tuple("{0} * 1" if rank in roots else empty for rank in range(self.program.ranks))
            before.append(Local(next(self.names), texts, (arg,)))
            arg = before[0].name
            params: dict[str, Any] = {"dim": dim, "root": root}
            if self.chance(0.5):
                params["sizes"] = self.by_group(
                    axis, lambda g: dict.fromkeys(g, self.parts(shapes[g[root]][dim], len(g)))
                )
            way = ""
        else:
            way = self.way(verb)
            if way in VMAPS:
                batch, dim = int(way[-1]), 0
                shapes = [shape[:batch] + shape[batch + 1 :] for shape in shapes]
            params = self.params(verb, shapes, axis, dim)
        if verb != "messages" and self.chance(0.05):
            # What travels in fewer digits is compared with fewer.
            narrow = "complex64" if self.program.dtype == "complex128" else "float32"
            params |= dict.fromkeys(
                self.rng.sample(("comm_dtype", "backward_dtype"), self.rng.randint(1, 2)), narrow
            )
        recorded = way in DERIVATIVES or not self.chance(0.06)
        return [*before, Verb(next(self.names), verb, arg, axis, tuple(params.items()), recorded, way)]

    def way(self, verb: str) -> str:
        """How the verb is called."""
        if verb in TAKES_STRUCTURES and self.chance(0.15):
            return self.rng.choice(STRUCTURES)
        if verb in ("exchange", "messages"):
            need(verb == "exchange" or (self.program.ordered and "forward" not in self.program.mode))
            return ""
        if self.chance(0.12):
            return self.rng.choice(VMAPS)
        # Inside of ordered() derivatives of torch.func are refused.
        if self.chance(0.2) and not self.program.ordered and "forward" not in self.program.mode:
            return self.rng.choice(DERIVATIVES)
        return ""

    # -- the whole

    def tried(self, drawn: Callable[[], list[Any]]) -> list[Any]:
        """Draw until the dense run takes it; nothing if it does not in a few tries."""
        for _ in range(_TRIES):
            before = dict(self.dense.values)
            try:
                statements = drawn()
                for statement in statements:
                    self.dense.step(statement)
            except Invalid:
                self.dense.values = before
            else:
                return statements
        return []

    def body(self, count: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(count):
            draw = self.verb if self.chance(0.65) else self.local
            added = self.tried(lambda draw=draw: draw(list(self.dense.values)))  # type: ignore[misc]
            found += added
            if added and isinstance(added[-1], Verb) and self.chance(0.4):
                found += self.tried(lambda last=added[-1]: self.twin(last))  # type: ignore[misc]
        return found

    def twin(self, verb: Verb) -> list[Local | Verb]:
        """The same call once more: only a call like it can be taken for it without an error."""
        shapes = self.shapes(verb.arg)
        others = [name for name in self.dense.values if name != verb.arg and self.shapes(name) == shapes]
        if others and self.chance(0.5):
            return [replace(verb, name=next(self.names), arg=self.rng.choice(others))]
        other = Local(next(self.names), self.text(_UNARY), (verb.arg,))
        return [other, replace(verb, name=next(self.names), arg=other.name)]

    def terms(self, names: Sequence[str], share: float, grads: bool) -> tuple[Term, ...]:
        """Terms over some of the variables, which ranks use alike or not."""
        ranks, out = self.program.ranks, []
        for name in names:
            types = set(self.dense.values[name.removeprefix("grad ")].types.values())
            if "P" in types or (grads and "R" in types) or not self.chance(share):
                continue
            text = self.rng.choice(_TERMS)
            if self.program.dtype.startswith("complex"):
                text = self.rng.choice(
                    ("({0} * {0}.conj()).real.sum()", "{0}.real.sum()", "({0} ** 2).real.sum()")
                )
            texts: list[str | None] = [text] * ranks
            if "I" not in types and not self.program.paired:
                texts = [
                    None if self.chance(self.unused) else self.rng.choice((text, "{0}.real.sum()"))
                    for _ in texts
                ]
            out.append(Term(tuple(texts), name, weighted="I" not in types))
        return tuple(out)

    def losses(self, made: Sequence[str]) -> tuple[tuple[Term, ...], ...]:
        orders = {"forward": 0, "second": 2, "third": 3}.get(self.program.mode, 1)
        gradients = [f"grad {leaf}" for leaf in self.dense.leaves]
        later = [(*self.terms(gradients, 0.9, grads=True), *self.terms(made, 0.15, grads=False))]
        later.append((*self.terms(gradients, 0.9, grads=True),))
        return (self.terms(made[::-1], 0.8, grads=False), *later)[:orders]


def drawn(
    seed: int, index: int, ranks: tuple[int, int] = (2, 4), *, pending: float = 0.0, by_hand: float = 0.0
) -> Program:
    """A random program."""
    rng = random.Random(f"{seed}/{index}")
    size = rng.randint(*ranks)
    mode = rng.choices(MODES, (30, 30, 6, 8, 10, 16))[0]
    program = Program(
        ranks=size,
        mesh=size == 4 and rng.random() < 0.6,
        dtype=rng.choices(("float64", "complex128", "float32"), (80, 13, 7))[0],
        mode=mode,
        ordered=rng.random() < 0.5 and mode != "forward",
        paired=rng.random() < 0.5,
    )
    draw = _Draw(program, rng)
    statements: list[Statement] = []
    for index_of_leaf in range(rng.randint(1, 3)):
        statements += draw.tried(lambda i=index_of_leaf: [draw.leaf(i)])  # type: ignore[misc]
    made = list(draw.dense.leaves)
    for _ in range(rng.randint(1, 4)):
        body = draw.body(rng.randint(1, 2))
        # torch refuses its own derivatives inside of a checkpoint.
        derived = any(isinstance(one, Verb) and one.way in DERIVATIVES for one in body)
        if body and rng.random() < 0.15 and "forward" not in mode and not derived:
            # Of a message only two ranks know; the others would meet the refusal of the older checkpoint elsewhere.
            messages = any(isinstance(one, Verb) and one.verb == "messages" for one in body)
            reentrant = mode == "first" and rng.random() < (0.1 if program.ordered else 0.4) and not messages
            body = [Region(tuple(body), reentrant)]
        statements += body
    made = [name for name in draw.dense.values if name not in draw.dense.leaves]
    after = _after(draw, rng)
    losses = draw.losses(made)
    if by_hand and not program.ordered and "forward" not in mode:
        statements = list(with_by_hand(statements, rng, by_hand))
    if pending:
        statements = list(with_pending(statements, rng, pending))
    return replace(program, statements=tuple(statements), losses=losses, after=after)


def _after(draw: _Draw, rng: random.Random) -> tuple[Verb, ...]:
    """What a next step of the same program would call first."""
    if rng.random() < 0.4:
        return ()
    out = []
    for axis in draw.program.axes:
        verb, params = rng.choice(
            (
                ("all_gather", {"dim": 0, "dst": "R"}),
                ("scan", {"reverse": False}),
                ("all_reduce", {"op": "sum", "dst": "R"}),
            )
        )
        leaves = [n for n, v in draw.dense.values.items() if n in draw.dense.leaves and v.types[axis] == "V"]
        if not leaves:
            continue
        statement = Verb(f"after_{axis}", verb, leaves[0], axis, tuple(params.items()), recorded=False)
        if draw.tried(lambda one=statement: [one]):  # type: ignore[misc]
            out.append(statement)
    return tuple(out)

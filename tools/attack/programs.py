"""What a random program is: plain data, and the Python that every rank runs."""

from __future__ import annotations

from dataclasses import dataclass

from tools.attack.calls import (
    HELPERS,
    Leaf,
    Local,
    PerRank,
    Region,
    Statement,
    Verb,
    arguments_of,
    call,
    literal,
    names_of,
)
from tools.attack.later import blocks

MODES = ("first", "second", "third", "forward", "forward over reverse", "reverse over forward")
"""Which derivatives a program takes."""

HEADER = """\
import torch, gradmesh as gm
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

HERE = torch.get_default_device()  # which a thread of autograd does not know

def leaf(seed, shape, dtype=torch.float64, grad=True):
    data = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (0.7 * data).to(HERE).requires_grad_(grad)

def lay_out():
    gm.mesh(rows=2, cols=2)
"""


@dataclass(frozen=True)
class Term:
    """A term of each rank's loss: an expression over one variable, or None on a rank that does not use it.

    In a derivative of the second order or more, the variable may be the gradient of a leaf, "grad NAME".
    """

    texts: tuple[str | None, ...]  # each rank's expression
    arg: str  # the variable
    weighted: bool  # whether rank r takes it 1 + r times


@dataclass(frozen=True)
class Program:
    """A random program."""

    ranks: int  # how many there are
    mesh: bool  # whether four ranks lie on a mesh, 2 by 2
    dtype: str  # of all leaves
    mode: str  # which derivatives are taken
    ordered: bool  # whether inside `gradmesh.ordered()`
    paired: bool  # whether every rank does the same, so that backward collectives meet without `ordered()`
    statements: tuple[Statement, ...] = ()  # in order
    losses: tuple[tuple[Term, ...], ...] = ()  # the terms of the loss; then those of each further order
    # collectives without gradient that follow, as the next step of a training would
    after: tuple[Verb, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes; of the only one, the empty name."""
        return ("rows", "cols") if self.mesh else ("",)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The global ranks along an axis, group by group."""
        if not self.mesh:
            return (tuple(range(self.ranks)),)
        return ((0, 2), (1, 3)) if axis == "rows" else ((0, 1), (2, 3))

    @property
    def flat(self) -> list[Leaf | Local | Verb]:
        """The statements, with those of regions in the regions' places."""
        return [one for s in self.statements for one in (s.body if isinstance(s, Region) else (s,))]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves among the statements."""
        return tuple(s for s in self.statements if isinstance(s, Leaf))


def _line(statement: Leaf | Local | Verb, program: Program, *, dual: bool = True) -> list[str]:
    if isinstance(statement, Leaf):
        seed = f"{statement.seed} + rank" if statement.kind == "V" else str(statement.seed)
        words = [seed, literal("", PerRank(statement.shapes))]
        if program.dtype != "float64":
            words.append(f"torch.{program.dtype}")
        if not all(statement.requires):
            words.append(f"grad={literal('', PerRank(statement.requires))}")
        lines = [f"{statement.name} = leaf({', '.join(words)})"]
        if "forward" in program.mode:
            words[0] = f"{statement.seed + 50}" + (" + rank" if statement.kind == "V" else "")
            tangent = f"leaf({', '.join([*words[: 2 + (program.dtype != 'float64')], 'grad=False'])})"
            lines.append(f"{statement.name}_ = forward_ad.make_dual({statement.name}, {tangent})")
        return lines
    if isinstance(statement, Local):
        texts = [text.format(*(_dual(arg, program) for arg in statement.args)) for text in statement.texts]
        return [f"{statement.name} = {_by_rank(texts)}"]
    line = f"{statement.name} = {call(statement, _dual(statement.arg, program) if dual else statement.arg)}"
    return [line] if statement.recorded else ["with torch.no_grad():", f"    {line}"]


def _dual(name: str, program: Program) -> str:
    """The variable that statements use for one."""
    is_leaf = any(leaf.name == name for leaf in program.leaves)
    return f"{name}_" if is_leaf and "forward" in program.mode else name


def _by_rank(texts: list[str]) -> str:
    kinds = list(dict.fromkeys(texts))
    words = []
    for kind in kinds[:-1]:
        ranks = tuple(rank for rank, text in enumerate(texts) if text == kind)
        words.append(f"{kind} if {_is_one_of(ranks)} else ")
    return "".join(words) + kinds[-1]


def _is_one_of(ranks: tuple[int, ...]) -> str:
    return f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in {ranks}"


def _block(program: Program) -> list[str]:
    return blocks(
        program.statements, lambda statement: _at_once(statement, program), lambda name: _dual(name, program)
    )


def _at_once(statement: Statement, program: Program) -> list[str]:
    if not isinstance(statement, Region):
        return _line(statement, program)
    given, made = ", ".join(arguments_of(statement)), ", ".join(names_of(statement))
    body = blocks(statement.body, lambda one: _at_once(one, program), lambda name: _dual(name, program))
    return [
        f"def region({given}):",
        *(f"    {line}" for line in body),
        f"    return {made},",
        f"{made}, = checkpoint(region, {given}, use_reentrant={statement.reentrant})",
    ]


def _terms(program: Program, terms: tuple[Term, ...], tangents: bool) -> list[str]:
    leaves = [leaf.name for leaf in program.leaves]
    lines = ["terms = []"]
    for term in terms:
        arg = f"grads[{term.arg[5:]!r}]" if term.arg.startswith("grad ") else term.arg
        if tangents:
            arg = f"{arg}_" if arg in leaves else arg
            lines.append(f"t = forward_ad.unpack_dual({arg}).tangent")
            arg = "t"
        checked = tangents or arg != term.arg
        for text in dict.fromkeys(text for text in term.texts if text is not None):
            ranks = tuple(rank for rank, own in enumerate(term.texts) if own == text)
            conditions = [] if len(ranks) == len(term.texts) else [_is_one_of(ranks)]
            conditions += [f"{arg} is not None"] if checked else []
            weight = "(1 + rank) * " if term.weighted else ""
            line = f"terms.append({weight}{text.format(arg)})"
            lines.append(f"if {' and '.join(conditions)}: {line}" if conditions else line)
    lines.append("loss = sum(terms) if terms else None")
    if any(isinstance(one, Verb) and one.verb == "messages" for one in program.flat):
        # A rank without a message may have no chain, and then a loss that requires no grad is torch's error.
        lines.append("if loss is not None and not loss.requires_grad: loss = None")
    return lines


def _derivatives(program: Program) -> list[str]:
    leaves = "{" + ", ".join(f"{leaf.name!r}: {leaf.name}" for leaf in program.leaves) + "}"
    if program.mode == "forward":
        return []
    ready = "loss is not None and loss.requires_grad"
    lines = _terms(program, program.losses[0], program.mode == "reverse over forward")
    taken = {"second": 1, "third": 2, "forward over reverse": 1}.get(program.mode, 0)
    if taken:
        if "forward" in program.mode:
            leaves = "{" + ", ".join(f"{leaf.name!r}: {leaf.name}_" for leaf in program.leaves) + "}"
        lines += [f"leaves = {{name: x for name, x in {leaves}.items() if x.requires_grad}}"]
    for order in range(taken):
        options = "allow_unused=True" + ("" if "forward" in program.mode else ", create_graph=True")
        call = f"list(leaves.values()), {options})"
        lines.append("grads = dict.fromkeys(" + repr([leaf.name for leaf in program.leaves]) + ")")
        update = "grads.update(zip(leaves, {}))"
        if program.ordered:
            lines.append(update.format(f"gm.grad(loss, {call}"))
        else:
            lines.append(f"if leaves and {ready}: " + update.format(f"torch.autograd.grad(loss, {call}"))
        lines.append(f"out.update({{'grad{order + 1} ' + name: g for name, g in grads.items()}})")
        if "forward" not in program.mode:
            lines += _terms(program, program.losses[order + 1], False)
    if program.mode == "forward over reverse":
        lines.append(
            "out.update({'tangent of grad ' + name: forward_ad.unpack_dual(g).tangent "
            "for name, g in grads.items() if g is not None})"
        )
        return lines
    return [*lines, "gm.backward(loss)" if program.ordered else f"if {ready}: loss.backward()"]


def source(program: Program) -> str:
    """The Python that every rank runs: a function `on_each_rank`."""
    lines = ["rank = torch.distributed.get_rank()"]
    lines += ["lay_out()"] if program.mesh else []
    lines += ["out = {}"]
    around = ["forward_ad.dual_level()"] if "forward" in program.mode else []
    around += ["gm.ordered()"] if program.ordered else []
    inside = _block(program)
    made = [name for s in program.statements if not isinstance(s, Leaf) for name in names_of(s)]
    inside += [f"out.update({', '.join(f'{name}={name}' for name in made)})"] if made else []
    if "forward" in program.mode and made:
        inside.append(
            f"out.update({{'tangent of ' + name: forward_ad.unpack_dual(out[name]).tangent for name in {made}}})"
        )
    inside += _derivatives(program)
    lines += [f"with {', '.join(around)}:", *(f"    {line}" for line in inside)] if around else inside
    if program.mode not in ("forward", "forward over reverse"):
        lines += [f"out['grad {leaf.name}'] = {leaf.name}.grad" for leaf in program.leaves]
    for verb in program.after:
        lines += _line(verb, program, dual=False)
        lines += [f"out[{verb.name!r}] = {verb.name}"]
    return "def on_each_rank():\n" + "\n".join(f"    {line}" for line in [*lines, "return out"]) + "\n"


def script(program: Program, backend: str = "threads") -> str:
    """A file that runs the program."""
    run = f'gm.launch(on_each_rank, {program.ranks}, backend="{backend}", timeout=20)'
    text = source(program)
    helpers = "".join(f"\n{made}" for name, made in HELPERS.items() if f"{name}(" in text)
    return f"{HEADER}{helpers}\n{text}\nfor rank, out in enumerate({run}):\n    print(rank, out)\n"

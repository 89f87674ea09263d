"""A program in one process, without gradmesh: all ranks' tensors side by side, and the sum of the ranks' losses.

What is of type I is one tensor for all ranks, so that it is counted once. The types are checked on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tools.attack.calls import DERIVATIVES, Leaf, Local, Region, Statement, Verb, pick
from tools.attack.meanings import Invalid, meaning, need
from tools.attack.programs import Program, Term

LINEAR = ("2 * {0}", "-{0}", "{0}.flip(0)")
"""The expressions that a pending sum may go through."""

CONSTANT = ("{0}.detach()", "torch.zeros_like({0})")
"""The expressions that end a gradient."""

_SUMS = ("all_reduce", "reduce_scatter", "reduce")
_LARGEST = 50.0


@dataclass
class Value:
    """A variable on all ranks."""

    tensors: list[Tensor]  # each rank's
    types: dict[str, str]  # over each axis: V, R, I or P


Expected = list[dict[str, Tensor | None]]
"""What every rank returns."""


@lru_cache(maxsize=4096)
def compiled(text: str, args: int) -> Callable[..., Tensor]:
    """An expression as a function."""
    names = [f"x{i}" for i in range(args)]
    made: Callable[..., Tensor] = eval(f"lambda {', '.join(names)}: {text.format(*names)}", {"torch": torch})
    return made


def _leaf(seed: int, shape: Sequence[int], dtype: str, grad: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(shape, dtype=getattr(torch, dtype), generator=generator)
    return (0.7 * data).requires_grad_(grad)


def _result_type(verb: str, params: dict[str, Any], type_: str) -> str:
    """The type over the axis of the call."""
    if verb == "replicate":
        need(type_ == "I")
        return "R"
    if verb == "shard":
        need(type_ == params["src"])
        return "V"
    if verb == "convert":
        src, dst = params["src"], params["dst"]
        need(type_ == src or (src == "V" and type_ == "R"))
        # Only what is invariant makes a sum whose gradient has to be the same on every rank.
        return "P" if src == "I" else "I" if dst == "I" else "V"
    plain_sum = verb in _SUMS and params.get("op", "sum") in ("sum", "mean")
    need(type_ in ("V", "R") or (type_ == "P" and plain_sum))
    return str(params.get("dst", "R" if verb == "broadcast" else "V"))


class Dense:
    """All ranks of a program."""

    def __init__(self, program: Program, *, duals: bool = False) -> None:
        self.program = program
        self.duals = duals
        self.values: dict[str, Value] = {}
        self.leaves: dict[str, list[Tensor]] = {}
        self._known: dict[Hashable, tuple[Any, Any]] = {}
        self.all_require = True

    def step(self, statement: Statement) -> None:
        """Run a statement on all ranks."""
        if isinstance(statement, Region):
            for inner in statement.body:
                self.step(inner)
            if statement.reentrant:
                made = [self.values[inner.name].tensors for inner in statement.body]
                # Such a checkpoint wants an operand and a result that require grad, on every rank.
                need(
                    self.all_require
                    and all(any(x.requires_grad for x in own) for own in zip(*made, strict=True))
                )
        elif isinstance(statement, Leaf):
            self._make(statement)
        else:
            value = self._local(statement) if isinstance(statement, Local) else self._verb(statement)
            for tensor in value.tensors:
                need(tensor.numel() <= 200)
                need(tensor.isfinite().all() and (tensor.abs() < _LARGEST).all())
            self.values[statement.name] = value

    def _once(self, key: Hashable, args: Sequence[Tensor], work: Callable[[], Any]) -> Any:
        """Do the same work on the same tensors once, so that what is invariant stays one tensor."""
        whole = (key, tuple(map(id, args)), torch.is_grad_enabled())
        if whole not in self._known:
            self._known[whole] = (args, work())
        return self._known[whole][1]

    def _make(self, leaf: Leaf) -> None:
        ranks, dtype = range(self.program.ranks), self.program.dtype

        def made(seed: int, grads: Sequence[bool]) -> list[Tensor]:
            if leaf.kind == "I":
                return [_leaf(seed, leaf.shapes[0], dtype, grads[0])] * len(ranks)
            each = [seed + (rank if leaf.kind == "V" else 0) for rank in ranks]
            return [_leaf(each[rank], leaf.shapes[rank], dtype, grads[rank]) for rank in ranks]

        self.all_require &= all(leaf.requires)
        need(leaf.kind == "V" or len(set(leaf.shapes)) == 1)
        need(leaf.kind != "I" or len(set(leaf.requires)) == 1)
        tensors = self.leaves[leaf.name] = made(leaf.seed, leaf.requires)
        if self.duals:
            pairs = zip(tensors, made(leaf.seed + 50, [False] * len(ranks)), strict=True)
            tensors = [
                self._once("dual", (tensor,), partial(forward_ad.make_dual, tensor, d)) for tensor, d in pairs
            ]
        self.values[leaf.name] = Value(tensors, dict.fromkeys(self.program.axes, leaf.kind))

    def _local(self, local: Local) -> Value:
        alike = len(set(local.texts)) == 1
        self.all_require &= not set(local.texts) & set(CONSTANT)
        args = [self.values[name] for name in local.args]
        types = {}
        for axis in self.program.axes:
            found = {arg.types[axis] for arg in args}
            if "P" in found:
                need(alike and len(args) == 1 and local.texts[0] in LINEAR)
                types[axis] = "P"
            elif "I" in found:
                need(alike and found == {"I"})
                types[axis] = "I"
            else:
                types[axis] = "R" if alike and found == {"R"} else "V"
        out = []
        for rank, text in enumerate(local.texts):
            own = [arg.tensors[rank] for arg in args]
            try:
                out.append(self._once(text, own, partial(compiled(text, len(own)), *own)))
            except (RuntimeError, IndexError) as error:
                raise Invalid from error
        return Value(out, types)

    def _verb(self, verb: Verb) -> Value:
        arg = self.values[verb.arg]
        out: dict[int, Tensor] = {}
        own = dict(verb.params)
        types = {**arg.types, verb.axis: _result_type(verb.verb, own, arg.types[verb.axis])}
        if (
            verb.way in DERIVATIVES
        ):  # the derivative of the sum of the ranks' terms, each rank's by its own operand
            need(set(arg.types.values()) == {"V"} and types[verb.axis] != "P")
            types[verb.axis] = types[verb.axis] if verb.way == "jvp" else "V"
        for other in self.program.axes:
            if other != verb.axis and arg.types[other] != "V":
                need(arg.types[other] != "P")
                alike = self._same_along(other, verb)
                need(alike or arg.types[other] == "R")
                types[other] = arg.types[other] if alike else "V"
        for group in self.program.groups(verb.axis):
            xs = [arg.tensors[rank] for rank in group]
            params = [{key: pick(value, rank) for key, value in verb.params} for rank in group]
            context = contextlib.nullcontext() if verb.recorded else torch.no_grad()
            with context:
                done = self._once(
                    repr((verb.verb, verb.way, params)), xs, partial(self._mean, verb, xs, params)
                )
            out.update(zip(group, done, strict=True))
        return Value([out[rank] for rank in range(self.program.ranks)], types)

    def _same_along(self, axis: str, verb: Verb) -> bool:
        """Whether the call is the same on all ranks along an axis that it does not run over."""
        return all(
            len({repr(pick(value, rank)) for rank in group}) == 1
            for group in self.program.groups(axis)
            for _, value in verb.params
        )

    @staticmethod
    def _mean(verb: Verb, xs: list[Tensor], params: list[dict[str, Any]]) -> list[Tensor]:
        try:
            done = meaning(verb.verb, verb.way)(xs, params)
        except (RuntimeError, IndexError) as error:
            raise Invalid from error
        # Results are variables of their own, but one for all ranks where they are one.
        new = {id(x): x.view_as(x) for x in done}
        return [new[id(x)] for x in done]

    def total(self, terms: Sequence[Term], grads: dict[str, list[Tensor | None]], tangents: bool) -> Any:
        """The sum of the ranks' losses; what is invariant is counted once."""
        total: Any = None
        for term in terms:
            value = self._of(term, grads)
            for rank, text in enumerate(term.texts):
                x = value[0][rank]
                if tangents and x is not None:
                    x = forward_ad.unpack_dual(x).tangent
                if text is None or x is None or not self._counts(value[1], rank):
                    continue
                one = compiled(text, 1)(x) * (1 + rank if term.weighted else 1)
                total = one if total is None else total + one
        return total

    def _of(self, term: Term, grads: dict[str, list[Tensor | None]]) -> tuple[Sequence[Any], dict[str, str]]:
        if term.arg.startswith("grad "):
            name = term.arg.removeprefix("grad ")
            # The gradient of a replicated value is a pending sum.
            need(self.values[name].types[self.program.axes[0]] != "R")
            found: Sequence[Tensor | None] = grads[name]
            types = self.values[name].types
        else:
            found, types = self.values[term.arg].tensors, self.values[term.arg].types
        need("P" not in types.values())
        alike = None not in term.texts and len(set(term.texts)) == 1 and not term.weighted
        need("I" not in types.values() or alike)
        return found, types

    def _counts(self, types: dict[str, str], rank: int) -> bool:
        return all(
            rank in [group[0] for group in self.program.groups(axis)]
            for axis, type_ in types.items()
            if type_ == "I"
        )


def expected(program: Program) -> Expected:
    """What every rank has to return."""
    need(any(isinstance(each, Verb) and each.recorded for each in program.flat))
    forward = "forward" in program.mode
    out: Expected = [{} for _ in range(program.ranks)]

    def say(name: str, tensors: Sequence[Tensor | None]) -> None:
        for rank, tensor in enumerate(tensors):
            out[rank][name] = None if tensor is None else tensor.detach()

    with forward_ad.dual_level() if forward else contextlib.nullcontext():
        dense = Dense(program, duals=forward)
        for statement in program.statements:
            dense.step(statement)
        for name, value in dense.values.items():
            if name not in dense.leaves:
                say(name, value.tensors)
                if forward:
                    say(f"tangent of {name}", [forward_ad.unpack_dual(x).tangent for x in value.tensors])
        try:
            _derive(program, dense, say)
        except RuntimeError as error:  # some second derivatives torch itself does not have
            raise Invalid from error
    if program.mode not in ("forward", "forward over reverse"):
        for name, tensors in dense.leaves.items():
            say(f"grad {name}", [x.grad for x in tensors])
    after = Dense(program)
    both: tuple[Statement, ...] = (*program.leaves, *program.after)
    for statement in both:
        after.step(statement)
    for verb in program.after:
        say(verb.name, after.values[verb.name].tensors)
    for one in out:
        need(all(x is None or (x.isfinite().all() and (x.abs() < 1e6).all()) for x in one.values()))
    return out


def _derive(program: Program, dense: Dense, say: Callable[[str, Sequence[Tensor | None]], None]) -> None:
    if program.mode == "forward":
        return
    grads: dict[str, list[Tensor | None]] = {}
    total = dense.total(program.losses[0], grads, program.mode == "reverse over forward")
    taken = {"second": 1, "third": 2, "forward over reverse": 1}.get(program.mode, 0)
    # Outside of ordered(), torch.autograd.grad silently skips what does not lead to its inputs, such as a collective
    # whose operand is a constant on this rank.
    need(program.ordered or not taken or dense.all_require)
    for order in range(taken):
        need(total is not None and total.requires_grad)
        wanted = {id(x): x for name in dense.leaves for x in dense.values[name].tensors if x.requires_grad}
        found = torch.autograd.grad(
            total, list(wanted.values()), allow_unused=True, create_graph="forward" not in program.mode
        )
        by_id = dict(zip(wanted, found, strict=True))
        grads = {name: [by_id.get(id(x)) for x in dense.values[name].tensors] for name in dense.leaves}
        for name, found_here in grads.items():
            say(f"grad{order + 1} {name}", found_here)
            if program.mode == "forward over reverse":
                say(
                    f"tangent of grad {name}",
                    [None if g is None else forward_ad.unpack_dual(g).tangent for g in found_here],
                )
        if program.mode != "forward over reverse":
            total = dense.total(program.losses[order + 1], grads, tangents=False)
    if program.mode != "forward over reverse":
        need(total is not None and total.requires_grad)
        total.backward()

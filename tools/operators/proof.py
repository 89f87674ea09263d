"""A rule, compared with values and gradients: three ranks, simulated by three lists of tensors in one process."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import arguments_of
from gradmesh.type_inference import rules
from gradmesh.type_inference.rules import SAMES, I, Kind, P, R, Rule, S, V, outcome, rule_of
from tools.operators.samples import Operand, arguments, operands

RANKS = 3
_STEP = 1e-6

Values = dict[Operand, Tensor]


class RefutedError(AssertionError):
    """A rule disagrees with a value or a gradient."""


@dataclass
class Proof:
    """What was compared with values."""

    name: str  # the operator
    rule: str
    values: int = 0  # for how many choices of types values were compared
    gradients: int = 0  # for how many of them gradients were
    refused: int = 0  # how many choices the rule calls a fault, and values show that it is one
    said: set[str] = field(default_factory=set)


def overload_of(name: str) -> Any:
    """An overload of torch, by a name with or without it; that in place where there is no other."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None) or getattr(torch.ops.aten, f"{base}_")
    chosen = overload or ("default" if "default" in packet.overloads() else packet.overloads()[0])
    return getattr(packet, chosen)


class Case:
    """One operator with sample arguments."""

    def __init__(self, name: str, text: str, seed: int = 0) -> None:
        self.func = overload_of(name)
        base, _, overload = name.partition(".")
        written = rule_of(base, overload)
        if written is None:
            raise RefutedError(f"{name} has no rule")
        self.rule: Rule = rules.rule(written)
        self.args, self.kwargs = arguments(text)
        self._fresh()
        self.names = [argument for argument, _ in arguments_of(self.func)]
        self.places = self._places()
        self.free = [one for one in self.places if one.typed]
        self.generator = torch.Generator().manual_seed(seed)

    def _fresh(self) -> None:
        """Each operand is one of its own, also where a name stands twice."""

        def renew(value: Any) -> Any:
            if isinstance(value, Operand):
                return dataclasses.replace(value)
            if isinstance(value, list):
                return [renew(one) for one in value]
            return value

        self.args = tuple(renew(one) for one in self.args)
        self.kwargs = {key: renew(one) for key, one in self.kwargs.items()}

    def _places(self) -> dict[Operand, int]:
        given = {**dict(enumerate(self.args)), **{self.names.index(k): v for k, v in self.kwargs.items()}}
        self.given = given
        return {one: place for place, value in given.items() for one in operands(value)}

    def draw(self, one: Operand) -> Tensor:
        """A value for an operand."""
        if not one.typed:
            return self._numbers(one)
        part = torch.rand(one.shape, dtype=torch.float64, generator=self.generator)
        part = one.low + (one.high - one.low) * part
        if one.definite:
            part = torch.tril(part @ part.T + torch.eye(one.shape[-1], dtype=part.dtype))
            return part if one.lower else part + part.tril(-1).T
        if one.dtype.is_complex:
            part = torch.complex(part, part.flip(0))
        return part

    def _numbers(self, one: Operand) -> Tensor:
        """Integers or a mask; those that say where something is written stand there once."""
        if one.unique:
            spots = torch.rand((int(one.high), *one.shape[1:]), generator=self.generator).argsort(0)
            return spots[: one.shape[0]]
        drawn = torch.randint(int(one.low), int(one.high), one.shape, generator=self.generator)
        return drawn.reshape(one.shape).to(one.dtype)

    def spread(self, one: Operand, kind: Kind, how: str = "") -> list[Tensor]:
        """The values of an operand of a type, on each rank: "wide", "odd" with a NaN and zeros, or "infinite"."""
        if how and not one.definite and one.dtype is torch.float64:
            wide = Operand(one.shape, -3.0, 3.0)
            parts = [self.draw(wide) for _ in range(RANKS if kind in (V, P) else 1)]
            if how != "wide" and math.prod(one.shape) > 5:
                for rank, part in enumerate(parts):
                    flat = part.view(-1)
                    if how == "infinite" or len(parts) > 1:
                        flat[torch.rand(flat.shape, generator=self.generator) < 0.3] = 0.0
                    flat[1] = torch.nan if rank < 2 else 1.0
                    if how == "infinite":
                        flat[0], flat[3] = torch.inf, -torch.inf
                    elif rank == 0:
                        flat[4] = flat[5]
            return parts * (RANKS // len(parts))
        if kind == V:
            return [self.draw(one) for _ in range(RANKS)]
        whole = self.draw(one)
        if kind != P:
            return [whole] * RANKS
        shares = [0.2, 0.3, 0.5]
        noise = 0.02 * torch.rand(one.shape, dtype=torch.float64, generator=self.generator)
        return [share * whole + off * noise for share, off in zip(shares, (1.0, -2.0, 1.0), strict=True)]

    def run(self, values: Values) -> list[Tensor]:
        """The tensors that it returns."""

        def filled(value: Any) -> Any:
            if isinstance(value, Operand):
                return values[value]
            if isinstance(value, list):
                return [filled(one) for one in value]
            return value

        args = [filled(one) for one in self.args]
        if self.func._schema.name.endswith("_"):
            args[0] = args[0].clone()
        with torch.random.fork_rng():
            result = self.func(*args, **{key: filled(one) for key, one in self.kwargs.items()})
        return [one for one in _flat(result) if isinstance(one, Tensor)]

    def kinds(self, chosen: dict[Operand, Kind]) -> dict[int, list[Kind]]:
        """What a choice is by places, as the mode hands it to the rules."""
        met: dict[int, list[Kind]] = {}
        for one, place in self.places.items():
            met.setdefault(place, []).append(chosen.get(one, S))
        for place, value in self.given.items():
            if place not in met and isinstance(value, int | float | complex):
                met[place] = [S if value else "Z"]
        return met


def _flat(result: Any) -> list[Any]:
    return [one for part in result for one in _flat(part)] if isinstance(result, list | tuple) else [result]


def _total(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sums over ranks, of each output."""
    return [torch.stack([_wide(one) for one in column]).sum(0) for column in zip(*lists, strict=True)]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype.is_floating_point or x.dtype.is_complex else x.to(torch.float64)


def _near(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, _wide(b), rtol=1e-9, atol=1e-9, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def prove(name: str, text: str, seed: int = 0) -> Proof:
    """Hold an operator's rule against values and gradients, for every choice of types of a sample's operands."""
    case = Case(name, text, seed)
    proof = Proof(name, case.rule.text)
    fixed = {one: case.draw(one) for one in case.places if not one.typed}
    if case.rule.made:
        _prove_made(case, proof, fixed)
        return proof
    choices = [dict(zip(case.free, kinds, strict=True)) for kinds in _choices(len(case.free))]
    for chosen in choices:
        kind, problem = outcome(case.rule, case.kinds(chosen))
        spread = {one: case.spread(one, what) for one, what in chosen.items()}
        ranks: list[Values] = [
            {**fixed, **{one: parts[r] for one, parts in spread.items()}} for r in range(RANKS)
        ]
        results = [case.run(values) for values in ranks]
        where = f"{name}({text}) of {[*chosen.values()]} is {kind} {problem}"
        _hold_values(case, proof, chosen, kind, problem, ranks, results, where)
        if not problem and kind in (P, I, R, V):
            proof.gradients += _hold_gradients(case, chosen, kind, ranks, where)
    return proof


def _choices(count: int) -> list[tuple[Kind, ...]]:
    """All types for up to two operands; for more, some of each kind."""
    every = [*itertools.product((I, R, V, P), repeat=count)]
    if count <= 2:
        return every
    kept = [one for one in every if len(set(one)) == 1]
    kept += [tuple(P if n == at else R for n in range(count)) for at in range(count)]
    return kept + random.Random(count).sample(every, 12)


def _prove_made(case: Case, proof: Proof, fixed: Values) -> None:
    made = case.rule.made
    if made.isdigit():
        made = outcome(case.rule, case.kinds({}))[0]
    results = [case.run({**fixed, **{one: case.draw(one) for one in case.free}}) for _ in range(RANKS)]
    if made == "~":
        proof.said.add("observed when the program runs")
        return
    if made == V:
        proof.said.add("uninitialized memory")
        return
    if any(not _alike(results[0], one) for one in results[1:]):
        raise RefutedError(f"{proof.name} depends on values")
    if made == "Z" and any(bool(one.any()) for one in results[0]):
        raise RefutedError(f"{proof.name} is not zeros")
    proof.values += 1


def _hold_values(
    case: Case,
    proof: Proof,
    chosen: dict[Operand, Kind],
    kind: Kind,
    problem: str,
    ranks: Sequence[Values],
    results: Sequence[Sequence[Tensor]],
    where: str,
) -> None:
    if problem == rules.UNSAID or (kind == "?" and not problem):
        proof.said.add("nothing is said of pending sums")
        return
    if kind in SAMES:
        if any(not _alike(results[0], one) for one in results[1:]):
            raise RefutedError(f"{where}: the ranks differ")
        proof.values += 1
        return
    if P not in chosen.values():  # V promises nothing
        return
    if problem:
        if _fits(case, chosen, ranks, results) and not _faulty(case, chosen, problem, ranks[0]):
            raise RefutedError(f"{where}: the sum over ranks is right, and the rule calls it a fault")
        proof.refused += 1
    elif kind == P:
        if not _fits(case, chosen, ranks, results):
            raise RefutedError(f"{where}: the sum over ranks is not what the operator makes of the sums")
        proof.values += 1


def _fits(
    case: Case, chosen: dict[Operand, Kind], ranks: Sequence[Values], results: Sequence[Sequence[Tensor]]
) -> bool:
    """Whether the results are a pending sum: theirs over the ranks is what comes of the operands' sums.

    Where something varies beside, the sum has to stay what it is when the terms are distributed otherwise.
    """
    try:
        if V not in chosen.values():
            summed = {
                one: sum(values[one] for values in ranks) if chosen.get(one) == P else ranks[0][one]
                for one in ranks[0]
            }
            return _near(_total(results), case.run(summed))  # type: ignore[arg-type]
        pending = [one for one in ranks[0] if chosen.get(one) == P]
        turned = [
            {
                one: ranks[(r + 1 + pending.index(one)) % RANKS][one] if one in pending else x
                for one, x in values.items()
            }
            for r, values in enumerate(ranks)
        ]
        return _near(_total(results), _total([case.run(values) for values in turned]))
    except RuntimeError:  # as many as there are such values, or none where the function is not defined
        return False


def _faulty(case: Case, chosen: dict[Operand, Kind], problem: str, fixed: Values) -> bool:
    """Whether there are values that show a fault, where the first ones happened not to."""
    # Where what varies beside is the same, the fault must not vanish.
    if problem == rules.NONLINEAR:
        chosen = {one: R if what == V else what for one, what in chosen.items()}
    for how in ("", "wide", "odd", "infinite"):
        spread = {one: case.spread(one, what, how) for one, what in chosen.items()}
        ranks = [{**fixed, **{one: parts[r] for one, parts in spread.items()}} for r in range(RANKS)]
        try:
            results = [case.run(values) for values in ranks]
        except RuntimeError:
            continue
        if not _fits(case, chosen, ranks, results):
            return True
    return False


def _hold_gradients(
    case: Case, chosen: dict[Operand, Kind], kind: Kind, ranks: Sequence[Values], where: str
) -> int:
    """Hold the gradients' types against finite differences of the typed objective."""
    free = [one for one in case.free if one.dtype is torch.float64]
    if not free or len(free) < len(case.free):
        return 0
    tracked = [
        {one: x.detach().clone().requires_grad_(one in free) for one, x in values.items()} for values in ranks
    ]
    if case.func is torch.ops.aten.as_strided_scatter.default:  # torch's own derivative of it is another one
        return 0
    try:
        outs = [case.run(values) for values in tracked]
    except (NotImplementedError, RuntimeError):
        return 0
    used = [n for n, one in enumerate(outs[0]) if one.requires_grad and one.dtype is torch.float64]
    if not used:
        return 0
    draws = torch.Generator().manual_seed(1)
    weights = [
        [torch.rand(outs[r][n].shape, dtype=torch.float64, generator=draws) for n in used]
        for r in range(RANKS)
    ]
    if kind in (P, I):
        weights = [weights[0]] * RANKS
    try:
        grads = [
            torch.autograd.grad(
                [outs[r][n] for n in used],
                [tracked[r][one] for one in free],
                weights[r],
                allow_unused=True,
            )
            for r in range(RANKS)
        ]
    except (NotImplementedError, RuntimeError):
        return 0

    def objective(values: Sequence[Values]) -> float:
        made = [case.run(one) for one in (values[:1] if kind == I else values)]
        return sum(
            float((out[n] * weight).sum())
            for out, own in zip(made, weights, strict=False)
            for n, weight in zip(used, own, strict=True)
        )

    for place, one in enumerate(free):
        own = [grad[place] if grad[place] is not None else torch.zeros(one.shape) for grad in grads]
        what = chosen[one]
        if kind != I and what == I:  # its gradient is not of its dual type: what the check at the end is for
            continue
        shared = torch.randn(one.shape, dtype=torch.float64, generator=draws)
        ways = (
            [shared] * RANKS
            if what in (R, I)
            else [torch.randn(one.shape, dtype=torch.float64, generator=draws) for _ in range(RANKS)]
        )
        if one.definite:  # stay where the function is defined
            ways = [way.tril() if one.lower else way + way.T for way in ways]
        slope = _slope(objective, ranks, one, ways)
        predicted = (
            float((own[0] * ways[0]).sum())
            if what == I
            else sum(float((g * way).sum()) for g, way in zip(own, ways, strict=True))
        )
        if abs(slope - predicted) > 1e-5 * max(1.0, abs(slope)):
            raise RefutedError(
                f"{where}: the gradient of a {what} operand makes {predicted}, differences {slope}"
            )
        dual_same = (what == P and kind == P) or what == I
        if dual_same and any(not torch.allclose(own[0], g, rtol=1e-12, atol=1e-12) for g in own[1:]):
            raise RefutedError(f"{where}: the gradient of a {what} operand is not the same on every rank")
    return 1


def _slope(
    objective: Callable[[Sequence[Values]], float],
    ranks: Sequence[Values],
    one: Operand,
    ways: Sequence[Tensor],
) -> float:
    def moved(step: float) -> list[Values]:
        return [{**values, one: values[one] + step * way} for values, way in zip(ranks, ways, strict=True)]

    return (objective(moved(_STEP)) - objective(moved(-_STEP))) / (2 * _STEP)


def twins_of(name: str, text: str, seed: int = 0) -> list[str]:
    """The twins of an operator that did the same with a sample's operands."""
    base, _, overload = name.partition(".")
    case = Case(name, text, seed)
    if base.endswith("_") or case.rule.made == "~":
        return []
    values = {one: case.draw(one) for one in case.places}
    found = []
    for other, lists in ((f"{base}_", False), (f"_foreach_{base}", True), (f"_foreach_{base}_", True)):
        func = _like(other, overload, case, lists=lists)
        if func is None:
            continue
        try:
            made = _made(case, func, values, lists=lists)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        want = case.run(values)
        writes = other.endswith("_")
        for given, result, before in made:
            got = given if writes else result
            if got.shape != want[0].shape or got.dtype != want[0].dtype:
                continue
            if not torch.equal(got.nan_to_num(), want[0].nan_to_num()):
                raise RefutedError(f"{other} is not {name}")
            if not writes and not torch.equal(given.nan_to_num(), before.nan_to_num()):
                raise RefutedError(f"{other} writes its operand")
            found.append(other)
    return sorted(set(found))


def _like(other: str, overload: str, case: Case, *, lists: bool) -> Any:
    """The overload of a twin that takes the same arguments."""
    packet = getattr(torch.ops.aten, other, None)
    if packet is None or not case.args or not isinstance(case.args[0], Operand):
        return None
    names = packet.overloads()
    if lists:
        tensors = sum(isinstance(one, Operand) for one in case.args)
        overload = (
            "List"
            if tensors > 1 and "List" in names
            else "Scalar"
            if tensors < 2 and "Scalar" in names
            else "default"
        )
        if len(case.args) < 2:
            overload = "default"
    chosen = overload or "default"
    return getattr(packet, chosen) if chosen in names and arguments_of(getattr(packet, chosen)) else None


def _made(
    case: Case, func: Any, values: dict[Operand, Tensor], *, lists: bool
) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
    """What it was given first, what it returned, and what that was before."""

    def filled(value: Any) -> Any:
        if isinstance(value, Operand):
            return [values[value].clone(), values[value].clone()] if lists else values[value].clone()
        return [filled(one) for one in value] if isinstance(value, list) else value

    args = [filled(one) for one in case.args]
    result = func(*args, **{key: filled(one) for key, one in case.kwargs.items()})
    before = values[case.args[0]]  # type: ignore[index]
    if not lists:
        return [(args[0], result, before)]
    results = result if isinstance(result, list | tuple) else args[0]
    return [(given, made, before) for given, made in zip(args[0], results, strict=True)]

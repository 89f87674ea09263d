"""Where a wrong gradient comes from: the operator, first from the loss, at which the program's is not the true one.

The gradients that the program itself had are found by running each rank again by itself: a call that sends something
ends the graph, with what its backward was given and returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradmesh.checker.judging.context import Context
from gradmesh.checker.judging.parameters import Got, near, ratio_of, tolerance
from gradmesh.checker.replay import Rank, UnfaithfulError, results_of_operator, run_again
from gradmesh.checker.trace import MOVES, Alias, Called, Event, Op, Over, Ref, Sent, makes, refs
from gradmesh.verify.laws import as_real


@dataclass(slots=True)
class _Ran:
    """An operator that was run again, with what it took and made."""

    op: Op  # which
    at: int  # its place among the rank's operators
    # ins, outs: values, and where gradients of them are; by number, and in order
    ins: dict[int, tuple[Tensor, GradientEdge | None]]
    outs: list[tuple[Tensor, GradientEdge | None]]


@dataclass
class _Alone(Rank):
    """A rank run again by itself: what comes of a call that sends something is new."""

    ran: list[_Ran] = field(default_factory=list)  # its operators

    def _over(self, call: Called, *, unseen: bool) -> None:
        if not (call.sends or call.sends_back):
            super()._over(call, unseen=unseen)
            return
        for number in call.outs:
            x = None if number is None else self.tensors.get(number)
            if number is not None and x is not None and x.is_floating_point():
                self.tensors[number] = x.detach().requires_grad_(x.requires_grad)

    def _operate(self, event: Op) -> None:
        taken = {number: _kept(self.tensors[number]) for number in refs(event)}
        super()._operate(event)
        outs = [_kept(self.tensors[number]) for number in event.outs]
        self.ran.append(_Ran(event, len(self.ran), taken, outs))

    def write(self, call: Sent, values: Sequence[Tensor]) -> None:
        if call.call is None and any(x.requires_grad for x in values):
            raise UnfaithfulError(f"what autograd makes of {call.kind} is not known")
        super().write(call, values)


def _kept(x: Tensor) -> tuple[Tensor, GradientEdge | None]:
    return x.detach().clone(), get_gradient_edge(x) if x.requires_grad and not x.is_meta else None


@dataclass(frozen=True)
class Parting:
    """An operator at which copies part: it takes what is the same on ranks, and what it makes is not the same."""

    site: int  # of its line
    taken: int  # the number of what it takes, on the first rank
    ranks: tuple[int, ...]  # that have the copies
    # the parameters whose gradient is the true one once the ranks' parts are summed at such operators
    names: tuple[str, ...]
    used: int  # the line where the last of them that is used is used first


class _Had:
    """The gradients that the program had in a step, on each rank; raises UnfaithfulError where they are not known."""

    def __init__(self, context: Context) -> None:
        marked = [_marked(context, rank) for rank in range(len(context.tapes))]
        again = run_again([part for part, _ in marked], kind=_Alone)
        self.ranks = [rank for rank in again.ranks if isinstance(rank, _Alone)]
        self._seeds = [_seeds(rank, own) for rank, (_, own) in zip(self.ranks, marked, strict=True)]

    def at(self, rank: int, wanted: Sequence[Any]) -> Sequence[Tensor | None]:
        """The gradients of tensors of a rank, or at edges of its graph."""
        outputs, given = self._seeds[rank]
        return _products(outputs, wanted, given)

    def leaf(self, rank: int, numbers: Sequence[int]) -> Tensor:
        """A parameter of a rank, by its only number."""
        return self.ranks[rank].leaves[numbers[0]]


def _products(
    outputs: Sequence[Any], wanted: Sequence[Any], given: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Vector-Jacobian products, whose graph stays."""
    if not outputs or not wanted:
        return [None] * len(wanted)
    return torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)


def _seeds(rank: _Alone, marks: Sequence[tuple[int, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank's gradients begin with: at its losses, and at what it hands to calls."""
    begins = [(x, torch.ones_like(x) if root.weight is None else root.weight) for root, x in rank.roots]
    begins += [(x, gradient) for number, gradient in marks if (x := rank.tensors.get(number)) is not None]
    found = [(x, g) for x, g in begins if x.requires_grad and x.numel() == g.numel()]
    return [x for x, _ in found], [g.reshape(x.shape).to(x.dtype) for x, g in found]


def _marked(context: Context, rank: int) -> tuple[list[Event], list[tuple[int, Tensor]]]:
    """A rank's events with a copy of what each call that sends takes, and the gradients that it returned for these."""
    part, begin = context.events(rank), context.segment.begins[rank]
    made: dict[int, int] = {}
    for at, event in enumerate(part):
        for number in makes(event):
            made.setdefault(number, at)
    behind: dict[int, list[Event]] = {}
    marks: list[tuple[int, Tensor]] = []
    fresh = itertools.count(-1, -1)
    over = {event.call.number for event in part if isinstance(event, Over)}
    for call in context.tapes[rank].calls.values():
        first = call.begin - begin
        if not (call.sends or call.sends_back) or not 0 <= first <= len(part):
            continue
        for taken, gradient in zip(call.ins, call.returned or (), strict=False):
            if taken is not None and gradient is not None and taken in made:
                copy = next(fresh)
                clone = Op("aten.clone.default", (Ref(taken),), {}, [copy], call.site, None)
                # What a call takes may be written down within it.
                behind.setdefault(max(first, made[taken] + 1), []).append(clone)
                marks.append((copy, gradient))
        if call.number not in over:
            inside = [at for at, e in enumerate(part) if isinstance(e, (Op, Sent)) and e.call == call.number]
            ends = [made[n] for n in call.outs if n is not None and n in made]
            behind.setdefault(max([first - 1, *inside, *ends]) + 1, []).append(Over(call))
    found: list[Event] = []
    for at in range(len(part) + 1):
        found += [*behind.get(at, ()), *part[at : at + 1]]
    return found, marks


def parting(context: Context, wrong: Sequence[Got]) -> Parting | None:
    """Where copies part before the loss, and the sum over the ranks that belongs there is missing in backward.

    A parameter's gradient comes from what the ranks do alike, which gives each rank the whole of it, and from what each
    makes of its copy in its own way, which gives each rank its own part. Where these parts, summed, make it the true
    one, the sum is what is missing, behind the last operator at which the copies part.
    """
    groups: dict[tuple[int, ...], list[Got]] = {}
    for got in wrong:
        plain = not got.parts[0].param.whole and all(len(part.ids) == 1 for part in got.parts)
        if plain and len(got.parts) > 1:
            groups.setdefault(got.ranks, []).append(got)
    try:
        had = _Had(context)
        found = [_last_parting(had, ranks, own) for ranks, own in groups.items()]
    except (UnfaithfulError, RuntimeError, KeyError):  # what the program had is not known
        return None
    return next((each for each in found if each is not None), None)


def first_not_finite(context: Context) -> tuple[int, int, str] | None:
    """The first operator with a NaN, or that makes a gradient that is not finite of a finite one: rank, site, how."""
    try:
        had = _Had(context)
        for rank, own in enumerate(had.ranks):
            if any(bool(x.isnan().any()) for x in own.leaves.values()):
                return None  # an earlier step has left it there
            for ran in own.ran:
                if any(bool(x.isnan().any()) for x, _ in (*ran.ins.values(), *ran.outs)):
                    taken = any(bool(x.isnan().any()) for x, _ in ran.ins.values())
                    return rank, ran.op.site, f"{ran.op.base} {'takes' if taken else 'makes'} a NaN"
        for rank, own in enumerate(had.ranks):
            edges = [
                edge for ran in own.ran for _, edge in (*ran.outs, *ran.ins.values()) if edge is not None
            ]
            found = iter(had.at(rank, edges))
            states = [
                [
                    [(x := next(found)) is None or bool(x.isfinite().all()) for _, e in each if e is not None]
                    for each in (ran.outs, ran.ins.values())
                ]
                for ran in own.ran
            ]
            for ran, (outs, ins) in zip(reversed(own.ran), reversed(states), strict=True):
                if outs and all(outs) and not all(ins):
                    return rank, ran.op.site, f"the backward of {ran.op.base} makes a NaN or an infinity"
    except (UnfaithfulError, RuntimeError, KeyError):  # what the program had is not known
        return None
    return None


@dataclass(slots=True)
class _Edge:
    """An operator at which copies part, and what it hands back to one of its operands on each rank."""

    at: int
    op: Op
    taken: int
    ends: list[GradientEdge]
    parts: list[Tensor]


def _last_parting(had: _Had, ranks: tuple[int, ...], wrong: Sequence[Got]) -> Parting | None:
    edges = _edges(had, ranks)
    leaves = [
        [had.leaf(part.rank, part.ids) for got in wrong for part in got.parts if part.rank == r]
        for r in ranks
    ]
    whole = [had.at(rank, own) for rank, own in zip(ranks, leaves, strict=True)]
    through = [
        _products([edge.ends[at] for edge in edges], own, [edge.parts[at] for edge in edges])
        for at, own in enumerate(leaves)
    ]
    explained = [
        number
        for number, got in enumerate(wrong)
        if _is_explained(got, [own[number] for own in whole], [own[number] for own in through])
    ]
    for edge in reversed(edges):
        reached = _products([edge.ends[0]], [leaves[0][number] for number in explained], [edge.parts[0]])
        there = [wrong[n] for n, g in zip(explained, reached, strict=True) if g is not None and bool(g.any())]
        # Where a parameter itself is used in different ways, nothing lies between it and the sum.
        ran = had.ranks[ranks[0]].ran
        if there and edge.taken not in _moved(ran, there[0].parts[0].ids):
            uses = [
                next(each for each in ran if each.op.outs and got.parts[0].ids[0] in refs(each.op))
                for got in there
            ]
            used = max(uses, key=lambda each: each.at).op.site
            return Parting(edge.op.site, edge.taken, ranks, tuple(got.name for got in there), used)
    return None


def _is_explained(got: Got, had: Sequence[Tensor | None], through: Sequence[Tensor | None]) -> bool:
    """Whether optimizers were given what the program had, which is the true gradient once the parts are summed."""
    tol = tolerance(got.parts[0].param.value)
    known = [x for x in had if x is not None]
    parts = [torch.zeros_like(got.true) if x is None else as_real(x) for x in through]
    if len(known) < len(had) or not any(bool(x.any()) for x in parts):
        return False
    for part, own, through_own in zip(got.parts, map(as_real, known), parts, strict=True):
        given = part.param.grad
        if given is None or part.param.changed or given.shape != part.param.value.shape:
            return False
        if ratio_of(as_real(given), own, tol) is None:
            return False
        if near(own, got.true, tol) or not near(own - through_own + sum(parts), got.true, 10 * tol):
            return False
    return True


def _moved(operators: Sequence[_Ran], numbers: Sequence[int]) -> set[int]:
    """Tensors and what only shows their entries in another way."""
    found = set(numbers)
    for ran in operators:
        if ran.op.base in MOVES and found.intersection(refs(ran.op)):
            found.update(ran.op.outs)
    return found


def _edges(had: _Had, ranks: Sequence[int]) -> list[_Edge]:
    """The operators at which copies part, in order; none where the ranks do not run the same operators."""
    rows = list(zip(*(had.ranks[rank].ran for rank in ranks), strict=False))
    if any(len({ran.op.name for ran in row}) > 1 for row in rows):
        return []
    parting = [(at, row) for at, row in enumerate(rows) if _parts_copies(row)]
    ends = [
        [edge for _, row in parting for _, edge in row[r].outs if edge is not None] for r in range(len(ranks))
    ]
    given = [iter(had.at(rank, own)) for rank, own in zip(ranks, ends, strict=True)]
    found = []
    for at, row in parting:
        back = [
            [next(g) for _, edge in ran.outs if edge is not None] for ran, g in zip(row, given, strict=True)
        ]
        for place in _copied(row):
            numbers = [refs(ran.op)[place] for ran in row]
            parts = [_back(ran, n, own) for ran, n, own in zip(row, numbers, back, strict=True)]
            edges = [ran.ins[n][1] for ran, n in zip(row, numbers, strict=True)]
            there = [x for x in parts if x is not None]
            known = [edge for edge in edges if edge is not None]
            if len(there) == len(known) == len(row):
                found.append(_Edge(at, row[0].op, numbers[0], known, there))
    return found


def _copied(row: Sequence[_Ran]) -> list[int]:
    """Which operands are followed by autograd, and the same on the ranks."""
    found, seen = [], set[int]()
    for place, number in enumerate(refs(row[0].op)):
        own = [ran.ins[refs(ran.op)[place]] for ran in row]
        if number not in seen and all(edge is not None and near(x, own[0][0], 1e-6) for x, edge in own):
            found.append(place)
        seen.add(number)
    return found


def _parts_copies(row: Sequence[_Ran]) -> bool:
    if len({len(ran.outs) for ran in row}) > 1 or not _copied(row):
        return False
    return any(
        not near(x, row[0].outs[at][0], 1e-6)
        for ran in row[1:]
        for at, (x, edge) in enumerate(ran.outs)
        if edge
    )


def _back(ran: _Ran, number: int, given: Sequence[Tensor | None]) -> Tensor | None:
    """What an operator makes, of the gradients of what it made, for one of its operands."""
    taken = {n: x.clone() for n, (x, _) in ran.ins.items()}
    x = taken[number].requires_grad_()
    with torch.enable_grad():
        made = results_of_operator(ran.op, {**taken, number: x.clone()})
    pairs = [
        (y, g) for y, g in zip((y for y in made if y.requires_grad), given, strict=False) if g is not None
    ]
    return _products([y for y, _ in pairs], [x], [g for _, g in pairs])[0]


def reaches(
    context: Context, xs: Sequence[Tensor], gradients: Sequence[Tensor], beside: Sequence[Tensor]
) -> bool:
    """Whether gradients of tensors change that of any parameter, beside other gradients of them."""
    leaves = [leaf for rank in context.again.ranks for leaf in rank.leaves.values()]
    changes, whole = _products(xs, leaves, gradients), _products(xs, leaves, beside)
    most = max((float(g.abs().max()) for g in whole if g is not None and g.numel()), default=0.0)
    return any(g is not None and g.numel() and float(g.abs().max()) > 1e-5 * most for g in changes)


@dataclass(frozen=True)
class Revived:
    """An operator that gives a gradient to entries which a rank has cut off from all parameters, by a mask say."""

    rank: int  # which
    site: int  # of the operator's line
    name: str  # of the operator


def revived(
    context: Context, calls: Mapping[int, Called], xs: Sequence[Tensor], right: Sequence[Tensor]
) -> Revived | None:
    """What makes a sum over the ranks in backward wrong: entries that are cut off on a rank, and get a gradient there.

    The calls of the ranks are to a Function whose backward is that sum; of one tensor, as its result is. `xs` are its
    operands, with their true gradients.
    """
    met = [call.received[0] if call.received and len(call.received) == 1 else None for call in calls.values()]
    given = [x for x in met if x is not None]
    if len(given) < len(xs) or len(xs) < len(calls) or any(g.shape != xs[0].shape for g in given):
        return None
    try:
        # So far that all that depends on the parameters moves too, and no choice becomes another one.
        moved = run_again(context.segment.parts, shaken=256.0).ranks
    except (UnfaithfulError, RuntimeError):
        return None
    alive = [_alive(context, moved[rank], rank, call) for rank, call in calls.items()]
    total = torch.stack([g * of for g, of in zip(given, alive, strict=True)]).sum(0)
    if reaches(context, xs, [total - x for x in right], right):
        return None
    cut = [float((g * ~of).abs().max()) for g, of in zip(given, alive, strict=True)]
    rank, call = list(calls.items())[cut.index(max(cut))]
    op = _user(context, rank, [n for n in call.outs if n is not None])
    return None if op is None or max(cut) == 0 else Revived(rank, op.site, op.base)


def _alive(context: Context, moved: Rank, rank: int, call: Called) -> Tensor:
    """Which entries of a call's operand depend on parameters: those that move with them."""
    number = next(n for n in call.ins if n is not None and n in moved.tensors)
    return context.again.ranks[rank].tensors[number].detach() != moved.tensors[number].detach()


def _user(context: Context, rank: int, numbers: Sequence[int]) -> Op | None:
    """The first operator on tensors, or on what shows or moves their entries, that does more than that."""
    made = set(numbers)
    for event in context.events(rank):
        if isinstance(event, Alias) and event.of in made:
            made.add(event.id)
        elif isinstance(event, Op) and made.intersection(refs(event)):
            if event.base not in _PLACES:
                return event
            made.update(event.outs)
    return None


_PLACES = MOVES | {"index", "index_select", "gather"}

"""One operator of torch, followed: the kinds of its results come of those of its operands, by the rule of the table."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradmesh._torch import arguments_of, dispatched_name, in_backward
from gradmesh._util.call_sites import Site, call_site, show_site
from gradmesh._util.structure import tensors_in
from gradmesh.type_inference import rules
from gradmesh.type_inference.rules import (
    SAMES,
    UNKNOWN,
    ZERO,
    I,
    Kind,
    Operands,
    P,
    R,
    Rule,
    S,
    V,
    flavor,
    outcome,
    rule_of,
    shown,
)
from gradmesh.type_inference.tracker import (
    Condition,
    Finding,
    Mark,
    Node,
    Patch,
    Tracker,
    began_at,
    memory_of,
    said,
    same_summed,
    token,
    types_of,
)

_ITEM = "_local_scalar_dense"
"""What .item() is, and float(), int(), bool() and formatting by it."""


@dataclass(frozen=True)
class _Plan:
    """What is known of an operator before it is called."""

    name: str
    rule: Rule | None  # its rule; None: there is none
    names: tuple[str, ...]  # its arguments
    written: tuple[int, ...]  # the places of those that it writes
    each: bool  # whether it does the same to each tensor of lists


@functools.cache
def _plan(func: Any) -> _Plan:
    space, name = dispatched_name(func)
    parameters = arguments_of(func)
    written = tuple(place for place, (_, writes) in enumerate(parameters) if writes)
    overload = str(func).rpartition(".")[2]
    text = rule_of(name, overload) if space == "aten" else None
    if text is not None and overload.endswith("out"):
        text += "".join(f" -{place}" for place in written)
    each = name.startswith(("_foreach", "_fused"))
    return _Plan(
        name if space == "aten" else f"{space}::{name}",
        None if text is None else rules.rule(text),
        tuple(name for name, _ in parameters),
        written,
        each,
    )


def follow(tracker: Tracker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator, and note what its results are."""
    plan = _plan(func)
    given = dict(enumerate(args))
    given.update({plan.names.index(name): value for name, value in kwargs.items() if name in plan.names})
    if plan.each:
        return _on_each(tracker, plan, given, lambda: func(*args, **kwargs))
    call = _Call(tracker, plan, given)
    if plan.name == "ones_like" and call.nodes and _begins_backward():
        _begin(tracker, call.nodes[0][0])
    result = func(*args, **kwargs)
    written = [*_written(plan, given)]
    call.note([*tensors_in(result)], written, Counter(map(memory_of, written)))
    return result


def read(tracker: Tracker, x: Tensor, how: str) -> None:
    """Note that numbers are made of a tensor without an operator."""
    plan = _Plan(f"Tensor.{how}", rules.rule("!0"), ("self",), (), False)
    _Call(tracker, plan, {0: x}).note((), (), {})


def _written(plan: _Plan, given: Mapping[int, Any]) -> Iterator[Tensor]:
    for place in plan.written:
        yield from tensors_in(given.get(place))


def _on_each(tracker: Tracker, plan: _Plan, given: Mapping[int, Any], run: Callable[[], Any]) -> Any:
    """An operator on lists: the same to the first of each, to the second, and so on."""
    lists = [value for value in given.values() if isinstance(value, list | tuple)]
    length = max((len(one) for one in lists), default=0)
    calls = [
        _Call(
            tracker,
            plan,
            {
                place: value[i] if isinstance(value, list | tuple) and len(value) == length else value
                for place, value in given.items()
                if not (isinstance(value, list | tuple) and not value)
            },
        )
        for i in range(length)
    ]
    result = run()
    results = result if isinstance(result, list | tuple) else [None] * length
    written = [[*_written(plan, call.given)] for call in calls]
    times = Counter(memory_of(one) for each in written for one in each)
    for i, call in enumerate(calls):
        call.note([*tensors_in(results[i])], written[i], times)
    return result


class _Call:
    """One call: the values of its operands, taken before it writes any of them.

    Writes to parts of an operand are kept separately where the result is a view, which may show none of them.
    """

    def __init__(self, tracker: Tracker, plan: _Plan, given: Mapping[int, Any]) -> None:
        self.tracker, self.plan, self.given = tracker, plan, given
        self.site: Site = call_site()
        unread = plan.rule.unread if plan.rule is not None else frozenset()
        self.nodes: dict[int, list[Node]] = {}
        self._fractions: list[bool] = []
        self._bases: dict[int, Tensor] = {}
        self._patched: list[tuple[int, int, Tensor, tuple[Patch, ...]]] = []
        statics: list[object] = []
        for place, value in sorted(given.items()):
            if place in unread:
                continue
            found = [*tensors_in(value)]
            if found:
                values = [tracker.looked_up(one) for one in found]
                self.nodes[place] = [node for node, _ in values]
                self._patched += [
                    (place, n, one, patches)
                    for n, (one, (_, patches)) in enumerate(zip(found, values, strict=True))
                    if patches
                ]
                self._bases.update((memory_of(one), one) for one in found)
                self._fractions += [one.is_floating_point() or one.is_complex() for one in found]
            else:
                statics.append((place, said(value)))
        self._base = token(plan.name, statics)
        if plan.written:
            self._patch(())
        self._once = self._counting_once()

    def _patch(self, views: Collection[int]) -> None:
        """Have the operands the values that they show, but those whose memory a view is made of."""
        for place, n, x, patches in self._patched:
            if memory_of(x) not in views:
                self.nodes[place][n] = self.tracker.patched(x, self.nodes[place][n], patches)
        self._patched = [one for one in self._patched if memory_of(one[2]) in views]

    def note(self, results: Sequence[Tensor], written: Sequence[Tensor], times: Mapping[int, int]) -> None:
        """Give the results, and what was written, their values; `times`: how often each memory was written."""
        tracker, plan = self.tracker, self.plan
        self._patch({memory_of(one) for one in results} if self._patched else ())
        every = [*results, *(one for one in written if all(one is not other for other in results))]
        inputs = tuple(node for nodes in self.nodes.values() for node in nodes)
        whole = any(one.is_floating_point() or one.is_complex() for one in every)
        reads = not every and plan.rule is not None and bool(plan.rule.nonlinear)
        found = [self._kind(at, whole) for at in range(len(tracker.axes))] if every or reads else []
        for order, one in enumerate(every):
            wrote = times[memory_of(one)] if any(one is other for other in written) else 0
            if plan.rule is not None and plan.rule.made == "~":
                tracker.observed(one, [kind for kind, _ in found], times=wrote)
                continue
            leaf = one.is_leaf and one.requires_grad
            marks = tuple(
                Mark(
                    I if leaf and kind in SAMES else kind,
                    self._number(at, order, one) if kind in SAMES or kind == P else 0,
                )
                for at, (kind, _) in enumerate(found)
            )
            # A parameter after a step would else lead back through all steps.
            back = () if leaf else inputs
            node = Node(plan.name, self.site, back, marks, leaf, shape=tuple(one.shape))
            base = None if wrote else self._bases.get(memory_of(one))
            patches = next((p for _, _, x, p in self._patched if memory_of(x) == memory_of(one)), ())
            tracker.keep(one, node, base=base, times=wrote, patches=patches)

    def _operands(self, at: int) -> Operands:
        kinds: dict[int, list[Kind]] = {
            place: [node.marks[at].kind for node in nodes] for place, nodes in self.nodes.items()
        }
        rule = self.plan.rule
        for place, value in self.given.items():
            if place not in kinds and isinstance(value, int | float | complex) and rule is not None:
                kinds[place] = [S if value else ZERO]
        if self.plan.name.endswith(("lerp", "lerp_")):  # one end alone is the result
            if kinds.get(2) == [ZERO]:
                kinds[1] = [ZERO]
            elif isinstance(weight := self.given.get(2), int | float) and weight == 1:
                kinds[0] = [ZERO]
        return kinds

    def _counting_once(self) -> frozenset[int]:
        """The operands that may be added to a pending sum if every rank has them: e.g. zeros, or -inf."""
        rule, axes = self.plan.rule, range(len(self.tracker.axes))
        if rule is None or all(outcome(rule, self._operands(at))[1] != rules.COUNTS for at in axes):
            return frozenset()
        with self.tracker.paused():
            return frozenset(place for place, value in self.given.items() if same_summed(value))

    def _kind(self, at: int, whole: bool) -> tuple[Kind, str]:
        """The kind over one axis, and what is wrong; what is not `whole` is rounded to integers: not linear."""
        rule = self.plan.rule
        if rule is None:
            self.tracker.note(f"there is no rule for {self.plan.name}: what it returns has no known type")
            return UNKNOWN, ""
        operands = self._operands(at)
        kind, problem = outcome(rule, operands)
        if problem == rules.COUNTS:
            zeros = {
                n: [ZERO] for n, kinds in operands.items() if n in self._once and SAMES.issuperset(kinds)
            }
            kind, problem = (P, "") if outcome(rule, {**operands, **zeros}) == (P, "") else (kind, problem)
        if problem == rules.NONLINEAR and (self.plan.name == _ITEM or self.plan.name.startswith("Tensor.")):
            problem = rules.READ
        if rule.made == "~":
            met = {kind for kinds in operands.values() for kind in kinds}
            kind = UNKNOWN if UNKNOWN in met else V if met & {V, P} else flavor(met)
        if kind == P and not whole and any(self._fractions):
            kind, problem = V, rules.NONLINEAR
        if (
            problem and in_backward()
        ):  # where all is linear, and a term that every rank has is meant once for each
            return kind, ""
        if problem == rules.UNSAID:
            self.tracker.note(
                f"the rule for {self.plan.name} says nothing of a pending sum among these operands"
            )
        elif problem:
            self._expect(at, problem)
        elif kind in (P, ZERO) and (partners := self._partners(at)):
            self._expect(at, rules.VARYING, partners)
        return kind, problem

    def _partners(self, at: int) -> tuple[int, ...]:
        """The numbers of what pending sums are multiplied with, which has to be the same on every rank."""
        rule, found = self.plan.rule, []
        for term in () if rule is None else rule.terms:
            nodes = [node for place, _ in term for node in self.nodes.get(place, ())]
            if len(term) > 1 and any(node.marks[at].kind == P for node in nodes):
                found += [node.marks[at].number for node in nodes if node.marks[at].kind in SAMES]
        return tuple(number for number in found if number)

    def _tokens(self, at: int) -> list[object]:
        return [
            (place, [node.marks[at].number or node.marks[at].kind for node in nodes])
            for place, nodes in sorted(self.nodes.items())
        ]

    def _number(self, at: int, order: int, result: Tensor) -> int:
        rule = self.plan.rule
        if rule is not None and rule.made:
            return token(self._base, order, tuple(result.shape), str(result.dtype))
        return token(self._base, order, self._tokens(at))

    def _expect(self, at: int, problem: str, absent: tuple[int, ...] = ()) -> None:
        marks = [(node, node.marks[at]) for nodes in self.nodes.values() for node in nodes]
        named = (P, R, I, S) if problem == rules.COUNTS else (P,)
        present = tuple(mark.number for _, mark in marks if mark.kind in named)
        number = token("finding", problem, self._base, self._tokens(at))
        types = types_of([(mark.kind, node.shape) for node, mark in marks])
        pending = next(node for node, mark in marks if mark.kind == P)
        began = (
            f"the pending sum {began_at(pending.op or 'a tensor from outside', pending.site)}"
            if pending.site != self.site
            else ""
        )
        axis = self.tracker.axes[at].name
        name = "Tensor.item" if self.plan.name == _ITEM else self.plan.name
        name = name if name.startswith("Tensor.") else f"aten.{name}"
        finding = Finding.at(problem, name, axis, types, self.site, began)
        self.tracker.expect(Condition(lambda: finding, at, present, number, absent))


def _begins_backward() -> bool:
    """Whether autograd creates the gradient that a backward pass starts with."""
    frame: Any = sys._getframe(3)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_filename == torch.autograd.__file__:
            return True
        frame = frame.f_back
    return False


def _begin(tracker: Tracker, root: Node) -> None:
    """A backward pass starts here: of a loss that is made of R values every rank's copy counts."""
    tracker.roots.append(root)
    for at, mark in enumerate(root.marks):
        if mark.kind != R:
            continue
        axis, site = tracker.axes[at].name, call_site()
        last = root.replicated(at)
        if last is None:  # R by numbers alone that have no gradient, such as counts
            continue
        began = f"R since {last.op} {show_site(last.site)}"
        finding = Finding.at(
            "sum-too-many",
            f"backward from {root.op}",
            axis,
            f"{shown(mark.kind)}{list(root.shape)}",
            site,
            began,
        )
        tracker.expect(
            Condition(
                lambda finding=finding: finding,  # type: ignore[misc]
                at,
                (mark.number,),
                token("root", mark.number),
                averaged=True,
            )
        )

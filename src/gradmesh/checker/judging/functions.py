"""Which call turns a right gradient into a wrong one: a Function, or a collective that autograd cannot see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradmesh.checker.findings import Finding
from gradmesh.checker.judging.context import Context, finding, listed
from gradmesh.checker.judging.origins import reaches, revived
from gradmesh.checker.judging.parameters import Got, behind, copies_of, near, ratio_of, tolerance
from gradmesh.checker.trace import Called, Op, Saved, Sent, refs
from gradmesh.verify.laws import as_real


def upstream(context: Context, tensors: Sequence[Tensor], wrong: Sequence[Got]) -> list[str]:
    """The names of the wrong parameters that tensors of a rank are made of."""
    tensors = [x for x in tensors if x.requires_grad]
    if not tensors:
        return []
    leaves = [
        (got.name, context.again.ranks[r].leaves[number])
        for got in wrong
        for part in got.parts
        for r, number in ((part.rank, number) for number in part.ids)
        if number in context.again.ranks[r].leaves
    ]
    if not leaves:
        return []
    ones = [torch.ones_like(x) for x in tensors]
    found = torch.autograd.grad(
        tensors, [leaf for _, leaf in leaves], ones, retain_graph=True, allow_unused=True
    )
    return sorted({name for (name, _), gradient in zip(leaves, found, strict=True) if gradient is not None})


def added_before_sums(context: Context, wrong: Sequence[Got]) -> list[Finding]:
    """GM108: What is the same on ranks and is added to what is then summed over them."""
    for group in context.again.groups:
        calls = list(group.items())
        if calls[0][1].kind not in ("all_reduce", "reduce_scatter", "reduce") or not calls[0][1].followed:
            continue
        if calls[0][1].reduce not in ("sum", ""):
            continue
        terms = [_added(context, rank, call) for rank, call in calls]
        for at in range(min(map(len, terms))):
            (rank, call), (number, site) = calls[0], terms[0][at]
            values = [context.tensor(r, each[at][0]) for (r, _), each in zip(calls, terms, strict=True)]
            there = [x.detach() for x in values if x is not None]
            if len(there) < len(calls) or not all(near(x, there[0], 1e-6) for x in there):
                continue
            if _is_share(context, rank, number, len(calls)):
                continue
            leaf = number in context.again.ranks[rank].leaves
            if not leaf and not bool(there[0].any()):
                continue
            x = context.tensor(rank, number)
            names = upstream(context, [x], wrong) if x is not None else []
            # A verb's operand is what it is said to be: only a gradient that is wrong tells against it.
            plain = call.verb is None and x is not None and x.numel() > 1
            if not names and x is not None and plain and not _is_mean(context, rank, call):
                names = upstream(context, [x], context.got)
            if names:
                said = (
                    f"{names[0] if leaf else 'a tensor'} that is the same on {len(calls)} ranks is added before the "
                    f"sum over them, so that it counts {len(calls)} times; so does what backward gives {listed(names)}"
                )
                began = context.place(rank, call.site)
                return [finding("GM108", said, context.place(rank, site), began, list(group), names[0])]
    return []


def _is_mean(context: Context, rank: int, call: Sent) -> bool:
    """Whether the sum is divided by the number of ranks."""
    made = set(call.outs)
    for event in context.events(rank):
        if isinstance(event, Op) and made.intersection(refs(event)):
            if _divides(event, len(call.group)):
                return True
            if event.base in _MOVING:
                made.update(event.outs)
    return False


def _is_share(context: Context, rank: int, number: int, ranks: int) -> bool:
    """Whether a tensor is what was divided by the number of ranks."""
    made = {out: e for e in context.events(rank) if isinstance(e, Op) for out in e.outs}
    for _ in range(6):
        op = made.get(number)
        if op is None or not refs(op):
            return False
        if _divides(op, ranks):
            return True
        if op.base not in _MOVING:
            return False
        number = refs(op)[0]
    return False


def _divides(op: Op, ranks: int) -> bool:
    name, other = op.base, op.args[1] if len(op.args) > 1 else None
    if name not in ("div", "div_", "mul", "mul_") or not isinstance(other, (int, float)):
        return False
    return abs(other - (ranks if "div" in name else 1 / ranks)) < 1e-9


def _added(context: Context, rank: int, call: Sent) -> list[tuple[int, int]]:
    """The tensors that are added on the way to what a collective takes, with the lines; the nearest first."""
    made = {out: e for e in context.events(rank) if isinstance(e, Op) for out in e.outs}
    found: list[tuple[int, int]] = []
    level = list(call.ins)
    for _ in range(8):
        nearer = []
        for number in level:
            op = made.get(number)
            name = op.base if op else ""
            taken = refs(op) if op else []
            if op is not None and name in _ADDING:
                terms = taken[:1] if name in ("addmm", "baddbmm") else taken
                found += [(term, op.site) for term in terms]
                nearer += terms
            elif name in _MOVING:
                nearer += taken[:1]
        level = nearer
    return found


_ADDING = {"addmm", "baddbmm", "add", "add_"}
_MOVING = {
    "view",
    "_unsafe_view",
    "clone",
    "detach",
    "alias",
    "reshape",
    "transpose",
    "t",
    "permute",
    "expand",
    "cat",
    "split",
    "split_with_sizes",
    "slice",
}


_OF_VERBS = (
    "Say what the result is: dst=gm.R where each rank goes on with it in its own way, dst=gm.I where all ranks do the "
    "same with it, up to one loss that they share."
)
"""The remedy where a verb's result is of another type than what the program does with it."""


_OF_ENTRIES = (
    "Mask the result of that operator at these entries, or what it multiplies, so that no gradient comes from there; "
    "zeros in its operand alone do not stop it."
)


@dataclass
class _Form:
    """How gradients on the ranks are to the true ones: each its own part, or each the whole."""

    parts: float | None  # the ratio to the ranks' own true gradients; None where they are not proportional
    whole: float | None  # the ratio to their sum


def faults_of_calls(context: Context, wrong: Sequence[Got]) -> list[Finding]:
    """What goes wrong at calls between the loss and the parameters whose gradient is wrong."""
    found = [*overwritten(context), *_hidden(context, wrong), *_functions(context, wrong)]
    return found or added_before_sums(context, wrong)


def overwritten(context: Context) -> list[Finding]:
    """GM107: Collectives that write where autograd has saved something."""
    found: dict[int, Finding] = {}
    for rank in range(len(context.tapes)):
        for event in context.events(rank):
            if isinstance(event, Saved):
                place = context.place(rank, event.site)
                said = (
                    f"{event.kind} writes into a tensor that autograd has saved for backward, "
                    "which then uses what was received"
                )
                found.setdefault(event.site, finding("GM107", said, place, None, range(len(context.tapes))))
    return list(found.values())


def _hidden(context: Context, wrong: Sequence[Got]) -> list[Finding]:
    found: dict[int, Finding] = {}
    for group in context.again.groups:
        for rank, call in group.items():
            if not call.hidden or call.site in found:
                continue
            outs = [x for n in call.outs if (x := context.tensor(rank, n)) is not None and x.requires_grad]
            if not outs or all(g is None or not g.any() for g in context.truth.at(outs)):
                continue  # the loss does not depend on it
            names = upstream(context, outs, wrong)
            if names:
                said = (
                    f"{call.kind} is called on a tensor that autograd follows, and autograd does not know of it: "
                    f"the gradient of {listed(names)} lacks what goes through the other ranks"
                )
                found[call.site] = finding(
                    "GM106", said, context.place(rank, call.site), None, list(group), names[0]
                )
    for source, sent, rank, call in context.again.messages:
        if (
            not sent.hidden
            or sent.site in found
            or any(r.passed_on for r, _ in context.again.ranks[source].roots)
        ):
            continue  # gradients of a pipeline go back by messages of their own
        outs = [x for n in call.outs if (x := context.tensor(rank, n)) is not None and x.requires_grad]
        names = upstream(context, outs, wrong)
        if names and any(g is not None and bool(g.any()) for g in context.truth.at(outs)):
            said = (
                "a tensor that autograd follows is sent to another rank, and autograd does not know of it: "
                f"no gradient comes back to {listed(names)}"
            )
            at, began = context.place(source, sent.site), context.place(rank, call.site)
            found[sent.site] = finding("GM106", said, at, began, [source, rank], names[0])
    return list(found.values())


def rounding(context: Context, wrong: Sequence[Got]) -> dict[str, list[str]]:
    """Functions that send what they have rounded, with the wrong parameters that they are made of.

    The derivative of that is zero, or there is none: their backward is something else on purpose.
    """
    found: dict[str, list[str]] = {}
    for calls in _matched(context):
        for rank, call in calls.items():
            if call.sends and not call.ours:
                events = context.events(rank)
                inside = [e for e in events if isinstance(e, (Op, Sent)) and e.call == call.number]
                rounded = behind(
                    events, (n for e in inside if isinstance(e, Op) and _rounds(e) for n in e.outs)
                )
                # Integers are not followed: a message of them has no known operand.
                if rounded and any(
                    isinstance(e, Sent) and not (e.ins and rounded.isdisjoint(e.ins)) for e in inside
                ):
                    found.setdefault(call.name, []).extend(
                        upstream(context, _ins(context, rank, call), wrong)
                    )
    return found


def _rounds(op: Op) -> bool:
    to = op.kwargs.get("dtype") if op.name == "aten._to_copy.default" else None
    floating = isinstance(to, torch.dtype) and to.is_floating_point
    few = to is not None and to is not torch.bool and not to.is_complex and (to.itemsize == 1 or not floating)
    return few or op.base.rstrip("_") in ("round", "trunc", "floor", "ceil", "sign")


def _matched(context: Context) -> list[dict[int, Called]]:
    """The same call on all ranks that make it: by class and line, in order."""
    table: dict[tuple[str, str, int], dict[int, Called]] = {}
    for rank, tape in enumerate(context.tapes):
        begin = context.segment.begins[rank]
        end = begin + len(context.events(rank)) + 8
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for call in tape.calls.values():
            if call.returned is None or call.received is None or not begin <= call.begin <= end:
                continue
            key = call.name, str(context.place(rank, call.site))
            table.setdefault((*key, counts[key]), {})[rank] = call
            counts[key] += 1
    return list(table.values())


def _functions(context: Context, wrong: Sequence[Got], *, of_invariants: bool = False) -> list[Finding]:
    found: dict[tuple[str, int], Finding] = {}
    # The sum over the copies would make these right, but for a factor.
    unsummed = {
        got.name
        for got in wrong
        if got.kind == "apart"
        and ratio_of(torch.stack(got.got).sum(0), got.true, tolerance(got.parts[0].param.value)) is not None
    }
    right = [got for got in context.got if got.kind == "right" and got not in wrong]
    for calls in _matched(context):
        if of_invariants and not all(call.invariant for call in calls.values()):
            continue
        arrived, left = _arrived(context, calls), _left(context, calls)
        if arrived is None or left is None or not _is_right(arrived) or _is_right(left):
            continue  # a fault is where what arrives is right, in some form, and what leaves is not
        if _averages(context, calls, left) or not _matters(context, calls, arrived):
            continue
        rank, call = next(iter(calls.items()))
        ins = _ins(context, rank, call)
        names = sorted(
            {name for r, c in calls.items() for name in upstream(context, _ins(context, r, c), wrong)}
        )
        if not names or not ins:
            continue
        factor = left.parts if left.parts is not None else left.whole
        if factor is not None and any(
            upstream(context, _ins(context, r, c), right) for r, c in calls.items()
        ):
            continue  # a factor that is taken back, as by an average: gradients that come through it are right
        if left.parts is not None and left.parts < 1 and unsummed.issuperset(names):
            continue  # it divides, as for a mean; what is missing is a sum behind it, over the copies of the shards
        if (call.name, call.site) in found:
            continue
        law = _law(context, calls)
        place = context.place(rank, call.site)
        inside = next(
            (
                context.place(rank, e.site)
                for e in context.events(rank)
                if isinstance(e, Sent) and e.call == call.number
            ),
            None,
        )
        said = _said(call, law, arrived, names)
        rule = "GM105" if law else "GM104"
        if call.ours:  # it does what it says; the program wants another
            rule = "GM102" if factor is not None and factor > 1 else "GM103"
        remedy = _OF_VERBS if call.name.startswith("gm.") else ""
        made = finding(rule, said, place, inside, list(calls), call.name, remedy)
        back = _returned(context, calls, of_met=_is_one(arrived.parts)) if rule == "GM104" else None
        entries = back and revived(context, calls, back.xs, back.right)
        if entries:
            said = (
                f"{entries.name} passes a gradient to entries of its operand that rank {entries.rank} has cut off in "
                f"forward, by a mask say, and the backward of {call.name} adds them to those of other ranks: the "
                f"gradient of {listed(names)} is wrong from there"
            )
            at = context.place(entries.rank, entries.site)
            made = finding(rule, said, at, None, list(calls), call.name, _OF_ENTRIES)
            made = replace(made, received=place)
        found[call.name, call.site] = made
    return list(found.values())


def used_apart(context: Context) -> list[Finding]:
    """GM103: Results of type I of which each rank has another gradient, so that parameters get less than the others.

    Of any other call, a part of a gradient that no number of ranks explains may be meant. Here it is said not to be.
    """
    less = [
        got
        for got in context.got
        if got.kind == "right" and not _is_one(got.ratio / (context.expected or 1.0))
    ]
    return _functions(context, less, of_invariants=True) if less else []


def _said(call: Called, law: str, arrived: _Form, names: Sequence[str]) -> str:
    got = (
        "each rank has its own part of the gradient"
        if arrived.parts is not None
        else "each rank has the whole gradient"
    )
    if arrived.parts is not None and arrived.whole is not None:
        got = "the gradient arrives"
    end = f"the gradient of {listed(names)} is wrong from here"
    if law:
        return f"{call.name}: backward is right where {law}; here {got}, so {end}"
    return f"{call.name}: backward is not the adjoint of forward under any convention; {end}"


def _ins(context: Context, rank: int, call: Called) -> list[Tensor]:
    own = context.again.ranks[rank]
    return [x for n in call.ins if n is not None and (x := own.operand(call, n)) is not None]


def _averages(context: Context, calls: dict[int, Called], left: _Form) -> bool:
    """Whether it gathers parameters, and hands their gradients back as the mean over the ranks: all of them alike."""
    ranks = _ranks_of(context, calls)
    for rank, call in calls.items():
        if not call.sends_back or not any(n in context.again.ranks[rank].leaves for n in call.ins):
            return False
    return left.parts is not None and abs(left.parts * ranks - 1) < 0.02


def _is_right(form: _Form) -> bool:
    """Whether each rank has its own part of the true gradient, or the whole of it."""
    return _is_one(form.parts) or _is_one(form.whole)


def _is_one(ratio: float | None) -> bool:
    return ratio is not None and abs(ratio - 1) < 0.02


def _form(given: list[Tensor], true: list[Tensor], copies: Sequence[Sequence[int]]) -> _Form:
    """How gradients are to the true ones, on ranks of which some have copies of the tensor."""
    tol = max(tolerance(x) for x in given)
    given, true = [as_real(x) for x in given], [as_real(x) for x in true]
    one = torch.cat([x.flatten() for x in given])
    parts = ratio_of(one, torch.cat([x.flatten() for x in true]), tol)
    whole = None
    if any(len(group) > 1 for group in copies):
        whole = ratio_of(one, torch.cat([x.flatten() for x in _totals(true, copies)]), tol)
    return _Form(parts, whole)


def _totals(parts: Sequence[Tensor], copies: Sequence[Sequence[int]]) -> list[Tensor]:
    """For each part the sum over the ranks that have copies."""
    found = list(parts)
    for group in copies:
        for at in group:
            found[at] = torch.stack([parts[other] for other in group]).sum(0)
    return found


def _pairs(
    context: Context, calls: dict[int, Called], numbers: str, gradients: str
) -> list[tuple[int, list[tuple[Tensor, Tensor]]]] | None:
    """For each rank the tensors of a call with the gradients that the program had for them."""
    found = []
    for rank, call in calls.items():
        pairs, own = [], context.again.ranks[rank]
        for number, gradient in zip(getattr(call, numbers), getattr(call, gradients), strict=False):
            if number is None:
                continue
            x = own.operand(call, number) if numbers == "ins" else own.tensors.get(number)
            if x is None or not x.requires_grad or gradient is None:
                continue
            if x.shape != gradient.shape:
                return None
            pairs.append((x, gradient))
        found.append((rank, pairs))
    return found if all(pairs for _, pairs in found) else None


def _arrived(context: Context, calls: dict[int, Called]) -> _Form | None:
    pairs = _pairs(context, calls, "outs", "received")
    if pairs is None:
        return None
    return _compared(calls, pairs, context.truth.at([y for _, each in pairs for y, _ in each]))


def _left(context: Context, calls: dict[int, Called]) -> _Form | None:
    back = _returned(context, calls)
    return None if back is None else _compared(calls, back.pairs, back.right)


@dataclass
class _Back:
    """What the backward of a call returned, for each rank, and what it had to return."""

    pairs: list[tuple[int, list[tuple[Tensor, Tensor]]]]
    right: list[Tensor]

    @property
    def xs(self) -> list[Tensor]:
        return [x for _, each in self.pairs for x, _ in each]


def _returned(context: Context, calls: dict[int, Called], *, of_met: bool = False) -> _Back | None:
    """What a call returned, with what belongs to the true gradients, or to those that it met."""
    pairs, outs = _pairs(context, calls, "ins", "returned"), _pairs(context, calls, "outs", "received")
    if pairs is None or outs is None:
        return None
    xs = [x for _, each in pairs for x, _ in each]
    ys = [y for _, each in outs for y, _ in each]
    met = [g for _, each in outs for _, g in each]
    # An operand may have other uses, whose gradient does not come from here.
    there = [torch.zeros_like(y) if g is None else g for y, g in zip(ys, context.truth.at(ys), strict=True)]
    found = torch.autograd.grad(ys, xs, met if of_met else there, retain_graph=True, allow_unused=True)
    return _Back(pairs, [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)])


def _matters(context: Context, calls: dict[int, Called], arrived: _Form) -> bool:
    """Whether what a backward returned too much or too little comes to any parameter: a mask may take it away."""
    # Beside what it met, where that is parts: what is wrong there already, by little, is not this call's.
    back = _returned(context, calls, of_met=_is_one(arrived.parts))
    if back is None:
        return True
    given = [gradient for _, each in back.pairs for _, gradient in each]
    return reaches(context, back.xs, [g - x for g, x in zip(given, back.right, strict=True)], back.right)


def _compared(
    calls: dict[int, Called],
    pairs: Sequence[tuple[int, list[tuple[Tensor, Tensor]]]],
    right: Sequence[Tensor | None],
) -> _Form:
    values = [x.detach() for _, each in pairs for x, _ in each]
    given = [gradient for _, each in pairs for _, gradient in each]
    true = [torch.zeros_like(x) if g is None else g for x, g in zip(values, right, strict=True)]
    # Only what is the same on the ranks can have its whole gradient on each.
    return _form(given, true, copies_of(values) if len(values) == len(calls) else [])


def _law(context: Context, calls: dict[int, Called]) -> str:
    """Under which convention the backward is the adjoint of the forward, on the gradients that it met."""
    outs, ins = _pairs(context, calls, "outs", "received"), _pairs(context, calls, "ins", "returned")
    if outs is None or ins is None:
        return ""
    ys = [y for _, pairs in outs for y, _ in pairs]
    met = [g for _, pairs in outs for _, g in pairs]
    xs = [x for _, pairs in ins for x, _ in pairs]
    gave = [g for _, pairs in ins for _, g in pairs]

    def adjoint(cotangents: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(ys, xs, cotangents, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]

    def alike(candidate: list[Tensor]) -> bool:
        tol = max(tolerance(x) for x in gave)
        one = torch.cat([as_real(x).flatten() for x in gave])
        other = torch.cat([as_real(x).flatten() for x in candidate])
        ratio = ratio_of(one, other, tol)
        return ratio is not None and abs(ratio - 1) < 0.01

    exact = adjoint(met)
    # Without a message in backward only ranks that have the same gradient can seem to have summed it.
    sums = any(call.sends_back for call in calls.values()) or not any(call.sends for call in calls.values())
    if sums and alike(exact):
        return "each rank's gradient of the result is its own part"
    if len(met) == len(calls) and len(xs) == len(calls):
        if len({x.shape for x in met}) == 1:
            ranks = _ranks_of(context, calls)
            own = [adjoint([met[at] / ranks] * len(met))[at] for at in range(len(met))]
            if alike(own):
                return "every rank has the whole gradient of the result"
        copies = copies_of([x.detach() for x in xs])
        if any(len(group) > 1 for group in copies) and alike(_totals(exact, copies)):
            return "the operand is the same on all ranks and each rank has its own part of the gradient"
    return ""


def _ranks_of(context: Context, calls: dict[int, Called]) -> int:
    """How many ranks the collective has that a Function calls in forward: there may be several groups of them."""
    rank, call = next(iter(calls.items()))
    events = context.events(rank)
    sizes = (len(e.group) for e in events if isinstance(e, Sent) and e.call == call.number)
    return next(sizes, len(calls))

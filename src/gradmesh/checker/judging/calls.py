"""Which call turns a right gradient into a wrong one: a Function, or a collective that autograd cannot see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradmesh.checker.findings import Finding
from gradmesh.checker.judging.context import Context, finding
from gradmesh.checker.judging.parameters import Got, ratio_of, tolerance
from gradmesh.checker.judging.truth import near
from gradmesh.checker.recording.tape import Called, Op, Saved, Sent, refs

__all__ = ["added_before_sums", "faults_of_calls", "overwritten"]


@dataclass
class _Form:
    """How gradients on the ranks are to the true ones: each its own part, or each the whole.

    Attributes:
        parts: the ratio to the ranks' own true gradients; None where they are not proportional.
        whole: the ratio to their sum.
    """

    parts: float | None
    whole: float | None


def faults_of_calls(context: Context, wrong: Sequence[Got]) -> list[Finding]:
    """What goes wrong at calls between the loss and the parameters whose gradient is wrong."""
    found = [*overwritten(context), *_hidden(context, wrong), *_functions(context, wrong)]
    return found or added_before_sums(context, wrong)


def overwritten(context: Context) -> list[Finding]:
    """Collectives that write where autograd has saved something."""
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


def _upstream(context: Context, tensors: Sequence[Tensor], wrong: Sequence[Got]) -> list[str]:
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


def _hidden(context: Context, wrong: Sequence[Got]) -> list[Finding]:
    found: dict[int, Finding] = {}
    for group in context.again.groups:
        for rank, call in group.items():
            if not call.hidden or call.site in found:
                continue
            outs = [x for n in call.outs if (x := context.tensor(rank, n)) is not None and x.requires_grad]
            if not outs or all(g is None or not g.abs().max() > 0 for g in context.truth.at(outs)):
                continue  # the loss does not depend on it
            names = _upstream(context, outs, wrong)
            if names:
                said = (
                    f"{call.kind} is called on a tensor that autograd follows, and autograd does not know of it: "
                    f"the gradient of {_listed(names)} lacks what goes through the other ranks"
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
        names = _upstream(context, outs, wrong)
        if names and any(g is not None and bool(g.abs().max() > 0) for g in context.truth.at(outs)):
            said = (
                "a tensor that autograd follows is sent to another rank, and autograd does not know of it: "
                f"no gradient comes back to {_listed(names)}"
            )
            at, began = context.place(source, sent.site), context.place(rank, call.site)
            found[sent.site] = finding("GM106", said, at, began, [source, rank], names[0])
    return list(found.values())


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


def _functions(context: Context, wrong: Sequence[Got]) -> list[Finding]:
    found: dict[tuple[str, int], Finding] = {}
    for calls in _matched(context):
        arrived, left = _arrived(context, calls), _left(context, calls)
        if arrived is None or left is None or not _is_fault(arrived, left):
            continue
        rank, call = next(iter(calls.items()))
        ins = [x for n in call.ins if n is not None and (x := context.tensor(rank, n)) is not None]
        names = sorted(
            {name for r, c in calls.items() for name in _upstream(context, _ins(context, r, c), wrong)}
        )
        if not names or not ins:
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
        said = _said(call, law, arrived, left, names)
        rule = "GM105" if law else "GM104"
        if call.ours:  # it does what it says; the program wants another
            ratio = left.parts if left.parts is not None else left.whole
            rule = "GM102" if ratio is not None and ratio > 1 else "GM103"
        found.setdefault((call.name, call.site), finding(rule, said, place, inside, list(calls), call.name))
    return list(found.values())


def _said(call: Called, law: str, arrived: _Form, left: _Form, names: Sequence[str]) -> str:
    got = (
        "each rank has its own part of the gradient"
        if arrived.parts is not None
        else "each rank has the whole gradient"
    )
    if arrived.parts is not None and arrived.whole is not None:
        got = "the gradient arrives"
    end = f"the gradient of {_listed(names)} is wrong from here"
    if law:
        return f"{call.name}: backward is right where {law}; here {got}, so {end}"
    del left
    return f"{call.name}: backward is not the adjoint of forward under any convention; {end}"


def _ins(context: Context, rank: int, call: Called) -> list[Tensor]:
    return [x for n in call.ins if n is not None and (x := context.tensor(rank, n)) is not None]


def _is_fault(arrived: _Form, left: _Form) -> bool:
    """Whether what arrives is right, in some form, and what leaves is not."""
    return _is_right(arrived) and not _is_right(left)


def _is_right(form: _Form) -> bool:
    """Whether each rank has its own part of the true gradient, or the whole of it."""
    return any(ratio is not None and abs(ratio - 1) < 0.02 for ratio in (form.parts, form.whole))


def _form(given: list[Tensor], true: list[Tensor]) -> _Form:
    tol = max(tolerance(x) for x in given)
    given, true = [x.double() for x in given], [x.double() for x in true]
    one = torch.cat([x.flatten() for x in given])
    parts = ratio_of(one, torch.cat([x.flatten() for x in true]), tol)
    whole = None
    if len({x.shape for x in true}) == 1:
        total = torch.stack(true).sum(0)
        whole = ratio_of(one, torch.cat([total.flatten()] * len(given)), tol)
    return _Form(parts, whole)


def _pairs(
    context: Context, calls: dict[int, Called], numbers: str, gradients: str
) -> list[tuple[int, list[tuple[Tensor, Tensor]]]] | None:
    """For each rank the tensors of a call with the gradients that the program had for them."""
    found = []
    for rank, call in calls.items():
        pairs = []
        for number, gradient in zip(getattr(call, numbers), getattr(call, gradients), strict=False):
            x = None if number is None else context.tensor(rank, number)
            if x is None or not x.requires_grad or gradient is None:
                continue
            if x.shape != gradient.shape:
                return None
            pairs.append((x, gradient))
        found.append((rank, pairs))
    return found if all(pairs for _, pairs in found) else None


def _arrived(context: Context, calls: dict[int, Called]) -> _Form | None:
    return _compared(context, calls, "outs", "received")


def _left(context: Context, calls: dict[int, Called]) -> _Form | None:
    return _compared(context, calls, "ins", "returned")


def _compared(context: Context, calls: dict[int, Called], numbers: str, gradients: str) -> _Form | None:
    pairs = _pairs(context, calls, numbers, gradients)
    if pairs is None:
        return None
    given, true, values = [], [], []
    for _, each in pairs:
        found = context.truth.at([x for x, _ in each])
        for (x, gradient), right in zip(each, found, strict=True):
            given.append(gradient)
            values.append(x.detach())
            true.append(torch.zeros_like(x) if right is None else right)
    form = _form(given, true)
    # Only what is the same on the ranks can have its whole gradient on each.
    alike = len(values) == len(calls) and all(near(x, values[0], 1e-6) for x in values)
    return form if alike else _Form(form.parts, None)


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
        one = torch.cat([x.flatten().double() for x in gave])
        other = torch.cat([x.flatten().double() for x in candidate])
        ratio = ratio_of(one, other, tol)
        return ratio is not None and abs(ratio - 1) < 0.01

    exact = adjoint(met)
    # Without a message in backward only ranks that have the same gradient can seem to have summed it.
    sums = any(call.sends_back for call in calls.values()) or not any(call.sends for call in calls.values())
    if sums and alike(exact):
        return "each rank's gradient of the result is its own part"
    if len(met) == len(calls) and len(xs) == len(calls):
        if len({x.shape for x in met}) == 1:
            own = [adjoint([met[at] / len(calls)] * len(met))[at] for at in range(len(met))]
            if alike(own):
                return "every rank has the whole gradient of the result"
        if len({x.shape for x in exact}) == 1 and alike([torch.stack(exact).sum(0)] * len(exact)):
            return "the operand is the same on all ranks and each rank has its own part of the gradient"
    return ""


def added_before_sums(context: Context, wrong: Sequence[Got]) -> list[Finding]:
    """What is the same on ranks and is added to what is then summed over them."""
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
            if not leaf and not bool(there[0].abs().max() > 0):
                continue
            x = context.tensor(rank, number)
            names = _upstream(context, [x], wrong) if x is not None else []
            if not names and x is not None and x.numel() > 1 and not _is_mean(context, rank, call):
                names = _upstream(context, [x], context.got)
            if names:
                said = (
                    f"{names[0] if leaf else 'a tensor'} that is the same on {len(calls)} ranks is added before the "
                    f"sum over them, so that it counts {len(calls)} times; so does what backward gives {_listed(names)}"
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
            if event.name.split(".")[1] in _MOVING:
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
        if op.name.split(".")[1] not in _MOVING:
            return False
        number = refs(op)[0]
    return False


def _divides(op: Op, ranks: int) -> bool:
    name, other = op.name.split(".")[1], op.args[1] if len(op.args) > 1 else None
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
            name = op.name.split(".")[1] if op else ""
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
}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""Values that are the same on the ranks, and are added to what is then summed over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmesh.checker.findings import Finding
from gradmesh.checker.judging.context import Context, finding
from gradmesh.checker.judging.parameters import Got
from gradmesh.checker.judging.truth import near
from gradmesh.checker.recording.tape import Op, Sent, refs

__all__ = ["added_before_sums", "listed", "upstream"]


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
    "split",
    "split_with_sizes",
    "slice",
}


def listed(names: Sequence[str]) -> str:
    """Some names, in words."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

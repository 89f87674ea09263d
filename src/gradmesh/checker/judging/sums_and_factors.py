"""Parameters whose gradient is not the true one, and no call is at fault: sums and factors missing or too many."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradmesh.checker.findings import Finding, Place
from gradmesh.checker.judging.context import Context, cut_before_collectives, finding, listed, with_text
from gradmesh.checker.judging.functions import upstream
from gradmesh.checker.judging.origins import parting
from gradmesh.checker.judging.parameters import Got, Scales, Segment, is_sum, near, ratio_of, tolerance
from gradmesh.checker.judging.values import is_same_data
from gradmesh.checker.replay import scale_of
from gradmesh.checker.trace import Hooked, Op, ProgramInput, Root, Scaled, Sent, Tape, is_mean, refs
from gradmesh.verify.laws import as_real

_NEAR = 5e-3


def scales(tapes: Sequence[Tape], segment: Segment) -> list[dict[str, Scales]]:
    """What the program multiplied each rank's gradients by, but for averaging: clipping, a loss scale taken back."""
    found: list[dict[str, Scales]] = []
    for part in segment.parts:
        own: dict[str, Scales] = {}
        sums = [at for at, event in enumerate(part) if isinstance(event, Sent) and is_sum(event)]
        last = sums[-1] if sums else -1
        means = {e.name for e in part if isinstance(e, Scaled) and is_mean(e.factor, len(tapes))}
        held = {param.name for step in segment.steps[len(found)] for param in step.params}
        # What some parameters alone are multiplied by, where nothing is summed, is not a mean over ranks.
        chosen = not sums and not held.issubset(means)
        for at, event in enumerate(part):
            if isinstance(event, Scaled) and (event.loss or chosen or not is_mean(event.factor, len(tapes))):
                known = own.setdefault(event.name, Scales())
                if at < last and not event.own and not event.loss:
                    known.before *= event.factor
                else:
                    known.after *= event.factor
        found.append(own)
    return found


def wrong_ones(context: Context) -> list[Got]:
    """The parameters whose gradient is wrong beside those of the others; sets what is expected of all."""
    allowed = context.factors()
    right = [got for got in context.got if got.kind == "right"]
    # With the means over ranks that the program takes of some gradients alone, all may be the same multiple.
    whole = [got.ratio * _mean_of_one(context, got) for got in right]
    apart = any(abs(got.ratio - right[0].ratio) > _NEAR * abs(right[0].ratio) for got in right)
    if apart and any(all(abs(ratio - each) < _NEAR * each for ratio in whole) for each in allowed):
        for got, ratio in zip(right, whole, strict=True):
            got.ratio = ratio
    # What each rank has for itself says nothing of what ranks have in common, however much there is of it.
    ratios = [got.ratio for got in right if not _is_private(context, got)] or [got.ratio for got in right]
    if any(got.kind in ("apart", "bent") for got in context.got):
        ratios = [ratio for ratio in ratios if ratio]  # it is not every gradient that is zero
    groups: list[list[float]] = []
    for ratio in sorted(ratios):
        if groups and abs(ratio / (groups[-1][0] or 1e-30) - 1) < _NEAR:
            groups[-1].append(ratio)
        else:
            groups.append([ratio])

    def is_allowed(ratio: float) -> bool:
        return any(abs(ratio - each) < _NEAR * each for each in allowed) or not _counts(context, ratio)

    if groups:
        best = max(groups, key=lambda group: (is_allowed(group[0]), len(group)))
        context.expected = best[0]
        for got in context.got:  # as one parameter of each rank its gradient is wrong beside the others too
            odd = got.kind == "ambiguous" and abs(got.ratio / (context.expected or 1.0) - 1) > _NEAR
            if odd and len(got.parts) > 1 and _counts(context, got.ratio / (context.expected or 1.0)):
                got.kind = "apart"
    else:
        context.expected = 1.0
    return [
        got
        for got in context.got
        if got.kind in ("apart", "bent")
        or (
            got.kind == "right"
            and abs(got.ratio - context.expected) > _NEAR * abs(context.expected)
            and (got.ratio == 0 or _counts(context, got.ratio / (context.expected or 1.0)))
            and not _is_private(context, got)
        )
        or (got.kind == "right" and not is_allowed(got.ratio))
    ]


def _mean_of_one(context: Context, got: Got) -> float:
    """What a program multiplies the gradient of a parameter by, as for a mean over ranks; 1 where it does not."""
    factors = []
    for part in got.parts:
        product = 1.0
        events = context.events(part.rank)
        # With sums of the program's own, means were not divided out.
        sums = any(isinstance(event, Sent) and is_sum(event) for event in events)
        for event in events:
            if isinstance(event, Scaled) and event.name == got.name and not event.loss and not sums:
                factor: float | None = event.factor
            elif isinstance(event, Hooked) and event.id in part.ids and event.back is not None:
                factor = scale_of(event.back)
            else:
                continue
            product *= factor if factor is not None and is_mean(factor, len(context.tapes)) else 1.0
        factors.append(product)
    return factors[0] if len(set(factors)) == 1 else 1.0


def _is_private(context: Context, got: Got) -> bool:
    """Whether one rank alone has a parameter, no other rank's loss uses it, and it gets that of its own loss."""
    alone = len(got.parts) == 1 and not context.again.calls and not context.again.messages
    return alone and abs(got.ratio - 1) < _NEAR


def _counts(context: Context, ratio: float) -> bool:
    """Whether a ratio is made of numbers of ranks, of groups of them and of backwards: another one proves nothing."""
    if ratio <= 0:
        return True
    numbers = {round(1 / each) for each in context.factors()} | {
        len(call.group) for calls in context.again.groups for call in calls.values()
    }
    numbers |= {len(context.tapes), 1}
    products = {a * b for a in numbers for b in numbers}
    return any(a != b and abs(ratio * a / b - 1) < _NEAR for a in products for b in products)


def faults_of_gradients(context: Context, wrong: Sequence[Got]) -> list[Finding]:
    """GM102, GM103, GM109: What is wrong with the gradients themselves."""
    ranks = range(len(context.tapes))
    different, allowed = context.truth.different, context.factors()
    right = [got for got in context.got if got.kind == "right"]
    odd = not any(abs(context.expected - each) < _NEAR * each for each in allowed)
    odd = odd and _counts(context, context.expected)
    sites = enumerate(map(context.root_site, ranks))
    root = next((context.place(rank, site) for rank, site in sites if site >= 0), None)
    if right and odd and any(got.kind == "apart" for got in wrong):
        wrong = [got for got in wrong if got.kind != "right"]  # the factor shows when the sums are there
    elif right and odd:
        divided = division(context)
        at = divided[0] if divided else root
        times = context.expected
        if times == 0:
            said = "every gradient is zero, and the loss depends on the parameters"
            return [finding("GM103", said, context.place(0, context.segment.steps[0][0].site), root, ranks)]
        if times > 1:
            said = f"every gradient is {times:.4g} times the true one: a sum over the ranks is taken once too often"
            return [finding("GM102", said, at, root, ranks)]
        said = (
            f"every gradient is {_fraction(times)} of the true one: "
            "the loss or the gradient is divided once too often"
        )
        return [finding("GM109", said, at, root, ranks)]
    if right and not wrong and different > 1 and abs(context.expected * different - 1) < _NEAR:
        divided = division(context)
        if divided is not None:
            said = (
                "the loss, or a term of it, is divided by a number that counts all ranks, and the gradient is "
                f"averaged over them: it is {_fraction(1 / different)} of that of the mean"
            )
            made = finding("GM109", said, divided[0], root, ranks)
            return [replace(made, by_number=divided[1])]
    apart = [got for got in wrong if got.kind == "apart"]
    bent = [got for got in wrong if got.kind == "bent"]
    found = [_apart(context, got) for got in apart]
    if bent and (changed := _changed_in_place(context, bent)) is not None:
        found.append(changed)
        wrong = [got for got in wrong if got.kind != "bent"]
    found += [_one(context, got) for got in wrong if got.kind != "apart"]
    return _grouped(_with_parting(context, apart + bent, found))


def _with_parting(context: Context, wrong: Sequence[Got], found: list[Finding]) -> list[Finding]:
    """GM101: Findings; all that one missing sum before the loss makes wrong are one, at the operator behind it."""
    there = parting(context, wrong) if wrong else None
    taken = None if there is None else context.tensor(there.ranks[0], there.taken)
    if there is None or taken is None:
        return found
    names = list(dict.fromkeys([*there.names, *upstream(context, [taken], wrong)]))
    rank = there.ranks[0]
    said = (
        "what is taken here is the same on the ranks, and what is made of it is not: each rank has its own part of the "
        "gradient, and the parts are not summed over the ranks on their way back. The gradient of "
        f"{listed(names)} is wrong from here"
    )
    at, received = context.place(rank, there.site), context.place(rank, there.used)
    made = finding("GM101", said, at, None, there.ranks, names[0], _OF_PARTING)
    if received != at:
        made = replace(made, received=received)
    return [made, *(each for each in found if each.subject not in names)]


_OF_PARTING = (
    "Pass what is taken here through an operation whose backward is the sum over the ranks and whose forward changes "
    "nothing, such as gm.replicate, before the ranks go on with it in different ways."
)


def _one(context: Context, got: Got) -> Finding:
    at, began = _lines(context, got)
    if got.kind == "bent":
        said = f"the gradient of {got.name} is not the true one, nor a multiple of it"
        cut = _is_cut(context, got)
        said += ": some ways from the loss to it are cut off" if cut else ""
        return finding("GM103", said, at, began, got.ranks, got.name, "" if cut else _OF_PARTS)
    times = got.ratio / context.expected
    if (scaled := _scaled_by(context, got, times)) is not None:
        began = context.place(got.parts[0].rank, context.used_at(got.parts[0].rank, got.parts[0].ids))
        at = context.place(got.parts[0].rank, scaled.site)
        rule, shown = ("GM102", f"{times:.4g} times") if times > 1 else ("GM103", f"{_fraction(times)} of")
        said = f"the gradient of {got.name} is {shown} the true one, beside the other parameters: p.grad is multiplied "
        said += f"by {scaled.factor:.4g}"
        remedy = (
            f"Take the multiplication by {scaled.factor:.4g} away for these parameters: the gradients of the others "
            "are not multiplied so."
        )
        return finding(rule, said, at, began, got.ranks, got.name, remedy)
    if times > 1:
        said = f"the gradient of {got.name} is {times:.4g} times the true one, beside the other parameters"
        return finding("GM102", said, at, began, got.ranks, got.name)
    share = f"{_fraction(times)} of the true one"
    said = f"the gradient of {got.name} is {share}, beside the other parameters"
    if times == 0:
        said = f"{got.name} gets no gradient, and the loss depends on it"
    return finding("GM103", said, at, began, got.ranks, got.name)


_OF_PARTS = (
    "Look at what stands between the two lines and the loss: a backward that is not the derivative of its forward, a "
    "collective that takes a mean, and what changes p.grad between backward and the step."
)


def _is_cut(context: Context, got: Got) -> bool:
    """Whether something on the way from a parameter to the loss is detached, or sent without autograd's knowledge."""
    return bool(cut_before_collectives(context)) or any(
        (isinstance(event, Op) and "detach" in event.name) or (isinstance(event, Sent) and event.hidden)
        for part in got.parts
        for event in context.reached(part.rank, part.ids)
    )


def _scaled_by(context: Context, got: Got, times: float) -> Scaled | None:
    """What multiplied the gradient of a parameter by the factor that it is wrong by, and those of no right ones."""
    right = {
        each.name
        for each in context.got
        if each.kind == "right" and abs(each.ratio - context.expected) <= _NEAR * abs(context.expected)
    }
    scaled = [event for event in context.events(got.parts[0].rank) if isinstance(event, Scaled)]
    shared = {event.site for event in scaled if event.name in right}
    return next(
        (
            event
            for event in scaled
            if event.name == got.name
            and event.site not in shared
            and abs(event.factor - times) < _NEAR * times
        ),
        None,
    )


def _changed_in_place(context: Context, bent: Sequence[Got]) -> Finding | None:
    """GM104: A Function whose backward changes the gradient that it receives, which autograd hands to others too."""
    for rank, tape in enumerate(context.tapes):
        begin, end = context.segment.begins[rank], context.segment.begins[rank] + len(context.events(rank))
        for call in tape.calls.values():
            if call.overwrote < 0 or not begin <= call.begin < end:
                continue
            names = list(dict.fromkeys(got.name for got in bent))
            said = (
                f"the backward of {call.name} changes in place the gradient that it receives, which autograd hands to "
                f"other operations as well: the gradient of {names[0]} is not the true one, nor a multiple of "
                f"it{_and_others(names)}"
            )
            remedy = "Change a copy, g = g.clone() first, or make a new tensor: g / n instead of g.div_(n)."
            at, began = context.place(rank, call.overwrote), context.place(rank, call.site)
            return finding("GM104", said, at, began, range(len(context.tapes)), call.name, remedy)
    return None


def _apart(context: Context, got: Got) -> Finding:
    at, began = _lines(context, got)
    tol = tolerance(got.parts[0].param.value)
    total = ratio_of(torch.stack(got.got).sum(0), got.true, tol)
    zero = torch.zeros_like(got.true)
    own = [
        ratio_of(given, true, tol) if true.shape == given.shape else None
        for given, true in (
            (given, zero if part.true is None else as_real(part.true))
            for given, part in zip(got.got, got.parts, strict=False)
        )
    ]
    lines = {str(context.place(part.rank, context.used_at(part.rank, part.ids))) for part in got.parts}
    if len(lines) > 1:  # an embedding and a head, say
        said = (
            f"{got.name} is one parameter that ranks {', '.join(map(str, got.ranks))} use in different places, "
            "and each of them steps with its own gradient"
        )
        return finding("GM204", said, at, began, got.ranks, got.name)
    said = f"{got.name} is the same on ranks {', '.join(map(str, got.ranks))}, and its gradient is not"
    if total is not None or None not in own:
        said += ": each rank has its own part, and the parts are not summed"
    return finding("GM101", said, at, began, got.ranks, got.name)


def _grouped(found: Sequence[Finding]) -> list[Finding]:
    """One finding for parameters of which the same is to be said at one line."""
    table: dict[tuple[str, str], list[Finding]] = {}
    for each in found:
        table.setdefault((each.rule.id, str(each.at)), []).append(each)
    made = []
    for group in table.values():
        first, names = group[0], list(dict.fromkeys(each.subject for each in group if each.subject))
        made.append(replace(first, message=first.message + _and_others(names)))
    return made


def _and_others(names: Sequence[str]) -> str:
    others = f"{', '.join(names[1:4])}{' and others' if len(names) > 4 else ''}"
    return f" (so it is with {others})" if len(names) > 1 else ""


def _lines(context: Context, got: Got) -> tuple[Place | None, Place | None]:
    """Where a parameter is used, and the collective that what is made of it goes through."""
    part = got.parts[0]
    used = context.used_at(part.rank, part.ids)
    through = next((e.site for e in context.reached(part.rank, part.ids) if isinstance(e, Sent)), -1)
    step = context.segment.steps[part.rank][0].site
    if got.kind == "apart":
        return context.place(part.rank, step), context.place(part.rank, used if through == -1 else through)
    if through == -1:
        through = context.root_site(part.rank)
    return context.place(part.rank, used if used >= 0 else step), context.place(part.rank, through)


def _fraction(ratio: float) -> str:
    if ratio <= 0:
        return f"{ratio:.3g} times"
    return f"1/{1 / ratio:.4g}" if ratio < 1 else f"{ratio:.4g} times"


def scaled_alone(context: Context) -> list[Finding]:
    """GM205: Gradients that ranks multiply by different numbers, which they make of their own gradients."""
    lines: dict[str, list[tuple[int, Scaled]]] = {}
    for rank, part in enumerate(context.segment.parts):
        own = {event.site: event for event in part if isinstance(event, Scaled) and not event.loss}
        for site, event in own.items():
            lines.setdefault(str(context.place(rank, site)), []).append((rank, event))
    weights = scales(context.tapes, context.segment)
    for got in context.got:
        if got.alone is not None:
            rank = got.parts[0].rank
            said = (
                f"every rank clips its own part of the gradient of {got.name}, and the parts are summed afterwards: "
                "that is not the gradient, clipped"
            )
            return [finding("GM205", said, context.place(rank, got.alone.site), None, got.ranks, got.name)]
    for each in lines.values():
        values = [event.factor for _, event in each]
        if len(each) < 2 or max(values) - min(values) <= 1e-3 * max(abs(v) for v in values):
            continue
        if all(
            not event.own and event.name in weights[r] and weights[r][event.name].before != 1
            for r, event in each
        ):
            continue  # weights of the ranks' losses
        if not context.again.calls and all(len(got.parts) <= 1 for got in context.got):
            continue  # no parameters in common, and no gradients between ranks
        shown = ", ".join(
            f"{factor:.4g} on rank {rank}" for (rank, _), factor in zip(each[:4], values, strict=False)
        )
        rank, event = each[0]
        ranks = [r for r, _ in each]
        said = f"gradients are multiplied by a number that every rank finds for itself: {shown}"
        remedy = "" if any(scaled.own for _, scaled in each) else _OF_SCALES
        if event.by:
            said = f"{event.by} takes the norm of what each rank holds, and multiplies by another number: {shown}"
            remedy = _OF_CLIPPING
        return [finding("GM205", said, context.place(rank, event.site), None, ranks, remedy=remedy)]
    return []


_OF_CLIPPING = (
    "gm.nn.clip_grad_norm_(model.parameters(), max_norm), which takes the norm of the whole model on every rank; or in "
    "plain torch: average the gradients before they are clipped; where parameters are sharded, sum the squared norms "
    "of the shards over their group with dist.all_reduce, count what is replicated once, and scale by the root of that."
)


_OF_SCALES = (
    "Multiply by the same number on every rank. For a loss scale: reduce it, and whether a gradient overflowed, over "
    "the ranks before it is used, dist.all_reduce(scale, op=dist.ReduceOp.MIN); or use torch.amp.GradScaler."
)


def miscounted_norms(context: Context) -> list[Finding]:
    """GM205: A norm that gradients are multiplied by, and that counts copies several times, or leaves out a part."""
    scaled = [
        {e.name: e for e in part if isinstance(e, Scaled) and e.own and not e.by}
        for part in context.segment.parts
    ]
    if not scaled[0] or any(got.parts[0].param.whole for got in context.got):
        return []
    squares: list[
        tuple[str, dict[int, float], bool]
    ] = []  # name, by rank, whether the ranks have other entries
    for got in context.got:
        own = {
            part.rank: float(as_real(part.param.grad).square().sum())
            for part in got.parts
            if part.param.grad is not None
            and {got.name, *(f"#{number}" for number in part.ids)} & scaled[part.rank].keys()
        }
        if own:
            squares.append((got.name, own, any(part.covered is not None for part in got.parts)))
    once = sum(sum(own.values()) if cut else max(own.values()) for _, own, cut in squares)
    for event in (e for e in context.events(0) if isinstance(e, Sent) and e.phase == "apart" and e.total):
        found = event.total or 0.0
        if abs(found - once) < 3e-4 * once:
            continue
        how = next(
            (said for said, sum_ in _miscounts(squares, once) if abs(found - sum_) < 3e-5 * sum_), None
        )
        if how is not None and _is_clipped_by(context.tapes[0], event.site, found, scaled[0].values()):
            first = next(iter(scaled[0].values()))
            said = (
                f"gradients are multiplied by {first.factor:.4g}, and the sum over the ranks of squared norms, "
                f"{found:.6g}, {how}: the gradient's squared norm is {once:.6g}"
            )
            place, began = context.place(0, first.site), context.place(0, event.site)
            return [finding("GM205", said, place, began, range(len(context.tapes)), remedy=_OF_COPIES)]
    return []


def _miscounts(
    squares: Sequence[tuple[str, dict[int, float], bool]], once: float
) -> Iterator[tuple[str, float]]:
    """What a sum of squared norms may count wrongly, and what it comes to."""
    copies = {
        name: sum(own.values()) - max(own.values()) for name, own, cut in squares if not cut and len(own) > 1
    }
    yield "counts parameters that ranks have copies of once for each rank", once + sum(copies.values())
    yield from (
        (f"counts {name}, which ranks have copies of, once for each rank", once + more)
        for name, more in copies.items()
    )
    shards: dict[str, dict[int, float]] = {}
    for name, own, cut in squares:
        if cut or len(own) == 1:
            shards.setdefault(name, {}).update(own)
    everywhere = {
        rank: sum(own.get(rank, 0.0) for own in shards.values() if len(own) > 1)
        for rank in sorted({rank for own in shards.values() for rank in own})
    }
    for name, own in [*shards.items(), ("all parameters of one rank alone", everywhere)]:
        if len(own) > 1:
            for rank, square in own.items():
                yield f"has {name} of rank {rank} only", once - sum(own.values()) + square
            yield f"leaves out {name}", once - sum(own.values())


def _is_clipped_by(tape: Tape, site: int, total: float, scaled: Iterable[Scaled]) -> bool:
    """Whether gradients are multiplied by a norm's inverse: its product with the factor is one number at all steps.

    Of one step alone it has to be a number that a program may contain, such as 0.5; a program may also sum squares for
    its log, and multiply by something else.
    """
    sums, last, products = list[float](), 0.0, list[float]()
    for event in tape.events:
        if isinstance(event, Sent) and event.site == site and event.total:
            last = event.total
        elif isinstance(event, Scaled) and event.own and last > 0 and event.factor < 1 and last not in sums:
            sums.append(last)
            products.append(event.factor * last**0.5)
    if len(products) > 1 and max(sums) > 1.001 * min(sums):
        return max(products) - min(products) < 1e-3 * max(products)
    norms = [each.factor * total**0.5 for each in scaled]
    return any(abs(norm - float(f"{norm:.1g}")) < 3e-4 * norm for norm in norms)


_OF_COPIES = (
    "Sum the squared norms of shards over the ranks that hold them, and add those of parameters that every rank has "
    "once, after that sum; or call gm.nn.clip_grad_norm_."
)


def repeated_terms(context: Context) -> list[Finding]:
    """GM110: Terms of the loss that are equal on all ranks, beside terms divided by a count over all ranks."""
    ranks = range(len(context.tapes))
    if len(ranks) < 2 or context.truth.different < len(ranks) or abs(context.expected - 1) > _NEAR:
        return []
    each = [_terms(context, rank) for rank in ranks]
    shared = {got.name for got in context.got if len(got.parts) == len(ranks)}
    if len({len(terms) for terms in each}) > 1 or not any(total for *_, total in each[0]):
        return []
    for terms in zip(*each, strict=True):
        _, net, site, divided = terms[0]
        values = [x for rank, term in enumerate(terms) if (x := context.tensor(rank, term[0])) is not None]
        alike = (
            all(near(x.detach(), values[0].detach(), 1e-6) for x in values)
            and len({x[1] for x in terms}) == 1
        )
        if divided or len(values) < len(ranks) or not alike or not values[0].requires_grad:
            continue
        found = torch.autograd.grad(
            values[0], list(context.again.ranks[0].leaves.values()), retain_graph=True, allow_unused=True
        )
        used = {
            number
            for number, x in zip(context.again.ranks[0].leaves, found, strict=True)
            if x is not None and x.any()
        }
        names = [got.name for got in context.got if used.intersection(got.parts[0].ids)]
        if not names or not shared.issuperset(names):
            continue
        said = (
            f"a term of the loss, {values[0].item():.4g} times {net:.4g}, is the same on all {len(ranks)} ranks, and "
            f"the gradients are summed: it counts {len(ranks)} times, and the terms that are divided by a number of "
            "all ranks count once"
        )
        made = finding("GM110", said, context.place(0, site), context.place(0, context.root_site(0)), ranks)
        return [replace(made, subject=f"{net:.6g}", by_number=True)]
    return []


def _terms(context: Context, rank: int) -> list[tuple[int, float, int, bool]]:
    """The terms of a loss: each with its factor, its line, and whether it is divided by a count over all ranks."""
    made = {out: e for e in context.events(rank) if isinstance(e, Op) for out in e.outs}
    counts = {*_totals(context, rank), float(len(context.tapes))}
    roots = [e for e in context.events(rank) if isinstance(e, Root)]
    todo = [(root.id, 1.0, root.site, False) for root in roots[:1]]
    found = list[tuple[int, float, int, bool]]()
    while todo and len(found) < 64:
        number, net, site, divided = todo.pop(0)
        op = made.get(number)
        name, taken = ("", []) if op is None else (op.base.rstrip("_"), refs(op))
        value = None if op is None else number_in(context, rank, op)
        if op is not None and name in ("mul", "div") and value:
            net *= value if name == "mul" else 1 / value
            total = any(abs(n * each - 1) < 1e-6 for n in (1 / value, value) for each in counts if each > 1)
            todo.append((taken[0], net, op.site, divided or total))
        elif op is not None and name in ("add", "sub", "view", "clone", "alias", "squeeze") and taken:
            todo += [(each, net, op.site, divided) for each in taken]
        else:
            found.append((number, net, site, divided))
    return found


def division(context: Context) -> tuple[Place | None, bool] | None:
    """The line where a loss is divided by a number that counts all ranks, and is not multiplied by theirs.

    Also whether the finding rests on the number alone, without a sum over the ranks that yields it.
    """
    each = [_divisions(context, rank) for rank in range(len(context.tapes))]
    for rank, found in enumerate(each):
        for index, (line, by_number, whole, divided) in enumerate(found):
            if not whole:  # a term that is the same on every rank, such as a penalty, is not a share of a sum
                others = [other[index][3] for other in each if len(other) == len(found)]
                if divided is None or len(others) < len(each):
                    continue
                if all(
                    other is not None and near(other.detach(), divided.detach(), 1e-6) for other in others
                ):
                    continue
            return context.place(rank, line), by_number
    return None


def _divisions(context: Context, rank: int) -> list[tuple[int, bool, bool, Tensor | None]]:
    """Where a loss or a term of it is divided by a number that counts all ranks, and not multiplied by theirs.

    For each the line, whether the finding rests on the number alone, whether it is the whole loss, and what is divided.
    """
    ranks = context.truth.different
    events = context.events(rank)
    made = {out: e for e in events if isinstance(e, Op) for out in e.outs}
    totals = _totals(context, rank)
    root = next((e.id for e in events if isinstance(e, Root)), None)
    passes = sum(isinstance(e, Root) for e in events)
    terms = [] if root is None else [(root, 1.0, True)]
    seen, found = set[int](), []
    while terms:
        number, net, whole = terms.pop(0)
        line, by_number, taken_back, divided = -1, True, False, None
        for _ in range(12):
            op = made.get(number)
            taken = refs(op) if op else []
            if op is None or not taken or number in seen:
                break
            seen.add(number)
            name = op.base
            value = number_in(context, rank, op)
            if value is not None and name in ("div", "div_", "mul", "mul_") and value != 0:
                factor = 1 / value if name.startswith("div") else value
                # The mean over micro-batches does not count entries.
                net *= 1.0 if abs(factor * passes - 1) < 1e-9 and passes != ranks else factor
                total = any(abs(n * each - 1) <= 1e-6 for n in (factor, net) for each in totals if each > 1)
                if total or (whole and _counts_all(1 / net, taken[0], made, context, rank, ranks)):
                    line, by_number, divided = op.site, not total, context.tensor(rank, taken[0])
                taken_back = taken_back or abs(factor - ranks) < 1e-9
            elif name in ("add", "add_", "sub", "sub_", "rsub") and line < 0 and not taken_back:
                terms += [(term, net, False) for term in taken[1:]]
            number = taken[0]
        if line >= 0 and not taken_back:
            found.append((line, by_number, whole, divided))
    return found


def _counts_all(
    value: float, number: int, made: Mapping[int, Op], context: Context, rank: int, ranks: int
) -> bool:
    if value in (0.0, 1.0):
        return False
    if abs(value - ranks) < 1e-6:
        return True
    inner, signs = made.get(number), ("aten.neg.default", "aten.mul.Tensor")
    while inner is not None and inner.name in signs and len(refs(inner)) == 1:
        inner = made.get(refs(inner)[0])
    if inner is None or "sum" not in inner.base:
        return False
    summed = context.tensor(rank, refs(inner)[0])
    if summed is None or value == summed.numel():
        return False
    return any(abs(value - ranks * n) < 1e-6 for n in {summed.numel(), *summed.shape} if n > 0)


def _totals(context: Context, rank: int) -> set[float]:
    """What sums of one number over the ranks came to."""
    found, events = set(), context.events(rank)
    changed = {refs(e)[0] for e in events if isinstance(e, Op) and e.base.endswith("_") and refs(e)}
    for event in events:
        if isinstance(event, Sent) and event.kind == "all_reduce" and event.reduce in ("sum", ""):
            if event.total is not None:
                found.add(event.total)
            for number in event.outs if event.followed else ():
                x = context.tensor(rank, number)
                if x is not None and x.numel() == 1 and not x.requires_grad and number not in changed:
                    found.add(float(x))
    return found


def number_in(context: Context, rank: int, op: Op) -> float | None:
    """The number that an operator multiplies by, or divides by."""
    other = op.args[1] if len(op.args) > 1 else None
    if isinstance(other, (int, float)):
        return float(other)
    number = getattr(other, "id", None)
    x = None if number is None else context.tensor(rank, number)
    return float(x.detach()) if x is not None and x.numel() == 1 and not x.requires_grad else None


_MEANS = {"mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"}
_MEAN_REDUCTION, _SUM_REDUCTION = 1, 2
"""torch's numbers for reduction="mean" and "sum"."""


def notes_on_averages(context: Context) -> list[str]:
    """Communication hooks that sum: DDP averages over the ranks; a hook that takes its place may only sum."""
    ranks = context.truth.different
    hook = context.tapes[0].comm_hook
    if hook < 0 or ranks < 2 or abs(context.expected - 1) > _NEAR or division(context) is not None:
        return []
    place = with_text(context.tapes[0].places, hook)
    return [
        f"the communication hook registered at {place} sums the gradients of {ranks} ranks and does not divide by "
        f"{ranks}: every gradient is that of the sum of the ranks' losses, {ranks} times the mean that DDP takes "
        f"without a hook. If the mean is meant, divide the bucket by {ranks}"
    ]


def notes_on_scaled(context: Context) -> list[str]:
    """Gradients of some parameters alone that are divided as for a mean, where no sum is the program's own."""
    part, ranks = context.segment.parts[0], len(context.tapes)
    if any(isinstance(event, Sent) and is_sum(event) for event in part):
        return []
    held = {param.name for step in context.segment.steps[0] for param in step.params}
    names: dict[tuple[int, float], list[str]] = {}
    for event in part:
        if isinstance(event, Scaled) and not event.loss and is_mean(event.factor, ranks):
            names.setdefault((event.site, event.factor), []).append(event.name)
    return [
        f"the gradients of {listed(own)}, and not those of the others, are multiplied by {factor:.4g} at "
        f"{context.place(0, site)}: it is taken as meant"
        for (site, factor), own in names.items()
        if held - {*own}
    ]


def means_of_means(context: Context) -> list[Finding]:
    """GM111: Means over different numbers of entries, on ranks or micro-batches, that count alike."""
    ranks = range(len(context.tapes))
    parts = context.segment.parts
    if (
        context.truth.different < len(ranks)
        or len({e.factor for part in parts for e in part if isinstance(e, Scaled) and not e.own})
        > 1  # weighted
        or any(got.kind not in ("right", "unused") for got in context.got)
        or any(len(got.parts) < len(ranks) for got in context.got)  # tasks of the ranks' own
    ):
        return []
    means = [_means_of(context, rank) for rank in ranks]
    every = [mean for each in means for mean in each]
    places = {
        context.place(rank, site) for rank, each in zip(ranks, means, strict=True) for _, _, site, _ in each
    }
    counts, factors = [count for count, _, _, _ in every], {round(factor, 9) for _, factor, _, _ in every}
    if not all(means) or len(places) > 1 or len(factors) > 1 or len(set(counts)) == 1:
        return []
    shown = [
        f"{' + '.join(str(count) for count, _, _, _ in each[:4])} on rank {rank}"
        for rank, each in enumerate(means)
    ]
    weights = sorted(1 / (context.expected * every[0][1] / count) for count in (min(counts), max(counts)))
    whole = max(map(len, means)) == 1 or all(is_mean for *_, is_mean in every)
    clauses = (
        f"the loss is {'a mean over' if whole else 'divided by'} {', '.join(shown[:4])}{' entries' * whole}",
        f"times {every[0][1]:.6g}" if abs(every[0][1] - 1) > _NEAR else "",
        f"gradients are accumulated over {max(map(len, means))} backward passes"
        if max(map(len, means)) > 1
        else "",
        f"and multiplied by {context.expected:.6g} over {len(ranks)} ranks" if len(ranks) > 1 else "",
    )
    said = (
        f"{', '.join(filter(None, clauses))}: an entry counts 1/{weights[0]:.6g} or 1/{weights[1]:.6g}, depending "
        f"on where it is{f', and 1/{sum(counts)} in the mean over all {sum(counts)} entries' * whole}"
    )
    return [
        finding("GM111", said, context.place(0, every[0][2]), context.place(0, context.root_site(0)), ranks)
    ]


def _means_of(context: Context, rank: int) -> list[tuple[int, float, int, bool]]:
    """What each backward of a rank begins with, as a mean, see `_mean_of`; else none."""
    events = context.events(rank)
    made = {out: event for event in events if isinstance(event, Op) for out in event.outs}
    found = [_mean_of(context, rank, event.id, made) for event in events if isinstance(event, Root)]
    known = [mean for mean in found if mean is not None]
    return known if len(known) == len(found) else []


def _mean_of(
    context: Context, rank: int, number: int, made: Mapping[int, Op]
) -> tuple[int, float, int, bool] | None:
    """Over how many entries a loss is a mean, its factor, its line, and False for a sum with a divisor; else None."""
    factor = 1.0
    for _ in range(6):
        op = made.get(number)
        taken = refs(op) if op is not None else []
        if op is None or not taken:
            return None
        name, x = op.base, context.tensor(rank, taken[0])
        if name == "nll_loss_forward" and op.args[3] == _MEAN_REDUCTION:
            x = context.tensor(
                rank, op.outs[1]
            )  # what its entries weigh: those of ignore_index are not counted
            return None if x is None or not x.isfinite() else (int(x), factor, op.site, True)
        if (name == "mean" and len(op.args) == 1) or (
            name in _MEANS - {"mean"} and (len(op.args) < 3 or op.args[2] == _MEAN_REDUCTION)
        ):
            return None if x is None else (x.numel(), factor, op.site, True)
        value = number_in(context, rank, op)
        place = {"sum": 1, "nll_loss_forward": 3}.get(name, 2 if name in _MEANS else 9)
        summed = op.args[place:] == () if name == "sum" else op.args[place : place + 1] == (_SUM_REDUCTION,)
        if summed and abs(1 / factor - round(1 / factor)) < 1e-4:
            return round(1 / factor), 1.0, op.site, False
        if name in ("mul", "div") and value and math.isfinite(value):
            factor *= value if name == "mul" else 1 / value
        elif name not in ("view", "alias", "clone", "squeeze"):
            return None
        number = taken[0]
    return None


# ---- what is printed


def label_losses(context: Context) -> None:
    """Note which ranks repeat a loss, how many labels they have in common, and which losses are means."""
    ranks = range(len(context.tapes))
    means = [_means_of(context, rank) for rank in ranks]
    averaged = abs(context.expected * context.truth.different - 1) < _NEAR
    places = {
        context.place(rank, mean[0][2]) if mean else None for rank, mean in zip(ranks, means, strict=True)
    }
    labels = [
        [
            e.value
            for e in context.events(rank)
            if isinstance(e, ProgramInput) and e.value.dtype == torch.int64
        ]
        for rank in ranks
    ]
    for rank in ranks:
        copies, mean = context.truth.classes[rank], means[rank]
        same = all(is_same_data(labels[other], labels[rank]) for other in copies)
        whole = averaged and len(places) == 1 and len(mean) == 1 and mean[0][3] and abs(mean[0][1] - 1) < 1e-6
        for root in (event for event in context.events(rank) if isinstance(event, Root)):
            root.copies, root.mean = copies, mean[0][0] if whole else 0
            root.counts = frozenset(x.numel() for x in labels[rank]) if same else frozenset()


class _Summed(NamedTuple):
    """A sum of one number over ranks, apart from gradients, and the loss before it, on one rank."""

    event: Sent
    loss: Root | None


def reported(tapes: Sequence[Tape], output: Sequence[str]) -> list[Finding]:
    """GM112: A sum over ranks that is printed, where one process has the number itself or the mean."""
    columns = [column for printed in output for column in _columns(printed)]
    each = [_summed(tape) for tape in tapes]
    for key, first in each[0].items():
        group = first[0].event.group
        sums = [each[rank].get(key, []) for rank in group]
        if len({len(own) for own in sums}) > 1 or len(group) < 2:
            continue
        rows = list(zip(*sums, strict=True))
        whys = {_repeated(row, group) for row in rows}
        if len(whys) > 1 or not (why := whys.pop()):
            continue
        given = [[row.event.given or 0.0 for row in each] for each in rows]
        mean = sum(given[0]) / len(group)
        for texts, numbers, line in columns:
            # Where the mean is printed beside it, or it is one of several numbers alike, it is meant.
            beside = [float(text) for text in numbers if text is not texts[0]]
            if _show(texts, [sum(numbers) for numbers in given]) and not any(
                abs(x - mean) <= 1e-3 * abs(mean) for x in beside
            ):
                said = (
                    f'"{line}" is printed, where {texts[0]} is the sum over {len(group)} ranks of '
                    f"{listed([f'{x:.6g}' for x in given[0]])}: {why.format(n=len(group))}"
                )
                place = with_text(tapes[0].places, first[0].event.site)
                return [finding("GM112", said, place, None, group)]
    return []


def _summed(tape: Tape) -> dict[tuple[str, Place | None], list[_Summed]]:
    """The sums of one number of a rank, by their group and line."""
    found: dict[tuple[str, Place | None], list[_Summed]] = {}
    loss: Root | None = None
    for event in tape.events:
        if isinstance(event, Root):
            loss = event
        elif isinstance(event, Sent) and event.given and math.isfinite(event.given):
            key = event.name, with_text(tape.places, event.site)
            found.setdefault(key, []).append(_Summed(event, loss))
    return found


def _repeated(row: Sequence[_Summed], group: Sequence[int]) -> str:
    """What is wrong with a sum as what one process gives, in words; "" for nothing."""
    losses = [each.loss for each in row if each.loss is not None and each.loss.value.numel() == 1]
    if len(losses) < len(row):
        return ""
    given = [each.event.given or 0.0 for each in row]
    own = all(abs(x - float(loss.value)) <= 1e-6 * abs(x) for x, loss in zip(given, losses, strict=True))
    if len(set(given)) == 1 and all(set(group) <= {*loss.copies} for loss in losses):
        if own:
            return "these ranks have the same loss, so it is {n} times what one process gives"
        if all(given[0] in loss.counts for loss in losses):
            return "these ranks have the same labels, so it is {n} times what one process gives"
    means = {loss.mean for loss in losses}
    if own and len(means) == 1 and means.pop() > 1 and all(len(loss.copies) == 1 for loss in losses):
        return "each is the mean over a rank's own data, so it is {n} times the mean over all data"
    return ""


_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.]*\w)")


def _columns(printed: str) -> Iterator[tuple[list[str], list[str], str]]:
    """The numbers that lines have at one place, where the lines are alike but for numbers; with the first line's."""
    rows: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}
    for line in printed.splitlines():
        if numbers := _NUMBER.findall(line):
            rows.setdefault(tuple(_NUMBER.split(line)), []).append((numbers, line.strip()))
    for alike in rows.values():
        for column in zip(*(numbers for numbers, _ in alike), strict=True):
            yield list(column), alike[0][0], alike[0][1]


def _show(texts: Sequence[str], totals: Sequence[float]) -> bool:
    """Whether numbers as they are printed are these; whole ones may be added up from line to line."""
    if all(map(float.is_integer, totals)):
        steps, first = [float(text) for text in texts], totals[0]
        alike = {*steps} == {first} or steps == [first * n for n in range(1, len(steps) + 1)]
        return alike and {*totals} == {first} and first >= 10
    pairs = list(zip(texts, totals, strict=False))
    return len(pairs) > 0 and all(_shows(text, total) for text, total in pairs)


def _shows(text: str, value: float) -> bool:
    """Whether a printed number is a value, rounded as it is printed, with more than three digits."""
    digits = len(text.partition(".")[2])
    near = abs(float(text) - value) <= 0.51 * 10.0**-digits + 1e-6 * abs(value)
    return near and "e" not in text.lower() and len(text.replace(".", "").lstrip("-+0")) > 3

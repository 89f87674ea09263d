"""What each parameter got at a step, beside what it should have got."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradmesh.checker.replay import Again, Rank
from gradmesh.checker.trace import (
    MOVES,
    SUMMED_IN_STEP,
    Alias,
    Changed,
    Event,
    Op,
    Param,
    ProgramInput,
    Root,
    Scaled,
    Sent,
    Step,
    Tape,
    is_constant,
    makes,
    nameless,
    refs,
)
from gradmesh.verify.laws import as_real

T = TypeVar("T")


@dataclass
class Segment:
    """What leads to a step, on all ranks."""

    parts: list[list[Event]]  # each rank's events before its step
    steps: list[list[Step]]  # each rank's steps; several where one backward serves several optimizers
    begins: list[int]  # how many events of each rank's tape are before it

    @property
    def whole(self) -> bool:
        """Whether there is a backward."""
        return any(isinstance(event, Root) for part in self.parts for event in part)

    @property
    def manual_calls(self) -> bool:
        """Whether the program writes a step itself, along something else than what is in `.grad`."""
        return not all(step.by_gradients for steps in self.steps for step in steps)


def segments(tapes: Sequence[Tape]) -> list[Segment]:
    """All of it that ends in a step on every rank."""
    own = [_of_own_gradients(tape) for tape in tapes]
    alone = {id(step) for each in own for step in each} if all(own) else set[int]()
    cut = [
        [
            (begin, part, [s for s in _real(steps) if not s.left_over or id(s) in alone])
            for begin, part, steps in _cut(tape)
        ]
        for tape in tapes
    ]
    found = []
    for at in range(min(len(each) for each in cut)):
        each = [rank[at] for rank in cut]
        found.append(Segment([p for _, p, _ in each], [s for _, _, s in each], [b for b, _, _ in each]))
    lines = [{(at, step.site) for at, own in enumerate(each.steps) for step in own} for each in found]
    back = [
        lines[at] for at, (now, then) in enumerate(itertools.pairwise(found)) if _is_taken_back(now, then)
    ]
    return [each for each, own in zip(found, lines, strict=True) if own not in back]


def _of_own_gradients(tape: Tape) -> list[Step]:
    """The program's own steps behind the first one of an optimizer, where no gradient of another rank can be in them.

    After the backward the ranks send no more than gradients of other parameters, in place, single numbers, and one
    tensor for each parameter that is stepped so, from the rank that has computed its update.
    """
    found, sent, in_step = list[Step](), list[Sent](), False
    for event in tape.events:
        if isinstance(event, Root):
            if found:
                break
            in_step = True
        elif isinstance(event, Step) and event.left_over:
            found.append(event)
        elif isinstance(event, Sent) and in_step and event.phase != "backward" and len(event.group) > 1:
            sent.append(event)
    names = {param.name for step in found for param in step.params}
    updates = [tuple(param.value.shape) for step in found for param in step.params]
    for event in sent:
        if sum(math.prod(shape) for shape in event.shapes) <= 1:
            continue
        if event.kind == "broadcast" and event.shapes[0] in updates:
            updates.remove(event.shapes[0])
        elif not event.gradients or not all(event.gradients) or not names.isdisjoint(event.gradients):
            return []
    return found


def _is_taken_back(now: Segment, following: Segment) -> bool:
    """Whether a program displaces its parameters by itself, and has them back at the next step of an optimizer."""
    for own, later in zip(now.steps, following.steps, strict=True):
        then = {param.name: param.value for step in later if not step.manual for param in step.params}
        moved = [(param.value, then.get(param.name)) for step in own for param in step.params]
        if not all(step.manual for step in own):
            return False
        if not all(x is not None and near(x, value, 1e-6) for value, x in moved):
            return False
    return True


def _real(steps: Sequence[Step]) -> list[Step]:
    """Steps, without what a program writes to parameters that an optimizer steps too: it takes a displacement back."""
    stepped = {param.name for step in steps if not step.manual for param in step.params}
    return [
        step
        for step in steps
        if step.by_gradients or not stepped.issuperset(param.name for param in step.params)
    ]


def _cut(tape: Tape) -> list[tuple[int, list[Event], list[Step]]]:
    found: list[tuple[int, list[Event], list[Step]]] = []
    begin, part, steps = 0, list[Event](), list[Step]()
    for at, event in enumerate(tape.events):
        if isinstance(event, Step):
            steps.append(event)
            continue
        if steps and not isinstance(event, Scaled):
            found.append((begin, part, steps))
            begin, part, steps = at, [], []
        part.append(event)
    if steps:
        found.append((begin, part, steps))
    # A step without a backward before it belongs to the one before.
    merged: list[tuple[int, list[Event], list[Step]]] = []
    for each in found:
        grows = any(isinstance(event, ProgramInput) and event.leaf for event in each[1])
        if merged and not any(isinstance(event, Root) for event in each[1]) and not grows:
            merged[-1][2].extend(each[2])
        else:
            merged.append(each)
    return merged


@dataclass
class Truth:
    """The objective of a step, and its derivatives."""

    objective: Tensor  # one number
    different: int  # how many different losses it is the sum of
    # for each rank the ranks whose loss is the same, itself among them; () where a rank has none
    classes: list[tuple[int, ...]]
    # for each rank, of each parameter by its number, what this rank's own use of it adds; None where it is not used
    gradients: list[dict[int, Tensor | None]]
    # backwards of the program's own on the way, of which it is not known what they make of a gradient
    unclear: tuple[str, ...] = ()

    def at(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The objective's derivative with respect to tensors of the graph."""
        wanted = [x for x in tensors if x.requires_grad]
        found = iter(_derivatives(self.objective, wanted))
        return [next(found) if x.requires_grad else None for x in tensors]


def truth_of(again: Again) -> Truth | None:
    """The objective of ranks that were run again, and its derivatives; None without a loss."""
    parts = [_terms(rank) for rank in again.ranks]
    losses = [torch.stack(terms).sum() if terms else None for terms in parts]
    if all(loss is None for loss in losses):
        return None
    classes = _classes(again, losses, [[term.detach() for term in terms] for terms in parts])
    terms = [loss / len(group) for loss, group in zip(losses, classes, strict=True) if loss is not None]
    # A rank's own copy of the sum is not on its tape: that is done here.
    objective = torch.stack(terms).sum()
    flat = [(at, number, leaf) for at, rank in enumerate(again.ranks) for number, leaf in rank.leaves.items()]
    for rank in again.ranks:
        rank.unclear.names.clear()
    found = _derivatives(objective, [leaf for *_, leaf in flat])
    unclear = tuple(dict.fromkeys(again.unclear))
    for rank in again.ranks:
        if rank.missing:
            reached = _derivatives(objective, [x for _, x in rank.missing])
            rank.lost += [why for (why, _), x in zip(rank.missing, reached, strict=True) if x is not None]
    gradients: list[dict[int, Tensor | None]] = [{} for _ in again.ranks]
    for (at, number, _), gradient in zip(flat, found, strict=True):
        gradients[at][number] = gradient
    return Truth(objective, len({group for group in classes if group}), classes, gradients, unclear)


def near(a: Tensor, b: Tensor, rtol: float) -> bool:
    """Whether two tensors are equal but for rounding, as a whole."""
    scale = max(float(a.abs().max()) if a.numel() else 0.0, float(b.abs().max()) if b.numel() else 0.0)
    return a.shape == b.shape and (a.numel() == 0 or float((a - b).abs().max()) <= rtol * scale)


def grouped(items: Iterable[T], alike: Callable[[T, T], bool]) -> list[list[T]]:
    """Items in groups: one is in the first group whose first item is like it."""
    groups: list[list[T]] = []
    for item in items:
        group = next((group for group in groups if alike(item, group[0])), None)
        if group is None:
            groups.append([item])
        else:
            group.append(item)
    return groups


def copies_of(values: Sequence[Tensor]) -> list[list[int]]:
    """Which of some ranks' tensors are the same."""
    return grouped(range(len(values)), lambda a, b: near(values[a], values[b], 1e-6))


def _terms(rank: Rank) -> list[Tensor]:
    """What each backward of a rank began at."""
    terms = []
    for root, x in rank.roots:
        if root.passed_on or not x.requires_grad:
            continue
        weight = torch.ones_like(x) if root.weight is None else root.weight
        term = (x * weight.reshape(x.shape).to(x.dtype)).sum()
        terms.append((term.real if term.is_complex() else term).double())
    return terms


def _classes(
    again: Again, losses: Sequence[Tensor | None], parts: Sequence[Sequence[Tensor]]
) -> list[tuple[int, ...]]:
    """Ranks that repeat a loss: it is the same, and not by chance."""
    found: list[tuple[int, ...]] = []
    for rank, loss in enumerate(losses):
        alike = tuple(
            at
            for at, other in enumerate(losses)
            if loss is not None
            and other is not None
            and (at == rank or at not in again.ranks[rank].terms)
            # A NaN is not even near itself.
            and (
                at == rank
                or (
                    near(loss.detach(), other.detach(), 1e-6)
                    # The micro-batches of a policy's loss may take each other away.
                    and (len(parts[at]) != len(parts[rank]) or _same(parts[at], parts[rank]))
                )
            )
        )
        found.append(alike)
    if not again.calls:
        own = [_own_gradients(rank, loss) for rank, loss in zip(again.ranks, losses, strict=True)]
        found = [
            tuple(at for at in group if at == rank or _same(own[at], own[rank]))
            for rank, group in enumerate(found)
        ]
    return found


def _own_gradients(rank: Rank, loss: Tensor | None) -> list[Tensor]:
    if loss is None:
        return []
    return [x for x in _derivatives(loss, list(rank.leaves.values())) if x is not None]


def _derivatives(y: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """None of none, which torch 2.11 refuses to be asked for."""
    found = torch.autograd.grad(y, xs, retain_graph=True, allow_unused=True) if xs else ()
    return [x.to_dense() if x is not None and x.layout is not torch.strided else x for x in found]


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(near(x, y, 1e-6) for x, y in zip(a, b, strict=True))


@dataclass
class Scales:
    """What a program multiplied a gradient by: before it was summed over the ranks, and after."""

    before: float = 1.0
    after: float = 1.0


@dataclass
class Part:
    """A parameter on one rank."""

    rank: int  # which
    param: Param  # what the step found
    ids: tuple[int, ...]  # its numbers on the rank's tape
    true: Tensor | None  # what the rank's own use of it adds to the gradient; None where it is not used
    steps: bool = True  # whether an optimizer of this rank steps it, or a copy of it
    covered: Tensor | None = None  # which of its entries that optimizer steps; None for all
    exact: bool = True  # whether nothing of 16 bits or fewer is computed with, or sent


@dataclass
class Got:
    """A parameter that is one on some ranks, which have the same value of it."""

    name: str  # of it
    parts: list[Part]  # of the ranks
    true: Tensor  # its whole gradient
    got: list[Tensor]  # what each rank's optimizer was given
    # what was given, in units of the true one, where it is the same on the ranks and proportional
    ratio: float
    # "right" (proportional), "apart" (each rank has another), "bent" (the same, and not proportional), "unused"
    # (nothing is to be had), "infinite" (there is a NaN or an infinity, which compares with nothing), "ambiguous" (it
    # is unknown whether it is one parameter; the ratio is that of a parameter of each rank), "changed" (the program
    # made something else of it, apparently on purpose), "unknown" (it is not seen where it is used), "unclear" (it is
    # wrong where what a backward makes of it on purpose is not known)
    kind: str
    alone: Changed | None = None  # how each rank clipped its own part of it, before these were summed

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have it."""
        return tuple(part.rank for part in self.parts)


def tolerance(x: Tensor) -> float:
    """How far apart two gradients of this dtype may be."""
    dtype = x.dtype.to_real() if x.dtype.is_complex else x.dtype
    return {torch.float64: 1e-7, torch.float32: 2e-3}.get(dtype, 6e-2)


def gotten(
    segment: Segment, again: Again, truth: Truth, scales: Sequence[dict[str, Scales]], notes: list[str]
) -> list[Got]:
    """Each parameter of a step, whose gradients are divided by what the program multiplied them by.

    `scales` are what each rank's gradients were multiplied by; `notes` take what could not be compared.
    """
    by_name: dict[str, list[Part]] = {}
    exact = not _is_rounded(segment, again)
    for rank in range(len(segment.parts)):
        for part in _parts_of(segment, again.ranks[rank].tensors, truth, scales[rank], rank):
            part.exact = exact
            by_name.setdefault(part.param.name, []).append(part)
    # What is nothing but rounding, as the gradient of what a norm takes away, is compared with nothing.
    trues = [part.true for parts in by_name.values() for part in parts if part.true is not None]
    largest = max((float(true.abs().max()) for true in trues if true.numel()), default=0.0)
    noise = max(largest * 1e-6, 1e-12)
    found = []
    for name, parts in _joined(by_name).items():
        for group in _groups(parts):
            try:
                judged = _judged(name, group, lambda group: _is_shared(segment, again, group, by_name), noise)
            except Exception as error:  # one that torch cannot compare so
                notes.append(
                    f"not analysed: the gradient of {name} ({type(error).__name__}: {first_line(error)})"
                )
                continue
            if judged is None:
                continue
            if judged.kind == "bent" and _may_be_elsewhere(group, by_name):
                judged = replace(judged, kind="ambiguous")
            if judged.kind == "ambiguous" and _are_own(segment, again, group, by_name):
                alone = [_judged(name, [part], lambda _: False, noise) for part in group]
                found += [each for each in alone if each is not None]
            else:
                found.append(judged)
    if found and not any(bool(x.any()) for got in found for x in got.got):  # nothing is left of any gradient
        return [replace(got, kind="right", ratio=0.0) if bool(got.true.any()) else got for got in found]
    return found


def _is_rounded(segment: Segment, again: Again) -> bool:
    """Whether the program computes with numbers of 16 bits or fewer, as in autocast, or sends such."""
    return any(
        x.dtype.itemsize <= 2 and x.is_floating_point() for rank in again.ranks for x in rank.tensors.values()
    ) or any(isinstance(event, Sent) and event.rounded for part in segment.parts for event in part)


def is_sum(event: Sent) -> bool:
    """Whether gradients are brought together by it, after a backward."""
    sums = event.reduce in ("sum", "avg", "mean", "")
    return event.phase == "apart" and sums and event.kind.startswith(("all_reduce", "reduce"))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _parts_of(
    segment: Segment, tensors: dict[int, Tensor], truth: Truth, scales: dict[str, Scales], rank: int
) -> list[Part]:
    """The parameters of a rank: those that it steps, those of which it steps a copy, and those that it only uses."""
    leaves = [
        _as_used(event, tensors)
        for event in segment.parts[rank]
        if isinstance(event, ProgramInput) and event.leaf
    ]
    by_name = {leaf.name: leaf for leaf in leaves}
    # An optimizer skips what takes no gradient, such as the frozen part of a flat parameter.
    params = [param for step in segment.steps[rank] for param in step.params if param.name not in step.frozen]
    found, stepped = [], set[int]()
    copies: list[tuple[Param, tuple[int, ...]]] = []

    # What some parameters alone are multiplied by, where nothing is summed, is not a mean over ranks.
    sums = any(isinstance(event, Sent) and is_sum(event) for event in segment.parts[rank])
    chosen = not sums and len({param.share for param in params}) > 1

    def made(param: Param, ids: tuple[int, ...], **more: Any) -> Part:
        trues = [x for number in ids if (x := truth.gradients[rank].get(number)) is not None]
        known = next((scales[key] for key in (param.name, *map(nameless, ids)) if key in scales), Scales())
        after = known.after * param.factor * (param.share if chosen else 1.0)
        if after not in (0.0, 1.0) and param.grad is not None:
            param = replace(param, grad=param.grad / after)
        true = torch.stack(trues).sum(0) if trues and len({x.shape for x in trues}) == 1 else None
        if true is not None and known.before != 1.0:
            true = true * known.before
        return Part(rank, param, ids, true, **more)

    for param in params:
        leaf = by_name.get(param.name)
        ids = {number for number in (param.id, leaf.id if leaf is not None else None) if number is not None}
        own = [each for each in leaves if each.id in ids]
        used = any(truth.gradients[rank].get(number) is not None for number in ids)
        whole = all(each.value.shape == param.value.shape for each in own)
        if not param.whole and param.value.is_floating_point() and not (used and whole):
            copies.append((param, tuple(ids) if whole else ()))  # of parameters, or of a part of them, maybe
            stepped |= ids if whole else set()
            continue
        found.append(made(param, tuple(ids)))
        stepped |= ids
    left = [
        leaf for leaf in leaves if leaf.id not in stepped and truth.gradients[rank].get(leaf.id) is not None
    ]
    pieced = set[int]()
    covers = [
        [(param, cover) for param, _ in copies if (cover := covered_by(param, leaf.value)) is not None]
        for leaf in left
    ]
    pieced |= {id(param) for pieces in covers for param, _ in pieces}
    unclear = set[int]()
    for param, numbers in copies:  # what is too small, or too much alike, to be found by its numbers alone
        if id(param) in pieced or any(truth.gradients[rank].get(number) is not None for number in numbers):
            continue
        places = [
            (at, cover) for at, leaf in enumerate(left) for cover in _places(param, leaf.value, covers[at])
        ]
        if len(places) == 1:
            covers[places[0][0]].append((param, places[0][1]))
            pieced.add(id(param))
        elif places:
            unclear.add(id(param))
    for leaf, pieces in zip(left, covers, strict=True):
        if not pieces:  # all its entries are one number: the next copy that is as it is
            alike = (p for p, _ in copies if id(p) not in pieced and p.value.shape == leaf.value.shape)
            copy = next((p for p in alike if torch.equal(p.value.to(leaf.value.dtype), leaf.value)), None)
            if copy is not None:
                pieces.append((copy, (0, leaf.value.numel(), 0)))
                pieced.add(id(copy))
        name = leaf.name or f"parameter of shape {tuple(leaf.value.shape)}"
        param = Param(name, leaf.id, leaf.value, None)
        if not pieces:
            found.append(made(param, (leaf.id,), steps=False))
            continue
        mask, grad = torch.zeros(leaf.value.numel(), dtype=torch.bool), torch.zeros(leaf.value.numel())
        there, scaled = False, not scales.keys().isdisjoint((name, nameless(leaf.id)))
        for piece, (start, stop, offset) in pieces:
            mask[start:stop] = True
            if piece.grad is not None and piece.grad.shape == piece.value.shape:
                there = True
                slice_of = piece.grad.flatten()[start + offset : stop + offset]
                factor = piece.factor * (1.0 if scaled else scales.get(piece.name, Scales()).after)
                grad[start:stop] = (slice_of / factor if factor else slice_of).to(grad.dtype)
        param.grad = grad.view(leaf.value.shape) if there else None
        param.changed = next((piece.changed for piece, _ in pieces if piece.changed is not None), None)
        covered = None if bool(mask.all()) else mask.view(leaf.value.shape)
        found.append(made(param, (leaf.id,), covered=covered))
    return found + [
        made(param, () if id(param) in unclear else ids) for param, ids in copies if id(param) not in pieced
    ]


def _places(
    param: Param, value: Tensor, known: Sequence[tuple[Param, tuple[int, int, int]]]
) -> list[tuple[int, int, int]]:
    """Where a whole copy may be in a flat parameter: where its numbers are, beside the other copies."""
    copy, size = param.value.flatten(), param.value.numel()
    if not known or value.dim() != 1 or not 0 < size < value.numel() or copy.dtype.is_complex:
        return []
    same = (value.unfold(0, size, 1) == copy.to(value.dtype)).all(1)
    for _, (start, stop, _) in known:
        same[max(0, start - size + 1) : stop] = False
    return [(int(start), int(start) + size, -int(start)) for start in same.nonzero().flatten()]


def _as_used(leaf: ProgramInput, tensors: dict[int, Tensor]) -> ProgramInput:
    """A parameter with the value that it is used with: the program may have written to it since it was met."""
    now = tensors.get(leaf.id)
    return leaf if now is None or now.shape != leaf.value.shape else replace(leaf, value=now.detach())


def covered_by(param: Param, value: Tensor) -> tuple[int, int, int] | None:
    """Which entries of a parameter another one is a copy of, which an optimizer steps.

    It may be a copy of the same shape, maybe of another precision, or a part of several parameters behind one another.
    Returns the first entry, the one behind the last, and how many entries before them are others'; None for no copy.
    """
    copy, whole = param.value.flatten(), value.flatten()
    if copy.dtype.is_complex or whole.dtype.is_complex or not whole.numel() or not copy.numel():
        return None
    copy = copy.to(whole.dtype)
    if param.value.shape == value.shape:
        return (0, whole.numel(), 0) if torch.equal(copy, whole) and not is_constant(whole) else None
    order = torch.argsort(copy, stable=True)
    at = torch.searchsorted(copy[order].contiguous(), whole.contiguous()).clamp(max=copy.numel() - 1)
    found = order[at]
    hits = (copy[found] == whole).nonzero().flatten()
    if not hits.numel():
        return None
    offsets = found[hits] - hits
    offset = int(offsets.mode().values)
    start, stop = max(0, -offset), min(whole.numel(), copy.numel() - offset)
    if stop - start < min(2, whole.numel()):
        return None
    same = copy[start + offset : stop + offset] == whole[start:stop]
    return (start, stop, offset) if bool(same.all()) and not is_constant(whole[start:stop]) else None


def _joined(by_name: dict[str, list[Part]]) -> dict[str, list[Part]]:
    """Parameters that no module has on some rank, with those of the same value on others."""
    found = {name: list(parts) for name, parts in by_name.items() if not name.startswith("parameter ")}
    for name, parts in by_name.items():
        for part in parts if name not in found else ():
            value = part.param.value
            home = next(
                (
                    other
                    for other, there in found.items()
                    if not is_constant(value)
                    and all(each.rank != part.rank for each in there)
                    and any(
                        each.param.value.shape == value.shape and torch.equal(each.param.value, value)
                        for each in there
                    )
                ),
                name,
            )
            found.setdefault(home, []).append(part)
    return found


def _may_be_elsewhere(group: Sequence[Part], by_name: dict[str, list[Part]]) -> bool:
    """Whether a parameter that is one number may be the one that another rank uses, where no module has it."""
    value, ranks = group[0].param.value, {part.rank for part in group}
    return is_constant(value) and any(
        part.rank not in ranks
        and part.param.value.shape == value.shape
        and torch.equal(part.param.value, value)
        for name, parts in by_name.items()
        if name.startswith("parameter ")
        for part in parts
    )


def _groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts whose values are the same: one parameter."""
    plain = [part for part in parts if not part.param.whole]
    # A displacement that is taken back leaves rounding.
    groups = grouped(plain, lambda a, b: near(a.param.value, b.param.value, 1e-6))
    return groups + _groups_of_meshes([part for part in parts if part.param.whole])


def _groups_of_meshes(parts: Sequence[Part]) -> list[list[Part]]:
    """DTensors of one mesh, and those of several meshes that have the same value."""
    by_mesh: dict[str, list[Part]] = {}
    for part in parts:
        by_mesh.setdefault(str(part.param.mesh), []).append(part)
    meshes: list[tuple[Tensor | None, list[Part]]] = []
    for own in by_mesh.values():
        first = own[0].param
        values = {part.rank: part.param.value for part in own}
        value = _assembled(first, first.placements, values, own[0].rank) if len(by_mesh) > 1 else None
        meshes.append((value, own))
    alike = grouped(meshes, lambda a, b: a[0] is not None and b[0] is not None and torch.equal(a[0], b[0]))
    return [[part for _, own in group for part in own] for group in alike]


def _judged(name: str, group: list[Part], shared: Callable[[list[Part]], bool], noise: float) -> Got | None:
    if not any(part.steps for part in group):
        return None
    if group[0].param.whole:
        return _spread(name, group, shared, noise)
    got = _of_plain(name, group, shared, noise, [part.param.grad for part in group])
    if (
        got is None
        or got.kind not in ("bent", "apart", "right")
        or not any(part.param.changed for part in group)
    ):
        return got
    if (
        got.kind == "right" and got.ratio != 0 and got.true.numel() > 1
    ):  # one number is a multiple of any other
        return got
    # The program has made something else of it: what it made that of is what is judged, where that is known.
    there = [part.param.changed for part in group if part.steps]
    if any(each is not None and each.what == SUMMED_IN_STEP for each in there):
        return replace(got, kind="changed")
    before = [each.before if each is not None else None for each in there]
    if got.kind != "apart" and any(each is not None and each.what == "taken away" for each in there):
        return replace(got, kind="unused" if got.kind == "right" else "changed")
    if all(
        x is not None and x.shape == part.param.value.shape for x, part in zip(before, group, strict=False)
    ):
        first = _of_plain(name, group, shared, noise, list(before))
        if first is not None and first.kind in ("right", "unused", "ambiguous"):
            return first if first.ratio != 0 else got
        if first is not None and first.kind == got.kind:
            return got
        if first is not None and first.kind == "apart" and got.kind != "apart":
            clips = next((each for each in there if each is not None and "clamp" in each.what), None)
            return replace(got, kind="changed", alone=clips)
    return got if got.kind == "apart" else replace(got, kind="changed")


def _of_plain(
    name: str,
    group: list[Part],
    shared: Callable[[list[Part]], bool],
    noise: float,
    gradients: Sequence[Tensor | None],
) -> Got | None:
    """A parameter of plain tensors, whose optimizers were given some gradients."""
    trues = [part.true for part in group]
    shape, dtype = group[0].param.value.shape, group[0].param.value.dtype
    if any(true is not None and true.shape != shape for true in trues):
        return None
    used = [true for true in trues if true is not None]
    true = torch.stack(used).sum(0) if used else torch.zeros(shape, dtype=dtype)
    own = [torch.zeros_like(true) if t is None else t for t in trues]
    zero = torch.zeros(shape, dtype=dtype)
    steps = [at for at, part in enumerate(group) if part.steps]
    if len(gradients) == len(steps) != len(group):
        gradients = [gradients[steps.index(at)] if at in steps else None for at in range(len(group))]
    given = [zero if (x := gradients[at]) is None else x for at in steps]
    if any(x.shape != shape for x in given):
        return None
    masks = [group[at].covered for at in steps]
    if any(mask is not None for mask in masks):
        # Each rank's optimizer has some of it: put together, and nothing is said of what no rank has.
        full = torch.ones(shape, dtype=torch.bool)
        parts = [full if mask is None else mask for mask in masks]
        together, counts = zero.double(), torch.zeros(shape)
        for x, own_part in zip(given, parts, strict=True):
            together = together + torch.where(own_part, x.double(), 0.0)
            counts = counts + own_part
        given = [together / counts.clamp(min=1)]
        true = torch.where(counts > 0, true, torch.zeros_like(true))
    elif len(steps) < len(group):
        own = [true / len(steps)] * len(steps)
    return _compared(name, group, true, given, own, shared, noise)


def _compared(
    name: str,
    group: list[Part],
    true: Tensor,
    given: list[Tensor],
    trues: list[Tensor],
    shared: Callable[[list[Part]], bool],
    noise: float,
) -> Got:
    tol = tolerance(group[0].param.value)
    true, given, trues = as_real(true), [as_real(x) for x in given], [as_real(x) for x in trues]
    if not all(bool(x.isfinite().all()) for x in (true, *given, *trues)):
        return Got(name, group, true, given, 0.0, "infinite")
    # Where the ranks' parts take each other away, as in front of a batch norm, what remains is their rounding.
    noise = max(noise, 1e-5 * max(_largest(x) for x in trues))
    if max(_largest(x) for x in (true, *given)) <= noise:
        return Got(name, group, true, given, 1.0, "unused")
    if not all(near(x, given[0], tol) for x in given):
        own = _own_ratio(given, trues, tol) if is_constant(group[0].param.value) else None
        if own is not None and not shared(group):
            return Got(name, group, true, given, own, "ambiguous")
        return Got(name, group, true, given, _mean_ratio(given, true), "apart")
    if not any(part.ids for part in group):  # what it has to do with the loss is not known
        return Got(name, group, true, given, 1.0, "unknown")
    ratio = ratio_of(given[0], true, tol / 10 if group[0].exact else tol)
    if ratio is None:
        return Got(name, group, true, given, _mean_ratio(given, true), "bent")
    return Got(name, group, true, given, ratio, "right")


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _own_ratio(given: Sequence[Tensor], trues: Sequence[Tensor], tol: float) -> float | None:
    """What ranks that were given the same have of the gradient of a parameter of their own; None if it is not that."""
    ratios = list[float]()
    for alike in grouped(range(len(given)), lambda a, b: near(given[a], given[b], tol)):
        ratio = ratio_of(given[alike[0]], torch.stack([trues[at] for at in alike]).sum(0), tol)
        if ratio is None:
            return None
        ratios.append(ratio)
    return ratios[0]


def ratio_of(x: Tensor, true: Tensor, tol: float) -> float | None:
    """How many times the true one x is; None where it is not proportional."""
    square = float((true * true).sum())
    if square == 0:
        return None if float(x.abs().max()) > 0 else 1.0
    ratio = float((x * true).sum()) / square
    return ratio if near(x, ratio * true, 10 * tol) else None


def _mean_ratio(given: Sequence[Tensor], true: Tensor) -> float:
    square = float((true * true).sum())
    return float((torch.stack(list(given)).mean(0) * true).sum()) / square if square else 0.0


def _is_shared(segment: Segment, again: Again, group: Sequence[Part], by_name: dict[str, list[Part]]) -> bool:
    """Whether a parameter that begins as one number is one parameter of the ranks, and not a part on each.

    It is where there is only one number of it, where it is a norm's, where all of the model is replicated, and where it
    is added to a sum over the ranks. It is not where the ranks are stages of a pipeline, or where each rank's optimizer
    steps it together with parameters of that rank alone.
    """
    part = group[0]
    ranks = {each.rank for each in group}
    if _are_own(segment, again, group, by_name):
        return False
    if part.param.value.numel() == 1 or any(ranks.issubset(s.wrapped) for s in segment.steps[part.rank]):
        return True
    summed: set[int] = set()
    for event in segment.parts[part.rank]:
        if isinstance(event, Sent) and event.kind in ("all_reduce", "reduce_scatter"):
            summed.update(event.outs)
        elif isinstance(event, Alias) and event.of in summed:
            summed.add(event.id)
        elif isinstance(event, Op):
            name, taken = event.base, refs(event)
            if set(part.ids).intersection(taken):
                if "norm" in name:
                    return True
                if name in ("add", "add_") and summed.intersection(taken):
                    return True
            if (name in MOVES or name in ("add", "add_")) and summed.intersection(taken):
                summed.update(event.outs)
    others = [
        [each for each in parts if each.rank == part.rank] for parts in by_name.values() if not _alike(parts)
    ]
    return _scales_norm(
        segment.parts[part.rank], part.ids, [n for own in others for each in own for n in each.ids]
    )


def _alike(parts: Sequence[Part]) -> bool:
    """Whether ranks have a parameter in common, as far as its value says."""
    first = parts[0].param.value
    same = (p.param.value.shape == first.shape and torch.equal(p.param.value, first) for p in parts)
    return len(parts) > 1 and all(same)


def _scales_norm(events: Sequence[Event], ids: Iterable[int], own: Iterable[int]) -> bool:
    """Whether a parameter multiplies what was divided by its root mean square, as in an RMSNorm of several operators.

    What is made of parameters that differ between ranks, or meets one before it is sent, may be some of the features or
    tokens, each with a scale of its own. A mean square that is summed over ranks is that of such features too.
    """
    mine, apart, means, roots, normed = set(ids), set(own), set[int](), set[int](), set[int]()
    scaled, summed = set[int](), set[int]()
    for event in events:
        if isinstance(event, Sent):
            summed.update(event.outs if means.intersection(event.ins) else ())
            for each in (apart, means, roots, normed, scaled):
                each.difference_update(event.outs)
        elif isinstance(event, (Alias, Op)) and (taken := set(refs(event))):
            outs = makes(event)
            name = event.base.rstrip("_") if isinstance(event, Op) else "alias"
            if taken & scaled and taken & apart:
                return False
            for each in (mine, means, roots, normed):
                if taken <= each:
                    each.update(outs)
            for each in (apart, scaled, summed):
                if taken & each:
                    each.update(outs)
            if name == "mul" and taken & mine and taken & normed:
                scaled.update(outs)
            elif name in ("mul", "div") and taken & roots and not taken & apart:
                normed.update(outs)
            if not taken & summed:
                if name in ("mean", "sum", "var", "var_mean"):
                    means.update(outs)
                if "norm" in name or name == "std" or (name in ("rsqrt", "sqrt", "pow") and taken <= means):
                    roots.update(outs)
    return bool(scaled)


def _are_own(segment: Segment, again: Again, group: Sequence[Part], by_name: dict[str, list[Part]]) -> bool:
    """Whether a parameter that begins as one number is known to be one of each rank."""
    return _among_own(segment, group) or _are_stages(segment, again, group, by_name)


def _among_own(segment: Segment, group: Sequence[Part]) -> bool:
    """Whether it is one number, and all other parameters of its optimizers differ between the ranks.

    Those that begin as one number may be equal. A longer one may be a norm's, beside shards.
    """
    if group[0].param.value.numel() > 1:
        return False
    others = []
    for part in group:
        value, steps = part.param.value, segment.steps[part.rank]
        values = [[param.value for param in step.params] for step in steps]
        of_it = [own for own in values if any(x.shape == value.shape and torch.equal(x, value) for x in own)]
        others.append([x for own in of_it for x in own if not is_constant(x)])
    return bool(others[0]) and all(
        any(x.shape != column[0].shape or not torch.equal(x, column[0]) for x in column)
        for column in itertools.zip_longest(*others, fillvalue=torch.empty(0))
    )


def _are_stages(
    segment: Segment, again: Again, group: Sequence[Part], by_name: dict[str, list[Part]]
) -> bool:
    """Whether ranks are stages of a pipeline, each with a parameter of its own that begins as one number.

    They are where each rank but one uses the parameter on what it received from another one, which used its own
    parameter before it sent that, and where other parameters of one name differ between them. Ranks that hold parts
    of one batch use a parameter on their own part first; ranks that hold parts of a sequence have all parameters alike.
    """
    made = {part.rank: behind(segment.parts[part.rank], part.ids) for part in group}
    fed = 0
    for part in group:
        received = {
            number
            for sender, sent, receiver, message in again.messages
            if receiver == part.rank != sender and not made.get(sender, set()).isdisjoint(sent.ins)
            for number in message.outs
        }
        events = segment.parts[part.rank]
        first = next((e for e in events if isinstance(e, Op) and not set(part.ids).isdisjoint(refs(e))), None)
        fed += first is not None and not behind(events, received).isdisjoint(refs(first))
    return fed == len(group) - 1 > 0 and any(
        x.shape != values[0].shape or not torch.equal(x, values[0])
        for parts in by_name.values()
        if (values := [part.param.value for part in parts if part.rank in made])
        for x in values
    )


def behind(events: Sequence[Event], numbers: Iterable[int]) -> set[int]:
    """The tensors that are made of some, on one rank."""
    made = set(numbers)
    for event in events:
        if isinstance(event, (Alias, Op)) and not made.isdisjoint(refs(event)):
            made.update(makes(event))
    return made


def _spread(name: str, group: list[Part], shared: Callable[[list[Part]], bool], noise: float) -> Got | None:
    """A DTensor: for each rank the gradient that its shards make up, beside what all uses of the parameter add.

    A mesh may hold several copies of it, along its replicated dims, and so may several meshes of one shape.
    """
    first = group[0].param
    params = {part.rank: part.param for part in group}
    grads = {
        rank: torch.zeros_like(param.value) if param.grad is None else param.grad
        for rank, param in params.items()
    }
    trues = {part.rank: part.true for part in group if part.true is not None}
    if not len(params) == len(trues) == len(group):
        return None
    given = [
        _assembled(param, param.grad_placements or param.placements, grads, rank)
        for rank, param in params.items()
    ]
    if all(tuple(x.shape) == first.whole for x in trues.values()) and any(
        kind == "shard" for kind, _ in first.placements
    ):
        # Gathered before it is used: each rank's use adds to the whole.
        uses: list[Tensor | None] = list(trues.values())
    else:
        parts = [(kind if kind == "shard" else "partial", dim) for kind, dim in first.placements]
        meshes = {tuple(_flattened(param.mesh)): rank for rank, param in params.items()}
        uses = [_assembled(params[rank], parts, trues, rank) for rank in meshes.values()]
    known, used = [x for x in given if x is not None], [x for x in uses if x is not None]
    if len(known) < len(given) or len(used) < len(uses):
        return None
    true = torch.stack(used).sum(0)
    if any(x.shape != true.shape for x in known):
        return None
    one_mesh = len({str(param.mesh) for param in params.values()}) == 1
    return _compared(
        name,
        group,
        true,
        known,
        [true / len(known)] * len(known),
        lambda group: one_mesh or shared(group),  # copies on one mesh are declared to be one parameter
        noise,
    )


def _assembled(
    param: Param, placements: Sequence[tuple[str, int]], locals_: dict[int, Tensor], rank: int
) -> Tensor | None:
    """The whole tensor of its parts along each mesh dim, from the last; of copies the one that a rank has."""
    mesh = torch.tensor(param.mesh)
    found = (mesh == rank).nonzero()
    own = found[0].tolist() if len(found) else [0] * mesh.dim()

    def along(index: tuple[int, ...], dim: int) -> Tensor | None:
        if dim == mesh.dim():
            return locals_.get(int(mesh[index]))
        kind, cut = placements[dim]
        if kind == "replicate":
            return along((*index, own[dim]), dim + 1)
        parts = [along((*index, at), dim + 1) for at in range(mesh.shape[dim])]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            return None
        if kind == "shard":
            return torch.cat(known, cut) if all(x.dim() > cut for x in known) else None
        return torch.stack(known).sum(0)

    try:
        return along((), 0)
    except (RuntimeError, IndexError):
        return None


def _flattened(mesh: Any) -> list[int]:
    return [mesh] if isinstance(mesh, int) else list(itertools.chain.from_iterable(map(_flattened, mesh)))

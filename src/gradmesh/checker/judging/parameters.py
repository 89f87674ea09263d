"""What each parameter got at a step, beside what it should have got."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradmesh.checker.judging.segments import Segment
from gradmesh.checker.judging.truth import Truth, in_double, near
from gradmesh.checker.recording.params import nameless
from gradmesh.checker.recording.tape import Alias, Given, Op, Param, Sent, refs

__all__ = ["Got", "Part", "gotten", "is_constant", "tolerance"]

_ROUNDING = 1e-5
"""How much of the terms of a sum may remain where they take each other away."""


@dataclass
class Part:
    """A parameter on one rank.

    Attributes:
        rank: which.
        param: what the step found.
        ids: its numbers on the rank's tape.
        true: what the rank's own use of it adds to the gradient; None where it is not used.
    """

    rank: int
    param: Param
    ids: tuple[int, ...]
    true: Tensor | None


@dataclass
class Got:
    """A parameter that is one on some ranks, which have the same value of it.

    Attributes:
        name: of it.
        parts: of the ranks.
        true: its whole gradient.
        got: what each rank's optimizer was given.
        ratio: what was given, in units of the true one, where it is the same on the ranks and proportional.
        kind: "right" (proportional), "apart" (each rank has another), "bent" (the same, and not proportional),
            "unused" (nothing is to be had), "infinite" (there is a NaN or an infinity, which compares with nothing),
            "ambiguous" (whether it is one parameter cannot be told).
    """

    name: str
    parts: list[Part]
    true: Tensor
    got: list[Tensor]
    ratio: float
    kind: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have it."""
        return tuple(part.rank for part in self.parts)


def tolerance(x: Tensor) -> float:
    """How far apart two gradients of this dtype may be."""
    return {torch.float64: 1e-7, torch.float32: 2e-3}.get(x.dtype, 6e-2)


def gotten(segment: Segment, truth: Truth, scales: Sequence[dict[str, float]]) -> list[Got]:
    """Each parameter of a step; gradients are divided by what the program multiplied them by."""
    by_name: dict[str, list[Part]] = {}
    for rank, steps in enumerate(segment.steps):
        leaves = {
            event.name: event.id for event in segment.parts[rank] if isinstance(event, Given) and event.leaf
        }
        for param in (param for step in steps for param in step.params):
            name = param.name
            ids = tuple({number for number in (param.id, leaves.get(name)) if number is not None})
            trues = [x for number in ids if (x := truth.gradients[rank].get(number)) is not None]
            factor = next(
                (scales[rank][key] for key in (name, *map(nameless, ids)) if key in scales[rank]), 1.0
            )
            if factor not in (0.0, 1.0) and param.grad is not None:
                param = replace(param, grad=param.grad / factor)
            true = torch.stack(trues).sum(0) if trues and len({x.shape for x in trues}) == 1 else None
            by_name.setdefault(name, []).append(Part(rank, param, ids, true))
    # What is nothing but rounding, as the gradient of what a norm takes away, is compared with nothing.
    trues = [part.true for parts in by_name.values() for part in parts if part.true is not None]
    largest = max((float(true.abs().max()) for true in trues if true.numel()), default=0.0)
    noise = max(largest * 1e-6, 1e-12)
    found = []
    for name, parts in by_name.items():
        for group in _groups(parts):
            judged = _judged(name, group, lambda group: _is_shared(segment, group), noise)
            if judged is not None:
                found.append(judged)
    return found


def _groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts whose values are the same: one parameter."""
    groups: list[list[Part]] = []
    for part in parts:
        for group in groups:
            first = group[0].param
            if part.param.whole or (
                part.param.value.shape == first.value.shape and torch.equal(part.param.value, first.value)
            ):
                group.append(part)
                break
        else:
            groups.append([part])
    return groups


def _judged(name: str, group: list[Part], shared: Callable[[list[Part]], bool], noise: float) -> Got | None:
    given: list[Tensor]
    if group[0].param.whole:
        return _spread(name, group, shared, noise)
    trues = [part.true for part in group]
    shape, dtype = group[0].param.value.shape, group[0].param.value.dtype
    if any(true is not None and true.shape != shape for true in trues):
        return None
    used = [true for true in trues if true is not None]
    true = torch.stack(used).sum(0) if used else torch.zeros(shape, dtype=dtype)
    given = [torch.zeros(shape, dtype=dtype) if p.param.grad is None else p.param.grad for p in group]
    if any(x.shape != shape for x in given):
        return None
    own = [torch.zeros_like(true) if t is None else t for t in trues]
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
    true, given, trues = in_double(true), [in_double(x) for x in given], [in_double(x) for x in trues]
    if not all(bool(x.isfinite().all()) for x in (true, *given, *trues)):
        return Got(name, group, true, given, 0.0, "infinite")
    # Where the ranks' parts take each other away, as in front of a batch norm, what remains is their rounding.
    noise = max(noise, _ROUNDING * max(_largest(x) for x in trues))
    if max(_largest(x) for x in (true, *given)) <= noise:
        return Got(name, group, true, given, 1.0, "unused")
    if not all(near(x, given[0], tol) for x in given):
        kind = "apart"
        if is_constant(group[0].param.value) and _is_parted(given, trues, tol) and not shared(group):
            kind = "ambiguous"
        return Got(name, group, true, given, _mean_ratio(given, true), kind)
    ratio = ratio_of(given[0], true, tol)
    if ratio is None:
        return Got(name, group, true, given, _mean_ratio(given, true), "bent")
    return Got(name, group, true, given, ratio, "right")


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _is_parted(given: Sequence[Tensor], trues: Sequence[Tensor], tol: float) -> bool:
    """Whether ranks that were given the same have a parameter of their own, whose whole gradient that is."""
    left = list(range(len(given)))
    while left:
        alike = [at for at in left if near(given[at], given[left[0]], tol)]
        whole = torch.stack([trues[at] for at in alike]).sum(0)
        if ratio_of(given[alike[0]], whole, tol) is None:
            return False
        left = [at for at in left if at not in alike]
    return True


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


def _is_shared(segment: Segment, group: Sequence[Part]) -> bool:
    """Whether a parameter that begins as one number is one parameter of the ranks, and not a part on each.

    It is where there is only one number of it, where it is a norm's, where all of the model is replicated, and where it
    is added to a sum over the ranks.
    """
    part = group[0]
    ranks = {each.rank for each in group}
    if part.param.value.numel() == 1 or any(ranks.issubset(s.wrapped) for s in segment.steps[part.rank]):
        return True
    summed: set[int] = set()
    for event in segment.parts[part.rank]:
        if isinstance(event, Sent) and event.kind in ("all_reduce", "reduce_scatter"):
            summed.update(event.outs)
        elif isinstance(event, Alias) and event.of in summed:
            summed.add(event.id)
        elif isinstance(event, Op):
            name, taken = event.name.split(".")[1], refs(event)
            if set(part.ids).intersection(taken):
                if "norm" in name:
                    return True
                if name in ("add", "add_") and summed.intersection(taken):
                    return True
            if name in _SAME_NUMBERS and summed.intersection(taken):
                summed.update(event.outs)
    return False


_SAME_NUMBERS = {
    "add",
    "add_",
    "chunk",
    "slice",
    "split",
    "view",
    "_unsafe_view",
    "clone",
    "alias",
    "detach",
    "transpose",
    "t",
    "permute",
    "unsqueeze",
    "expand",
}


def is_constant(x: Tensor) -> bool:
    """Whether all its entries are one number."""
    return x.numel() > 0 and bool((x == x.flatten()[0]).all())


def _spread(name: str, group: list[Part], shared: Callable[[list[Part]], bool], noise: float) -> Got | None:
    """A DTensor: its gradient's parts put together, beside what all uses of it add."""
    first = group[0].param
    values = {part.rank: part.param for part in group}
    flat = _flattened(first.mesh)
    if any(rank not in values for rank in flat):
        return None
    whole_grads = {r: p.grad for r, p in values.items()}
    if any(x is None for x in whole_grads.values()):
        return None
    got = _assembled(first, first.grad_placements, {r: x for r, x in whole_grads.items() if x is not None})
    trues = {part.rank: part.true for part in group if part.true is not None}
    if got is None or len(trues) != len(group):
        return None
    if all(tuple(x.shape) == first.whole for x in trues.values()) and not _is_whole(first):
        # Gathered before it is used: each rank's use adds to the whole.
        true: Tensor | None = torch.stack(list(trues.values())).sum(0)
    else:
        parts = [(kind if kind == "shard" else "partial", dim) for kind, dim in first.placements]
        true = _assembled(first, parts, trues)
    if true is None or true.shape != got.shape:
        return None
    own = [in_double(x) for x in whole_grads.values() if x is not None]
    everywhere = all(kind == "replicate" for kind, _ in first.grad_placements)
    if everywhere and not all(near(x, own[0], tolerance(first.value)) for x in own):
        return Got(name, group, in_double(true), own, 0.0, "apart")  # said to be the same, and is not
    return _compared(name, group, true, [got], [true], shared, noise)


def _is_whole(param: Param) -> bool:
    return all(kind != "shard" for kind, _ in param.placements)


def _assembled(
    param: Param, placements: Sequence[tuple[str, int]], locals_: dict[int, Tensor]
) -> Tensor | None:
    """The whole tensor of its parts along each mesh dim, from the last."""
    mesh = torch.tensor(param.mesh)

    def along(index: tuple[int, ...], dim: int) -> Tensor | None:
        if dim == mesh.dim():
            return locals_.get(int(mesh[index]))
        parts = [along((*index, at), dim + 1) for at in range(mesh.shape[dim])]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            return None
        kind, cut = placements[dim]
        if kind == "shard":
            return torch.cat(known, cut) if all(x.dim() > cut for x in known) else None
        return torch.stack(known).sum(0) if kind == "partial" else known[0]

    try:
        return along((), 0)
    except (RuntimeError, IndexError):
        return None


def _flattened(mesh: Any) -> list[int]:
    return [mesh] if isinstance(mesh, int) else list(itertools.chain.from_iterable(map(_flattened, mesh)))

"""Optimizers whose settings differ between ranks that step copies of one parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from gradmesh.checker.findings import Finding
from gradmesh.checker.judging.context import finding, with_text
from gradmesh.checker.judging.truth import near
from gradmesh.checker.judging.values import sends_nothing
from gradmesh.checker.recording.tape import Param, Step, Tape

__all__ = ["settings_apart", "unused_plateaus"]

_SAME = 1e-6
"""Two settings are the same if they differ by no more than this part of them, as where float32 holds one."""


def settings_apart(tapes: Sequence[Tape]) -> list[Finding]:
    """The first step that ranks take with different settings; else a scheduler that they give different values.

    Only copies of one parameter are compared: what is the same on ranks before the step and gets the same gradient.
    Ranks whose parameters are their own, as shards and experts are, may have settings of their own. So may ranks that
    send nothing, which train models of their own.
    """
    if sends_nothing(tapes):
        return []
    for steps in zip(*map(_steps, tapes), strict=False):
        for group in _copies(steps):
            if (found := _apart(tapes, group, steps)) is not None:
                return [found]
    return _given_apart(tapes)


def unused_plateaus(tapes: Sequence[Tape]) -> list[str]:
    """A note for each `ReduceLROnPlateau` that was not stepped while the program was recorded."""
    if sends_nothing(tapes) or len(tapes) < 2:
        return []
    return [
        f"the ReduceLROnPlateau made at {with_text(tapes[0].places, plateau.made)} was not stepped within the "
        f"{tapes[0].steps} optimizer steps that were checked: whether every rank gives it the same value was not "
        "checked; --steps N checks more steps"
        for plateau in tapes[0].plateaus
        if not plateau.given and _is_of_copies(tapes, plateau.optimizer)
    ]


def _steps(tape: Tape) -> list[Step]:
    return [event for event in tape.events if isinstance(event, Step)]


def _copies(steps: Sequence[Step]) -> Iterator[list[tuple[int, Param]]]:
    """Parameters that are the same on some ranks, before a step, as their gradients are; each with its rank."""
    by_name: dict[str, list[tuple[int, Param]]] = {}
    for rank, step in enumerate(steps):
        for param in step.params:
            if param.grad is not None and param.settings is not None:
                by_name.setdefault(param.name, []).append((rank, param))
    for parts in by_name.values():
        groups: list[list[tuple[int, Param]]] = []
        for part in parts:
            group = next((each for each in groups if _is_copy(part[1], each[0][1])), None)
            if group is None:
                groups.append([part])
            else:
                group.append(part)
        yield from (group for group in groups if len({rank for rank, _ in group}) > 1)


def _is_copy(a: Param, b: Param) -> bool:
    if a.grad is None or b.grad is None or a.value.shape != b.value.shape or a.grad.shape != b.grad.shape:
        return False
    same = torch.equal(a.value, b.value) and bool(a.grad.any())
    return same and near(a.grad, b.grad, 1e-6)


def _apart(
    tapes: Sequence[Tape], group: Sequence[tuple[int, Param]], steps: Sequence[Step]
) -> Finding | None:
    every = [(rank, param.settings) for rank, param in group if param.settings is not None]
    keys = [key for key in every[0][1].numbers if all(key in each.numbers for _, each in every)]
    odd = [key for key in keys if not _same([each.numbers[key] for _, each in every])]
    if not odd:
        return None
    shown = "; ".join(
        f"{key} is {_listed([(rank, each.numbers[key]) for rank, each in every])}" for key in odd
    )
    name = group[0][1].name
    said = (
        f"{name} is the same on these ranks before the step and gets the same gradient, but the optimizers' settings "
        f"differ: {shown}"
    )
    rank, own = every[0]
    rates = all("lr" in key for key in odd)
    began = own.scheduled if rates and own.scheduled >= 0 else own.made
    places = tapes[rank].places
    at = with_text(places, steps[rank].site)
    return finding("GM206", said, at, with_text(places, began), [r for r, _ in every], name)


def _given_apart(tapes: Sequence[Tape]) -> list[Finding]:
    """A `ReduceLROnPlateau` that ranks give different values, whose optimizer steps copies of parameters."""
    for plateaus in zip(*(tape.plateaus for tape in tapes), strict=False):
        for given in zip(*(plateau.given for plateau in plateaus), strict=False):
            for group in _groups_of(tapes, plateaus[0].optimizer):
                values = [(rank, (given[rank][0],)) for rank in group]
                if _same([value for _, value in values]):
                    continue
                said = (
                    f"ReduceLROnPlateau.step() is given another value on each rank: {_listed(values)}. The learning "
                    "rates differ as soon as one rank's value stops to improve before the other's, and these ranks "
                    "step copies of the same parameters"
                )
                rank = group[0]
                at = with_text(tapes[rank].places, given[rank][1])
                began = with_text(tapes[rank].places, plateaus[rank].made)
                return [finding("GM206", said, at, began, group, "ReduceLROnPlateau")]
    return []


def _groups_of(tapes: Sequence[Tape], optimizer: int) -> Iterator[list[int]]:
    """The ranks whose optimizer of a number steps copies of a parameter."""
    for steps in zip(*map(_steps, tapes), strict=False):
        if all(step.optimizer == optimizer for step in steps):
            for group in _copies(steps):
                yield sorted({rank for rank, _ in group})
            return


def _is_of_copies(tapes: Sequence[Tape], optimizer: int) -> bool:
    return any(True for _ in _groups_of(tapes, optimizer))


def _same(values: Sequence[tuple[float, ...]]) -> bool:
    first = values[0]
    return all(
        len(each) == len(first)
        and all(
            math.isclose(a, b, rel_tol=_SAME) or a != a or b != b for a, b in zip(each, first, strict=True)
        )
        for each in values
    )


def _listed(values: Sequence[tuple[int, tuple[float, ...]]]) -> str:
    """Values with their ranks.

    >>> _listed([(0, (0.1,)), (1, (0.9, 0.99))])
    '0.1 on rank 0, (0.9, 0.99) on rank 1'
    """
    shown = [
        f"{value[0]:.6g}" if len(value) == 1 else f"({', '.join(f'{x:.6g}' for x in value)})"
        for _, value in values
    ]
    listed = ", ".join(f"{text} on rank {rank}" for text, (rank, _) in zip(shown[:4], values, strict=False))
    return listed + (f" and others on {len(values) - 4} more ranks" if len(values) > 4 else "")

"""Runs in which one collective's gradient is changed, to see whether that makes every gradient right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from gradmesh.call_sites import show_site
from gradmesh.verify.gradients.calls import Recorder
from gradmesh.verify.gradients.changes import (
    CONJ,
    DOUBLE,
    GATHERED,
    NEXT,
    PART,
    SUM,
    At,
    Local,
    Place,
    Places,
    raw_text,
)
from gradmesh.verify.gradients.measure import Options, exchanged, prepared
from gradmesh.verify.gradients.program import Program

__all__ = ["Found", "Trials", "Tried", "investigate"]

_MOST = 24
"""How many collectives are tried at most: a change is a run of the program."""


@dataclass(frozen=True)
class Found:
    """What a recorded run found at a place.

    Attributes:
        place: where.
        ours: whether it is a verb of gradmesh.
        raw: whether it is a collective of torch.distributed that no Function wraps.
        handed_grad: whether that was handed a tensor with a history.
        inside: the collectives in its forward and backward, by their lines.
        back: whether one ran in its backward.
    """

    place: Place
    ours: bool
    raw: bool
    handed_grad: bool
    inside: tuple[str, ...]
    back: bool


@dataclass
class Tried:
    """A change at a place, the gradients that it leaves on this rank, and what it replaced there, if that is known."""

    place: Place
    how: str
    gradients: dict[str, Tensor | None]
    local: Local | None
    only: int | None = None
    """The rank that alone changes it; None: all do."""


@dataclass
class Trials:
    """All of a rank: the collectives, and what changes of them come to."""

    found: list[Found] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)


def investigate(
    fn: Callable[..., Tensor], inputs: Callable[[int], object], options: Options, one_by_one: bool = False
) -> Trials:
    """Record a run, and run again with each collective's gradient changed.

    Args:
        fn: the program.
        inputs: what each rank is given.
        options: of the check.
        one_by_one: change it on one rank after another, by a factor, in place of all ranks at once.
    """
    program, _, _ = prepared(fn, inputs, options)
    result = Trials()
    try:
        recorder, _ = _run(program, None)
        result.found, ran = _seen(recorder)
        everyones = exchanged((result.found, ran))
        same_order = all(each[1] == ran for each in everyones)
        places = {found.place: found for ranks, _ in everyones for found in ranks}
        ways: list[tuple[str, int | None]]
        complex_leaf = any(leaf.base.is_complex() for leaf in program.inputs.leaves.values())
        for place, found in list(places.items())[:_MOST]:
            if one_by_one:
                ways = [] if found.raw else [(DOUBLE, only) for only in range(dist.get_world_size())]
            else:
                everywhere = _raw_everywhere(place, everyones)
                tried = _ways(found, same_order and place in ran, complex_leaf, everywhere)
                ways = [(how, None) for how in tried]
            for how, only in ways:
                change = At(place, how, only)
                _, gradients = _run(program, change)
                result.tried.append(Tried(place, how, gradients, change.local, only))
    finally:
        program.inputs.restore()
    return result


def _ways(found: Found, alike: bool, complex_leaf: bool, everywhere: bool) -> list[str]:
    """What is tried there; what sends only where every rank does it in the same order."""
    if found.raw:
        if not everywhere:
            return []
        return {"all_reduce": [SUM], "all_gather": [GATHERED], "all_gather_into_tensor": [GATHERED]}.get(
            found.place.text.split()[0].rpartition(".")[2], []
        )
    conjugate = [CONJ] if complex_leaf else []
    further = [NEXT.format(by=by) for by in range(1, dist.get_world_size())]
    return [DOUBLE, *conjugate, *([PART, SUM, *further] if alike else [])]


def _raw_everywhere(place: Place, everyones: list[tuple[list[Found], list[Place]]]) -> bool:
    return all(any(found.place == place and found.raw for found in ranks) for ranks, _ in everyones)


def _seen(recorder: Recorder) -> tuple[list[Found], list[Place]]:
    places, result, by_number = Places(), [], {}
    for node in recorder.nodes:
        place = by_number[node.number] = places.of(node.text)
        if not node.collective:
            continue
        inner = [called for called in recorder.called if called.inside == node.number]
        lines = dict.fromkeys(
            f"{called.op}{' in backward' if called.backward else ''} {show_site(called.site)}"
            for called in inner
        )
        back = any(called.backward for called in inner)
        result.append(Found(place, node.ours, False, False, () if node.ours else tuple(lines), back))
    raw = Places()
    for called in recorder.raw:
        result.append(Found(raw.of(raw_text(called)), False, True, called.handed_grad, (), False))
    return result, [by_number[number] for number in recorder.ran]


def _run(program: Program, change: At | None) -> tuple[Recorder, dict[str, Tensor | None]]:
    recorder = Recorder(change)
    with recorder.listening():
        gradients = program.gradients(keep=None if change is None else change.after)
    return recorder, gradients

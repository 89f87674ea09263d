"""Reruns the program with one collective's gradient changed, to see whether that fixes every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from gradmesh._util.call_sites import show_site
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
"""The maximum number of collectives to try, since each change needs a run of the program."""


@dataclass(frozen=True)
class Found:
    """A collective in a recorded run.

    Attributes:
        place: its place.
        ours: whether it is a gradmesh verb.
        raw: whether it is a torch.distributed collective outside of Functions.
        handed_grad: whether an argument of a raw collective requires grad.
        inside: the collectives in its forward and backward, with their call sites.
        back: whether a collective ran in its backward.
    """

    place: Place
    ours: bool
    raw: bool
    handed_grad: bool
    inside: tuple[str, ...]
    back: bool


@dataclass
class Tried:
    """A change at a place, this rank's gradients with it, and the gradient that it replaced, if known."""

    place: Place
    how: str
    gradients: dict[str, Tensor | None]
    local: Local | None
    only: int | None = None
    """The only rank that changes it; None: all ranks."""


@dataclass
class Trials:
    """The collectives and trials of a rank."""

    found: list[Found] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)


def investigate(
    fn: Callable[..., Tensor], inputs: Callable[[int], object], options: Options, one_by_one: bool = False
) -> Trials:
    """Record a run, and run again with each collective's gradient changed.

    Args:
        fn: the program.
        inputs: returns each rank's inputs.
        options: the options of the check.
        one_by_one: scale it on one rank at a time instead of on all ranks at once.
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
    """The changes to try; those that communicate only if every rank runs its nodes in the same order."""
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
    with recorder.recording():
        gradients = program.gradients(keep=None if change is None else change.after)
    return recorder, gradients

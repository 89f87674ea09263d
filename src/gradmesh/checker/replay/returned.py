"""Collectives on detached copies, whose own part a program puts back: it means the result to have a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from gradmesh.checker.recording.tape import Alias, Event, Op, Sent, refs

__all__ = ["put_back"]

_SAME = {
    "view",
    "_unsafe_view",
    "clone",
    "detach",
    "alias",
    "transpose",
    "t",
    "permute",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "split",
    "split_with_sizes",
    "unbind",
    "expand",
}
_SCALED = {"div", "div_", "mul", "mul_"}
_SUMS = {"add", "add_", "sub", "sub_"}
_PARTS = {"cat", "stack", "copy_", "index_put_", "select_scatter", "slice_scatter"}


def put_back(events: Sequence[Event]) -> frozenset[int]:
    """The results of `detach` that stand for the tensor itself.

    A program gathers, or sums, a detached copy of a tensor and puts the tensor in the place of its own part:
    `parts[rank] = x` before `cat`, or `x + (total - x.detach())`. The result has the value of the collective of the
    tensor, and that is what a gradient is compared with.
    """
    source: dict[int, int] = {}
    detached: dict[int, list[int]] = {}
    made: dict[int, set[int]] = {}
    found: set[int] = set()
    for event in events:
        if isinstance(event, Alias):
            if event.of in source:
                source[event.id] = source[event.of]
            made[event.id] = set(made.get(event.of, ()))
        elif isinstance(event, Sent):
            if event.followed and event.verb is None and event.kind.startswith(("all_gather", "all_reduce")):
                for number in event.outs:
                    made[number] = {source[n] for n in event.ins if n in source}
        elif isinstance(event, Op) and event.call is None:
            name, taken = event.name.split(".")[1], refs(event)
            if name == "detach" and taken[0] not in source:
                detached.setdefault(taken[0], []).extend(event.outs)
                source.update(dict.fromkeys(event.outs, taken[0]))
                continue
            origins = {source[n] for n in taken if n in source and not made.get(n)}
            of = set[int]().union(*(made.get(n, set()) for n in taken))
            plain = [n for n in taken if not made.get(n) and n not in source]
            if name in _PARTS or name in _SUMS:
                found |= of.intersection(plain)
            if of and (
                name in _SAME or name in _SCALED or (name in _SUMS and origins <= of) or name in _PARTS
            ):
                for number in event.outs:
                    made[number] = made.get(number, set()) | of
            elif name in _SAME and len(origins) == 1 and taken:
                source.update(dict.fromkeys(event.outs, next(iter(origins))))
    return frozenset(number for x in found for number in detached.get(x, ()))

"""The page of the docs. Every figure on it comes from the run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.speed.contenders import FLOOR_NAME
from benchmarks.speed.overhead import overheads
from benchmarks.speed.results import Key, Results
from benchmarks.speed.tables import NOTES, memory_rows, overhead_rows, speedup_rows
from benchmarks.speed.targets import targets
from benchmarks.speed.tasks import WAYS, said

__all__ = ["markdown"]


def markdown(results: Results, picture: str | None) -> str:
    """The page.

    Args:
        results: the run.
        picture: the picture, as a link from the page; None if there is none.
    """
    machine = ", ".join(f"{name} {text}" for name, text in results.machine.items())
    promises = [[target.promise, target.figure, target.verdict] for target in targets(results)]
    parts = [
        "# Speed of the collectives: shm, Gloo, threads and MPI, beside other systems",
        f"Written by `{results.command}`. Measured with {machine}.",
        "\n".join(f"* {note}" for note in NOTES),
    ]
    if picture is not None:
        parts.append(
            f"![Time of a call on {max(results.ranks)} ranks, over the floor, by message size]({picture})"
        )
    parts += ["## Targets", _rows([["target", "measured", ""], *promises])]
    parts += [
        "## gradmesh on shm, against the fastest peer on gloo and over the floor",
        "The peers are the systems with gradients: torch.distributed.nn.functional, functional collectives, DTensor, "
        "spmd_types.",
        _rows(speedup_rows(results)),
        "## Overhead over the raw call",
        "At the smallest size: the median difference over the rounds, and the ratio of the medians.",
        _rows(overhead_rows(overheads(results))),
        "## Memory",
        "The largest growth of a rank's process over one forward and one backward, results included, and its ratio to "
        "the size of the result.",
        _rows(memory_rows(results.memory)),
        "## Medians",
        "In microseconds.",
    ]
    for ranks in results.ranks:
        for verb in results.verbs:
            for way in WAYS:
                parts += [f"### {verb} {way}, {ranks} ranks", _rows(_medians(results, ranks, verb, way))]
    if results.left_out:
        parts += ["## Left out", "\n".join(f"* {name}: {why}" for name, why in results.left_out.items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _medians(results: Results, ranks: int, verb: str, way: str) -> list[list[str]]:
    rows = [["system", *(said(size) for size in results.sizes)]]
    for name in sorted(results.contenders, key=lambda name: name != FLOOR_NAME):
        medians = [results.median(Key(ranks, verb, way, size), name) for size in results.sizes]
        if any(median is not None for median in medians):
            rows.append([name, *("" if median is None else f"{1e6 * median:.1f}" for median in medians)])
    return rows


def _rows(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if body else ""

"""The tables of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Compare, Measurement

from benchmarks.speed.contenders import FLOOR_NAME
from benchmarks.speed.overhead import Overhead, overheads
from benchmarks.speed.results import Cell, Memory, Results
from benchmarks.speed.targets import OURS, against_peers, targets
from benchmarks.speed.tasks import said

__all__ = ["NOTES", "compared", "memory_rows", "overhead_rows", "show", "speedup_rows"]

NOTES = (
    "A time is the median over the rounds of a call's time on the slowest rank. Each round times every system once.",
    "A size is that of one rank's shard: the operand of all_gather and the result of reduce_scatter; an all_to_all has "
    "at least one element for each rank. float32, one thread per rank.",
    "Forward builds the graph; backward is torch.autograd.grad alone. torch.distributed and MPI have no gradient: "
    "their backward is the adjoint collective, into preallocated memory; all_reduce, broadcast and reduce in place.",
    "Floor: the copies and sums that every implementation needs, on all processes at once; for small messages, the "
    "time of one torch call.",
    "gradmesh compares the ranks' calls (the default GRADMESH_CHECK) and recycles the memory of large results "
    "(GRADMESH_RECYCLE). torch.distributed.nn.functional returns a list, which is concatenated. A system whose result "
    "is wrong on a small operand is left out.",
    "Memory is that of the call, with allocators that cache nothing from earlier calls, without the buffers of the "
    "process group or MPI.",
)

_STYLES = {"met": "green", "missed": "red", "not measured": "dim"}
_LEAST = 1e-6
"""Seconds below which torch's tables would be in nanoseconds."""


def show(results: Results, console: Console) -> None:
    """Print everything."""
    for table in compared(results.cells, coloured=console.is_terminal):
        console.out(table)
    _print(
        console,
        "gradmesh on shm, against the fastest peer on gloo, and over the floor",
        speedup_rows(results),
    )
    _print(
        console,
        "What a wrapper adds to the raw call, at the smallest size",
        overhead_rows(overheads(results)),
    )
    _print(
        console, "The most memory that a forward and a backward take on a rank", memory_rows(results.memory)
    )
    grid = Table(title="\nTargets", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("target", "measured", ""):
        grid.add_column(column)
    for target in targets(results):
        grid.add_row(target.promise, target.figure, f"[{_STYLES[target.verdict]}]{target.verdict}[/]")
    console.print(grid)
    for name, reason in results.left_out.items():
        console.print(f"Left out: {name}: {reason}", markup=False, soft_wrap=True)
    for note in NOTES:
        console.print(note, markup=False, style="dim", soft_wrap=True)
    console.print(", ".join(f"{name} {text}" for name, text in results.machine.items()), style="dim")


def compared(cells: Iterable[Cell], coloured: bool = False) -> list[str]:
    """The tables of torch, one for each verb, way and number of ranks."""
    groups: dict[tuple[int, str, str], list[Measurement]] = {}
    for cell in sorted(cells, key=lambda cell: cell.contender == FLOOR_NAME):
        if cell.contender != FLOOR_NAME or cell.median >= _LEAST:
            groups.setdefault((cell.ranks, cell.verb, cell.way), []).append(cell.measurement)
    found = []
    for group in groups.values():
        table = Compare(group)
        if coloured:
            table.colorize()
        found.append(str(table))
    return found


def speedup_rows(results: Results) -> list[list[str]]:
    """What gradmesh reaches on shm: against the fastest peer on gloo, and over the floor, by size."""
    rows = [["ranks", "verb", "way", *(said(size) for size in results.sizes)]]
    for key in results.keys(sizes=results.sizes[:1]):
        texts = []
        for at in (key._replace(size=size) for size in results.sizes):
            peer, floor = against_peers(results, at), results.ratio(at, OURS, FLOOR_NAME)
            faster = "" if peer is None else f"{peer[0]:.1f} x as fast"
            texts.append(", ".join(filter(None, (faster, "" if floor is None else f"{floor:.1f} floors"))))
        if any(texts):
            rows.append([str(key.ranks), key.verb, key.way, *texts])
    return rows


def overhead_rows(found: Sequence[Overhead]) -> list[list[str]]:
    """What each wrapper adds, in microseconds and as a ratio."""
    columns = list(dict.fromkeys((each.wrapper, each.backend) for each in found))
    rows = [["ranks", "verb", "way", *(f"{wrapper} ({backend})" for wrapper, backend in columns)]]
    table = {(each.key, each.wrapper, each.backend): each for each in found}
    for key in dict.fromkeys(each.key for each in found):
        cells = [table.get((key, *column)) for column in columns]
        texts = [
            "" if cell is None else f"{1e6 * cell.seconds:+.1f} us, x {cell.ratio:.2f}" for cell in cells
        ]
        rows.append([str(key.ranks), key.verb, key.way, *texts])
    return rows


def memory_rows(found: Sequence[Memory]) -> list[list[str]]:
    """The growth in MiB, and as a multiple of the result's bytes."""
    verbs = list(dict.fromkeys(each.verb for each in found))
    rows = [["ranks", "bytes a rank", "system", *verbs]]
    table = {(each.ranks, each.size, each.contender, each.verb): each for each in found}
    for ranks, size, name in dict.fromkeys((each.ranks, each.size, each.contender) for each in found):
        cells = [table.get((ranks, size, name, verb)) for verb in verbs]
        texts = [
            "" if cell is None else f"{cell.bytes / 2**20:.1f} MiB, x {cell.bytes / cell.output:.1f}"
            for cell in cells
        ]
        rows.append([str(ranks), said(size), name, *texts])
    return rows


def _print(console: Console, title: str, rows: Sequence[Sequence[str]]) -> None:
    head, *body = rows
    if body:
        grid = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for column in head:
            grid.add_column(column)
        for row in body:
            grid.add_row(*row)
        console.print(grid)

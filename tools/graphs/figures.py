"""The figures of docs/reports/graphs-scale.md, as measured on the machine that runs this.

python -m tools.graphs figures                                          # all of them
python -m tools.report docs/reports/graphs-scale.md bytes growth        # some, into the page
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gradmesh.nn.graph import by_space
from tools.graphs.contest import OURS, THEIRS, contest
from tools.graphs.geometry import crystal, slab
from tools.graphs.measure import Job, measured
from tools.graphs.prediction import (
    NETWORK,
    SIZES,
    Predicted,
    Work,
    at_scale,
    beside_measured,
    worked,
)
from tools.graphs.steps import KINDS, Cost, costs
from tools.graphs.traffic import NODES, counted, draw, exponent, grown
from tools.pages import mark, parser_of, put, table
from tools.simulator.shm import fit

NEIGHBOURS, WIDTH = 12, 16
PICTURE = "graphs.svg"


def _machine() -> str:
    version = torch.__version__.split("+")[0]
    cores = len(os.sched_getaffinity(0))
    return (
        f"torch {version}, {platform.machine()}, {cores} cores, which others used too; one thread a rank, and 4 ranks "
        f"share the {cores} cores"
    )


def exact(nodes: int = 20_000) -> str:
    """How far value, forces, stress and second derivatives are from one process."""
    parts = measured(Job(nodes, NEIGHBOURS, WIDTH, 5, True, "bisection", True), "threads")
    rows = [[name, f"{max(part.deviations[name] for part in parts):.1e}"] for name in parts[0].deviations]
    return (
        f"{nodes:,} nodes, {NEIGHBOURS} edges from the nearest of each, on 5 ranks of which the last owns nothing, in "
        "float64; the largest difference from one process on any rank, relative to the largest entry:\n\n"
        + table(" | deviation", rows)
    )


def sent(nodes: int = 20_000, backends: Sequence[str] = ("threads", "shm", "gloo")) -> str:
    """Bytes, as counted where they are sent."""
    points, cell = slab(nodes)
    graph, owner = crystal(points, cell, NEIGHBOURS), by_space(points, 4, cell=cell)
    found = {backend: counted(graph, owner, 4, WIDTH, backend) for backend in backends}
    first = found[backends[0]]
    rows = [
        [rank, each.rows, each.remote, *(f"{n:,}" for n in each.plan), *(f"{n:,}" for n in each.gather)]
        for rank, each in enumerate(first)
    ]
    equal = all(each.plan == each.expected for ranks in found.values() for each in ranks)
    shares = [sum(e.plan[half] for e in first) / sum(e.gather[half] for e in first) for half in (0, 1)]
    heads = "rank | rows sent | rows got | forward | backward | backward of both | gather | its backward"
    return (
        f"{nodes:,} nodes on 4 ranks by space, rows of {WIDTH} float64: bytes that a rank sends in an exchange, "
        f"counted on {', '.join(backends)}, and in a whole gather, on {backends[0]}:\n\n"
        + table(heads, rows)
        + f"\n\nOn every rank and backend the bytes of an exchange {'are' if equal else 'ARE NOT'} its rows x {WIDTH} "
        f"x 8: rows sent forward, rows got backward, and both in the backward of these. Of a whole gather they are "
        f"{shares[0]:.2%} forward and {shares[1]:.2%} backward."
    )


def _mib(cost: Cost, kind: str) -> str:
    return ", ".join(f"{size / 2**20:.0f}" for size in cost.memory[kind])


def steps(nodes: int = 20_000, rounds: int = 11, ranks: Sequence[int] = (1, 2, 4)) -> str:
    """Time and memory of a step."""
    pools = [("", 1), *((backend, size) for size in ranks for backend in ("shm", "gloo") if size > 1)]
    pools.insert(1, ("shm", 1))
    found = costs(nodes, NEIGHBOURS, WIDTH, pools, rounds)
    one, rows = found[0], []
    for cost in found:
        cells: list[object] = [cost.backend or "one process", cost.ranks]
        for kind in KINDS:
            ratios = [here / there for here, there in zip(cost.seconds[kind], one.seconds[kind], strict=True)]
            cells += [
                f"{1e3 * cost.median(kind):.0f}",
                f"{sorted(ratios)[len(ratios) // 2]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                _mib(cost, kind),
            ]
        rows.append(cells)
    heads = ["ranks on", "ranks"] + [
        f"{kind}: {what}" for kind in KINDS for what in ("ms", "of one process", "MiB of each rank")
    ]
    return (
        f"A step on {nodes:,} nodes, each rank in a process of its own: energy and forces, and training on forces. "
        f"{_machine()}. All pools of ranks in turn, {rounds} rounds: medians of the slowest rank, and the ratio to one "
        "process without a plan in the same round, median and range. Memory is the high-water mark of a process in its "
        "first steps above what it had before:\n\n" + table(heads, rows)
    )


def exchange(
    nodes: int = 20_000,
    rounds: int = 25,
    ranks: Sequence[int] = (2, 4),
    widths: tuple[int, ...] = (3, 16, 64),
) -> str:
    """The exchange beside the functional collectives."""
    points, cell = slab(nodes)
    graph, rows = crystal(points, cell, NEIGHBOURS), []
    best = dict.fromkeys(OURS, (0.0, ""))
    for size in ranks:
        for times in contest(graph.edges, by_space(points, size, cell=cell), size, widths, rounds, 20):
            cells: list[object] = [size, times.width, "yes" if times.whole else "no", times.half]
            cells += [f"{1e6 * times.median(way):.0f}" for way in (THEIRS, *OURS)]
            for way in OURS:
                low, middle, high = times.ratios(way)
                cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
                best[way] = max(
                    best[way], (middle, f"{size} ranks, {times.width} numbers a row, {times.half}")
                )
            rows.append(cells)
    heads = ["ranks", "row", "own rows too", "", THEIRS, *OURS, *(f"theirs / {way}" for way in OURS)]
    said = "; ".join(f"on {way} {ratio:.1f} ({where})" for way, (ratio, where) in best.items())
    return (
        f"The exchange of the slab of {nodes:,} nodes beside `all_to_all_single_autograd` of torch's functional "
        f"collectives on Gloo, with the rows picked before it and, where said, appended to this rank's rows. "
        f"{_machine()}. All ways in turn, {rounds} rounds of 20 calls: medians in us of the slowest rank, and "
        "the ratio in the same round, median and quartiles:\n\n"
        + table(heads, rows)
        + f"\n\nThe largest ratios are: {said}."
    )


def _predicted(kind: str, each: Predicted, work: Work, alone: int, *, weak: bool) -> list[object]:
    here, parts = work.of(each.own), 1 if weak else each.ranks
    cells: list[object] = [
        kind,
        "weak" if weak else "strong",
        each.ranks,
        f"{each.nodes:,}",
        f"{each.remote:,}",
    ]
    cells += [f"{1e3 * seconds:.2f}" for seconds in (here, each.direct, each.in_rounds)]
    for speed in (1, 100):
        for calls in (each.direct, each.in_rounds):
            cells.append(f"{work.of(alone) / speed / parts / (here / speed + calls):.0%}")
    return cells


def prediction(
    nodes: int = 20_000,
    per_rank: int = 5_000,
    ranks: Sequence[int] = (64, 1024),
    here: Sequence[int] = (1, 2, 4),
    rounds: int = 9,
    sizes: Sequence[int] = SIZES,
) -> str:
    """What the simulator says of more ranks, and how right it is here."""
    work = {kind: worked(kind, NEIGHBOURS, WIDTH, sizes) for kind in KINDS}
    rows = []
    for kind in KINDS:
        for weak in (False, True):
            for count in ranks:
                found = at_scale(per_rank * count if weak else nodes, NEIGHBOURS, WIDTH, count, kind)
                rows.append(_predicted(kind, found, work[kind], per_rank if weak else nodes, weak=weak))
    heads = ("step", "scaling", "ranks", "nodes", "rows got", "ms work", "ms calls, direct", "in rounds")
    efficient = [
        f"{name}: {how}"
        for name in ("efficient", "work 100 times as fast")
        for how in ("direct", "in rounds")
    ]
    link, _ = fit(2)
    compared = []
    for cost in costs(nodes, NEIGHBOURS, WIDTH, [("shm", size) for size in here], rounds):
        for kind in KINDS:
            seen, least = cost.median(kind), min(cost.seconds[kind])
            said = beside_measured(nodes, NEIGHBOURS, WIDTH, cost.ranks, kind, link, work[kind])
            cells = [f"{1e3 * seconds:.0f}" for seconds in (seen, least, said)]
            compared.append([kind, cost.ranks, *cells, f"{said / seen:.2f}", f"{said / least:.2f}"])
    measured_work = "; ".join(
        f"{kind} " + ", ".join(f"{1e3 * seconds:.1f} of {size:,}" for size, seconds in each.measured.items())
        for kind, each in work.items()
    )
    return (
        f"A step on slabs of {nodes:,} nodes in all (strong scaling) and {per_rank:,} a rank (weak), with a network of "
        f"{NETWORK.latency_us:g} us and {NETWORK.gbytes_per_s:g} GB/s between any two ranks. Work, in ms of CPU time "
        f"by nodes: {measured_work}.\n\n"
        + table((*heads, *efficient), rows)
        + f"\n\nCompared with this machine: {_machine()}. Medians and fastest steps of {rounds} on shm, in ms, and "
        f"what is predicted with a link that was fitted to all_reduce on 2 ranks ({link.call_us:.0f} us a call, "
        f"{link.gbytes_per_s:.2f} GB/s):\n\n"
        + table(
            "step | ranks | median | fastest | predicted | predicted / median | predicted / fastest",
            compared,
        )
    )


def growth(nodes: Sequence[int] = NODES, least: int = 20_000, picture: Path | None = None) -> str:
    """How bytes grow with the number of nodes."""
    found = grown(nodes, NEIGHBOURS, 8 * WIDTH, (4, 16))
    if picture is not None:
        draw(found, picture, least)
    rows = [
        [
            each.shape,
            each.ranks,
            *(f"{each.plan[size]:,} ({each.plan[size] / each.gather[size]:.1%})" for size in nodes),
            f"{exponent(each.plan, least):.3f}",
            f"{exponent(each.gather, least):.3f}",
        ]
        for each in found
    ]
    heads = ["", "ranks", *(f"{size:,}" for size in nodes), "exponent", "of a gather"]
    return (
        f"Bytes of an exchange of rows of {WIDTH} float64 by the number of nodes, over all ranks, and their share of a "
        f"whole gather; the exponents are fitted from {least:,} nodes on:\n\n" + table(heads, rows)
    )


PARTS: dict[str, Callable[..., str]] = {
    "exact": exact,
    "bytes": sent,
    "growth": growth,
    "exchange": exchange,
    "steps": steps,
    "prediction": prediction,
}
"""What measures each part of the page and puts it into words."""


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print parts of the page, or write them into it; the picture of growth goes beside it."""
    parser = parser_of(__doc__, "python -m tools.graphs figures")
    parser.add_argument("part", choices=[[], *PARTS], nargs="*", help="which; all by default")
    parsed = parser.parse_args(arguments)
    for part in parsed.part or PARTS:
        picture = {"picture": into.parent / PICTURE} if part == "growth" and into is not None else {}
        text = PARTS[part](**picture)
        print(f"{text}\n", flush=True)
        if into is not None:
            put(into, mark("docs/reports/graphs-scale.md", part), text)
    return 0

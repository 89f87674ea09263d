"""Measure attention over a cut sequence: memory of each rank, time, and what the ring hides of a slow wire.

python -m tools.attention                              # the tables
python -m tools.report docs/reports/attention.md       # into the page
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import gradmesh as gm
from gradmesh.verify import Link
from tools.attention.memory import peaks
from tools.attention.timing import times
from tools.attention.ways import Case
from tools.pages import mark, put

SIZES = (1, 2, 4)
KEPT = ("ring", "ring, zigzag", "ulysses", "gathered keys")
TIMED = ("ring", "ring, zigzag", "ulysses", "torch's ring", "torch's ring, balanced", "gathered keys")


def memory(case: Case) -> str:
    """A row for each way, with a rank's peak for each number of ranks."""
    peak: dict[tuple[str, int], float] = {}
    for size in SIZES:
        with gm.Ranks(size, backend="shm", prefix=False) as ranks:
            for way in (*KEPT, "dense") if size == 1 else KEPT:
                peak[way, size] = max(ranks.run(peaks, case, way))
    rows = [["MB above the inputs", *(f"W = {size}" for size in SIZES)]]
    rows.append(["one process, torch's fused kernel", f"{peak['dense', 1]:.0f}", *[""] * (len(SIZES) - 1)])
    rows += [[way, *(f"{peak[way, size]:.0f}" for size in SIZES)] for way in KEPT]
    return _table(rows)


def timed(case: Case, rounds: int) -> str:
    """A row for each way, with the fastest step of two ranks, with and without a causal mask."""
    with gm.Ranks(1, backend="gloo", prefix=False) as one, gm.Ranks(2, backend="gloo", prefix=False) as two:
        found = []
        for causal in (False, True):
            this = dataclasses.replace(case, causal=causal)
            best: dict[str, float] = {}
            for _ in range(rounds):  # one process and two in turn
                seen = dict(one.run(times, this, ("dense",), 1)[0])
                for mine in two.run(times, this, TIMED, 1):
                    seen |= {way: [max(seen.get(way, [0.0])[0], mine[way][0])] for way in mine}
                best = {way: min(best.get(way, 1e9), took[0]) for way, took in seen.items()}
            found.append(best)
    rows = [["ms of a step", "whole", "of one process", "causal", "of one process"]]
    for way in ("dense", *TIMED):
        cells = [[f"{1e3 * each[way]:.0f}", f"{each[way] / each['dense']:.2f}"] for each in found]
        rows.append(["one process, torch's fused kernel" if way == "dense" else way, *cells[0], *cells[1]])
    return _table(rows)


def hidden(case: Case, rounds: int) -> str:
    """What a wire with a delay adds to a step."""
    with gm.Ranks(2, backend="shm", prefix=False) as ranks:
        plain = _fastest(ranks, case, rounds, None)
        block = 4 * 2 * case.heads * case.length // 2 * case.features
        link = Link(200, float(f"{block / (0.2 * plain) / 1e9:.2g}"))
        slow = _fastest(ranks, case, rounds, link)
    calls = 4 * (200e-6 + block / (link.gbytes_per_s * 1e9))
    return (
        f"The ring on 2 ranks takes {1e3 * plain:.0f} ms a step on the wire as it is, and {1e3 * slow:.0f} ms on one "
        f"of {1e3 * link.gbytes_per_s:.0f} MB/s, where its 4 calls take {1e3 * calls:.0f} ms: "
        f"{100 * (1 - (slow - plain) / calls):.0f} % of them are hidden. The last one cannot be hidden: it returns "
        "the gradients of the local keys."
    )


def _fastest(ranks: gm.Ranks, case: Case, rounds: int, link: Link | None) -> float:
    found = ranks.run(times, case, ("ring",), rounds, link)
    return min(max(each) for each in zip(*(mine["ring"] for mine in found), strict=True))


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="steps of each way")
    parsed = parser.parse_args(arguments)
    case = Case(parsed.length, parsed.heads)
    what = (
        f"torch {torch.__version__.split('+')[0]}, {platform.machine()}, {os.cpu_count()} cores, ranks with one thread "
        f"each; a sequence of {case.length}, {case.heads} heads of {case.features}, float32; forward and backward."
    )
    intro = (
        what
        + " Memory is the peak of the rank that takes most, by what the kernel of the system says, of a step "
        "behind another one, on shm; time is the fastest step, on Gloo, all ways in turn."
    )
    parts = [intro]
    for measure in (
        memory,
        lambda case: timed(case, parsed.rounds),
        lambda case: hidden(case, parsed.rounds),
    ):
        parts.append(measure(case))
        print(parts[-1], flush=True)
    text = "\n\n".join(parts)
    if into is not None:
        put(into, mark("docs/reports/attention.md"), text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

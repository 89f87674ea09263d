"""The tables of docs/reports/overlap.md, in their place on the page."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import torch

from tools.overlap.measure import HALVES, Figures

Row = tuple[str, str, Figures]
"""A program, a backend, and the figures."""

_NAMES = {"chain": "chain of eight layers", "ring": "ring attention"}


def machine(ranks: int) -> str:
    """Where it was measured."""
    version = torch.__version__.split("+")[0]
    return (
        f"torch {version}, {platform.machine()}, {os.cpu_count()} cores, {ranks} ranks with one thread each"
    )


def figures_text(found: Sequence[Row], ranks: int, which: str) -> str:
    """The tables, in Markdown."""
    slow = [row for row in found if row[2].link is not None]
    plain = [row for row in found if row[2].link is None]
    aimed = [figures.ratio("overlapped", half) for *_, figures in slow for half in HALVES]
    return "\n\n".join(
        [
            f"{machine(ranks)}; {which} of the slowest rank, all ways in turn. Milliseconds:",
            _table(slow),
            f"Overlapped, a half of a step takes {min(aimed):.2f} to {max(aimed):.2f} times the longer of its work and "
            "its calls; 1.00 is all that can be had.",
            _beside_no_delay(slow, plain),
            "On the wire as it is, without a delay:",
            _table(plain),
        ]
    )


def _beside_no_delay(slow: Sequence[Row], plain: Sequence[Row]) -> str:
    """What the delay adds to an overlapped step, whose transfers are made in either case."""
    without = {row[:2]: row[2].times["overlapped"]["step"] for row in plain}
    parts = [
        f"{figures.times['overlapped']['step'] / without[program, backend]:.2f} for the {_NAMES[program]} on {backend}"
        for program, backend, figures in slow
    ]
    return f"An overlapped step with the delay takes, of the time of one without, {', '.join(parts)}."


def _table(found: Sequence[Row]) -> str:
    heads = (
        "program",
        "ranks on",
        "wire, MB/s",
        "",
        "work",
        "calls",
        "in turn",
        "overlapped",
        "/ longer of both",
    )
    lines = [heads, ("---",) * len(heads)]
    for program, backend, figures in found:
        link = "as it is" if figures.link is None else f"{1e3 * figures.link.gbytes_per_s:g}"
        for half in HALVES:
            times = [figures.times[way][half] for way in ("work", "calls", "in turn", "overlapped")]
            cells = [f"{1e3 * seconds:.0f}" for seconds in times]
            cells.append(
                f"{figures.ratio('overlapped', half):.2f} ({figures.ratio('in turn', half):.2f} in turn)"
            )
            first = half == HALVES[0]
            name = (_NAMES[program], backend, link) if first else ("", "", "")
            lines.append((*name, half, *cells))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

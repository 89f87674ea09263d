"""Measure what overlap hides, and write the page with its picture.

python -m tools.overlap                              # the tables
python -m tools.overlap --backend shm --program ring  # some of them
python -m tools.overlap --trace overlap.json          # a step of the chain, for ui.perfetto.dev
python -m tools.report docs/reports/overlap.svg       # a picture of a step of the chain
python -m tools.report docs/reports/overlap.md        # the page, and the picture
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import gradmesh as gm
from gradmesh.verify.timeline_picture import drawn
from gradmesh.verify.timelines import Timeline
from tools.charts import save
from tools.overlap.measure import HALVES, PROGRAMS, Chain, Figures, Pick, link_for, measured, seen, work_alone
from tools.pages import machine, mark, parser_of, put, table

Row = tuple[str, str, Figures]
"""A program, a backend, and the figures."""

_NAMES = {"chain": "chain of eight layers", "ring": "ring attention"}


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
    heads = "program | ranks on | wire, MB/s |  | work | calls | in turn | overlapped | / longer of both"
    rows = []
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
            rows.append((*name, half, *cells))
    return table(heads, rows)


RANKS = 2
SHARE = 0.8
"""The part of the time of the forward work that its calls take on the slow wire."""

PICKS: dict[str, Pick] = {"median": statistics.median, "fastest": min}

BACKENDS = ("threads", "shm", "gloo")


def _lines(name: str, backend: str, figures: Figures) -> str:
    wire = "the wire as it is" if figures.link is None else str(figures.link)
    lines = [f"{name} on {backend}, {wire}"]
    for half in HALVES:
        times = "  ".join(f"{way} {1e3 * figures.times[way][half]:6.1f}" for way in figures.times)
        lines.append(f"  {half:<9}{times}  ratio {figures.ratio('overlapped', half):.2f}")
    return "\n".join(lines)


def _step(pick: Pick) -> Timeline:
    """A step of the chain, overlapped, on the slow wire."""
    with gm.Ranks(RANKS, backend="shm") as ranks:
        link = link_for(ranks.run, Chain, SHARE * work_alone(ranks.run, Chain, of=pick)["forward"])
        return seen(ranks.run, Chain, link, "overlapped")


def _draw(line: Timeline, path: Path) -> None:
    title = f"A step of the chain of eight layers on a slow wire, overlapped; {machine(RANKS)}"
    save(drawn(line.events, line.work, title), path, title)


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Measure; 1 where a half of a step on the slow wire takes more than 1.1 times the longer of work and calls."""
    parser = parser_of(__doc__, "python -m tools.overlap")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="of the ranks; all by default")
    parser.add_argument("--program", choices=list(PROGRAMS), action="append", help="both by default")
    parser.add_argument(
        "--of",
        choices=list(PICKS),
        default="median",
        help="which time counts; the fastest on a machine in use",
    )
    parser.add_argument("--repeats", type=int, default=9, help="steps of each way")
    parser.add_argument(
        "--trace", type=Path, help="write the timeline of a step of the chain, and measure nothing"
    )
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pick = PICKS[parsed.of]
    if parsed.trace is not None:
        _step(pick).save_trace(parsed.trace)
        return 0
    if into is not None:
        _draw(_step(pick), into.with_suffix(".svg"))
        if into.suffix == ".svg":
            return 0
    found: list[Row] = []
    for backend in parsed.backend or BACKENDS:
        with gm.Ranks(RANKS, backend=backend) as ranks:
            for name in parsed.program or PROGRAMS:
                make = PROGRAMS[name]
                link = link_for(ranks.run, make, SHARE * work_alone(ranks.run, make, of=pick)["forward"])
                for wire in (link, None):
                    found.append((name, backend, measured(ranks.run, make, wire, parsed.repeats, pick)))
                    print(_lines(*found[-1]), flush=True)
    if into is not None:
        text = figures_text(found, RANKS, f"the {parsed.of} of {parsed.repeats} steps")
        put(into, mark("docs/reports/overlap.md"), text)
    slow = [figures for _, _, figures in found if figures.link is not None]
    return int(max(figures.ratio("overlapped", half) for figures in slow for half in HALVES) > 1.1)


if __name__ == "__main__":
    sys.exit(main())

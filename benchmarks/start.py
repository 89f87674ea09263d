"""The start of ranks on this host: seconds, memory and file descriptors.

$ python -m benchmarks.start                     # 2 to 64 ranks; three minutes on two cores
$ python -m benchmarks.start --ranks 2 8 --rounds 1

Ranks that are forked from a process that has imported torch, beside ranks that import it each. A start ends when every
rank has answered a call. Memory is the proportional set size, in which a page that n processes share counts 1/n, summed
over the ranks and the process that they were forked from.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

import gradmesh as gm
from gradmesh.launch import process_ranks
from tools.pages import machine, mark, parser_of, put, table

HEADS = "ranks | backend | start, s | end, s | GiB | file descriptors of a rank | an import each: start | end | GiB"
Measured = tuple[float, float, float, int]


def _held() -> tuple[int, int, int]:
    """This process's file descriptors, and its parent's and its own memory in KiB."""
    own, parent = (_memory(each) for each in ("self", str(os.getppid())))
    return len(os.listdir("/proc/self/fd")), parent, own


def _memory(process: str) -> int:
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def _all_reduced() -> float:
    """All ranks are connected after that."""
    return float(gm.all_reduce(torch.ones(1), dst=gm.I))


def started(ranks: int, backend: str) -> Measured:
    """Seconds to start and to end, GiB, and the most file descriptors of a rank."""
    since = time.perf_counter()
    with gm.Ranks(ranks, backend=backend, timeout=600.0) as world:
        assert world.run(_all_reduced) == [ranks] * ranks
        start = time.perf_counter() - since
        held = world.run(_held)
        own = sum(memory for *_, memory in held)
        template = held[0][1] if process_ranks.FORKS else 0
        since = time.perf_counter()
    return start, time.perf_counter() - since, (own + template) / 2**20, max(fds for fds, *_ in held)


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print the table, or write it into the page."""
    parser = parser_of(__doc__, "python -m benchmarks.start")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--own", type=int, default=16, help="ranks with an import each, at most")
    options = parser.parse_args(arguments)
    rows = []
    for ranks, backend in itertools.product(options.ranks, options.backends):
        found: dict[bool, list[Measured]] = {True: [], False: []}
        for _ in range(options.rounds):
            for forks in (True, False) if ranks <= options.own else (True,):
                process_ranks.FORKS = forks
                found[forks].append(started(ranks, backend))
        process_ranks.FORKS = True
        start, end, memory, fds = (median(each[at] for each in found[True]) for at in range(4))
        row = [ranks, backend, f"{start:.1f}", f"{end:.1f}", f"{memory:.2f}", round(fds)]
        others = [[each[at] for each in found[False]] for at in range(3)]
        row += [f"{median(each):.{at}f}" if each else "" for each, at in zip(others, (1, 1, 2), strict=True)]
        rows.append(row)
        print(*row, sep=" | ", file=sys.stderr, flush=True)
    text = f"{machine()}, median of {options.rounds}:\n\n{table(HEADS, rows)}"
    if into is None:
        print(text)
    else:
        put(into, mark("docs/reports/start.md"), text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

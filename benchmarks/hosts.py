"""Trips and bytes of a collective between hosts, beside other systems on Gloo.

$ sudo python -m benchmarks.hosts                    # 2, 4 and 8 hosts; half an hour
$ sudo python -m benchmarks.hosts --hosts 4 --sizes 4 --verbs all_gather

The hosts are those of `tools.hosts`. Trips are the growth of a call's time with the delay of the wire, one way: what a
loaded machine adds to both times does not count. All ranks begin at one moment of the machine's clock, and a call ends
with its last rank. Bytes are the TCP data that passed between hosts, those of the barriers around the call subtracted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import gradmesh as gm
from benchmarks.speed.calls import Calls, Place
from benchmarks.speed.contenders import CONTENDERS, Contender
from benchmarks.speed.tasks import VERBS, Task, cotangent, operand, said
from tools.hosts import Hosts, why_not, wire
from tools.pages import mark, put

PAGE = Path(__file__).parent.parent / "docs" / "reports" / "hosts.md"
SIZES = (4, 64 * 2**10, 4 * 2**20)
DELAYS = (2.0, 32.0)
"""Milliseconds one way."""
_AHEAD = 0.004
"""Seconds from the agreement on a start to the start, besides two trips."""

UNCHECKED = "gradmesh, check 0"
SYSTEMS = {
    "gradmesh": "gradmesh (gloo)",
    UNCHECKED: "gradmesh (gloo)",
    "torch.distributed": "torch.distributed (gloo)",
    "torch.distributed.nn": "torch.distributed.nn.functional (gloo)",
    "functional": "functional collectives (gloo)",
}
"""The columns, and who of `benchmarks.speed` makes the calls."""

Measured = dict[str, Any]


def _calls(contender: Contender, task: Task, rank: int) -> Calls | None:
    maker = contender.makers.get(task.verb)
    if maker is None:
        return None
    return maker(Place(task, rank, dist.group.WORLD, operand(task, rank), cotangent(task, rank)))


class _Clock:
    """Times one call on all ranks, and counts its bytes."""

    def __init__(self) -> None:
        self.wire = wire()
        self.idle = 0.0
        self.idle = median(self.once(lambda: None)[1] for _ in range(5))

    def once(self, call: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds from the start to the end of the last rank, and bytes between hosts."""
        dist.barrier()
        time.sleep(_AHEAD + self.wire.delay / 500)  # until no acknowledgement is on its way
        before = self.wire.payload
        start = torch.tensor([time.monotonic() + _AHEAD + self.wire.delay / 250], dtype=torch.float64)
        dist.broadcast(start, 0)
        while time.monotonic() < start.item():
            pass
        call()
        end = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.all_reduce(end, dist.ReduceOp.MAX)
        dist.barrier()
        time.sleep(_AHEAD + self.wire.delay / 500)
        return 1e3 * (end - start).item(), self.wire.payload - before - self.idle

    def measured(self, call: Callable[[], object], rounds: int) -> Measured:
        """Trips and bytes of a call, and its milliseconds without a delay."""
        times, counts = [], []
        for delay in DELAYS:
            self._set(delay)
            self.once(call)
            found = [self.once(call) for _ in range(rounds)]
            times.append(min(time for time, _ in found))
            counts += [count for _, count in found]
        trips = (times[1] - times[0]) / (DELAYS[1] - DELAYS[0])
        return {"trips": trips, "bytes": median(counts)}

    def _set(self, delay: float) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            self.wire.delay = delay
        dist.barrier()


def _on_rank(options: argparse.Namespace) -> None:
    """Measure all cells on this rank; rank 0 writes them."""
    gm.init(backend="gloo")
    torch.set_num_threads(1)
    rank, clock, cells = dist.get_rank(), _Clock(), []
    for verb, size, (name, contender) in _product(options):
        task = Task(verb, dist.get_world_size(), size)
        with gm.check(0 if name == UNCHECKED else 1):
            calls = _calls(CONTENDERS[contender], task, rank)
            if calls is None:
                continue
            for way, call in (("forward", calls.forward), ("backward", calls.backward)):
                cell = {"system": name, "verb": verb, "size": size, "way": way}
                cells.append(cell | clock.measured(call, options.rounds))
    if rank == 0:
        Path(options.json).write_text(json.dumps(cells))
    dist.barrier()
    dist.destroy_process_group()


def _product(options: argparse.Namespace) -> Iterator[tuple[str, int, tuple[str, str]]]:
    for verb in options.verbs:
        for size in options.sizes:
            for system in SYSTEMS.items():
                yield verb, size, system


def measure(hosts: int, options: argparse.Namespace) -> list[Measured]:
    """All cells on that many hosts, a rank on each."""
    with tempfile.TemporaryDirectory() as folder, Hosts(hosts, DELAYS[0]) as network:
        file = Path(folder) / "cells.json"
        arguments = [
            *("-m", "benchmarks.hosts", "--json", str(file), "--rounds", str(options.rounds)),
            *("--sizes", *map(str, options.sizes), "--verbs", *options.verbs, "--on-rank"),
        ]
        ranks = network.torchrun(arguments, stderr=subprocess.PIPE)
        errors = [rank.communicate()[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(errors[0][-4000:])
        return [{"hosts": hosts, **cell} for cell in json.loads(file.read_text())]


def table(cells: Sequence[Measured]) -> str:
    """One line for each number of hosts, verb, size and way: trips and KiB of each system."""
    lines = [
        "| hosts | verb | operand | | " + " | ".join(SYSTEMS) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(SYSTEMS),
    ]
    rows: dict[tuple[Any, ...], dict[str, Measured]] = {}
    for cell in cells:
        rows.setdefault((cell["hosts"], cell["verb"], cell["size"], cell["way"]), {})[cell["system"]] = cell
    for (hosts, verb, size, way), row in rows.items():
        found = [f"{row[s]['trips']:.1f}, {_kib(row[s]['bytes'])}" if s in row else "" for s in SYSTEMS]
        lines.append(f"| {hosts} | {verb} | {said(size)} | {way} | {' | '.join(found)} |")
    return "\n".join(lines)


def _kib(count: float) -> str:
    return f"{count:.0f} B" if count < 1024 else f"{count / 1024:,.1f} KiB"


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of a rank's part")
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=VERBS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the cells here")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.on_rank:
        _on_rank(options)
        return 0
    if (reason := why_not()) is not None:
        print(f"hosts: {reason}", file=sys.stderr)
        return 2
    cells = [cell for hosts in options.hosts for cell in measure(hosts, options)]
    if options.json:
        Path(options.json).write_text(json.dumps(cells))
    if into is None:
        print(table(cells))
    else:
        put(PAGE, mark("docs/reports/hosts.md"), table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())

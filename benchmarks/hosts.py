"""Trips and bytes of a collective between hosts, beside other systems on Gloo.

$ sudo python -m benchmarks.hosts                    # 2, 4 and 8 hosts; half an hour
$ sudo python -m benchmarks.hosts --hosts 4 --sizes 4 --verbs all_gather
$ sudo python -m benchmarks.hosts --ranks 4          # several ranks on each of 2 hosts: milliseconds and bytes

The hosts are those of `tools.hosts`. Trips are the growth of a call's time with the delay of the wire, one way: what a
loaded machine adds to both times does not count. All ranks begin at one moment of the machine's clock, and a call ends
with its last rank. Bytes are the TCP data that passed between hosts, those of the barriers around the call subtracted.
With several ranks on each host, where bytes count and not trips, each host can send `--rate` bytes in a second.
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
from benchmarks.speed.tasks import VERBS, WAYS, Task, cotangent, operand, said
from gradmesh.verify.simulator.costs import ALGORITHMS, sent_evenly
from tools.hosts import Hosts, why_not, wire
from tools.pages import mark, put

PAGE = Path(__file__).parent.parent / "docs" / "reports" / "hosts.md"
SIZES = (4, 64 * 2**10, 4 * 2**20)
DELAYS = (2.0, 32.0)
"""Milliseconds one way."""
DELAY, RATE = 0.1, 125_000_000
"""With several ranks on each host: milliseconds one way, and bytes a second, which are 1 Gbit/s."""
_AHEAD = 0.004
"""Seconds from the agreement on a start to the start, besides two trips."""

UNCHECKED, PREDICTED = "gradmesh, check 0", "predicted"
_OPS = {
    "all_gather": ("all_gather", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter", "all_gather"),
    "all_reduce": ("all_reduce", "all_reduce"),
    "all_to_all": ("all_to_all", "all_to_all"),
    "broadcast": ("broadcast", "reduce"),
    "shift": ("permute", "permute"),
}
"""The collectives of each verb, for the cost model."""
SYSTEMS = {
    "gradmesh": "gradmesh (gloo)",
    UNCHECKED: "gradmesh (gloo)",
    "torch.distributed": "torch.distributed (gloo)",
    "torch.distributed.nn": "torch.distributed.nn.functional (gloo)",
    "functional": "functional collectives (gloo)",
}
"""The columns, and who of `benchmarks.speed` makes the calls."""

LAYERED = {
    "gradmesh, hosts": ("gradmesh (gloo)", "hosts"),
    "gradmesh, gloo": ("gradmesh (gloo)", "gloo"),
    "torch.distributed, hosts": ("torch.distributed (gloo)", "hosts"),
    "torch.distributed, gloo": ("torch.distributed (gloo)", "gloo"),
    "functional, gloo": ("functional collectives (gloo)", "gloo"),
}
"""With several ranks on each host: who makes the calls, and on which backend."""
LARGE = (64 * 2**10, 2**20, 4 * 2**20)

Measured = dict[str, Any]


def _calls(contender: Contender, task: Task, rank: int, group: Any = None) -> Calls | None:
    maker = contender.makers.get(task.verb)
    if maker is None:
        return None
    return maker(Place(task, rank, group or dist.group.WORLD, operand(task, rank), cotangent(task, rank)))


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

    def timed(self, calls: Sequence[Callable[[], object]], rounds: int) -> Iterator[Measured]:
        """Milliseconds and bytes of each call; they take turns."""
        for call in calls:
            self.once(call)
        found = [[self.once(call) for call in calls] for _ in range(rounds)]
        for each in zip(*found, strict=True):
            yield {"ms": median(ms for ms, _ in each), "bytes": median(count for _, count in each)}

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
    if options.ranks > 1:
        groups = {"gloo": dist.group.WORLD, "hosts": dist.new_group(backend="hosts")}
        for verb in options.verbs:
            for size in options.sizes:
                task = Task(verb, dist.get_world_size(), size)
                made = {
                    name: _calls(CONTENDERS[contender], task, rank, groups[backend])
                    for name, (contender, backend) in LAYERED.items()
                }
                systems = {name: calls for name, calls in made.items() if calls is not None}
                for way in WAYS:
                    timed = clock.timed([getattr(calls, way) for calls in systems.values()], options.rounds)
                    for name, found in zip(systems, timed, strict=True):
                        cells.append({"system": name, "verb": verb, "size": size, "way": way, **found})
        options.verbs = ()
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


def predicted(verb: str, way: str, size: int, ranks: int) -> Measured | None:
    """Trips and bytes of gradmesh's call by the cost model of the simulator, of all ranks together."""
    op = _OPS[verb][WAYS.index(way)]
    payload = {"reduce_scatter": size * ranks, "all_to_all": max(size, 4 * ranks)}.get(op, size)
    if op == "reduce":
        return None
    sent = sent_evenly(op, ranks, payload)
    ((rounds, count),) = ALGORITHMS["gloo"](op, ranks, payload, sent)
    # Only the root of a broadcast sends what follows the comparison.
    ((_, first),) = ALGORITHMS["gloo"](op, ranks, 0, 0)
    senders = 1 if op == "broadcast" else ranks
    return {"trips": 2 * rounds, "bytes": ranks * first + senders * (count - first)}


def _product(options: argparse.Namespace) -> Iterator[tuple[str, int, tuple[str, str]]]:
    for verb in options.verbs:
        for size in options.sizes:
            for system in SYSTEMS.items():
                yield verb, size, system


def measure(hosts: int, options: argparse.Namespace) -> list[Measured]:
    """All cells on that many hosts."""
    several = options.ranks > 1
    with tempfile.TemporaryDirectory() as folder, Hosts(hosts, DELAY if several else DELAYS[0]) as network:
        network.wire.rate = options.rate if several else 0
        file = Path(folder) / "cells.json"
        arguments = [
            *("-m", "benchmarks.hosts", "--json", str(file), "--rounds", str(options.rounds)),
            *("--ranks", str(options.ranks)),
            *("--sizes", *map(str, options.sizes), "--verbs", *options.verbs, "--on-rank"),
        ]
        ranks = network.torchrun(arguments, options.ranks, stderr=subprocess.PIPE)
        errors = [rank.communicate()[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(errors[0][-4000:])
        return [{"hosts": hosts, **cell} for cell in json.loads(file.read_text())]


def table(cells: Sequence[Measured]) -> str:
    """One line for each number of hosts, verb, size and way: trips or milliseconds of each system, and KiB."""
    systems = [*LAYERED] if "ms" in cells[0] else [*SYSTEMS, PREDICTED]
    lines = [
        "| hosts | verb | operand | | " + " | ".join(systems) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(systems),
    ]
    rows: dict[tuple[Any, ...], dict[str, Measured]] = {}
    for cell in cells:
        rows.setdefault((cell["hosts"], cell["verb"], cell["size"], cell["way"]), {})[cell["system"]] = cell
    for (hosts, verb, size, way), row in rows.items():
        if PREDICTED in systems and (model := predicted(verb, way, size, hosts)):
            row[PREDICTED] = model
        found = [f"{_time(row[s])}, {_kib(row[s]['bytes'])}" if s in row else "" for s in systems]
        lines.append(f"| {hosts} | {verb} | {said(size)} | {way} | {' | '.join(found)} |")
    return "\n".join(lines)


def _time(cell: Measured) -> str:
    return f"{cell['ms']:.1f} ms" if "ms" in cell else f"{cell['trips']:.1f}"


def _kib(count: float) -> str:
    return f"{count:.0f} B" if count < 1024 else f"{count / 1024:,.1f} KiB"


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument(
        "--rate", type=int, default=RATE, help="bytes a second, with several ranks on each host"
    )
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of a rank's part")
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=VERBS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the cells here")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    several = options.ranks > 1
    options.hosts = options.hosts or ([2] if several else [2, 4, 8])
    options.sizes = options.sizes or (LARGE if several else SIZES)
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
        put(PAGE, mark("docs/reports/hosts.md", *(["--ranks", str(options.ranks)] * several)), table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The shm backend with its data path in C, with that in Python, and Gloo: python -m benchmarks.native.

Three groups of the same ranks; each round times every one in turn, call by call. A figure is the median over the rounds
of the slowest rank, in microseconds; all_gather + backward are `gm.all_gather` and `torch.autograd.grad` of its result.
`--memory` measures what the copies of an all_gather cost by themselves, one or several processes at a time; `--parts`,
what of a small call is gradmesh's, and what torch's; `--recycled`, a call with recycled and with fresh memory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh._util import environment
from gradmesh.backends.own_group import OwnGroup
from gradmesh.backends.shm.data_path import is_native

SIZES = {"4 B": 4, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "512 KiB": 512 << 10, "4 MiB": 4 << 20}
COLUMNS = ("shm, C", "shm, Python", "gloo")
SET_PTRACER = 0x59616D61
"""PR_SET_PTRACER of linux/prctl.h."""

# torch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def groups() -> dict[str, dist.ProcessGroup]:
    """A group for each column."""
    made = {}
    for name, value in (("shm, C", "1"), ("shm, Python", "0")):
        # By its module: the ranks get a copy of what this one names.
        os.environ[environment.SHM_NATIVE.name] = value
        environment.SHM_NATIVE.forget()
        made[name] = dist.new_group(backend="shm")
    made["gloo"] = dist.new_group(backend="gloo")
    return made


def calls(group: dist.ProcessGroup, count: int) -> dict[str, Callable[[], object]]:
    """What is timed, on `count` elements of a rank."""
    size = dist.get_world_size()
    x, whole, cotangent = torch.ones(count), torch.empty(size * count), torch.ones(size * count)
    w, zeros = torch.ones(count, requires_grad=True), torch.zeros(count)
    return {
        "all_gather": lambda: _all_gather(whole, x, group=group),
        "reduce_scatter": lambda: _reduce_scatter(x, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(zeros, group=group),
        "gm.all_gather + backward": lambda: torch.autograd.grad(gm.all_gather(w, group), w, cotangent),
    }


def on_each_rank(rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Microseconds of each round, by call, size and column."""
    torch.set_num_threads(1)
    taken: dict[tuple[str, str, str], list[float]] = {}
    made = groups()
    for size, length in SIZES.items():
        columns = {name: calls(group, length // 4) for name, group in made.items()}
        repeats = 20 if length <= 4096 else 5 if length <= 1 << 19 else 2
        for number in range(rounds + 1):
            for call in columns[COLUMNS[0]]:
                for name in COLUMNS:
                    # Gloo, above all, has used the caches and freed memory.
                    columns[name][call]()
                    dist.barrier()
                    begin = time.perf_counter()
                    for _ in range(repeats):
                        columns[name][call]()
                    if number:  # the first one touches memory
                        spent = 1e6 * (time.perf_counter() - begin) / repeats
                        taken.setdefault((call, size, name), []).append(spent)
    return taken


def rows(ranks: int, rounds: int) -> Iterator[str]:
    """Rows of a Markdown table."""
    results = gm.launch(on_each_rank, ranks, args=(rounds,), backend="shm")
    slowest = {
        key: statistics.median(map(max, zip(*(each[key] for each in results), strict=True)))
        for key in results[0]
    }
    for call in dict.fromkeys(call for call, _, _ in slowest):
        for size in SIZES:
            native, python, gloo = (slowest[call, size, name] for name in COLUMNS)
            yield (
                f"| {ranks} | {call} | {size} | {native:.1f} | {python:.1f} | {gloo:.1f} | "
                f"{python / native:.1f} | {gloo / native:.1f} |"
            )


class Nothing(torch.autograd.Function):
    """Makes its result and its gradient, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        """Uninitialised."""
        ctx.size = size
        return x.new_empty(size * len(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Too."""
        return grad.new_empty(len(grad) // ctx.size), None


def parts(rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call on 4 bytes, and of what it consists of."""
    torch.set_num_threads(1)
    size, taken = dist.get_world_size(), dict[str, list[float]]()
    ways: dict[str, Callable[[], object]] = {}
    w, cotangent = torch.ones(1, requires_grad=True), torch.ones(size)
    for name, group in groups().items():
        torchs = calls(group, 1)
        ways[f"all_gather of torch.distributed; {name}"] = torchs["all_gather"]
        if isinstance(group, OwnGroup):
            x, whole = torch.ones(1), torch.empty(size)
            ways[f"the group's part of it; {name}"] = partial(group.all_gather_flat, whole, x)
        ways[f"gm.all_gather + backward; {name}"] = torchs["gm.all_gather + backward"]
    ways["a Function that does nothing + backward"] = lambda: torch.autograd.grad(
        Nothing.apply(w, size),  # type: ignore[no-untyped-call]
        w,
        cotangent,
    )
    for number in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(100):
                way()
            if number:
                taken.setdefault(name, []).append(1e4 * (time.perf_counter() - begin))
    return taken


def read(process: int, address: int, out: Tensor) -> Callable[[], object]:
    """Fills a tensor from the memory of another process; Linux only."""
    to, source = ((ctypes.c_size_t * 2)(start, out.nbytes) for start in (out.data_ptr(), address))
    way = partial(ctypes.CDLL(None).process_vm_readv, process, to, 1, source, 1, 0)
    if way() != out.nbytes:
        raise OSError("the memory of the other rank cannot be read")
    return way


def copies(length: int, rounds: int = 200) -> list[float]:
    """Microseconds of the copies of an all_gather on this rank: fastest of some rounds of four ways."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = torch.zeros(size, length, dtype=torch.uint8).share_memory_()
    everyone: list[Tensor] = [shared] * size
    dist.all_gather_object(everyone, shared)
    chunks = [each[number] for number, each in enumerate(everyone)]
    given, out, private = (torch.zeros(n, length, dtype=torch.uint8) for n in (1, size, size))
    ctypes.CDLL(None).prctl(
        SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0
    )  # any process of the user may read this one's memory
    sources: list[tuple[int, int]] = [(0, 0)] * size
    dist.all_gather_object(sources, (os.getpid(), given.data_ptr()))

    reads = [read(*source, row) for source, row in zip(sources, out, strict=True)]
    reads[rank] = partial(out[rank].copy_, given[0])
    ways: list[Callable[[], object]] = [
        lambda: out.copy_(private),
        lambda: chunks[rank].copy_(given[0]),
        lambda: [out[number].copy_(chunk) for number, chunk in enumerate(chunks)],
        lambda: [each() for each in reads],
    ]
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for number, way in enumerate(ways):
            dist.barrier()
            begin = time.perf_counter()
            way()
            best[number] = min(best[number], 1e6 * (time.perf_counter() - begin))
    return best


def recycled(rounds: int) -> dict[int, list[tuple[float, float]]]:
    """Microseconds and page faults of a call by bytes of a rank, medians on this rank: recycled, fresh."""
    torch.set_num_threads(1)
    measured = {}
    for length in (512 << 10, 768 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 32 << 20):
        x, cotangent = torch.ones(length // 4, requires_grad=True), torch.ones(length // 2)
        taken: dict[str, list[tuple[float, float]]] = {"512": [], "0": []}
        for _ in range(rounds):
            for limit, pairs in taken.items():
                os.environ[environment.RECYCLE.name] = limit
                environment.RECYCLE.forget()
                for number in range(8):
                    dist.barrier()
                    faults, begin = getrusage(RUSAGE_SELF).ru_minflt, time.perf_counter()
                    torch.autograd.grad(gm.all_gather(x), x, cotangent)
                    spent = 1e6 * (time.perf_counter() - begin)
                    if number > 2:  # those before have left memory of the other kind
                        pairs.append((spent, getrusage(RUSAGE_SELF).ru_minflt - faults))
        measured[length] = [
            (statistics.median(spent), statistics.fmean(faults))
            for spent, faults in (zip(*pairs, strict=True) for pairs in taken.values())
        ]
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--recycled", action="store_true")
    given = parser.parse_args(arguments)
    if given.recycled:
        print("| KiB a rank | recycled, us | page faults | fresh, us | page faults | fresh : recycled |")
        print("|---|---|---|---|---|---|")
        of_rank = gm.launch(recycled, 2, args=(given.rounds,), backend="shm")[0]
        for length, ((warm, few), (cold, many)) in of_rank.items():
            print(
                f"| {length >> 10} | {warm:.0f} | {few:.0f} | {cold:.0f} | {many:.0f} | {cold / warm:.1f} |"
            )
        return
    if given.parts:
        print("| 4 B on 2 ranks | us |\n|---|---|")
        taken = gm.launch(parts, 2, args=(given.rounds,), backend="shm")
        for name in taken[0]:
            print(f"| {name} | {max(statistics.median(each[name]) for each in taken):.1f} |")
        return
    if given.memory:
        print(
            "| ranks | bytes a rank | into private memory | into its chunk | from all chunks | from the ranks |\n"
            "|---|---|---|---|---|---|"
        )
        for ranks in (1, 2, 4):
            for size in ("64 KiB", "512 KiB", "4 MiB"):
                measured = zip(*gm.launch(copies, ranks, args=(SIZES[size],), backend="shm"), strict=True)
                print(f"| {ranks} | {size} | " + " | ".join(f"{max(each):.1f}" for each in measured) + " |")
        return
    if not is_native():
        raise SystemExit("the data path in C is not there: see `gradmesh info`")
    print("| ranks | call | bytes a rank | shm, C | shm, Python | gloo | Python : C | gloo : C |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in (2, 4):
        for row in rows(ranks, given.rounds):
            print(row)


if __name__ == "__main__":
    main()

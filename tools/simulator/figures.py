"""The figures of docs/reports/simulator.md, as measured on the machine that runs this."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import gradmesh as gm
from gradmesh.verify import CostModel, Link, simulate
from tools.pages import mark, put, table
from tools.simulator.large import predicted, whole_step
from tools.simulator.shm import SIZES, compare, fit


def _large() -> str:
    rows = []
    for dp, tp in ((2, 2), (8, 4), (32, 8), (128, 8)):
        one = predicted(dp, tp, check=dp * tp <= 256)
        checked = {None: "too large to check", True: "the same", False: "DIFFERENT"}[one.checked]
        sent = [f"{one.sent[axis]:,}" for axis in ("tp", "dp")]
        rows.append(
            [f"{dp} x {tp}", one.calls, *sent, f"{1e3 * one.seconds:.3f}", f"{one.took:.2f}", checked]
        )
    heads = "dp x tp | calls | bytes on tp | bytes on dp | ms predicted | s to simulate | with all ranks"
    return (
        "A step of a tensor-parallel model, with one simulated rank (bytes are those that a rank sends; `tp` has 3 us "
        "and 300 GB/s, `dp` 20 us and 25 GB/s; communication alone):\n\n" + table(heads, rows)
    )


def _whole() -> str:
    rows = []
    whole_step(16)  # what torch does once
    for size in (16, 64, 256, 512):
        took, far = whole_step(size)
        rows.append([size, f"{took:.2f}", f"{far:.1e}"])
    heads = ("ranks", "s", "largest difference from one process")
    return "A contrastive training step with all ranks simulated, with a seed:\n\n" + table(heads, rows)


def _shm() -> str:
    link, found = fit(2)
    rows = [
        [
            one.op,
            f"{one.payload // 1024:,}",
            *(f"{1e6 * seconds:.0f}" for seconds in (one.measured, one.predicted)),
            f"{one.predicted / one.measured:.2f}",
        ]
        for one in found
    ]
    measured, step, wire = compare(link, 2, steps=200)
    ratios = [one.predicted / one.measured for one in found]
    return (
        "The model against shm, on 2 ranks, with the fastest times, since the machine was in use. The link is fitted "
        f"to all_reduce of {SIZES[1] // 1024} KiB and {SIZES[-1] // 1024:,} KiB: {link.call_us:.0f} us a call and "
        f"{link.gbytes_per_s:.2f} GB/s. "
        f"Predicted to measured is {min(ratios):.2f} to {max(ratios):.2f}, {statistics.median(ratios):.2f} in the "
        "middle.\n\n"
        + table("op | KiB | us measured | us predicted | ratio", rows)
        + f"\n\nA training step of a contrastive model takes {1e3 * measured:.1f} ms on shm; the simulation, with "
        f"ranks that compute on this machine and that link, predicts {1e3 * step:.1f} ms, {1e3 * wire:.1f} of "
        f"them communication: a ratio of {step / measured:.2f}."
    )


def _overlapping(later: bool) -> float:
    y = torch.zeros(1000)
    start = time.perf_counter()
    for _ in range(5):
        work = torch.distributed.all_reduce(y, async_op=later)
        time.sleep(0.02)
        if work is not None:
            work.wait()
    return time.perf_counter() - start


def _lived() -> str:
    model = CostModel(Link(10_000, 10), "direct")
    rows = []
    for later in (False, True):
        wall = max(simulate(_overlapping, 2, args=(later,), model=model).results)
        own = simulate(_overlapping, 2, args=(later,), model=model, seed=0).seconds
        rows.append(["later" if later else "at once", f"{1e3 * wall:.0f}", f"{1e3 * own:.0f}"])
    return (
        "Overlap on both clocks: five times a sum of 20 ms beside 20 ms of work, waited for at once or after the "
        "work:\n\n" + table("waited for | ms, wall clock | ms, virtual clock", rows)
    )


def _calls(count: int) -> float:
    x = torch.ones(8)
    for _ in range(50):
        gm.all_reduce(x, dst=gm.R)
    start = time.perf_counter()
    for _ in range(count):
        gm.all_reduce(x, dst=gm.R)
    return (time.perf_counter() - start) / count


def _watching() -> str:
    rows = []
    for size in (2, 4):
        plain = min(max(gm.launch(_calls, size, backend="threads", args=(300,))) for _ in range(5))
        seen = min(max(simulate(_calls, size, args=(300,)).results) for _ in range(5))
        turns = min(max(simulate(_calls, size, args=(300,), seed=0).results) for _ in range(5))
        rows.append([size, *(f"{1e6 * took:.0f}" for took in (plain, seen, turns))])
    heads = ("ranks", "launched", "simulated", "simulated, with a seed")
    return "A small all_reduce, in us:\n\n" + table(heads, rows)


PARTS = {"large": _large, "whole": _whole, "shm": _shm, "lived": _lived, "watching": _watching}
"""What measures each part of the figures and puts it into words."""


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Print parts of the page, or write them into it."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulator figures")
    parser.add_argument("part", choices=[[], *PARTS], nargs="*", help="which; all by default")
    torch.set_num_threads(1)
    for part in parser.parse_args(arguments).part or PARTS:
        text = PARTS[part]()
        print(f"{text}\n")
        if into is not None:
            put(into, mark("docs/reports/simulator.md", part), text)
    return 0

"""The times of the ways on ranks of a backend, taken in turn so that a slow moment of the machine meets all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

import gradmesh as gm
from gradmesh.verify import Link, Timeline, delayed, timeline
from tools.overlap.ways import WAYS, Program

HALVES = ("forward", "backward", "step")

Run = Callable[..., list[Any]]
"""Runs a function on every rank, and returns their results."""

Make = Callable[[], Program]
"""Makes a program on a rank."""

Pick = Callable[[Iterable[float]], float]
"""Picks one time of several."""

Times = dict[str, dict[str, float]]
"""Seconds by way and half."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """The times of a program, those of the slowest rank of each step."""

    link: Link | None  # the delay; None: the wire as it is
    times: Times  # seconds by way and half

    def best(self, half: str) -> float:
        """What is left if everything is hidden that can be: the longer of work and calls."""
        return max(self.times["work"][half], self.times["calls"][half])

    def ratio(self, way: str, half: str) -> float:
        """The time of a way over that."""
        return self.times[way][half] / self.best(half)


def _half(part: Callable[[], Any]) -> tuple[float, Any]:
    gm.barrier()
    started = time.perf_counter()
    result = part()
    return time.perf_counter() - started, result


def _step(program: Program, way: str) -> tuple[float, float]:
    forward, results = _half(lambda: program.forward(way))
    backward, _ = _half(lambda: program.backward(results))
    return forward, backward


def _on_rank(
    make: Make, link: Link | None, ways: tuple[str, ...], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(1)
    program = make()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    gc.collect()
    gc.disable()
    try:
        with delayed(link) if link is not None else contextlib.nullcontext():
            for number in range(repeats + 1):
                for way in ways:
                    times = _step(program, way)
                    if number:
                        found[way].append(times)
    finally:
        gc.enable()
    return found


def _one(ranks: list[dict[str, list[tuple[float, float]]]], of: Pick) -> Times:
    """One number of the steps, of each of which the slowest rank counts."""
    found: Times = {}
    for way in ranks[0]:
        steps = [
            [max(times) for times in zip(*of_ranks, strict=True)]
            for of_ranks in zip(*(rank[way] for rank in ranks), strict=True)
        ]
        found[way] = {
            "forward": of(forward for forward, _ in steps),
            "backward": of(backward for _, backward in steps),
            "step": of(map(sum, steps)),
        }
    return found


def work_alone(run: Run, make: Make, repeats: int = 5, of: Pick = statistics.median) -> dict[str, float]:
    """The seconds of a program's own work, by half."""
    return _one(run(_on_rank, make, None, ("work",), repeats), of)["work"]


def _sizes(make: Make) -> tuple[int, int]:
    program = make()
    return program.sent, program.calls


def link_for(run: Run, make: Make, seconds: float, latency_us: float = 200.0) -> Link:
    """A link on which the calls of a half of a step take so long, to two digits."""
    sent, calls = run(_sizes, make)[0]
    left = seconds - calls * latency_us * 1e-6
    return Link(latency_us, float(f"{sent / left / 1e9:.2g}"))


def measured(
    run: Run, make: Make, link: Link | None, repeats: int = 7, of: Pick = statistics.median
) -> Figures:
    """Measure every way."""
    return Figures(link, _one(run(_on_rank, make, link, WAYS, repeats), of))


def _seen_on_rank(make: Make, link: Link | None, way: str) -> Timeline:
    torch.set_num_threads(1)
    program = make()
    with delayed(link) if link is not None else contextlib.nullcontext():
        _step(program, way)
        gm.barrier()
        with timeline() as line:
            program.backward(program.forward(way))
    return line


def seen(run: Run, make: Make, link: Link | None, way: str) -> Timeline:
    """The timeline of one step."""
    return Timeline.joined(run(_seen_on_rank, make, link, way))

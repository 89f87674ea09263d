"""The exchange beside the functional collectives' all_to_all, as graph-parallel code calls it; all ways in turn."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.autograd.rule import apply
from gradmesh.nn.graph import GraphPlan
from gradmesh.ops.neighbor import NeighborAllToAll, Picked
from gradmesh.ops.sizes import Sizes

OURS = ("shm", "Gloo", "Gloo, unchecked")
THEIRS = "functional, Gloo"
HALVES = ("forward", "forward and backward")

Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Times:
    """Seconds of an exchange, of the slowest rank of each round."""

    width: int  # the numbers in a row
    whole: bool  # whether the result contains this rank's rows too
    half: str  # of `HALVES`
    seconds: dict[str, list[float]]  # those of each round, by way

    def median(self, way: str) -> float:
        """The median of a way's rounds."""
        return statistics.median(self.seconds[way])

    def ratios(self, way: str) -> tuple[float, float, float]:
        """How many times as long the functional collectives take in the same round: quartiles."""
        pairs = zip(self.seconds[THEIRS], self.seconds[way], strict=True)
        first, middle, last = statistics.quantiles([theirs / ours for theirs, ours in pairs], n=4)
        return first, middle, last


def contest(
    edges: Tensor, owner: Tensor, ranks: int, widths: tuple[int, ...], rounds: int, calls: int
) -> list[Times]:
    """The times of all ways, which take turns in each round."""
    each = gm.launch(_on_rank, ranks, backend="shm", args=(edges, owner, widths, rounds, calls), timeout=550)
    return [
        Times(
            same[0].width,
            same[0].whole,
            same[0].half,
            {
                way: [max(at) for at in zip(*(one.seconds[way] for one in same), strict=True)]
                for way in same[0].seconds
            },
        )
        for same in zip(*each, strict=True)
    ]


def _on_rank(edges: Tensor, owner: Tensor, widths: tuple[int, ...], rounds: int, calls: int) -> list[Times]:
    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    plans = {"shm": GraphPlan(edges, owner), "Gloo": GraphPlan(edges, owner, gloo)}
    plans["Gloo, unchecked"] = plans["Gloo"]
    found = []
    for width in widths:
        draw = torch.Generator().manual_seed(gm.rank())
        x = torch.randn(len(plans["shm"].own), width, dtype=torch.float64, generator=draw).requires_grad_()
        for whole in (True, False):
            ways = {name: _ours(plan, whole=whole) for name, plan in plans.items()}
            ways[THEIRS] = _theirs(plans["Gloo"], gloo, whole=whole)
            seeds = torch.randn(ways["shm"](x).shape, dtype=x.dtype, generator=draw)
            _see_that_they_agree(ways, x, seeds)
            for half in HALVES:
                found.append(Times(width, whole, half, _timed(ways, x, seeds, half, rounds, calls)))
    return found


def _ours(plan: GraphPlan, *, whole: bool) -> Way:
    if whole:
        return plan.exchange
    index, sent, received = _told(plan)
    op = NeighborAllToAll(
        plan.axis, 0, Picked(index, Sizes(tuple(sent)), Sizes(tuple(received)), len(plan.own))
    )
    return lambda x: apply(op, x)


def _theirs(plan: GraphPlan, group: dist.ProcessGroup, *, whole: bool) -> Way:
    module = importlib.import_module("torch.distributed._functional_collectives")
    index, sent, received = _told(plan)

    def rows(x: Tensor) -> Tensor:
        got = module.all_to_all_single_autograd(x.index_select(0, index), received, sent, group)
        result: Tensor = module.wait_tensor(got)
        return result

    return (lambda x: torch.cat((x, rows(x)))) if whole else rows


def _told(plan: GraphPlan) -> tuple[Tensor, list[int], list[int]]:
    rows, counts, ranks = plan.send_rows, plan.receive_counts, range(plan.axis.size)
    nothing = plan.own[:0]
    return (
        torch.cat([rows.get(rank, nothing) for rank in ranks]),
        [len(rows.get(rank, nothing)) for rank in ranks],
        [counts.get(rank, 0) for rank in ranks],
    )


def _see_that_they_agree(ways: dict[str, Way], x: Tensor, seeds: Tensor) -> None:
    results = {name: way(x) for name, way in ways.items()}
    for name, result in results.items():
        (slope,) = torch.autograd.grad(result, x, seeds)
        if name == "shm":
            right, right_slope = result, slope
        elif not torch.equal(result, right) or not torch.allclose(slope, right_slope, rtol=1e-12, atol=1e-12):
            raise RuntimeError(f"the result of {name} is another one")


def _timed(
    ways: dict[str, Way], x: Tensor, seeds: Tensor, half: str, rounds: int, calls: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            with gm.check(0 if name == "Gloo, unchecked" else 1):
                gm.barrier()
                started = time.perf_counter()
                for _ in range(calls):
                    if half == HALVES[0]:
                        with torch.no_grad():
                            way(x)
                    else:
                        torch.autograd.grad(way(x), x, seeds)
                took = (time.perf_counter() - started) / calls
            if number:
                found[name].append(took)
    return found

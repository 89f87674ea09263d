"""Time and memory of the steps on 1, 2 and 4 ranks, all pools of ranks in turn."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass, field

import gradmesh as gm
from gradmesh.nn.graph import by_space
from tools.graphs.geometry import crystal, slab
from tools.graphs.steps import KINDS, measure, prepare


@dataclass(frozen=True)
class Cost:
    """What the steps take on a pool of ranks."""

    backend: str  # of the ranks; "": one process, without a plan
    ranks: int  # how many there are
    # by kind, those of each round on the slowest rank
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    # by kind, each rank's peak in bytes above what was there before
    memory: dict[str, list[int]] = field(default_factory=dict)

    def median(self, kind: str) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds[kind])


def costs(nodes: int, neighbours: int, width: int, pools: list[tuple[str, int]], rounds: int) -> list[Cost]:
    """Those of every pool."""
    points, cell = slab(nodes)
    graph = crystal(points, cell, neighbours)
    found = [Cost(*pool) for pool in pools]
    with contextlib.ExitStack() as stack:
        started = []
        for cost in found:
            ranks = stack.enter_context(
                gm.Ranks(cost.ranks, backend=cost.backend or "shm", timeout=300, prefix=False)
            )
            owner = by_space(points, cost.ranks, cell=cell) if cost.backend else None
            weighed = ranks.run(prepare, graph, owner, width)
            cost.memory.update({kind: [each[kind] for each in weighed] for kind in KINDS})
            started.append(ranks)
        for _ in range(rounds):
            for cost, ranks in zip(found, started, strict=True):
                for kind in KINDS:
                    cost.seconds[kind].append(max(ranks.run(measure, kind, 1)))
    return found

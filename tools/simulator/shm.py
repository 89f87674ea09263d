"""The cost model against measured time: a link fitted to two sizes of one collective on shm, and what it predicts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gradmesh as gm
from gradmesh.verify import CostModel, Link, simulate

_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_gather": gm.all_gather,
    "reduce_scatter": gm.reduce_scatter,
    "all_to_all": gm.all_to_all,
}
SIZES = tuple(4**power * 1024 for power in range(2, 7))
"""Payloads in bytes, 16 KiB to 4 MiB; the link is fitted to the second and the last."""

_ROUNDS = 8


@dataclass(frozen=True)
class Compared:
    """A collective, measured and predicted, in seconds."""

    op: str
    payload: int
    measured: float
    predicted: float


def _measure(op: str, payload: int) -> float:
    """The time of one call, on the slower rank: the fastest counts, as others use the machine too."""
    x, call = torch.randn(payload // 4), _OPS[op]
    times = []
    for _ in range(5 + max(15, min(100, 2**24 // payload))):
        gm.barrier()
        started = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - started)
    return float(gm.all_reduce(torch.tensor(min(times[5:])), op="max", dst=gm.R))


def fit(size: int) -> tuple[Link, list[Compared]]:
    """Fit the link of shm to all_reduce, and hold other sizes and ops against it."""
    with gm.Ranks(size, backend="shm", timeout=200, prefix=False) as ranks:
        rounds = [
            {(op, payload): ranks.run(_measure, op, payload)[0] for op in _OPS for payload in SIZES}
            for _ in range(_ROUNDS)
        ]
    times = {case: min(found[case] for found in rounds) for case in rounds[0]}
    points = [(float(payload), times["all_reduce", payload]) for payload in (SIZES[1], SIZES[-1])]
    link = CostModel(Link(1, 1), "direct").fitted("world", "all_reduce", size, points, per="call")
    model = CostModel(link, "direct")
    return link, [
        Compared(op, payload, measured, model.seconds(op, "world", size, payload))
        for (op, payload), measured in times.items()
    ]


def compare(link: Link, size: int, steps: int = 12) -> tuple[float, float, float]:
    """The time of a training step on shm, the one that a simulation predicts, and how much of that is communication."""
    with gm.Ranks(size, backend="shm", timeout=200, prefix=False) as ranks:
        measured = min([max(times) for times in zip(*ranks.run(step_times, steps), strict=True)])
    run = simulate(step_times, size, args=(steps,), seed=0, model=CostModel(link, "direct"))
    started = [event.called for event in run.events.select(rank=0, op="barrier")]
    predicted = min([after - before for before, after in itertools.pairwise(started)])
    seconds = sum(
        (event.end or 0) - (event.start or 0) for event in run.events.select(rank=0) if event.op != "barrier"
    )
    return measured, predicted, seconds / steps


def step_times(steps: int) -> list[float]:
    """Seconds from barrier to barrier in the training of a contrastive model with replicated weights, on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(gm.rank())
    times = []
    for _ in range(steps):
        x = torch.randn(64, 256, generator=generator)
        optimizer.zero_grad()
        gm.barrier()
        times.append(time.perf_counter())
        weights = {name: gm.replicate(weight) for name, weight in model.named_parameters()}
        features = torch.func.functional_call(model, weights, (x,))
        logits = features @ gm.all_gather(features).T / 16
        labels = torch.arange(64) + 64 * gm.rank()
        nn.functional.cross_entropy(logits, labels, reduction="sum").div(64 * gm.world_size()).backward()
        optimizer.step()
    gm.barrier()
    return [after - before for before, after in itertools.pairwise([*times, time.perf_counter()])]

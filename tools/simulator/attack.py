"""Random programs under random schedules: results as of a plain launch, and the same run when a seed comes back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import CostModel, Link, Simulation, simulate
from tools.attack.draw import drawn
from tools.attack.programs import source
from tools.attack.run import Failure, on_rank

_CALLS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_to_all",
    "ring",
    "reduce",
    "barrier",
    "half",
    "wait",
    "object",
)


class _Program:
    """One rank's run of a program."""

    def __init__(self, seed: int, size: int) -> None:
        self.choices = random.Random(seed)  # the same on every rank
        self.rank, self.size = dist.get_rank(), size
        self.x = torch.arange(float(6 * size)).add(self.rank).view(size, 6).sin()
        self.pending: list[tuple[dist.Work | None, Tensor]] = []
        self.halves = [dist.new_group([r for r in range(size) if r % 2 == half]) for half in (0, 1)]

    def later(self, work: dist.Work | None, result: Tensor) -> None:
        if self.choices.random() < 0.5:
            self.pending.append((work, result))
        else:
            self.settle(work, result)

    def settle(self, work: dist.Work | None, result: Tensor) -> None:
        if work is not None:
            work.wait()
        self.x = self.x * 0.5 + result.reshape(-1, 6).mean(0)

    def wait(self) -> None:
        if self.pending:
            self.settle(*self.pending.pop(self.choices.randrange(len(self.pending))))

    def all_reduce(self) -> None:
        y = self.x.clone()
        op = self.choices.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG])
        self.later(dist.all_reduce(y, op, async_op=True), y)

    def half(self) -> None:
        y = self.x.clone()
        self.later(dist.all_reduce(y, group=self.halves[self.rank % 2], async_op=True), y)

    def broadcast(self) -> None:
        y = self.x.clone()
        self.later(dist.broadcast(y, self.choices.randrange(self.size), async_op=True), y)

    def reduce(self) -> None:
        y = self.x.clone()
        self.later(dist.reduce(y, self.choices.randrange(self.size), async_op=True), y)

    def all_gather(self) -> None:
        y = self.x.new_empty(self.size, *self.x.shape)
        self.later(dist.all_gather(list(y.unbind(0)), self.x.clone(), async_op=True), y)

    def all_to_all(self) -> None:
        y = torch.empty_like(self.x)
        self.later(dist.all_to_all_single(y, self.x.clone(), async_op=True), y)

    def ring(self) -> None:
        y = torch.empty_like(self.x)
        step = self.choices.randrange(1, self.size)
        sent = dist.isend(self.x.clone(), (self.rank + step) % self.size)
        got = dist.irecv(y, (self.rank - step) % self.size)
        if sent is not None:
            sent.wait()
        self.later(got, y)

    def object(self) -> None:
        said: list[object] = [None] * self.size
        dist.all_gather_object(said, {"rank": self.rank})
        assert said == [{"rank": rank} for rank in range(self.size)]

    def barrier(self) -> None:
        dist.barrier()


def run_raw(seed: int, size: int, steps: int = 12, *, alone: bool = False) -> Tensor:
    """Run a program on this rank, and return what comes out; `alone`: without calls that need other ranks' values."""
    program = _Program(seed, size)
    calls = list(_CALLS)
    if alone:
        calls = [
            call for call in calls if call not in ("ring", "object") and (call != "half" or size % 2 == 0)
        ]
    for _ in range(steps):
        getattr(program, program.choices.choice(calls))()
    while program.pending:
        program.wait()
    return program.x


_SLOW = CostModel(Link(latency_us=50, gbytes_per_s=1))


@dataclass
class Report:
    """What an attack found."""

    # programs by kind and by how they ended without a schedule
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)  # what differed, with the program's number and seed
    orders: int = 0  # the number of different orders that were run

    def __str__(self) -> str:
        lines = [f"{kind}, {ended}: {count}" for (kind, ended), count in sorted(self.counts.items())]
        return "\n".join(
            [*lines, f"different orders: {self.orders}", f"findings: {len(self.findings)}", *self.findings]
        )


def attack(programs: int, seed: int, schedules: int = 2) -> Report:
    """Run random programs, of gradmesh's verbs in all modes of autodiff and of torch.distributed's calls."""
    report = Report()
    for index in range(programs):
        program = drawn(seed, index)
        _one(report, "verbs", index, program.ranks, on_rank, (source(program),), schedules)
        size = random.Random(f"{seed}/{index}").randint(2, 5)
        _one(report, "torch", index, size, run_raw, (1000 * seed + index, size), schedules)
        _alone(report, index, size, 1000 * seed + index)
    return report


def _alone(report: Report, index: int, size: int, drawn_from: int) -> None:
    """Hold a rank that plays alone against the same rank among all."""
    given = {"args": (drawn_from, size), "kwargs": {"alone": True}, "model": _SLOW, "compute": 0}
    whole = simulate(run_raw, size, seed=index, **given)  # type: ignore[arg-type]
    rank = index % size
    alone = simulate(run_raw, size, only=rank, **given)  # type: ignore[arg-type]
    report.counts["alone", "right"] += 1
    if _rows(whole, rank) != _rows(alone, rank):
        report.findings.append(f"program {index}: rank {rank} alone calls something else than among {size}")


def _rows(run: Simulation[Any], rank: int) -> list[tuple[object, ...]]:
    return [
        (e.op, e.axis, e.size, e.payload, e.sent, e.line, e.start, e.end)
        for e in run.events.select(rank=rank)
    ]


def _one(
    report: Report,
    kind: str,
    index: int,
    size: int,
    fn: Callable[..., Any],
    args: Sequence[object],
    schedules: int,
) -> None:
    plain = gm.launch(fn, size, backend="threads", args=args, timeout=60, prefix=False)
    refused = any(isinstance(outcome, Failure) for outcome in plain)
    report.counts[kind, "refused" if refused else "right"] += 1
    orders = set()
    for number in range(schedules):
        where = f"program {index} of {kind}, schedule {number}"
        model = _SLOW if number % 2 else None
        first, again = (
            simulate(fn, size, args=args, seed=number, model=model, compute=0, timeout=60) for _ in range(2)
        )
        orders.add(_order(first))
        if _order(first) != _order(again) or first.seconds != again.seconds:
            report.findings.append(f"{where}: another order when the seed came back")
        if not alike(first.results, again.results, exact=True):
            report.findings.append(f"{where}: another result when the seed came back")
        if not alike(first.results, plain, exact=not refused):
            report.findings.append(f"{where}: another result than without a schedule")
    report.orders += len(orders)


def _order(run: Simulation[Any]) -> tuple[object, ...]:
    return tuple(event.what for event in run.events)


def alike(ones: Sequence[Any], others: Sequence[Any], *, exact: bool) -> bool:
    """Whether all ranks' outcomes are alike; if not exact, only in whether a rank failed at all."""
    if not exact:
        return any(isinstance(x, Failure) for x in ones) == any(isinstance(x, Failure) for x in others)
    return all(map(_same, ones, others))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, Failure) and isinstance(other, Failure):
        return one.kind == other.kind
    return one is None and other is None

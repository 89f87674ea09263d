"""Random programs of torch.distributed calls, some of them waited for later, for the simulator to run."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import Tensor

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

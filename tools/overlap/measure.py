"""The times of the ways on ranks of a backend, taken in turn so that a slow moment of the machine meets all of them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.verify import Link, Timeline, delayed, timeline
from tools.overlap.chain import Done, Waitable, begin_gather, chain
from tools.overlap.ring import begin_shift, ring_attention

WAYS = ("work", "calls", "in turn", "overlapped")

Begin = Callable[[Tensor], Waitable]


class Program(abc.ABC):
    """A program on one rank, which computes losses that differ from rank to rank."""

    sent: int  # bytes that a rank sends in forward, and as many in backward
    calls: int  # the number of calls that do

    @abc.abstractmethod
    def run(self, begin: Begin) -> Tensor:
        """The result of this rank, differentiable."""

    @abc.abstractmethod
    def operands(self) -> Sequence[Tensor]:
        """What is handed to the calls."""

    @abc.abstractmethod
    def begins(self) -> tuple[Begin, Begin, Begin]:
        """Three ways to make a call: synchronous; async; without sending, to time the work alone."""

    def forward(self, way: str) -> Sequence[Tensor]:
        """The forward half of a step; what it returns is for `backward`."""
        at_once, async_, nowhere = self.begins()
        if way == "calls":
            return [at_once(x).wait() for x in self.operands()]
        return [self.run({"work": nowhere, "in turn": at_once, "overlapped": async_}[way])]

    def backward(self, results: Sequence[Tensor]) -> None:
        """The backward half."""
        torch.autograd.backward(results, [self._gradient(result) for result in results])

    def _gradient(self, result: Tensor) -> Tensor:
        found = self._gradients.get(result.shape)
        if found is None:
            found = self._gradients[result.shape] = torch.full_like(result, 1.0 + gm.rank()).detach()
        return found

    def __init__(self) -> None:
        self._gradients: dict[torch.Size, Tensor] = {}


class Chain(Program):
    """The chain of layers."""

    def __init__(self, samples: int = 5120, width: int = 384, layers: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1 + gm.rank())
        size = gm.world_size()
        self.size = size
        self.x = torch.randn(samples, width, generator=generator)
        self.first = (torch.randn(width, width, generator=generator) / width**0.5).requires_grad_()
        self.shares = [
            (torch.randn(width // size, width, generator=generator) / width**0.5).requires_grad_()
            for _ in range(layers)
        ]
        self.calls, self.sent = layers, layers * (size - 1) * self.shares[0].nbytes

    def run(self, begin: Begin) -> Tensor:
        """The last layer's result."""
        return chain(self.x, self.first, self.shares, begin)

    def operands(self) -> Sequence[Tensor]:
        """The shares."""
        return self.shares

    def begins(self) -> tuple[Begin, Begin, Begin]:
        """Gathers: of all ranks' shares, or of this rank's share repeated."""
        return (
            lambda share: Done(gm.all_gather(share)),
            begin_gather,
            lambda share: Done(share.repeat(self.size, 1)),
        )


class Ring(Program):
    """Ring attention."""

    def __init__(self, heads: int = 3, part: int = 2048, features: int = 64, blocks: int = 12) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1 + gm.rank())
        self.blocks = blocks
        self.q, self.k, self.v = (
            torch.randn(heads, part, features, generator=generator).requires_grad_() for _ in range(3)
        )
        hops = gm.world_size() - 1
        self.calls, self.sent = hops * blocks, hops * (self.k.nbytes + self.v.nbytes)
        shape = (2, heads, part // blocks, features)
        self.moved = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(self.calls)]

    def run(self, begin: Begin) -> Tensor:
        """The attention of this rank's queries."""
        return ring_attention(self.q, self.k, self.v, self.blocks, begin=begin)

    def operands(self) -> Sequence[Tensor]:
        """As many blocks as are handed on."""
        return self.moved

    def begins(self) -> tuple[Begin, Begin, Begin]:
        """Shifts, or copies."""
        return lambda block: Done(gm.shift(block)), begin_shift, lambda block: Done(block.clone())


PROGRAMS: dict[str, Callable[[], Program]] = {"chain": Chain, "ring": Ring}


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

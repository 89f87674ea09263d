"""A step of each program: its work alone, its calls alone, both in turn, and both at once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import gradmesh as gm
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

"""The ways to have attention over a sequence that is cut over the ranks, each as a step forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import gradmesh as gm
from gradmesh.nn.sequence import Order
from tools.attention.torch_ring import TorchRing


@dataclass(frozen=True)
class Case:
    """What is computed."""

    length: int = 4096  # of the whole sequence
    heads: int = 16  # how many
    features: int = 64  # of a head
    causal: bool = False  # whether a place sees only places up to itself

    def inputs(self) -> list[Tensor]:
        """This rank's queries, keys and values, and the gradient of what it sees, all drawn."""
        generator = torch.Generator().manual_seed(gm.rank())
        part = self.length // gm.world_size()
        shape = 1, self.heads, part, self.features
        *leaves, grad = (torch.randn(shape, generator=generator) for _ in range(4))
        return [*(leaf.requires_grad_() for leaf in leaves), grad]


def step(case: Case, way: str) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """A step of a way: what it returns is what the queries see, and the gradients."""
    forward = WAYS[way]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        q, k, v, grad = inputs
        seen = forward(q, k, v, case.causal)
        return [seen, *torch.autograd.grad(seen, (q, k, v), grad)]

    return run


def _ring(order: Order) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    return lambda q, k, v, causal: gm.nn.ring_attention(q, k, v, causal=causal, order=order)


def _gathered(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Everyone's keys and values on every rank, by one gather each."""
    k, v = (gm.all_gather(x, dim=2) for x in (k, v))
    if not causal:
        return scaled_dot_product_attention(q, k, v)
    rows = gm.rank() * q.shape[2] + torch.arange(q.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=rows[:, None] >= torch.arange(k.shape[2]))


def _made(x: object) -> Tensor:
    return x  # type: ignore[return-value]  # torch does not say what a Function returns


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "ring": _ring("plain"),
    "ring, zigzag": _ring("zigzag"),
    "ulysses": lambda q, k, v, causal: gm.nn.ulysses_attention(q, k, v, causal=causal),
    "gathered keys": _gathered,
    "torch's ring": lambda q, k, v, causal: _made(TorchRing.apply(q, k, v, causal, False)),  # type: ignore[no-untyped-call]
    "torch's ring, balanced": lambda q, k, v, causal: _made(TorchRing.apply(q, k, v, causal, causal)),  # type: ignore[no-untyped-call]
    "dense": lambda q, k, v, causal: scaled_dot_product_attention(q, k, v, is_causal=causal),
}

"""Random programs of Functions that call a verb by hand in forward and its adjoint in backward, as old code does.

Beside each runs the same program with the verbs themselves, in `gradmesh.ordered()`: what it finds is right. By hand a
program has to find the same, or every rank has to raise an error of the library's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradmesh as gm

__all__ = ["ByHand", "Program", "by_hand", "drawn", "outcome", "verdict"]

PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "all_reduce": (lambda x: gm.all_reduce(x, dst=gm.R), lambda g: gm.all_reduce(g, dst=gm.R)),
    "scan": (gm.scan, lambda g: gm.scan(g, reverse=True)),
    "shift": (gm.shift, lambda g: gm.shift(g, offset=-1)),
    "there and back": (lambda x: gm.all_gather(gm.reduce_scatter(x)),) * 2,
}
"""Verbs that keep the shape of 12 numbers, each with its adjoint; the last makes two calls."""


class ByHand(torch.autograd.Function):
    """A verb, and in backward its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        """Call it."""
        ctx.name = name
        return PAIRS[name][0](x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Call the adjoint."""
        return PAIRS[ctx.name][1](grad), None


def by_hand(x: Tensor, name: str) -> Tensor:
    """The verb, in a Function."""
    found: Tensor = ByHand.apply(x, name)
    return found


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        steps: verb, operand (a place among the values so far), and whether under a checkpoint, the older one or not.
        used: for each rank, which values its loss is of.
        linear: for each rank, whether it is linear in them.
        second: whether the gradient is differentiated once more.
        alike: whether every rank does the same.
    """

    steps: tuple[tuple[str, int, bool | None], ...]
    used: tuple[tuple[int, ...], ...]
    linear: tuple[bool, ...]
    second: bool
    alike: bool


def drawn(seed: int, ranks: int) -> Program:
    """One of many: half of them with ranks that do different things."""
    rng = random.Random(f"{seed} on {ranks}")
    alike, count = rng.random() < 0.4, rng.randint(2, 4)
    second = rng.random() < 0.4
    names = rng.sample(
        sorted(PAIRS), rng.randint(1, 2)
    )  # few kinds, so that calls can be taken for each other
    steps = tuple(
        (
            rng.choice(names),
            rng.randint(0, step) if rng.random() < 0.5 else 0,
            rng.choice((True, False)) if rng.random() < 0.2 and not second else None,
        )
        for step in range(count)
    )

    def used() -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(1, count + 1), rng.randint(1, count))))

    common = used()
    return Program(
        steps,
        (common,) * ranks if alike else tuple(used() for _ in range(ranks)),
        (False,) * ranks if alike else tuple(rng.random() < 0.4 for _ in range(ranks)),
        second,
        alike,
    )


def _gradient(program: Program, verb: Callable[[Tensor, str], Tensor], *, ordered: bool) -> Tensor:
    backward = gm.backward if ordered else torch.autograd.backward
    gradient = gm.grad if ordered else torch.autograd.grad
    rank = gm.rank()
    x = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    values = [x]
    for number, (name, operand, kept) in enumerate(program.steps):
        y = values[operand] * (1 + number)  # its own scale: calls that are taken for each other show
        values.append(verb(y, name) if kept is None else checkpoint(verb, y, name, use_reentrant=kept))
    used = [values[at] for at in program.used[rank]]
    terms = [y.sum() if program.linear[rank] else y.sin().sum() for y in used]
    loss = (1 + rank) * torch.stack(terms).sum()
    if program.second:
        (first,) = gradient(loss, x, create_graph=True)
        loss = first.square().sum()
    if loss.requires_grad or ordered:
        backward(loss)
    return torch.zeros_like(x) if x.grad is None else x.grad


def outcome(program: Program) -> tuple[str, Tensor | None, Tensor]:
    """What becomes of it by hand on this rank, and the right gradient.

    Returns:
        The name of the error, or "", the gradient by hand and the right one.
    """
    right = _right(program)
    gm.barrier()
    try:
        found: Tensor | None = _gradient(program, by_hand, ordered=False)
    except gm.GradmeshError as error:
        return type(error).__name__, None, right
    return "", found, right


def _right(program: Program) -> Tensor:
    plain = replace(program, steps=tuple((name, operand, None) for name, operand, _ in program.steps))
    with gm.ordered():
        return _gradient(plain, lambda x, name: PAIRS[name][0](x), ordered=True)


def verdict(program: Program, outcomes: list[tuple[str, Tensor | None, Tensor]]) -> str:
    """ "right", "refused", or what is wrong.

    A rank that has nothing more to wait for has returned, and the others raise: so it is a refusal as well.
    """
    errors = [error for error, _, _ in outcomes if error]
    if errors and program.alike:
        return "accused"
    if len(errors) == len(outcomes) or (errors and set(errors) == {"DeadlockError"}):
        return "refused"
    if errors:
        return "error on some ranks only"
    far = max((found - right).abs().max().item() for _, found, right in outcomes if found is not None)
    return "right" if far < 1e-10 else f"wrong by {far:.1e}"

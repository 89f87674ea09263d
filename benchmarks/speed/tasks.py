"""What is timed: the verbs, the sizes of their operands, and what each verb has to compute.

A size is that of a rank's part: the operand of all_gather, and so the result of reduce_scatter, its adjoint; for the
other verbs operand and result have it both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.systems.cases import ROOT

__all__ = ["ELEMENT", "SIZES", "VERBS", "WAYS", "Task", "Verb", "cotangent", "operand", "said"]

WAYS = ("forward", "backward")
SIZES = (4, 4 * 2**10, 512 * 2**10, 4 * 2**20, 32 * 2**20)
"""Bytes a rank."""
ELEMENT = 4
"""Bytes of a float32."""

Dense = Callable[[Sequence[Tensor]], list[Tensor]]


def _gathered(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(xs))] * len(xs)


def _summed_and_cut(xs: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.stack(list(xs)).sum(0).chunk(len(xs)))


def _summed(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(xs)).sum(0)] * len(xs)


def _exchanged(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([x.chunk(len(xs))[rank] for x in xs]) for rank in range(len(xs))]


def _from_root(xs: Sequence[Tensor]) -> list[Tensor]:
    return [xs[ROOT]] * len(xs)


def _onward(xs: Sequence[Tensor]) -> list[Tensor]:
    return [xs[rank - 1] for rank in range(len(xs))]


def _back(xs: Sequence[Tensor]) -> list[Tensor]:
    return [xs[(rank + 1) % len(xs)] for rank in range(len(xs))]


@dataclass(frozen=True)
class Verb:
    """A verb under the clock.

    Attributes:
        case: its name among `benchmarks.systems.cases`, by which a system says how it is called.
        forward: all ranks' results from all ranks' operands.
        backward: all ranks' gradients from all ranks' cotangents.
        rooted: whether the gradient counts at the root alone.
    """

    case: str
    forward: Dense
    backward: Dense
    rooted: bool = False


VERBS = {
    "all_gather": Verb("all_gather(dst=R)", _gathered, _summed_and_cut),
    "reduce_scatter": Verb("reduce_scatter", _summed_and_cut, _gathered),
    "all_reduce": Verb("all_reduce(dst=R)", _summed, _summed),
    "all_to_all": Verb("all_to_all", _exchanged, _exchanged),
    "broadcast": Verb("broadcast(dst=R)", _from_root, _summed, rooted=True),
    "shift": Verb("shift", _onward, _back),
}


@dataclass(frozen=True)
class Task:
    """A verb at one size on so many ranks.

    Attributes:
        verb: its name.
        ranks: how many.
        size: bytes of a rank's part. An all_to_all has at least one element for each rank.
    """

    verb: str
    ranks: int
    size: int

    @property
    def part(self) -> int:
        """The elements of a rank's part."""
        elements = max(1, self.size // ELEMENT)
        return -(-elements // self.ranks) * self.ranks if self.verb == "all_to_all" else elements

    @property
    def before(self) -> int:
        """The elements of a rank's operand."""
        return self.part * (self.ranks if self.verb == "reduce_scatter" else 1)

    @property
    def after(self) -> int:
        """The elements of a rank's result."""
        return self.part * (self.ranks if self.verb == "all_gather" else 1)

    def dense(self, way: str) -> list[Tensor]:
        """What each rank has to end up with."""
        verb, given = VERBS[self.verb], operand if way == "forward" else cotangent
        law = verb.forward if way == "forward" else verb.backward
        return law([given(self, rank) for rank in range(self.ranks)])

    def judged(self, way: str) -> tuple[int, ...]:
        """The ranks on which the result of that way counts."""
        return (ROOT,) if way == "backward" and VERBS[self.verb].rooted else tuple(range(self.ranks))


def operand(task: Task, rank: int) -> Tensor:
    """What a rank puts in: small whole numbers, which float32 adds exactly, different on every rank."""
    return _numbers(task.before, 17 * rank)


def cotangent(task: Task, rank: int) -> Tensor:
    """What comes back to a rank in backward."""
    return _numbers(task.after, 101 + 29 * rank)


def _numbers(n: int, start: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32).add_(start).remainder_(251)


def said(size: int) -> str:
    """A size in bytes as one reads it.

    >>> said(4), said(512 * 2**10), said(32 * 2**20)
    ('4 B', '512 KiB', '32 MiB')
    """
    for unit, bytes_ in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:g} {unit}"
    return f"{size} B"

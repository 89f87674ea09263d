"""What a rank calls under the clock: a forward, a backward, and both in a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from benchmarks.speed.tasks import VERBS, Task
from benchmarks.systems.system import Make, Op, Setting, System

__all__ = ["Calls", "Maker", "Place", "in_turn", "of_system"]


@dataclass(frozen=True)
class Calls:
    """What is timed.

    Attributes:
        forward: the verb; returns its result.
        backward: its adjoint; returns the gradient.
        both: one after the other, as a program runs them, with all results alive at the end.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[], Tensor]
    both: Callable[[], object]


@dataclass(frozen=True)
class Place:
    """Where the calls are made.

    Attributes:
        task: what is to be done.
        rank: this rank.
        group: its process group, or MPI's communicator.
        x: its operand, only to be read.
        cotangent: what comes back, only to be read.
    """

    task: Task
    rank: int
    group: Any
    x: Tensor
    cotangent: Tensor


Maker = Callable[[Place], Calls]


@dataclass(frozen=True)
class _Sized(Setting):
    """The setting of a system's call, at the sizes of a task."""

    task: Task

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.task.part,) * self.task.ranks

    @property
    def sends(self) -> tuple[int, ...]:
        return (self.task.part // self.task.ranks,) * self.task.ranks

    @property
    def receives(self) -> tuple[int, ...]:
        return self.sends

    @property
    def size(self) -> int:
        return self.task.ranks


def in_turn(forward: Callable[[], Tensor], backward: Callable[[], Tensor]) -> Calls:
    """Calls that know nothing of each other."""
    return Calls(forward, backward, lambda: (forward(), backward()))


def of_system(system: System) -> dict[str, Maker]:
    """How the system does each verb that it has."""
    makers = {
        name: _maker(system.verbs[verb.case]) for name, verb in VERBS.items() if verb.case in system.verbs
    }
    if "all_to_all" not in makers and "all_to_all(split_dim=1)" in system.verbs:
        makers["all_to_all"] = _maker(_from_columns(system.verbs["all_to_all(split_dim=1)"]))
    return makers


def _from_columns(make: Make) -> Make:
    """An exchange of rows from one of columns: a row of them all is split along dim 1, with no element moved."""

    def made(at: Setting) -> Op:
        op = make(at)
        return lambda x: _settled(op(x.view(1, -1))).view(-1)

    return made


def _maker(make: Make) -> Maker:
    return lambda at: _differentiated(make(_Sized(at.group, at.rank, "even", at.task)), at)


def _differentiated(op: Op, at: Place) -> Calls:
    """The op and its gradient by autograd; the graph for the backward alone is built once."""
    x, cotangent = at.x.detach().requires_grad_(), at.cotangent

    def forward() -> Tensor:
        return _settled(op(x))

    @cache
    def graph() -> Any:
        y = op(x)
        _settled(y)
        return get_gradient_edge(y)  # and not the result, whose memory may go

    def backward() -> Tensor:
        return _settled(torch.autograd.grad(graph(), x, cotangent, retain_graph=True)[0])

    def both() -> object:
        y = op(x)
        return _settled(y), _settled(torch.autograd.grad(y, x, cotangent)[0])

    return Calls(forward, backward, both)


def _settled(x: Tensor) -> Tensor:
    """`x` when it has come: functional collectives return earlier."""
    return x if type(x) is Tensor else x.wait()  # type: ignore[attr-defined]

"""What a system is to the measurement: a name, and for each case that it has a verb for, a way to make the call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.systems.cases import RANKS, ROOT, SIZES, amounts

__all__ = ["Grad", "Make", "Op", "Setting", "System", "find", "torch_grad"]

Op = Callable[[Tensor], Tensor]
Grad = Callable[[Tensor, Sequence[Tensor], bool], Sequence[Tensor]]
"""The gradients of a tensor with respect to others, with a graph or without."""


@dataclass(frozen=True)
class Setting:
    """Where a call is made, and with which sizes.

    Attributes:
        group: the ranks that take part.
        rank: this rank in the group.
        layout: "even", "uneven" or "zero".
    """

    group: dist.ProcessGroup
    rank: int
    layout: str

    @property
    def even(self) -> bool:
        """True if all sizes are equal, so that none are passed."""
        return self.layout == "even"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The ranks' sizes along dim 0."""
        return SIZES[self.layout]

    @property
    def sends(self) -> tuple[int, ...]:
        """How many rows of an all_to_all this rank sends to each rank."""
        return amounts(self.layout)[self.rank]

    @property
    def receives(self) -> tuple[int, ...]:
        """How many rows of an all_to_all this rank gets from each rank."""
        return tuple(row[self.rank] for row in amounts(self.layout))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return RANKS

    @property
    def root(self) -> int:
        """The root, as a rank of the group."""
        return ROOT

    @property
    def global_root(self) -> int:
        """The root, as a rank of the world."""
        return dist.get_global_rank(self.group, ROOT)


Make = Callable[[Setting], Op]


def torch_grad(loss: Tensor, xs: Sequence[Tensor], create_graph: bool) -> Sequence[Tensor]:
    """Plain autograd; zeros where a loss does not depend on an operand."""
    return torch.autograd.grad(loss, xs, allow_unused=True, materialize_grads=True, create_graph=create_graph)


@contextmanager
def _plainly(_case: str, _mode: str) -> Iterator[Grad]:
    yield torch_grad


@dataclass(frozen=True)
class System:
    """A system under measurement.

    Attributes:
        name: as the tables show it.
        where: "module:name" of this object, by which the ranks find it.
        verbs: how each case is called; a case that is not here does not exist in the system.
        own: the modules whose errors count as the system's own.
        assumed: what was taken for granted, for the docs.
        needs: a module without which it is left out, and the command that installs it.
        session: what a program of that case and mode runs in, and how a gradient is asked for there.
    """

    name: str
    where: str
    verbs: Mapping[str, Make]
    own: Sequence[str]
    assumed: str = ""
    needs: tuple[str, str] | None = None
    session: Callable[[str, str], AbstractContextManager[Grad]] = _plainly


def find(where: str) -> System:
    """The system of that "module:name"."""
    module, _, name = where.partition(":")
    found: System = getattr(importlib.import_module(module), name)
    return found

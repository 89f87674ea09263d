"""What is known of each tensor, kept beside it: where it came from, of what, and its mark over each axis."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradmesh._torch import is_fake, version_of
from gradmesh.call_sites import Site
from gradmesh.inference.kinds import Kind

__all__ = ["DEEPEST", "Mark", "Node", "Tape", "memory_of"]

DEEPEST = 20_000
"""How many operators a way back has, at most: a loop of training that is followed for long forgets where it began."""


class Mark(NamedTuple):
    """What a tensor is over one axis, as far as one rank can know.

    Attributes:
        kind: a type, which holds if `number` is found on every rank.
        number: what made the value, in 64 bits; 0 where the kind says nothing that ranks could compare.
    """

    kind: Kind
    number: int


@dataclass(slots=True, eq=False)
class Node:
    """One value: a tensor between two writes.

    Attributes:
        op: the operator that made it; "" for what came from outside.
        site: the line of the user's code.
        inputs: the values that it is made of.
        marks: one for each axis.
        leaf: whether it is a leaf that requires grad, and so a parameter.
        collective: whether a collective made it.
        depth: the longest way back.
        learns: whether that has a backward on this rank.
        declared: whether `assert_type` said what it is.
        shape: the tensor's.
    """

    op: str
    site: Site
    inputs: tuple[Node, ...]
    marks: tuple[Mark, ...]
    leaf: bool = False
    collective: bool = False
    depth: int = 0
    declared: bool = False
    learns: bool = False
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.depth = 1 + max((one.depth for one in self.inputs), default=0)
        if self.depth > DEEPEST:
            self.inputs, self.depth = (), 1

    def replicated(self, at: int) -> Node | None:
        """What made it R over an axis: the nearest collective, or declaration, whose gradient is summed there."""
        seen, row = {id(self)}, [self]
        for node in row:  # grows, along what is R
            if node.learns:
                return node
            for one in node.inputs:
                if one.marks[at].kind == "R" and id(one) not in seen:
                    seen.add(id(one))
                    row.append(one)
        return None

    def before(self) -> Iterator[Node]:
        """This value and all that it is made of, the nearest first."""
        seen, row = {id(self)}, [self]
        for node in row:  # grows
            yield node
            for one in node.inputs:
                if id(one) not in seen:
                    seen.add(id(one))
                    row.append(one)


class Tape:
    """The values of the tensors that are alive.

    A tensor that was written where nobody saw it, through another one of the same memory or in a kernel, has no value
    any more: its version or the writes to its memory tell.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], Node, tuple[int, ...], int]] = {}
        self._writes: dict[int, int] = {}

    def find(self, x: Tensor) -> Node | None:
        """The value of a tensor; None: there is none that is known."""
        found = self._of.get(id(x))
        if found is None or found[0]() is not x:
            return None
        _, node, versions, writes = found
        known = version_of(x) in versions and writes == self._writes.get(memory_of(x), 0)
        return node if known else None

    def keep(self, x: Tensor, node: Node, *, base: Tensor | None = None, written: bool = False) -> None:
        """Remember the value of a tensor, as long as it is alive.

        Args:
            x: the tensor.
            node: its value.
            base: what it is a view of, whose version it will have when autograd is through with it.
            written: whether it is written now, which autograd counts when it is through with it.
        """
        key, of = id(x), self._of

        def forget(ref: object) -> None:
            found = of.get(key)
            if found is not None and found[0] is ref:
                del of[key]

        version, writes = version_of(x if base is None else base), self._writes.get(memory_of(x), 0)
        versions = (version, version + 1) if written else (version,)
        of[key] = (weakref.ref(x, forget), node, versions, writes)

    def written(self, x: Tensor) -> None:
        """Note that a tensor's memory was written: what else lies there is not known any more."""
        where = memory_of(x)
        self._writes[where] = self._writes.get(where, 0) + 1

    def leaves(self) -> list[tuple[Tensor, Node]]:
        """The parameters that are alive."""
        there = [(ref(), node) for ref, node, _, _ in list(self._of.values())]
        return [(x, node) for x, node in there if x is not None and node.leaf]


def memory_of(x: Tensor) -> int:
    """Where a tensor's memory is; 0 where it has none."""
    if type(x) is not Tensor and is_fake(x):
        return 0
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0

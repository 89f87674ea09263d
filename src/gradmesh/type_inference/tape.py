"""What is known of each tensor, kept beside it: where it came from, of what, and its mark over each axis."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradmesh._torch import is_fake, version_of
from gradmesh.call_sites import Site
from gradmesh.type_inference.kinds import Kind

__all__ = ["DEEPEST", "Mark", "Node", "Patch", "Region", "Tape", "memory_of", "visible"]

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


class Region(NamedTuple):
    """Which elements of its memory a tensor is, in bytes.

    Attributes:
        first: where it begins.
        last: the last byte.
        shape: its sizes, the bytes of an element as the last one.
        stride: its strides in bytes.
        size: of an element.
    """

    first: int
    last: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, x: Tensor) -> Region:
        """That of a tensor."""
        size = x.itemsize
        first, stride = int(x.storage_offset()) * size, tuple(size * int(n) for n in x.stride())
        last = first + sum(max(0, n - 1) * by for n, by in zip(x.shape, stride, strict=True)) + size - 1
        return cls(first, last if x.numel() else first - 1, tuple(x.shape), stride, size)

    def meets(self, other: Region) -> bool:
        """Whether they may have an element in common."""
        return self.first <= other.last and other.first <= self.last

    def places(self, start: int, unit: int) -> Tensor:
        """The numbers of its elements, counted from a byte on in a unit that is not larger."""
        steps = torch.arange(self.size // unit, device="cpu")
        found = steps + (self.first - start) // unit
        for n, by in zip(reversed(self.shape), reversed(self.stride), strict=True):
            found = (torch.arange(n, device="cpu") * (by // unit)).unsqueeze(1) + found.reshape(1, -1)
        return found.reshape(-1)


def visible(mine: Region, written: Sequence[Region]) -> Tensor:
    """Which of several writes, each over those before it, each element of a region shows; -1 is what lay there before.

    >>> visible(Region.of(torch.ones(4)), [Region.of(torch.ones(2)), Region.of(torch.ones(1))]).tolist()
    [1, 0, -1, -1]
    """
    every = [mine, *written]
    start, end = min(one.first for one in every), max(one.last for one in every) + 1
    unit = math.gcd(*(n for one in every for n in (one.size, one.first - start, *one.stride)))
    latest = torch.full(((end - start + unit - 1) // unit,), -1, dtype=torch.int32, device="cpu")
    for number, one in enumerate(written):
        latest[one.places(start, unit)] = number
    return latest[mine.places(start, unit)].view(-1, mine.size // unit)[:, 0]


class Patch(NamedTuple):
    """What was written into a part of a tensor's memory through another tensor."""

    region: Region
    node: Node


@dataclass(slots=True, eq=False)
class _Kept:
    """What is known of a tensor.

    Attributes:
        ref: the tensor.
        node: its value, when it was kept.
        patches: what was written there since then, through other tensors.
        first: the least version for which this holds.
        last: the greatest one.
        writes: how many unknown writes to its memory there had been.
        memory: where it lies.
    """

    ref: weakref.ref[Tensor]
    node: Node
    patches: tuple[Patch, ...]
    first: int
    last: int
    writes: int
    memory: int


class Tape:
    """The values of the tensors that are alive.

    A write through one tensor is noted as a patch for every other one of the same memory. A tensor that was written
    outside of the tracer, or by something without a type, has no value any more: its version, or the writes to its
    memory, show it.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Kept] = {}
        self._at: dict[int, set[int]] = {}
        self._writes: dict[int, int] = {}

    def find(self, x: Tensor) -> tuple[Node, tuple[Patch, ...]] | None:
        """The value of a tensor, and what was written over it since then; None: that is not known."""
        kept = self._of.get(id(x))
        if kept is None or kept.ref() is not x or not self._holds(kept, x):
            return None
        return kept.node, kept.patches

    def _holds(self, kept: _Kept, x: Tensor) -> bool:
        return kept.first <= version_of(x) <= kept.last and kept.writes == self._writes.get(memory_of(x), 0)

    def keep(
        self,
        x: Tensor,
        node: Node,
        *,
        base: Tensor | None = None,
        written: int = 0,
        patches: tuple[Patch, ...] = (),
    ) -> None:
        """Remember the value of a tensor, as long as it is alive.

        Args:
            x: the tensor.
            node: its value.
            base: what it is a view of, whose version it will have when autograd is through with it.
            written: how often its memory is written now, which autograd counts when it is through with it.
            patches: what has been written over that value.
        """
        key, of, at, where = id(x), self._of, self._at, memory_of(x)

        def forget(ref: object) -> None:
            found = of.get(key)
            if found is not None and found.ref is ref:
                del of[key]
                at[found.memory].discard(key)
                if not at[found.memory]:
                    del at[found.memory]

        before = of.get(key)
        if before is not None and before.memory != where:
            at[before.memory].discard(key)
            if not at[before.memory]:
                del at[before.memory]
        version = version_of(x if base is None else base)
        writes = self._writes.get(where, 0)
        of[key] = _Kept(weakref.ref(x, forget), node, patches, version, version + written, writes, where)
        at.setdefault(where, set()).add(key)

    def wrote(self, x: Tensor, node: Node, times: int = 1) -> None:
        """Note what has just been written through a tensor: it is the value of that tensor, and a patch of others.

        Args:
            x: the tensor.
            node: what it is now.
            times: how often the operator writes to this memory, which autograd counts when it is through with it.
        """
        where = memory_of(x)
        if where:
            patch = Patch(Region.of(x), node)
            for key in self._at.get(where, set()) - {id(x)}:
                kept = self._of[key]
                other = kept.ref()
                if other is None or not self._holds(kept, other):
                    continue
                kept.last = max(kept.last, version_of(other) + times)
                if Region.of(other).meets(patch.region):
                    before = tuple(one for one in kept.patches if one.region != patch.region)
                    kept.patches = (*before, patch)
        self.keep(x, node, written=times)

    def written(self, x: Tensor) -> None:
        """Note that a tensor's memory was written by what has no type: what lies there is not known any more."""
        where = memory_of(x)
        self._writes[where] = self._writes.get(where, 0) + 1

    def leaves(self) -> list[tuple[Tensor, Node]]:
        """The parameters that are alive."""
        there = [(kept.ref(), kept.node) for kept in list(self._of.values())]
        return [(x, node) for x, node in there if x is not None and node.leaf]


def memory_of(x: Tensor) -> int:
    """Where a tensor's memory is; 0 where it has none."""
    if type(x) is not Tensor and is_fake(x):
        return 0
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0

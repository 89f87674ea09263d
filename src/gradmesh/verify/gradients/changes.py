"""Modifications of one collective's gradient in a run.

A change modifies the gradient that a graph node returns, on every rank; or, for a torch.distributed collective outside
of Functions, the gradient of the tensor that it wrote.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh._util.call_sites import show_site
from gradmesh.verify.gradients.calls import Called, Change, Node
from gradmesh.verify.gradients.measure import exchanged

__all__ = ["CONJ", "DOUBLE", "GATHERED", "NEXT", "PART", "SUM", "At", "Local", "Place", "Places", "raw_text"]

DOUBLE = "doubled"
SUM = "summed over the ranks"
NEXT = "replaced by that of rank r + {by}"
PART = "replaced by the local slice of the sum over ranks of its incoming gradient"
CONJ = "conjugated"
GATHERED = "reduce-scattered to the ranks that it was gathered from"


@dataclass(frozen=True)
class Place:
    """A collective of the program: its name and call site, and its index among equal ones."""

    text: str
    occurrence: int


@dataclass(frozen=True)
class Local:
    """The gradient that a gather returned on this rank, and its replacement.

    Attributes:
        got: the returned gradient.
        want: the local slice of the sum over ranks of the incoming gradients.
        terms: the local slice of each rank's incoming gradient.
    """

    got: Tensor
    want: Tensor
    terms: Tensor


class Places:
    """Counts nodes and calls with the same text."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def of(self, text: str) -> Place:
        """The next place with that text."""
        self._seen[text] += 1
        return Place(text, self._seen[text])


def raw_text(called: Called) -> str:
    """The name and call site of a torch.distributed collective."""
    return f"{called.op} {show_site(called.site)}"


class At(Change):
    """A change at one place."""

    def __init__(self, place: Place, how: str, only: int | None) -> None:
        self.place, self.how, self.only = place, how, only
        self._nodes, self._raw = Places(), Places()
        self.local: Local | None = None
        self._gathered: tuple[list[Tensor], Tensor] | None = None

    def node(self, node: Node) -> None:
        """Hook the node if it is at the place."""
        if self._nodes.of(node.text) == self.place and self.only in (None, dist.get_rank()):
            node.node.register_hook(self._changed)

    def returned(self, called: Called) -> None:
        """Hook the collective's output if it is at the place."""
        if self._raw.of(raw_text(called)) != self.place:
            return
        handed = called.tensors
        if self.how == SUM and isinstance(x := handed.get("tensor"), Tensor):
            if x.requires_grad:
                x.register_hook(_summed)
            return
        source = handed.get("origin")
        outputs = handed.get("tensor_list", handed.get("output_tensor"))
        if isinstance(source, Tensor) and outputs is not None:
            listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            for x in listed:
                if not x.requires_grad and (x.is_floating_point() or x.is_complex()):
                    x.requires_grad_()
            self._gathered = listed, source

    def after(self) -> None:
        """Reduce-scatter the gradients of gathered tensors to their source ranks."""
        if self._gathered is None:
            return
        outputs, source = self._gathered
        arrived = [torch.zeros_like(x) if x.grad is None else x.grad for x in outputs]
        parts = arrived if len(arrived) > 1 else list(arrived[0].chunk(dist.get_world_size()))
        sent = [_summed(part) for part in parts]
        if source.requires_grad:
            source.backward(sent[dist.get_rank()].reshape(source.shape))

    def _changed(self, given_back: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> Any:
        if self.how == PART:
            mine = next((g for g in given_back if g is not None), None)
            terms = _parts(mine, [g for g in given if g is not None])
            if mine is None or terms is None:
                return None
            self.local = Local(mine.detach().clone(), terms.sum(0), terms)
            return tuple(self.local.want.clone() if g is mine else g for g in given_back)
        if self.how not in (DOUBLE, CONJ) and not _alike(given_back):
            return None
        if self.how not in (DOUBLE, CONJ, SUM):
            by = int("".join(c for c in self.how if c.isdigit()))
            everyones = exchanged([None if g is None else g.detach() for g in given_back])
            theirs = everyones[(dist.get_rank() + by) % len(everyones)]
            return tuple(theirs)
        how = {DOUBLE: lambda g: 2 * g, CONJ: lambda g: g.conj().resolve_conj(), SUM: _summed}[self.how]
        return tuple(None if g is None else how(g) for g in given_back)


def _summed(grad: Tensor) -> Tensor:
    total = grad.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _alike(grads: tuple[Tensor | None, ...]) -> bool:
    """Whether the gradients have the same shapes on every rank, so that they can be summed."""
    shapes = exchanged([None if g is None else tuple(g.shape) for g in grads])
    return all(shape == shapes[0] for shape in shapes)


def _parts(mine: Tensor | None, given: list[Tensor]) -> Tensor | None:
    """The local slice of each rank's incoming gradient, stacked; None if the op is not a gather.

    Args:
        mine: the returned gradient, which has the shape of the local shard.
        given: the incoming gradients: one full tensor, or one tensor per rank.
    """
    received = exchanged((None if mine is None else tuple(mine.shape), [g.detach() for g in given]))
    shapes = [shape for shape, _ in received]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if mine is None or any(shape is None or not wholes for shape, wholes in received):
        return None
    if len(given) == ranks > 1:
        return (
            torch.stack([wholes[rank] for _, wholes in received]) if given[rank].shape == mine.shape else None
        )
    wholes = [wholes[0] for _, wholes in received]
    if len({whole.shape for whole in wholes}) > 1:
        return None
    if wholes[0].shape == (ranks, *mine.shape):
        return torch.stack([whole[rank] for whole in wholes])
    for dim in range(mine.dim()):
        if _joins(shapes, wholes[0].shape, dim):
            sizes = [shape[dim] for shape in shapes]
            return torch.stack([whole.narrow(dim, sum(sizes[:rank]), sizes[rank]) for whole in wholes])
    return None


def _joins(parts: list[tuple[int, ...]], whole: torch.Size, dim: int) -> bool:
    """Whether concatenating the ranks' shards along a dimension gives the full shape."""
    first = parts[0]
    if len(first) != len(whole) or any(len(part) != len(first) for part in parts):
        return False
    return (*first[:dim], sum(part[dim] for part in parts), *first[dim + 1 :]) == tuple(whole)
